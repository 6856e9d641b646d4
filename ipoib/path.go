package ipoib

import (
	"maps"
	"net/netip"
	"slices"

	"ipoibcm/ib"
	"ipoibcm/mtu"
	"ipoibcm/neigh"
	"ipoibcm/wire/encap"
)

// maxGroupPaths bounds the groups that have an entry of their own in the data
// path's table; packets to others come by here every time.
const maxGroupPaths = 1024

// maxDirty is how many next hops there is room kept for after a Step that
// concerned more.
const maxDirty = 1024

// A hop is a neighbour whose link-layer address is known.
type hop struct {
	peer *peer
	mtu  int32 // of its path, as settle last set it
	// The entry of its host prefix in the data path's table, if that leads to peer;
	// a zero MTU means that Interface.table knows.
	shown struct {
		mtu   int32
		conn  Conn
		kind  PathKind
		flags encap.Flags
		icmp  bool // the kernel has heard of a smaller MTU from us since then
	}
}

// learn notes that the neighbour a is at link.
func (f *Interface) learn(a netip.Addr, link encap.LinkAddr) {
	p := f.peer(link)
	if h := f.hops[a]; h != nil && h.peer != p {
		f.unlearn(a, neigh.ExpireForgotten)
	}
	if p == nil {
		return
	}
	if p.flags != link.Flags.Known() {
		p.flags = link.Flags.Known()
		f.touch(p)
	}
	if f.hops[a] == nil {
		f.hops[a] = &hop{peer: p, mtu: int32(f.udMTU())}
		f.byAddr.add(a)
		i, _ := slices.BinarySearchFunc(p.addrs, a, netip.Addr.Compare)
		p.addrs = slices.Insert(p.addrs, i, a)
		f.spare.file(p)
	}
	f.dirty = append(f.dirty, a)
}

// unlearn forgets neighbour a. A peer that no address leads to any more loses
// its connection (RFC 4755 section 3.4); if its entry merely aged while the
// peer still sends to us, the timer decides.
func (f *Interface) unlearn(a netip.Addr, why neigh.ExpireReason) {
	h := f.hops[a]
	if h == nil {
		return
	}
	p := h.peer
	if path := h.path(); path.MTU != 0 {
		f.table[hostPrefix(a)] = path // until settle
	}
	delete(f.hops, a)
	f.byAddr.remove(a)
	if i, ok := slices.BinarySearchFunc(p.addrs, a, netip.Addr.Compare); ok {
		p.addrs = slices.Delete(p.addrs, i, i+1)
	}
	f.dirty = append(f.dirty, a)
	if len(p.addrs) > 0 {
		return
	}
	f.dropQueue(p)
	if p.dial != nil {
		f.withdraw(p.dial)
	}
	f.endAttempt(p)
	if p.tx != nil {
		f.arm(p, f.idleAt(p.tx)) // sooner than before
	}
	if why == neigh.ExpireUnused || why == neigh.ExpireEvicted {
		return
	}
	if p.tx != nil {
		f.hangUp(p.tx, "its neighbour entry is gone: "+why.String())
	}
}

// setRoutes takes the routes through the device (design D8).
func (f *Interface) setRoutes(rs []Route) {
	old := f.routes
	f.routes = make(map[netip.Prefix]netip.Addr, len(rs))
	clear(f.via)
	has := map[int]bool{} // prefix lengths; those of IPv6 negative
	for _, r := range rs {
		p := r.Prefix.Masked()
		if !p.IsValid() || p.Addr().IsMulticast() || p.Addr().Is6() && !f.ipv6 {
			continue
		}
		if _, dup := f.routes[p]; dup && !r.Gateway.IsValid() {
			continue // a route by a gateway is the more specific wish
		}
		gw := r.Gateway.Unmap().WithZone("")
		f.routes[p] = gw
		if p.Addr().Is4() {
			has[p.Bits()] = true
		} else {
			has[-1-p.Bits()] = true
		}
	}
	f.bits4, f.bits6 = f.bits4[:0], f.bits6[:0]
	for b := 128; b >= 0; b-- {
		if has[b] {
			f.bits4 = append(f.bits4, b)
		}
		if has[-1-b] {
			f.bits6 = append(f.bits6, b)
		}
	}
	for _, p := range slices.SortedFunc(maps.Keys(f.routes), comparePrefix) {
		gw := f.routes[p]
		if gw.IsValid() {
			f.via[gw] = append(f.via[gw], p)
		}
		if was, known := old[p]; !known || was != gw {
			f.rerouted = append(f.rerouted, p)
		}
	}
	for _, p := range slices.SortedFunc(maps.Keys(old), comparePrefix) {
		if _, still := f.routes[p]; !still {
			f.rerouted = append(f.rerouted, p)
		}
	}
}

