package ipoib

import (
	"testing"
	"time"

	"ipoibcm/neigh"
	"ipoibcm/wire/mad"
)

// A connection that has served for long ends the back-off of the failures before
// it: when it has been closed for being idle, the next failure is the first again.
func TestBackOffEnds(t *testing.T) {
	w := newWorld(t, 5)
	a, b := w.node(1, Options{}), w.node(2, Options{Idle: -1, Neigh: neigh.Options{StaleTime: time.Hour}})
	deaf := true
	w.dropMAD = func(*node, mad.Message) bool { return deaf }
	for range 300 { // attempts fail, and the pauses grow to a minute
		a.ping("10.0.0.2", 100, false)
		w.run(time.Second)
	}
	p := a.f.peers.byLink[b.link()]
	if p.failures < 5 {
		t.Fatalf("%d failures, want some", p.failures)
	}
	deaf = false
	for range 200 {
		a.ping("10.0.0.2", 100, false)
		w.run(time.Second)
	}
	w.agree(a, b)
	w.run(7 * time.Minute)
	if n := len(a.up()); n != 0 {
		t.Fatalf("%d connections, want none: it was idle", n)
	}
	deaf = true
	a.ping("10.0.0.2", 100, false)
	w.run(20 * time.Second)
	p = a.f.peers.byLink[b.link()]
	if p.failures != 1 {
		t.Errorf("%d failures in a row, want 1", p.failures)
	}
	if pause := p.holdUntil.Sub(w.now); pause > 1500*time.Millisecond {
		t.Errorf("the next attempt is %v away, want 1.5 s at most", pause)
	}
}

// A peer that accepts and closes at once is no success: the pauses grow.
func TestBackOffOfShortConnections(t *testing.T) {
	w := newWorld(t, 6)
	a, b := w.node(1, Options{}), w.node(2, Options{})
	for range 120 {
		a.ping("10.0.0.2", 100, false)
		w.run(time.Second)
		for _, c := range b.f.conns.byAge() {
			if c.state == connUp {
				b.f.now = w.now
				b.f.hangUp(c, "test")
				b.step(Wake{})
			}
		}
	}
	if got := a.counter("established_active"); got > 12 {
		t.Errorf("%d connections in two minutes, want few", got)
	}
}

// Where connections are closed soon for being idle it is no failure that the peer was the first to
// do so: the next packet has a connection at once.
func TestPeerClosesIdle(t *testing.T) {
	w := newWorld(t, 8)
	a, b := w.node(1, Options{Idle: 2500 * time.Millisecond}), w.node(2, Options{Idle: 2 * time.Second})
	a.ping("10.0.0.2", 9000, true)
	w.run(time.Second)
	for begun := w.now; len(a.up()) > 0; w.run(10 * time.Millisecond) {
		if w.now.Sub(begun) > 10*time.Second {
			t.Fatal("the connection is still there")
		}
	}
	if got := b.counter("closed_idle"); got != 1 {
		t.Fatalf("the peer has closed %d connections for being idle, want 1", got)
	}
	if n := a.f.peers.byLink[b.link()].failures; n != 0 {
		t.Errorf("%d failures, want none", n)
	}
	a.ping("10.0.0.2", 9000, true)
	w.run(100 * time.Millisecond)
	w.agree(a, b)
}

// A connection in use is not closed for being idle, however short that is: counts
// that come once a second say more than their absence in between.
func TestShortIdle(t *testing.T) {
	w := newWorld(t, 9)
	a, b := w.node(1, Options{Idle: 300 * time.Millisecond}), w.node(2, Options{Idle: -1})
	a.ping("10.0.0.2", 9000, true)
	w.run(2 * time.Second)
	for range 300 {
		a.ping("10.0.0.2", 100, true)
		w.run(100 * time.Millisecond)
	}
	w.agree(a, b)
	if got := a.counter("closed_idle"); got != 0 {
		t.Errorf("%d connections closed for being idle, want none", got)
	}
	w.run(2500 * time.Millisecond)
	if n := len(a.up()); n != 0 {
		t.Errorf("%d connections after two seconds without a packet, want none", n)
	}
	if got := a.counter("closed_idle"); got != 1 {
		t.Errorf("%d connections closed for being idle, want 1", got)
	}
}
