package datapath

import (
	"context"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"ipoibcm/ib"
	"ipoibcm/internal/long"
	"ipoibcm/ratelimit"
	"ipoibcm/verbs"
)

// A filterKernel drops what a provider is told to drop.
type filterKernel struct {
	known map[verbs.DatagramSource]bool // nil: nothing is dropped
	calls int
}

func (k *filterKernel) filter(known []verbs.DatagramSource) {
	k.known = nil
	if known == nil {
		return
	}
	k.calls++
	k.known = map[verbs.DatagramSource]bool{}
	for _, s := range known {
		k.known[s] = true
	}
}

func (k *filterKernel) passes(gid ib.GID, qpn ib.QPN) bool {
	slice := (int(gid[15]) + int(gid[13])) % verbs.FloodSlices
	return k.known == nil || k.known[verbs.DatagramSource{GID: gid, QPN: qpn}] || slice == k.calls%verbs.FloodSlices
}

// A flood of 100,000 datagrams a second, each from another source, is kept away, and with it
// one source that sends twice its share. Whom we send to passes whole; steady
// streams do so once they were noticed. It ends when the flood has.
func TestFloodFilter(t *testing.T) {
	long.OneGoroutine(t)
	l := &Loop{data: newDataLimits()}
	peer := udPeer{ib.GID{0xfe, 0x80, 15: 1}, 7}
	l.KnowUD(peer.gid, peer.qpn, 1)
	var k filterKernel
	s := &l.data.flood
	const step = int64(10 * time.Microsecond)
	now, looked, began, ended := int64(0), int64(0), int64(-1), int64(-1)
	counts, reached, passed := map[string]int{}, map[string]int{}, map[string]int{}
	arrive := func(name string, p udPeer) {
		counts[name]++
		if !k.passes(p.gid, p.qpn) {
			return
		}
		reached[name]++
		if l.allowData(now, p.gid, p.qpn, anyFrame) {
			passed[name]++
		}
	}
	since := func(t int64, d time.Duration) bool { return now-t >= int64(d) }
	for i := 0; now < int64(20*time.Second); i++ {
		now += step
		if s.on && since(looked, filterEvery) {
			known, on := s.look(now, l.udPeers.known())
			if !on {
				known, ended = nil, now
			}
			k.filter(known)
			looked = now
		}
		if !s.on && s.flooded(now) {
			s.begin(now)
			began, looked = now, now
			known, _ := s.look(now, l.udPeers.known())
			k.filter(known)
		}
		floodArrivals(i, time.Duration(now), arrive)
	}
	if began < 0 || began > int64(1200*time.Millisecond) {
		t.Errorf("the flood filter began after %v, want within 200ms of the flood at 1s", time.Duration(began))
	}
	if ended < int64(10*time.Second) || ended > int64(13*time.Second) {
		t.Errorf("it ended after %v, want within 3s of the flood's end at 10s", time.Duration(ended))
	}
	for _, tt := range []struct {
		name        string
		least, most int
	}{
		{"forged", 1, 10 * 3 * dataRate.Unknown},
		{"peer", counts["peer"], counts["peer"]},
		{"greedy", 9 * dataShare / 10, 9 * dataShare},
		{"stream", counts["stream"] * 8 / 10, counts["stream"]},
		{"slow stream", 2, counts["slow stream"]},
	} {
		if n := passed[tt.name]; n < tt.least || n > tt.most {
			t.Errorf("%s: %d of %d passed, want %d to %d", tt.name, n, counts[tt.name], tt.least, tt.most)
		}
	}
	for name, share := range map[string]float64{"forged": 2.0 / verbs.FloodSlices, "greedy": 0.85} {
		if got := float64(reached[name]) / float64(counts[name]); got > share {
			t.Errorf("%s: %.2f of them reached the limiter, want %.2f at most", name, got, share)
		}
	}
}

// floodArrivals are the datagrams of step i, at now: a flood from 1 s to 10 s, and senders beside it.
func floodArrivals(i int, now time.Duration, arrive func(string, udPeer)) {
	if now >= time.Second && now < 10*time.Second {
		arrive("forged", udPeer{ib.GID{0xfe, 0x80, 8: 1, 12: byte(i >> 24), 13: byte(i >> 16), 14: byte(i >> 8),
			15: byte(i)}, ib.QPN(i & 0xffff)})
		if i%3 == 0 {
			arrive("greedy", udPeer{ib.GID{0xfe, 0x80, 15: 2}, 3})
		}
	}
	if i%10 == 0 {
		arrive("peer", udPeer{ib.GID{0xfe, 0x80, 15: 1}, 7})
	}
	if i%20 == 0 && now >= 5*time.Second && now < 10*time.Second {
		arrive("stream", udPeer{ib.GID{0xfe, 0x80, 15: 4}, 4})
	}
	if i%10_000 == 0 && now >= 7*time.Second && now < 10*time.Second {
		arrive("slow stream", udPeer{ib.GID{0xfe, 0x80, 15: 5}, 5})
	}
}

