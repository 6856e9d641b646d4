package fib

import (
	"net/netip"
	"slices"

	"ipoibcm/mtu"
	"ipoibcm/rtnl"
)

// maxBusy bounds the questions and changes about host routes that are under way.
const maxBusy = 256

// A hostRoute is a route of ours to one neighbour with the MTU of its connection.
//
// While it is there the kernel answers with it, whatever else holds. So after a
// change of somebody else's that may concern the neighbour it is removed, the
// kernel asked, and made again only if it is still a guest there.
type hostRoute struct {
	addr    netip.Addr
	want    int  // MTU; zero: no route
	have    int  // MTU of the route that is there; zero: none
	busy    bool // a question or a change is under way
	waiting bool // for others to be no longer busy
	doubt   bool // something changed that may concern it
	refused bool // it cannot be made
	why     string

	match netip.Prefix // the route that the kernel took without ours
	other bool         // it is not the kernel's own
	table int
	src   netip.Addr // preferred source, IPv4: the kernel would take the device's first
}

// hosts are the host routes that are wanted or there.
type hosts struct {
	byAddr  map[netip.Addr]*hostRoute
	covers  map[netip.Prefix]int      // how many have match
	asked   map[netip.Addr]*hostRoute // the kernel's answer is due: it may be of before a change
	busy    int
	waiting []*hostRoute
}

func newHosts() hosts {
	return hosts{byAddr: map[netip.Addr]*hostRoute{}, covers: map[netip.Prefix]int{}, asked: map[netip.Addr]*hostRoute{}}
}

// A HostInfo is what there is to know of a host route.
type HostInfo struct {
	MTU int    // of the route; zero: there is none
	Why string // why there is none, if one is wanted
}

func (s *hosts) info(a netip.Addr) HostInfo {
	h := s.byAddr[a]
	if h == nil {
		return HostInfo{}
	}
	return HostInfo{MTU: h.have, Why: h.why}
}

// Host returns the host route to a.
func (t *Table) Host(a netip.Addr) HostInfo { return t.hosts.info(a) }

// cover notes which route h stands before.
func (s *hosts) cover(h *hostRoute, p netip.Prefix) {
	if h.match.IsValid() {
		if s.covers[h.match]--; s.covers[h.match] == 0 {
			delete(s.covers, h.match)
		}
	}
	if h.match = p; p.IsValid() {
		s.covers[p]++
	}
}

// wantHost says which MTU a host route to a should show; zero: none is wanted.
func (t *Table) wantHost(a netip.Addr, n int) {
	if t.device.link.MTU != 0 {
		n = mtu.Effective(t.device.link.MTU, n)
	}
	h := t.hosts.byAddr[a]
	if h == nil {
		if n == 0 {
			return
		}
		h = &hostRoute{addr: a}
		t.hosts.byAddr[a] = h
	}
	if h.want != n {
		h.want = n
		t.routes.dirty = t.routes.dirty || h.match.IsSingleIP() // its connected route shows it
		t.advance(h)
	}
}

// advance begins what is next for h, if anything is.
func (t *Table) advance(h *hostRoute) {
	if h.busy || h.waiting {
		return
	}
	remove := h.have != 0 && (h.want == 0 || h.doubt)
	ask := h.have == 0 && h.want != 0 && (h.doubt || !h.refused)
	change := h.have != 0 && h.have != h.want
	switch {
	case !remove && h.want == 0:
		t.hosts.cover(h, netip.Prefix{})
		delete(t.hosts.byAddr, h.addr)
		return
	case !remove && !ask && !change, !t.device.up():
		return
	case t.hosts.busy >= maxBusy:
		h.waiting = true
		t.hosts.waiting = append(t.hosts.waiting, h)
		return
	}
	h.busy = true
	t.hosts.busy++
	switch {
	case remove:
		t.do(DelRoute{Route: t.hostRoute(h)})
	case ask:
		h.doubt, h.refused = false, false
		t.n.HostLookups++
		t.hosts.asked[h.addr] = h
		t.do(LookupHost{Addr: h.addr, Link: t.device.link, ByDSCP: t.dests.fields >= rtnl.WithSource})
	default:
		t.do(AddRoute{Route: t.hostRoute(h)})
	}
}

// done ends what was under way for h, and begins what waited for that.
func (t *Table) done(h *hostRoute) {
	h.busy = false
	t.hosts.busy--
	t.advance(h)
	for t.hosts.busy < maxBusy && len(t.hosts.waiting) > 0 {
		next := t.hosts.waiting[0]
		t.hosts.waiting = slices.Delete(t.hosts.waiting, 0, 1)
		next.waiting = false
		t.advance(next)
	}
}

