package main

import (
	"fmt"
	"path/filepath"
	"strings"
)

// A kind says how much of a row is shown. Every row has exactly one.
type kind uint8

const (
	full     kind = iota // tests show it
	part                 // tests show some of it
	deviates             // the code does something else
	noTest               // no test shows it
	kinds
)

var kindNames = [kinds]string{"shown", "part", "deviates", "no test"}

func (k kind) String() string { return kindNames[k] }

// A reason is why a row is not shown in full.
type reason struct {
	kind kind
	text string // what is missing, or why
	adr  string // path of the decision below docs, for a deviation
}

// readReasons reads the table of rows that are not shown in full: id, kind,
// reason and, for a deviation, the number of its decision in docs/adr.
func readReasons(path string, known map[string]bool) (map[string]reason, error) {
	ls, err := lines(path)
	if err != nil {
		return nil, err
	}
	reasons := map[string]reason{}
	for _, f := range ls {
		if len(f) != 4 {
			return nil, fmt.Errorf("%s: %q: want id, kind, reason and ADR (which may be empty)", path, f[0])
		}
		id, adr := f[0], f[3]
		if !known[id] {
			return nil, fmt.Errorf("%s: row %s does not exist", path, id)
		}
		if old, ok := reasons[id]; ok {
			return nil, fmt.Errorf("%s: row %s has two entries, %q and %q", path, id, old.kind, f[1])
		}
		r := reason{text: strings.TrimSpace(f[2])}
		for k := part; k < kinds; k++ {
			if f[1] == kindNames[k] {
				r.kind = k
			}
		}
		switch {
		case r.kind == full:
			return nil, fmt.Errorf("%s: row %s: %q is no kind: part, deviates or no test", path, id, f[1])
		case r.text == "":
			return nil, fmt.Errorf("%s: row %s has no reason", path, id)
		case (r.kind == deviates) != (adr != ""):
			return nil, fmt.Errorf("%s: row %s: a deviation names its ADR, and nothing else does", path, id)
		}
		if adr != "" {
			if r.adr, err = decision(adr); err != nil {
				return nil, fmt.Errorf("%s: row %s: %w", path, id, err)
			}
		}
		reasons[id] = r
	}
	return reasons, nil
}

// decision returns the path below docs of the ADR of that number.
func decision(number string) (string, error) {
	if !adrNumber.MatchString(number) {
		return "", fmt.Errorf("%q is not the number of an ADR", number)
	}
	paths, err := filepath.Glob("docs/adr/" + number + "-*.md")
	if err != nil {
		return "", err
	}
	if len(paths) != 1 {
		return "", fmt.Errorf("ADR %s does not exist", number)
	}
	return strings.TrimPrefix(filepath.ToSlash(paths[0]), "docs/"), nil
}

// agree returns an error if the reasons contradict the tests: a row without a test must
// have a reason, a row of kind noTest no test, and a row of kind part at least one.
func agree(texts []text, shown map[string]showing, reasons map[string]reason) error {
	var open []string
	for _, t := range texts {
		for _, r := range t.rows {
			tests, why := shown[r.id].all(), reasons[r.id]
			switch {
			case why.kind == noTest && len(tests) > 0:
				return fmt.Errorf("row %s is listed as without a test, and %s names it", r.id, tests[0])
			case why.kind == part && len(tests) == 0:
				return fmt.Errorf("row %s is listed as shown in part, and no test names it", r.id)
			case why.kind == full && len(tests) == 0:
				open = append(open, r.id)
			}
		}
	}
	if len(open) > 0 {
		return fmt.Errorf("rows with neither test nor reason: %s", strings.Join(open, " "))
	}
	return nil
}
