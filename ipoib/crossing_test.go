package ipoib

import (
	"net/netip"
	"testing"
	"time"

	"ipoibcm/cm"
	"ipoibcm/ib"
	"ipoibcm/internal/expect"
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
		expect.MustEqual(w, b.got(p), 1, "fate %d: b's copies of p", fate)
		expect.MustEqual(w, a.got(q), 1, "fate %d: a's copies of q", fate)
		// 4755-3.3-5
		expect.MustEqual(w, a.f.Status().Crossings.Rejected, 0, "fate %d: a's crossings rejected", fate)
		expect.MustEqual(w, b.f.Status().Crossings.Accepted, 0, "fate %d: b's crossings accepted", fate)
		seen += a.f.Status().Crossings.Seen
	}
	if seen < uint64(fates)/2 {
		t.Errorf("%d crossings in %d runs", seen, fates)
	}
}
