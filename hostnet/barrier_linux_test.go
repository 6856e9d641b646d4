package hostnet

import (
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"ipoibcm/rtnl"
)

// Who asks because he was told that a route has gone is not answered with that route:
// the kernel tells of an IPv4 route before it removes it.
func TestToldAfterTheFact(t *testing.T) {
	d := watched(t)
	other, err := netlink.LinkByName("v1")
	if err != nil {
		t.Fatal(err)
	}
	dst := netip.MustParsePrefix("10.9.0.0/28")
	peer := rtnl.Query{Flow: rtnl.Flow{Dst: netip.MustParseAddr("10.9.0.2")}}
	told := func(what string) {
		t.Helper()
		for end := time.After(3 * time.Second); ; {
			select {
			case ev := <-d.Events():
				if ev.Kind == rtnl.Rerouted && ev.Prefix == dst {
					return
				}
			case <-end:
				t.Fatalf("%s: nothing was told", what)
			}
		}
	}
	h, err := netlink.NewHandle()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	for i := range 300 {
		before := d.Counters().Waits
		r := &netlink.Route{LinkIndex: other.Attrs().Index, Dst: ipnet(dst.String()), Scope: netlink.SCOPE_LINK}
		if err := h.RouteAdd(r); err != nil {
			t.Fatal(err)
		}
		told("added")
		if a, err := d.Lookup(peer); err != nil || a.OIF != other.Attrs().Index {
			t.Fatalf("round %d: before it is removed the route leads to %+v, %v", i, a, err)
		}
		done := make(chan error, 1)
		go func() { done <- h.RouteDel(r) }()
		told("removed")
		a, err := d.Lookup(peer)
		if err != nil {
			t.Fatal(err)
		}
		if a.OIF == other.Attrs().Index {
			t.Fatalf("round %d: told that the route has gone, and answered with it", i)
		}
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		// The moment in between is too short to be met here, so that this is looked at.
		if d.Counters().Waits == before {
			t.Fatalf("round %d: told before the kernel can have finished", i)
		}
	}
}
