// Package gotool builds programs that are Go modules of their own, such as nfpm and
// staticcheck, for tests and for what makes packages. They are no dependencies of the
// product.
package gotool

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// A Program is a program of a module.
type Program struct {
	Module  string // such as "honnef.co/go/tools"
	Version string // such as "v0.8.2"
	Package string // in the module, such as "./cmd/staticcheck"; "." for the module itself
}

// Name returns the file name of the program.
func (p Program) Name() string {
	if p.Package == "." {
		return filepath.Base(p.Module)
	}
	return filepath.Base(p.Package)
}

// Path returns where Build puts the program in a directory.
func (p Program) Path(dir string) string {
	return filepath.Join(dir, p.Name()+"-"+p.Version, p.Name())
}

// Built reports whether the program is in a directory already.
func (p Program) Built(dir string) bool {
	_, err := os.Stat(p.Path(dir))
	return err == nil
}

// Build builds the program into a directory, if it is not there yet, and returns its path. It uses
// the network only for what Go's module cache has not; go install asks for the version each time.
func (p Program) Build(ctx context.Context, dir string) (string, error) {
	path, err := filepath.Abs(p.Path(dir))
	if err != nil {
		return "", err
	}
	if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
		return path, err
	}
	source, err := Source(ctx, p.Module, p.Version)
	if err != nil {
		return "", err
	}
	fmt.Fprintln(os.Stderr, "building", p.Name(), p.Version)
	c := exec.CommandContext(ctx, "go", "build", "-mod=readonly", "-buildvcs=false", "-trimpath", "-o", path, p.Package)
	c.Dir, c.Env = source, append(os.Environ(), "CGO_ENABLED=0")
	if out, err := c.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build %s %s: %s", p.Name(), p.Version, lastLine(string(out), err))
	}
	return path, nil
}

// Source returns the directory with the source of a module, which it downloads if Go's module cache has
// it not.
func Source(ctx context.Context, module, version string) (string, error) {
	c := exec.CommandContext(ctx, "go", "mod", "download", "-json", module+"@"+version)
	out, err := c.Output()
	var at struct{ Dir, Error string }
	if e := json.Unmarshal(out, &at); e != nil && err == nil {
		err = e
	}
	if err != nil || at.Error != "" {
		return "", fmt.Errorf("download %s@%s: %s", module, version, lastLine(at.Error, err))
	}
	return at.Dir, nil
}

// lastLine returns the last line of a text, and if it has none, what the error says.
func lastLine(text string, err error) string {
	text = strings.TrimSpace(text)
	if text == "" {
		return err.Error()
	}
	return text[strings.LastIndexByte(text, '\n')+1:]
}
