package main

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// lists is the directory of the lists, below the root of the module.
const lists = "internal/mutants/list"

// A mutant is one entry of a list.
type mutant struct {
	area  string // the list's name
	name  string // "RULE: what happens instead"
	edits []edit

	pkg   string   // the directory of the tests that must notice
	tests []string // names; "TestX/pattern" means some cases of TestX

	hangs      bool   // a time-out counts as noticed
	equivalent string // why nothing can notice; then it must survive

	number int // counted through all lists, from 1
}

// An edit replaces old, which occurs once in file.
type edit struct{ file, old, new string }

// words returns the texts that -only is matched with.
func (m *mutant) words() []string {
	w := append([]string{m.name, m.area, m.pkg}, m.tests...)
	for _, e := range m.edits {
		w = append(w, e.file)
	}
	return w
}

// pattern is what -test.run takes.
func (m *mutant) pattern() string {
	var alternatives []string
	for _, t := range m.tests {
		name, cases, ok := strings.Cut(t, "/")
		p := "^" + name + "$"
		if ok {
			p += "/" + cases
		}
		alternatives = append(alternatives, p)
	}
	return strings.Join(alternatives, "|")
}

// readLists reads every list of a directory, in the order of their names.
func readLists(dir string) ([]*mutant, error) {
	paths, err := filepath.Glob(filepath.Join(dir, "*.txt")) // sorted
	if err != nil {
		return nil, err
	}
	var all []*mutant
	seen := map[string]string{}
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		of, err := parseList(strings.TrimSuffix(filepath.Base(path), ".txt"), string(text))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		for _, m := range of {
			if at := seen[m.name]; at != "" {
				return nil, fmt.Errorf("%s: %q is in %s too", path, m.name, at)
			}
			seen[m.name] = path
			all = append(all, m)
			m.number = len(all)
		}
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("no mutants in %s", dir)
	}
	return all, nil
}

// parseList reads one list; list/README.md describes its form.
func parseList(area, text string) (all []*mutant, err error) {
	p := listParser{area: area}
	s := bufio.NewScanner(strings.NewReader(text))
	for n := 1; s.Scan(); n++ {
		if err := p.line(s.Text()); err != nil {
			return nil, fmt.Errorf("line %d: %w", n, err)
		}
	}
	if err := errors.Join(s.Err(), p.end()); err != nil {
		return nil, err
	}
	return p.all, nil
}

type listParser struct {
	area string
	all  []*mutant
	m    *mutant // being read
	file string
	last byte // '-' or '+' within an edit
}

func (p *listParser) line(l string) error {
	if l == "" || l[0] == '#' {
		p.last = 0
		return nil
	}
	if l[0] == '-' || l[0] == '+' {
		return p.edit(l[0], strings.TrimPrefix(l[1:], " "))
	}
	p.last = 0
	word, rest, _ := strings.Cut(l, " ")
	rest = strings.TrimSpace(rest)
	if word == "mutant" {
		if err := p.end(); err != nil {
			return err
		}
		if !strings.Contains(rest, ": ") {
			return fmt.Errorf("%q: want \"RULE: what happens instead\"", rest)
		}
		p.m, p.file = &mutant{area: p.area, name: rest}, ""
		return nil
	}
	if p.m == nil {
		return fmt.Errorf("%q before the first mutant", word)
	}
	switch word {
	case "file":
		p.file = rest
	case "tests":
		f := strings.Fields(rest)
		if len(f) < 2 {
			return errors.New("tests: want a directory and names")
		}
		p.m.pkg, p.m.tests = f[0], f[1:]
	case "hangs":
		p.m.hangs = true
	case "equivalent":
		p.m.equivalent = rest
	default:
		return fmt.Errorf("unknown word %q", word)
	}
	return nil
}

func (p *listParser) edit(sign byte, text string) error {
	if p.m == nil || p.file == "" {
		return errors.New("an edit before its file")
	}
	fresh := sign == '-' && p.last != '-'
	if fresh {
		p.m.edits = append(p.m.edits, edit{file: p.file, old: text})
	}
	switch e := len(p.m.edits) - 1; {
	case fresh:
	case sign == '-':
		p.m.edits[e].old += "\n" + text
	case p.last == 0:
		return errors.New("+ without -")
	case p.last == '-':
		p.m.edits[e].new = text
	default:
		p.m.edits[e].new += "\n" + text
	}
	p.last = sign
	return nil
}

// end checks the mutant that was being read, if there is one, and adds it to p.all.
func (p *listParser) end() error {
	m := p.m
	if m == nil {
		return nil
	}
	switch {
	case len(m.edits) == 0:
		return fmt.Errorf("%q changes nothing", m.name)
	case len(m.tests) == 0:
		return fmt.Errorf("%q names no tests", m.name)
	}
	for _, e := range m.edits {
		if e.old == e.new || e.old == "" {
			return fmt.Errorf("%q changes nothing in %s", m.name, e.file)
		}
	}
	p.all, p.m = append(p.all, m), nil
	return nil
}
