package ipoib

import (
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/serviceid"
	"ipoibcm/wire/mad"
)

// forged returns a REQ of the 0x10 form to a in b's name, by somebody who hears no answer.
func forged(a, b *node, id mad.CommID) mad.REQ {
	req := honest(a, b)
	req.ServiceID = serviceid.New(serviceid.Legacy, a.opt.Link.QPN)
	req.LocalCommID, req.LocalQPN = id, 0x6600+ib.QPN(id)
	return req
}

// A REQ of the 0x10 form in the name of a host that is not known says nothing about that host: whoever
// sends it need not hear the REP. Its RTU does, because the REP has told a communication ID.
func TestForgedLegacyREQ(t *testing.T) {
	for _, answers := range []bool{false, true} {
		w := newWorld(t, 61)
		a, b := w.node(1, Options{}), w.node(2, Options{})
		w.run(2 * time.Second)
		b.silent = true
		want := serviceid.RFC
		w.inject(b, a, forged(a, b, 0x71))
		w.run(time.Millisecond)
		if answers {
			w.inject(b, a, mad.RTU{LocalCommID: 0x71, RemoteCommID: repOf(w, a).LocalCommID})
			w.run(time.Millisecond)
			want = serviceid.Legacy
		}
		b.silent = false
		a.ping(a.peerAddr(b), 500, true)
		w.run(time.Millisecond)
		if len(a.reqs) != 1 {
			w.failf("it answers %v: %d REQs, want 1", answers, len(a.reqs))
		}
		if form, _ := serviceid.Parse(a.reqs[0].ServiceID); form != want {
			t.Errorf("it answers %v: the REQ has the form %v, want %v", answers, form, want)
		}
	}
}

// REQs of the 0x10 form in the name of a legacy peer do not end the connection that it has: those that
// never came to be make room first.
func TestForgedREQsBesideLegacyConnection(t *testing.T) {
	w := newWorld(t, 62)
	a, k := w.node(1, Options{}), w.linux(2)
	w.run(2 * time.Second)
	k.legacy.connect(a)
	w.run(time.Second)
	k.silent = true // what it makes of our REPs is its own affair
	for id := range mad.CommID(3 * maxLegacyRx) {
		w.inject(k, a, forged(a, k, 0x100+id))
		w.run(20 * time.Millisecond)
	}
	if got := len(a.qps); got != maxLegacyRx {
		t.Errorf("%d queue pairs, want %d", got, maxLegacyRx)
	}
	k.silent = false
	in := mustEcho("10.0.0.2", "10.0.0.1", 3000)
	k.legacy.sendTo(a, in)
	w.run(time.Second)
	if got := a.got(in); got != 1 {
		t.Errorf("%d packets came over the peer's connection, want 1", got)
	}
}
