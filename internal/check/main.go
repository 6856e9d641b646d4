// Command check is what "make test" runs: format, vet, staticcheck, the rows of
// the RFC, and every test of the tree that needs no virtual machine, with the
// race detector where that is possible. It goes on after a failure, and ends with a list of what failed,
// a list of what was skipped and why, and one line of totals.
//
//	go run ./internal/check                # everything
//	go run ./internal/check -only race     # steps whose name contains "race"
//	go run ./internal/check -fuzz 10s      # every fuzz target, so long each
//	go run ./internal/check -interop       # the tests with virtual machines, and no others
//
// With CI=true in the environment a missing tool is a failure: there it should
// have been installed. So is a test that docs/specs.md names and that was skipped.
package main

import (
	"bytes"
	"cmp"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"
)

// staticcheckVersion is the release that is fetched if it is not there yet.
const staticcheckVersion = "v0.8.2"

// Timeouts of go test for one package.
const (
	unitTimeout  = 4 * time.Minute
	simTimeout   = 6 * time.Minute
	netnsTimeout = 10 * time.Minute

	interopTimeout = 15 * time.Minute
)

func main() {
	only := flag.String("only", "", "run only steps whose name contains this")
	fuzzTime := flag.Duration("fuzz", 0, "instead run every fuzz target for so long")
	keep := flag.Int("keep", 0, "with -fuzz: fill each target's committed corpus up to so many inputs")
	interop := flag.Bool("interop", false, "instead run the tests that boot virtual machines")
	summary := flag.String("summary", "", "also write the closing summary to this file")
	flag.Parse()
	r := &run{only: *only, out: os.Stdout, ci: os.Getenv("CI") == "true", results: map[string]*result{}}
	switch {
	case *fuzzTime > 0:
		r.fuzz(*fuzzTime, *keep)
	case *interop:
		// Without the race detector: memory that a peer's RDMA WRITE fills is
		// looked at when the peer says so, out of band, which the detector cannot see.
		r.test("virtual machines", interopTimeout, []string{"./test/interop/..."}, "-p=1")
	default:
		r.all()
	}
	if *fuzzTime == 0 {
		r.showRows()
	}
	var b bytes.Buffer
	ok := r.summary(&b)
	os.Stdout.Write(b.Bytes())
	if *summary != "" {
		err := os.MkdirAll(filepath.Dir(*summary), 0o755)
		if err == nil {
			err = os.WriteFile(*summary, b.Bytes(), 0o644)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, "check:", err)
			ok = false
		}
	}
	if !ok {
		os.Exit(1)
	}
}

// A run is one run of the checks and what has come of it.
type run struct {
	only string
	out  io.Writer
	ci   bool

	results map[string]*result // by name
	order   []string
}

// An outcome is how a check or a test ended; the larger one counts when it ran
// more than once, so that a test skipped under the race detector and passed
// without has passed.
type outcome uint8

const (
	skipped outcome = iota + 1
	passed
	failed
)

type result struct {
	outcome outcome
	why     string // of a failure or a skip
}

// note records how name ended.
func (r *run) note(name string, o outcome, why string) {
	old := r.results[name]
	if old == nil {
		old = &result{}
		r.results[name] = old
		r.order = append(r.order, name)
	}
	if o > old.outcome {
		*old = result{o, why}
	}
}

// missing records a tool that is not there.
func (r *run) missing(name, why string) {
	fmt.Fprintf(r.out, "skip %s: %s\n", name, why)
	if r.ci {
		r.note(name, failed, why)
		return
	}
	r.note(name, skipped, why)
}

// all runs every step in order, the quick ones first.
func (r *run) all() {
	r.step("gofmt", gofmt)
	r.step("go vet", func() error { return r.stream("go", "vet", "./...") })
	r.staticcheck()
	r.libibverbs()
	r.step("requirement rows", func() error { return r.stream("go", "run", "./internal/specs", "-check") })
	r.needs()
	var unit, sim, netns []string
	packages, err := packages()
	if err != nil {
		r.note("go list", failed, err.Error())
		return
	}
	for _, p := range packages {
		switch {
		case strings.Contains(p, "/test/interop"): // boots virtual machines, see -interop
		case strings.HasSuffix(p, "/test/netns"):
			netns = append(netns, p)
		case strings.Contains(p, "/test/sim"), strings.HasSuffix(p, "/test/explore"):
			sim = append(sim, p)
		default:
			unit = append(unit, p)
		}
	}
	race := r.race()
	if race {
		r.test("tests with the race detector", unitTimeout, unit, "-race")
		r.test("exploration and simulation with the race detector", simTimeout, sim, "-race")
	}
	// Once more without: allocations are counted and large runs are made only here.
	r.test("tests", unitTimeout, unit)
	r.test("exploration and simulation", simTimeout, sim)
	r.test("network namespaces", netnsTimeout, netns, "-p=1")
	if race { // the agents too are built with it
		r.test("network namespaces with the race detector", netnsTimeout, netns, "-p=1", "-race")
	}
}

func (r *run) wanted(name string) bool { return strings.Contains(name, r.only) }

// step runs one check that is not a test.
func (r *run) step(name string, f func() error) {
	if !r.wanted(name) {
		return
	}
	fmt.Fprintf(r.out, "==== %s\n", name)
	if err := f(); err != nil {
		fmt.Fprintf(r.out, "FAIL %s: %v\n", name, err)
		r.note(name, failed, err.Error())
		return
	}
	r.note(name, passed, "")
}

