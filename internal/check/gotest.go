package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"ipoibcm/internal/long"
)

// maxTestLine bounds one line of go test -json, in octets.
const maxTestLine = 16 << 20

// maxShown is how many lines of one failing test are printed at most: half of them the first ones, half the last ones.
const maxShown = 400

// shown returns the lines of a failing test that are printed. If there are too many, these are the first and
// the last ones, because the test's own messages may be at either end. They come first if the test prints the
// logs of programs when it ends, and last if a program's output or a stack comes before them.
func shown(lines []string) string {
	const half = maxShown / 2
	if n := len(lines) - maxShown; n > 0 {
		left := fmt.Sprintf("... %d lines are left out ...\n", n)
		lines = slices.Concat(lines[:half], []string{left}, lines[len(lines)-half:])
	}
	return strings.Join(lines, "")
}

// quiet is how long a step of tests may go without an event before it is ended. An event
// is that a test begins, ends or prints something, or that something is built. quiet does
// not bound how long a test takes: even the longest test prints something a hundred times
// as often.
const quiet = 10 * time.Minute

// A place is where tests run.
type place struct {
	name   string   // follows the names of tests in results; "" means this machine
	env    []string // added to our environment for go test
	label  string   // follows the names of packages in what is shown
	behind bool     // other processes have the processors first (nice)
}

// shortForm is where tests run on this machine in their short form, with the others before them.
var shortForm = place{env: []string{long.Variable + "="}, behind: true}

// behindOthers returns at with the others before it.
func behindOthers(at place) place {
	at.behind = true
	return at
}

// behind is the beginning of a command that runs with a lower priority than others. It is not nice's
// default of 10, with which the command would get only a tenth of a processor beside a busy program of
// another user.
var behind = []string{"nice", "-n", "4"}

// mark returns the end of the name of a test that ran at p.
func (p place) mark() string {
	if p.name == "" {
		return ""
	}
	return " (" + p.name + ")"
}

// test runs go test on packages and records every test. It takes no result from Go's
// cache, which does not know that tests build and run the program.
func (r *run) test(packages []string, flags ...string) { r.testAt(place{}, packages, flags...) }

func (r *run) testAt(at place, packages []string, flags ...string) {
	// Without debugging information (-w) programs are linked in two thirds of the time.
	args := append([]string{"test", "-json", "-vet=off", "-count=1", "-timeout=0", "-ldflags=-w"}, flags...)
	fmt.Fprintf(r.out, "go %s (%d packages)\n", strings.Join(args, " "), len(packages))
	command := append([]string{"go"}, append(args, packages...)...)
	if at.behind {
		command = slices.Concat(behind, command)
	}
	c := exec.Command(command[0], command[1:]...)
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // tests and the processes they start end together
	c.Env = append(os.Environ(), long.Variable+"="+map[bool]string{true: "1"}[r.long])
	c.Env = append(c.Env, at.env...)
	if slices.Contains(flags, "-race") {
		c.Env = append(c.Env, "CGO_ENABLED=1")
	}
	c.Stderr = r.out
	out, err := c.StdoutPipe()
	if err == nil {
		err = c.Start()
	}
	if err != nil {
		r.note("go test", failed, err.Error())
		return
	}
	defer r.out.under(c.Process.Pid)()
	watch := watchdog(quiet, func(sig syscall.Signal) {
		fmt.Fprintf(r.out, "nothing has happened for %v: %v\n", quiet, sig)
		_ = syscall.Kill(-c.Process.Pid, sig) // it may have ended meanwhile
	})
	defer watch.stop()
	bad, err := r.readTests(out, at, len(packages), watch.reset)
	if err != nil {
		r.note("go test", failed, err.Error())
		io.Copy(io.Discard, out)
	}
	if err := c.Wait(); err != nil && bad == 0 && !r.out.interrupted() {
		r.note("go test", failed, err.Error())
	}
}

// A dog is a timer that barks if it is not reset in time.
type dog struct {
	mu     sync.Mutex
	timer  *time.Timer
	after  time.Duration
	barked bool
}

