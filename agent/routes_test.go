package agent

import (
	"errors"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"ipoibcm/hostnet"
	"ipoibcm/ipoib"
	"ipoibcm/rtnl"
)

// A fakeKernel keeps routes as a kernel would, and tells the keeper of each
// change as hostnet does.
type fakeKernel struct {
	t       testing.TB
	keeper  *routeKeeper
	routes  map[rtnl.Key]rtnl.Route
	log     []string
	refuse  error
	flushes int
}

func (k *fakeKernel) SetRoute(r rtnl.Route) error {
	k.log = append(k.log, "set "+r.String())
	if k.refuse != nil {
		return k.refuse
	}
	k.routes[r.Key()] = r
	k.keeper.apply(rtnl.Event{Kind: rtnl.RouteSet, Route: r})
	return nil
}

func (k *fakeKernel) DelRoute(r rtnl.Route) error {
	k.log = append(k.log, "del "+r.String())
	if _, ok := k.routes[r.Key()]; !ok {
		return hostnet.ErrNotFound
	}
	delete(k.routes, r.Key())
	k.keeper.apply(rtnl.Event{Kind: rtnl.RouteGone, Route: r})
	return nil
}

func (k *fakeKernel) FlushExceptions() error {
	k.log = append(k.log, "flush")
	k.flushes++
	return nil
}

// edit is somebody else changing a route.
func (k *fakeKernel) edit(r rtnl.Route) {
	k.routes[r.Key()] = r
	k.keeper.apply(rtnl.Event{Kind: rtnl.RouteSet, Route: r})
	k.keeper.flush()
}

// route returns the route to dst of this type, and fails if there is not one.
func (k *fakeKernel) route(dst string, typ rtnl.RouteType) rtnl.Route {
	k.t.Helper()
	var found []rtnl.Route
	for _, r := range k.routes {
		if r.Dst == netip.MustParsePrefix(dst) && r.Type == typ {
			found = append(found, r)
		}
	}
	if len(found) != 1 {
		k.t.Fatalf("%d routes to %s, want one: %v", len(found), dst, slices.Collect(maps.Values(k.routes)))
	}
	return found[0]
}

func (k *fakeKernel) has(dst string) bool {
	for _, r := range k.routes {
		if r.Dst == netip.MustParsePrefix(dst) {
			return true
		}
	}
	return false
}

var (
	onLink4 = rtnl.Route{Dst: netip.MustParsePrefix("10.0.0.0/24"), Table: rtnl.TableMain, Type: rtnl.Unicast,
		Protocol: rtnl.ProtoKernel, Scope: rtnl.ScopeLink, Src: netip.MustParseAddr("10.0.0.1")}
	second4 = rtnl.Route{Dst: netip.MustParsePrefix("10.1.0.0/16"), Table: rtnl.TableMain, Type: rtnl.Unicast,
		Protocol: rtnl.ProtoKernel, Scope: rtnl.ScopeLink, Src: netip.MustParseAddr("10.1.0.1")}
	broadcast = rtnl.Route{Dst: netip.MustParsePrefix("10.0.0.255/32"), Table: rtnl.TableLocal, Type: rtnl.Broadcast,
		Protocol: rtnl.ProtoKernel, Scope: rtnl.ScopeLink}
	local4 = rtnl.Route{Dst: netip.MustParsePrefix("10.0.0.1/32"), Table: rtnl.TableLocal, Type: rtnl.Local,
		Protocol: rtnl.ProtoKernel, Scope: rtnl.ScopeHost}
	onLink6 = rtnl.Route{Dst: netip.MustParsePrefix("fd00::/64"), Table: rtnl.TableMain, Type: rtnl.Unicast,
		Protocol: rtnl.ProtoKernel, Metric: 256}
	multi6 = rtnl.Route{Dst: netip.MustParsePrefix("ff00::/8"), Table: rtnl.TableLocal, Type: rtnl.Multicast,
		Protocol: rtnl.ProtoKernel, Metric: 256}
	gateway = rtnl.Route{Dst: netip.MustParsePrefix("192.0.2.0/24"), Table: rtnl.TableMain, Type: rtnl.Unicast,
		Protocol: rtnl.ProtoBoot, Via: netip.MustParseAddr("10.0.0.2")}
)

func addr(s string) rtnl.Addr { return rtnl.Addr{Prefix: netip.MustParsePrefix(s)} }