// hostRoute is the route for h.
func (t *Table) hostRoute(h *hostRoute) rtnl.Route {
	r := rtnl.Route{Dst: netip.PrefixFrom(h.addr, h.addr.BitLen()), Table: h.table, Type: rtnl.Unicast, Protocol: rtnl.Protocol, MTU: h.want}
	if h.addr.Is4() {
		r.Src, r.Scope = h.src, rtnl.ScopeLink
	} else {
		r.Metric = 1024
	}
	if tcp := t.largestTCP(); tcp < h.want {
		r.AdvMSS = mtu.AdvMSS(tcp, h.addr.Is6())
	}
	return r
}

// hostAnswered makes the route if it is a guest where the kernel sends.
func (t *Table) hostAnswered(ev HostAnswered) {
	h := t.hosts.byAddr[ev.Addr]
	if h == nil || !h.busy {
		return
	}
	delete(t.hosts.asked, h.addr)
	if ev.Err != nil {
		t.n.LookupsFailed++
		t.refuse(h, ev.Err.Error())
		t.done(h)
		return
	}
	a := ev.NextHop.Answer
	match := a.Prefix
	if !match.IsValid() { // there is no route: any that comes may concern it
		match = netip.PrefixFrom(netip.IPv6Unspecified(), 0)
		if h.addr.Is4() {
			match = netip.PrefixFrom(netip.IPv4Unspecified(), 0)
		}
	}
	t.hosts.cover(h, match)
	h.other, h.table, h.src = a.Protocol != rtnl.ProtoKernel, a.Table, a.Src
	ok, why := ev.NextHop.Guest(t.device.link)
	if !ok {
		t.refuse(h, why)
		t.routes.dirty = t.routes.dirty || a.Prefix.IsSingleIP()
	}
	if !ok || h.want == 0 || h.doubt {
		t.done(h)
		return
	}
	h.why = ""
	t.do(AddRoute{Route: t.hostRoute(h)})
}

func (t *Table) refuse(h *hostRoute, why string) {
	if h.refused = true; h.why != why {
		h.why = why
		t.note(h.addr, "no route of ours shows the MTU for %v: %s", h.addr, why)
	}
}

// hostDone takes the outcome of a change.
func (t *Table) hostDone(h *hostRoute, ev RouteDone) {
	switch {
	case !h.busy:
		return
	case ev.Taken:
		h.have = 0
		t.refuse(h, "it has a host route of somebody else's, whose MTU counts")
	case ev.Err != nil && t.device.up(): // down, the kernel has dropped the route
		h.have = 0
		t.refuse(h, ev.Err.Error())
	case ev.Err == nil && ev.Removed:
		h.have = 0
	case ev.Err == nil:
		h.have = ev.Route.MTU
	}
	t.done(h)
}

// doubtHosts looks again at the host routes inside p, all with a zero p. Unless
// sure, only those that a foreign change of p can concern.
func (t *Table) doubtHosts(p netip.Prefix, sure bool) {
	for _, h := range t.hosts.asked { // they are busy: nothing comes of it yet, whatever their order
		h.doubt = h.doubt || !p.IsValid() || p.Contains(h.addr)
	}
	if p.IsValid() {
		near := false
		for c := range t.hosts.covers {
			near = near || c.Overlaps(p)
		}
		if !near {
			return
		}
	}
	for _, h := range t.sortedHosts() {
		switch {
		case p.IsValid() && !p.Contains(h.addr):
			continue
		case sure, h.refused, h.other:
		case !p.IsValid() || p.Bits() < h.match.Bits():
			continue
		}
		h.doubt = true
		t.advance(h)
	}
}

// foundHost takes a host route as the kernel has it.
func (t *Table) foundHost(r rtnl.Route) {
	if h := t.hosts.byAddr[r.Dst.Addr()]; h != nil && r.Dst.IsSingleIP() && !h.busy && h.have != 0 && h.have != r.MTU {
		h.have = r.MTU // somebody changed it
		t.advance(h)
	}
}

// lostHost makes a host route again that somebody removed.
func (t *Table) lostHost(r rtnl.Route) {
	if h := t.hosts.byAddr[r.Dst.Addr()]; h != nil && r.Dst.IsSingleIP() && !h.busy {
		h.have = 0
		t.advance(h)
	}
}

// restartHosts forgets what was there: the device went down, which drops its
// routes, or came up. What is being asked is of before.
func (t *Table) restartHosts() {
	for _, h := range t.sortedHosts() {
		h.have, h.refused, h.why, h.doubt = 0, false, "", h.busy
		t.advance(h)
	}
}

func (t *Table) sortedHosts() []*hostRoute {
	out := make([]*hostRoute, 0, len(t.hosts.byAddr))
	for _, h := range t.hosts.byAddr { // sorted below
		out = append(out, h)
	}
	slices.SortFunc(out, func(x, y *hostRoute) int { return x.addr.Compare(y.addr) })
	return out
}