// watchdog returns a dog. If its reset is not called for the duration after, the dog calls bark
// with SIGQUIT, so that the stacks of all goroutines are printed, and at most 15 s later with
// SIGKILL. stop ends the dog.
func watchdog(after time.Duration, bark func(syscall.Signal)) *dog {
	d := &dog{after: after}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.timer = time.AfterFunc(after, func() {
		d.mu.Lock()
		d.barked = true
		d.mu.Unlock()
		bark(syscall.SIGQUIT)
		d.mu.Lock()
		defer d.mu.Unlock()
		d.timer = time.AfterFunc(min(after, 15*time.Second), func() { bark(syscall.SIGKILL) })
	})
	return d
}

func (d *dog) reset() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.barked {
		d.timer.Reset(d.after)
	}
}

func (d *dog) stop() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.barked = true
	d.timer.Stop()
}

// A testEvent is one line of go test -json (go doc test2json).
type testEvent struct {
	Action      string
	Package     string
	ImportPath  string // of build-output
	Test        string
	Elapsed     float64
	Output      string
	FailedBuild string
}

// A testPackage is what has been seen of one package.
type testPackage struct {
	tests, skips int
	failed       int
	lines        map[string][]string // by test; "" is the package's own
	test         string              // under way
	began        time.Time           // of the package
}

// A testStep is what has been seen of one run of go test.
type testStep struct {
	r        *run
	at       place
	mu       sync.Mutex // the line of progress is drawn by another goroutine
	packages map[string]*testPackage
	builds   map[string][]string
	want     int // packages in all
	done     int
	tests    int
}

// about returns a text: how much remains, and what is under way.
func (s *testStep) about() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var under []string
	for name, p := range s.packages {
		if name != "" && !p.began.IsZero() {
			under = append(under, strings.TrimSpace(strings.TrimPrefix(name, "ipoibcm/")+s.at.label+" "+p.test))
		}
	}
	slices.Sort(under)
	text := fmt.Sprintf("%d of %d packages left, %d tests done", max(0, s.want-s.done), s.want, s.tests)
	if len(under) > 0 {
		return text + "; now " + strings.Join(under, ", ")
	}
	return text + "; building"
}

// readTests reads the events of one run of go test on want packages, shows a line
// per package and the output of failed tests, and returns the number of failures. It
// calls alive for every line that it reads.
func (r *run) readTests(in io.Reader, at place, want int, alive func()) (bad int, err error) {
	st := &testStep{r: r, at: at, packages: map[string]*testPackage{}, builds: map[string][]string{}, want: want}
	defer r.out.about(st.about)()
	s := bufio.NewScanner(in)
	s.Buffer(nil, maxTestLine)
	for s.Scan() {
		alive()
		var e testEvent
		if json.Unmarshal(s.Bytes(), &e) != nil {
			fmt.Fprintln(r.out, s.Text()) // a message of go test itself
			continue
		}
		bad += st.event(&e)
	}
	for name := range st.packages { // go test was killed
		if name != "" {
			bad += st.event(&testEvent{Action: "fail", Package: name})
		}
	}
	return bad, s.Err()
}

// event handles one event, and returns how many failures it adds.
func (s *testStep) event(e *testEvent) (bad int) {
	s.mu.Lock()
	p := s.packages[e.Package]
	if p == nil {
		p = &testPackage{lines: map[string][]string{}}
		s.packages[e.Package] = p
	}
	switch e.Action {
	case "start", "run", "cont":
		p.test = e.Test
		if p.began.IsZero() {
			p.began = time.Now()
		}
	case "build-output":
		s.builds[e.ImportPath] = append(s.builds[e.ImportPath], e.Output)
	case "output":
		p.lines[e.Test] = append(p.lines[e.Test], e.Output)
	}
	ends := e.Action == "pass" || e.Action == "fail" || e.Action == "skip"
	switch {
	case ends && e.Test != "":
		s.tests++
	case ends:
		s.done++
		delete(s.packages, e.Package)
	}
	s.mu.Unlock()
	switch { // without the lock: these write to r.out, and r.out calls about with its own lock held
	case ends && e.Test != "":
		return s.r.ended(p, s.at, e)
	case ends:
		return s.r.packageEnded(p, s.at, e, s.builds, s.done, s.want)
	}
	return 0
}