// route returns the longest prefix that holds a, and its gateway.
func (f *Interface) route(a netip.Addr) (p netip.Prefix, gw netip.Addr, ok bool) {
	bits := f.bits6
	if a.Is4() {
		bits = f.bits4
	}
	for _, b := range bits {
		p, err := a.Prefix(b)
		if err != nil {
			continue
		}
		if gw, ok := f.routes[p]; ok {
			return p, gw, true
		}
	}
	return netip.Prefix{}, netip.Addr{}, false
}

// nextHop returns who a packet to dst goes to. Without a route it is dst
// itself: the kernel saw a route that we have not heard of yet.
func (f *Interface) nextHop(dst netip.Addr) netip.Addr {
	if _, gw, ok := f.route(dst); ok && gw.IsValid() {
		return gw
	}
	return dst
}

// onLink reports whether a route of the device says that a is on the link.
func (f *Interface) onLink(a netip.Addr) bool {
	_, gw, ok := f.route(a)
	return ok && !gw.IsValid()
}

func (f *Interface) udMTU() int { return mtu.Effective(f.deviceMTU, f.opt.udMTU()) }

// path returns how h is reached now.
func (f *Interface) path(h *hop) Path {
	p := h.peer
	link := p.key
	link.Flags = p.flags
	if c := p.tx; c != nil {
		return Path{Kind: PathConn, Conn: c.id, Link: link, MTU: mtu.Effective(f.deviceMTU, c.mtu)}
	}
	kind := PathUD
	if f.mayDial(p) {
		kind = PathMiss // so that the next packet opens a connection
	}
	return Path{Kind: kind, Link: link, MTU: f.udMTU()}
}

// miss is the path of what is not resolved.
func (f *Interface) miss() Path { return Path{Kind: PathMiss, MTU: f.udMTU()} }

// settle brings the data path's table and the host routes into line with what
// changed in this Step, then lets queue pairs go that nothing leads to now.
func (f *Interface) settle() {
	if f.dirtyAll {
		f.settleAll()
	} else {
		for _, p := range f.rerouted {
			f.setPath(p, f.wanted(p))
			// What it holds goes, or went, by another route than it did.
			f.dirty = slices.AppendSeq(f.dirty, f.byAddr.in(p))
		}
		slices.SortFunc(f.dirty, netip.Addr.Compare)
		for _, a := range slices.Compact(f.dirty) {
			f.settleHop(a)
		}
	}
	f.rerouted = f.rerouted[:0]
	if f.dirty, f.dirtyAll = f.dirty[:0], false; cap(f.dirty) > maxDirty {
		f.dirty = nil
	}
	for i, v6 := range [...]bool{false, true} {
		if f.flush[i] {
			f.count(nFlushes)
			f.do(FlushExceptions{IPv6: v6})
		}
	}
	f.flush = [2]bool{}
	for _, id := range f.gone {
		f.do(DestroyQP{Conn: id})
	}
	f.gone = f.gone[:0]
}

// settleHop sets the entries that depend on next hop a.
func (f *Interface) settleHop(a netip.Addr) {
	for _, p := range f.via[a] {
		f.setPath(p, f.wanted(p))
	}
	p := hostPrefix(a)
	f.setPath(p, f.wanted(p))
	f.setHostRoute(a)
	f.watchRise(a)
}

// settleAll sets every entry anew.
func (f *Interface) settleAll() {
	want := map[netip.Prefix]bool{}
	for p := range f.routes {
		want[p] = true
	}
	for a := range f.hops {
		want[hostPrefix(a)] = true
	}
	for p := range f.table {
		want[p] = true // to be withdrawn, or a group
	}
	for _, p := range slices.SortedFunc(maps.Keys(want), comparePrefix) {
		f.setPath(p, f.wanted(p))
	}
	hosts := map[netip.Addr]bool{}
	for a := range f.hops {
		hosts[a] = true
	}
	for a := range f.host {
		hosts[a] = true
	}
	for _, a := range slices.SortedFunc(maps.Keys(hosts), netip.Addr.Compare) {
		f.setHostRoute(a)
		f.watchRise(a)
	}
}

// wanted returns the entry that prefix p should have; a zero MTU means none.
func (f *Interface) wanted(p netip.Prefix) Path {
	if !f.up {
		return Path{}
	}
	if p.IsSingleIP() {
		if f.groups[p.Addr()] {
			return f.groupPath(p.Addr())
		}
		if h := f.hops[p.Addr()]; h != nil && f.nextHop(p.Addr()) == p.Addr() {
			return f.path(h)
		}
	}
	gw, ok := f.routes[p]
	if !ok {
		return Path{}
	}
	if h := f.hops[gw]; gw.IsValid() && h != nil {
		return f.path(h)
	}
	return f.miss()
}

