package fib

import (
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
	known bool // SetHop has told path; else packets come up
	dests int  // that lead here
}

// miss is the path of a hop that is not known.
func (t *Table) miss() Path { return Path{Kind: PathMiss, MTU: t.effective(t.opt.udMTU())} }

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
	t.do(DelPath{Hop: a})
}

// setHop takes the path to a neighbour.
func (t *Table) setHop(a netip.Addr, path Path) {
	if h := t.hops[a]; h != nil {
		h.known = true
		t.setPath(a, h, path)
	}
	want := 0
	if path.Kind == PathConn {
		want = path.MTU
	}
	t.wantHost(a, want)
}

func (t *Table) delHop(a netip.Addr) {
	if h := t.hops[a]; h != nil {
		h.known = false
		t.setPath(a, h, t.miss())
	}
	t.wantHost(a, 0)
}

func (t *Table) setPath(a netip.Addr, h *hop, path Path) {
	if h.path == path {
		return
	}
	rose := path.MTU > h.path.MTU
	h.path = path
	t.do(SetPath{Hop: a, Path: path})
	// What the kernel heard of a smaller MTU would keep destinations behind a
	// gateway small for as long as it remembers.
	told := &t.tooBig[family(a.Is6())]
	if rose && !told.IsZero() {
		if t.now.Sub(*told) < exceptionLife {
			t.n.Flushes++
			t.do(FlushExceptions{})
		}
		*told = time.Time{}
	}
}

// NextHop returns the hop that the data path has for flow.
func (t *Table) NextHop(flow rtnl.Flow) (a netip.Addr, ok bool) {
	d := t.dests.index.get(flow)
	if d == nil || !d.hop.IsValid() {
		return a, false
	}
	return d.hop, true
}

// A HopInfo is one next hop that destinations lead to.
type HopInfo struct {
	Addr  netip.Addr
	Path  Path
	Known bool
	Dests int      // destinations that lead there now
	Host  HostInfo // its host route
}

// Hops lists the next hops by address.
func (t *Table) Hops() []HopInfo {
	out := make([]HopInfo, 0, len(t.hops))
	for a, h := range t.hops { // sorted below
		out = append(out, HopInfo{Addr: a, Path: h.path, Known: h.known, Dests: h.dests, Host: t.hosts.info(a)})
	}
	slices.SortFunc(out, func(x, y HopInfo) int { return x.Addr.Compare(y.Addr) })
	return out
}

// Dests returns how many destinations there are.
func (t *Table) Dests() int { return t.dests.n }

// Waiting returns how many packets wait for the kernel's answer.
func (t *Table) Waiting() int { return t.dests.packets }
