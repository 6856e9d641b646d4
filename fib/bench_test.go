package fib_test

import (
	"net/netip"
	"runtime"
	"testing"
	"time"

	"ipoibcm/fib"
	"ipoibcm/nexthop"
	"ipoibcm/rtnl"
)

// BenchmarkDestinations is a new destination behind one gateway, and its answer,
// among 200,000 others; and a route event that concerns some 400 of those.
func BenchmarkDestinations(b *testing.B) {
	const n = 200_000
	link := rtnl.Link{Index: 7, Name: "ibcm0", MTU: 65520, Up: true, Running: true}
	gateway := netip.MustParseAddr("10.0.0.2")
	addr := func(i int) netip.Addr {
		i = i * 7919 % (1 << 24)
		return netip.AddrFrom4([4]byte{11, byte(i >> 16), byte(i >> 8), byte(i)})
	}
	now := time.Unix(1000, 0)
	var out []fib.Action
	learn := func(t *fib.Table, i int) {
		flow := rtnl.Flow{Dst: addr(i)}
		out = t.Step(out[:0], now, fib.Resolve{Flow: flow, Packet: make([]byte, 28)})
		out = t.Step(out[:0], now, answer(flow, gateway))
	}
	table := func() *fib.Table {
		t := fib.New(fib.Options{})
		t.Step(nil, now, fib.Host{Event: rtnl.Event{Kind: rtnl.Resync, Snapshot: &rtnl.Snapshot{Link: link}}})
		return t
	}
	b.Run("learn", func(b *testing.B) {
		var before, after runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&before)
		t := table()
		for i := range n {
			learn(t, i)
		}
		runtime.GC()
		runtime.ReadMemStats(&after)
		b.ResetTimer()
		b.ReportAllocs()
		for i := range b.N {
			learn(t, n+i)
		}
		b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/n, "octets/destination")
		runtime.KeepAlive(t)
	})
	b.Run("reroute", func(b *testing.B) {
		t := table()
		for i := range n {
			learn(t, i)
		}
		b.ResetTimer()
		for i := range b.N {
			p, _ := addr(i).Prefix(17)
			out = t.Step(out[:0], now, fib.Host{Event: rtnl.Event{Kind: rtnl.Rerouted, Prefix: p}})
		}
	})
}

func answer(flow rtnl.Flow, gateway netip.Addr) fib.Event {
	return fib.Answered{Lookup: fib.Lookup{Flow: flow}, NextHop: nexthop.Hop{Addr: gateway}}
}
