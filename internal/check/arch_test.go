package main

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// What is chosen for emulation by name is there: a test that was renamed would be
// left out, or run for minutes, without a word.
func TestEmulations(t *testing.T) {
	for _, e := range emulations {
		var code []byte
		for _, p := range e.packages {
			dir, below := strings.CutSuffix(p, "/...")
			pattern := filepath.Join("..", "..", dir, "*_test.go")
			if below {
				pattern = filepath.Join("..", "..", dir, "*", "*_test.go")
			}
			files, _ := filepath.Glob(pattern)
			if len(files) == 0 {
				t.Errorf("package %s has no tests", p)
			}
			for _, f := range files {
				b, err := os.ReadFile(f)
				if err != nil {
					t.Fatal(err)
				}
				code = append(code, b...)
			}
		}
		for _, name := range slices.Concat(e.run, e.skip) {
			if !bytes.Contains(code, []byte("\nfunc Test"+name+"(")) {
				t.Errorf("no package of %v has Test%s", e.packages, name)
			}
		}
	}
	if got, want := (emulation{run: []string{"A", "B"}, skip: []string{"C"}}).flags(),
		[]string{"-run=^Test(A|B)$", "-skip=^Test(C)$"}; !slices.Equal(got, want) {
		t.Errorf("flags %q, want %q", got, want)
	}
}

// Results say where a test ran, and one that passes somewhere has shown its rows.
func TestPlaces(t *testing.T) {
	r := newRun(new(bytes.Buffer))
	for at, action := range map[string]string{"": "skip", "s390x": "pass", "arm": "fail"} {
		in := strings.NewReader(`{"Action":"` + action + `","Package":"p","Test":"TestA"}` + "\n" +
			`{"Action":"pass","Package":"p"}`)
		if _, err := r.readTests(in, place{name: at}, 1, func() {}); err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range map[string]outcome{"p.TestA": skipped, "p.TestA (s390x)": passed, "p.TestA (arm)": failed} {
		if res := r.results[name]; res == nil || res.outcome != want {
			t.Errorf("%s: %+v, want outcome %d", name, res, want)
		}
	}
	delete(r.results, "p.TestA (arm)")
	r.order = slices.DeleteFunc(r.order, func(s string) bool { return s == "p.TestA (arm)" })
	before := len(r.order)
	if r.mustPass([]string{"p.TestA"}); len(r.order) != before || r.results["p.TestA"].outcome != skipped {
		t.Errorf("a test that passed on s390x counts as skipped: %+v", r.results["p.TestA"])
	}
}

func TestEmulatorIsNamed(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	_, err := emulator("arm64")
	if want := "qemu-aarch64-static is not installed (package qemu-user-static)"; err == nil || err.Error() != want {
		t.Errorf("error %v, want %s", err, want)
	}
}