// stream runs a command and shows what it prints.
func (r *run) stream(name string, args ...string) error {
	c := exec.Command(name, args...)
	c.Stdout, c.Stderr = r.out, r.out
	return c.Run()
}

func gofmt() error {
	files, err := goFiles(".")
	if err != nil {
		return err
	}
	out, err := exec.Command("gofmt", append([]string{"-s", "-l"}, files...)...).CombinedOutput()
	if list := strings.Fields(string(out)); err != nil || len(list) > 0 {
		return errors.Join(err, fmt.Errorf("not formatted (gofmt -s -w): %s", strings.Join(list, " ")))
	}
	return nil
}

// goFiles lists the Go files below root that are ours.
func goFiles(root string) (files []string, err error) {
	err = filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && path != root && strings.HasPrefix(d.Name(), "."):
			return filepath.SkipDir
		case !d.IsDir() && strings.HasSuffix(path, ".go"):
			files = append(files, path)
		}
		return nil
	})
	return files, err
}

// staticcheck runs the release named above, which it keeps in .cache.
func (r *run) staticcheck() {
	if !r.wanted("staticcheck") {
		return
	}
	dir, err := filepath.Abs(filepath.Join(".cache", "staticcheck-"+staticcheckVersion))
	if err != nil {
		r.note("staticcheck", failed, err.Error())
		return
	}
	program := filepath.Join(dir, "staticcheck")
	if _, err := os.Stat(program); err != nil {
		fmt.Fprintf(r.out, "==== fetching staticcheck %s\n", staticcheckVersion)
		c := exec.Command("go", "install", "honnef.co/go/tools/cmd/staticcheck@"+staticcheckVersion)
		c.Env = append(os.Environ(), "GOBIN="+dir, "CGO_ENABLED=0")
		if out, err := c.CombinedOutput(); err != nil {
			r.missing("staticcheck", "cannot be fetched: "+lastLine(string(out)))
			return
		}
	}
	r.step("staticcheck", func() error { return r.stream(program, "./...") })
}

// libibverbs looks at what is built with it only. Its tests need RDMA devices:
// see -interop.
func (r *run) libibverbs() {
	const name = "go vet with libibverbs"
	if !r.wanted(name) {
		return
	}
	if _, err := os.Stat("/usr/include/infiniband/verbs.h"); err != nil {
		r.missing("libibverbs", "its header files are not installed (libibverbs-dev): provider/ibverbs is not looked at")
		return
	}
	r.step(name, func() error {
		c := exec.Command("go", "vet", "-tags=ibverbs", "./provider/ibverbs", "./cmd/ipoibcmd")
		c.Env, c.Stdout, c.Stderr = append(os.Environ(), "CGO_ENABLED=1"), r.out, r.out
		return c.Run()
	})
}

func lastLine(s string) string {
	s = strings.TrimSpace(s)
	return s[strings.LastIndexByte(s, '\n')+1:]
}

// needs says which programs and rights are lacking that some tests use; those
// tests skip by themselves.
func (r *run) needs() {
	if r.only != "" {
		return
	}
	for _, n := range []struct{ program, use string }{
		{"nft", "tests that count and drop packets in the kernel are skipped"},
		{"tshark", "captures are not compared with Wireshark's reading"},
		{"rpcgen", "the codecs of rpcrdma are compared with its vectors in the tree only"},
	} {
		if _, err := exec.LookPath(n.program); err != nil {
			r.missing(n.program, "not installed: "+n.use)
		}
	}
	if os.Geteuid() != 0 {
		r.missing("root", "not root: tests that make network namespaces are skipped")
	}
}

// race says whether the race detector can be used, by building with it.
func (r *run) race() bool {
	if r.only != "" && !strings.Contains("tests with the race detector exploration and simulation with the race detector network namespaces with the race detector", r.only) {
		return false
	}
	c := exec.Command("go", "build", "-race", "-o", os.DevNull, "./internal/specs")
	c.Env = append(os.Environ(), "CGO_ENABLED=1")
	if out, err := c.CombinedOutput(); err != nil {
		r.missing("race detector", "needs cgo and a C compiler: "+cmp.Or(lastLine(string(out)), err.Error()))
		return false
	}
	return true
}

func packages() ([]string, error) {
	out, err := exec.Command("go", "list", "./...").Output()
	if err != nil {
		if e := (*exec.ExitError)(nil); errors.As(err, &e) {
			err = errors.New(strings.TrimSpace(string(e.Stderr)))
		}
		return nil, fmt.Errorf("list packages: %w", err)
	}
	return strings.Fields(string(out)), nil
}

// summary prints what failed, what was skipped and the totals, and reports
// whether nothing failed.
func (r *run) summary(w io.Writer) bool {
	var n [failed + 1]int
	for _, res := range r.results {
		n[res.outcome]++
	}
	for _, kind := range []struct {
		outcome outcome
		title   string
	}{{failed, "failed"}, {skipped, "skipped"}} {
		if n[kind.outcome] == 0 {
			continue
		}
		fmt.Fprintf(w, "==== %s\n", kind.title)
		for _, name := range r.order {
			if res := r.results[name]; res.outcome == kind.outcome {
				fmt.Fprintf(w, "  %s: %s\n", name, cmp.Or(res.why, "no reason given"))
			}
		}
	}
	if n[skipped] == 0 {
		fmt.Fprintln(w, "nothing was skipped")
	}
	fmt.Fprintf(w, "%d passed, %d failed, %d skipped (%s, %s/%s)\n", n[passed], n[failed], n[skipped], runtime.Version(), runtime.GOOS, runtime.GOARCH)
	return n[failed] == 0
}
