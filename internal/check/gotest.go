package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"time"
)

// maxTestLine bounds one line of go test -json, in octets.
const maxTestLine = 16 << 20

// maxShown is how many lines of one failing test are printed: its end.
const maxShown = 200

// test runs go test on packages and records every test. None is taken from Go's
// cache, which does not know that tests build and run the program.
func (r *run) test(name string, timeout time.Duration, packages []string, flags ...string) {
	if !r.wanted(name) || len(packages) == 0 {
		return
	}
	args := append([]string{"test", "-json", "-vet=off", "-count=1", "-timeout=" + timeout.String()}, flags...)
	fmt.Fprintf(r.out, "==== %s: go %s (%d packages)\n", name, strings.Join(args, " "), len(packages))
	c := exec.Command("go", append(args, packages...)...)
	c.Env = os.Environ()
	if slices.Contains(flags, "-race") {
		c.Env = append(c.Env, "CGO_ENABLED=1")
	}
	c.Stderr = r.out
	out, err := c.StdoutPipe()
	if err == nil {
		err = c.Start()
	}
	if err != nil {
		r.note(name, failed, err.Error())
		return
	}
	bad, err := r.readTests(out)
	if err != nil {
		r.note(name, failed, err.Error())
		io.Copy(io.Discard, out)
	}
	if err := c.Wait(); err != nil && bad == 0 {
		r.note(name, failed, err.Error())
	}
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
}

// readTests takes in the events of one go test, shows a line per package and
// the output of what failed, and returns how many failures there were.
func (r *run) readTests(in io.Reader) (bad int, err error) {
	packages := map[string]*testPackage{}
	builds := map[string][]string{}
	s := bufio.NewScanner(in)
	s.Buffer(nil, maxTestLine)
	for s.Scan() {
		var e testEvent
		if json.Unmarshal(s.Bytes(), &e) != nil {
			fmt.Fprintln(r.out, s.Text()) // go test itself has something to say
			continue
		}
		p := packages[e.Package]
		if p == nil {
			p = &testPackage{lines: map[string][]string{}}
			packages[e.Package] = p
		}
		switch e.Action {
		case "build-output":
			builds[e.ImportPath] = append(builds[e.ImportPath], e.Output)
		case "output":
			p.lines[e.Test] = append(p.lines[e.Test], e.Output)
		case "pass", "fail", "skip":
			if e.Test != "" {
				bad += r.ended(p, &e)
			} else {
				bad += r.packageEnded(p, &e, builds)
				delete(packages, e.Package)
			}
		}
	}
	return bad, s.Err()
}

// ended records the end of one test.
func (r *run) ended(p *testPackage, e *testEvent) (bad int) {
	name := e.Package + "." + e.Test
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
		slices.Reverse(lines) // the first message is what went wrong, the later ones may be logs
		r.note(name, failed, reason(lines))
		slices.Reverse(lines)
		fmt.Fprintf(r.out, "---- %s\n%s", name, strings.Join(lines[max(0, len(lines)-maxShown):], ""))
	}
	delete(p.lines, e.Test)
	return bad
}

// packageEnded shows the end of one package. A package can fail without a test
// that does: it does not build, it panics, its time is over.
func (r *run) packageEnded(p *testPackage, e *testEvent, builds map[string][]string) (bad int) {
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
		for name, l := range p.lines { // of those that have not ended
			if name != "" {
				why = name + " did not end"
			}
			lines = append(lines, l...)
		}
		r.note(e.Package, failed, why)
		fmt.Fprintf(r.out, "---- %s: %s\n%s", e.Package, why, strings.Join(lines[max(0, len(lines)-maxShown):], ""))
	}
	word := "ok  "
	if e.Action == "fail" {
		word = "FAIL"
	}
	fmt.Fprintf(r.out, "%s %-40s %7.1f s  %d tests", word, e.Package, e.Elapsed, p.tests)
	if p.skips > 0 {
		fmt.Fprintf(r.out, ", %d skipped", p.skips)
	}
	fmt.Fprintln(r.out)
	return bad
}

var atLine = regexp.MustCompile(`^\s+\S+\.go:\d+: `)

// reason returns the last message of a test, without its place in the source.
func reason(lines []string) string {
	for _, l := range slices.Backward(lines) {
		if loc := atLine.FindStringIndex(l); loc != nil {
			return strings.TrimSpace(l[loc[1]:])
		}
	}
	return ""
}
