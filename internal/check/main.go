// Command check is what "make test" and "make test-long" run: format, vet,
// staticcheck, the rows of the RFCs, and every test of the tree that needs no
// virtual machine. It goes on after a failure, says all the time what is under way
// and what remains, and ends with a list of what failed, a list of what was skipped
// and why, and one line of totals.
//
//	go run ./internal/check                # the short form, for people: minutes
//	go run ./internal/check -long          # the long form of every test, and what is concurrent under the race detector
//	go run ./internal/check -only vet      # steps whose name contains "vet"
//	go run ./internal/check -fuzz 10s      # every fuzz target, for 10 s each
//	go run ./internal/check -interop       # the tests with virtual machines, and no others; with -long in their long form
//
// No test is ended because it takes long, which depends on the machine. A step of
// tests is ended, with the stacks of its goroutines, when nothing at all has happened
// in it for ten minutes.
//
// With CI=true in the environment a missing tool is a failure: there it should
// have been installed. It is also a failure if a test that docs/specs.md names was
// skipped or did not run.
package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"ipoibcm/internal/gotool"
)

var staticcheck = gotool.Program{Module: "honnef.co/go/tools", Version: "v0.8.2", Package: "./cmd/staticcheck"}

func main() {
	only := flag.String("only", "", "run only steps whose name contains this")
	long := flag.Bool("long", false, "run the long form of the tests")
	fuzzTime := flag.Duration("fuzz", 0, "instead run every fuzz target for so long")
	fuzzAll := flag.Duration("fuzz-all", 0, "instead run every fuzz target, for so long altogether")
	keep := flag.Int("keep", 0, "with -fuzz and -fuzz-all: fill each target's committed corpus up to so many inputs")
	interop := flag.Bool("interop", false, "instead run the tests that boot virtual machines")
	kernel := flag.String("kernel", "", "with -interop: only guests of this series of Linux, such as 6.1")
	summary := flag.String("summary", "", "also write the closing summary to this file")
	flag.Parse()
	shareBuilds()
	r := &run{only: *only, long: *long, out: newProgress(os.Stdout), ci: os.Getenv("CI") == "true",
		results: map[string]*result{}}
	switch {
	case *fuzzTime > 0 || *fuzzAll > 0:
		r.fuzz(*fuzzTime, *fuzzAll, *keep)
	case *interop:
		r.stages([][]step{r.interop(*kernel)})
	default:
		r.all()
	}
	r.out.end()
	if *fuzzTime == 0 && *fuzzAll == 0 && *kernel != leastKernel { // of which only the demo runs
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

// Series of Linux that guests of test/interop run: all tests on kernels, the demo on
// leastKernel, the oldest that is supported.
var (
	kernels     = []string{"6.1", "6.12"}
	leastKernel = "5.10"
)

// interop returns the steps with virtual machines. If only is not empty, it returns only the
// steps whose guests run that series of Linux. The steps run without the race detector: when
// a peer says out of band that its RDMA WRITE is done, a test reads the memory that the
// WRITE filled, and the detector cannot see that order.
func (r *run) interop(only string) (steps []step) {
	guests := func(series string, flags ...string) step {
		at := place{name: "Linux " + series, env: []string{"IPOIBCM_KERNEL=" + series}}
		return step{name: "virtual machines, " + at.name,
			do: func() { r.testAt(at, []string{"./test/interop/..."}, append(flags, "-p=1")...) }}
	}
	for _, series := range kernels {
		if only == "" || only == series {
			steps = append(steps, guests(series))
		}
	}
	if only == "" || only == leastKernel {
		steps = append(steps, guests(leastKernel, "-run=^TestDemoInGuest$"))
	}
	return steps
}

// shareBuilds makes all builds of this run, those of tests too, share Go's build cache,
// also between clones of the repository. They are built without cgo unless a step asks for
// it, and without the names of directories.
func shareBuilds() {
	os.Setenv("CGO_ENABLED", "0")
	os.Setenv("GOFLAGS", strings.TrimSpace(os.Getenv("GOFLAGS")+" -trimpath"))
}

// A run is one run of the checks and what has come of it.
type run struct {
	only string
	long bool // the long form
	out  *progress
	ci   bool

	mu      sync.Mutex         // steps may run beside each other
	results map[string]*result // by name
	order   []string
}

// An outcome is how a check or a test ended. If it ran more than once the largest
// outcome counts: a test that was skipped under the race detector and passed without
// it has passed.
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
	r.mu.Lock()
	defer r.mu.Unlock()
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

// missing records that name, a tool or what needs it, is not available. With CI=true that is a failure.
func (r *run) missing(name, why string) {
	r.cannot(name, why)
	if r.ci {
		r.note(name, failed, why)
	}
}

// cannot records that this machine cannot do name, whatever is installed.
func (r *run) cannot(name, why string) {
	fmt.Fprintf(r.out, "skip %s: %s\n", name, why)
	r.note(name, skipped, why)
}

// A step is a part of a run. What it finds is in the run's results.
type step struct {
	name string
	do   func()
}

// wanted returns the steps whose name contains the text of the flag -only.
func (r *run) wanted(steps []step) []step {
	return slices.DeleteFunc(steps, func(s step) bool { return !strings.Contains(s.name, r.only) })
}

// do carries out lanes of steps: the lanes at the same time, the steps of each lane in order.
func (r *run) do(lanes ...[]step) {
	var all sync.WaitGroup
	for _, lane := range lanes {
		all.Go(func() {
			for _, s := range lane {
				end := r.out.step(s.name)
				s.do()
				end()
				if r.out.interrupted() {
					r.note(s.name, failed, "interrupted")
					return
				}
			}
		})
	}
	all.Wait()
}

// stages carries out stages one after the other. Each stage has lanes, of which it carries out the
// wanted steps.
func (r *run) stages(stages ...[][]step) {
	for _, lanes := range stages {
		for i, lane := range lanes {
			lanes[i] = r.wanted(lane)
			r.out.steps += len(lanes[i])
		}
	}
	for _, lanes := range stages {
		if !r.out.interrupted() {
			r.do(lanes...)
		}
	}
}

// all runs every step.
func (r *run) all() {
	r.needs()
	packages, err := packages()
	if err != nil {
		r.note("go list", failed, err.Error())
		return
	}
	g := group(packages, hasThreads)
	source := []step{
		{"gofmt", r.check("gofmt", gofmt)},
		{"go vet", r.check("go vet", func() error { return r.stream("go", "vet", "./...") })},
		{"staticcheck", r.staticcheck},
		{"go vet with libibverbs", r.libibverbs},
		{"requirement rows", r.check("requirement rows", func() error {
			return r.stream("go", "run", "./internal/specs", "-check")
		})},
	}
	netns := func() { r.test(g.netns, netnsFlags...) }
	if !r.long {
		// Tests that look at the clock have the processors before tests that do not. The tests in network
		// namespaces run beside no others that fill the kernel's one table of neighbours.
		r.stages([][]step{
			{
				{"network namespaces", netns},
				{"tests", func() { r.test(g.clocked, oneMore) }},
			},
			append(source,
				step{"go vet for " + narrow, r.check("go vet for "+narrow, r.vetNarrow)},
				step{"tests without a clock", func() { r.testAt(place{behind: true}, g.pure) }}),
		})
		return
	}
	// Tests run without the race detector too: only then they count allocations and make large runs. As in
	// the short form, what looks at the clock has the processors before what does not, and nothing fills the
	// kernel's one table of neighbours beside the tests in network namespaces. Under the race detector,
	// packages without a clock have their short form, and those without goroutines, where it has nothing to find, do
	// not run.
	r.stages([][]step{
		{
			{"network namespaces, long form", netns},
			{"tests, long form", func() { r.test(g.clocked, oneMore) }},
			// The agents too are built with the race detector. What makes these tests long is many peers and
			// rates, with which it takes very long and sees no more code.
			{"network namespaces with the race detector", r.race(place{env: shortForm.env}, g.netns, netnsFlags...)},
		},
		append(source,
			step{"architectures: vet and build", r.vetAll},
			step{"tests without a clock, long form", func() { r.testAt(place{behind: true}, g.pure) }},
			step{"architectures: tests in emulation", r.testEmulated},
			step{"tests without a clock with the race detector", r.race(shortForm, g.pureThreads)}),
	}, [][]step{
		{
			{"tests with the race detector, long form", r.race(place{}, g.clocked)},
			{"architectures: tests on " + narrow, r.testNarrow(placeFor(narrow), g.clocked)},
		}, {
			{"architectures: tests without a clock on " + narrow, r.testNarrow(behindOthers(placeFor(narrow)), g.pure)},
			{"mutants, a tenth", r.mutants},
		},
	})
}

// netnsFlags let the tests in network namespaces, which mostly wait, overlap.
var netnsFlags = []string{"-p=1", "-parallel=6"}

// A grouping says which packages are tested together.
type grouping struct {
	unit, netns []string
	// clocked are the packages of unit whose tests send on this machine's network and look at the clock;
	// pure are the others. Of these, pureThreads are tested with the race detector: those that start goroutines.
	clocked, pure, pureThreads []string
}

// slowest are the packages that take longest. They therefore begin first. The first, the third and so on
// wait most of the time.
var slowest = []string{"test/packaging", "test/explore", "test/cni", "test/sim", "provider/softroce", "test/scale",
	"test/subnet", "test/arch", "membership/etcd", "mpa", "hostnet", "datapath", "agent", "ipoib", "cmd/ipoibcmd"}

// oneMore makes go test run one package more than there are processors, because some packages wait.
var oneMore = fmt.Sprintf("-p=%d", runtime.GOMAXPROCS(0)+1)

// clockedPackages are those whose tests send on this machine's network, or run on several threads, and look at the
// clock.
var clockedPackages = []string{"agent", "cmd/ipoibcmd", "datapath", "hostnet", "internal/simfabric", "membership/etcd",
	"membership/source", "mpa/sctp", "provider/softiwarp", "provider/softroce", "rdmacm", "rpcrdma/transport", "test/cni",
	"test/subnet", "tun", "verbs/events", "verbs/regions"}

// oneGoroutine are packages whose tests run each world on one goroutine, so that the race detector finds
// nothing. With it they take five minutes.
var oneGoroutine = []string{"test/sim"}

// fromSource are packages whose tests read source, or build and install programs: neither the race detector
// nor another architecture changes what they see. They take minutes each time.
var fromSource = []string{"test/packaging", "test/arch", "internal/mutants"}

// startsGoroutines matches what a package or its tests have that run on more than one goroutine.
var startsGoroutines = regexp.MustCompile(`\bgo (func\b|[\w.]+\()|\.Go\(|\.Parallel\(|\bAfterFunc\(|\batomic\.|"sync"`)

// hasThreads reports whether a directory has source that startsGoroutines matches. It reports true if the source
// cannot be read.
func hasThreads(dir string) bool {
	files, _ := filepath.Glob(filepath.Join(dir, "*.go"))
	for _, f := range files {
		if b, err := os.ReadFile(f); err != nil || startsGoroutines.Match(b) {
			return true
		}
	}
	return len(files) == 0
}

// group sorts the packages of the tree. threads reports whether those in a directory start goroutines.
func group(packages []string, threads func(dir string) bool) (g grouping) {
	for _, p := range packages {
		dir := strings.TrimPrefix(p, "ipoibcm/")
		switch {
		case strings.HasPrefix(dir, "test/interop"): // boots virtual machines, see -interop
			continue
		case dir == "test/netns":
			g.netns = append(g.netns, p)
			continue
		case slices.Contains(clockedPackages, dir):
			g.clocked = append(g.clocked, p)
		default:
			g.pure = append(g.pure, p)
			if threads(dir) && !slices.Contains(oneGoroutine, dir) && !slices.Contains(fromSource, dir) {
				g.pureThreads = append(g.pureThreads, p)
			}
		}
		g.unit = append(g.unit, p)
	}
	place := func(p string) int {
		if i := slices.Index(slowest, strings.TrimPrefix(p, "ipoibcm/")); i >= 0 {
			return i
		}
		return len(slowest)
	}
	for _, list := range [][]string{g.unit, g.clocked, g.pure, g.pureThreads} {
		slices.SortStableFunc(list, func(a, b string) int { return place(a) - place(b) })
	}
	return g
}

// check returns the function of a step that is no test: it calls f and records the result under name.
func (r *run) check(name string, f func() error) func() {
	return func() {
		if err := f(); err != nil {
			fmt.Fprintf(r.out, "FAIL %s: %v\n", name, err)
			r.note(name, failed, err.Error())
			return
		}
		r.note(name, passed, "")
	}
}

// stream runs a command with the priority of [behind], and shows what it prints.
func (r *run) stream(command ...string) error {
	return r.show(exec.Command(behind[0], slices.Concat(behind[1:], command)...))
}

// show runs a command and shows what it prints.
func (r *run) show(c *exec.Cmd) error {
	c.Stdout, c.Stderr = r.out, r.out
	return c.Run()
}

// goWith returns a command of go with more variables in its environment.
func goWith(env []string, args ...string) *exec.Cmd {
	c := exec.Command("go", args...)
	c.Env = append(os.Environ(), env...)
	return c
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
	program, err := staticcheck.Build(context.Background(), ".cache")
	if err != nil {
		r.missing("staticcheck", err.Error())
		return
	}
	r.check("staticcheck", func() error { return r.stream(program, "./...") })()
}

// libibverbs vets the code that is built only with libibverbs. Its tests need RDMA
// devices: see -interop.
func (r *run) libibverbs() {
	if _, err := os.Stat("/usr/include/infiniband/verbs.h"); err != nil {
		r.missing("libibverbs", "its header files are not installed (libibverbs-dev): provider/ibverbs is not looked at")
		return
	}
	r.check("go vet with libibverbs", func() error {
		return r.show(goWith([]string{"CGO_ENABLED=1"}, "vet", "-tags=ibverbs", "./provider/ibverbs", "./cmd/ipoibcmd"))
	})()
}

// mutants makes a tenth of the mutants in the list, chosen by the date, and expects
// tests to fail for each.
func (r *run) mutants() {
	r.check("mutants", func() error {
		return r.stream("go", "run", "./internal/mutants", "-fraction", "10", "-seed", time.Now().Format("20060102"))
	})()
}

func lastLine(s string) string {
	s = strings.TrimSpace(s)
	return s[strings.LastIndexByte(s, '\n')+1:]
}

// needs records which programs and rights are missing that some tests need. Those tests
// skip by themselves.
func (r *run) needs() {
	if r.only != "" {
		return
	}
	for _, n := range []struct{ program, use string }{
		{"nft", "tests that count and drop packets in the kernel are skipped"},
		{"tshark", "captures are not compared with Wireshark's reading"},
		{"python3", "docs/vectors is read by our own code only"},
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

// race returns the function of a step that tests with the race detector, if building with it works.
func (r *run) race(at place, packages []string, flags ...string) func() {
	return func() {
		c := goWith([]string{"CGO_ENABLED=1"}, "build", "-race", "-o", os.DevNull, "./internal/specs")
		if out, err := c.CombinedOutput(); err != nil {
			r.missing("race detector", "needs cgo and a C compiler: "+cmp.Or(lastLine(string(out)), err.Error()))
			return
		}
		at.label = " -race"
		r.testAt(at, packages, append([]string{"-race"}, flags...)...)
	}
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
	var used syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_CHILDREN, &used) // it cannot fail
	cpu := time.Duration(used.Utime.Nano() + used.Stime.Nano())
	fmt.Fprintf(w, "%d passed, %d failed, %d skipped in %v, %v of processor time (%s, %s/%s)\n", n[passed],
		n[failed], n[skipped], r.out.elapsed(), cpu.Round(time.Second), runtime.Version(), runtime.GOOS, runtime.GOARCH)
	return n[failed] == 0
}
