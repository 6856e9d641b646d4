package mutant

import (
	"strings"
	"testing"
)

func TestApply(t *testing.T) {
	read := func(string) ([]byte, error) { return []byte("package p\n\nfunc f(a bool) bool { return a }\n"), nil }
	files, err := apply([]Change{{"I-1", "p/p.go", "return a ", "return a && !OFF "}}, read)
	if err != nil || len(files) != 2 {
		t.Fatal(files, err)
	}
	if got := files["p/p.go"]; !strings.Contains(got, `return a && !(mutantName == "I-1") }`) {
		t.Error(got)
	}
	if got := files["p/zz_without.go"]; !strings.HasPrefix(got, "package p\n") || !strings.Contains(got, "var mutantName") {
		t.Error(got)
	}
	for _, old := range []string{"return b", "a"} { // none, several
		if _, err := apply([]Change{{"I-1", "p/p.go", old, ""}}, read); err == nil || !strings.Contains(err.Error(), "want once") {
			t.Errorf("%q: %v", old, err)
		}
	}
}

func TestSaid(t *testing.T) {
	out := "--- FAIL: TestX\n    x_test.go:3: one\n    more\n    x_test.go:4: two\n"
	if got := Said(out, 1); got != "x_test.go:3: one" {
		t.Error(got)
	}
}
