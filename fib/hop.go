package fib

import (
	"iter"
	"maps"
	"net/netip"
	"slices"
	"time"

	"ipoibcm/nexthop"
	"ipoibcm/rtnl"
)

// exceptionLife is how long the kernel remembers a path MTU from an ICMP message (net.ipv4.route.mtu_expires,
// net.ipv6.route.mtu_expires).
const exceptionLife = 10 * time.Minute

// A hop is a neighbour, a gateway, or a group that destinations lead to. A neighbour that no destination leads to
// has no hop; there may be very many of these.
type hop struct {
	path  nexthop.Path
	dests int // number of destinations that lead here
}

// step gives the new UD MTU to each next hop whose path is a miss. The driver sends SetHop for the others.
func (ev SetUDMTU) step(t *Table) {
	t.opt.UDMTU, t.routes.dirty = ev.MTU, true
	for _, a := range slices.SortedFunc(maps.Keys(t.hops), netip.Addr.Compare) {
		if h := t.hops[a]; h.path.Kind == nexthop.PathMiss {
			SetHop{a, h.path}.step(t)
		}
	}
}

// hold counts one more destination that leads to a.
func (t *Table) hold(a netip.Addr) {
	h := t.hops[a]
	if h == nil {
		h = &hop{path: nexthop.Path{Kind: nexthop.PathMiss, MTU: t.effective(t.opt.UDMTU)}}
		t.hops[a] = h
		t.do(SetPath{Hop: a, Path: h.path})
	}
	h.dests++
}

// release is the opposite of hold.
func (t *Table) release(a netip.Addr) {
	h := t.hops[a]
	if h.dests--; h.dests > 0 {
		return
	}
	delete(t.hops, a)
	if len(t.hops) == 0 {
		t.hops = map[netip.Addr]*hop{} // a map does not shrink
	}
	t.do(SetPath{Hop: a})
}

// step puts the path to a neighbour into the data path, and its MTU into the neighbour's host route.
func (ev SetHop) step(t *Table) {
	a, path, want := ev.Addr, ev.Path, 0
	switch path.Kind {
	case nexthop.PathConn:
		want = path.MTU
	case nexthop.PathMiss: // a zero path too
		path.MTU = t.effective(t.opt.UDMTU)
	}
	if h := t.hops[a]; h != nil && h.path != path {
		t.do(SetPath{Hop: a, Path: path})
		if path.MTU > h.path.MTU && t.now.Sub(t.tooBig) < exceptionLife {
			// The kernel may remember a smaller path MTU for destinations behind a gateway, and would use it still.
			t.n.Flushes++
			t.do(FlushExceptions{})
			t.tooBig = time.Time{}
		}
		h.path = path
	}
	h := t.hosts.get(rtnl.Flow{Dst: a})
	if h == nil && want != 0 {
		h = &host{entry: entry{rtnl.Flow{Dst: a}}, doubt: true}
		t.hosts.Set(h)
	}
	if h != nil && h.want != want {
		h.want, t.routes.dirty = want, true // a connected route may show it
		t.place(h)
	}
}

// A HopInfo is one next hop.
type HopInfo struct {
	Addr  netip.Addr
	Path  nexthop.Path
	Dests int    // destinations that lead there now
	MTU   int    // MTU of its host route; zero if there is none
	Why   string // why there is no host route, if one is wanted
}

// Hop returns what is known of next hop a.
func (t *Table) Hop(a netip.Addr) HopInfo {
	i := HopInfo{Addr: a}
	if h := t.hops[a]; h != nil {
		i.Path, i.Dests = h.path, h.dests
	}
	if h := t.hosts.get(rtnl.Flow{Dst: a}); h != nil {
		i.MTU, i.Why = h.have.MTU, h.why
	}
	return i
}

// Hops yields the next hops that destinations lead to, in no order. Step may be called between two yields. A hop
// that is added or removed meanwhile may be yielded or not. One that is removed and added again may be yielded
// twice.
func (t *Table) Hops() iter.Seq[HopInfo] {
	return func(yield func(HopInfo) bool) {
		for a := range t.hops {
			if !yield(t.Hop(a)) {
				return
			}
		}
	}
}
