package arch

import (
	"bytes"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// A retired word was one of our own for something that the field has a word for.
type retired struct {
	words []string // whole words, or identifiers
	say   string
	// left are the directories where it still stands; elsewhere it is an error.
	left []string
}

// retiredWords are kept out of code, comments, documents and tests. Who takes the last
// one out of a directory takes the directory out of its list.
var retiredWords = []retired{
	{[]string{"house", "House"}, "tree or table", nil},
	{[]string{"rooms", "floors"}, "packages, layers", nil},
	{[]string{"Concerns"}, "Owns", nil},
	{[]string{"rouse", "rouses", "roused"}, "wake or notify", nil},
	{[]string{"maxPieces", "drop_piece_malformed"}, "GSO packets", nil},
	{[]string{"attend", "attends", "attended", "attending", "attendant", "Attend", "Attender"}, "event loop, poll", nil},
	{[]string{"shortcut", "shortcuts", "cutter", "uncut"}, "connected socket", nil},
	{[]string{"owe", "owes", "owed"}, "delayed ACK, or what is missing", nil},
	{[]string{"kick", "kicks", "kicked"}, "notify", nil},
	{[]string{"poke", "pokes", "poked"}, "notify", nil},
	{[]string{"letGo"}, "unregister", nil},
	{[]string{"memo", "memos"}, "diagnostics", nil},
	{[]string{"crowded"}, "at capacity", nil},
	{[]string{"spare"}, "LRU, or unused", nil},
	{[]string{"stranger", "strangers"}, "unknown source", nil},
}

// written are the files that people write, but for decisions of the past and what
// other programs made.
func written(name string) bool {
	switch path.Ext(name) {
	case ".go", ".md", ".txt", ".yaml":
	default:
		return false
	}
	return !strings.HasPrefix(name, "docs/adr/") && !strings.HasPrefix(name, "test/arch/") &&
		name != "CHANGELOG.md" && name != "docs/glossary.md"
}

// TestRetiredWords keeps the words out. It says what is left where.
func TestRetiredWords(t *testing.T) {
	all := read(t)
	which := map[string]int{}
	left := make([]map[string]int, len(retiredWords)) // of each word: directory and places
	for i, w := range retiredWords {
		left[i] = map[string]int{}
		for _, word := range w.words {
			which[word] = i
		}
	}
	for name := range all.files {
		if !written(name) {
			continue
		}
		b, err := os.ReadFile(filepath.Join(root, filepath.FromSlash(name)))
		if err != nil {
			t.Fatal(err)
		}
		words(b, func(word []byte, at int) {
			i, ok := which[string(word)]
			if !ok {
				return
			}
			left[i][path.Dir(name)]++
			if !slices.Contains(retiredWords[i].left, path.Dir(name)) {
				t.Errorf("%s:%d: %q is retired, say %s", name, 1+bytes.Count(b[:at], []byte{'\n'}), word, retiredWords[i].say)
			}
		})
	}
	for i, w := range retiredWords {
		for _, dir := range w.left {
			if left[i][dir] == 0 {
				t.Logf("%s: no %s is left there: take it out of the list", dir, w.words[0])
			}
		}
		for _, dir := range slices.Sorted(maps.Keys(left[i])) {
			t.Logf("%4d %s in %s", left[i][dir], w.words[0], dir)
		}
	}
}

// words calls f for each word of b: letters, digits and underscores.
func words(b []byte, f func(word []byte, at int)) {
	begin := -1
	for i, c := range b {
		switch part := c == '_' || c|0x20 >= 'a' && c|0x20 <= 'z' || c >= '0' && c <= '9'; {
		case part && begin < 0:
			begin = i
		case !part && begin >= 0:
			f(b[begin:i], begin)
			begin = -1
		}
	}
	if begin >= 0 {
		f(b[begin:], begin)
	}
}

// TestWordsAreFound keeps the scanner from finding nothing.
func TestWordsAreFound(t *testing.T) {
	var got []string
	words([]byte("they owe, p.owed(x_1)\nend"), func(word []byte, _ int) { got = append(got, string(word)) })
	if want := []string{"they", "owe", "p", "owed", "x_1", "end"}; !slices.Equal(got, want) {
		t.Errorf("words are %q, want %q", got, want)
	}
}
