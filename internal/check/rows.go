package main

import (
	"cmp"
	"fmt"
	"os/exec"
	"strings"

	"ipoibcm/internal/long"
)

// showRows records as failed the tests that show a requirement according to
// docs/specs.md, but were skipped or did not run. It does so only with CI=true, where
// every tool is installed, and without -only. Elsewhere the list of skipped tests is
// enough.
func (r *run) showRows() {
	if !r.ci || r.only != "" {
		return
	}
	out, err := exec.Command("go", "run", "./internal/specs", "-tests").Output()
	if err != nil {
		r.note("tests that show rows", failed, fmt.Sprintf("go run ./internal/specs -tests: %v", err))
		return
	}
	r.mustPass(strings.Fields(string(out)))
}

// byHand begins the reason of a skipped test that would run until somebody stops it. Such
// a test shows no more than other tests do, so that mustPass does not fail it.
const byHand = "runs until it is stopped"

// mustPass records as failed each of the tests, named by package and test, that was
// skipped wholly or in part, or that did not run although its package did. In the short
// form a test may be skipped because it belongs to the long form.
func (r *run) mustPass(tests []string) {
	ran := map[string]bool{} // packages
	skips := map[string]string{}
	best := r.anywhere()
	for name, res := range best {
		pkg, test := splitTest(name)
		ran[pkg] = ran[pkg] || test != ""
		if res.outcome == skipped && (r.long || res.why != long.Reason) && !strings.HasPrefix(res.why, byHand) {
			top, _, _ := strings.Cut(test, "/")
			skips[pkg+"."+top] = cmp.Or(res.why, "no reason given")
		}
	}
	for _, name := range tests {
		pkg, _ := splitTest(name)
		switch why, skip := skips[name]; {
		case skip:
			r.note(name, failed, "shows rows of docs/specs.md and was skipped: "+why)
		case ran[pkg] && best[name] == nil:
			r.note(name, failed, "shows rows of docs/specs.md and did not run")
		}
	}
}

// anywhere returns the result of each test, whatever place it ran in. Of several
// places the largest outcome counts: a test that passes on one kernel or processor,
// and is skipped on another, has passed.
func (r *run) anywhere() map[string]*result {
	best := map[string]*result{}
	for _, name := range r.order {
		test, _, _ := strings.Cut(name, " (")
		if res := r.results[name]; best[test] == nil || res.outcome > best[test].outcome {
			best[test] = res
		}
	}
	return best
}

// splitTest splits "path/of/package.TestName/sub/test" before TestName. test is empty
// if name is not the name of a test.
func splitTest(name string) (pkg, test string) {
	for _, kind := range []string{".Test", ".Fuzz", ".Example"} {
		if i := strings.Index(name, kind); i >= 0 {
			return name[:i], name[i+1:]
		}
	}
	return name, ""
}
