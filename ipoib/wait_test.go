package ipoib

import (
	"math/rand/v2"
	"testing"
	"time"

	"ipoibcm/cm"
	"ipoibcm/serviceid"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/mad"
)

// A peer with the larger address rejects every REQ of ours with 28, as if its own
// were on the way, and never sends one. The first time we ask again at once;
// afterwards with pauses that double, and UD carries on. 4755-8-1
func TestPromisesUnkept(t *testing.T) {
	w := newWorld(t, 31)
	a, b := w.node(1, Options{CMTransport: CMGSI}), w.node(2, Options{CMTransport: CMGSI})
	w.run(2 * time.Second)
	var asked []time.Time
	w.dropMAD = func(from *node, m mad.Message) bool {
		req, ok := m.(mad.REQ)
		if !ok || from != a {
			return false
		}
		asked = append(asked, w.now)
		w.inject(b, a, mad.REJ{RemoteCommID: req.LocalCommID, Reason: cm.ReasonConsumer})
		return true
	}
	// A promise stands for as long as a REQ of the peer may be on its way.
	const promise, longest = 3200 * time.Millisecond, 4 * time.Second
	a.ping("10.0.0.2", 100, true)
	w.run(longest + time.Millisecond)
	if n := len(asked); n != 2 {
		w.Fatalf("%d REQs, want another after the first promise, without another packet", n)
	}
	if d := asked[1].Sub(asked[0]); d < promise {
		w.Fatalf("the second REQ comes after %v, want %v", d, promise)
	}
	for range 300 {
		p := a.ping("10.0.0.2", 100, true)
		w.run(time.Second)
		if got := b.got(p); got != 1 {
			w.Fatalf("a packet arrived %d times, want once by UD", got)
		}
	}
	if n := len(asked); n < 4 || n > 16 {
		w.Fatalf("%d REQs in 300 s, want 4 to 16", n)
	}
	if d := asked[2].Sub(asked[1]); d < promise+500*time.Millisecond {
		w.Fatalf("the third REQ comes after %v, want %v and a pause", d, promise)
	}
	if d := asked[len(asked)-1].Sub(asked[len(asked)-2]); d < promise+15*time.Second {
		w.Fatalf("the last pause is %v, want one that has grown", d-promise)
	}
}

// spread looks at durations that are drawn: none outside [low, high), and neither
// half of that empty.
func spread(t *testing.T, what string, drawn []time.Duration, low, high time.Duration) {
	t.Helper()
	var halves [2]int
	for _, d := range drawn {
		if d < low || d >= high {
			t.Errorf("%s: %v is outside [%v, %v)", what, d, low, high)
		}
		if d < (low+high)/2 {
			halves[0]++
		} else {
			halves[1]++
		}
	}
	for i, n := range halves {
		if n == 0 {
			t.Errorf("%s: none of %d is in half %d of [%v, %v)", what, len(drawn), i, low, high)
		}
	}
}

// Hosts that failed at the same instant do not ask again at the same instant: a
// pause is drawn from half to one and a half times what it is by the count of
// failures.
func TestPausesAreDrawn(t *testing.T) {
	w := newWorld(t, 32)
	a, b := w.node(1, Options{RetryMin: 4 * time.Second, RetryMax: 10 * time.Second}), w.node(2, Options{})
	w.run(2 * time.Second)
	a.ping("10.0.0.2", 100, true)
	w.settle()
	for failures, nominal := range []time.Duration{4 * time.Second, 8 * time.Second, 10 * time.Second, 10 * time.Second} {
		var drawn []time.Duration
		for seed := range uint64(40) {
			p := &peer{key: b.link(), failures: int32(failures)}
			a.f.opt.Rand = rand.New(rand.NewPCG(seed, 1))
			a.f.now = w.now
			a.f.fail(p, "a test says so")
			drawn = append(drawn, p.holdUntil.Sub(w.now))
		}
		spread(t, "pause", drawn, nominal/2, nominal*3/2)
	}
}

// How long the loser of a crossing waits is drawn as well: at least for as long as
// a REQ lives, at most a quarter more.
func TestWaitAfterCrossingIsDrawn(t *testing.T) {
	w, a, b := newPair(t, 33)
	a.ping("10.0.0.2", 100, true)
	w.settle()
	var drawn []time.Duration
	for seed := range uint64(40) {
		p := &peer{key: b.link()}
		a.f.opt.Rand = rand.New(rand.NewPCG(seed, 1))
		a.f.now = w.now
		a.f.yield(p)
		drawn = append(drawn, p.waitUntil.Sub(w.now))
	}
	spread(t, "wait", drawn, 3200*time.Millisecond, 4*time.Second)
}