// A thousand and more sources that each come again do not fill memory.
func TestFloodFilterIsBounded(t *testing.T) {
	l := &Loop{data: newDataLimits()}
	s := &l.data.flood
	s.begin(1)
	for round := range 3 {
		for i := range 3 * maxReturning {
			l.allowData(int64(1+round), ib.GID{0xfe, 0x80, 14: byte(i >> 8), 15: byte(i)}, 9, anyFrame)
		}
	}
	if n := len(s.returning); n != maxReturning {
		t.Errorf("%d senders are remembered, want %d", n, maxReturning)
	}
	if known, _ := s.look(int64(time.Second), nil); len(known) != maxReturning {
		t.Errorf("%d are let through, want %d", len(known), maxReturning)
	}
	if known, _ := s.look(2*returningFor, nil); len(known) != 0 || len(s.returning) != 0 {
		t.Errorf("after %v without a datagram %d are let through and %d remembered, want none",
			time.Duration(returningFor), len(known), len(s.returning))
	}
	if n := testing.AllocsPerRun(1000, func() { l.allowData(1, ib.GID{0xfe, 0x80, 15: 9}, 9, anyFrame) }); n != 0 {
		t.Errorf("%v allocations, want none", n)
	}
}

// A filterProvider notes what it is told.
type filterProvider struct {
	verbs.FloodFilterer
	mu   sync.Mutex
	told [][]verbs.DatagramSource
}

func (p *filterProvider) FilterFlood(known []verbs.DatagramSource) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.told = append(p.told, known)
}

func (p *filterProvider) last() (n int, known []verbs.DatagramSource) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.told) == 0 {
		return 0, nil
	}
	return len(p.told), p.told[len(p.told)-1]
}

// The provider is told when a flood begins, at once when somebody becomes known, and when the
// flood is over, or the loop ends.
func TestKeepFloodFilter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &Loop{data: newDataLimits()}
		ctx, stop := context.WithCancel(t.Context())
		var p filterProvider
		var wg sync.WaitGroup
		wg.Go(func() { l.keepFloodFilter(ctx, &p) })
		// With keys that are drawn its memory takes one sender for another in some runs.
		l.data.flood.met = ratelimit.NewMemory([2]uint64{0x243f6a8885a308d3, 0x13198a2e03707344})
		flood := func() {
			for i := range 20_000 {
				l.allowData(nanotime(), ib.GID{0xfe, 0x80, 13: 1, 14: byte(i >> 8), 15: byte(i)}, 9, anyFrame)
			}
		}
		l.KnowUD(ib.GID{1}, 1, 1)
		synctest.Wait()
		if n, _ := p.last(); n != 0 {
			t.Errorf("the provider was told %d times before there was a flood", n)
		}
		flood()
		time.Sleep(time.Microsecond)
		if n, known := p.last(); n != 1 || len(known) != 1 {
			t.Errorf("when the flood began the provider was told %d times, in the end %d sources, want once, one", n, len(known))
		}
		time.Sleep(filterSoonest)
		l.KnowUD(ib.GID{2}, 2, 1)
		synctest.Wait()
		if n, known := p.last(); n != 2 || len(known) != 2 {
			t.Errorf("with another peer the provider was told %d times, in the end %d sources, want two, two", n, len(known))
		}
		time.Sleep(5 * time.Second)
		n, known := p.last()
		if known != nil {
			t.Errorf("%d sources are let through after the flood, want all (nil)", len(known))
		}
		if got := l.Counters().FloodFilters; got != 1 {
			t.Errorf("%d filters are counted, want 1", got)
		}
		flood()
		time.Sleep(time.Microsecond)
		stop()
		wg.Wait()
		if again, known := p.last(); again <= n || known != nil {
			t.Errorf("at the end the provider was told %d times, in the end %v, want more than %d, nil", again, known, n)
		}
	})
}

// What hosts send that are not allowed is a flood too, but for what a filter lets through anyway.
func TestFloodFilterAndAllow(t *testing.T) {
	for _, tt := range []struct {
		name  string
		frame []byte
		want  bool
	}{
		{"IPv4", append([]byte{8, 0, 0, 0, 0x45}, make([]byte, 60)...), true},
		{"ARP", append([]byte{8, 6, 0, 0}, make([]byte, 60)...), false},
	} {
		l := &Loop{data: newDataLimits()}
		l.gid.Store(&ib.GID{1})
		l.SetAllow(ib.NewGIDSet([]netip.Prefix{netip.MustParsePrefix("fd00::/8")}))
		for i := range filterAfter {
			if l.passDatagram(ib.GID{0xfe, 0x80, 14: byte(i >> 8), 15: byte(i)}, 9, tt.frame) {
				t.Fatalf("%s: a datagram of a host that is not allowed passes", tt.name)
			}
		}
		if got := l.data.flood.flooded(nanotime()); got != tt.want {
			t.Errorf("%s: a flood: %v, want %v", tt.name, got, tt.want)
		}
	}
}
