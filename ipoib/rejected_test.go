package ipoib

import (
	"testing"
	"time"

	"ipoibcm/cm"
	"ipoibcm/internal/expect"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/mad"
)

// 4755-8-1: a peer that never answers, one that always rejects.
func TestBackOff(t *testing.T) {
	for _, reject := range []bool{false, true} {
		w := newWorld(t, 12)
		a, b := w.node(1, Options{}), w.node(2, Options{})
		if reject {
			b.noQP = true
		} else {
			w.dropMAD = func(from *node, m mad.Message) bool { return from == b }
		}
		w.run(2 * time.Second)
		lost := 0
		for range 300 {
			p := a.ping("10.0.0.2", 100, true)
			w.run(time.Second)
			if b.got(p) == 0 {
				lost++
			}
		}
		// UD carries on, and the attempts grow rare.
		switch n := a.counter("dial_failed"); {
		case lost > 0:
			w.Fatalf("reject %v: lost is %v, want at most 0", reject, lost)
		case n < 4:
			w.Fatalf("reject %v: n is %v, want at least 4", reject, n)
		case n > 20:
			w.Fatalf("reject %v: n is %v, want at most 20", reject, n)
		case len(a.qps) > 1:
			w.Fatalf("reject %v: a's qps has %v elements, want at most 1", reject, len(a.qps))
		}
		for _, r := range b.sent {
			if rej, ok := r.(mad.REJ); ok && reject {
				expect.MustEqual(w, rej.Reason, cm.ReasonNoQP, "Reason of a REJ") // 4755-3.2-9
			}
		}
		// the queue is bounded and what is in it goes out or is answered
		for range 500 {
			a.ping("10.0.0.2", 60000, true)
		}
		if n := len(a.f.peers.byLink[b.link()].queue); n > 64 {
			t.Errorf("reject %v: %d packets are in the queue, want at most 64", reject, n)
		}
		if n := a.f.peers.queued; n > 1<<20 {
			t.Errorf("reject %v: %d octets are in the queue, want at most %d", reject, n, 1<<20)
		}
		w.settle()
		if a.f.peers.queued != 0 {
			w.Fatalf("%d octets still wait", a.f.peers.queued)
		}
		b.noQP, w.dropMAD = false, nil
		w.run(2 * time.Minute)
		w.wantConnection(a, b, "10.0.0.2", "after all rejections")
	}
}

func TestRejections(t *testing.T) {
	reply := func(w *world, b *node, reason cm.Reason, times int) {
		w.onMAD = nil
		n := 0
		w.dropMAD = func(from *node, m mad.Message) bool {
			req, ok := m.(mad.REQ)
			if !ok || from == b || n >= times {
				return false
			}
			n++
			rej := mad.REJ{RemoteCommID: req.LocalCommID, Reason: reason, TransactionID: req.TransactionID}
			pd, _ := encap.PrivateData{QPN: b.opt.Link.QPN, ReceiveMTU: 4000}.AppendBinary(nil)
			copy(rej.PrivateData[:], pd)
			w.inject(b, from, rej)
			return true
		}
	}
	for _, tt := range []struct {
		name   string
		reason cm.Reason
		soon   bool // without a pause
		mtu    int
	}{
		{"stale: at once with another QPN", cm.ReasonStale, true, 65520},
		{"MTU: once more with the peer's", cm.ReasonInvalidMTU, true, 3996},
		{"no QP: later", cm.ReasonNoQP, false, 65520},
		{"consumer reject to the larger address is a failure", cm.ReasonConsumer, false, 65520},
	} {
		w := newWorld(t, 13)
		a, b := w.node(5, Options{}), w.node(2, Options{}) // a is the larger
		reply(w, b, tt.reason, 1)
		w.run(2 * time.Second)
		a.ping("10.0.0.2", 100, true)
		w.run(200 * time.Millisecond)
		switch {
		case (len(a.up()) == 1) != tt.soon:
			w.Fatalf("%s: %v", tt.name, a.f.Conns())
		case a.f.peers.byLink[b.link()].holdUntil.IsZero() != tt.soon:
			w.Fatalf("%s: a's IsZero is %v, want %v", tt.name, a.f.peers.byLink[b.link()].holdUntil.IsZero(), tt.soon)
		case a.f.Status().Crossings.Seen != 0:
			w.Fatalf("%s: a's Status.Crossings.Seen is %v, want 0", tt.name, a.f.Status().Crossings.Seen)
		}
		w.run(5 * time.Second)
		a.ping("10.0.0.2", 100, true)
		w.settle()
		if x, _ := w.agree(a, b); x.MTU != tt.mtu || a.reqs[0].LocalQPN == a.reqs[1].LocalQPN {
			w.Fatalf("%s: MTU %d", tt.name, x.MTU)
		}
		if e := a.explain(ip4("10.0.0.2")); e.LastREJ == "" {
			t.Errorf("%s: no last REJ", tt.name)
		}
	}
}

// A REQ for a mode that is not announced gets REJ 9 (RFC 4755 section 3.1).
func TestModeNotOffered(t *testing.T) {
	w := newWorld(t, 14)
	a, b := w.node(1, Options{Mode: ModeAuto}), w.node(2, Options{Mode: ModeAuto})
	w.run(2 * time.Second)
	b.f.link.Flags = encap.FlagUC // what a has not heard yet
	p := a.ping("10.0.0.2", 100, true)
	w.run(time.Second)
	rej, ok := lastREJ(b)
	expect.MustEqual(w, ok, true, "ok")
	expect.MustEqual(w, rej.Reason, cm.ReasonInvalidTransport, "Reason")
	expect.MustEqual(w, b.got(p), 1, "b's copies of p")
}
