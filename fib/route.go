package fib

import (
	"maps"
	"net/netip"
	"slices"

	"ipoibcm/mtu"
	"ipoibcm/rtnl"
)

var (
	multicast6 = netip.MustParsePrefix("ff00::/8")
	multicast4 = netip.MustParsePrefix("224.0.0.0/4")
)

const (
	// groupTables is added to the index of the device: the table of its multicast
	// route, which no other interface has.
	groupTables = 75 << 16
	// groupPriority is that of the rule which leads there: before table main.
	groupPriority = 32765
)

// routes is what the kernel has of the device, and what is under way with that.
type routes struct {
	seen  bool // a first Resync came
	link  rtnl.Link
	addrs map[netip.Prefix]bool
	have  map[rtnl.Key]rtnl.Route // the kernel's own, and ours. Those of others are not here.
	rule  rtnl.Rule               // the one that is there; zero: none

	dirty  bool                // all must be looked at
	busy   map[rtnl.Key]bool   // a change is under way
	failed map[rtnl.Key]string // what the kernel refused, said once
}

func newRoutes() routes {
	return routes{addrs: map[netip.Prefix]bool{}, have: map[rtnl.Key]rtnl.Route{},
		busy: map[rtnl.Key]bool{}, failed: map[rtnl.Key]string{}}
}

func (s *routes) up() bool { return s.link.Up && !s.link.Gone }

// host takes one change of the kernel's in.
func (t *Table) host(ev rtnl.Event) {
	switch ev.Kind {
	case rtnl.Resync:
		t.resync(ev.Snapshot)
	case rtnl.AddrSet:
		t.setAddr(ev.Addr.Prefix, false)
	case rtnl.AddrGone:
		t.setAddr(ev.Addr.Prefix, true)
	case rtnl.LinkChange:
		t.setLink(ev.Link)
	case rtnl.RouteSet:
		t.setRoute(ev.Route, false)
	case rtnl.RouteGone:
		t.setRoute(ev.Route, true)
	case rtnl.Rerouted:
		t.reroute(ev.Prefix)
		t.doubt(ev.Prefix, ev.Unnamed)
	case rtnl.Rules:
		t.setFields(ev.Fields)
		t.reroute(netip.Prefix{})
		t.doubt(netip.Prefix{}, true)
	}
}

// resync replaces all that is known of the device: what went before what came, as
// single changes would.
func (t *Table) resync(s *rtnl.Snapshot) {
	addrs, routes := map[netip.Prefix]bool{}, map[rtnl.Key]bool{}
	for _, a := range s.Addrs {
		addrs[a.Prefix] = true
	}
	for _, p := range slices.SortedFunc(maps.Keys(t.routes.addrs), netip.Prefix.Compare) {
		if !addrs[p] {
			t.setAddr(p, true)
		}
	}
	if !s.Link.Up {
		t.setLink(s.Link)
	}
	for _, a := range s.Addrs {
		t.setAddr(a.Prefix, false)
	}
	t.setLink(s.Link)
	for _, r := range s.Routes {
		routes[r.Key()] = true
		t.setRoute(r, false)
	}
	for _, key := range slices.SortedFunc(maps.Keys(t.routes.have), rtnl.Key.Compare) {
		if !routes[key] {
			t.setRoute(t.routes.have[key], true)
		}
	}
	t.reroute(netip.Prefix{})
	t.routes.seen = true
}

func (t *Table) setAddr(p netip.Prefix, gone bool) {
	if t.routes.addrs[p] != gone {
		return
	}
	if t.routes.addrs[p] = true; gone {
		delete(t.routes.addrs, p)
	}
	t.do(SetAddr{Prefix: p, Gone: gone})
	t.routes.dirty = true
}

