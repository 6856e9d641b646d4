package ipoib

import (
	"testing"
	"time"

	"ipoibcm/cm"
	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/wire/mad"
)

// resolved joins two hosts of which a knows b's address and has no connection.
func resolved(t *testing.T, seed uint64, oa, ob Options) (w *world, a, b *node) {
	w = newWorld(t, seed)
	a, b = w.node(1, oa), w.node(2, ob)
	w.run(2 * time.Second)
	a.f.opt.Mode = ModeUD
	a.ping("10.0.0.2", 100, true)
	w.run(time.Second)
	a.f.opt.Mode, a.f.hops.allDirty = oa.Mode, true
	a.step(Wake{})
	switch p := a.f.peers.byLink[b.link()]; {
	case p == nil:
		w.Fatalf("a does not know b, or is connected already: p is nil")
	case len(p.addrs) != 1:
		w.Fatalf("a does not know b, or is connected already: addrs has %v elements, want 1", len(p.addrs))
	case p.tx != nil:
		w.Fatalf("a does not know b, or is connected already: tx is %v, want nil", p.tx)
	}
	return w, a, b
}

// 4755-8-1: a peer that answers every REQ with a REJ which asks for another gets a few.
func TestQuickRetriesAreBounded(t *testing.T) {
	w, a, b := resolved(t, 1, Options{}, Options{})
	w.dropMAD = func(from *node, m mad.Message) bool {
		req, ok := m.(mad.REQ)
		if ok && from == a {
			w.inject(b, a, mad.REJ{RemoteCommID: req.LocalCommID, Reason: cm.ReasonStale, TransactionID: req.TransactionID})
		}
		return ok
	}
	a.ping("10.0.0.2", 100, true)
	w.run(200 * time.Millisecond)
	if n := len(distinct(a.reqs)); n != 1+maxQuickRetries {
		t.Errorf("%d REQs without a pause, want %d", n, 1+maxQuickRetries)
	}
}

// 4755-3.3-4: a REQ of ours that has not left, because its queue pair is still being
// made, crosses nothing: the peer's is accepted, whoever has the larger address.
func TestNoCrossingBeforeTheREQ(t *testing.T) {
	for _, larger := range []bool{false, true} {
		w, a, b := resolved(t, 1, Options{}, Options{})
		if larger {
			w, b, a = resolved(t, 1, Options{}, Options{})
			a.f.learn(ip4("10.0.0.1"), b.f.link)
		}
		p := a.f.peers.byLink[b.link()]
		a.f.now = w.now
		a.f.dial(p) // CreateQP is not carried out
		if p.dial == nil {
			w.Fatalf("no attempt")
		}
		expect.MustEqual(w, p.dial.state, connCreating, "state of the attempt")
		a.f.out = nil
		req, _ := honest(a, b).AppendBinary(nil)
		in := mad256(b.opt.Link.GID, a.opt.Link.GID, req)
		accepts := false
		for _, act := range a.f.Step(nil, w.now, RecvMAD{in}) {
			switch act := act.(type) {
			case CreateQP:
				accepts = true
			case SendMAD:
				t.Errorf("larger %v: a MAD was sent: %v", larger, act.MAD.Data[:24])
			}
		}
		if !accepts {
			t.Errorf("larger %v: the peer's REQ was not accepted", larger)
		}
		if n := a.f.Status().Crossings.Seen; n != 0 {
			t.Errorf("larger %v: %d crossings, want none", larger, n)
		}
	}
}

// A starting PSN cannot be guessed from another one.
func TestStartingPSNs(t *testing.T) {
	seen := map[ib.PSN]bool{}
	for seed := range uint64(4) {
		w, a, _ := resolved(t, seed, Options{}, Options{})
		a.ping("10.0.0.2", 100, true)
		w.run(time.Second)
		if len(a.reqs) == 0 {
			t.Fatal("no REQ")
		}
		seen[a.reqs[0].StartingPSN] = true
	}
	if len(seen) != 4 {
		t.Errorf("4 connections have %d different starting PSNs", len(seen))
	}
}

// What waits for all connections together has a bound.
func TestTotalQueueOfConnections(t *testing.T) {
	w, a, b := resolved(t, 1, Options{}, Options{})
	p := a.f.peers.byLink[b.link()]
	a.f.peers.queued = maxQueuedOctets - 100
	a.f.enqueue(p, make([]byte, 100))
	a.f.enqueue(p, make([]byte, 1))
	if len(p.queue) != 1 {
		t.Errorf("%d packets wait, want 1", len(p.queue))
	}
	if n := a.counter("drop_connection_queue_total"); n != 1 {
		w.Fatalf("%d drops counted, want 1", n)
	}
}

// The kernel's own NS and NA stay here: the agent is the neighbour stack.
func TestKernelNDStays(t *testing.T) {
	_, a, b := resolved(t, 1, Options{}, Options{})
	ns := neighborSolicitation("fd00::1", "fd00::2", a.opt.Link)
	a.f.learn(ip4("fd00::2"), b.f.link)
	for _, act := range a.f.Step(nil, a.w.now, Packet{IP: ns}) {
		if s, ok := act.(SendUD); ok {
			t.Errorf("sent %x", s.Frame)
		}
	}
}

// distinct returns the REQs without repeats.
func distinct(rs []mad.REQ) map[mad.CommID]bool {
	m := map[mad.CommID]bool{}
	for _, r := range rs {
		m[r.LocalCommID] = true
	}
	return m
}
