package arch

import (
	"maps"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// A retired word was one of our own for something that the field has a word for.
type retired struct {
	pattern string
	say     string
	// left are the directories where it still stands, below which nothing is new.
	left []string
}

// retiredWords are kept out of code, comments, documents and tests. Who takes the last
// one out of a directory takes the directory out of its list.
var retiredWords = []retired{
	{`\bhouse\b|\bHouse\b`, "tree or table", nil},
	{`\brooms\b|\bfloors\b`, "packages, layers", nil},
	{`\b[Cc]oncerns\(`, "Owns", nil},
	{`\brous(e|es|ed)\b`, "wake or notify", nil},
	{`\bmaxPieces\b|\bpiece_malformed\b|\blong pieces\b`, "GSO packets", nil},
	{`\bdesign decision\b`, "the decision in docs/adr", nil},
	{`\battend(s|ed|ing|ant)?\b|\bAttend(er)?\b`, "event loop, poll", []string{"datapath", "provider/softroce", "verbs"}},
	{`\bshortcuts?\b|\bcutter\b|\buncut\b`, "connected socket", []string{"provider/softroce"}},
	{`\bow(e|es|ed)\b`, "delayed ACK, or what is missing", []string{"provider/softroce"}},
	{`\bkick(s|ed)?\b`, "notify", []string{"provider/softroce"}},
	{`\bpok(e|es|ed)\b`, "notify", []string{"provider/softroce", "provider/ibverbs"}},
	{`\bletGo\b`, "unregister", []string{"provider/softroce", "test/interop/vm"}},
	{`\bmemos?\b`, "diagnostics", []string{"ipoib", "test/explore", "internal/mutants/list"}},
	{`\bcrowded\b`, "at capacity", []string{"ipoib", "internal/mutants/list"}},
	{`\bspare\b`, "LRU", []string{"ipoib", "datapath", "agent", "test/explore"}},
	{`\bstrangers?\b`, "unknown source", []string{"gate", "docs", "datapath", "provider/softroce/engine",
		"provider/softroce/engine/testdata", "provider/ibverbs", "ipoib", "verbs/regions", "internal/mutants/list"}},
}

// written are the files that people write, but for decisions of the past and what
// other programs made.
func written(name string) bool {
	switch path.Ext(name) {
	case ".go", ".md", ".txt", ".yaml":
	default:
		return false
	}
	return !strings.HasPrefix(name, "docs/adr/") && !strings.HasPrefix(name, "test/arch/") && name != "CHANGELOG.md" && name != "docs/glossary.md"
}

// TestRetiredWords keeps the words out. It says what is left where.
func TestRetiredWords(t *testing.T) {
	all := read(t)
	var patterns []*regexp.Regexp
	var any []string
	for _, w := range retiredWords {
		patterns = append(patterns, regexp.MustCompile(w.pattern))
		any = append(any, w.pattern)
	}
	one := regexp.MustCompile(strings.Join(any, "|"))
	left := make([]map[string]int, len(patterns)) // of each word: directory and places
	for i := range left {
		left[i] = map[string]int{}
	}
	for name := range all.files {
		if !written(name) {
			continue
		}
		b, err := os.ReadFile(filepath.Join(root, filepath.FromSlash(name)))
		if err != nil {
			t.Fatal(err)
		}
		for _, at := range one.FindAllIndex(b, -1) {
			word := b[at[0]:at[1]]
			i := slices.IndexFunc(patterns, func(p *regexp.Regexp) bool { return p.Match(word) })
			left[i][path.Dir(name)]++
			if !slices.Contains(retiredWords[i].left, path.Dir(name)) {
				line := 1 + strings.Count(string(b[:at[0]]), "\n")
				t.Errorf("%s:%d: %q is retired, say %s", name, line, word, retiredWords[i].say)
			}
		}
	}
	for i, w := range retiredWords {
		for _, dir := range w.left {
			if left[i][dir] == 0 {
				t.Logf("%s: no %s is left there: take it out of the list", dir, w.pattern)
			}
		}
		for _, dir := range slices.Sorted(maps.Keys(left[i])) {
			t.Logf("%4d %s in %s", left[i][dir], w.pattern, dir)
		}
	}
}
