package fib

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"

	"ipoibcm/mtu"
	"ipoibcm/rtnl"
)

var multicast4, multicast6 = netip.MustParsePrefix("224.0.0.0/4"), netip.MustParsePrefix("ff00::/8")

const (
	// groupTables plus the index of the device is the table of its multicast route. No other interface has it.
	groupTables = 75 << 16
	// groupPriority is the priority of the rule for that table: before the rule for table main.
	groupPriority = 32765
)

// routes is the state of the device in the kernel: its link, addresses and routes.
type routes struct {
	noIPv6 bool // IPv6 is off on the device
	link   rtnl.Link
	addrs  map[netip.Prefix]bool
	own    map[rtnl.Key]ownRoute
	rule   rtnl.Rule // the rule that is there; zero if none
	dirty  bool      // reconcile must look at own and rule
}

// An ownRoute is a route that the kernel made, or our multicast route, as the kernel or we last had it.
type ownRoute struct {
	rtnl.Route
	failed string // what the kernel refused; people are told once
}

func (s *routes) up() bool { return s.link.Up && !s.link.Gone }

// step handles one change in the kernel.
func (ev Host) step(t *Table) {
	switch ev.Kind {
	case rtnl.Resync:
		t.resync(ev.Snapshot)
	case rtnl.AddrSet, rtnl.AddrGone:
		t.setAddr(ev.Event)
	case rtnl.LinkChange:
		t.setLink(ev.Link)
	case rtnl.RouteSet, rtnl.RouteGone:
		t.setRoute(ev.Route, ev.Kind == rtnl.RouteGone)
	case rtnl.Rerouted:
		t.reroute(ev.Prefix)
		t.doubt(ev.Prefix, ev.Unnamed)
	case rtnl.Rules:
		t.setFields(ev.Fields)
		if r := t.routes.rule; r.To.IsValid() {
			t.do(SetRule{New: r}) // whoever changed rules may have removed ours (ip rule flush)
		}
		t.reroute(netip.Prefix{})
		t.doubt(netip.Prefix{}, true)
	}
}

// resync replaces all that is known of the device. It applies the differences as single changes: first what is gone,
// then what is new.
func (t *Table) resync(s *rtnl.Snapshot) {
	for _, p := range slices.SortedFunc(maps.Keys(t.routes.addrs), netip.Prefix.Compare) {
		if !slices.ContainsFunc(s.Addrs, func(a rtnl.Addr) bool { return a.Prefix == p }) {
			t.setAddr(rtnl.Event{Kind: rtnl.AddrGone, Addr: rtnl.Addr{Prefix: p}})
		}
	}
	if !s.Link.Up {
		t.setLink(s.Link)
	}
	for _, a := range s.Addrs {
		t.setAddr(rtnl.Event{Kind: rtnl.AddrSet, Addr: a})
	}
	t.setLink(s.Link)
	clear(t.routes.own)
	for _, r := range s.Routes {
		t.setRoute(r, false)
	}
	t.reroute(netip.Prefix{})
	t.routes.noIPv6 = !slices.ContainsFunc(s.Routes, isMulticast6)
}

func (t *Table) setAddr(ev rtnl.Event) {
	p, gone := ev.Addr.Prefix, ev.Kind == rtnl.AddrGone
	if t.routes.addrs[p] != gone {
		return
	}
	if t.routes.addrs[p] = true; gone {
		delete(t.routes.addrs, p)
	}
	t.do(Device{ev})
	t.routes.dirty = true
}

// setLink takes the new state of the device.
func (t *Table) setLink(l rtnl.Link) {
	old, wasUp := t.routes.link, t.routes.up()
	t.routes.link, t.routes.dirty = l, true
	up := t.routes.up()
	if l.MTU != old.MTU {
		for _, h := range slices.Collect(t.hosts.in(netip.Prefix{})) { // place may delete some
			t.place(h)
		}
	}
	if wasUp && !up { // which drops our routes
		t.n.DropDown += uint64(len(t.resetDests(t.dests.fields)))
		maps.DeleteFunc(t.routes.own, func(_ rtnl.Key, r ownRoute) bool { return r.Protocol == rtnl.Protocol })
	}
	if wasUp != up || l.MTU != old.MTU {
		t.do(Device{rtnl.Event{Kind: rtnl.LinkChange, Link: l}})
	}
	if l.Gone {
		// The routes went with the device, or stayed behind in the namespace that it has left. A rule only names it.
		t.setRule(rtnl.Rule{})
	}
	moved := l.Index != old.Index || l.Name != old.Name || l.VRF() != old.VRF() || l.VRFTable != old.VRFTable
	if moved {
		t.reroute(netip.Prefix{})
	}
	if moved || wasUp != up {
		t.doubt(netip.Prefix{}, true)
	}
}

// setRoute handles the kernel's report that a route is new, has changed or is gone.
func (t *Table) setRoute(r rtnl.Route, gone bool) {
	key := r.Key()
	if r.Protocol == rtnl.Protocol && key != t.groupRoute().Key() {
		t.setHostRoute(r, gone)
		return
	}
	old, known := t.routes.own[key]
	if t.routes.own[key] = (ownRoute{r, old.failed}); gone {
		delete(t.routes.own, key)
	}
	t.routes.dirty = true
	if isMulticast6(r) { // it comes and goes with IPv6 on the device
		if t.routes.noIPv6 && !gone {
			t.do(IPv6Up{})
		}
		t.routes.noIPv6 = gone
	} else if isConnected(r) && (gone || !known || old.Src != r.Src) { // not merely its metrics
		t.doubt(r.Dst, true)
	}
}

