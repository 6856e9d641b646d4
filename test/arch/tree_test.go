package arch

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
)

// root is the directory of the repository.
var root = filepath.Join("..", "..")

// A line is one line of what people read: of a Markdown file, or of a comment.
type line struct {
	where string // file:line
	dir   string // directory of the file
	text  string
	code  bool // within a block of code
}

// A tree is what the repository says about itself.
type tree struct {
	files    map[string]bool            // every file and directory, slashes
	sources  map[string]*ast.File       // Go files
	fset     *token.FileSet             //
	comments []line                     // of Go files
	docs     []line                     // of Markdown files
	names    map[string]map[string]bool // directory: names declared there, methods as Type.Method, fields too
	tests    map[string]bool            // Test, Fuzz, Benchmark and Example functions of all packages
}

// repository reads the tree once.
var repository = sync.OnceValues(func() (*tree, error) {
	t := &tree{files: map[string]bool{".": true}, sources: map[string]*ast.File{}, fset: token.NewFileSet(),
		names: map[string]map[string]bool{}, tests: map[string]bool{}}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(root, path)
		rel = filepath.ToSlash(rel)
		switch {
		case d.IsDir() && (rel == ".git" || rel == ".cache" || rel == "bin" || strings.HasSuffix(rel, "testdata/fuzz")):
			return filepath.SkipDir
		case strings.HasSuffix(rel, ".go"):
			err = t.goFile(path, rel)
		case strings.HasSuffix(rel, ".md"):
			err = t.markdown(path, rel)
		}
		t.files[rel] = true
		return err
	})
	return t, err
})

// read returns the tree of the repository.
func read(t *testing.T) *tree {
	t.Helper()
	all, err := repository()
	if err != nil {
		t.Fatal(err)
	}
	if len(all.sources) < 100 || len(all.docs) < 500 {
		t.Fatalf("the tree has %d Go files and %d lines of Markdown", len(all.sources), len(all.docs))
	}
	return all
}

// goFile adds the comments and names of a Go file.
func (t *tree) goFile(path, rel string) error {
	f, err := parser.ParseFile(t.fset, path, nil, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return err
	}
	t.sources[rel] = f
	dir := filepath.ToSlash(filepath.Dir(rel))
	for _, g := range f.Comments {
		for _, c := range g.List {
			at := t.fset.Position(c.Pos()).Line
			for i, s := range strings.Split(c.Text, "\n") {
				t.comments = append(t.comments, line{where: fmt.Sprintf("%s:%d", rel, at+i), dir: dir, text: s})
			}
		}
	}
	if t.names[dir] == nil {
		t.names[dir] = map[string]bool{}
	}
	ast.Inspect(f, func(n ast.Node) bool { return t.declared(t.names[dir], n) })
	return nil
}

// declared notes the names that n declares, and says whether to look below it.
func (t *tree) declared(names map[string]bool, n ast.Node) bool {
	switch n := n.(type) {
	case *ast.FuncDecl:
		names[n.Name.Name] = true
		if n.Recv != nil {
			names[receiver(n)+"."+n.Name.Name] = true
		} else if isTestName(n.Name.Name) {
			t.tests[n.Name.Name] = true
		}
	case *ast.TypeSpec:
		names[n.Name.Name] = true
		fields(names, n.Name.Name, n.Type)
	case *ast.ValueSpec:
		for _, id := range n.Names {
			names[id.Name] = true
		}
	}
	return true
}

// fields notes the fields and methods of a type.
func fields(names map[string]bool, of string, typ ast.Expr) {
	var list *ast.FieldList
	switch typ := typ.(type) {
	case *ast.StructType:
		list = typ.Fields
	case *ast.InterfaceType:
		list = typ.Methods
	default:
		return
	}
	for _, f := range list.List {
		for _, id := range f.Names {
			names[id.Name], names[of+"."+id.Name] = true, true
		}
	}
}

// receiver returns the name of the type that has method f.
func receiver(f *ast.FuncDecl) string {
	typ := f.Recv.List[0].Type
	if s, ok := typ.(*ast.StarExpr); ok {
		typ = s.X
	}
	if i, ok := typ.(*ast.IndexExpr); ok {
		typ = i.X
	}
	if id, ok := typ.(*ast.Ident); ok {
		return id.Name
	}
	return ""
}

func isTestName(s string) bool {
	return slices.ContainsFunc([]string{"Test", "Fuzz", "Benchmark", "Example"},
		func(p string) bool { return strings.HasPrefix(s, p) })
}

// markdown adds the lines of a Markdown file.
func (t *tree) markdown(path, rel string) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	code := false
	for i, s := range strings.Split(string(b), "\n") {
		fence := strings.HasPrefix(strings.TrimSpace(s), "```")
		t.docs = append(t.docs, line{fmt.Sprintf("%s:%d", rel, i+1), filepath.ToSlash(filepath.Dir(rel)), s, code || fence})
		if fence {
			code = !code
		}
	}
	return nil
}

// parse reads the source of a file.
func parse(t *testing.T, src string) *ast.File {
	t.Helper()
	f, err := parser.ParseFile(token.NewFileSet(), "p.go", src, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	return f
}
