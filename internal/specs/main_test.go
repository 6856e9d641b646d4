package main

import (
	"bytes"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// tree makes a small tree and enters it. ROW stands for the beginning of a row's
// id: spelt out, this file would name rows itself.
func tree(t *testing.T, files map[string]string) {
	t.Helper()
	t.Chdir(t.TempDir())
	for path, text := range files {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(expand(text)), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

func expand(s string) string { return strings.ReplaceAll(s, "ROW", "4755-9.9-") }

const (
	tableFile   = "docs/requirements-4755.tsv"
	reasonsFile = "docs/requirements-reasons.tsv"
	columns     = "id\tsection\tlevel\trequirement\thow\n"
	reasonHead  = "id\tkind\treason\tadr\n"
	reasonsText = reasonHead + "ROW4\tno test\tasks for nothing\t\n" +
		"ROW5\tpart\tUC is missing\t\n" + "ROW6\tdeviates\tEthernets are short\t0004\n"
	testsFile = "cm/a_test.go"
	testsText = `package cm

import "testing"

func TestA(t *testing.T) {
	x() // ROW1
}

// It shows more.
// ROW2
func FuzzB(f *testing.F) {
	help()
}

func help() {
	x() // ROW3
}

func TestC(t *testing.T) {
	run(t, table)
}

// ROW5
var table = []int{
	1, // ROW6
}
`
)

// small has a row of each kind.
func small() map[string]string {
	return map[string]string{
		"go.mod": "module m\n",
		tableFile: columns +
			"ROW1\t9.9\tMUST\tin a body\tS\n" +
			"ROW2\t9.9\timplied\tabove a function\tS\n" +
			"ROW3\t9.9\twire\tin a helper\tS\n" +
			"ROW4\t9.9\tinfo\tnobody's\tD\n" +
			"ROW5\t9.9\tSHOULD\tin halves\tS\n" +
			"ROW6\t9.9\tMUST\tother\tS\n",
		reasonsFile:              reasonsText,
		testsFile:                testsText,
		"cm/a.go":                "package cm // ROW4 here does not count\n",
		"docs/adr/0004-other.md": "# 0004\n",
	}
}

func page(t *testing.T) string {
	t.Helper()
	if err := run(false); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile("docs/specs.md")
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestRender(t *testing.T) {
	tree(t, small())
	text := page(t)
	for _, want := range []string{
		"## RFC 4755\n\nBinding rows (MUST, SHOULD, must, should, wire, implied): " +
			"3 of 5 shown, 1 in part, 1 deviate, 0 without a test.",
		"All rows: 3 of 6 shown, 1 in part, 1 deviate, 1 without a test.",
		"| ROW1 | MUST | in a body | cm.TestA |  |  |  |",
		"| ROW2 | implied | above a function | cm.FuzzB |  |  |  |",
		"| ROW3 | wire | in a helper | cm.FuzzB |  |  |  |",
		"| ROW4 | info | nobody's |  |  |  | asks for nothing |",
		"| ROW5 | SHOULD | in halves |  | UC is missing (cm.TestC) |  |  |",
		"| ROW6 | MUST | other |  |  | Ethernets are short ([ADR 0004](adr/0004-other.md); cm.TestC) |  |",
	} {
		if !strings.Contains(text, expand(want)) {
			t.Errorf("docs/specs.md lacks %q:\n%s", expand(want), text)
		}
	}
	if err := run(true); err != nil {
		t.Error(err)
	}
}

// TestDraft: the rows of version two have letters and sections of three parts in
// their names, and other names beside them are no rows.
func TestDraft(t *testing.T) {
	files := small()
	files["cm/b_test.go"] = "package cm\nimport \"testing\"\nfunc TestD(t *testing.T) {\n" +
		"\tz() // " + "V2-" + "5.2.4-12, AMB-V2-7\n\ty() // (" + "V2-" + "R1-3); not a row: 2026-11-21\n}\n"
	files["docs/requirements-V2.tsv"] = columns + "V2-" + "5.2.4-12\t5.2.4\tMUST\tone\tS\n" +
		"V2-" + "R1-3\t8166\tMUST NOT\ttwo\tS\n"
	tree(t, files)
	text := page(t)
	for _, want := range []string{
		"## RPC-over-RDMA version two", "2 of 2 shown", "| one | cm.TestD |", "| two | cm.TestD |",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("docs/specs.md lacks %q:\n%s", want, text)
		}
	}
}

// TestOrder: tests that name a row themselves stand before those whose helper
// does, and the page names three.
func TestOrder(t *testing.T) {
	files := small()
	files["cm/b_test.go"] = "package cm\nimport \"testing\"\n" +
		"func TestD(t *testing.T) { help() }\nfunc TestE(t *testing.T) { help() }\n" +
		"func TestF(t *testing.T) {\n\tx() // ROW3\n}\n"
	tree(t, files)
	const want = "| in a helper | cm.TestF, cm.FuzzB, cm.TestD and 1 more |"
	if text := page(t); !strings.Contains(text, want) {
		t.Errorf("docs/specs.md lacks %q:\n%s", want, text)
	}
}

// TestList: -tests prints every test that shows a row once.
func TestList(t *testing.T) {
	tree(t, small())
	var out bytes.Buffer
	if err := printTests(&out); err != nil {
		t.Fatal(err)
	}
	if want := "m/cm.FuzzB\nm/cm.TestA\nm/cm.TestC\n"; out.String() != want {
		t.Errorf("got\n%swant\n%s", &out, want)
	}
}

// TestWhatCounts: where a row is named and what becomes of it. ROW9 is shown if
// the text has a test that names it.
func TestWhatCounts(t *testing.T) {
	const head = "package cm\n\nimport \"testing\"\n\n"
	for _, tt := range []struct {
		name, text string
		want       string // the tests, or the complaint
	}{
		{"in a test", "func TestX(t *testing.T) {\n\tx() // ROW9\n}\n", "cm.TestX"},
		{"in a subtest",
			"func TestX(t *testing.T) {\n\tt.Run(\"y\", func(t *testing.T) {\n\t\tx() // ROW9\n\t})\n}\n",
			"cm.TestX"},
		{"in a block comment", "func TestX(t *testing.T) {\n\t/* ROW9 */\n}\n", "cm.TestX"},
		{"in a text", "func TestX(t *testing.T) {\n\tx(\"ROW9\")\n}\n", "neither test nor reason"},
		{"in a method that a test calls",
			"func TestX(t *testing.T) {\n\tw.look()\n}\n\nfunc (w *world) look() {\n\tx() // ROW9\n}\n",
			"cm.TestX"},
		{"in a helper's helper",
			"func TestX(t *testing.T) { a() }\n\nfunc a() { b() }\n\nfunc b() {\n\tx() // ROW9\n}\n",
			"cm.TestX"},
		{"in one of a group of tables",
			"func TestX(t *testing.T) { x(a) }\n\nfunc TestY(t *testing.T) { x(b) }\n\nvar (\n\ta = 1\n\tb = 2 // ROW9\n)\n",
			"cm.TestY"},
		{"above a group of tables",
			"func TestX(t *testing.T) { x(a, b) }\n\n// ROW9\nvar (\n\ta = 1\n\tb = 2\n)\n",
			"names row ROW9, where no test shows it"},
		{"in a helper of nobody", "func a() {\n\tx() // ROW9\n}\n", "a, which no test uses, names row ROW9"},
		{"in a benchmark", "func BenchmarkX(b *testing.B) {\n\tx() // ROW9\n}\n", "names row ROW9"},
		{"in a test that another calls",
			"func TestX(t *testing.T) {\n\tx() // ROW9\n}\n\nfunc TestY(t *testing.T) { TestX(t) }\n", "cm.TestX"},
		{"in a method that is called like a test",
			"func (s suite) TestX(t *testing.T) {\n\tx() // ROW9\n}\n", "TestX, which no test uses, names row ROW9"},
		{"in TestMain", "func TestMain(m *testing.M) {\n\tx() // ROW9\n}\n", "names row ROW9"},
		{"in what go test does not take for a test",
			"func Testify(t *testing.T) {\n\tx() // ROW9\n}\n", "names row ROW9"},
		{"outside of all",
			"// ROW9 is shown elsewhere.\n\nfunc TestX(t *testing.T) {\n}\n",
			"cm/b_test.go:5 names row ROW9, where no test shows it"},
		{"nowhere", "", "rows with neither test nor reason: ROW9"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			files := small()
			files[tableFile] += "ROW9\t9.9\tMUST\tit\tS\n"
			files["cm/b_test.go"] = head + tt.text
			tree(t, files)
			err := run(false)
			if tests, ok := strings.CutPrefix(tt.want, "cm.T"); ok {
				if err != nil {
					t.Fatal(err)
				}
				if text, want := page(t), "| it | cm.T"+tests+" |"; !strings.Contains(text, want) {
					t.Errorf("docs/specs.md lacks %q:\n%s", want, text)
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), expand(tt.want)) {
				t.Errorf("got %v, want %q", err, expand(tt.want))
			}
		})
	}
}

// TestOtherFiles: what is not in a test file that go test builds shows nothing.
func TestOtherFiles(t *testing.T) {
	const text = "package cm\n\nimport \"testing\"\n\nfunc TestX(t *testing.T) {\n\tx() // ROW9\n}\n"
	for _, tt := range []struct{ name, path, text, want string }{
		{"test file", "cm/b_test.go", text, ""},
		{"build tag", "cm/b_test.go", "//go:build ibverbs\n\n" + text, "cm/b_test.go:8 names row ROW9"},
		{"other system", "cm/b_windows_test.go", text, "cm/b_windows_test.go:6 names row ROW9"},
		{"helper of the package beside", "cm/b_test.go", "package cm_test\n\nfunc help() {\n\tx() // ROW9\n}\n",
			"help, which no test uses, names row ROW9"},
		{"hidden", ".cache/b_test.go", "package cm // ROW9\n", "rows with neither test nor reason: ROW9"},
		{"product", "cm/b.go", text, "rows with neither test nor reason: ROW9"},
		{"helper package", "cm/cmtest/b.go", text, "rows with neither test nor reason: ROW9"},
		{"script", "cm/testdata/b.txt", "# ROW9\nconnect\n", "cm/testdata/b.txt names row ROW9, where no test shows it"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			files := small()
			files[tableFile] += "ROW9\t9.9\tMUST\tit\tS\n"
			files[tt.path] = tt.text
			tree(t, files)
			complain(t, run(false), tt.want)
		})
	}
}

// complain checks the error of a run; want "" is no error.
func complain(t *testing.T, err error, want string) {
	t.Helper()
	switch {
	case want == "":
		if err != nil {
			t.Errorf("got %v, want no complaint", err)
		}
	case err == nil:
		t.Errorf("got no complaint, want %q", expand(want))
	case !strings.Contains(err.Error(), expand(want)):
		t.Errorf("got %v, want %q", err, expand(want))
	}
}

func TestCheck(t *testing.T) {
	const more = "package cm\nimport \"testing\"\nfunc TestD(t *testing.T) {\n\tz() // %\n}\n"
	name := func(rows string) map[string]string {
		return map[string]string{"cm/b_test.go": strings.ReplaceAll(more, "%", rows)}
	}
	reasons := func(more string) map[string]string { return map[string]string{reasonsFile: reasonsText + more} }
	for _, tt := range []struct {
		name   string
		change map[string]string // files
		old    string            // docs/specs.md, if it is not the one just written
		want   string            // "" for no complaint
	}{
		{name: "all is said"},
		{name: "too little is shown", change: map[string]string{
			tableFile:   small()[tableFile] + "ROW7\t9.9\tMUST\tx\tS\n",
			reasonsFile: reasonsText + "ROW7\tno test\tno time\t\n",
		}, want: "RFC 4755: 1 of 6 binding rows are without a test, more than 5%"},
		{name: "unknown row", change: name("ROW77"), want: "cm.TestD names row ROW77, which does not exist"},
		{name: "neither test nor reason", change: map[string]string{reasonsFile: reasonHead},
			want: "rows with neither test nor reason: ROW4"},
		{name: "out of date", old: "old", want: "docs/specs.md is out of date"},
		{name: "a row cut short", change: map[string]string{tableFile: columns + "ROW1\t9.9\n"},
			want: `"ROW1" has too few columns`},
		{name: "no table", change: map[string]string{tableFile: ""}, want: "no docs/requirements-NNNN.tsv"},
		{name: "a row of another RFC", change: map[string]string{"docs/requirements-1234.tsv": columns +
			"ROW1\t9.9\tMUST\tx\tS\n"},
			want: "is of another text"},
		{name: "a reason cut short", change: reasons("ROW1\tpart\n"), want: `"ROW1": want id, kind, reason and ADR`},
		{name: "a reason without words", change: reasons("ROW1\tpart\t \t\n"), want: "row ROW1 has no reason"},
		{name: "a reason for no row", change: reasons("ROW77\tpart\twhy\t\n"), want: "row ROW77 does not exist"},
		{name: "a kind that is none", change: reasons("ROW1\tshown\twhy\t\n"), want: `row ROW1: "shown" is no kind`},
		{name: "two kinds", change: reasons("ROW5\tno test\twhy\t\n"),
			want: `row ROW5 has two entries, "part" and "no test"`},
		{name: "no test, and a test", change: reasons("ROW1\tno test\twhy\t\n"),
			want: "row ROW1 is listed as without a test, and cm.TestA names it"},
		{name: "in part, and no test", change: map[string]string{reasonsFile: reasonHead + "ROW4\tpart\twhy\t\n"},
			want: "row ROW4 is listed as shown in part, and no test names it"},
		{name: "a deviation without ADR", change: reasons("ROW1\tdeviates\twhy\t\n"), want: "a deviation names its ADR"},
		{name: "an ADR without deviation", change: reasons("ROW1\tpart\twhy\t0004\n"), want: "a deviation names its ADR"},
		{name: "an ADR that does not exist", change: reasons("ROW1\tdeviates\twhy\t0099\n"),
			want: "row ROW1: ADR 0099 does not exist"},
		{name: "an ADR that is no number", change: reasons("ROW1\tdeviates\twhy\t*\n"),
			want: `row ROW1: "*" is not the number`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			files := small()
			maps.Copy(files, tt.change)
			maps.DeleteFunc(files, func(_, text string) bool { return text == "" })
			tree(t, files)
			err := run(false)
			if err == nil {
				if tt.old != "" {
					if err := os.WriteFile("docs/specs.md", []byte(tt.old), 0o644); err != nil {
						t.Fatal(err)
					}
				}
				err = run(true)
			}
			complain(t, err, tt.want)
		})
	}
}
