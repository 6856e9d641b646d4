package fib_test

import (
	"fmt"
	"net/netip"
	"testing"

	"ipoibcm/fib"
	"ipoibcm/rtnl"
)

// What the kernel says of one host route of ours costs no more among many: it says so
// for each connection that comes and goes.
func TestOneHostRouteAmongMany(t *testing.T) {
	for _, kind := range []rtnl.EventKind{rtnl.RouteSet, rtnl.RouteGone} {
		cost := map[int]float64{}
		for _, n := range []int{10, 2000} {
			b := newBench()
			b.feed(b.k.Up(true))
			b.feed(b.k.AddAddr(netip.MustParsePrefix("10.0.0.1/16")))
			for i := range n {
				if _, err := b.Do(fmt.Sprintf("hop 10.0.%d.%d conn %d 65520", 1+i>>8, i&255, 1+i)); err != nil {
					t.Fatal(err)
				}
			}
			var own rtnl.Route
			for _, r := range b.k.Own {
				if r.Dst == netip.MustParsePrefix("10.0.1.5/32") {
					own = r
				}
			}
			if own.MTU == 0 {
				t.Fatalf("no host route to 10.0.1.5 among %d", n)
			}
			var out []fib.Action
			cost[n] = testing.AllocsPerRun(20, func() {
				out = b.t.Step(out[:0], b.now, fib.Host{Event: rtnl.Event{Kind: kind, Route: own}})
			})
		}
		if cost[2000] > cost[10] {
			t.Errorf("%v: %v allocations among 2000 host routes, %v among 10", kind, cost[2000], cost[10])
		}
	}
}
