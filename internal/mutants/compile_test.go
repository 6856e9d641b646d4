package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"ipoibcm/internal/long"
)

// A compiled package is what go list says of it.
type compiled struct {
	Dir, ImportPath, Export string
	GoFiles                 []string
	Module                  *struct{ Main bool }
}

// A checker checks the types of packages of the module against the export data of all others.
type checker struct {
	fset   *token.FileSet
	deps   types.Importer
	byDir  map[string]*compiled // packages of the module, by their directories below its root
	parsed map[string]*ast.File
}

func newChecker(t *testing.T) *checker {
	t.Helper()
	cmd := exec.Command("go", "list", "-export", "-deps", "-json=Dir,ImportPath,Export,GoFiles,Module", "./...")
	cmd.Dir, cmd.Stderr = root, os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	top, err := filepath.Abs(root)
	if err != nil {
		t.Fatal(err)
	}
	c := &checker{fset: token.NewFileSet(), byDir: map[string]*compiled{}, parsed: map[string]*ast.File{}}
	exports := map[string]string{}
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		var p compiled
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		exports[p.ImportPath] = p.Export
		if p.Module != nil && p.Module.Main {
			dir, err := filepath.Rel(top, p.Dir)
			if err != nil {
				t.Fatal(err)
			}
			c.byDir[dir] = &p
		}
	}
	c.deps = importer.ForCompiler(c.fset, "gc", func(path string) (io.ReadCloser, error) {
		if exports[path] == "" {
			return nil, fmt.Errorf("no export data of %s", path)
		}
		return os.Open(exports[path])
	})
	return c
}

// check checks the types of the package in dir, with files in the place of those that have their names.
func (c *checker) check(dir string, files map[string]string) error {
	p := c.byDir[dir]
	if p == nil {
		return fmt.Errorf("no package in %s", dir)
	}
	var syntax []*ast.File
	for _, name := range p.GoFiles {
		path := filepath.Join(dir, name)
		f := c.parsed[path]
		if text, changed := files[path]; changed || f == nil {
			var err error
			if changed {
				f, err = parser.ParseFile(c.fset, path, text, parser.SkipObjectResolution)
			} else {
				f, err = parser.ParseFile(c.fset, filepath.Join(root, path), nil, parser.SkipObjectResolution)
				c.parsed[path] = f
			}
			if err != nil {
				return err
			}
		}
		syntax = append(syntax, f)
	}
	conf := types.Config{Importer: c.deps, FakeImportC: true}
	_, err := conf.Check(p.ImportPath, c.fset, syntax, nil)
	return err
}

// Every mutant compiles: one that does not breaks nothing, and nobody would know before make mutants. The short
// form looks at one of sixteen.
func TestCompile(t *testing.T) {
	long.OneGoroutine(t)
	c := newChecker(t)
	every := long.Of(16, 1)
	first := rand.IntN(every)
	for i, m := range repository(t) {
		if i%every != first {
			continue
		}
		files, dirs := map[string]string{}, []string{}
		for _, e := range m.edits {
			text, changed := files[e.file]
			if !changed {
				b, err := os.ReadFile(filepath.Join(root, e.file))
				if err != nil {
					t.Fatal(err)
				}
				text = string(b)
			}
			files[e.file] = strings.Replace(text, e.old, e.new, 1)
			if dir := filepath.Dir(e.file); !slices.Contains(dirs, dir) {
				dirs = append(dirs, dir)
			}
		}
		for _, dir := range dirs {
			if err := c.check(dir, files); err != nil {
				t.Errorf("%s (%s): %v", m.name, m.area, err)
			}
		}
	}
}
