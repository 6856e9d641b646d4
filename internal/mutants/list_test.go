package main

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// enough is how many mutants the lists have at least.
const enough = 250

// areas are what the mutants break, each with one of its mutants' words, and how
// many there are at least.
var areas = []struct {
	name    string
	pattern string
	least   int
}{
	{"crossing REQs", `4755-3\.3-`, 10},
	{"private data", `4755-6-|private data`, 5},
	{"MTU", `^mtu$`, 10},
	{"service IDs", `4755-3\.5-|serviceid`, 5},
	{"flags", `4755-3\.1-`, 5},
	{"headers", `^headers$`, 15},
	{"ND, ARP, DAD", `^neighbours$`, 25},
	{"RoCE transport", `^roce$`, 25},
	{"Q_Key, P_Key, GID", `^keys$`, 8},
	{"routes", `^routes$`, 3},
	{"MPA", `^mpa$`, 30},
	{"RFC 8797", `^rfc8797$`, 10},
	{"RPC-over-RDMA version two", `^version2$`, 40},
	{"control API", `^control$`, 10},
}

const root = "../.."

func repository(t *testing.T) []*mutant {
	t.Helper()
	all, err := readLists(filepath.Join(root, lists))
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// rowID is a row of docs/requirements-*.tsv.
var rowID = regexp.MustCompile(`\b(?:4755|6581|8797|V2)-R?[0-9]+(?:\.[0-9]+)*-[0-9]+\b`)

// rows are the rows that a mutant's rule names.
func (m *mutant) rows() []string {
	rule, _, _ := strings.Cut(m.name, ": ")
	return slices.Compact(rowID.FindAllString(rule, -1))
}

// What the lists say of the tree is so: each edit has its place, each row and
// each test exists.
func TestLists(t *testing.T) {
	all := repository(t)
	if len(all) < enough {
		t.Errorf("%d mutants, want %d", len(all), enough)
	}
	tr := &tree{read: func(file string) ([]byte, error) { return os.ReadFile(filepath.Join(root, file)) }}
	rows, tests := knownRows(t), map[string][]string{}
	for _, m := range all {
		if _, err := tr.asleep(m); err != nil {
			t.Errorf("%s (%s): %v", m.name, m.area, err)
		}
		for _, r := range m.rows() {
			if !rows[r] {
				t.Errorf("%s (%s): there is no row %s", m.name, m.area, r)
			}
		}
		if tests[m.pkg] == nil {
			tests[m.pkg] = testsOf(t, m.pkg)
		}
		for _, name := range m.tests {
			name, _, _ = strings.Cut(name, "/")
			if !slices.Contains(tests[m.pkg], name) {
				t.Errorf("%s (%s): there is no %s in %s", m.name, m.area, name, m.pkg)
			}
		}
	}
	for _, a := range areas {
		p, n := regexp.MustCompile(a.pattern), 0
		for _, m := range all {
			if slices.ContainsFunc(m.words(), p.MatchString) {
				n++
			}
		}
		if n < a.least {
			t.Errorf("%s: %d mutants, want %d", a.name, n, a.least)
		}
	}
}

// knownRows are the rows of all texts.
func knownRows(t *testing.T) map[string]bool {
	paths, err := filepath.Glob(filepath.Join(root, "docs", "requirements-*.tsv"))
	if err != nil || len(paths) == 0 {
		t.Fatalf("no rows: %v", err)
	}
	rows := map[string]bool{}
	for _, path := range paths {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for l := range strings.Lines(string(b)) {
			id, _, _ := strings.Cut(l, "\t")
			rows[id] = true
		}
	}
	return rows
}

var testFunc = regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)\w*)\(`)

// testsOf are the names of the tests in a directory.
func testsOf(t *testing.T, dir string) (names []string) {
	paths, err := filepath.Glob(filepath.Join(root, dir, "*_test.go"))
	if err != nil || len(paths) == 0 {
		t.Fatalf("%s: no tests: %v", dir, err)
	}
	for _, path := range paths {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range testFunc.FindAllStringSubmatch(string(b), -1) {
			names = append(names, f[1])
		}
	}
	return names
}

const sample = `# A list.
mutant 4755-3.3-5: one thing
file a/a.go
- old
- 	older
+ new
- gone
file a/b.go
- x
+ y
tests a TestA TestB/^c$
hangs

mutant README: another
file a/a.go
- old
tests b TestC
equivalent it is the same
`

func TestParseList(t *testing.T) {
	all, err := parseList("area", sample)
	if err != nil {
		t.Fatal(err)
	}
	if len(all) != 2 {
		t.Fatalf("%d mutants, want 2", len(all))
	}
	m := all[0]
	want := []edit{{"a/a.go", "old\n\tolder", "new"}, {"a/a.go", "gone", ""}, {"a/b.go", "x", "y"}}
	if !slices.Equal(m.edits, want) {
		t.Errorf("edits %q, want %q", m.edits, want)
	}
	if got, want := m.pattern(), "^TestA$|^TestB$/^c$"; got != want {
		t.Errorf("pattern %q, want %q", got, want)
	}
	if got := m.rows(); !slices.Equal(got, []string{"4755-3.3-5"}) {
		t.Errorf("rows %q", got)
	}
	if !m.hangs || all[1].hangs {
		t.Errorf("hangs: %v and %v, want the first", m.hangs, all[1].hangs)
	}
	if got, want := all[1].equivalent, "it is the same"; got != want {
		t.Errorf("equivalent %q, want %q", got, want)
	}
	for _, bad := range []string{
		"mutant x", "file a.go", "- old", "mutant R: m\n- old", "mutant R: m\nfile f\n+ new", "mutant R: m\nfile f\n- a\n+ b",
		"mutant R: m\ntests p T", "mutant R: m\nfile f\n- a\n+ a\ntests p T", "mutant R: m\nfile f\n- a\ntests p",
		"mutant R: m\nwhat",
	} {
		if _, err := parseList("area", bad); err == nil {
			t.Errorf("no error: %q", bad)
		}
	}
}

func TestChoose(t *testing.T) {
	all := repository(t)
	pick := func(o options) string {
		ms, err := choose(all, &o)
		if err != nil {
			t.Fatal(err)
		}
		if n := (len(all) + 9) / 10; o.fraction == 10 && len(ms) != n {
			t.Errorf("a tenth of %d is %d, want %d", len(all), len(ms), n)
		}
		var names []string
		for _, m := range ms {
			names = append(names, m.name)
		}
		return strings.Join(names, "\n")
	}
	if a, b := pick(options{fraction: 10, seed: 7}), pick(options{fraction: 10, seed: 7}); a != b {
		t.Error("one seed chooses twice differently")
	}
	if a, b := pick(options{fraction: 10, seed: 7}), pick(options{fraction: 10, seed: 8}); a == b {
		t.Error("two seeds choose the same")
	}
	if _, err := choose(all, &options{only: "no such mutant"}); err == nil {
		t.Error("nothing chosen, and no error")
	}
}
