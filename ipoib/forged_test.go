package ipoib

import (
	"slices"
	"testing"
	"time"

	"ipoibcm/cm"
	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/serviceid"
	"ipoibcm/wire/encap"
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
		w, a, b := newPair(t, 61)
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
			w.Fatalf("it answers %v: %d REQs, want 1", answers, len(a.reqs))
		}
		if form, _ := serviceid.Parse(a.reqs[0].ServiceID); form != want {
			t.Errorf("it answers %v: the REQ has the form %v, want %v", answers, form, want)
		}
	}
}

// REQs of the 0x10 form in the name of a legacy peer do not end the connection that it has: those that
// never came to be make room first.
func TestForgedREQsBesideLegacyConnection(t *testing.T) {
	w, a, k := newLinuxPair(t, 62)
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

// legacyProven returns a world in which a legacy peer has accepted a connection of a, which has ended.
func legacyProven(t *testing.T) (w *world, a, k *node) {
	w = newWorld(t, 63)
	a, k = w.node(1, Options{Idle: 10 * time.Second}), w.linux(2)
	w.run(2 * time.Second)
	a.ping("10.0.0.2", 500, true)
	w.run(30 * time.Second)
	if n := len(a.f.Conns()); n != 0 {
		w.Fatalf("%d connections, want 0", n)
	}
	if p := a.f.peers.byLink[k.link()]; !p.provenLegacy() {
		w.Fatalf("the peer is no proven legacy peer: class %v", p.class)
	}
	a.reqs = nil
	k.silent = true
	return w, a, k
}

// formsOf lists the service ID forms of the REQs that a has sent.
func formsOf(a *node) (forms []serviceid.Form) {
	for _, req := range a.reqs {
		form, _ := serviceid.Parse(req.ServiceID)
		forms = append(forms, form)
	}
	return forms
}

// A REQ of the 0x01 form in the name of a proven legacy peer, by QP 1 or in-band, keeps none of our REQs back, nor
// the one that is out when it comes. If its connection is established it was the peer's after all: that one stays, and
// ours is given up.
func TestForgedREQToProvenLegacy(t *testing.T) {
	for _, tt := range []struct {
		name                   string
		inband, first, answers bool // first: before our own REQ
	}{
		{"before ours", false, true, false},
		{"beside ours", false, false, false},
		{"in-band before ours", true, true, false},
		{"in-band beside ours", true, false, false},
		{"before ours, the peer's", false, true, true},
		{"beside ours, the peer's", false, false, true},
	} {
		w, a, k := legacyProven(t)
		p := a.f.peers.byLink[k.link()]
		forge := func() {
			req := honest(a, k)
			if tt.inband {
				body, _ := req.AppendBinary([]byte{byte(encap.InbandCM >> 8), byte(encap.InbandCM & 0xff), 0, 0})
				w.send(func() { a.recvUD(k.link(), a.opt.Link.GID, body) }, a, false)
			} else {
				w.inject(k, a, req)
			}
			w.run(time.Millisecond)
		}
		if tt.first {
			forge()
		}
		a.ping("10.0.0.2", 500, true)
		w.run(time.Millisecond)
		if !tt.first {
			forge()
		}
		if got, want := formsOf(a), []serviceid.Form{serviceid.Legacy}; !slices.Equal(got, want) {
			t.Errorf("%s: REQs of the forms %v, want %v", tt.name, got, want)
		}
		if p.dial == nil {
			t.Errorf("%s: our REQ has been given up", tt.name)
		}
		if p.accept == nil {
			t.Fatalf("%s: the REQ was not taken", tt.name)
		}
		if !tt.answers {
			k.silent = false
			w.run(time.Minute)
			if !p.provenLegacy() {
				t.Errorf("%s: the peer is no proven legacy peer any more: class %v", tt.name, p.class)
			}
			continue
		}
		w.inject(k, a, mad.RTU{LocalCommID: 7, RemoteCommID: repOf(w, a).LocalCommID})
		w.run(time.Millisecond)
		if p.class != ClassRFC {
			t.Errorf("%s: the peer's class is %v, want rfc", tt.name, p.class)
		}
		cs := a.f.Conns()
		if len(cs) != 1 {
			t.Fatalf("%s: %d connections, want 1: %+v", tt.name, len(cs), cs)
		}
		expect.Equal(t, cs[0].Active, false, "%s: Active", tt.name)
		expect.Equal(t, cs[0].Tx, true, "%s: Tx", tt.name)
	}
}

// Who answers a REQ of ours with REJ 28 while its own is taken knows the rule of section 3.3 (4755-3.3-9): it is no
// legacy peer, and its REQ is the one that counts.
func TestCrossingWithProvenLegacy(t *testing.T) {
	w, a, k := legacyProven(t)
	p := a.f.peers.byLink[k.link()]
	w.run(classMemory)
	w.inject(k, a, honest(a, k))
	w.run(time.Millisecond)
	a.ping("10.0.0.2", 500, true)
	w.run(time.Millisecond)
	if got, want := formsOf(a), []serviceid.Form{serviceid.RFC}; !slices.Equal(got, want) {
		t.Fatalf("REQs of the forms %v, want %v", got, want)
	}
	w.inject(k, a, mad.REJ{RemoteCommID: a.reqs[0].LocalCommID, Reason: cm.ReasonConsumer})
	w.run(time.Millisecond)
	if p.class != ClassRFC {
		t.Errorf("the peer's class is %v, want rfc", p.class)
	}
	if !p.waitUntil.IsZero() {
		t.Error("a REQ of the peer is waited for, which is here already")
	}
	a.ping("10.0.0.2", 500, true)
	w.run(time.Millisecond)
	if n := len(a.reqs); n != 1 {
		t.Errorf("%d REQs, want 1", n)
	}
}
