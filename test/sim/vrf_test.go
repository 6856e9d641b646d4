package sim

import (
	"net/netip"
	"testing"
	"time"

	"ipoibcm/fib/fibtest"
	"ipoibcm/ib"
	"ipoibcm/ipoib"
	"ipoibcm/rtnl"
)

// The VRF of the tests: its device, its table, and another device in it.
const vrfMaster, vrfTable, vrfMember = 9, 10, 4

// enslave puts the device into a VRF, whose routes have the gateways of before.
func (k *kernel) enslave(master, table int) {
	k.tables.Members = []int{vrfMember}
	k.tell(k.tables.VRF(master, table))
	for i := range k.gateways {
		old := k.gateways[i]
		k.gateways[i].Table = table
		k.tell(k.tables.DelRoute(old))
		k.tell(k.tables.AddRoute(k.gateways[i]))
	}
}

// wantHostRoute wants a host route of ours to dst, in that table only.
func (h *host) wantHostRoute(dst netip.Addr, table int) {
	n := 0
	for key := range h.tables.Own {
		if key.Dst == netip.PrefixFrom(dst, dst.BitLen()) {
			h.w.want(key.Table == table, "%s: the host route to %v is in table %d, want %d", h.name(), dst, key.Table, table)
			n++
		}
	}
	h.w.want(n == 1, "%s: %d host routes to %v, want 1", h.name(), n, dst)
}

// TestVRF: a device that joins a VRF, or leaves it, goes on with the routes of that
// place. Those of others say otherwise about the same destinations and do not count;
// a route by another device of the VRF does.
func TestVRF(t *testing.T) {
	seeds(t, 20, func(w *world) {
		a, b, c := w.host(config{mode: ipoib.ModeRC}), w.host(config{mode: ipoib.ModeRC}), w.host(config{mode: ipoib.ModeRC})
		behind := netip.MustParseAddr("192.0.2.1")
		c.local = append(c.local, behind)
		c.tables.Others = c.local
		a.via(netip.MustParsePrefix("192.0.2.0/24"), c.addr4())
		foreign := func(dst string, oif, table int) fibtest.Route {
			return fibtest.Route{Route: rtnl.Route{Dst: netip.MustParsePrefix(dst), Type: rtnl.Unicast,
				Protocol: rtnl.ProtoBoot, Table: table}, OIF: oif}
		}
		meet := func(table int) {
			for _, dst := range []netip.Addr{b.addr4(), b.addr6(), behind} {
				a.send(dst, 100, true)
			}
			w.run(time.Second)
			w.arrives(a, b.addr4(), 60000, ib.RC, 100*time.Millisecond)
			w.arrives(a, b.addr6(), 60000, ib.RC, 100*time.Millisecond)
			w.arrives(a, behind, 60000, ib.RC, 100*time.Millisecond)
			w.arrives(b, a.addr4(), 60000, ib.RC, 100*time.Millisecond)
			a.wantHostRoute(b.addr4(), table)
			a.wantHostRoute(b.addr6(), table)
		}
		meet(rtnl.TableMain)
		a.enslave(vrfMaster, vrfTable)
		// Table main sends all of it by another device now.
		for _, dst := range []string{"10.0.0.0/25", "192.0.2.0/25", "2001:db8::/96"} {
			a.kernel.tell(a.tables.AddRoute(foreign(dst, 3, rtnl.TableMain)))
		}
		meet(vrfTable)
		// Another device of the VRF has the better route to b: no host route of ours then.
		better := foreign("10.0.0.0/29", vrfMember, vrfTable)
		a.kernel.tell(a.tables.AddRoute(better))
		w.run(time.Second)
		w.want(a.hostRoutes()[b.addr4()] == 0,
			"a host route of ours to %v, which another device of the VRF leads to", b.addr4())
		a.kernel.tell(a.tables.DelRoute(better))
		meet(vrfTable)
		a.tables.Routes = nil
		a.enslave(0, 0)
		meet(rtnl.TableMain)
	})
}
