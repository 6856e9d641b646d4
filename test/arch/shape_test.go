package arch

import (
	"go/ast"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"ipoibcm/ipoib"
)

// Limits that only ever fall. Who makes a long line short or a long function two
// lowers them.
const (
	longLine      = 120 // characters, a tab is one
	longLinesRate = 2   // per 1,000 lines
	longFunction  = 70  // lines
	longFunctions = 7
)

// TestLongLines counts the lines of Go files that no screen beside another shows whole.
func TestLongLines(t *testing.T) {
	all := read(t)
	lines, long := 0, map[string]int{}
	for name := range all.sources {
		b, err := os.ReadFile(filepath.Join(root, filepath.FromSlash(name)))
		if err != nil {
			t.Fatal(err)
		}
		for l := range strings.Lines(string(b)) {
			lines++
			if utf8.RuneCountInString(strings.TrimRight(l, "\n")) > longLine {
				long[filepath.ToSlash(filepath.Dir(name))]++
			}
		}
	}
	sum, most := 0, ""
	for dir, n := range long {
		sum += n
		if n > long[most] {
			most = dir
		}
	}
	t.Logf("%d of %d lines are longer than %d characters; most in %s, %d", sum, lines, longLine, most, long[most])
	if limit := lines * longLinesRate / 1000; sum > limit {
		t.Errorf("%d lines are longer than %d characters, want at most %d", sum, longLine, limit)
	}
	if longLinesRate > 2 && sum < lines*(longLinesRate-1)/1000 {
		t.Logf("%d lines are longer than %d characters: lower longLinesRate", sum, longLine)
	}
}

// TestLongFunctions counts the functions that are longer than a reader keeps in mind.
func TestLongFunctions(t *testing.T) {
	all := read(t)
	var long []string
	for name, f := range all.sources {
		for _, d := range f.Decls {
			if d, ok := d.(*ast.FuncDecl); ok {
				if n := all.fset.Position(d.End()).Line - all.fset.Position(d.Pos()).Line + 1; n > longFunction {
					long = append(long, name+": "+d.Name.Name)
				}
			}
		}
	}
	slices.Sort(long)
	if len(long) > longFunctions {
		t.Errorf("%d functions are longer than %d lines, want at most %d:\n%s", len(long), longFunction,
			longFunctions, strings.Join(long, "\n"))
	}
	if len(long) < longFunctions-6 {
		t.Logf("%d functions are longer than %d lines: lower longFunctions", len(long), longFunction)
	}
}

// TestExportedNamesAreExplained: a comment of its own, one for its group, or one above
// in its group that names it.
func TestExportedNamesAreExplained(t *testing.T) {
	all := read(t)
	for name, f := range all.sources {
		if f.Name.Name == "main" || strings.HasSuffix(name, "_test.go") {
			continue
		}
		for _, missing := range unexplained(f) {
			t.Errorf("%s: %s has no comment", name, missing)
		}
	}
}

// obvious are methods of interfaces that everybody knows.
var obvious = []string{"Error", "Unwrap"}

// unexplained returns the exported names of f that no comment explains.
func unexplained(f *ast.File) (names []string) {
	for _, d := range f.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			method := d.Recv != nil
			if !d.Name.IsExported() || d.Doc != nil || method && !ast.IsExported(receiver(d)) ||
				method && slices.Contains(obvious, d.Name.Name) {
				continue
			}
			names = append(names, d.Name.Name)
		case *ast.GenDecl:
			if d.Doc == nil {
				names = append(names, unexplainedSpecs(d.Specs)...)
			}
		}
	}
	return names
}

func unexplainedSpecs(specs []ast.Spec) (names []string) {
	said := ""
	for _, s := range specs {
		var ids []*ast.Ident
		explained := false
		switch s := s.(type) {
		case *ast.TypeSpec:
			ids, explained = []*ast.Ident{s.Name}, s.Doc != nil || s.Comment != nil
			said += s.Doc.Text()
		case *ast.ValueSpec:
			ids, explained = s.Names, s.Doc != nil || s.Comment != nil
			said += s.Doc.Text()
		}
		for _, id := range ids {
			if id.IsExported() && !explained && !regexp.MustCompile(`\b`+id.Name+`\b`).MatchString(said) {
				names = append(names, id.Name)
			}
		}
	}
	return names
}

// TestUnexplainedIsSeen keeps the rule from finding nothing.
func TestUnexplainedIsSeen(t *testing.T) {
	const src = `package p
func Bare() {}
// Said is said.
func Said() {}
type t struct{}
func (t) Hidden() {}
type (
	// A and B are twins.
	A int
	B int
	C int
)
var (
	D = 1 // of course
	E = 2
)
`
	got := strings.Join(unexplained(parse(t, src)), " ")
	if want := "Bare C E"; got != want {
		t.Errorf("unexplained are %q, want %q", got, want)
	}
}

// maxFields bounds the state that the machine of an interface keeps in one heap: what
// belongs together is a struct of its own.
const maxFields = 30

// TestFewFields counts the fields of the machine of an interface.
func TestFewFields(t *testing.T) {
	if n := reflect.TypeFor[ipoib.Interface]().NumField(); n > maxFields {
		t.Errorf("ipoib.Interface has %d fields, want at most %d", n, maxFields)
	}
}
