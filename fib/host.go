package fib

import (
	"net/netip"

	"ipoibcm/mtu"
	"ipoibcm/rtnl"
)

// A host is a neighbour that a route of ours shows the MTU of its connection for.
//
// While the route is there the kernel answers with it, whatever else holds. So after
// a change of somebody else's that may concern the neighbour it is removed, the
// kernel asked, and made again only if it is still a guest there.
type host struct {
	entry             // its address
	want  int         // MTU; zero: no route
	have  rtnl.Route  // zero: none
	busy  bool        // a change is under way
	doubt bool        // the kernel must be asked (again)
	match rtnl.Answer // what it took without ours
	why   string      // there is none
}

// wantHost says which MTU a host route to a should show; zero: none is wanted.
func (t *Table) wantHost(a netip.Addr, n int) {
	h := t.hosts.get(rtnl.Flow{Dst: a})
	if h == nil && n != 0 {
		h = &host{entry: entry{rtnl.Flow{Dst: a}}, doubt: true}
		t.hosts.Set(h)
	}
	if h != nil && h.want != n {
		h.want = n
		t.routes.dirty = t.routes.dirty || h.match.Prefix.IsSingleIP() // its connected route shows it
		t.place(h)
	}
}

// place asks for what makes the route of h what it should be, if that is not under way.
func (t *Table) place(h *host) {
	if !t.routes.up() { // the kernel has dropped it, and adds none
		h.have, h.doubt = rtnl.Route{}, true
	}
	there := h.have.Dst.IsValid()
	s := SetRoute{Host: h.flow.Dst, Old: h.have, New: t.hostRoute(h)}
	switch {
	case h.busy:
		return
	case h.want == 0 && !there:
		t.hosts.Delete(h)
		return
	case h.want == 0:
		s.New = rtnl.Route{}
	case !t.routes.up():
		return
	case h.doubt:
		h.doubt, s.Ask, s.Link, s.ByDSCP = false, true, t.routes.link, t.dests.fields >= rtnl.WithSource
		t.n.HostLookups++
	case there && s.New != h.have:
		s.Old = rtnl.Route{} // only its metrics change
	default:
		return
	}
	h.busy = true
	t.do(s)
}

// hostRoute is the route for h. Table and source are those that the kernel answered with.
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

// hostDone takes the outcome of what place asked for.
func (t *Table) hostDone(ev Done, s SetRoute, why string) {
	h := t.hosts.get(rtnl.Flow{Dst: s.Host})
	if h.busy = false; ev.Err == nil || s.Old.Dst.IsValid() {
		h.have = ev.Route
		h.doubt = h.doubt || !s.New.Dst.IsValid() // removed because none was wanted: one may be again
	}
	if s.Ask && ev.Err == nil {
		h.match = ev.Answer
		t.routes.dirty = t.routes.dirty || h.match.Prefix.IsSingleIP() // its connected route shows the MTU
	}
	if why != "" && h.why != why && !h.doubt {
		t.note(h.flow.Dst, "no route of ours shows the MTU for %v: %s", h.flow.Dst, why)
	}
	if h.why = why; ev.Err == nil || h.doubt || h.want == 0 || t.effective(h.want) != s.New.MTU { // changed meanwhile
		t.place(h)
	}
}

// setHostRoute takes a route of ours that is there or is gone. What an agent before us
// left, and what is not wanted any more, is removed.
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

// doubt looks again at the host routes inside p, all with a zero p. Unless sure, only
// those that a foreign change of p can concern.
func (t *Table) doubt(p netip.Prefix, sure bool) {
	for h := range t.hosts.in(p) {
		other := h.busy || h.why != "" || h.match.Protocol != rtnl.ProtoKernel
		if sure || other || p.IsValid() && p.Bits() >= h.match.Prefix.Bits() {
			h.doubt = true
			t.place(h)
		}
	}
}
