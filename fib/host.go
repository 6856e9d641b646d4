package fib

import (
	"net/netip"
	"slices"

	"ipoibcm/mtu"
	"ipoibcm/rtnl"
)

// A host is a neighbour for which a host route of ours shows, or may show, the MTU of its connection.
//
// While our route is there, the kernel answers with it and hides its other routes. So when somebody else's change
// may concern the neighbour, SetRoute with Ask removes our route and asks the kernel. It makes the route again only
// if that may still be a guest there.
type host struct {
	entry            // its address
	want  int        // MTU to show; zero if no route is wanted
	have  rtnl.Route // the route that is there; zero if none
	busy  bool       // a change is under way
	doubt bool       // the kernel must be asked before a route is made or kept
	bits  int        // prefix length of the kernel's own route that leads there without ours; -1 if there may be none
	why   string     // why there is no route, or not the one wanted
}

// place asks for the change that brings the route of h to what is wanted, unless a change is under way. It deletes h
// if no route is wanted and none is there.
func (t *Table) place(h *host) {
	if !t.routes.up() { // the kernel has dropped our route, and adds none
		h.have, h.doubt = rtnl.Route{}, true
	}
	there := h.have.Dst.IsValid()
	s := SetRoute{Host: h.flow.Dst, Old: h.have, New: t.hostRoute(h)}
	switch {
	case h.busy, h.want != 0 && !t.routes.up():
		return
	case h.want == 0 && !there:
		t.hosts.Delete(h)
		return
	case h.want == 0:
		s.New = rtnl.Route{}
	case h.doubt:
		h.doubt, h.bits = false, -1
		s.Ask, s.Link, s.ByDSCP = true, t.routes.link, t.dests.fields >= rtnl.WithSource
		t.n.HostLookups++
	case there && s.New != h.have:
		s.Old = rtnl.Route{} // only its metrics change
	default:
		return
	}
	h.busy = true
	t.do(s)
}

// hostRoute returns the route that is wanted for h, with the table and source of the route that is there now.
func (t *Table) hostRoute(h *host) rtnl.Route {
	r := rtnl.Route{Dst: netip.PrefixFrom(h.flow.Dst, h.flow.Dst.BitLen()), Table: h.have.Table, Type: rtnl.Unicast,
		Protocol: rtnl.Protocol, Src: h.have.Src, MTU: t.effective(h.want)}
	if h.flow.Dst.Is4() {
		r.Scope = rtnl.ScopeLink
	} else {
		r.Metric = 1024
	}
	if tcp := t.largestTCP(); tcp < r.MTU {
		r.AdvMSS = mtu.AdvMSS(tcp, h.flow.Dst.Is6())
	}
	return r
}

// hostDone takes the outcome of a change that place asked for.
func (t *Table) hostDone(ev Done, s SetRoute, why string) {
	h := t.hosts.get(rtnl.Flow{Dst: s.Host})
	again := ev.Err == nil || h.doubt || t.effective(h.want) != s.New.MTU // changed meanwhile
	switch h.busy = false; {
	case s.Old.Dst.IsValid() && !ev.Removed: // Old is there still, and the kernel was not asked
		h.doubt = true
	case ev.Err == nil || ev.Removed:
		h.have = ev.Route
		h.doubt = h.doubt || !s.New.Dst.IsValid() // removed because none was wanted: one may be again
	}
	if s.Ask && why == "" && ev.Answer.Protocol == rtnl.ProtoKernel {
		h.bits = ev.Answer.Prefix.Bits()
	}
	if why != "" && h.why != why && !h.doubt {
		t.note(h.flow.Dst, "no route of ours shows the MTU for %v: %s", h.flow.Dst, why)
	}
	if h.why = why; again {
		t.place(h)
	}
}

// setHostRoute handles the kernel's report that a route of ours is there or is gone. It removes routes that an
// earlier agent left, or that are not wanted any more.
func (t *Table) setHostRoute(r rtnl.Route, gone bool) {
	h := t.hosts.get(rtnl.Flow{Dst: r.Dst.Addr()})
	switch same := h != nil && r.Dst.IsSingleIP() && (h.busy || h.have.Key() == r.Key()); {
	case same && gone: // somebody removed it
		if h.doubt = true; !h.busy {
			h.have = rtnl.Route{}
		}
		t.place(h)
	case same && !h.busy:
		h.have.MTU, h.have.AdvMSS = r.MTU, r.AdvMSS
		t.place(h)
	case !same && !gone && t.routes.up():
		t.do(SetRoute{Old: r})
	}
}

// doubt makes SetRoute ask the kernel again for each host route inside p; a zero p stands for all. Unless sure is
// set, doubt leaves out the hosts whose answer cannot depend on somebody else's change of a route to p.
func (t *Table) doubt(p netip.Prefix, sure bool) {
	for _, h := range slices.Collect(t.hosts.in(p)) { // place may delete some
		if sure || h.why != "" || p.Bits() >= h.bits { // a zero p has -1
			h.doubt = true
			t.place(h)
		}
	}
}
