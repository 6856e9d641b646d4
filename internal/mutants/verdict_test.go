package main

import (
	"errors"
	"io"
	"path/filepath"
	"strings"
	"testing"
)

func TestJudge(t *testing.T) {
	failed := errors.New("exit status 1")
	const says = "--- FAIL: TestX (0.00s)\n    x_test.go:3: got 1, want 2\nFAIL\n"
	for _, tt := range []struct {
		name string
		m    mutant
		r    outcome
		want result
	}{
		{"a test fails", mutant{}, outcome{says, failed, false}, killed},
		{"all pass", mutant{}, outcome{"PASS\n", nil, false}, survived},
		{"all pass, as must be", mutant{equivalent: "why"}, outcome{"PASS\n", nil, false}, equivalent},
		{"a test fails, though none can", mutant{equivalent: "why"}, outcome{says, failed, false}, broken},
		{"a panic in another goroutine", mutant{}, outcome{"panic: x\n", failed, false}, killed},
		{"a deadlock", mutant{}, outcome{"fatal error: all goroutines are asleep\n", failed, false}, killed},
		{"it does not start", mutant{}, outcome{"no such file\n", failed, false}, broken},
		{"no test", mutant{}, outcome{"testing: warning: no tests to run\nPASS\n", nil, false}, broken},
		{"a hang", mutant{}, outcome{"panic: test timed out after 1s\n", failed, false}, broken},
		{"a hang that is allowed", mutant{hangs: true}, outcome{"panic: test timed out after 1s\n", failed, false}, timedOut},
		{"a hang that had to be ended", mutant{}, outcome{"", failed, true}, broken},
	} {
		if got, why := judge(&tt.m, tt.r); got != tt.want {
			t.Errorf("%s: %s (%s), want %s", tt.name, got, why, tt.want)
		}
	}
}

// A survivor and an error fail the whole; what was killed and equivalents do not.
func TestSummarize(t *testing.T) {
	m := &mutant{area: "a", name: "R: m", edits: []edit{{"f.go", "x", "y"}}}
	for res, want := range map[result]bool{killed: true, timedOut: true, equivalent: true, survived: false,
		broken: false} {
		if got := summarize(io.Discard, []verdict{{mutant: m, Result: res}}); got != want {
			t.Errorf("%s: %v, want %v", res, got, want)
		}
	}
	var out strings.Builder
	summarize(&out, []verdict{{mutant: m, Result: survived}})
	for _, want := range []string{"survived: R: m", "f.go", "- x", "+ y"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the summary does not say %q:\n%s", want, &out)
		}
	}
}

// A journal answers for the tree and the text that it was written for.
func TestJournal(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x", "journal")
	m := &mutant{name: "R: m", pkg: "p", tests: []string{"T"}, edits: []edit{{"f.go", "x", "y"}}}
	bad := &mutant{name: "R: n", pkg: "p", tests: []string{"T"}, edits: []edit{{"f.go", "x", "z"}}}
	j, err := openJournal(path, "tree", false)
	if err != nil {
		t.Fatal(err)
	}
	j.put(verdict{mutant: m, Result: killed})
	j.put(verdict{mutant: bad, Result: broken})
	j.close()
	for _, tt := range []struct {
		name, tree string
		resume     bool
		m          *mutant
		want       bool
	}{
		{"the same", "tree", true, m, true},
		{"another tree", "tree2", true, m, false},
		{"an error is tried again", "tree", true, bad, false},
		{"another text", "tree", true, &mutant{name: "R: m", pkg: "p", tests: []string{"T"},
			edits: []edit{{"f.go", "x", "q"}}}, false},
		{"not asked for", "tree", false, m, false},
	} {
		j, err := openJournal(path, tt.tree, tt.resume)
		if err != nil {
			t.Fatal(err)
		}
		if _, got := j.verdict(tt.m); got != tt.want {
			t.Errorf("%s: %v, want %v", tt.name, got, tt.want)
		}
		j.close()
	}
}
