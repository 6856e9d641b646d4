package ipoib

import (
	"testing"
	"time"

	"ipoibcm/internal/expect"
	"ipoibcm/wire/mad"
)

// handOver has n's machine end and another begin with what it knew.
func (n *node) handOver() {
	n.step(HandOver{})
	n.opt.Memory = n.f.Memory()
	n.boot()
	n.opt.Memory = Memory{}
}

// The next process knows the neighbours of the one before, asks nobody who they are, and
// dials as soon as there is a packet.
func TestHandOver(t *testing.T) {
	w, a, b := newPair(t, 3)
	a.ping("10.0.0.2", 100, true)
	w.settle()
	before, _ := w.agree(a, b)
	b.sent = nil
	link := a.link()
	a.handOver()
	if got := a.link(); got != link {
		t.Fatalf("link-layer address %v, want %v", got, link)
	}
	if n := a.neighbour("10.0.0.2"); n.Link.Key() != b.link() {
		t.Fatalf("neighbour at %v, want %v", n.Link, b.link())
	}
	w.run(20 * time.Millisecond)
	if n := len(b.f.Conns()); n != 0 {
		t.Errorf("the peer has %d connections to what is gone, want none: it was told", n)
	}
	queries := a.counter("neigh_queries")
	big := a.ping("10.0.0.2", 9000, true)
	w.run(100 * time.Millisecond)
	if got := b.got(big); got != 1 {
		t.Errorf("%d large packets arrived within 100 ms, want 1", got)
	}
	after, _ := w.agree(a, b)
	if after.LocalComm == before.LocalComm {
		t.Error("the connection is the old one")
	}
	if got := a.counter("neigh_queries"); got != queries {
		t.Errorf("%d queries for a neighbour that is known, want none", got-queries)
	}
	w.settle()
	w.agree(a, b)
}

// Where the DREQ was lost the peer holds on to a connection that nobody serves, until the
// next process dials.
func TestHandOverUnheard(t *testing.T) {
	w, a, b := newPair(t, 4)
	a.ping("10.0.0.2", 100, true)
	w.settle()
	w.dropMAD = func(_ *node, m mad.Message) bool { _, is := m.(mad.DREQ); return is }
	a.handOver()
	big := a.ping("10.0.0.2", 9000, true)
	w.run(100 * time.Millisecond)
	if got := b.got(big); got != 1 {
		t.Errorf("%d large packets arrived within 100 ms, want 1", got)
	}
	w.settle()
	w.agree(a, b)
}

// Which conventions a peer follows is known to the next process, for as long as the one
// before would have known it.
func TestHandOverClass(t *testing.T) {
	w := newWorld(t, 5)
	a := w.node(1, Options{})
	w.linux(2)
	w.run(2 * time.Second)
	a.ping("10.0.0.2", 100, true)
	w.settle()
	if len(a.f.Conns()) == 0 {
		w.Fatalf("no connection, want one to a legacy peer")
	}
	expect.MustEqual(w, a.f.Conns()[0].Class, ClassLegacy, "Class of the connection")
	a.handOver()
	a.reqs = nil
	a.ping("10.0.0.2", 100, true)
	w.settle()
	p := a.f.Memory().Peers
	expect.MustEqual(t, len(p), 1, "number of peers")
	expect.Equal(t, p[0].Class, ClassLegacy, "Class of the peer")
	if got := a.counter("rej_received"); got != 0 {
		t.Errorf("%d REJ received, want none: the form was known", got)
	}
}
