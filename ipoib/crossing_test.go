package ipoib

import (
	"fmt"
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
func (n *node) look(m *node) {
	n.f.now, n.f.out = n.w.now, nil
	n.f.neighStep(neigh.Resolve{IP: m.addrs[0].Addr()})
	n.f.settle()
	for _, a := range n.f.out {
		n.do(a)
	}
}

// REQs cross: 4755-3.3-1, 4755-3.3-3, 4755-3.3-5, 4755-3.3-7, 4755-3.3-10,
// 4755-3.2-1; a is the smaller. In every order of arrival, in every
// combination of modes, one connection is left: that of the larger address.
func TestCrossing(t *testing.T) {
	for i, modes := range [][2]Mode{{ModeRC, ModeRC}, {ModeUC, ModeUC}, {ModeAuto, ModeAuto}, {ModeAuto, ModeUC}} {
		for _, order := range []string{"together", "smaller first", "larger first", "REJ first", "REJ lost"} {
			t.Run(fmt.Sprintf("%v %v %s", modes[0], modes[1], order), func(t *testing.T) {
				w, a, b := meet(t, uint64(i), modes[0], modes[1])
				delayed := map[*node]bool{}
				w.dropMAD = func(from *node, m mad.Message) bool {
					// the first REQ of one side is lost, so that its repeat comes late
					first := func(n *node) bool {
						if m.Attr() != mad.AttrREQ || from != n || delayed[n] {
							return false
						}
						delayed[n] = true
						return true
					}
					switch order {
					case "smaller first", "REJ first":
						return first(b)
					case "larger first":
						return first(a)
					case "REJ lost":
						return m.Attr() == mad.AttrREJ
					}
					return false
				}
				p, q := a.ping("10.0.0.2", 9000, true), b.ping("10.0.0.1", 9000, true)
				w.settle()
				x, y := w.agree(a, b)
				if b.got(p) != 1 || a.got(q) != 1 {
					w.Fatalf("delivered %d and %d times", b.got(p), a.got(q))
				}
				if len(a.reqs) == 0 || len(b.reqs) == 0 {
					w.Fatalf("REQs: %d and %d", len(a.reqs), len(b.reqs))
				}
				if !y.Active || x.Active {
					w.Fatalf("the REQ of the smaller address won")
				}
				sa, sb := a.f.Status().Crossings, b.f.Status().Crossings
				expect.MustEqual(w, sa.Seen, 1, "Seen of %+v", sa)
				expect.MustEqual(w, sa.Accepted+sa.Yielded, 1, "Accepted and Yielded of %+v, %+v", sa, sb)
				expect.MustEqual(w, sa.Rejected, 0, "Rejected of %+v", sa)
				expect.MustEqual(w, sb.Accepted, 0, "Accepted of %+v", sb)
				expect.MustEqual(w, sb.Yielded, 0, "Yielded of %+v", sb)
				if rej, ok := lastREJ(b); order != "larger first" && (!ok || rej.Reason != cm.ReasonConsumer) {
					w.Fatalf("REJ %+v", rej) // 4755-3.3-6
				}
				if a.counter("dial_failed") > 1 || len(distinct(a.reqs)) != 1 || len(distinct(b.reqs)) != 1 {
					w.Fatalf("a new REQ because of a verdict")
				}
				if e := a.explain(ip4("10.0.0.2")); a.f.peers.byLink[b.link()].diagnostics().verdict == "" || e.Mode == "UD" {
					t.Errorf("%+v", e)
				}
			})
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

// 4755-3.3-3, 4755-3.3-4: a REQ of ours to somebody else is no crossing.
func TestNoCrossingWithOthers(t *testing.T) {
	w := newWorld(t, 2)
	a, b, c := w.node(5, Options{}), w.node(2, Options{}), w.node(3, Options{})
	w.run(2 * time.Second)
	w.dropMAD = func(from *node, m mad.Message) bool { return from == c } // outstanding
	a.ping("10.0.0.3", 100, true)
	w.run(time.Second)
	p := b.ping("10.0.0.5", 9000, true)
	w.run(time.Second)
	if a.got(p) != 1 || a.f.Status().Crossings.Seen != 0 {
		w.Fatalf("got %d, %+v", a.got(p), a.f.Status().Crossings)
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

// The REQ that won never completes: the loser asks again after a while.
func TestCrossingWinnerLost(t *testing.T) {
	w, a, b := meet(t, 4, ModeRC, ModeRC)
	a.f.opt.CMTransport, b.f.opt.CMTransport = CMGSI, CMGSI // no second path for the REQ
	w.dropMAD = func(from *node, m mad.Message) bool { return from == b && m.Attr() == mad.AttrREQ }
	p, q := a.ping("10.0.0.2", 9000, true), b.ping("10.0.0.1", 100, true)
	w.run(500 * time.Millisecond)
	if s := a.f.Status().Crossings; s.Yielded != 1 || a.f.peers.byLink[b.link()].waitUntil.IsZero() {
		w.Fatalf("%+v", s)
	}
	w.settle()
	w.agree(a, b)
	expect.MustEqual(w, b.got(p), 1, "b's copies of p")
	expect.MustEqual(w, a.got(q), 1, "a's copies of q")
	expect.MustEqual(w, a.f.Status().Crossings.Expired, 1, "a's Status.Crossings.Expired")
}

// 4755-3.2-13: a REQ from a peer that is not known; its address is known from the REQ alone.
func TestREQFromUnknownPeer(t *testing.T) {
	w, a, b := newPair(t, 5)
	req := mad.REQ{LocalCommID: 7, ServiceID: serviceid.New(serviceid.RFC, 0x101), LocalCAGUID: 9, LocalQPN: 0x55,
		Transport: ib.RC, PathMTU: ib.MTU1024, PKey: ib.DefaultPKey, MaxCMRetries: 3, LocalCMResponseTimeout: 16,
		RemoteCMResponseTimeout: 16}
	req.Primary.LocalGID, req.Primary.RemoteGID = gid(2), gid(1)
	req.Primary.LocalLID, req.Primary.RemoteLID = ib.PermissiveLID, ib.PermissiveLID
	pd, _ := encap.PrivateData{QPN: 0x102, ReceiveMTU: 9000}.AppendBinary(nil)
	copy(req.PrivateData[:], pd)
	req.PrivateData[0] = 0xff // reserved: 4755-6-4
	w.inject(b, a, req)
	w.run(100 * time.Millisecond)
	cs := a.f.Conns()
	// 4755-3.3-2, 4755-5.1-2
	expect.MustEqual(w, len(cs), 1, "length of cs")
	expect.MustEqual(w, cs[0].Peer.Key(), b.link(), "Peer.Key")
	expect.MustEqual(w, cs[0].MTU, 8996, "MTU")
	expect.MustEqual(w, cs[0].State, "REP_SENT", "State")
	w.run(time.Minute)
	if len(a.f.Conns())+len(a.qps) != 0 {
		w.Fatalf("left %+v", a.f.Conns()) // 4755-3.2-7
	}
}

// 4755-3.3-11: a REQ that comes from our own address is rejected.
func TestOwnREQ(t *testing.T) {
	w := newWorld(t, 6)
	a := w.node(1, Options{})
	req := mad.REQ{LocalCommID: 7, ServiceID: serviceid.New(serviceid.RFC, 0x101), LocalCAGUID: 9, LocalQPN: 0x55,
		PathMTU: ib.MTU1024, PKey: ib.DefaultPKey}
	req.Primary.LocalGID, req.Primary.RemoteGID = gid(1), gid(1)
	req.Primary.LocalLID, req.Primary.RemoteLID = ib.PermissiveLID, ib.PermissiveLID
	pd, _ := encap.PrivateData{QPN: 0x101, ReceiveMTU: 9000}.AppendBinary(nil)
	copy(req.PrivateData[:], pd)
	w.inject(a, a, req)
	w.run(100 * time.Millisecond)
	rej, ok := lastREJ(a)
	expect.MustEqual(w, ok, true, "ok")
	expect.MustEqual(w, rej.Reason, cm.ReasonConsumer, "Reason")
	expect.MustEqual(w, len(a.f.Conns()), 0, "length of a's Conns")
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

// A host restarts with a new UD QPN while its RTU is on the way: the RTU of
// its former life makes a connection that no neighbour leads to. It goes soon,
// also where idle connections stay.
func TestConnectionOfFormerLife(t *testing.T) {
	for _, idle := range []time.Duration{0, -1} {
		w := newWorld(t, 14)
		a, b := w.node(1, Options{Idle: idle}), w.node(2, Options{})
		w.run(2 * time.Second)
		w.dropMAD = func(_ *node, m mad.Message) bool {
			if m.Attr() == mad.AttrRTU && len(b.reqs) == 1 {
				w.madDelay = 1500 * time.Millisecond // past b's announcements, and what they are asked for
			}
			return false
		}
		b.ping("10.0.0.1", 100, true)
		w.run(10 * time.Millisecond)
		w.madDelay, w.dropMAD = 0, nil
		b.opt.Link.QPN = 0x777
		b.boot()
		w.run(time.Second)
		a.ping("10.0.0.2", 9000, true)
		b.ping("10.0.0.1", 9000, true)
		w.run(time.Second)
		if len(a.up()) != 2 {
			w.Fatalf("%d connections", len(a.up()))
		}
		w.run(31 * time.Second)
		cs := a.up()
		expect.MustEqual(w, len(cs), 1, "idle %v: length of cs", idle)
		expect.MustEqual(w, cs[0].Peer.QPN, 0x777, "idle %v: Peer.QPN", idle)
		expect.MustEqual(w, len(a.qps), 1, "idle %v: length of a's qps", idle)
	}
}