// setLink takes the state of the device.
func (t *Table) setLink(l rtnl.Link) {
	old, wasUp := t.routes.link, t.routes.up()
	t.routes.link, t.routes.dirty = l, true
	up := t.routes.up()
	if l.MTU != old.MTU && l.MTU != 0 {
		t.do(SetMTU{MTU: l.MTU})
	}
	if wasUp && !up { // which drops our routes
		t.n.DropDown += uint64(len(t.resetDests(t.dests.fields)))
		maps.DeleteFunc(t.routes.have, func(_ rtnl.Key, r rtnl.Route) bool { return r.Protocol == rtnl.Protocol })
	}
	if wasUp != up {
		t.do(SetUp{Up: up})
	}
	if l.Gone {
		// The routes went with the device, or stayed behind in the namespace that it has
		// left. A rule only names it.
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

// setRoute takes a route that is new, has changed or is gone.
func (t *Table) setRoute(r rtnl.Route, gone bool) {
	key := r.Key()
	old, known := t.routes.have[key]
	known = known && old.Protocol == r.Protocol // it may have been somebody else's
	if t.routes.have[key] = r; gone {
		delete(t.routes.have, key)
	}
	_, busy := t.routes.busy[key]
	h := t.hostOf(key)
	switch {
	case gone && h != nil && h.state == guest && !busy:
		h.state = unknown // somebody removed it
	case !gone && !known && r.Dst == multicast6 && r.Type == rtnl.Multicast && t.routes.seen:
		t.do(IPv6Up{}) // the route comes and goes with IPv6 on the device
	case isConnected(r) && (gone || !known || old.Src != r.Src): // not merely its metrics
		t.doubt(r.Dst, true)
	}
	t.look(key)
}

// look has done what is to be done under key.
func (t *Table) look(key rtnl.Key) {
	t.check(key)
	if h := t.hostOf(key); h != nil {
		t.touch(h)
	}
}

// check asks for what makes the route under key what it should be. While the device
// is down the kernel has dropped them, and adds none.
func (t *Table) check(key rtnl.Key) {
	have, there := t.routes.have[key]
	want := t.want(key)
	wanted := want.Dst.IsValid()
	if !t.routes.up() || t.routes.busy[key] || wanted == there && sameMTU(want, have) {
		return
	}
	t.routes.busy[key] = true
	if wanted {
		t.do(SetRoute{Route: want})
	} else { // of an agent before us, or of what is not wanted any more
		t.do(SetRoute{Route: have, Remove: true})
	}
}

func sameMTU(r, s rtnl.Route) bool { return r.MTU == s.MTU && r.AdvMSS == s.AdvMSS }

// want returns the route that there should be under key; a zero one for none of ours.
func (t *Table) want(key rtnl.Key) (r rtnl.Route) {
	have, there := t.routes.have[key]
	switch h := t.hostOf(key); {
	case there && have.Protocol != rtnl.Protocol:
		return t.metrics(have, h)
	case h != nil && h.state == guest && h.want != 0:
		r = t.hostRoute(h)
	case key.Dst == multicast4:
		r = t.groupRoute()
	}
	if r.Key() != key {
		return rtnl.Route{}
	}
	return r
}

// metrics returns r, which is the kernel's, as it should be. h is its destination if
// that is a neighbour.
func (t *Table) metrics(r rtnl.Route, h *host) rtnl.Route {
	ud := t.effective(t.opt.udMTU())
	switch {
	case isConnected(r):
		// The MTU of UD, but the MSS of connections: TCP fixes it in the SYN, which
		// leaves before one is up.
		r.MTU, r.AdvMSS = ud, mtu.AdvMSS(t.largestTCP(), r.Dst.Addr().Is6())
		if h != nil && h.want != 0 {
			r.MTU = t.effective(h.want) // of a peer address (ip address add A peer B)
		}
	case r.Type == rtnl.Broadcast, r.Type == rtnl.Multicast && r.Dst == multicast6:
		r.MTU, r.AdvMSS = ud, 0
	}
	return r
}

func isConnected(r rtnl.Route) bool {
	return r.Protocol == rtnl.ProtoKernel && r.Type == rtnl.Unicast && r.Table != rtnl.TableLocal && !r.Via.IsValid()
}

// effective is MTU n on the device as it is now.
func (t *Table) effective(n int) int {
	if t.routes.link.MTU == 0 {
		return n
	}
	return mtu.Effective(t.routes.link.MTU, n)
}

// largestTCP is the longest IP packet that peers' TCP should send us.
func (t *Table) largestTCP() int {
	n := t.effective(mtu.DefaultDevice)
	if t.opt.BestMessage == 0 {
		return n
	}
	return min(n, mtu.IPMTU(uint32(t.opt.BestMessage)))
}

// groupRoute is the route that gives IPv4 multicast the MTU of UD. It stands in a
// table of its own, which a rule opens to those who name the device: who names
// none sends multicast where he did before.
func (t *Table) groupRoute() rtnl.Route {
	for p := range t.routes.addrs {
		if p.Addr().Is4() {
			return rtnl.Route{Dst: multicast4, Table: groupTables + t.routes.link.Index, Type: rtnl.Multicast,
				Protocol: rtnl.Protocol, Scope: rtnl.ScopeLink, MTU: t.effective(t.opt.udMTU())}
		}
	}
	return rtnl.Route{}
}

func (t *Table) setRule(r rtnl.Rule) {
	old := t.routes.rule
	if old != r && old != (rtnl.Rule{}) {
		t.do(SetRule{Rule: old, Remove: true})
	}
	if old != r && r != (rtnl.Rule{}) {
		t.do(SetRule{Rule: r})
	}
	t.routes.rule = r
}

// reconcile asks for what makes all routes and the rule what they should be, if they
// must be looked at.
func (t *Table) reconcile() {
	if t.routes.dirty && t.routes.up() {
		t.routes.dirty = false
		for _, key := range slices.SortedFunc(maps.Keys(t.routes.have), rtnl.Key.Compare) {
			t.check(key)
		}
		rule, group := rtnl.Rule{}, t.groupRoute()
		if t.check(group.Key()); group.Dst.IsValid() {
			rule = rtnl.Rule{Priority: groupPriority, To: multicast4, OIF: t.routes.link.Name, Table: group.Table}
		}
		t.setRule(rule)
	}
	t.advanceHosts()
}

// done takes the outcome of a change. What failed is tried again when the kernel
// tells of another change.
func (t *Table) done(ev Done) {
	set, ok := ev.Action.(SetRoute)
	if ev.Err != nil && (t.routes.up() || !ok) {
		t.n.RoutesRefused++
	}
	if !ok {
		if ev.Err != nil {
			t.note(netip.Addr{}, "the kernel refused %T: %v", ev.Action, ev.Err)
		}
		return
	}
	key, why := set.Route.Key(), ""
	delete(t.routes.busy, key)
	want := t.want(key) // not what it was when the change began, perhaps
	again := want.Dst.IsValid() == set.Remove || !set.Remove && !sameMTU(want, set.Route)
	switch {
	case ev.Taken:
		delete(t.routes.have, key)
		why = "it has a host route of somebody else's, whose MTU counts"
	case ev.Err != nil && t.routes.up(): // down, the kernel has dropped the route
		why = ev.Err.Error()
	case ev.Err != nil:
	case set.Remove:
		t.n.RoutesRemoved++
		delete(t.routes.have, key)
	default:
		t.n.RoutesSet++
		t.routes.have[key] = set.Route
		delete(t.routes.failed, key)
	}
	switch h := t.hostOf(key); {
	case why == "" || again:
		t.look(key)
	case h != nil && h.state == guest:
		t.refuse(h, why)
	case t.routes.failed[key] != why:
		t.routes.failed[key] = why
		t.note(set.Route.Dst.Addr(), "the kernel refused route %v: %s", set.Route, why)
	}
}
