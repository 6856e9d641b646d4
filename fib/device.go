package fib

import (
	"maps"
	"net/netip"
	"slices"

	"ipoibcm/rtnl"
)

// A device is what the kernel has of the interface.
type device struct {
	seen  bool // a first Resync came
	link  rtnl.Link
	addrs map[netip.Prefix]rtnl.Addr
	// The kernel's own routes, and ours. Those of others are not here.
	kernel map[rtnl.Key]rtnl.Route
	own    map[rtnl.Key]rtnl.Route
}

func newDevice() device {
	return device{addrs: map[netip.Prefix]rtnl.Addr{}, kernel: map[rtnl.Key]rtnl.Route{}, own: map[rtnl.Key]rtnl.Route{}}
}

func (d *device) up() bool { return d.link.Up && !d.link.Gone }

// Link returns the device as the kernel last told of it; its index is zero before.
func (t *Table) Link() rtnl.Link { return t.device.link }

// host takes one change of the kernel's in.
func (t *Table) host(ev rtnl.Event) {
	d := &t.device
	switch ev.Kind {
	case rtnl.Resync:
		t.resync(ev.Snapshot)
		d.seen = true
	case rtnl.AddrSet:
		old, known := d.addrs[ev.Addr.Prefix]
		d.addrs[ev.Addr.Prefix] = ev.Addr
		if !known {
			t.do(AddrAdded{Prefix: ev.Addr.Prefix})
		}
		t.routes.dirty = t.routes.dirty || old != ev.Addr
	case rtnl.AddrGone:
		if _, known := d.addrs[ev.Addr.Prefix]; known {
			delete(d.addrs, ev.Addr.Prefix)
			t.do(AddrRemoved{Prefix: ev.Addr.Prefix})
			t.routes.dirty = true
		}
	case rtnl.LinkChange:
		t.setLink(ev.Link)
	case rtnl.RouteSet:
		t.routeSet(ev.Route)
	case rtnl.RouteGone:
		t.routeGone(ev.Route)
	case rtnl.Rerouted:
		t.reroute(ev.Prefix)
		t.doubtHosts(ev.Prefix, ev.Unnamed)
	case rtnl.Rules:
		t.setFields(ev.Fields)
		t.reroute(netip.Prefix{})
		t.doubtHosts(netip.Prefix{}, true)
	}
}

// resync replaces all that is known of the device, and tells of the differences:
// what went before what came, as single changes would.
func (t *Table) resync(s *rtnl.Snapshot) {
	d := &t.device
	addrs := make(map[netip.Prefix]rtnl.Addr, len(s.Addrs))
	for _, a := range s.Addrs {
		addrs[a.Prefix] = a
	}
	for _, p := range sorted(d.addrs) {
		if _, still := addrs[p]; !still {
			t.do(AddrRemoved{Prefix: p})
		}
	}
	old := d.addrs
	d.addrs = addrs
	if !s.Link.Up {
		t.setLink(s.Link)
	}
	for _, p := range sorted(addrs) {
		if _, known := old[p]; !known {
			t.do(AddrAdded{Prefix: p})
		}
	}
	t.setLink(s.Link)
	routes := make(map[rtnl.Key]rtnl.Route, len(s.Routes))
	for _, r := range s.Routes {
		routes[r.Key()] = r
		t.routeSet(r)
	}
	for _, known := range []map[rtnl.Key]rtnl.Route{d.kernel, d.own} {
		for _, r := range sortedRoutes(known) {
			if _, still := routes[r.Key()]; !still {
				t.routeGone(r)
			}
		}
	}
	t.reroute(netip.Prefix{})
	t.routes.dirty = true
}

// setLink takes the state of the device.
func (t *Table) setLink(l rtnl.Link) {
	old := t.device.link
	wasUp := t.device.up()
	t.device.link = l
	up := t.device.up()
	if l.MTU != old.MTU && l.MTU != 0 {
		t.do(DeviceMTU{MTU: l.MTU})
		for _, a := range slices.SortedFunc(maps.Keys(t.hops), netip.Addr.Compare) {
			if h := t.hops[a]; !h.known { // the paths of the others come with SetHop
				t.setPath(a, h, t.miss())
			}
		}
	}
	switch {
	case wasUp && !up:
		t.n.DropDown += uint64(len(t.resetDests(t.dests.fields)))
		t.restartHosts()
		t.do(LinkDown{})
	case !wasUp && up:
		t.restartHosts()
		t.do(LinkUp{})
	}
	if l.Gone && t.routes.rule != (rtnl.Rule{}) {
		// The routes went with the device, or stayed behind in the namespace that it has
		// left. A rule only names it.
		t.do(SetRule{Rule: t.routes.rule})
		t.routes.rule = rtnl.Rule{}
	}
	if l.Index != old.Index || l.Name != old.Name || l.Master != old.Master || l.VRFTable != old.VRFTable {
		t.reroute(netip.Prefix{})
		t.doubtHosts(netip.Prefix{}, true)
	}
	t.routes.dirty = true
}

// routeSet takes a route that is new or has changed.
func (t *Table) routeSet(r rtnl.Route) {
	d := &t.device
	key := r.Key()
	old, known := d.kernel[key]
	if r.Protocol == rtnl.Protocol && !known && t.wantedHost(r) {
		d.own[key] = r // of the many, one more that is as it should be
		t.foundHost(r)
		return
	}
	delete(d.kernel, key) // it may have belonged to somebody else
	delete(d.own, key)
	t.routes.dirty = true
	if r.Protocol == rtnl.Protocol {
		d.own[key] = r
		t.foundHost(r)
		return
	}
	d.kernel[key] = r
	if r.Dst == multicast6 && r.Type == rtnl.Multicast && !known && d.seen {
		t.do(IPv6Up{}) // the route comes and goes with IPv6 on the device
	}
	if isConnected(r) && (!known || old.Src != r.Src) { // not merely its metrics
		t.doubtHosts(r.Dst, true)
	}
}

// routeGone takes the end of a route.
func (t *Table) routeGone(r rtnl.Route) {
	d := &t.device
	key := r.Key()
	if _, ours := d.own[key]; ours || r.Protocol == rtnl.Protocol {
		delete(d.own, key)
		t.routes.dirty = t.routes.dirty || !t.wantedHost(r)
		t.lostHost(r)
		return
	}
	t.routes.dirty = true
	delete(d.kernel, key)
	if isConnected(r) {
		t.doubtHosts(r.Dst, true)
	}
}

// wantedHost reports whether r, which is ours, is a host route that is looked after.
func (t *Table) wantedHost(r rtnl.Route) bool {
	return r.Dst.IsSingleIP() && t.hosts.byAddr[r.Dst.Addr()] != nil
}

func sorted(addrs map[netip.Prefix]rtnl.Addr) []netip.Prefix {
	out := make([]netip.Prefix, 0, len(addrs))
	for p := range addrs { // sorted below
		out = append(out, p)
	}
	slices.SortFunc(out, netip.Prefix.Compare)
	return out
}