func isMulticast6(r rtnl.Route) bool { return r.Dst == multicast6 && r.Type == rtnl.Multicast }

// reconcile asks for the changes that make the routes in own and the rule as they should be. It does nothing while
// the device is down: the kernel has dropped its routes then, and adds none.
func (t *Table) reconcile() {
	s := &t.routes
	if !s.dirty || !s.up() {
		return
	}
	s.dirty = false
	group, rule := t.groupRoute(), rtnl.Rule{}
	for p := range s.addrs {
		if p.Addr().Is4() {
			rule = rtnl.Rule{Priority: groupPriority, To: multicast4, OIF: s.link.Name, Table: group.Table}
		}
	}
	switch _, there := s.own[group.Key()]; {
	case rule.To.IsValid() && !there:
		s.own[group.Key()] = ownRoute{Route: group}
	case !rule.To.IsValid() && there:
		delete(s.own, group.Key())
		t.do(SetRoute{Old: group})
	}
	for _, key := range slices.SortedFunc(maps.Keys(s.own), rtnl.Key.Compare) {
		have := s.own[key]
		if want := t.metrics(have.Route); want != have.Route {
			s.own[key] = ownRoute{want, have.failed}
			t.do(SetRoute{New: want})
		}
	}
	t.setRule(rule)
}

// groupRoute returns the route that gives IPv4 multicast the MTU of UD. It has a table of its own. Our rule sends
// only packets whose sender names the device to that table, so it does not change the path of other multicast.
func (t *Table) groupRoute() rtnl.Route {
	return rtnl.Route{Dst: multicast4, Table: groupTables + t.routes.link.Index, Type: rtnl.Multicast,
		Protocol: rtnl.Protocol, Scope: rtnl.ScopeLink}
}

func (t *Table) setRule(r rtnl.Rule) {
	if old := t.routes.rule; old != r {
		t.routes.rule = r
		t.do(SetRule{Old: old, New: r})
	}
}

// metrics returns r, a route of the kernel's or our multicast route, with the metrics that it should have.
func (t *Table) metrics(r rtnl.Route) rtnl.Route {
	ud := t.effective(t.opt.UDMTU)
	switch {
	case isConnected(r):
		// The MTU of UD, but the MSS of connections: TCP fixes it in the SYN, which leaves before one is up.
		r.MTU, r.AdvMSS = ud, mtu.AdvMSS(t.largestTCP(), r.Dst.Addr().Is6())
		if h := t.hosts.get(rtnl.Flow{Dst: r.Dst.Addr()}); r.Dst.IsSingleIP() && h != nil && h.want != 0 {
			r.MTU = t.effective(h.want) // of a peer address (ip address add A peer B)
		}
	case r.Type == rtnl.Broadcast, r.Type == rtnl.Multicast:
		r.MTU, r.AdvMSS = ud, 0
	}
	return r
}

func isConnected(r rtnl.Route) bool {
	return r.Protocol == rtnl.ProtoKernel && r.Type == rtnl.Unicast && r.Table != rtnl.TableLocal && !r.Via.IsValid()
}

// effective returns MTU n, but no more than the MTU of the device, if that is known.
func (t *Table) effective(n int) int { return mtu.Effective(cmp.Or(t.routes.link.MTU, n), n) }

// largestTCP returns the length of the longest IP packet that peers' TCP should send us.
func (t *Table) largestTCP() int {
	return min(t.effective(mtu.DefaultDevice), mtu.IPMTU(uint32(t.opt.BestMessage)))
}

// step handles the outcome of a change. A change of a route that failed is tried again when the kernel reports
// another change. A failed SetRule or FlushExceptions is not tried again.
func (ev Done) step(t *Table) {
	s, ok := ev.Action.(SetRoute)
	why := ev.Why
	if ev.Err != nil && (t.routes.up() || !ok) { // down, the kernel has dropped the route
		t.n.RoutesRefused++
		why = ev.Err.Error()
	}
	if ev.Removed {
		t.n.RoutesRemoved++
		if !ev.Route.Dst.IsValid() {
			t.reroute(s.Old.Dst) // the kernel answered with that route while it was there
		}
	}
	if ev.Route.Dst.IsValid() {
		t.n.RoutesSet++
	}
	if s.Host.IsValid() {
		t.hostDone(ev, s, why)
		return
	}
	have, mine := t.routes.own[s.New.Key()]
	if why != "" && have.failed != why {
		what := any(ev.Action)
		if ok {
			what = cmp.Or(s.New, s.Old)
		}
		t.note(s.New.Dst.Addr(), "the kernel refused %T %v: %s", what, what, why)
	}
	if have.failed = why; mine && why != "" {
		have.MTU = -1 // no route should have that MTU, so the next reconcile tries again
	}
	if mine {
		t.routes.own[s.New.Key()] = have
	}
}
