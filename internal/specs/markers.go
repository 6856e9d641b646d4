package main

import (
	"cmp"
	"fmt"
	"go/ast"
	"go/build"
	"go/parser"
	"go/token"
	"go/types"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

var rowID = regexp.MustCompile(`\b(?:[0-9]{4}|V2)-R?[0-9]+(?:\.[0-9]+)*-[0-9]+\b`)

// built is the system that the tests are built for, with no build tag set.
var built = func() build.Context {
	c := build.Default
	c.GOOS, c.GOARCH, c.CgoEnabled, c.BuildTags = "linux", "amd64", true, nil
	return c
}()

// A decl is one declaration at the top level of a test file.
type decl struct {
	test string          // "dir.TestName" of a test or fuzz function, "" for a helper or a table
	uses map[string]bool // every identifier in it, which may be another declaration
	rows []string        // rows that comments in it or above it name
	// first and last are its lines, with the comment above it.
	first, last int
}

// A testPackage holds the declarations in the test files of one package, by name.
// The name of a method does not include its type. One name may therefore have methods of
// several types.
type testPackage map[string][]*decl

// A showing is the tests that show one row, by name.
type showing struct {
	direct  []string // tests that name the row themselves
	through []string // tests whose helper or table names it
}

// all returns all tests, beginning with those that name the row themselves.
func (s showing) all() []string { return slices.Concat(s.direct, s.through) }

// A marker is a row that is named where it shows nothing.
type marker struct{ where, id string }

// A scanner collects the rows that the test files of a tree name.
type scanner struct {
	known    func(id string) bool // reports whether the text that id belongs to has a table
	packages map[string]testPackage
	stray    []marker
}

// scan returns the tests that show each row, as "dir.TestName", and the rows
// that are named where no test runs.
//
// A test shows a row if a comment names the row in the test function or above
// it, or in a helper or a table that the function uses, directly or through
// others of the same package's test files. Tests and fuzz functions count:
// "go test" runs both. Benchmarks do not, nor do files that it does not build.
func scan(root string, known func(id string) bool) (map[string]showing, []marker, error) {
	s := scanner{known: known, packages: map[string]testPackage{}}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && path != root && (strings.HasPrefix(d.Name(), ".") || d.Name() == "bin"):
			return filepath.SkipDir
		case strings.HasSuffix(path, "_test.go"):
			return s.file(path)
		case strings.HasSuffix(path, ".txt") && strings.Contains(filepath.ToSlash(path), "testdata/"):
			return s.script(path)
		}
		return nil
	})
	shown := map[string]showing{}
	for _, p := range s.packages {
		s.reach(p, shown)
	}
	for _, by := range shown {
		slices.Sort(by.direct)
		slices.Sort(by.through)
	}
	slices.SortFunc(s.stray, func(a, b marker) int { return strings.Compare(a.where+a.id, b.where+b.id) })
	return shown, s.stray, err
}

// script looks for rows in a table or packet script, where they do not count because
// nothing says which test reads the file.
func (s *scanner) script(path string) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	for _, id := range rowID.FindAllString(string(b), -1) {
		if s.known(id) {
			s.stray = append(s.stray, marker{filepath.ToSlash(path), id})
		}
	}
	return nil
}

// file takes in one test file.
func (s *scanner) file(name string) error {
	set := token.NewFileSet()
	f, err := parser.ParseFile(set, name, nil, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return err
	}
	dir := filepath.ToSlash(filepath.Dir(name))
	key := dir + " " + f.Name.Name // "foo" and "foo_test" see different names
	p := s.packages[key]
	if p == nil {
		p = testPackage{}
		s.packages[key] = p
	}
	runs, err := built.MatchFile(filepath.Dir(name), filepath.Base(name))
	if err != nil {
		return err
	}
	var all []*decl
	if runs {
		all = declare(p, set, dir, f)
	}
	for _, group := range f.Comments {
		for _, c := range group.List {
			line := set.Position(c.Pos()).Line
			for _, id := range rowID.FindAllString(c.Text, -1) {
				s.mark(all, id, line, fmt.Sprintf("%s:%d", filepath.ToSlash(name), line))
			}
		}
	}
	return nil
}

