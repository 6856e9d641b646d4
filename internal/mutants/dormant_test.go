package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// program shows all forms of functions that a copy has to be called from.
const program = `package p

type box[T any] struct{ v T }

func (b *box[T]) get(_ int, more ...T) (T, int) { return b.v, len(more) }

func (box[T]) constant() int { return 1 }

func largest[T int | string](a, b T) T {
	if a > b {
		return a
	}
	return b
}

var log []string

func note(string, ...int) { log = append(log, "note") }

func named() (n int) {
loop:
	for {
		for {
			n++
			break loop
		}
	}
	defer func() { n *= 2 }()
	return
}

const limit = 3

func under(n int) bool { return n < limit }
`

const programTest = `package p

import "testing"

func TestP(t *testing.T) {
	b := &box[int]{7}
	v, n := b.get(1, 2, 3)
	note("x")
	for what, ok := range map[string]bool{
		"get v": v == 7, "get n": n == 2, "constant": b.constant() == 1, "largest": largest("a", "b") == "b",
		"note": len(log) == 1, "named": named() == 2, "under": under(2) && !under(3),
	} {
		if !ok {
			t.Error(what)
		}
	}
}
`

// Every mutant sleeps until it is named, and then does what its text says.
func TestCampaign(t *testing.T) {
	if _, err := exec.LookPath("go"); err != nil {
		t.Skip("needs the go command")
	}
	dir := t.TempDir()
	for name, text := range map[string]string{"go.mod": "module m\n\ngo 1.26\n", "p/p.go": program,
		"p/p_test.go": programTest} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want := map[string]result{}
	var all []*mutant
	add := func(r result, old, new string) {
		m := &mutant{area: "a", name: old, edits: []edit{{"p/p.go", old, new}}, pkg: "p", tests: []string{"TestP"},
			number: len(all) + 1}
		all, want[m.name] = append(all, m), r
	}
	add(killed, "return b.v, len(more)", "return b.v, 0")
	add(killed, "{ return 1 }", "{ return 2 }")
	add(killed, "if a > b", "if a < b")
	add(killed, `log = append(log, "note")`, "")
	add(killed, "n *= 2", "n *= 3")
	add(killed, "limit = 3", "limit = 4") // outside of functions
	add(survived, "break loop", "break loop // again")
	add(broken, "n < limit", "n < limits") // does not compile
	add(broken, "no such text", "x")
	all = append(all, &mutant{area: "a", name: "two edits", pkg: "p", tests: []string{"TestP"}, number: len(all) + 1,
		edits: []edit{{"p/p.go", "\t\t\tn++", "\t\t\tn += 2"}, {"p/p.go", "defer func()", "n--; defer func()"}}})
	want["two edits"] = survived
	all = append(all, &mutant{area: "a", name: "no test", pkg: "p", tests: []string{"TestQ"}, number: len(all) + 1,
		edits: all[0].edits})
	want["no test"] = broken
	j, err := openJournal(filepath.Join(dir, "journal"), "tree", false)
	if err != nil {
		t.Fatal(err)
	}
	defer j.close()
	var out bytes.Buffer
	o := options{parallel: 2, bound: 60e9}
	c := campaign{options: o, root: dir, tmp: t.TempDir(), out: &out, journal: j, total: len(all)}
	c.do(all)
	for _, v := range c.verdicts {
		if v.Result != want[v.mutant.name] {
			t.Errorf("%s: %s (%s), want %s", v.mutant.name, v.Result, v.Why, want[v.mutant.name])
		}
		delete(want, v.mutant.name)
	}
	for name := range want {
		t.Errorf("%s: no verdict", name)
	}
}
