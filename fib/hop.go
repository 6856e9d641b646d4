package fib

import (
	"iter"
	"maps"
	"net/netip"
	"slices"
	"time"

	"ipoibcm/rtnl"
)

// exceptionLife is how long the kernel remembers a path MTU that it heard of by
// ICMP (net.ipv4.route.mtu_expires, net.ipv6.route.mtu_expires).
const exceptionLife = 10 * time.Minute

// A hop is a neighbour, a gateway, or a group that destinations lead to. Of
// neighbours that nothing leads to, of which there may be very many, there is none.
type hop struct {
	path  Path
	dests int // that lead here
}

// miss is the path of a hop that is not known: packets come up.
func (t *Table) miss() Path { return Path{Kind: PathMiss, MTU: t.effective(t.opt.UDMTU)} }

// step asks again how each next hop is reached: a miss has the MTU of UD too.
func (ev SetUDMTU) step(t *Table) {
	t.opt.UDMTU, t.routes.dirty = ev.MTU, true
	for _, a := range slices.SortedFunc(maps.Keys(t.hops), netip.Addr.Compare) {
		if h := t.hops[a]; h.path.Kind == PathMiss {
			SetHop{a, h.path}.step(t)
		}
		t.do(AskPath{Hop: a})
	}
}

// hold notes that one more destination leads to a.
func (t *Table) hold(a netip.Addr) {
	h := t.hops[a]
	if h == nil {
		h = &hop{path: t.miss()}
		t.hops[a] = h
		t.do(SetPath{Hop: a, Path: h.path})
		t.do(AskPath{Hop: a})
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

// step takes the path to a neighbour.
func (ev SetHop) step(t *Table) {
	a, path, want := ev.Addr, ev.Path, 0
	switch path.Kind {
	case PathConn:
		want = path.MTU
	case PathMiss: // of none, too
		path.MTU = t.miss().MTU
	}
	if h := t.hops[a]; h != nil && h.path != path {
		t.do(SetPath{Hop: a, Path: path})
		if path.MTU > h.path.MTU {
			// What the kernel heard of a smaller MTU would keep destinations behind a
			// gateway small for as long as it remembers.
			if t.now.Sub(t.tooBig) < exceptionLife {
				t.n.Flushes++
				t.do(FlushExceptions{})
			}
			t.tooBig = time.Time{}
		}
		h.path = path
	}
	t.wantHost(a, want)
}

// A HopInfo is one next hop.
type HopInfo struct {
	Addr  netip.Addr
	Path  Path
	Dests int    // destinations that lead there now
	MTU   int    // of its host route; zero: there is none
	Why   string // why there is none, if one is wanted
}

// Hop tells of next hop a.
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

// Hops yields the next hops that destinations lead to, in no order. Events may come between
// two: what comes or goes meanwhile is yielded or not, and what goes and comes again may be twice.
func (t *Table) Hops() iter.Seq[HopInfo] {
	return func(yield func(HopInfo) bool) {
		for a := range t.hops {
			if !yield(t.Hop(a)) {
				return
			}
		}
	}
}