func (f *Interface) setPath(p netip.Prefix, want Path) {
	have := f.entry(p)
	switch {
	case want.MTU == 0 && have.MTU != 0:
		f.setEntry(p, want)
		delete(f.groups, p.Addr())
		f.do(DelPath{Prefix: p})
	case want.MTU != 0 && have != want:
		f.setEntry(p, want)
		f.do(SetPath{Prefix: p, Path: want})
	}
}

// entry returns what the data path's table has for p; a zero MTU means nothing.
func (f *Interface) entry(p netip.Prefix) Path {
	if p.IsSingleIP() {
		if h := f.hops[p.Addr()]; h != nil && h.shown.mtu != 0 {
			return h.path()
		}
	}
	return f.table[p]
}

// setEntry notes what the data path's table has for p from now on: with the
// neighbour if that is where it leads, for there may be very many of them.
func (f *Interface) setEntry(p netip.Prefix, path Path) {
	if p.IsSingleIP() {
		if h := f.hops[p.Addr()]; h != nil && h.show(path) {
			delete(f.table, p)
			return
		}
	}
	if path.MTU == 0 {
		delete(f.table, p)
		return
	}
	f.table[p] = path
}

// show takes path as the one of h. It reports whether that is possible.
func (h *hop) show(path Path) bool {
	h.shown.mtu = 0
	if path.Link.Key() != h.peer.key || path.Kind == PathGroup {
		return false
	}
	h.shown.mtu, h.shown.conn, h.shown.kind, h.shown.flags = int32(path.MTU), path.Conn, path.Kind, path.Link.Flags
	return true
}

// path returns what show took.
func (h *hop) path() Path {
	s := &h.shown
	if s.mtu == 0 {
		return Path{}
	}
	link := h.peer.key
	link.Flags = s.flags
	return Path{Kind: s.kind, Conn: s.conn, Link: link, MTU: int(s.mtu)}
}

// setHostRoute shows the connection's MTU to the kernel (design D7). A
// neighbour that no on-link route of the device covers gets none, for the route
// would pull its traffic to us, and anybody can send us an ARP request.
func (f *Interface) setHostRoute(a netip.Addr) {
	want := 0
	if h := f.hops[a]; h != nil && f.up && f.onLink(a) {
		if p := f.path(h); p.Kind == PathConn {
			want = p.MTU
		}
	}
	have, ok := f.host[a]
	switch {
	case want == 0 && ok:
		delete(f.host, a)
		f.do(DelHostRoute{Addr: a})
	case want != 0 && have != want:
		f.host[a] = want
		f.do(HostRoute{Addr: a, MTU: want})
	}
}

// watchRise asks for the kernel's path MTU exceptions to be flushed when the
// MTU of a next hop rises: those of destinations behind it would stay small
// for 600 s.
func (f *Interface) watchRise(a netip.Addr) {
	h := f.hops[a]
	if h == nil {
		return
	}
	m := f.path(h).MTU
	if m > int(h.mtu) {
		for _, p := range f.via[a] {
			f.flush[family(p.Addr())] = true
		}
		if h.shown.icmp {
			f.flush[family(a)] = true
		}
		h.shown.icmp = false
	}
	h.mtu = int32(m)
}

func family(a netip.Addr) int {
	if a.Is4() {
		return 0
	}
	return 1
}

// groupPath returns the entry of group or broadcast address a; zero if a is
// none any more, or goes to a list of peers, which only we do.
func (f *Interface) groupPath(a netip.Addr) Path {
	t := f.group.Table()
	g, ok := t.MGIDFor(a)
	if !ok || len(t.Replicate()) > 0 {
		return Path{}
	}
	return Path{Kind: PathGroup, MGID: g, Link: encap.LinkAddr{QPN: ib.QPNMulticast, GID: g}, MTU: f.udMTU()}
}

// addGroupPath lets the data path send to a by itself from now on.
func (f *Interface) addGroupPath(a netip.Addr) {
	if f.groups[a] {
		return
	}
	if len(f.groups) >= maxGroupPaths {
		f.count(dropGroupPaths)
		return
	}
	f.groups[a] = true
	p := hostPrefix(a)
	f.setPath(p, f.wanted(p))
	if f.entry(p).MTU == 0 {
		delete(f.groups, a)
	}
}

// settleGroups looks at the groups again after a change of the group table.
func (f *Interface) settleGroups() {
	for _, a := range slices.SortedFunc(maps.Keys(f.groups), netip.Addr.Compare) {
		p := hostPrefix(a)
		f.setPath(p, f.wanted(p))
	}
}

func hostPrefix(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

func comparePrefix(a, b netip.Prefix) int {
	if c := a.Addr().Compare(b.Addr()); c != 0 {
		return c
	}
	return a.Bits() - b.Bits()
}
