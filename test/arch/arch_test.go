// Package arch holds the layers: which layer each package is on, and whether it is
// pure. Its tests fail when an import points up or sideways, when a pure package
// reads the clock, opens a socket or starts to lock, and when comments and documents
// name what does not exist.
package arch

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

type kind byte

const (
	pure  kind = 'P' // no goroutine, clock or socket
	edge  kind = 'E' // touches the system, decides nothing
	shell kind = 'S'
)

type layered struct {
	dir   string
	layer int
	kind  kind
}

// layers is the table. A package belongs to the longest entry that is a prefix of its
// directory.
var layers = []layered{
	{"cmd/ipoibcmd", 8, shell},
	{"cmd/ipoibcm-cni", 8, shell},
	{"internal/lab", 7, shell}, // for the demo and doctor too
	{"node", 7, shell},
	{"agent", 7, shell},
	{"peerrpc/peers", 6, shell},
	{"ipoib", 5, pure},
	{"membership", 1, pure},
	{"membership/source", 4, edge},
	{"membership/etcd", 4, edge},
	{"datapath", 4, edge},
	{"fib", 4, pure},
	{"neigh", 4, pure},
	{"sa", 4, pure},
	{"doctor", 4, pure},
	{"provider/softroce", 4, edge},
	{"provider/softiwarp", 4, edge},
	{"provider/ibverbs", 4, edge},
	{"rdmacm", 4, edge},
	{"rpcrdma/transport", 5, edge},
	{"provider/softroce/engine", 3, pure},
	{"tun", 3, edge},
	{"cm", 3, pure},
	{"mtu", 3, pure},
	{"group", 3, pure},
	{"pathmtu", 3, pure},
	{"mpa", 3, pure},
	{"mpa/sctp", 4, pure},
	{"rpcrdma", 3, pure},
	{"wire/arp", 3, pure},
	{"wire/nd", 3, pure},
	{"wire/sa", 3, pure},
	{"wire/roce", 2, pure},
	{"wire/mad", 2, pure},
	{"wire/encap", 2, pure},
	{"wire/ip", 2, pure},
	{"wire", 1, pure},
	{"wire/pcapng", 1, pure},
	{"wire/sums", 1, pure},
	{"serviceid", 1, pure},
	{"ratelimit", 1, pure},
	{"fqcodel", 1, pure},
	{"control", 1, pure},
	{"peerrpc", 1, pure},
	{"verbs", 1, pure},
	{"verbs/regions", 2, edge},
	{"verbs/events", 2, edge},
	{"hostnet", 1, edge},
	{"logqueue", 1, edge},
	{"peercred", 1, edge},
	{"sandbox", 1, edge},
	{"ib", 0, pure},
	{"counters", 0, pure},
	{"lru", 0, pure},
	{"timerheap", 0, pure},
	{"eventqueue", 0, pure},
	{"nexthop", 3, pure},
	{"rtnl", 0, pure},
	{"redact", 0, pure},
}

// testOnly are packages that only tests and tools import, but for those below them that the
// table has. They may import any package; no package of the table may import them.
var testOnly = []string{"internal", "test", "verbs/verbstest", "tun/tuntest", "datapath/datapathtest",
	"ipoib/ipoibtest", "fib/fibtest", "hostnet/hostnettest", "cm/cmtest", "neigh/neightest",
	"wire/ip/iptest", "wire/pcapng/pcapngtest", "wire/roce/rocetest"}

// banned are the imports that end purity. Packages below them count too.
var banned = []string{"net", "os", "sync", "syscall", "golang.org/x/sys", "golang.org/x/net",
	"github.com/vishvananda/netlink", "testing"}

// allowed are below banned imports and pure all the same: values, and what the
// processor can do.
var allowed = []string{"net/netip", "golang.org/x/sys/cpu"}

// bannedTime are the names of package time that read or wait for the clock.
var bannedTime = map[string]bool{"Now": true, "Since": true, "Until": true, "Sleep": true, "After": true,
	"AfterFunc": true, "NewTimer": true, "NewTicker": true, "Tick": true}

const module = "ipoibcm/"

func under(dir, root string) bool { return dir == root || strings.HasPrefix(dir, root+"/") }

func find(dir string) (layered, bool) {
	best, ok := layered{}, false
	for _, r := range layers {
		if under(dir, r.dir) && (!ok || len(r.dir) > len(best.dir)) {
			best, ok = r, true
		}
	}
	return best, ok
}