// newKeeper returns a keeper of a device that is up and has these routes.
func newKeeper(t testing.TB, routes ...rtnl.Route) (*routeKeeper, *fakeKernel) {
	k := &fakeKernel{t: t, routes: map[rtnl.Key]rtnl.Route{}}
	r := newRouteKeeper(k, 2044, 0, slog.New(slog.DiscardHandler))
	k.keeper = r
	for _, rt := range routes {
		k.routes[rt.Key()] = rt
	}
	r.apply(rtnl.Event{Kind: rtnl.Resync, Snapshot: &rtnl.Snapshot{
		Link:   rtnl.Link{Index: 7, Name: "ibcm0", MTU: 65520, Up: true},
		Addrs:  []rtnl.Addr{addr("10.0.0.1/24"), addr("10.1.0.1/16"), addr("fd00::1/64")},
		Routes: routes,
	}})
	r.flush()
	return r, k
}

func TestKernelRoutesGetTheUDMTU(t *testing.T) {
	_, k := newKeeper(t, onLink4, broadcast, local4, onLink6, multi6, gateway)
	for _, tt := range []struct {
		dst         string
		typ         rtnl.RouteType
		mtu, advmss int
		protocol    uint8
	}{
		{"10.0.0.0/24", rtnl.Unicast, 2044, 65480, rtnl.ProtoKernel},
		{"fd00::/64", rtnl.Unicast, 2044, 65460, rtnl.ProtoKernel},
		{"10.0.0.255/32", rtnl.Broadcast, 2044, 0, rtnl.ProtoKernel},
		{"ff00::/8", rtnl.Multicast, 2044, 0, rtnl.ProtoKernel},
		{"224.0.0.0/4", rtnl.Multicast, 2044, 0, rtnl.Protocol},
		{"10.0.0.1/32", rtnl.Local, 0, 0, rtnl.ProtoKernel},
		{"192.0.2.0/24", rtnl.Unicast, 0, 0, rtnl.ProtoBoot}, // a user's: not edited
	} {
		r := k.route(tt.dst, tt.typ)
		if r.MTU != tt.mtu || r.AdvMSS != tt.advmss || r.Protocol != tt.protocol {
			t.Errorf("%s: got %v, want mtu %d advmss %d proto %d", tt.dst, r, tt.mtu, tt.advmss, tt.protocol)
		}
	}
	if src := k.route("10.0.0.0/24", rtnl.Unicast).Src; src != onLink4.Src {
		t.Errorf("the connected route's source became %v", src)
	}
}

func TestForeignEditIsRepaired(t *testing.T) {
	r, k := newKeeper(t, onLink4)
	k.log = nil
	k.edit(onLink4) // ip route replace without metrics
	if got := k.route("10.0.0.0/24", rtnl.Unicast); got.MTU != 2044 || got.AdvMSS != 65480 {
		t.Errorf("after an edit: %v", got)
	}
	if len(k.log) != 1 {
		t.Errorf("one edit, these changes: %q", k.log)
	}
	k.log = nil
	r.dirty = true
	if r.flush(); len(k.log) != 0 {
		t.Errorf("nothing changed, and yet: %q", k.log)
	}
}

func TestHostRoute(t *testing.T) {
	r, k := newKeeper(t, onLink4, second4, onLink6)
	for a, m := range map[string]int{"10.0.0.2": 65520, "10.1.0.2": 8996, "fd00::2": 65520} {
		r.setHost(netip.MustParseAddr(a), m)
	}
	r.flush()
	for _, tt := range []struct {
		dst, src string
		mtu      int
	}{
		{"10.0.0.2/32", "10.0.0.1", 65520}, // each the source of the subnet it is cut from
		{"10.1.0.2/32", "10.1.0.1", 8996},
		{"fd00::2/128", "", 65520}, // the kernel chooses well for IPv6
	} {
		got := k.route(tt.dst, rtnl.Unicast)
		src := ""
		if got.Src.IsValid() {
			src = got.Src.String()
		}
		if got.MTU != tt.mtu || src != tt.src || got.Protocol != rtnl.Protocol {
			t.Errorf("%s: got %v src %q, want mtu %d src %q", tt.dst, got, src, tt.mtu, tt.src)
		}
		if !r.shown(got.Dst.Addr()) {
			t.Errorf("%s: not shown", tt.dst)
		}
	}

	r.setHost(netip.MustParseAddr("10.0.0.2"), 2044) // lowered at once
	r.flush()
	if got := k.route("10.0.0.2/32", rtnl.Unicast).MTU; got != 2044 {
		t.Errorf("lowered to 2044, route has %d", got)
	}
	r.delHost(netip.MustParseAddr("10.0.0.2"))
	r.flush()
	if k.has("10.0.0.2/32") || r.shown(netip.MustParseAddr("10.0.0.2")) {
		t.Error("the connection is gone, its host route is not")
	}
	if !k.has("10.1.0.2/32") {
		t.Error("another neighbour's route went too")
	}
}

