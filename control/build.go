package control

import "strings"

// A Build is the output of "version --json": what a program was built from.
type Build struct {
	Version   int      `json:"version"`
	Release   string   `json:"release,omitempty"` // a tag, or a pseudo-version of Go
	Commit    string   `json:"commit,omitempty"`
	Time      string   `json:"time,omitempty"`     // of the commit
	Modified  bool     `json:"modified,omitempty"` // built with changes since the commit
	Go        string   `json:"go"`
	Providers []string `json:"providers"` // the providers that it was built with
}

// shortCommit is how many digits of a commit people are shown.
const shortCommit = 12

// String prints release, commit and compiler on one line.
func (b Build) String() string {
	s := b.Release
	if c := b.Commit[:min(shortCommit, len(b.Commit))]; c != "" && !strings.Contains(s, c) {
		s = strings.TrimPrefix(s+", commit "+c, ", ")
	}
	if s == "" {
		s = "of unknown source"
	}
	if b.Modified && !strings.Contains(s, "dirty") {
		s += " with changes"
	}
	if b.Go != "" {
		s += ", " + b.Go
	}
	return s
}