func isTestOnly(dir string) bool {
	r, _ := find(dir)
	for _, t := range testOnly {
		if under(dir, t) && len(t) > len(r.dir) {
			return true
		}
	}
	return false
}

// checkFile returns what is wrong with one file of package directory dir.
func checkFile(dir string, f *ast.File) []string {
	var wrong []string
	r, ok := find(dir)
	if !ok {
		return []string{dir + " is not in the table of layers"}
	}
	for _, spec := range f.Imports {
		path, _ := strconv.Unquote(spec.Path.Value)
		if dep, ours := strings.CutPrefix(path, module); ours {
			to, known := find(dep)
			switch {
			case isTestOnly(dep):
				wrong = append(wrong, dir+" imports "+dep+", which is for tests")
			case !known:
				wrong = append(wrong, dir+" imports "+dep+", which is not in the table of layers")
			case under(r.dir, to.dir): // itself, or the package it is a part of
			case to.layer >= r.layer:
				wrong = append(wrong, dir+" imports "+dep+", which is not below it")
			case r.kind == pure && to.kind != pure:
				wrong = append(wrong, dir+" is pure and imports "+dep+", which is not")
			}
			continue
		}
		if r.kind != pure {
			continue
		}
		for _, b := range banned {
			if under(path, b) && !slices.Contains(allowed, path) {
				wrong = append(wrong, dir+" is pure and imports "+path)
			}
		}
	}
	if r.kind == pure {
		ast.Inspect(f, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.GoStmt:
				wrong = append(wrong, dir+" is pure and starts a goroutine")
			case *ast.SelectorExpr:
				if x, ok := n.X.(*ast.Ident); ok && x.Name == "time" && bannedTime[n.Sel.Name] {
					wrong = append(wrong, dir+" is pure and calls time."+n.Sel.Name)
				}
			}
			return true
		})
	}
	return wrong
}

func TestLayers(t *testing.T) {
	root := filepath.Join("..", "..")
	fset, files := token.NewFileSet(), 0
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(root, path)
		if d.IsDir() {
			if rel != "." && (strings.HasPrefix(d.Name(), ".") || d.Name() == "testdata") {
				return filepath.SkipDir
			}
			return nil
		}
		dir := filepath.ToSlash(filepath.Dir(rel))
		if !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") || dir == "." || isTestOnly(dir) {
			return nil
		}
		src, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		f, err := parser.ParseFile(fset, path, src, 0)
		if err != nil {
			return err
		}
		files++
		for _, w := range checkFile(dir, f) {
			t.Errorf("%s: %s", rel, w)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if files < 10 {
		t.Fatalf("only %d files were looked at", files)
	}
}

func TestCheckerSeesViolations(t *testing.T) {
	for _, tt := range []struct{ name, dir, src, want string }{
		{"upwards", "cm", `package p; import _ "ipoibcm/ipoib"`, "cm imports ipoib, which is not below it"},
		{"sideways", "cm", `package p; import _ "ipoibcm/mtu"`, "cm imports mtu, which is not below it"},
		{"pure to edge", "ipoib", `package p; import _ "ipoibcm/tun"`, "ipoib is pure and imports tun, which is not"},
		{"socket", "cm", `package p; import _ "net"`, "cm is pure and imports net"},
		{"lock", "wire/roce", `package p; import _ "sync/atomic"`, "wire/roce is pure and imports sync/atomic"},
		{"clock", "neigh", `package p; import "time"; var _ = time.Now()`, "neigh is pure and calls time.Now"},
		{"goroutine", "mtu", `package p; func f() { go f() }`, "mtu is pure and starts a goroutine"},
		{"test package", "agent", `package p; import _ "ipoibcm/verbs/verbstest"`,
			"agent imports verbs/verbstest, which is for tests"},
		{"system call", "wire/sums", `package p; import _ "golang.org/x/sys/unix"`,
			"wire/sums is pure and imports golang.org/x/sys/unix"},
		{"the processor is fine", "wire/sums", `package p; import _ "golang.org/x/sys/cpu"`, ""},
		{"addresses are fine", "neigh", `package p; import _ "net/netip"`, ""},
		{"down is fine", "agent", `package p; import _ "ipoibcm/ipoib"`, ""},
	} {
		f, err := parser.ParseFile(token.NewFileSet(), "x.go", tt.src, 0)
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.Join(checkFile(tt.dir, f), "; "); got != tt.want {
			t.Errorf("%s: got %q, want %q", tt.name, got, tt.want)
		}
	}
}
