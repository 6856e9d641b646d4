package scale

import (
	"encoding/binary"
	"net/netip"
	"runtime"
	"testing"
	"time"

	"ipoibcm/fib/fibtest"
	"ipoibcm/internal/expect"
	"ipoibcm/internal/long"
	"ipoibcm/rtnl"
)

// What one of very many may take in the heap, in octets, all that the machine knows of
// it in every room together. Buffers of queue pairs are the provider's.
const (
	maxPerNeighbour = 1024
	maxPerDest      = 384
	maxPerConn      = 4096
)

// heap returns the octets in use after everything unused has been collected.
func heap() int64 {
	runtime.GC()
	runtime.GC()
	var s runtime.MemStats
	runtime.ReadMemStats(&s)
	return int64(s.HeapAlloc)
}

// held returns the octets that the machine of c alone keeps in use: what goes when
// it goes. c is of no use afterwards.
func held(c *crowd) int64 {
	c.out, c.pending = nil, nil
	with := heap()
	c.m = nil
	return with - heap()
}

// octetsOf returns what a machine with n neighbours holds. With flags of RC the peers take
// connections, and each has one.
func octetsOf(tb testing.TB, n int, connected bool) int64 {
	c := newCrowd(tb, crowdOptions(n))
	if !connected {
		c.flags = 0
	}
	c.meet(0, n)
	c.run(2 * time.Minute) // what leads to them is forgotten, because nothing is sent
	if got := c.m.Dests(); got != 0 {
		tb.Fatalf("%d destinations after two minutes without a packet, want 0", got)
	}
	s := c.m.Status()
	expect.MustEqual(tb, s.Neighbours, n, "Neighbours")
	expect.MustEqual(tb, s.Peers, n, "Peers")
	if connected && s.Conns != n {
		tb.Fatalf("Conns is %v, want %v", s.Conns, n)
	}
	return held(c)
}

// perNeighbour returns the octets that each of n neighbours takes.
func perNeighbour(tb testing.TB, n int) int64 {
	return (octetsOf(tb, n, false) - held(newCrowd(tb, crowdOptions(n)))) / int64(n)
}

// perDest returns the octets that each of n destinations behind one neighbour takes.
func perDest(tb testing.TB, n int) int64 {
	c := newCrowd(tb, crowdOptions(10))
	c.told(c.kernel.AddRoute(fibtest.Route{Route: rtnl.Route{Dst: netip.MustParsePrefix("64.0.0.0/2"),
		Type: rtnl.Unicast, Via: peerIP(1)}, OIF: fibtest.Index}))
	c.meet(0, 10)
	before := heap()
	for i := range n {
		var a [4]byte
		binary.BigEndian.PutUint32(a[:], 64<<24+uint32(i))
		c.step(c.packetTo(netip.AddrFrom4(a), 64))
	}
	c.out, c.pending = nil, nil
	if got := c.m.Dests(); got < n {
		tb.Fatalf("%d destinations, want %d", got, n)
	}
	octets := heap() - before
	runtime.KeepAlive(c)
	return octets / int64(n)
}

// perConn returns what each of n idle connections takes besides its neighbour.
func perConn(tb testing.TB, n int) int64 {
	return (octetsOf(tb, n, true) - octetsOf(tb, n, false)) / int64(n)
}

func TestOctets(t *testing.T) {
	if raceDetector {
		t.Skip("the race detector takes room of its own")
	}
	for _, n := range long.Of([]int{1000, 10_000}, []int{1000, 10_000, 100_000}) {
		got := perNeighbour(t, n)
		t.Logf("each of %d neighbours takes %d octets", n, got)
		if got > maxPerNeighbour {
			t.Errorf("each of %d neighbours takes %d octets, want at most %d", n, got, maxPerNeighbour)
		}
	}
	for _, n := range []int{1000, long.Of(50_000, 200_000)} {
		got := perDest(t, n)
		t.Logf("each of %d destinations takes %d octets", n, got)
		if got > maxPerDest {
			t.Errorf("each of %d destinations takes %d octets, want at most %d", n, got, maxPerDest)
		}
	}
	for _, n := range []int{1000, long.Of(3000, 10_000)} {
		if got := perConn(t, n); got > maxPerConn {
			t.Errorf("each of %d idle connections takes %d octets, want at most %d", n, got, maxPerConn)
		}
	}
}
