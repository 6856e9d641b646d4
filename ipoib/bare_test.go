package ipoib

import (
	"testing"
	"time"

	"ipoibcm/wire/mad"
)

// Private data that is missing (docs/rfc4755.md, "Private data that is missing").

// Without a UD QPN a REQ in the 0x01 form says nothing of its sender's link-layer
// address, so nothing can be compared: it is taken for receiving, beside our own
// REQ, and nothing is ever sent on it. 4755-3.2-11, 4755-3.3-2
func TestREQWithoutPrivateData(t *testing.T) {
	w := newWorld(t, 51)
	a, b := w.node(5, Options{}), w.node(2, Options{}) // a is the larger: a crossing it would reject
	w.run(2 * time.Second)
	b.silent = true
	a.ping("10.0.0.2", 100, true)
	w.run(10 * time.Millisecond)
	req := honest(a, b)
	req.PrivateData = [mad.REQPrivateLen]byte{}
	w.inject(b, a, req)
	w.run(10 * time.Millisecond)
	if rej, ok := lastREJ(a); ok {
		w.Fatalf("it got REJ %d, want a REP", rej.Reason)
	}
	w.inject(b, a, mad.RTU{LocalCommID: req.LocalCommID, RemoteCommID: repOf(w, a).LocalCommID}) // without, too
	w.run(10 * time.Millisecond)
	up := a.up()
	if len(up) != 1 {
		w.Fatalf("%d connections up, want 1", len(up))
	}
	if !up[0].Rx {
		w.Fatalf("nothing is received on it")
	}
	if up[0].Tx {
		w.Fatalf("packets are sent on it")
	}
	if got := len(a.reqs); got != 1 {
		w.Fatalf("%d REQs of ours, want the one outstanding", got)
	}
}

// A REP without private data announces no Receive MTU: it gets REJ 26 with our own
// values, and packets go by UD. 4755-3.2-4, 4755-5-2
func TestREPWithoutPrivateData(t *testing.T) {
	w, a, b := newPair(t, 52)
	b.silent = true
	p := a.ping("10.0.0.2", 100, true)
	w.run(10 * time.Millisecond)
	w.inject(b, a, mad.REP{LocalCommID: 0x71, RemoteCommID: a.reqs[0].LocalCommID, LocalQPN: 0x61, LocalCAGUID: 9,
		RNRRetryCount: 7})
	w.run(10 * time.Millisecond)
	rej, ok := lastREJ(a)
	if !ok {
		w.Fatalf("no REJ")
	}
	if rej.Reason != 26 {
		w.Fatalf("REJ %d, want 26", rej.Reason)
	}
	if got := privateQPN(rej.PrivateData[:]); got != 0x101 {
		w.Fatalf("the REJ names QPN %#x, want 0x101", got)
	}
	if got := len(a.up()); got != 0 {
		w.Fatalf("%d connections up, want 0", got)
	}
	if got := b.got(p); got != 1 {
		w.Fatalf("the packet arrived %d times, want once by UD", got)
	}
}
