package main

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
)

// A journalFile keeps verdicts by mutant and tree.
type journalFile struct {
	tree string
	old  map[string]entry // by key

	mu sync.Mutex
	f  *os.File
}

// An entry is one line of the journal.
type entry struct {
	Key     string  `json:"key"` // hash of the tree and the mutant
	Name    string  `json:"name"`
	Result  result  `json:"result"`
	Why     string  `json:"why,omitempty"`
	Seconds float64 `json:"seconds"`
}

// openJournal opens the journal at path. With resume it reads and keeps the entries, otherwise it deletes
// them.
func openJournal(path, tree string, resume bool) (*journalFile, error) {
	j := &journalFile{tree: tree, old: map[string]entry{}}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, err
	}
	flags := os.O_CREATE | os.O_WRONLY | os.O_TRUNC
	if resume {
		flags = os.O_CREATE | os.O_WRONLY | os.O_APPEND
		b, err := os.ReadFile(path)
		if err != nil && !os.IsNotExist(err) {
			return nil, err
		}
		for l := range strings.Lines(string(b)) {
			var e entry
			if json.Unmarshal([]byte(l), &e) == nil { // the last line may be incomplete
				j.old[e.Key] = e
			}
		}
	}
	var err error
	j.f, err = os.OpenFile(path, flags, 0o644)
	return j, err
}

func (j *journalFile) close() { j.f.Close() }

func (j *journalFile) key(m *mutant) string {
	h := sha256.New()
	fmt.Fprintf(h, "%s\n%s\n%s %v %v %q\n", j.tree, m.name, m.pkg, m.tests, m.hangs, m.equivalent)
	for _, e := range m.edits {
		fmt.Fprintf(h, "%s\n%q\n%q\n", e.file, e.old, e.new)
	}
	return hex.EncodeToString(h.Sum(nil)[:16])
}

// verdict returns an earlier verdict on m in this tree. ok is false if there is none, or if it was broken.
func (j *journalFile) verdict(m *mutant) (verdict, bool) {
	e, ok := j.old[j.key(m)]
	return verdict{m, e.Result, e.Why, e.Seconds}, ok && e.Result != broken
}

func (j *journalFile) put(v verdict) {
	b, err := json.Marshal(entry{j.key(v.mutant), v.mutant.name, v.Result, v.Why, v.Seconds})
	if err != nil {
		return // without an entry the mutant is tried again
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	j.f.Write(append(b, '\n'))
}

// hashTree returns the hash of all files that builds and tests read. The lists
// are not among them: each mutant is hashed with its own entry.
func hashTree(root string) (string, error) {
	h := sha256.New()
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		if d.IsDir() {
			if rel != "." && (strings.HasPrefix(d.Name(), ".") || rel == "bin" || rel == filepath.FromSlash(lists)) {
				return filepath.SkipDir
			}
			return nil
		}
		if !d.Type().IsRegular() || strings.HasPrefix(d.Name(), ".") {
			return nil
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		fmt.Fprintf(h, "%s %x\n", rel, sha256.Sum256(b))
		return nil
	})
	return hex.EncodeToString(h.Sum(nil)), err
}
