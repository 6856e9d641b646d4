package netns

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
)

const servicePage = "../../docs/service.md"

// A managerTrace is what a daemon and its service manager tell each other, as a sequence
// diagram: a is the daemon, b the manager. Status, the watchdog and times are left out.
type managerTrace struct {
	mu    sync.Mutex
	lines []string
}

func (m *managerTrace) add(line string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.lines = append(m.lines, line)
}

// heard draws a message of sd_notify(3).
func (m *managerTrace) heard(text string) {
	var parts []string
	for l := range strings.Lines(text) {
		key, _, _ := strings.Cut(l, "=")
		if !slices.Contains([]string{"STATUS", "WATCHDOG", "MONOTONIC_USEC", "X_DRAIN", "FDPOLL"}, key) {
			parts = append(parts, strings.TrimSpace(l))
		}
	}
	if len(parts) > 0 {
		m.add("a->>b: " + strings.Join(parts, ", "))
	}
}

// started draws what a process is given; each name once.
func (m *managerTrace) started(names []string) {
	kept := slices.Compact(slices.Sorted(slices.Values(names)))
	if len(kept) == 0 {
		m.add("b->>a: starts it")
		return
	}
	m.add("b->>a: starts it with the descriptors, " + strings.Join(kept, ", "))
}

// count returns how often there is a line.
func (m *managerTrace) count(line string) (n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, l := range m.lines {
		if l == line {
			n++
		}
	}
	return n
}

// block is the diagram as Mermaid. Lines that are the same in a row are one.
func (m *managerTrace) block() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	lines := append([]string{"sequenceDiagram", "participant a as ipoibcmd", "participant b as service manager"},
		slices.Compact(slices.Clone(m.lines))...)
	return "```mermaid\n" + strings.Join(lines, "\n    ") + "\n```\n"
}

// TestHandOverTrace holds the diagram of docs/service.md to what a daemon and its manager
// tell each other at a start, a restart and a stop. UPDATE_SCRIPTS=1 writes it anew.
func TestHandOverTrace(t *testing.T) {
	parallel(t)
	s, a, b := newPair(t)
	b.run()
	m := &managerTrace{}
	k := newKeeper(a)
	k.mu.Lock()
	k.heard, k.started = m.heard, m.started
	k.mu.Unlock()
	end := func(what string) {
		m.add("Note over b: " + what)
		m.add("b->>a: SIGTERM")
		a.stop()
		k.drain()
		m.add("Note over a: the process has ended")
	}
	// A ping may be answered before the manager is told that traffic can pass.
	start := func(n int) {
		k.start()
		a.connect(b, "RC")
		s.eventually(patience, "the manager is told READY=1", func() error {
			if got := m.count("a->>b: READY=1"); got != n {
				return fmt.Errorf("told %d times, want %d", got, n)
			}
			return nil
		})
	}
	start(1)
	end("systemctl restart")
	start(2)
	k.hasInterface()
	k.drain()
	end("systemctl stop")
	m.add("Note over b: lets go of the interface, which ends with that")

	page, err := os.ReadFile(servicePage)
	s.must(err)
	scene := regexp.MustCompile("<!-- scene: handover -->\n(\n```mermaid\n[^`]*```\n)?")
	if !scene.Match(page) {
		t.Fatalf("%s has no scene handover", servicePage)
	}
	now := scene.ReplaceAllLiteralString(string(page), "<!-- scene: handover -->\n\n"+m.block())
	if now == string(page) {
		return
	}
	if updateScripts {
		s.must(os.WriteFile(servicePage, []byte(now), 0o644))
		return
	}
	t.Errorf("%s does not show what they say, which is now\n%s", servicePage, m.block())
}
