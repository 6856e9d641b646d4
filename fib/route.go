package fib

import (
	"cmp"
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

// routes is what is under way with the kernel's routes, and with ours for groups.
type routes struct {
	dirty  bool // all must be looked at
	busy   map[rtnl.Key]bool
	failed map[rtnl.Key]string // what the kernel refused, said once
	rule   rtnl.Rule           // the one that is there; zero: none
}

func newRoutes() routes {
	return routes{busy: map[rtnl.Key]bool{}, failed: map[rtnl.Key]string{}}
}

// reconcile asks for what makes the device's routes what they should be. While
// the device is down the kernel has dropped them, and adds none.
func (t *Table) reconcile() {
	if !t.routes.dirty || !t.device.seen || !t.device.up() {
		return
	}
	t.routes.dirty = false
	for _, r := range sortedRoutes(t.device.kernel) {
		want, ok := t.metrics(r)
		if ok && (want.MTU != r.MTU || want.AdvMSS != r.AdvMSS) && !t.routes.busy[r.Key()] {
			t.routes.busy[r.Key()] = true
			t.do(SetRoute{Route: want})
		}
	}
	group := t.groupRoute()
	for _, r := range sortedRoutes(t.device.own) {
		wanted := t.wantedHost(r) || group.Dst.IsValid() && r.Key() == group.Key()
		if !wanted && !t.routes.busy[r.Key()] { // of an agent before us, or of an address that is gone
			t.routes.busy[r.Key()] = true
			t.do(DelRoute{Route: r})
		}
	}
	t.setGroups(group)
}

// metrics returns r as it should be, if it is one whose metrics are ours to say.
func (t *Table) metrics(r rtnl.Route) (rtnl.Route, bool) {
	ud := t.effective(t.opt.udMTU())
	switch {
	case isConnected(r):
		// The MTU of UD, but the MSS of connections: TCP fixes it in the SYN, which
		// leaves before one is up.
		r.MTU, r.AdvMSS = ud, mtu.AdvMSS(t.largestTCP(), r.Dst.Addr().Is6())
		if h := t.hosts.byAddr[r.Dst.Addr()]; r.Dst.IsSingleIP() && h != nil && h.want != 0 {
			r.MTU = h.want // of a peer address (ip address add A peer B)
		}
	case r.Type == rtnl.Broadcast, r.Type == rtnl.Multicast && r.Dst == multicast6:
		r.MTU, r.AdvMSS = ud, 0
	default:
		return r, false
	}
	return r, true
}

func isConnected(r rtnl.Route) bool {
	return r.Protocol == rtnl.ProtoKernel && r.Type == rtnl.Unicast && r.Table != rtnl.TableLocal && !r.Via.IsValid()
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
	for p := range t.device.addrs {
		if p.Addr().Is4() {
			return rtnl.Route{Dst: multicast4, Table: groupTables + t.device.link.Index, Type: rtnl.Multicast, Protocol: rtnl.Protocol,
				Scope: rtnl.ScopeLink, MTU: t.effective(t.opt.udMTU())}
		}
	}
	return rtnl.Route{}
}

func (t *Table) setGroups(r rtnl.Route) {
	rule := rtnl.Rule{}
	if r.Dst.IsValid() {
		rule = rtnl.Rule{Priority: groupPriority, To: multicast4, OIF: t.device.link.Name, Table: r.Table}
		if have, ok := t.device.own[r.Key()]; (!ok || have.MTU != r.MTU) && !t.routes.busy[r.Key()] {
			t.routes.busy[r.Key()] = true
			t.do(AddRoute{Route: r})
		}
	}
	if old := t.routes.rule; rule != old {
		if old != (rtnl.Rule{}) {
			t.do(SetRule{Rule: old})
		}
		if rule != (rtnl.Rule{}) {
			t.do(SetRule{Rule: rule, On: true})
		}
		t.routes.rule = rule
	}
}

// routeDone takes the outcome of a change. What failed is tried again when the
// kernel tells of another change.
func (t *Table) routeDone(ev RouteDone) {
	key := ev.Route.Key()
	switch {
	case ev.Err != nil && t.device.up():
		t.n.RoutesRefused++
		if text := ev.Err.Error(); t.routes.failed[key] != text {
			t.routes.failed[key] = text
			t.note(ev.Route.Dst.Addr(), "the kernel refused route %v: %v", ev.Route, ev.Err)
		}
	case ev.Err != nil, ev.Taken:
	case ev.Removed:
		t.n.RoutesRemoved++
		delete(t.device.own, key)
	case ev.Route.Protocol == rtnl.Protocol:
		t.n.RoutesSet++
		t.device.own[key] = ev.Route
		delete(t.routes.failed, key)
	default:
		t.n.RoutesSet++
		t.device.kernel[key] = ev.Route
		delete(t.routes.failed, key)
	}
	if t.routes.busy[key] {
		delete(t.routes.busy, key)
		t.routes.dirty = t.routes.dirty || ev.Err == nil && !ev.Taken
	}
	if h := t.hosts.byAddr[ev.Route.Dst.Addr()]; h != nil && ev.Route.Dst.IsSingleIP() && ev.Route.Protocol == rtnl.Protocol {
		t.hostDone(h, ev)
	}
}

func sortedRoutes(rs map[rtnl.Key]rtnl.Route) []rtnl.Route {
	return slices.SortedFunc(maps.Values(rs), func(a, b rtnl.Route) int {
		return cmp.Or(a.Dst.Compare(b.Dst), cmp.Compare(a.Table, b.Table), cmp.Compare(a.Metric, b.Metric), a.Via.Compare(b.Via), cmp.Compare(a.Type, b.Type))
	})
}
