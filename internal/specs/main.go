// Command specs writes docs/specs.md: for each text with a table
// docs/requirements-NNNN.tsv (NNNN is the number of an RFC, or V2 for
// RPC-over-RDMA version two) every row, with the tests that show it and with
// what docs/requirements-reasons.tsv says of it: that it is shown in part, that
// the code deviates from it, or that no test shows it, and why.
//
//	go run ./internal/specs            # write docs/specs.md
//	go run ./internal/specs -check     # fail if it is out of date or something contradicts
//	go run ./internal/specs -tests     # print the tests that it names
//
// What counts as a test that shows a row is in docs/adr/0009-requirement-rows.md.
package main

import (
	"bytes"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// untested is the largest share of binding rows of a text that may be without a
// test.
const untested = 0.05

var (
	tableOf   = regexp.MustCompile(`^requirements-([0-9]{4}|V2)\.tsv$`)
	adrNumber = regexp.MustCompile(`^[0-9]{4}$`)
)

// A text is one RFC or draft with its rows. V2 is the draft of RPC-over-RDMA
// version two.
type text struct {
	number string
	rows   []row
}

func (t text) String() string {
	if t.number == "V2" {
		return "RPC-over-RDMA version two, revision 02, and what it takes from RFC 8166 and RFC 8167"
	}
	return "RFC " + t.number
}

type row struct{ id, level, text string }

// binding are the levels of the rows that count for untested.
var binding = map[string]bool{
	"MUST": true, "SHOULD": true, "must": true, "should": true,
	"wire": true, "implied": true, "MUST NOT": true, "SHOULD NOT": true,
}

func main() {
	check := flag.Bool("check", false, "fail if docs/specs.md is out of date, contradicts itself or shows too little")
	tests := flag.Bool("tests", false, "print the tests that show a row, as import path and name, instead")
	flag.Parse()
	do := func() error { return run(*check) }
	if *tests {
		do = func() error { return printTests(os.Stdout) }
	}
	if err := do(); err != nil {
		fmt.Fprintln(os.Stderr, "specs:", err)
		os.Exit(1)
	}
}

// run writes docs/specs.md, or compares it with what it would write.
func run(check bool) error {
	texts, shown, stray, err := read()
	if err != nil {
		return err
	}
	known := map[string]bool{}
	for _, t := range texts {
		for _, r := range t.rows {
			known[r.id] = true
		}
	}
	reasons, err := readReasons("docs/requirements-reasons.tsv", known)
	if err != nil {
		return err
	}
	for _, m := range stray {
		return fmt.Errorf("%s names row %s, where no test shows it", m.where, m.id)
	}
	for id, by := range shown {
		if !known[id] {
			return fmt.Errorf("%s names row %s, which does not exist", by.all()[0], id)
		}
	}
	if err := agree(texts, shown, reasons); err != nil {
		return err
	}
	page := render(texts, shown, reasons)
	if !check {
		return os.WriteFile("docs/specs.md", page, 0o644)
	}
	if old, _ := os.ReadFile("docs/specs.md"); !bytes.Equal(old, page) {
		return fmt.Errorf("docs/specs.md is out of date: run go run ./internal/specs")
	}
	for _, t := range texts {
		n := count(t, reasons, true)
		fmt.Printf("specs: %v: %v\n", t, n)
		if float64(n[noTest]) > untested*float64(n.sum()) {
			return fmt.Errorf("%v: %d of %d binding rows are without a test, more than %.0f%%",
				t, n[noTest], n.sum(), untested*100)
		}
	}
	return nil
}

// read returns the texts with their rows, the tests that show each row, and the rows that are named
// where they show nothing.
func read() ([]text, map[string]showing, []marker, error) {
	texts, err := readTexts()
	if err != nil {
		return nil, nil, nil, err
	}
	numbers := map[string]bool{}
	for _, t := range texts {
		numbers[t.number] = true
	}
	shown, stray, err := scan(".", func(id string) bool {
		number, _, _ := strings.Cut(id, "-")
		return numbers[number]
	})
	return texts, shown, stray, err
}

// printTests prints every test that shows a row, as "go test -json" names it.
func printTests(w io.Writer) error {
	_, shown, _, err := read()
	if err != nil {
		return err
	}
	mod, err := os.ReadFile("go.mod")
	if err != nil {
		return err
	}
	module, _, _ := strings.Cut(strings.TrimPrefix(string(mod), "module "), "\n")
	var all []string
	for _, by := range shown {
		all = append(all, by.all()...)
	}
	slices.Sort(all)
	for _, test := range slices.Compact(all) {
		fmt.Fprintf(w, "%s/%s\n", module, test)
	}
	return nil
}

// readTexts reads the tables of all texts, in the order of their numbers.
func readTexts() (texts []text, err error) {
	paths, err := filepath.Glob("docs/requirements-*.tsv")
	if err != nil {
		return nil, err
	}
	for _, path := range paths { // in order: Glob sorts
		table := tableOf.FindStringSubmatch(filepath.Base(path))
		if table == nil {
			continue // the reasons
		}
		number := table[1]
		rows, err := readRows(path)
		if err != nil {
			return nil, err
		}
		for _, r := range rows {
			if !strings.HasPrefix(r.id, number+"-") {
				return nil, fmt.Errorf("%s: row %s is of another text", path, r.id)
			}
		}
		texts = append(texts, text{number, rows})
	}
	if len(texts) == 0 {
		return nil, fmt.Errorf("no docs/requirements-NNNN.tsv here")
	}
	return texts, nil
}

func lines(path string) ([][]string, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var out [][]string
	for i, l := range strings.Split(strings.TrimRight(string(b), "\n"), "\n") {
		if i > 0 && l != "" { // the first line names the columns
			out = append(out, strings.Split(l, "\t"))
		}
	}
	return out, nil
}

func readRows(path string) ([]row, error) {
	ls, err := lines(path)
	if err != nil {
		return nil, err
	}
	var rows []row
	for _, f := range ls {
		if len(f) < 4 {
			return nil, fmt.Errorf("%s: %q has too few columns", path, f[0])
		}
		rows = append(rows, row{f[0], f[2], f[3]})
	}
	return rows, nil
}
