// Package mutant shows that tests can fail. It builds the tests of a package
// together with changes to the source, each of which takes one behaviour away
// when it is named and does nothing otherwise. Nothing is written into the tree:
// the go command reads the changed files from elsewhere.
//
// It is for tests.
package mutant

import (
	"bytes"
	"encoding/json"
	"fmt"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// A Change takes a behaviour away. Where several have one Name they go together.
type Change struct {
	Name string
	File string // in the module: "cm/end.go"
	Old  string // occurs once in File
	// New stands there instead. OFF in it is a condition that holds while Name is
	// taken away, and either(OFF, a, b) is a until then and b from then on.
	New string
}

// support is what the changed files of a package may use.
const support = `package %s

import "os"

var mutantName = os.Getenv(%q)

func either[T any](gone bool, with, without T) T {
	if gone {
		return without
	}
	return with
}
`

// A Binary is the tests of a package with changes that are dormant.
type Binary struct {
	path, dir string
	tb        testing.TB
}

// variable says which change is awake.
const variable = "IPOIBCM_WITHOUT"

// Build makes the tests of the package in directory dir of the module. It skips
// the test where there is no Go to build with, and under the race detector,
// which would only do the same again.
func Build(tb testing.TB, dir string, changes []Change) *Binary {
	tb.Helper()
	if raceDetector {
		tb.Skip("is run without the race detector")
	}
	if _, err := exec.LookPath("go"); err != nil {
		tb.Skip("needs the go command to build the tests with changes")
	}
	out, err := exec.Command("go", "env", "GOMOD").Output()
	if err != nil {
		tb.Fatalf("go env: %v", err)
	}
	root, tmp := filepath.Dir(strings.TrimSpace(string(out))), tb.TempDir()
	replace := map[string]string{}
	put := func(file, text string) {
		at := filepath.Join(tmp, strconv.Itoa(len(replace))+".go")
		if err := os.WriteFile(at, []byte(text), 0o600); err != nil {
			tb.Fatal(err)
		}
		replace[filepath.Join(root, file)] = at
	}
	files, err := apply(changes, func(name string) ([]byte, error) { return os.ReadFile(filepath.Join(root, name)) })
	if err != nil {
		tb.Fatal(err)
	}
	for _, f := range slices.Sorted(maps.Keys(files)) {
		put(f, files[f])
	}
	overlay := filepath.Join(tmp, "overlay.json")
	b, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		tb.Fatal(err)
	}
	if err := os.WriteFile(overlay, b, 0o600); err != nil {
		tb.Fatal(err)
	}
	bin := filepath.Join(tmp, "tests")
	cmd := exec.Command("go", "test", "-c", "-vet=off", "-overlay", overlay, "-o", bin, "./"+dir)
	cmd.Dir = root
	if out, err := cmd.CombinedOutput(); err != nil {
		tb.Fatalf("build: %v\n%s", err, out)
	}
	return &Binary{path: bin, dir: filepath.Join(root, dir), tb: tb}
}

// apply returns the text of every file that changes, and of the one that each
// package gets besides.
func apply(changes []Change, read func(string) ([]byte, error)) (map[string]string, error) {
	files := map[string]string{}
	for _, c := range changes {
		text, ok := files[c.File]
		if !ok {
			b, err := read(c.File)
			if err != nil {
				return nil, err
			}
			text = string(b)
			f, err := parser.ParseFile(token.NewFileSet(), c.File, b, parser.PackageClauseOnly)
			if err != nil {
				return nil, err
			}
			files[filepath.Join(filepath.Dir(c.File), "zz_without.go")] = fmt.Sprintf(
				support, f.Name.Name, variable)
		}
		if n := strings.Count(text, c.Old); n != 1 {
			return nil, fmt.Errorf("%s: %d times in %s, want once: %q; the code has moved on, and so must the change",
				c.Name, n, c.File, c.Old)
		}
		files[c.File] = strings.Replace(text, c.Old, strings.ReplaceAll(c.New, "OFF", fmt.Sprintf("(mutantName == %q)", c.Name)), 1)
	}
	return files, nil
}

// Run runs the tests that match pattern without the named behaviour; an empty
// name takes nothing away. It reports whether they passed, and what they said.
func (b *Binary) Run(name, pattern string) (passed bool, output string) {
	b.tb.Helper()
	cmd := exec.Command(b.path, "-test.run", pattern, "-test.timeout", "1m", "-test.failfast")
	cmd.Dir = b.dir
	cmd.Env = append(os.Environ(), variable+"="+name)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	if strings.Contains(out.String(), "no tests to run") {
		b.tb.Fatalf("no test matches %s", pattern)
	}
	if err != nil && !strings.Contains(out.String(), "--- FAIL") {
		b.tb.Fatalf("the tests did not run: %v\n%s", err, out.String())
	}
	return err == nil, out.String()
}

// Said returns the lines of a failing run that say what was wrong, n at most.
func Said(output string, n int) string {
	var lines []string
	for l := range strings.Lines(output) {
		if strings.Contains(l, "_test.go:") && len(lines) < n {
			lines = append(lines, strings.TrimSpace(l))
		}
	}
	return strings.Join(lines, "\n")
}