func TestHostRouteRemovedByOthersComesBack(t *testing.T) {
	r, k := newKeeper(t, onLink4)
	r.setHost(netip.MustParseAddr("10.0.0.2"), 65520)
	r.flush()
	gone := k.route("10.0.0.2/32", rtnl.Unicast)
	delete(k.routes, gone.Key())
	r.apply(rtnl.Event{Kind: rtnl.RouteGone, Route: gone})
	r.flush()
	if got := k.route("10.0.0.2/32", rtnl.Unicast); got.MTU != 65520 {
		t.Errorf("came back as %v", got)
	}
}

func TestDeviceMTULimitsHostRoutes(t *testing.T) {
	r, k := newKeeper(t, onLink4)
	r.setHost(netip.MustParseAddr("10.0.0.2"), 65520)
	r.flush()
	for _, mtu := range []int{9000, 65520} {
		r.apply(rtnl.Event{Kind: rtnl.LinkChange, Link: rtnl.Link{Index: 7, MTU: mtu, Up: true}})
		r.flush()
		if got := k.route("10.0.0.2/32", rtnl.Unicast).MTU; got != mtu {
			t.Errorf("device MTU %d: host route has %d", mtu, got)
		}
		if got := k.route("10.0.0.0/24", rtnl.Unicast); got.AdvMSS != mtu-40 {
			t.Errorf("device MTU %d: connected route %v", mtu, got)
		}
	}
}

func TestLeftoversAreRemoved(t *testing.T) {
	left := rtnl.Route{Dst: netip.MustParsePrefix("10.0.0.9/32"), Table: rtnl.TableMain, Type: rtnl.Unicast,
		Protocol: rtnl.Protocol, Scope: rtnl.ScopeLink, MTU: 65520}
	_, k := newKeeper(t, onLink4, left, gateway)
	if k.has("10.0.0.9/32") {
		t.Error("a host route of a run before stayed")
	}
	if !k.has("192.0.2.0/24") {
		t.Error("a user's route was removed")
	}
}

func TestDownAndUp(t *testing.T) {
	r, k := newKeeper(t, onLink4)
	r.setHost(netip.MustParseAddr("10.0.0.2"), 65520)
	r.flush()

	// The kernel drops the routes of a device that goes down, and says so.
	r.apply(rtnl.Event{Kind: rtnl.LinkChange, Link: rtnl.Link{Index: 7, MTU: 65520}})
	for key, rt := range k.routes {
		delete(k.routes, key)
		r.apply(rtnl.Event{Kind: rtnl.RouteGone, Route: rt})
	}
	k.log = nil
	r.flush()
	if len(k.log) != 0 {
		t.Errorf("down: %q", k.log)
	}
	if r.view().up {
		t.Error("down: the machine would see it up")
	}

	r.apply(rtnl.Event{Kind: rtnl.LinkChange, Link: rtnl.Link{Index: 7, MTU: 65520, Up: true}})
	k.edit(onLink4)
	if got := k.route("10.0.0.0/24", rtnl.Unicast); got.MTU != 2044 || got.AdvMSS != 65480 {
		t.Errorf("up again: %v", got)
	}
	if !k.has("10.0.0.2/32") || !k.has("224.0.0.0/4") {
		t.Errorf("up again, ours are not all back: %v", k.routes)
	}
}

func TestDeviceGone(t *testing.T) {
	r, k := newKeeper(t, onLink4)
	k.log = nil
	r.apply(rtnl.Event{Kind: rtnl.LinkChange, Link: rtnl.Link{Index: 7, MTU: 65520, Up: true, Gone: true}})
	r.flush()
	if len(k.log) != 0 || r.view().up {
		t.Errorf("device gone: %q, up %v", k.log, r.view().up)
	}
}

func TestRefusalIsCountedAndSaidOnce(t *testing.T) {
	var log strings.Builder
	r, k := newKeeper(t, onLink4)
	r.log = slog.New(slog.NewTextHandler(&log, nil))
	k.refuse = errors.New("no buffer space available")
	r.setHost(netip.MustParseAddr("10.0.0.2"), 65520)
	for range 3 {
		r.dirty = true
		r.flush()
	}
	if r.refused != 3 || strings.Count(log.String(), "cannot set route") != 1 {
		t.Errorf("refused %d times, log:\n%s", r.refused, &log)
	}
	if r.shown(netip.MustParseAddr("10.0.0.2")) {
		t.Error("a refused route is shown")
	}
	k.refuse = nil
	r.dirty = true
	if r.flush(); !r.shown(netip.MustParseAddr("10.0.0.2")) {
		t.Error("not tried again")
	}
}

