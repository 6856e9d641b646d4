package arch

import (
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"unicode"
)

// elsewhere are ways to cite texts that this repository does not contain.
var elsewhere = regexp.MustCompile(`\bdesign D[0-9]|\(D[0-9]+\)|[( ]D[0-9]+: |[Ww]ire[- ]facts|\bWF [0-9]|` +
	`\bAMB-|\b[Tt]rap T[0-9]|\b(rule|WF) I-[0-9]|\bissue #[0-9]`)

// TestNothingIsCitedThatIsNotHere looks at comments, documents and scripts.
func TestNothingIsCitedThatIsNotHere(t *testing.T) {
	all := read(t)
	for _, l := range append(all.comments, all.docs...) {
		if m := elsewhere.FindString(l.text); m != "" && !strings.HasPrefix(l.where, "test/arch/") {
			t.Errorf("%s: %q is nowhere in this repository; cite the clause, the source file or a page under docs", l.where, m)
		}
	}
	for name := range all.files {
		if !strings.HasSuffix(name, ".txt") && !strings.HasSuffix(name, ".tsv") {
			continue
		}
		b, err := os.ReadFile(filepath.Join(root, filepath.FromSlash(name)))
		if err != nil {
			t.Fatal(err)
		}
		if m := elsewhere.Find(b); m != nil {
			t.Errorf("%s: %q is nowhere in this repository", name, m)
		}
	}
}

// rowID is the number of a requirement.
var rowID = regexp.MustCompile(`\b(4391|4755|6581|8797|V2)-(R?[0-9]+(?:\.[0-9]+)*)-([0-9]+)\b`)

// TestRowsExist: each row that a comment or a document names is in docs/requirements-*.tsv.
func TestRowsExist(t *testing.T) {
	all := read(t)
	rows := map[string]bool{}
	files, err := filepath.Glob(filepath.Join(root, "docs", "requirements-*.tsv"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no tables of rows: %v", err)
	}
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range strings.Split(string(b), "\n") {
			id, _, _ := strings.Cut(l, "\t")
			rows[id] = true
		}
	}
	for _, l := range append(all.comments, all.docs...) {
		if strings.HasPrefix(l.where, "internal/specs/") {
			continue // its tests make rows up
		}
		for _, id := range rowID.FindAllString(l.text, -1) {
			if !rows[id] {
				t.Errorf("%s: there is no row %s", l.where, id)
			}
		}
	}
}

var (
	mdLink   = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	adrNamed = regexp.MustCompile(`\bADR ?-?([0-9]+)\b`)
)

// TestLinksOfDocuments follows the links of Markdown files, anchors too.
func TestLinksOfDocuments(t *testing.T) {
	all := read(t)
	anchors := map[string]map[string]bool{}
	for _, l := range all.docs {
		file, _, _ := strings.Cut(l.where, ":")
		if anchors[file] == nil {
			anchors[file] = map[string]bool{}
		}
		if heading := strings.TrimLeft(l.text, "#"); heading != l.text && !l.code {
			anchors[file][anchor(heading)] = true
		}
	}
	for _, l := range all.docs {
		if l.code {
			continue
		}
		file, _, _ := strings.Cut(l.where, ":")
		for _, m := range mdLink.FindAllStringSubmatch(l.text, -1) {
			target, frag, _ := strings.Cut(m[1], "#")
			if strings.Contains(target, "://") || strings.HasPrefix(target, "mailto:") {
				continue
			}
			to := path.Join(l.dir, target)
			switch {
			case target == "":
				to = file
			case !all.files[strings.TrimSuffix(to, "/")]:
				t.Errorf("%s: the link %s leads nowhere", l.where, m[1])
			}
			if frag == "" || !strings.HasSuffix(to, ".md") {
				continue
			}
			if !anchors[to][frag] {
				t.Errorf("%s: %s has no heading #%s", l.where, to, frag)
			}
		}
	}
}

// anchor returns what a heading is linked by.
func anchor(heading string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case unicode.IsLetter(r) || unicode.IsDigit(r) || r == '-' || r == '_':
			return unicode.ToLower(r)
		case r == ' ':
			return '-'
		}
		return -1
	}, strings.TrimSpace(heading))
}

// TestDecisionsExist: each decision that is cited by number is in docs/adr.
func TestDecisionsExist(t *testing.T) {
	all := read(t)
	for _, l := range append(all.comments, all.docs...) {
		for _, m := range adrNamed.FindAllStringSubmatch(l.text, -1) {
			number := strings.Repeat("0", max(0, 4-len(m[1]))) + m[1]
			if found, _ := filepath.Glob(filepath.Join(root, "docs", "adr", number+"-*.md")); len(found) == 0 {
				t.Errorf("%s: there is no decision %s", l.where, m[0])
			}
		}
	}
}

// fileNamed finds what looks like the path of a file of ours.
var fileNamed = regexp.MustCompile(
	`[\w.*/-]+/[\w.*/-]+\.(?:go|md|txt|tsv|json|pcap|pcapng|service|ya?ml|sh|py|svg|s)\b`)

// ours says whether a path begins in a directory at the top of the repository, or in docs.
func (t *tree) ours(name string) bool {
	top, _, _ := strings.Cut(name, "/")
	return t.files[top] && top != "." && top != ".."
}

