package ipoib

import (
	"regexp"
	"testing"
	"time"

	"ipoibcm/internal/expect"
	"ipoibcm/wire/mad"
)

// An operator hears of a connection once when it comes and once when it goes, and
// every report has a message of its own.
func TestReports(t *testing.T) {
	w := newWorld(t, 9)
	a, b := w.node(1, Options{Idle: 20 * time.Second}), w.node(2, Options{})
	w.run(2 * time.Second)
	a.ping("10.0.0.2", 100, true)
	w.run(2 * time.Second)
	_ = b
	count := func(r Report) (n int) {
		for _, note := range a.notes {
			if note.Report == r {
				n++
			}
		}
		return n
	}
	if n := count(ConnectionUp); n != 1 {
		t.Errorf("%d connections came up, want 1", n)
	}
	w.run(time.Minute)
	if n := count(ConnectionClosed); n != 1 {
		t.Errorf("%d connections were closed, want 1", n)
	}
	if n := count(ConnectionLost); n != 0 {
		t.Errorf("%d connections were lost, want none", n)
	}
	seen := map[string]Report{}
	for r := ConnectionUp; r <= LimitReached; r++ {
		if r.String() == "" {
			t.Errorf("report %d has no message", r)
		}
		if other, ok := seen[r.String()]; ok {
			t.Errorf("reports %d and %d have one message", r, other)
		}
		seen[r.String()] = r
	}
	expect.Equal(t, ConnectionLost.Urgent(), false, "Urgent of ConnectionLost")
	expect.Equal(t, DuplicateAddress.Urgent(), true, "Urgent of DuplicateAddress")
}

// An attempt that failed says why, in a sentence of which no part is missing.
func TestFailedAttemptInWords(t *testing.T) {
	w, a, b := newPair(t, 35)
	w.dropMAD = func(n *node, _ mad.Message) bool { return true }
	a.ping("10.0.0.2", 100, true)
	w.run(time.Minute)
	_ = b
	said := ""
	for _, note := range a.notes {
		if note.Report == ConnectionFailed {
			said = note.Text
		}
	}
	if !regexp.MustCompile(`^no connection: \S.*\S; UD until the next attempt in [0-9]\S* at the earliest$`).MatchString(said) {
		t.Errorf("the attempt failed with %q", said)
	}
}
