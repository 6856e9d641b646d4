package main

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// documents returns the Markdown files by path.
func documents(t *testing.T) map[string]string {
	t.Helper()
	docs := map[string]string{}
	for _, root := range []string{"../../docs", "../../README.md", "../../CONTRIBUTING.md", "../../SECURITY.md"} {
		err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(path, ".md") {
				return err
			}
			b, err := os.ReadFile(path)
			docs[path] = string(b)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return docs
}

var (
	inline = regexp.MustCompile("`(ipoibcmd [^`]*)`")
	block  = regexp.MustCompile(`(?m)^(?:# |\$ )?(?:bin/)?(ipoibcmd [a-z].*)$`)
)

// commands returns the command lines of ours in a document.
func commands(text string) (lines []string) {
	for i, part := range strings.Split(text, "```") {
		pattern := inline
		if i%2 == 1 {
			pattern = block
		}
		for _, m := range pattern.FindAllStringSubmatch(part, -1) {
			line, _, _ := strings.Cut(m[1], " #")
			line, _, _ = strings.Cut(line, " | ")
			line, _, _ = strings.Cut(line, " > ")
			lines = append(lines, line)
		}
	}
	return lines
}

// TestDocumentedCommands: each command line in a document has a command and flags
// that exist.
func TestDocumentedCommands(t *testing.T) {
	seen := 0
	for path, text := range documents(t) {
		if strings.Contains(path, "/adr/") {
			continue // decisions of their time
		}
		for _, line := range commands(text) {
			seen++
			if err := understood(line); err != nil {
				t.Errorf("%s: %s: %v", path, line, err)
			}
		}
	}
	if seen < 40 {
		t.Errorf("%d command lines were found, want 40 at least", seen)
	}
	for _, line := range []string{"ipoibcmd sattus", "ipoibcmd status --jason", "ipoibcmd show con"} {
		if understood(line) == nil {
			t.Errorf("%q is understood", line)
		}
	}
}

// understood parses a command line without running it.
func understood(line string) error {
	var args []string
	for _, a := range strings.Fields(strings.Trim(line, "…"))[1:] {
		args = append(args, strings.Trim(a, "[]"))
	}
	root := newRoot()
	cmd, rest, err := root.Find(args)
	if err != nil {
		return err
	}
	if cmd.HasSubCommands() && len(rest) > 0 && !strings.HasPrefix(rest[0], "-") {
		return usageError{os.ErrInvalid}
	}
	cmd.InitDefaultHelpFlag()
	root.InitDefaultVersionFlag()
	return cmd.ParseFlags(rest)
}

// TestQuotedMessages: what docs/troubleshooting.md quotes ("> …") is what the program says.
func TestQuotedMessages(t *testing.T) {
	var code strings.Builder
	for _, pattern := range []string{"../../agent/*.go", "../../doctor/*.go", "../../ipoib/*.go", "../../mtu/*.go"} {
		paths, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range paths {
			b, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			code.Write(b)
		}
	}
	quotes := regexp.MustCompile(`(?m)^> (.*)$`).FindAllStringSubmatch(documents(t)["../../docs/troubleshooting.md"], -1)
	for _, q := range quotes {
		if !strings.Contains(code.String(), q[1]) {
			t.Errorf("nothing says %q", q[1])
		}
	}
	if len(quotes) < 6 {
		t.Errorf("%d quotes, want 6 at least", len(quotes))
	}
}

// TestDocumentedTargets: each target of make that a document names is in the Makefile.
func TestDocumentedTargets(t *testing.T) {
	makefile, err := os.ReadFile("../../Makefile")
	if err != nil {
		t.Fatal(err)
	}
	named := regexp.MustCompile("(?:`|(?m:^))make ([a-z-]+)")
	for path, text := range documents(t) {
		for _, m := range named.FindAllStringSubmatch(text, -1) {
			if !strings.Contains(string(makefile), "\n"+m[1]+":") {
				t.Errorf("%s: there is no make %s", path, m[1])
			}
		}
	}
}

// TestREADMEIsRun: each line of README's blocks of code is run: a target of make in
// continuous integration, a command of ours by test/netns, TestREADME.
func TestREADMEIsRun(t *testing.T) {
	ci, err := os.ReadFile("../../.ci/run")
	if err != nil {
		t.Fatal(err)
	}
	seen := 0
	for i, part := range strings.Split(documents(t)["../../README.md"], "```") {
		if i%2 == 0 {
			continue
		}
		for l := range strings.Lines(strings.TrimSpace(part)) {
			seen++
			l = strings.TrimSpace(l)
			if !strings.HasPrefix(l, "ipoibcmd ") && !regexp.MustCompile(`(?m) `+regexp.QuoteMeta(l)+`$`).Match(ci) {
				t.Errorf(".ci/run does not run %q", l)
			}
		}
	}
	if seen < 4 {
		t.Errorf("%d lines of code in README, want 4 at least", seen)
	}
}

// TestAlertsAreExplained: the operator's guide says of each alert where to look.
func TestAlertsAreExplained(t *testing.T) {
	rules, err := os.ReadFile("../../packaging/prometheus/ipoibcm.rules.yml")
	if err != nil {
		t.Fatal(err)
	}
	page := documents(t)["../../docs/operating.md"]
	alerts := regexp.MustCompile(`- alert: (\w+)`).FindAllStringSubmatch(string(rules), -1)
	for _, m := range alerts {
		if !strings.Contains(page, m[1]) {
			t.Errorf("docs/operating.md says nothing of alert %s", m[1])
		}
	}
	if len(alerts) < 5 {
		t.Errorf("%d alerts were found, want 5 at least", len(alerts))
	}
}
