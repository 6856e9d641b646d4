package ipoib

import (
	"net/netip"
	"testing"
	"time"

	"ipoibcm/cm"
	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/internal/foreign"
	"ipoibcm/internal/long"
	"ipoibcm/neigh"
	"ipoibcm/serviceid"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/mad"
)

// meet gives two hosts that know each other and have no connection.
func meet(t testing.TB, seed uint64, ma, mb Mode) (*world, *node, *node) {
	w := newWorld(t, seed)
	a, b := w.node(1, Options{Mode: ma}), w.node(2, Options{Mode: mb})
	w.run(2 * time.Second)
	a.look(b)
	b.look(a)
	w.run(time.Second)
	w.delay = 1 // what leaves together crosses
	return w, a, b
}

// look has n resolve m's address without sending it anything.
func (n *node) look(m *node) { n.resolve(m.addrs[0].Addr()) }

func (n *node) resolve(addr netip.Addr) {
	n.f.now, n.f.out = n.w.now, nil
	n.f.neighStep(neigh.Resolve{IP: addr})
	n.f.settle()
	for _, a := range n.f.out {
		n.do(a)
	}
}

// TestCrossing runs testdata/crossing-*.txt. In every order of arrival, in every
// combination of modes, REQs that cross leave one connection, that of the larger
// address; a is the smaller.
//
//	crossing-rc, -uc, -auto, -auto-uc   4755-3.2-1, 4755-3.3-1, 4755-3.3-3, 4755-3.3-5, 4755-3.3-7, 4755-3.3-10,
//	                                    and REJ 28 is the verdict: 4755-3.3-6
//	crossing-others                     4755-3.3-3, 4755-3.3-4
//	crossing-lost                       the REQ that won never completes
func TestCrossing(t *testing.T) { playScripts(t, "crossing-*") }

// The comparison: 4755-3.3-8, 4755-3.3-11, and flags that would invert it, 4755-3.3-7.
func TestCrossingOrder(t *testing.T) {
	own := encap.LinkAddr{QPN: 0x200, GID: gid(9)}
	for _, tt := range []struct {
		name   string
		remote encap.LinkAddr
		accept bool
	}{
		{"larger QPN", encap.LinkAddr{QPN: 0x201, GID: gid(1)}, true},
		{"smaller QPN, larger GID", encap.LinkAddr{QPN: 0x1ff, GID: gid(0xffff)}, false},
		{"QPN equal, last octet of the GID larger", encap.LinkAddr{QPN: 0x200, GID: gid(10)}, true},
		{"QPN equal, last octet of the GID smaller", encap.LinkAddr{QPN: 0x200, GID: gid(8)}, false},
		{"larger in the top bit only", encap.LinkAddr{QPN: 0x800000, GID: gid(1)}, true},
	} {
		for _, mode := range []Mode{ModeRC, ModeUC, ModeAuto} {
			w := newWorld(t, 1)
			f := w.node(1, Options{Mode: mode}).f
			f.link.QPN, f.link.GID = own.QPN, own.GID
			p := &peer{key: tt.remote, flags: encap.FlagRC | encap.FlagUC}
			f.peers.byLink[p.key] = p
			f.now = w.now
			c := f.newConn(p, ib.RC, serviceid.RFC, true)
			p.dial = c
			c.state, c.handle = connAsked, 99
			f.conns.byHandle[99] = c
			if got := f.cross(p, cm.RequestReceived{Handle: 1 << 63}); got != tt.accept {
				t.Errorf("%s: accepted = %v", tt.name, got)
			}
			n := f.n
			expect.Equal(t, n[nCrossSeen], 1, "%s: n[nCrossSeen]", tt.name)
			expect.Equal(t, n[nCrossAccepted] == 1, tt.accept, "%s: n[nCrossAccepted] == 1", tt.name)
			if (n[nCrossRejected] == 1) == tt.accept {
				t.Errorf("%s: crossings_rejected %d, want %v", tt.name, n[nCrossRejected], map[bool]int{false: 1}[tt.accept])
			}
		}
	}
}

