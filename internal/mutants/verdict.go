package main

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"
)

// A result says what happened to a mutant.
type result string

const (
	killed     result = "killed"     // a named test failed
	timedOut   result = "timed out"  // noticed by a hang, which its entry allows
	survived   result = "survived"   // every named test passed
	equivalent result = "equivalent" // every named test passed, and the entry says why
	broken     result = "error"      // no verdict: it does not apply, compile or run
)

type verdict struct {
	mutant  *mutant
	Result  result
	Why     string // what the tests or the compiler said
	Seconds float64
}

func (v verdict) good() bool { return v.Result != survived && v.Result != broken }

// judge returns the result of a mutant after the run r of its tests, and why.
func judge(m *mutant, r outcome) (result, string) {
	switch {
	case r.late || strings.Contains(r.out, "panic: test timed out"):
		if m.hangs {
			return timedOut, "as its entry says"
		}
		return broken, "timed out, and its entry does not say that it hangs"
	case r.err == nil && strings.Contains(r.out, "no tests to run"):
		return broken, "no tests to run"
	case r.err == nil && m.equivalent != "":
		return equivalent, m.equivalent
	case r.err == nil:
		return survived, ""
	case !strings.Contains(r.out, "--- FAIL") && !strings.Contains(r.out, "panic:") &&
		!strings.Contains(r.out, "fatal error:"):
		return broken, "the tests did not run: " + r.err.Error() + ": " + firstLines(r.out, 3)
	case m.equivalent != "":
		return broken, "is no equivalent: " + firstLines(complaints(r.out), 3)
	}
	return killed, firstLines(complaints(r.out), 3)
}

// complaints returns the lines of a failed run that say what was wrong, or all lines if there are none.
func complaints(out string) string {
	var said []string
	for l := range strings.Lines(out) {
		if strings.Contains(l, "_test.go:") || strings.Contains(l, "panic:") || strings.Contains(l, "fatal error:") {
			said = append(said, l)
		}
	}
	return cmp.Or(strings.Join(said, ""), out)
}

// settle records a verdict. It prints the verdict if the mutant needs work, or with -v.
func (c *campaign) settle(v verdict) {
	c.journal.put(v)
	c.add(v)
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case v.Result == survived:
		fmt.Fprintf(c.out, "SURVIVED %s (%s)\n", v.mutant.name, v.mutant.area)
	case v.Result == broken:
		fmt.Fprintf(c.out, "ERROR %s (%s): %s\n", v.mutant.name, v.mutant.area, v.Why)
	case c.verbose:
		fmt.Fprintf(c.out, "%s %s (%s, %.1f s): %s\n", v.Result, v.mutant.name, v.mutant.area, v.Seconds, v.Why)
	}
	if done := len(c.verdicts); time.Since(c.said) > 10*time.Second || done == c.total {
		c.said = time.Now()
		passed := time.Since(c.started)
		var left time.Duration
		if fresh := done - c.again; fresh > 0 {
			left = passed / time.Duration(fresh) * time.Duration(c.total-done)
		}
		fmt.Fprintf(c.out, "%d of %d in %v, about %v left; last in %s\n",
			done, c.total, passed.Round(time.Second), left.Round(time.Second), v.mutant.pkg)
	}
}

func (c *campaign) add(v verdict) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.verdicts = append(c.verdicts, v)
}

func (c *campaign) has(m *mutant) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.ContainsFunc(c.verdicts, func(v verdict) bool { return v.mutant == m })
}

// summarize prints the number of each result by list, and the mutants that need work.
// It reports whether no mutant needs work.
func summarize(w io.Writer, vs []verdict) bool {
	kinds := []result{killed, timedOut, survived, equivalent, broken}
	areas := map[string]map[result]int{}
	total := map[result]int{}
	ok := true
	for _, v := range vs {
		if areas[v.mutant.area] == nil {
			areas[v.mutant.area] = map[result]int{}
		}
		areas[v.mutant.area][v.Result]++
		total[v.Result]++
		ok = ok && v.good()
	}
	row := func(name string, n map[result]int) {
		fmt.Fprintf(w, "%-20s", name)
		sum := 0
		for _, k := range kinds {
			fmt.Fprintf(w, "%11d", n[k])
			sum += n[k]
		}
		fmt.Fprintf(w, "%11d\n", sum)
	}
	fmt.Fprintf(w, "\n%-20s", "")
	for _, k := range kinds {
		fmt.Fprintf(w, "%11s", k)
	}
	fmt.Fprintf(w, "%11s\n", "all")
	for _, a := range slices.Sorted(maps.Keys(areas)) {
		row(a, areas[a])
	}
	row("all", total)
	for _, v := range vs {
		if v.good() {
			continue
		}
		fmt.Fprintf(w, "\n%s: %s\n", v.Result, v.mutant.name)
		for _, e := range v.mutant.edits {
			fmt.Fprintf(w, "  %s\n  - %s\n  + %s\n", e.file, e.old, e.new)
		}
		fmt.Fprintf(w, "  tests %s %s\n", v.mutant.pkg, strings.Join(v.mutant.tests, " "))
		if v.Why != "" {
			fmt.Fprintf(w, "  %s\n", v.Why)
		}
	}
	fmt.Fprintln(w)
	return ok
}
