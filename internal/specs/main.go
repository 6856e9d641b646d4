// Command specs writes docs/specs.md: every row of docs/requirements-4755.tsv
// with the tests that name it, and the rows that no test names with the reason
// in docs/requirements-reasons.tsv.
//
//	go run ./internal/specs            # write docs/specs.md
//	go run ./internal/specs -check     # fail if it is out of date or too thin
package main

import (
	"bytes"
	"cmp"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// enough is the share of rows that must be named by tests.
const enough = 0.95

var (
	rowID    = regexp.MustCompile(`4755-[0-9]+(?:\.[0-9]+)?-[0-9]+`)
	testFunc = regexp.MustCompile(`^func ((?:Test|Fuzz|Benchmark)\w*)\(`)
)

// counts holds the levels whose rows must be shown by tests.
var counts = map[string]bool{"MUST": true, "SHOULD": true, "must": true, "should": true, "wire": true, "implied": true, "MUST NOT": true, "SHOULD NOT": true}

type row struct{ id, section, level, text string }

func main() {
	check := flag.Bool("check", false, "fail if docs/specs.md is out of date or too few rows are tested")
	flag.Parse()
	if err := run(*check); err != nil {
		fmt.Fprintln(os.Stderr, "specs:", err)
		os.Exit(1)
	}
}

func run(check bool) error {
	rows, err := readRows("docs/requirements-4755.tsv")
	if err != nil {
		return err
	}
	reasons, err := readReasons("docs/requirements-reasons.tsv")
	if err != nil {
		return err
	}
	named, err := scan(".")
	if err != nil {
		return err
	}
	known := map[string]bool{}
	for _, r := range rows {
		known[r.id] = true
	}
	for id, tests := range named {
		if !known[id] {
			return fmt.Errorf("%s names row %s, which does not exist", tests[0], id)
		}
	}
	out, due, met, open := render(rows, named, reasons)
	if !check {
		return os.WriteFile("docs/specs.md", out, 0o644)
	}
	if old, _ := os.ReadFile("docs/specs.md"); !bytes.Equal(old, out) {
		return fmt.Errorf("docs/specs.md is out of date: run go run ./internal/specs")
	}
	if len(open) > 0 {
		return fmt.Errorf("rows with neither test nor reason: %s", strings.Join(open, " "))
	}
	if float64(met) < enough*float64(due) {
		return fmt.Errorf("%d of %d rows are named by tests; %.0f%% are asked for", met, due, enough*100)
	}
	fmt.Printf("specs: %d of %d rows of RFC 4755 are named by tests\n", met, due)
	return nil
}

func lines(path string) ([][]string, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var out [][]string
	for i, l := range strings.Split(strings.TrimSpace(string(b)), "\n") {
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
		rows = append(rows, row{f[0], f[1], f[2], f[3]})
	}
	return rows, nil
}

func readReasons(path string) (map[string]string, error) {
	ls, err := lines(path)
	if err != nil {
		return nil, err
	}
	m := map[string]string{}
	for _, f := range ls {
		if len(f) != 2 {
			return nil, fmt.Errorf("%s: %q: want id and reason", path, f[0])
		}
		m[f[0]] = f[1]
	}
	return m, nil
}

// scan returns, for each row, the tests that name it: "dir.TestName" for a
// comment in a test function, the path for a packet script.
func scan(root string) (map[string][]string, error) {
	named := map[string][]string{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if strings.HasPrefix(d.Name(), ".") && path != root || d.Name() == "bin" {
				return filepath.SkipDir
			}
			return nil
		}
		script := strings.HasSuffix(path, ".txt") && strings.Contains(path, "testdata")
		testPkg := strings.HasSuffix(path, ".go") && (strings.HasPrefix(path, "test/") || strings.Contains(path, "test/"))
		if !script && !strings.HasSuffix(path, "_test.go") && !testPkg {
			return nil
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		where := path
		var pending []string // rows named above the function they belong to
		for _, l := range strings.Split(string(b), "\n") {
			if !script {
				if strings.HasPrefix(l, "}") || strings.HasPrefix(l, ")") {
					where = path
				}
				if m := testFunc.FindStringSubmatch(l); m != nil {
					where = filepath.ToSlash(filepath.Dir(path)) + "." + m[1]
					for _, id := range pending {
						add(named, id, where)
					}
					pending = nil
				}
			}
			comment := l
			if !script {
				i := strings.Index(l, "//")
				if i < 0 {
					if pending = nil; where == path && strings.TrimSpace(l) != "" {
						continue
					}
					continue
				}
				comment = l[i:]
			}
			for _, id := range rowID.FindAllString(comment, -1) {
				if !script && where == path && strings.HasPrefix(l, "//") {
					pending = append(pending, id)
					continue
				}
				add(named, id, where)
			}
		}
		return nil
	})
	return named, err
}

func add(m map[string][]string, id, where string) {
	if !slices.Contains(m[id], where) {
		m[id] = append(m[id], where)
	}
}

func render(rows []row, named map[string][]string, reasons map[string]string) (out []byte, due, met int, open []string) {
	var tested, untested bytes.Buffer
	for _, r := range rows {
		tests := slices.Sorted(slices.Values(named[r.id]))
		if counts[r.level] {
			due++
		}
		if len(tests) > 0 {
			if counts[r.level] {
				met++
			}
			more := ""
			if len(tests) > 3 {
				more = fmt.Sprintf(" and %d more", len(tests)-3)
				tests = tests[:3]
			}
			fmt.Fprintf(&tested, "| %s | %s | %s | %s%s |\n", r.id, r.level, r.text, strings.Join(tests, ", "), more)
			continue
		}
		why := cmp.Or(reasons[r.id], "—")
		if counts[r.level] && reasons[r.id] == "" {
			open = append(open, r.id)
		}
		fmt.Fprintf(&untested, "| %s | %s | %s | %s |\n", r.id, r.level, r.text, why)
	}
	var b bytes.Buffer
	fmt.Fprintf(&b, "# RFC 4755, row by row\n\nGenerated by `go run ./internal/specs` from `docs/requirements-4755.tsv` and the row names in tests; do not edit.\n\n")
	fmt.Fprintf(&b, "%d of %d rows of level MUST, SHOULD, must, should, wire or implied are named by a test.\n\n", met, due)
	fmt.Fprintf(&b, "## Shown by tests\n\n| row | level | requirement | tests |\n| --- | --- | --- | --- |\n%s\n", &tested)
	fmt.Fprintf(&b, "## Not named by a test\n\n| row | level | requirement | reason |\n| --- | --- | --- | --- |\n%s", &untested)
	return b.Bytes(), due, met, open
}