// Crossing REQs leave one connection also beside one that both ends have lost
// sight of.
func TestCrossingBesideConnection(t *testing.T) {
	w, a, b := meet(t, 3, ModeRC, ModeRC)
	a.ping("10.0.0.2", 100, true)
	w.settle()
	w.agree(a, b)
	for _, n := range []*node{a, b} { // both lose sight of it
		for _, p := range n.f.peers.byLink {
			p.tx = nil
		}
		n.f.hops.allDirty = true
		n.step(Wake{})
	}
	p, q := a.ping("10.0.0.2", 9000, true), b.ping("10.0.0.1", 9000, true)
	w.settle()
	ca, cb := a.up(), b.up()
	expect.MustEqual(w, len(ca), 2, "length of ca")
	expect.MustEqual(w, len(cb), 2, "length of cb")
	expect.MustEqual(w, b.got(p), 1, "b's copies of p")
	expect.MustEqual(w, a.got(q), 1, "a's copies of q")
	expect.MustEqual(w, a.f.Status().Crossings.Seen, 1, "a's Status.Crossings.Seen")
}

// One end knows the peer as legacy, the other dials 0x01: the 0x01 REQ is
// accepted, whoever is larger, and the other abandoned (docs/adr/0007-both-service-ids.md).
func TestFormsCross(t *testing.T) {
	for _, larger := range []bool{false, true} {
		w, a, b := meet(t, 7, ModeRC, ModeRC)
		l, r := a, b // l dials 0x10
		if larger {
			l, r = b, a
		}
		lp := l.f.peer(r.link())
		lp.class, lp.classUntil = ClassLegacy, w.now.Add(time.Hour)
		p := l.ping(l.peerAddr(r), 9000, true)
		q := r.ping(r.peerAddr(l), 9000, true)
		w.settle()
		if r.got(p) != 1 || l.got(q) != 1 {
			w.Fatalf("got %d and %d", r.got(p), l.got(q))
		}
		switch {
		case lp.class != ClassRFC:
			w.Fatalf("class is %v, want %v", lp.class, ClassRFC)
		case lp.tx == nil:
			w.Fatalf("tx is nil")
		case lp.tx.form != serviceid.RFC:
			w.Fatalf("form is %v, want %v", lp.tx.form, serviceid.RFC)
		case l.f.Status().Crossings.Seen+r.f.Status().Crossings.Seen != 0:
			w.Fatalf("class %v", lp.class)
		}
	}
}

func (n *node) peerAddr(m *node) string { return m.addrs[0].Addr().String() }

