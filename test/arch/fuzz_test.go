package arch

import (
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// unfuzzed are functions that look like decoders or machines and need no fuzz
// target, with the reason.
var unfuzzed = map[string]string{
	"(*ipoibcm/membership/etcd.firstRead).Read": "passes octets on, and looks at the error only",
	"(*ipoibcm/cmd/ipoibcmd.mpaProbe).parse":    "reads what the user types",
	"(*ipoibcm/cmd/ipoibcmd.rpcProbe).parse":    "reads what the user types",
	"(*ipoibcm/tun.File).read":                  "fills the octets, and looks at none",
}

var decoderName = regexp.MustCompile(`^([Uu]nmarshal|[Pp]arse|[Dd]ecode|[Rr]ead)([A-Z0-9]|$)`)

// isDecoder reports whether a function of ours reads octets or text that come
// from elsewhere, going by its name and parameters.
func isDecoder(dir string, f *types.Func) bool {
	sig := f.Signature()
	if sig.Params().Len() == 0 {
		return false
	}
	name := f.Name()
	if decoderName.MatchString(name) && takesOctets(sig, true) {
		return true
	}
	// A codec package shows packets by functions of any name. Those that write are
	// called Append or Put.
	if !under(dir, "wire") || !f.Exported() || sig.Results().Len() == 0 {
		return false
	}
	for _, verb := range []string{"Append", "Put"} {
		if strings.HasPrefix(name, verb) {
			return false
		}
	}
	return takesOctets(sig, false)
}

// takesOctets reports whether a parameter is octets, or text where that counts.
func takesOctets(sig *types.Signature, text bool) bool {
	for v := range sig.Params().Variables() {
		switch t := v.Type().Underlying().(type) {
		case *types.Slice:
			if b, ok := t.Elem().Underlying().(*types.Basic); ok && b.Kind() == types.Byte {
				return true
			}
		case *types.Basic:
			if text && t.Kind() == types.String {
				return true
			}
		}
	}
	return false
}

// isMachine reports whether a function is the way into a state machine.
func isMachine(f *types.Func) bool {
	recv := f.Signature().Recv()
	return recv != nil && (f.Name() == "Step" || f.Name() == "Receive") && f.Exported()
}

// A goPackage is what go list says of a package, or of its tests.
type goPackage struct {
	ImportPath string
	Dir        string
	Name       string
	Export     string
	ForTest    string
	Standard   bool
	Module     *struct{ Main bool }
	GoFiles    []string
	ImportMap  map[string]string
}

// packagesOfTree returns all packages and test packages that ours need, each
// after what it imports.
func packagesOfTree(t *testing.T) (all []goPackage) {
	c := exec.Command("go", "list", "-buildvcs=false", "-test", "-deps", "-export",
		"-json=ImportPath,Dir,Name,Export,ForTest,Standard,Module,GoFiles,ImportMap", "./...")
	c.Dir = filepath.Join("..", "..")
	c.Env = append(os.Environ(), "CGO_ENABLED=0")
	var complaint strings.Builder
	c.Stderr = &complaint
	out, err := c.StdoutPipe()
	if err == nil {
		err = c.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	for d := json.NewDecoder(out); ; {
		var p goPackage
		if err := d.Decode(&p); err == io.EOF {
			break
		} else if err != nil {
			t.Fatalf("go list: %v\n%s", err, &complaint)
		}
		all = append(all, p)
	}
	if err := c.Wait(); err != nil {
		t.Fatalf("go list: %v\n%s", err, &complaint)
	}
	return all
}

// A graph is which functions there are, and which others each of them names.
type graph struct {
	// by full name; "dir.Method" is any method of that name, called through an interface
	uses     map[string]map[string]bool
	fuzz     map[string]string // full name of every fuzz target → directory
	dirs     map[string]string // of every function
	decoders map[string]bool
	machines map[string]bool
}

// newGraph reads the packages with their tests.
func newGraph(t *testing.T) *graph {
	all := packagesOfTree(t)
	exports := map[string]string{}
	for _, p := range all {
		exports[p.ImportPath] = p.Export
	}
	root, err := filepath.Abs(filepath.Join("..", ".."))
	if err != nil {
		t.Fatal(err)
	}
	g := &graph{uses: map[string]map[string]bool{}, fuzz: map[string]string{}, dirs: map[string]string{},
		decoders: map[string]bool{}, machines: map[string]bool{}}
	for _, p := range all {
		dir, err := filepath.Rel(root, p.Dir)
		if p.Module == nil || !p.Module.Main || err != nil || p.Name == "main" && strings.HasSuffix(p.ImportPath, ".test") {
			continue
		}
		dir = filepath.ToSlash(dir)
		// the lab is for the demo and the tests
		if _, known := find(dir); known && !isTestOnly(dir) && !under(dir, "internal/lab") {
			g.add(t, dir, p, exports)
		}
	}
	return g
}

// add type-checks one package and records what its functions name.
func (g *graph) add(t *testing.T, dir string, p goPackage, exports map[string]string) {
	fset := token.NewFileSet()
	var files []*ast.File
	for _, name := range p.GoFiles {
		f, err := parser.ParseFile(fset, filepath.Join(p.Dir, name), nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, f)
	}
	lookup := func(path string) (io.ReadCloser, error) {
		if to, ok := p.ImportMap[path]; ok {
			path = to
		}
		if exports[path] == "" {
			return nil, errors.New("no export data of " + path)
		}
		return os.Open(exports[path])
	}
	path, _, _ := strings.Cut(p.ImportPath, " ") // without [tests of …]
	conf := types.Config{Importer: importer.ForCompiler(fset, "gc", lookup)}
	info := &types.Info{Defs: map[*ast.Ident]types.Object{}, Uses: map[*ast.Ident]types.Object{}}
	if _, err := conf.Check(path, fset, files, info); err != nil {
		t.Fatalf("%s: %v", p.ImportPath, err)
	}
	for i, file := range files {
		test := strings.HasSuffix(p.GoFiles[i], "_test.go")
		for _, d := range file.Decls {
			fd, ok := d.(*ast.FuncDecl)
			if !ok || fd.Body == nil {
				continue
			}
			f := info.Defs[fd.Name].(*types.Func)
			name := f.FullName()
			g.dirs[name] = dir
			if f.Signature().Recv() != nil {
				g.use(dir+"."+f.Name(), name)
			}
			switch {
			case test && strings.HasPrefix(f.Name(), "Fuzz"):
				g.fuzz[name] = dir
			case !test && isMachine(f):
				g.machines[name] = true
			case !test && isDecoder(dir, f):
				g.decoders[name] = true
			}
			ast.Inspect(fd.Body, func(n ast.Node) bool {
				id, ok := n.(*ast.Ident)
				if !ok {
					return true
				}
				if to, ok := info.Uses[id].(*types.Func); ok {
					if recv := to.Signature().Recv(); recv != nil && types.IsInterface(recv.Type()) {
						g.use(name, dir+"."+to.Name())
					} else {
						g.use(name, to.Origin().FullName())
					}
				}
				return true
			})
		}
	}
}

func (g *graph) use(from, to string) {
	if g.uses[from] == nil {
		g.uses[from] = map[string]bool{}
	}
	g.uses[from][to] = true
}

// reach adds to seen every function that name leads to, by naming others.
func (g *graph) reach(name string, seen map[string]bool) {
	if seen[name] {
		return
	}
	seen[name] = true
	for used := range g.uses[name] {
		g.reach(used, seen)
	}
}

// Everything that reads what came from elsewhere, and every machine, is reached
// by a fuzz target of its own package or of one that uses it.
func TestEverythingIsFuzzed(t *testing.T) {
	g := newGraph(t)
	g.corpora(t)
	switch {
	case len(g.fuzz) < 30:
		t.Fatalf("fuzz has %v elements, want at least 30", len(g.fuzz))
	case len(g.decoders) < 40:
		t.Fatalf("decoders has %v elements, want at least 40", len(g.decoders))
	case len(g.machines) < 8:
		t.Fatalf("machines has %v elements, want at least 8", len(g.machines))
	}
	t.Logf("%d fuzz targets, %d decoders, %d machines", len(g.fuzz), len(g.decoders), len(g.machines))
	fuzzed := map[string]bool{}
	for name, dir := range g.fuzz {
		reached := map[string]bool{}
		g.reach(name, reached)
		r, _ := find(dir)
		for f := range reached {
			// The shell leads everywhere, but its targets give octets to itself only.
			if r.layer < 6 || g.dirs[f] == dir {
				fuzzed[f] = true
			}
		}
	}
	for _, kind := range []struct {
		what string
		all  map[string]bool
	}{{"decoder", g.decoders}, {"machine", g.machines}} {
		for name := range kind.all {
			switch why := unfuzzed[name]; {
			case !fuzzed[name] && why == "":
				t.Errorf("no fuzz target reaches the %s %s", kind.what, name)
			case fuzzed[name] && why != "":
				t.Errorf("%s is fuzzed: it needs no exception (%s)", name, why)
			}
		}
	}
	for name, why := range unfuzzed {
		if !g.decoders[name] && !g.machines[name] {
			t.Errorf("there is no %s, which has the exception %q", name, why)
		}
	}
}

// corpora checks that every fuzz target has inputs in the tree, and not too many.
func (g *graph) corpora(t *testing.T) {
	const most = 48
	for name, dir := range g.fuzz {
		target := name[strings.LastIndexByte(name, '.')+1:]
		inputs, err := os.ReadDir(filepath.Join("..", "..", dir, "testdata", "fuzz", target))
		switch {
		case err != nil:
			t.Errorf("err is %v, want nil", err)
		case len(inputs) == 0:
			t.Errorf("the corpus has no input")
		case len(inputs) > most:
			t.Errorf("inputs has %v elements, want at most %v", len(inputs), most)
		}
	}
}

// What the rule takes for a decoder.
func TestDecoderRule(t *testing.T) {
	const src = `package p
type T struct{}
func (t *T) UnmarshalBinary(b []byte) error { return nil }
func ParseThing(s string) T { return T{} }
func Read(bufs [][]byte) int { return 0 }
func View(b []byte) int { return 0 }
func PutThing(b []byte) int { return 0 }
func (t *T) Step(ev any) {}
func readBack() {}
`
	fset := token.NewFileSet()
	f, err := parser.ParseFile(fset, "p.go", src, 0)
	if err != nil {
		t.Fatal(err)
	}
	info := &types.Info{Defs: map[*ast.Ident]types.Object{}}
	if _, err := new(types.Config).Check("p", fset, []*ast.File{f}, info); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{"wire/p", "cm"} {
		var got []string
		for _, obj := range info.Defs {
			if f, ok := obj.(*types.Func); ok && (isDecoder(dir, f) || isMachine(f)) {
				got = append(got, f.Name())
			}
		}
		slices.Sort(got)
		want := "[ParseThing Step UnmarshalBinary]"
		if dir == "wire/p" {
			want = "[ParseThing Step UnmarshalBinary View]"
		}
		if fmt.Sprint(got) != want {
			t.Errorf("%s: got %v, want %s", dir, got, want)
		}
	}
}