// ended records the end of one test.
func (r *run) ended(p *testPackage, at place, e *testEvent) (bad int) {
	name := e.Package + "." + e.Test + at.mark()
	lines := p.lines[e.Test]
	p.tests++
	switch e.Action {
	case "pass":
		r.note(name, passed, "")
	case "skip":
		p.skips++
		r.note(name, skipped, reason(lines))
	case "fail":
		bad = 1
		p.failed++
		r.note(name, failed, failure(strings.TrimPrefix(e.Package, "ipoibcm/"), lines))
		fmt.Fprintf(r.out, "---- %s\n%s", name, shown(lines))
	}
	delete(p.lines, e.Test)
	return bad
}

// packageEnded shows the end of one package. A package can fail although no test of
// it did: it does not build, it panics, or it is killed.
func (r *run) packageEnded(p *testPackage, at place, e *testEvent, builds map[string][]string, done,
	want int) (bad int) {
	switch {
	case e.Action == "skip":
		return 0 // no test files
	case e.Action == "fail" && p.failed == 0:
		bad = 1
		why := "failed outside its tests"
		var lines []string
		if e.FailedBuild != "" {
			why, lines = "does not build", builds[e.FailedBuild]
		}
		for name, l := range p.lines { // of tests that have not ended
			if name != "" {
				why = name + " did not end"
			}
			lines = append(lines, l...)
		}
		r.note(e.Package+at.mark(), failed, why)
		fmt.Fprintf(r.out, "---- %s: %s\n%s", e.Package+at.mark(), why, shown(lines))
	}
	word := map[string]string{"pass": "ok  ", "fail": "FAIL"}[e.Action]
	line := fmt.Sprintf("%s %3d/%d  %-32s %7.1f s  %d tests", word, done, want,
		strings.TrimPrefix(e.Package, "ipoibcm/")+at.label, e.Elapsed, p.tests)
	if p.skips > 0 {
		line += fmt.Sprintf(", %d skipped", p.skips)
	}
	fmt.Fprintln(r.out, line)
	return bad
}

// message matches the first line of a test's message, with its place in the source.
var message = regexp.MustCompile(`^\s+(\S+\.go):(\d+): (.*)`)

// reason returns the last message of a test, without its place in the source.
func reason(lines []string) string {
	for _, l := range slices.Backward(lines) {
		if m := message.FindStringSubmatch(l); m != nil {
			return strings.TrimSpace(m[3])
		}
	}
	return ""
}

// failure returns the message of a failed test that probably says why it failed. The output of go test does
// not distinguish t.Error from t.Log, so failure reads the source line of each message, in dir. It returns the
// first message whose line calls Error or Fatal. If there is none, it returns the first whose line does not
// call Log either: a helper wrote that message, and the line is that of the helper's caller. If all lines call
// Log, it returns the first message.
func failure(dir string, lines []string) (first string) {
	var perhaps string
	for _, l := range lines {
		m := message.FindStringSubmatch(l)
		if m == nil {
			continue
		}
		text := strings.TrimSpace(m[3])
		first = cmp.Or(first, text)
		switch source := sourceLine(filepath.Join(dir, m[1]), m[2]); {
		case fails.MatchString(source):
			return text
		case !logs.MatchString(source):
			perhaps = cmp.Or(perhaps, text)
		}
	}
	return cmp.Or(perhaps, first)
}

var (
	fails = regexp.MustCompile(`\.(Error|Fatal)f?\(`)
	logs  = regexp.MustCompile(`\.Logf?\(`)
)

// sourceLine returns a line of a source file, "" if there is none.
func sourceLine(file, line string) string {
	source, err := os.ReadFile(file)
	if err != nil {
		return ""
	}
	n, err := strconv.Atoi(line)
	lines := strings.Split(string(source), "\n")
	if err != nil || n < 1 || n > len(lines) {
		return ""
	}
	return lines[n-1]
}