// A small packet to a peer whose UD QPN has changed is lost by UD; the REJ 8 to
// our REQ names the new QPN. Nothing waits, and yet the address is resolved again
// without another packet.
func TestMovedResolvesUnasked(t *testing.T) {
	w, a, b := newPair(t, 34)
	a.ping("10.0.0.2", 100, true)
	w.settle()
	b.kernel(b.k.Up(false)) // a knows b and has no connection
	w.run(3 * time.Second)
	b.dead, b.opt.Link.QPN = true, 0x777
	w.loss = 1 // the announcements of its new life are lost
	b.boot()
	w.run(3 * time.Second)
	w.loss = 0
	a.ping("10.0.0.2", 100, true)
	w.run(200 * time.Millisecond)
	if got := a.counter("peer_qpn_changed"); got != 1 {
		w.Fatalf("%d peers moved, want 1", got)
	}
	h := a.f.hops.peers[ip4("10.0.0.2")]
	if h == nil {
		w.Fatalf("10.0.0.2 is not resolved")
	}
	if got := h.key.QPN; got != 0x777 {
		w.Fatalf("10.0.0.2 is at QPN %v, want 0x000777", got)
	}
}

// privateQPN reads the UD QPN of private data as RFC 4755 section 6 draws it:
// octets 1 to 3.
func privateQPN(pd []byte) uint32 { return uint32(pd[1])<<16 | uint32(pd[2])<<8 | uint32(pd[3]) }

// An interface with a new UD QPN no longer listens on the service IDs of the old
// one: a REQ for those gets REJ 8, which names the new QPN. 4755-3.5-5
func TestOldServiceID(t *testing.T) {
	for _, first := range []byte{0x01, 0x10} { // RFC 4755's form and Linux's
		w := newWorld(t, 35)
		a, b := w.node(5, Options{}), w.node(2, Options{})
		w.run(2 * time.Second)
		req := honest(a, b)
		old := uint64(first)<<56 | 0x000105
		req.ServiceID = serviceid.ID(old)
		a.opt.Link.QPN = 0x777
		a.step(UnderlayChanged{Link: a.opt.Link, PathMTU: a.opt.PathMTU, Active: true})
		w.run(time.Second)
		w.inject(b, a, req)
		w.run(100 * time.Millisecond)
		rej, ok := lastREJ(a)
		if !ok {
			w.Fatalf("%#016x: no REJ", old)
		}
		if rej.Reason != 8 {
			w.Fatalf("%#016x: REJ %d, want 8", old, rej.Reason)
		}
		if got := privateQPN(rej.PrivateData[:]); got != 0x777 {
			w.Fatalf("%#016x: the REJ names QPN %#x, want 0x777", old, got)
		}
		req.ServiceID = serviceid.ID(uint64(first)<<56 | 0x000777)
		w.inject(b, a, req)
		w.run(100 * time.Millisecond)
		if got := len(a.f.Conns()); got != 1 {
			w.Fatalf("%d connections by the new service ID, want 1", got)
		}
	}
}

// What a peer announces replaces what it announced before, less as well as more.
func TestFlagsFollowTheLast(t *testing.T) {
	w := newWorld(t, 36)
	a, b := w.node(1, Options{Mode: ModeAuto}), w.node(2, Options{Mode: ModeAuto})
	for _, tt := range []struct {
		mode Mode
		want encap.Flags
	}{{ModeAuto, 0xc0}, {ModeUC, 0x40}, {ModeRC, 0x80}, {ModeUD, 0x00}, {ModeUC, 0x40}} {
		b.opt.Mode = tt.mode
		b.boot()
		w.run(3 * time.Second)
		a.ping("10.0.0.2", 100, true)
		w.settle()
		if got := a.f.peers.byLink[b.link()].flags; got != tt.want {
			w.Fatalf("%v: flags %#02x, want %#02x", tt.mode, uint8(got), uint8(tt.want))
		}
	}
}

// A neighbour entry that made room for another takes no connection away: the peer
// may be sending to us all the time.
func TestEvictedNeighborKeepsConnection(t *testing.T) {
	w := newWorld(t, 37)
	o := Options{}
	o.Neigh.MaxNeighbors = 1
	a, b, c := w.node(1, o), w.node(2, Options{}), w.node(3, Options{})
	w.run(2 * time.Second)
	a.ping("10.0.0.2", 100, true)
	w.settle()
	w.agree(a, b)
	for range 12 { // in use by b alone, so that its entry grows stale
		b.ping("10.0.0.1", 100, true)
		w.run(10 * time.Second)
	}
	before := a.f.neigh.Counters().Evicted
	p := a.ping("10.0.0.3", 100, true)
	w.run(time.Second)
	if got := c.got(p); got != 1 {
		w.Fatalf("c got %d packets, want 1", got)
	}
	if a.f.neigh.Counters().Evicted == before {
		w.Fatalf("nothing was evicted")
	}
	if a.f.hops.peers[ip4("10.0.0.2")] != nil {
		w.Fatalf("the entry of b was not evicted")
	}
	if got := len(b.up()); got != 1 {
		w.Fatalf("b has %d connections, want 1", got)
	}
}