func TestExceptionsAreFlushedAfterTheRoutes(t *testing.T) {
	r, k := newKeeper(t, onLink4)
	k.log = nil
	r.flushExceptions()
	r.setHost(netip.MustParseAddr("10.0.0.2"), 65520)
	r.flush()
	if len(k.log) != 2 || k.log[1] != "flush" {
		t.Errorf("order: %q", k.log)
	}
	if r.flush(); k.flushes != 1 {
		t.Errorf("flushed %d times for one request", k.flushes)
	}
}

func TestView(t *testing.T) {
	r, _ := newKeeper(t, onLink4, broadcast, local4, onLink6, multi6, gateway)
	r.setHost(netip.MustParseAddr("10.0.0.2"), 65520)
	r.flush()
	v := r.view()
	want := []ipoib.Route{
		{Prefix: onLink4.Dst},
		{Prefix: gateway.Dst, Gateway: gateway.Via},
		{Prefix: onLink6.Dst},
	}
	if !slices.Equal(v.routes, want) {
		t.Errorf("routes %v, want %v: neither local nor our own", v.routes, want)
	}
	if !v.up || v.mtu != 65520 || len(v.addrs) != 3 {
		t.Errorf("view %+v", v)
	}
	r.apply(rtnl.Event{Kind: rtnl.AddrGone, Addr: addr("10.1.0.1/16")})
	if v := r.view(); v.addrs[netip.MustParsePrefix("10.1.0.1/16")] || len(v.addrs) != 2 {
		t.Errorf("addresses %v", v.addrs)
	}
}

// Whatever happens to single hosts in whatever order, what is done about those
// alone leaves nothing for a look at everything.
func TestSingleHostsAreEnough(t *testing.T) {
	peer := rtnl.Route{Dst: netip.MustParsePrefix("10.0.0.9/32"), Table: rtnl.TableMain, Type: rtnl.Unicast,
		Protocol: rtnl.ProtoKernel, Scope: rtnl.ScopeLink, Src: netip.MustParseAddr("10.0.0.1")}
	r, k := newKeeper(t, onLink4, onLink6, peer)
	rnd := rand.New(rand.NewPCG(1, 2))
	for step := range 500 {
		r.dirty = false // the fake's echo comes before the keeper's note
		for range 1 + rnd.IntN(3) {
			a := netip.AddrFrom4([4]byte{10, byte(rnd.IntN(2)), 0, byte(2 + rnd.IntN(8))}) // half of them are not connected
			if rnd.IntN(3) == 0 {
				a = netip.MustParseAddr("fd00::2")
			}
			if rnd.IntN(3) == 0 {
				r.delHost(a)
			} else {
				r.setHost(a, 2044+rnd.IntN(2)*6000)
			}
		}
		if rnd.IntN(20) == 0 { // somebody removes a route of ours
			for key, rt := range k.routes {
				if rt.Protocol == rtnl.Protocol {
					delete(k.routes, key)
					r.apply(rtnl.Event{Kind: rtnl.RouteGone, Route: rt})
					break
				}
			}
		}
		r.flush()
		k.log, r.dirty = nil, true
		if r.flush(); len(k.log) != 0 {
			t.Fatalf("step %d: all looked at, this was left to do: %q", step, k.log)
		}
	}
	if len(k.routes) < 5 {
		t.Errorf("only %v at the end", k.routes)
	}
}

// What one connection more costs does not depend on how many there are, and the
// kernel's echo of our own change costs no look at anything.
func TestHostRouteAmongThousands(t *testing.T) {
	cost := func(others int) float64 {
		r, k := newKeeper(t, second4)
		for i := range others {
			r.setHost(netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}), 9000)
		}
		r.flush()
		r.dirty = true
		r.flush()
		one, mtu := netip.MustParseAddr("10.1.200.1"), 9000
		return testing.AllocsPerRun(50, func() {
			mtu ^= 1
			r.setHost(one, mtu)
			r.flush()
			rt := k.route("10.1.200.1/32", rtnl.Unicast)
			r.dirty = false // of the echo within SetRoute
			r.apply(rtnl.Event{Kind: rtnl.RouteSet, Route: rt})
			if r.dirty {
				t.Fatal("an echo of our own change is taken for somebody else's")
			}
			k.log = k.log[:0]
		})
	}
	few, many := cost(10), cost(5000)
	if many > few+10 {
		t.Errorf("%v allocations among 10 hosts, %v among 5000", few, many)
	}
}
