package fib

import (
	"net/netip"
	"slices"

	"ipoibcm/mtu"
	"ipoibcm/rtnl"
)

// maxBusy bounds the questions and changes of routes that are under way when one
// about a host route begins.
const maxBusy = 256

// A hostState is what we know of how the kernel sends to a neighbour.
type hostState uint8

const (
	unknown hostState = iota
	asked             // the kernel's answer is due
	doubted           // likewise, but it may be of before a change
	guest             // a route of ours may stand there
	refused           // it may not, or cannot
)

// A host is a neighbour that a route of ours shows the MTU of its connection for.
//
// While the route is there the kernel answers with it, whatever else holds. So after
// a change of somebody else's that may concern the neighbour it is removed, the
// kernel asked, and made again only if it is still a guest there.
type host struct {
	addr   netip.Addr
	want   int // MTU; zero: no route
	state  hostState
	queued bool   // in Table.todo
	why    string // it is refused

	match netip.Prefix // the route that the kernel took without ours; zero: none
	other bool         // it is not the kernel's own
	table int
	src   netip.Addr // preferred source, IPv4: the kernel would take the device's first
}

func (h *host) key() rtnl.Flow { return rtnl.Flow{Dst: h.addr} }

// A HostInfo is what there is to know of a host route.
type HostInfo struct {
	MTU int    // of the route; zero: there is none
	Why string // why there is none, if one is wanted
}

// Host returns the host route to a.
func (t *Table) Host(a netip.Addr) (info HostInfo) {
	if h := t.hosts.get(rtnl.Flow{Dst: a}); h != nil {
		info.Why = h.why
		if r := t.routes.have[t.hostRoute(h).Key()]; r.Protocol == rtnl.Protocol {
			info.MTU = r.MTU
		}
	}
	return info
}

// wantHost says which MTU a host route to a should show; zero: none is wanted.
func (t *Table) wantHost(a netip.Addr, n int) {
	h := t.hosts.get(rtnl.Flow{Dst: a})
	if h == nil && n != 0 {
		h = &host{addr: a}
		t.hosts.add(h)
	}
	if h != nil && h.want != n {
		h.want = n
		t.routes.dirty = t.routes.dirty || h.match.IsSingleIP() // its connected route shows it
		t.touch(h)
	}
}

func (t *Table) touch(h *host) {
	if !h.queued {
		h.queued = true
		t.todo = append(t.todo, h)
	}
}

// advanceHosts begins what is next for the hosts that were touched.
func (t *Table) advanceHosts() {
	n := 0
	for ; n < len(t.todo) && t.lookups+len(t.routes.busy) < maxBusy; n++ {
		h := t.todo[n]
		h.queued = false
		key := t.hostRoute(h).Key()
		t.check(key)
		switch {
		case t.routes.busy[key] || h.state == asked || h.state == doubted:
		case h.want == 0:
			t.hosts.remove(h)
		case h.state == unknown && t.routes.up():
			h.state = asked
			t.lookups++
			t.n.HostLookups++
			t.do(Lookup{Flow: h.key(), Link: t.routes.link, Host: true, ByDSCP: t.dests.fields >= rtnl.WithSource})
		}
	}
	t.todo = slices.Delete(t.todo, 0, n)
}

// hostRoute is the route for h.
func (t *Table) hostRoute(h *host) rtnl.Route {
	r := rtnl.Route{Dst: netip.PrefixFrom(h.addr, h.addr.BitLen()), Table: h.table, Type: rtnl.Unicast,
		Protocol: rtnl.Protocol, MTU: t.effective(h.want)}
	if h.addr.Is4() {
		r.Src, r.Scope = h.src, rtnl.ScopeLink
	} else {
		r.Metric = 1024
	}
	if tcp := t.largestTCP(); tcp < r.MTU {
		r.AdvMSS = mtu.AdvMSS(tcp, h.addr.Is6())
	}
	return r
}

// hostOf returns whose route stands under key; nil if that is no host route.
func (t *Table) hostOf(key rtnl.Key) *host {
	if !key.Dst.IsSingleIP() {
		return nil
	}
	return t.hosts.get(rtnl.Flow{Dst: key.Dst.Addr()})
}

// hostAnswered has the route made if it is a guest where the kernel sends.
func (t *Table) hostAnswered(ev Answered) {
	h := t.hosts.get(ev.Lookup.Flow)
	if h == nil || h.state != asked && h.state != doubted {
		return
	}
	t.lookups--
	t.touch(h)
	a := ev.NextHop.Answer
	ok, why := ev.Err == nil, ""
	if ok {
		h.match, h.other, h.table, h.src = a.Prefix, a.Protocol != rtnl.ProtoKernel, a.Table, a.Src
		ok, why = ev.NextHop.Guest(ev.Lookup.Link)
		t.routes.dirty = t.routes.dirty || !ok && a.Prefix.IsSingleIP() // its connected route shows the MTU
	} else {
		why = ev.Err.Error()
	}
	switch {
	case h.state == doubted:
		h.state = unknown
	case ok:
		h.state, h.why = guest, ""
	default:
		t.refuse(h, why)
	}
}

func (t *Table) refuse(h *host, why string) {
	if h.state = refused; h.why != why {
		h.why = why
		t.note(h.addr, "no route of ours shows the MTU for %v: %s", h.addr, why)
	}
}

// doubt looks again at the host routes inside p, all with a zero p. Unless sure, only
// those that a foreign change of p can concern.
func (t *Table) doubt(p netip.Prefix, sure bool) {
	for h := range t.hosts.in(p) {
		switch {
		case h.state == asked:
			h.state = doubted
		case h.state == doubted:
		case sure || h.state == refused || h.other || p.IsValid() && p.Bits() >= h.match.Bits():
			h.state = unknown
			t.touch(h)
		}
	}
}