func TestLegacyPeer(t *testing.T) {
	w := newWorld(t, 8)
	a := w.node(1, Options{Mode: ModeAuto})
	k := w.linux(2)
	w.run(2 * time.Second)
	a.ping("10.0.0.2", 9000, true)
	w.run(time.Second)
	expect.MustEqual(w, len(k.legacy.got), 1, "length of k's got")
	expect.MustEqual(w, len(a.reqs), 2, "length of a's reqs")
	expect.MustEqual(w, a.counter("service_id_fallbacks"), 1, "a's service_id_fallbacks")
	if f0, _ := serviceid.Parse(a.reqs[0].ServiceID); f0 != serviceid.RFC {
		t.Errorf("first REQ in form %v", f0)
	}
	// its own connection: accepted for receiving, nothing is sent on it
	k.legacy.connect(a)
	w.run(time.Second)
	if len(a.up()) != 2 || k.legacy.up() != 2 {
		w.Fatalf("%d connections", len(a.up()))
	}
	in := mustEcho("10.0.0.2", "10.0.0.1", 3000)
	k.legacy.sendTo(a, in)
	a.ping("10.0.0.2", 9000, true)
	w.run(time.Second)
	if a.got(in) != 1 || len(k.legacy.got) != 2 {
		w.Fatalf("got %d and %d", a.got(in), len(k.legacy.got))
	}
	for _, c := range a.up() {
		switch {
		case c.Class != ClassLegacy:
			w.Fatalf("c's Class is %v, want %v", c.Class, ClassLegacy)
		case c.Tx == c.Rx:
			w.Fatalf("c's Tx is %v, want another than %v", c.Tx, c.Rx)
		case c.Tx != c.Active:
			w.Fatalf("c's Tx is %v, want %v", c.Tx, c.Active)
		}
	}
	e := a.explain(ip4("10.0.0.2"))
	expect.MustEqual(w, e.Class, ClassLegacy, "Class")
	expect.MustEqual(w, e.Mode, "RC", "Mode")
	if e.LastREJ == "" {
		w.Fatalf("LastREJ is empty")
	}
	// remembered: after a teardown one REQ, of the 0x10 form, is enough
	for _, c := range a.up() {
		if c.Tx {
			a.step(QPError{Conn: c.Conn})
		}
	}
	w.run(7 * time.Second)
	n := len(a.reqs)
	a.ping("10.0.0.2", 9000, true)
	w.run(2 * time.Second)
	form, _ := serviceid.Parse(a.reqs[len(a.reqs)-1].ServiceID)
	expect.MustEqual(w, len(a.reqs), n+1, "length of a's reqs")
	expect.MustEqual(w, form, serviceid.Legacy, "form")
	expect.MustEqual(w, len(k.legacy.got), 3, "length of k's got")
}

// An RNR NAK of Linux asks for 655 ms and means the least: it is waited out for less. One of
// our own kind means what it says.
func TestRNRWait(t *testing.T) {
	w := newWorld(t, 8)
	a, b, _ := w.node(1, Options{}), w.node(2, Options{}), w.linux(3)
	w.run(2 * time.Second)
	a.ping(a.peerAddr(b), 9000, true)
	a.ping("10.0.0.3", 9000, true)
	w.run(time.Second)
	if len(a.qps) != 2 {
		t.Fatalf("%d connections, want 2", len(a.qps))
	}
	for _, q := range a.qps {
		want := time.Duration(0)
		if q.destGID == gid(3) {
			want = 10 * time.Millisecond
		}
		if q.rnrWait != want {
			t.Errorf("to %v an RNR NAK is waited out for %v, want %v", q.destGID, q.rnrWait, want)
		}
	}
}

// The kernel dials first: accepted, and its class is known from that.
func TestLegacyFirst(t *testing.T) {
	w, a, k := newLinuxPair(t, 9)
	k.legacy.connect(a)
	w.run(time.Second)
	in := mustEcho("10.0.0.2", "10.0.0.1", 3000)
	k.legacy.sendTo(a, in)
	a.ping("10.0.0.2", 9000, true)
	w.run(time.Second)
	expect.MustEqual(w, a.got(in), 1, "a's copies of in")
	expect.MustEqual(w, len(k.legacy.got), 1, "length of k's got")
	expect.MustEqual(w, len(a.reqs), 1, "length of a's reqs")
	a.step(Shutdown{})
	w.run(2 * time.Second)
	if len(a.qps) != 0 || k.legacy.up() != 0 {
		w.Fatalf("left %d, %d", len(a.qps), k.legacy.up())
	}
}

// UC is never asked for with the 0x10 form: Linux has RC only.
func TestLegacyNeverUC(t *testing.T) {
	w := newWorld(t, 10)
	a, k := w.node(1, Options{Mode: ModeUC}), w.linux(2)
	k.legacy.p.Announce(encap.FlagRC | encap.FlagUC)
	w.run(2 * time.Second)
	a.ping("10.0.0.2", 500, true)
	w.settle()
	for _, r := range a.reqs {
		if form, _ := serviceid.Parse(r.ServiceID); form == serviceid.Legacy {
			w.Fatalf("a UC REQ in the 0x10 form")
		}
	}
	if len(k.legacy.got) != 1 {
		w.Fatalf("got %d", len(k.legacy.got))
	}
}