// mark adds row id to the declarations that include the line. Without one it is stray.
func (s *scanner) mark(all []*decl, id string, line int, where string) {
	if !s.known(id) {
		return // a date, or a number of another text
	}
	found := false
	for _, d := range all {
		if line >= d.first && line <= d.last {
			found = true
			d.rows = append(d.rows, id)
		}
	}
	if !found {
		s.stray = append(s.stray, marker{where, id})
	}
}

// declare adds the declarations of f to p and returns them.
func declare(p testPackage, set *token.FileSet, dir string, f *ast.File) (all []*decl) {
	add := func(name, test string, n ast.Node, doc *ast.CommentGroup) {
		d := &decl{test: test, uses: map[string]bool{}}
		d.first, d.last = set.Position(n.Pos()).Line, set.Position(n.End()).Line
		if doc != nil {
			d.first = min(d.first, set.Position(doc.Pos()).Line)
		}
		ast.Inspect(n, func(n ast.Node) bool {
			if id, ok := n.(*ast.Ident); ok {
				d.uses[id.Name] = true
			}
			return true
		})
		p[name] = append(p[name], d)
		all = append(all, d)
	}
	for _, top := range f.Decls {
		switch top := top.(type) {
		case *ast.FuncDecl:
			test := ""
			if isTest(top) {
				test = dir + "." + top.Name.Name
			}
			add(top.Name.Name, test, top, top.Doc)
		case *ast.GenDecl:
			for _, spec := range top.Specs {
				doc := top.Doc
				if len(top.Specs) > 1 {
					doc = nil // a comment above a group is about none of its specs
				}
				switch spec := spec.(type) {
				case *ast.ValueSpec:
					for _, name := range spec.Names {
						add(name.Name, "", spec, cmp.Or(spec.Doc, doc))
					}
				case *ast.TypeSpec:
					add(spec.Name.Name, "", spec, cmp.Or(spec.Doc, doc))
				}
			}
		}
	}
	return all
}

// isTest reports whether "go test" runs f: a test or a fuzz function.
func isTest(f *ast.FuncDecl) bool {
	if f.Recv != nil || f.Type.Params.NumFields() != 1 {
		return false
	}
	parameter := types.ExprString(f.Type.Params.List[0].Type)
	for prefix, want := range map[string]string{"Test": ".T", "Fuzz": ".F"} {
		rest, ok := strings.CutPrefix(f.Name.Name, prefix)
		first, _ := utf8.DecodeRuneInString(rest)
		if ok && parameter[0] == '*' && strings.HasSuffix(parameter, want) && !unicode.IsLower(first) {
			return true
		}
	}
	return false
}

// reach adds every test of p to shown, at each row that the test names itself, or that a
// helper or table names which the test uses. If no test uses a helper or table, the rows
// that it names are stray.
func (s *scanner) reach(p testPackage, shown map[string]showing) {
	ran := map[*decl]bool{}
	for _, decls := range p {
		for _, test := range decls {
			if test.test == "" {
				continue
			}
			seen := map[*decl]bool{}
			follow(p, test, seen)
			through := map[string]bool{}
			for d := range seen {
				ran[d] = true
				for _, id := range d.rows {
					through[id] = true
				}
			}
			for id := range through {
				by := shown[id]
				if slices.Contains(test.rows, id) {
					by.direct = append(by.direct, test.test)
				} else {
					by.through = append(by.through, test.test)
				}
				shown[id] = by
			}
		}
	}
	for name, decls := range p {
		for _, d := range decls {
			for _, id := range d.rows {
				if !ran[d] {
					s.stray = append(s.stray, marker{name + ", which no test uses,", id})
				}
			}
		}
	}
}

// follow adds d to seen, and the declarations that d uses, directly or through others, but no other test.
func follow(p testPackage, d *decl, seen map[*decl]bool) {
	if seen[d] {
		return
	}
	seen[d] = true
	for name := range d.uses {
		for _, next := range p[name] {
			if next.test == "" { // a test that this one calls shows its rows itself
				follow(p, next, seen)
			}
		}
	}
}
