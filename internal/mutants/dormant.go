package main

import (
	"bytes"
	"cmp"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"slices"
	"strings"
)

// variable is the environment variable that holds the number of the mutant that is awake.
const variable = "IPOIBCM_MUTANT"

// support is the text of a file that is added to each changed package.
const support = `package %s

import (
	"os"
	"strconv"
)

var zzMutant, _ = strconv.Atoi(os.Getenv(%q))
`

// A source is the text of one file, and where its functions are.
type source struct {
	text  []byte
	pkg   string
	funcs []*ast.FuncDecl
	base  int // position (token.Pos) of the first octet
}

func parseSource(name string, text []byte) (*source, error) {
	fset := token.NewFileSet()
	f, err := parser.ParseFile(fset, name, text, parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	s := &source{text: text, pkg: f.Name.Name, base: fset.File(f.FileStart).Base()}
	for _, d := range f.Decls {
		if fn, ok := d.(*ast.FuncDecl); ok && fn.Body != nil {
			s.funcs = append(s.funcs, fn)
		}
	}
	return s, nil
}

func (s *source) offset(p token.Pos) int { return int(p) - s.base }

// function returns the function whose body contains the octets that e replaces. It returns nil if
// there is none, or if that is main or init, which cannot be copied.
func (s *source) function(e edit) *ast.FuncDecl {
	from := bytes.Index(s.text, []byte(e.old))
	to := from + len(e.old)
	for _, fn := range s.funcs {
		if s.offset(fn.Body.Lbrace) < from && to <= s.offset(fn.Body.Rbrace) && fn.Name.Name != "init" &&
			fn.Name.Name != "main" {
			return fn
		}
	}
	return nil
}

// A tree reads the files of the module, each once.
type tree struct {
	read  func(file string) ([]byte, error)
	files map[string]*source
}

func (t *tree) source(file string) (*source, error) {
	if s := t.files[file]; s != nil {
		return s, nil
	}
	text, err := t.read(file)
	if err != nil {
		return nil, err
	}
	s, err := parseSource(file, text)
	if err != nil {
		return nil, err
	}
	if t.files == nil {
		t.files = map[string]*source{}
	}
	t.files[file] = s
	return s, nil
}

// target returns the source that an edit changes. It is an error if e.old does not occur exactly once in it.
func (t *tree) target(e edit) (*source, error) {
	s, err := t.source(e.file)
	if err != nil {
		return nil, err
	}
	if n := bytes.Count(s.text, []byte(e.old)); n != 1 {
		return nil, fmt.Errorf("%d times in %s, want once: %q; the code has moved on, and so must the mutant", n, e.file, e.old)
	}
	return s, nil
}

// asleep reports whether all edits of a mutant are inside function bodies. Then the
// mutant can be in the program, without effect unless [variable] holds its number.
func (t *tree) asleep(m *mutant) (bool, error) {
	for _, e := range m.edits {
		if s, err := t.target(e); err != nil || s.function(e) == nil {
			return false, err
		}
	}
	return true, nil
}

// awake returns the files that a mutant changes, with its edits made.
func (t *tree) awake(m *mutant) (map[string]string, error) {
	files := map[string]string{}
	for _, e := range m.edits {
		s, err := t.target(e)
		if err != nil {
			return nil, err
		}
		files[e.file] = strings.Replace(cmp.Or(files[e.file], string(s.text)), e.old, e.new, 1)
	}
	return files, nil
}

// dormant returns the changed files, with all mutants of ms in them, asleep. Each function
// that a mutant changes begins with a statement that calls the mutant's copy of it instead if
// the mutant is awake. The copies are at the end of the file, so that no line moves.
func (t *tree) dormant(ms []*mutant) (map[string]string, error) {
	type change struct {
		fn     *ast.FuncDecl
		number int
		edits  []edit
	}
	changes := map[string][]change{}
	for _, m := range ms {
		for _, e := range m.edits {
			s, err := t.target(e)
			if err != nil {
				return nil, err
			}
			fn := s.function(e)
			of := changes[e.file]
			if i := slices.IndexFunc(of, func(c change) bool { return c.fn == fn && c.number == m.number }); i >= 0 {
				of[i].edits = append(of[i].edits, e)
				continue
			}
			changes[e.file] = append(of, change{fn, m.number, []edit{e}})
		}
	}
	files := map[string]string{}
	for file, of := range changes {
		s := t.files[file]
		begin := map[*ast.FuncDecl]string{} // what a function begins with
		var copies strings.Builder
		for _, c := range of {
			begin[c.fn] += s.dispatch(c.fn, c.number)
			copies.WriteString(s.copy(c.fn, c.number, c.edits))
		}
		files[file] = s.rewrite(begin) + copies.String()
		files[filepath.Join(filepath.Dir(file), "zz_mutants.go")] = fmt.Sprintf(support, s.pkg, variable)
	}
	return files, nil
}

func copyName(fn *ast.FuncDecl, number int) string {
	return fmt.Sprintf("%s_mutant%d", fn.Name.Name, number)
}

// dispatch returns the statement at the begin of a function that calls the copy if its mutant is awake.
func (s *source) dispatch(fn *ast.FuncDecl, number int) string {
	call := copyName(fn, number)
	if fn.Recv != nil {
		call = fieldNames(fn.Recv, "zzRecv")[0] + "." + call
	}
	if tp := fn.Type.TypeParams; tp != nil {
		call += "[" + strings.Join(fieldNames(tp, ""), ", ") + "]"
	}
	args := strings.Join(fieldNames(fn.Type.Params, "zzArg"), ", ")
	if n := len(fn.Type.Params.List); n > 0 {
		if _, ok := fn.Type.Params.List[n-1].Type.(*ast.Ellipsis); ok {
			args += "..."
		}
	}
	if fn.Type.Results == nil {
		return fmt.Sprintf(" if zzMutant == %d { %s(%s); return };", number, call, args)
	}
	return fmt.Sprintf(" if zzMutant == %d { return %s(%s) };", number, call, args)
}

// fieldNames returns the names of parameters. For a parameter without a name it returns the name
// that [source.rewrite] gives it: the text placeholder and the parameter's index.
func fieldNames(fields *ast.FieldList, placeholder string) (names []string) {
	for _, f := range fields.List {
		if len(f.Names) == 0 {
			names = append(names, fmt.Sprint(placeholder, len(names)))
		}
		for _, n := range f.Names {
			name := n.Name
			if name == "_" {
				name = fmt.Sprint(placeholder, len(names))
			}
			names = append(names, name)
		}
	}
	return names
}

// rewrite returns the text of the file, with begin[fn] inserted at the beginning of the
// body of each function fn in begin. It gives all parameters of those functions names.
func (s *source) rewrite(begin map[*ast.FuncDecl]string) string {
	type insert struct {
		at, skip int
		text     string
	}
	var inserts []insert
	name := func(fields *ast.FieldList, placeholder string) {
		n := 0
		for _, f := range fields.List {
			if len(f.Names) == 0 {
				inserts = append(inserts, insert{s.offset(f.Type.Pos()), 0, fmt.Sprint(placeholder, n, " ")})
				n++
			}
			for _, id := range f.Names {
				if id.Name == "_" {
					inserts = append(inserts, insert{s.offset(id.Pos()), 1, fmt.Sprint(placeholder, n)})
				}
				n++
			}
		}
	}
	for fn, text := range begin {
		if fn.Recv != nil {
			name(fn.Recv, "zzRecv")
		}
		name(fn.Type.Params, "zzArg")
		inserts = append(inserts, insert{s.offset(fn.Body.Lbrace) + 1, 0, text})
	}
	slices.SortFunc(inserts, func(a, b insert) int { return a.at - b.at })
	var out strings.Builder
	done := 0
	for _, in := range inserts {
		out.Write(s.text[done:in.at])
		out.WriteString(in.text)
		done = in.at + in.skip
	}
	out.Write(s.text[done:])
	return out.String()
}

// copy returns a copy of a function, with the edits made and another name. If the copy
// does not compile, the compiler's error names the mutant's number.
func (s *source) copy(fn *ast.FuncDecl, number int, edits []edit) string {
	from, to := s.offset(fn.Type.Func), s.offset(fn.End())
	text := string(s.text[from:to])
	for _, e := range edits {
		text = strings.Replace(text, e.old, e.new, 1)
	}
	at := s.offset(fn.Name.Pos()) - from
	text = text[:at] + copyName(fn, number) + text[at+len(fn.Name.Name):]
	return fmt.Sprintf("\n//line mutant-%d.go:1\n%s\n", number, text)
}
