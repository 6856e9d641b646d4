package main

import (
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
)

func small() map[string]string {
	return map[string]string{
		tableFile: columns +
			"ROW1\t9.9\tMUST\tin a body\tS\n" +
			"ROW2\t9.9\timplied\tabove a function\tS\n" +
			"ROW3\t9.9\twire\tin a script\tS\n" +
			"ROW4\t9.9\tinfo\tnobody's\tD\n" +
			"ROW5\t9.9\tSHOULD\tleft out\tS\n",
		reasonsFile:            "id\treason\nROW5\tneeds hardware\n",
		"cm/a_test.go":         "package cm\n\nfunc TestA(t *testing.T) {\n\tx() // ROW1\n}\n\n// It shows more.\n// ROW2\nfunc FuzzB(f *testing.F) {\n}\n",
		"cm/testdata/s.txt":    "# ROW3: a comment of the script\nconnect\n",
		"cm/a.go":              "package cm // ROW4 here does not count\n",
		"verbs/vtest/suite.go": "package vtest\n\nfunc TestC(t *testing.T) {\n\ty() // ROW1\n}\n",
	}
}

func TestRender(t *testing.T) {
	tree(t, small())
	if err := run(false); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile("docs/specs.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"3 of 4 rows of level",
		"| ROW1 | MUST | in a body | cm.TestA, verbs/vtest.TestC |",
		"| ROW2 | implied | above a function | cm.FuzzB |",
		"| ROW3 | wire | in a script | cm/testdata/s.txt |",
		"| ROW4 | info | nobody's | — |",
		"| ROW5 | SHOULD | left out | needs hardware |",
	} {
		if !strings.Contains(string(b), expand(want)) {
			t.Errorf("docs/specs.md lacks %q:\n%s", expand(want), b)
		}
	}
	// 3 of 4 is too thin for -check, and nothing else is wrong.
	if err := run(true); err == nil || !strings.Contains(err.Error(), "3 of 4 rows are named by tests; 95% are asked for") {
		t.Errorf("check: %v", err)
	}
}

// TestDraft: the rows of version two have letters and sections of three parts in
// their names, and AMB- names beside them are no rows.
func TestDraft(t *testing.T) {
	files := small()
	files["cm/b_test.go"] = "package cm\nfunc TestD(t *testing.T) {\n\tz() // ROW5, " + "V2-" + "5.2.4-12, AMB-V2-7\n\ty() // (" + "V2-" + "R1-3)\n}\n"
	files["docs/requirements-V2.tsv"] = columns + "V2-" + "5.2.4-12\t5.2.4\tMUST\tone\tS\n" + "V2-" + "R1-3\t8166\tMUST NOT\ttwo\tS\n"
	tree(t, files)
	if err := run(false); err != nil {
		t.Fatal(err)
	}
	b, _ := os.ReadFile("docs/specs.md")
	for _, want := range []string{"## RPC-over-RDMA version two", "2 of 2 rows", "| one | cm.TestD |", "| two | cm.TestD |"} {
		if !strings.Contains(string(b), want) {
			t.Errorf("docs/specs.md lacks %q:\n%s", want, b)
		}
	}
	if err := run(true); err != nil {
		t.Error(err)
	}
}

// TestSeveral: each RFC has a part of its own, and its own share to meet.
func TestSeveral(t *testing.T) {
	files := small()
	files["cm/b_test.go"] = "package cm\nfunc TestD(t *testing.T) {\n\tz() // ROW5, 1234-2-1; not a row: 2026-11-21\n}\n\n// 1234-2-2\nvar table = 1\n"
	files["docs/requirements-1234.tsv"] = columns + "1234-2-1\t2\tMUST\tone\tS\n1234-2-2\t2\tMUST\ttwo\tS\n1234-2-3\t2\tMUST\tthree\tS\n"
	files[reasonsFile] += "1234-2-3\tno way to see it\n"
	tree(t, files)
	if err := run(false); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile("docs/specs.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"## RFC 1234\n\n2 of 3 rows", "## RFC 4755\n\n4 of 4 rows", "| 1234-2-1 | MUST | one | cm.TestD |", "| 1234-2-2 | MUST | two | cm/b_test.go |", "| three | no way to see it |"} {
		if !strings.Contains(string(b), want) {
			t.Errorf("docs/specs.md lacks %q:\n%s", want, b)
		}
	}
	if err := run(true); err == nil || err.Error() != "RFC 1234: 2 of 3 rows are named by tests; 95% are asked for" {
		t.Errorf("check: %v", err)
	}
}

func TestCheck(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(files map[string]string)
		edit   func(t *testing.T) // after docs/specs.md was written
		want   string             // "" for no complaint
	}{
		{name: "all is named", change: func(f map[string]string) {
			f["cm/b_test.go"] = "package cm\nfunc TestD(t *testing.T) {\n\tz() // ROW5\n}\n"
		}},
		{name: "unknown row", change: func(f map[string]string) {
			f["cm/b_test.go"] = "package cm\nfunc TestD(t *testing.T) {\n\tz() // ROW77\n}\n"
		},
			want: "cm.TestD names row ROW77, which does not exist"},
		{name: "neither test nor reason", change: func(f map[string]string) { f[reasonsFile] = "id\treason\n" }, want: "rows with neither test nor reason: ROW5"},
		{name: "a row cut short", change: func(f map[string]string) { f[tableFile] = columns + "ROW1\t9.9\n" }, want: `"ROW1" has too few columns`},
		{name: "a reason without words", change: func(f map[string]string) { f[reasonsFile] = "id\treason\nROW5\n" }, want: `"ROW5": want id and reason`},
		{name: "out of date", edit: func(t *testing.T) {
			if err := os.WriteFile("docs/specs.md", []byte("old"), 0o644); err != nil {
				t.Fatal(err)
			}
		}, want: "docs/specs.md is out of date"},
		{name: "no table", change: func(f map[string]string) { delete(f, tableFile) }, want: "no docs/requirements-NNNN.tsv"},
		{name: "a row of another RFC", change: func(f map[string]string) { f["docs/requirements-1234.tsv"] = columns + "ROW1\t9.9\tMUST\tx\tS\n" }, want: "is of another text"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			files := small()
			if tt.change != nil {
				tt.change(files)
			}
			tree(t, files)
			err := run(false)
			if tt.edit != nil {
				tt.edit(t)
			}
			if err == nil {
				err = run(true)
			}
			switch {
			case tt.want == "" && err != nil:
				t.Error(err)
			case tt.want != "" && (err == nil || !strings.Contains(err.Error(), expand(tt.want))):
				t.Errorf("got %v, want %q", err, expand(tt.want))
			}
		})
	}
}
