package ipoib

import (
	"iter"
	"net/netip"
	"slices"

	"ipoibcm/cm"
	"ipoibcm/fib"
	"ipoibcm/ib"
	"ipoibcm/mtu"
	"ipoibcm/neigh"
	"ipoibcm/nexthop"
	"ipoibcm/rtnl"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/ip"
)

// Status returns the interface as it is now.
func (f *Interface) Status() Status {
	s := Status{
		Up: f.up && f.active, Link: f.link, Mode: f.opt.Mode, PKey: f.opt.pkey(), QKey: f.opt.qkey(), PathMTU: f.pathMTU,
		Broadcast: f.group.Table().Broadcast(), UDMTU: f.opt.udMTU(), UDAccept: mtu.AcceptUD(f.opt.udMTU()), UDAuto: f.opt.UDAuto, ReceiveMTU: f.opt.receiveMTU(), DeviceMTU: f.deviceMTU,
		IPv6: f.ipv6, Peers: len(f.peers.byLink), Neighbours: len(f.hops.peers), Conns: f.conns.up,
		Crossings: Crossings{Seen: f.n[nCrossSeen], Accepted: f.n[nCrossAccepted], Rejected: f.n[nCrossRejected],
			Yielded: f.n[nCrossYielded], Expired: f.n[nCrossExpired]},
		Silence: f.silence(), CMTransport: f.opt.CMTransport, GSI: f.gsi(), Inband: f.inband(),
	}
	known := map[netip.Addr]neigh.AddrState{}
	for _, a := range f.neigh.Addrs() {
		known[a.Prefix.Addr()] = a.State
	}
	for _, p := range f.addrs.sorted() {
		st := known[p.Addr()]
		s.Addrs = append(s.Addrs, AddrInfo{Prefix: p, Ours: f.addrs.own.IsValid() && p.Addr() == f.addrs.own.Addr(),
			Tentative: st == neigh.AddrOptimistic, Duplicate: st == neigh.AddrDuplicate})
	}
	return s
}

// AllConns yields the connections in the record (RFC 4755 section 3.2) in no order, without Addrs,
// and with Why only if why is set. Steps may run between two yields: a connection that comes or
// goes meanwhile is yielded or not.
func (f *Interface) AllConns(why bool) iter.Seq[ConnInfo] {
	return func(yield func(ConnInfo) bool) {
		for _, c := range f.conns.byID {
			i := f.connInfo(c)
			if why {
				i.Why = f.why(c)
			}
			if !yield(i) {
				return
			}
		}
	}
}

// Conns lists the connections in the record, oldest first.
func (f *Interface) Conns() []ConnInfo {
	out := make([]ConnInfo, 0, len(f.conns.byID))
	for _, c := range f.conns.byAge() {
		i := f.connInfo(c)
		i.Addrs, i.Why = slices.Clone(c.peer.addrs), f.why(c)
		out = append(out, i)
	}
	return out
}

// connInfo describes c, without Addrs and Why.
func (f *Interface) connInfo(c *conn) ConnInfo {
	p := c.peer
	i := ConnInfo{
		Conn: c.id, Peer: p.key, State: cm.StateIdle.String(), Transport: c.trans, Class: p.class, Active: c.active,
		Tx: c.active || !c.oneWay(), Rx: !c.active || !c.oneWay(),
		LocalQPN: c.qpn, ReceiveMTU: c.theirs, MTU: c.mtu, PathMTU: c.reqPath(f.pathMTU), Via: c.via,
		Established: c.up, LastUsed: c.used, Use: c.use, Crossing: p.diagnostics().verdict,
	}
	i.Peer.Flags = p.flags
	if c.params.PathMTU != 0 { // settled
		i.PathMTU = c.usedPath(f.pathMTU)
	}
	if k, ok := f.cm.Conn(c.handle); ok && c.handle != 0 {
		i.State, i.RemoteQPN, i.ServiceID = k.State.String(), k.RemoteQPN, uint64(k.ServiceID)
		i.LocalComm, i.RemoteComm = uint32(k.LocalCommID), uint32(k.RemoteCommID)
		i.Via = viaOf(k.CMQPN)
	}
	return i
}

// CommIDs returns how many communication IDs the CM holds: those of connections, those in
// timewait, and those of rejected requests.
func (f *Interface) CommIDs() int { return f.cm.Len() }

// AllNeighbours yields the neighbour cache in no order. Steps may run between two yields: an entry
// that comes or goes meanwhile is yielded or not, and one that goes and comes again may be yielded twice.
func (f *Interface) AllNeighbours() iter.Seq[NeighbourInfo] {
	return func(yield func(NeighbourInfo) bool) {
		for n := range f.neigh.All() {
			if !yield(f.neighbourInfo(&n)) {
				return
			}
		}
	}
}

// Neighbours lists the neighbour cache by address.
func (f *Interface) Neighbours() []NeighbourInfo {
	return slices.SortedFunc(f.AllNeighbours(), func(x, y NeighbourInfo) int { return x.Addr.Compare(y.Addr) })
}

// neighbourInfo describes n.
func (f *Interface) neighbourInfo(n *neigh.Neighbor) NeighbourInfo {
	i := NeighbourInfo{Addr: n.IP, Link: n.LinkAddr, State: n.State.String(), Queued: n.QueuedPackets, QueuedOctets: n.QueuedOctets, Updated: n.Confirmed}
	if !n.Lost.IsZero() {
		i.Updated = n.Lost
	}
	if p := f.hops.peers[n.IP]; p != nil {
		i.Path = f.path(p)
		i.Queued += len(p.queue)
		i.QueuedOctets += p.queueOctets
	}
	return i
}

// Device returns the device as the kernel last described it. Its index is zero before the
// kernel first has.
func (f *Interface) Device() rtnl.Link { return f.fib.Link() }

// Hops yields the next hops and groups that packets go to, as [fib.Table.Hops] does.
func (f *Interface) Hops() iter.Seq[fib.HopInfo] { return f.fib.Hops() }

// FIBCounters returns what fib has counted.
func (f *Interface) FIBCounters() fib.Counters { return f.fib.Counters() }

// Waiting returns how many packets wait for the kernel to say where they go.
func (f *Interface) Waiting() int { return f.fib.Waiting() }

// Dests returns how many destinations the data path knows.
func (f *Interface) Dests() int { return f.fib.Dests() }

// Groups lists the multicast groups: IPv4 before IPv6, by address.
func (f *Interface) Groups() []GroupInfo {
	var out []GroupInfo
	for _, g := range f.group.Groups() {
		i := GroupInfo{Group: g.IP, MGID: g.MGID, Joined: g.Joined, Reasons: g.Reasons.Names()}
		if g.IP == ip.LimitedBroadcast {
			i.Group = netip.Addr{}
		}
		out = append(out, i)
	}
	return out
}

// Link returns the interface's link-layer address with the flags of Options.Mode.
func (f *Interface) Link() encap.LinkAddr { return f.link }

// modeName names the mode of a path of kind k, whose connection has transport t.
func modeName(k nexthop.PathKind, t ib.Transport) string {
	switch k {
	case nexthop.PathConn:
		return t.String()
	case nexthop.PathUD, nexthop.PathGroup:
		return ib.UD.String()
	}
	return "none"
}
