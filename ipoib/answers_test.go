package ipoib

import (
	"testing"
	"time"
)

// A link on which nobody answers is told from one that lacks a single host.
func TestSilence(t *testing.T) {
	w := newWorld(t, 5)
	a := w.node(1, Options{})
	w.run(2 * time.Second)
	asked := func(stage, want string) {
		t.Helper()
		got := ""
		if s := a.f.Status().Silence; s.Asked.IsValid() {
			got = s.Asked.String()
		}
		if got != want {
			t.Errorf("%s: got silence for %q, want %q", stage, got, want)
		}
	}
	asked("nobody was asked", "")
	a.ping("10.0.0.9", 100, true)
	w.run(5 * time.Second)
	asked("nobody is there", "10.0.0.9")
	if s := a.f.Status().Silence; !s.Heard.IsZero() {
		t.Errorf("heard at %v, want never", s.Heard)
	}
	w.run(silenceMemory)
	asked("long ago", "")

	a.ping("10.0.0.9", 100, true)
	w.run(5 * time.Second)
	asked("again", "10.0.0.9")
	b := w.node(2, Options{}) // it announces its address
	w.run(2 * time.Second)
	asked("another host is heard", "")
	a.ping("10.0.0.2", 100, true)
	w.run(2 * time.Second)
	if n := len(a.f.Conns()); n != 1 {
		t.Fatalf("%d connections, want 1", n)
	}
	a.ping("10.0.0.9", 100, true)
	w.run(5 * time.Second)
	asked("connected, and one host does not answer", "")
	_ = b
}