// TestFilesExist: each file of ours that a comment or a document names is there.
func TestFilesExist(t *testing.T) {
	all := read(t)
	for _, l := range append(all.comments, all.docs...) {
		for _, name := range fileNamed.FindAllString(l.text, -1) {
			name = strings.TrimPrefix(name, "./")
			if !all.ours(name) || strings.Contains(l.text, "://") || strings.Contains(name, "NNNN") {
				continue
			}
			if !all.there(name) && !all.there(path.Join(l.dir, name)) {
				t.Errorf("%s: there is no %s", l.where, name)
			}
		}
	}
}

// there says whether a name, which may be a pattern, is in the tree.
func (t *tree) there(name string) bool {
	if t.files[name] {
		return true
	}
	found, _ := filepath.Glob(filepath.Join(root, filepath.FromSlash(name)))
	return len(found) > 0
}

var (
	testNamed = regexp.MustCompile(`\b(?:Test|Fuzz|Benchmark)[A-Z][A-Za-z0-9]+\b`)
	docLink   = regexp.MustCompile(`(?:^|[\s(])\[((?:[a-z][a-z0-9]*\.)?\*?[A-Z]\w*(?:\.[A-Z]\w*)?)\]`)
	mdSymbol  = regexp.MustCompile(
		"`((?:[a-z0-9]+/)*[a-z0-9]+)\\.([A-Z][A-Za-z0-9]*(?:\\.[A-Z][A-Za-z0-9]*)?)(?:\\(\\))?`")
)

// TestTestsExist: each test that a comment or a document names exists.
func TestTestsExist(t *testing.T) {
	all := read(t)
	for _, l := range append(all.comments, all.docs...) {
		if strings.HasPrefix(l.where, "internal/specs/") || strings.HasPrefix(l.where, "internal/check/") {
			continue // their tests make tests up
		}
		for _, name := range testNamed.FindAllString(l.text, -1) {
			if !all.tests[name] && !all.isPrefix(l, name) {
				t.Errorf("%s: there is no test %s", l.where, name)
			}
		}
	}
}

// isPrefix says whether name stands for all tests that begin with it: "TestX…".
func (t *tree) isPrefix(l line, name string) bool {
	_, after, _ := strings.Cut(l.text, name)
	return strings.HasPrefix(after, "…") || strings.HasPrefix(after, "*")
}

// TestSymbolsExist: what a comment links, as [Name] or [pkg.Name], and what a document
// names, as `pkg.Name`, is declared.
func TestSymbolsExist(t *testing.T) {
	all := read(t)
	for _, l := range all.comments {
		for _, m := range docLink.FindAllStringSubmatch(l.text, -1) {
			name := strings.TrimPrefix(m[1], "*")
			if pkg, symbol, ok := strings.Cut(name, "."); ok && !unicode.IsUpper(rune(pkg[0])) {
				all.symbol(t, l, pkg, strings.TrimPrefix(symbol, "*"))
			} else if !all.names[l.dir][name] {
				t.Errorf("%s: nothing is called [%s] here", l.where, name)
			}
		}
	}
	for _, l := range all.docs {
		for _, m := range mdSymbol.FindAllStringSubmatch(l.text, -1) {
			all.symbol(t, l, m[1], m[2])
		}
	}
}

// symbol fails if a package of ours, which pkg ends the path of, does not declare name.
func (t *tree) symbol(tt *testing.T, l line, pkg, name string) {
	tt.Helper()
	known := false
	for dir, names := range t.names {
		if dir == pkg || strings.HasSuffix(dir, "/"+pkg) {
			known = true
			if names[name] {
				return
			}
		}
	}
	if known {
		tt.Errorf("%s: there is no %s in package %s", l.where, name, pkg)
	}
}

// TestReferencesAreFound keeps the patterns from finding nothing.
func TestReferencesAreFound(t *testing.T) {
	for _, tt := range []struct {
		pattern    *regexp.Regexp
		text, want string
	}{
		{elsewhere, "so it is (design D7)", "design D7"},
		{elsewhere, "wire-facts 4.13", "wire-facts"},
		{elsewhere, "never with silence (WF I-14)", "WF I-1"},
		{elsewhere, "// D3: taken", " D3: "},
		{elsewhere, "refused (AMB-4755-5)", "AMB-"},
		{elsewhere, "for ever (trap T4)", "trap T4"},
		{elsewhere, "// RFC 4755 section 3.3", ""},
		{rowID, "4755-3.3-5, and more", "4755-3.3-5"},
		{rowID, "V2-R1-7", "V2-R1-7"},
		{fileNamed, "see docs/adr/0003-verbs-contract.md.", "docs/adr/0003-verbs-contract.md"},
		{docLink, "a [verbs.MADPort] of", " [verbs.MADPort]"},
		{docLink, "net:[INODE]", ""},
		{mdSymbol, "`verbs.MADPort` is", "`verbs.MADPort`"},
		{testNamed, "test/netns.TestThreeHosts shows", "TestThreeHosts"},
		{adrNamed, "as ADR 12 says", "ADR 12"},
		{mdLink, "[a](b.md#c)", "](b.md#c)"},
	} {
		if got := tt.pattern.FindString(tt.text); got != tt.want {
			t.Errorf("%v finds %q in %q, want %q", tt.pattern, got, tt.text, tt.want)
		}
	}
}