// Both dial at once, and each of the first MADs is quick, slow or lost, in
// every combination: one connection is left, and what waited went out once.
func TestCrossingExhaustively(t *testing.T) {
	depth := long.Of(6, 7)
	fates := 1
	for range depth {
		fates *= 3
	}
	var seen uint64
	for fate := range fates {
		w, a, b := meet(t, uint64(fate), ModeRC, ModeRC)
		left, n := fate, 0
		w.dropMAD = func(from *node, m mad.Message) bool {
			w.madDelay = 0
			if n++; n > depth {
				return false
			}
			f := left % 3
			left /= 3
			w.madDelay = [...]time.Duration{0, 20 * time.Millisecond, 0}[f]
			return f == 2
		}
		p, q := a.ping("10.0.0.2", 9000, true), b.ping("10.0.0.1", 9000, true)
		w.settle()
		w.agree(a, b)
		if b.got(p) != 1 || a.got(q) != 1 {
			w.Fatalf("fate %d: got %d and %d", fate, b.got(p), a.got(q))
		}
		if a.f.Status().Crossings.Rejected != 0 || b.f.Status().Crossings.Accepted != 0 {
			w.Fatalf("fate %d: the larger address won", fate) // 4755-3.3-5
		}
		seen += a.f.Status().Crossings.Seen
	}
	if seen < uint64(fates)/2 {
		t.Errorf("%d crossings in %d runs", seen, fates)
	}
}

// A legacy peer that comes again and again, as after crashes, holds a bounded
// number of connections; one without private data is known by its GID alone.
func TestLegacyBounds(t *testing.T) {
	w, a, k := newLinuxPair(t, 11)
	for range 10 {
		k.legacy.connect(a)
		w.run(time.Second)
	}
	if len(a.qps) != maxLegacyRx || a.counter("legacy_connections_full") != 10-maxLegacyRx {
		w.Fatalf("%d QPs", len(a.qps))
	}
	w.run(25 * time.Minute) // silent: reaped
	if len(a.f.Conns()) != 0 || len(a.f.peers.byLink) != 0 {
		w.Fatalf("left %+v", a.f.Conns())
	}
}

// The order of the service IDs is the operator's; two agents of ours
// that both begin with 0x10 have two one-way connections.
func TestLinuxFirst(t *testing.T) {
	w := newWorld(t, 12)
	a, b := w.node(1, Options{LinuxFirst: true}), w.node(2, Options{LinuxFirst: true})
	w.run(2 * time.Second)
	p, q := a.ping("10.0.0.2", 9000, true), b.ping("10.0.0.1", 9000, true)
	w.settle()
	expect.MustEqual(w, b.got(p), 1, "b's copies of p")
	expect.MustEqual(w, a.got(q), 1, "a's copies of q")
	expect.MustEqual(w, len(a.qps), 2, "length of a's qps")
	expect.MustEqual(w, len(b.qps), 2, "length of b's qps")
	if a.f.Status().Crossings.Seen+b.f.Status().Crossings.Seen != 0 {
		w.Fatalf("the crossing rule is not for the 0x10 form")
	}
}

// A peer that listens on neither service ID is served over UD.
func TestNeitherServiceID(t *testing.T) {
	w := newWorld(t, 13)
	a, k := w.node(1, Options{CMTransport: CMGSI}), w.foreign(2, foreign.Options{Deaf: true})
	w.run(2 * time.Second)
	a.ping("10.0.0.2", 500, true)
	w.run(500 * time.Millisecond)
	expect.MustEqual(w, len(a.reqs), 2, "length of a's reqs")
	expect.MustEqual(w, len(k.legacy.got), 1, "length of k's got")
	expect.MustEqual(w, len(a.qps), 0, "length of a's qps")
	expect.MustEqual(w, a.f.peers.byLink[k.link()].class, ClassUnknown, "a's class")
}
