package ipoib

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"ipoibcm/fib"
	"ipoibcm/ib"
	"ipoibcm/mtu"
	"ipoibcm/neigh"
	"ipoibcm/nexthop"
	"ipoibcm/rtnl"
	"ipoibcm/wire/encap"
)

// This file ties neighbours to peers, and tells fib how each is reached.

// hops are the known neighbours.
type hops struct {
	peers    map[netip.Addr]*peer
	groups   map[netip.Addr]bool // group and broadcast addresses that destinations lead to
	dirty    []netip.Addr        // neighbours whose paths settle must look at
	allDirty bool                // settle must look at all neighbours
}

// learn notes that the neighbour a is at link.
func (f *Interface) learn(a netip.Addr, link encap.LinkAddr) {
	p := f.peer(link)
	if old := f.hops.peers[a]; old != nil && old != p {
		f.unlearn(a, neigh.ExpireForgotten)
	}
	if p == nil {
		return
	}
	if p.flags != link.Flags.Known() {
		p.flags = link.Flags.Known()
		f.touch(p)
	}
	if f.hops.peers[a] == nil {
		f.hops.peers[a] = p
		i, _ := slices.BinarySearchFunc(p.addrs, a, netip.Addr.Compare)
		p.addrs = slices.Insert(p.addrs, i, a)
		f.peers.unused.file(p)
	}
	if p.search == nil && p.tx == nil && f.transport(p) == ib.UD {
		f.probe(p, ib.UD)
	}
	f.hops.dirty = append(f.hops.dirty, a)
}

// unlearn forgets neighbour a. A peer that no address leads to any more loses
// its connection (RFC 4755 section 3.4). If the entry merely aged or made room, the
// idle timer decides, because the peer may still send to us.
func (f *Interface) unlearn(a netip.Addr, why neigh.ExpireReason) {
	p := f.hops.peers[a]
	if p == nil {
		return
	}
	delete(f.hops.peers, a)
	if i, ok := slices.BinarySearchFunc(p.addrs, a, netip.Addr.Compare); ok {
		p.addrs = slices.Delete(p.addrs, i, i+1)
	}
	f.hops.dirty = append(f.hops.dirty, a)
	if len(p.addrs) > 0 {
		return
	}
	f.dropQueue(p)
	if p.dial != nil {
		f.withdraw(p.dial)
	}
	f.endAttempt(p)
	if p.tx == nil {
		return
	}
	f.arm(p, f.idleAt(p.tx)) // sooner than before
	if why != neigh.ExpireUnused && why != neigh.ExpireEvicted {
		f.hangUp(p.tx, "its neighbour entry is gone: "+why.String())
	}
}

func (f *Interface) udMTU() int { return mtu.Effective(f.deviceMTU, f.opt.udMTU()) }

// sparseUDMTU is the largest packet that goes by UD beside a connection: what every path carries that connections use.
// Over RC nothing is probed, and nothing would tell of larger ones that are lost.
func sparseUDMTU() int { return basePathMTU.Octets() - encap.HeaderLen }

// path returns how p is reached now.
func (f *Interface) path(p *peer) nexthop.Path {
	link := p.key
	link.Flags = p.flags
	if c := p.sending(); c != nil {
		path := nexthop.Path{Kind: nexthop.PathConn, Conn: c.id, Link: link, MTU: mtu.Effective(f.deviceMTU, c.mtu)}
		if f.pathKnown(p.key.GID) {
			path.UDMTU = min(path.MTU, f.udMTUTo(p), sparseUDMTU())
		}
		return path
	}
	kind := nexthop.PathUD
	if f.mayDial(p) || !f.pathKnown(p.key.GID) {
		kind = nexthop.PathMiss // so that the next packet opens a connection, or asks for the path
	}
	return nexthop.Path{Kind: kind, Link: link, MTU: f.udMTUTo(p)}
}

// pathOf returns how neighbour or group a is reached now; zero and false if it is not known.
func (f *Interface) pathOf(a netip.Addr) (nexthop.Path, bool) {
	if f.group.Table().IsGroup(a) {
		path := f.groupPath(a)
		return path, path.MTU != 0
	}
	p := f.hops.peers[a]
	if p == nil || !f.up {
		return nexthop.Path{}, false
	}
	return f.path(p), true
}

// settle tells fib how the next hops that this Step concerned are reached. Then it destroys
// the queue pairs of dropped connections, which no path leads to any more.
func (f *Interface) settle() {
	if f.hops.allDirty {
		f.hops.dirty = slices.AppendSeq(f.hops.dirty, maps.Keys(f.hops.peers))
	}
	slices.SortFunc(f.hops.dirty, netip.Addr.Compare)
	for _, a := range slices.Compact(f.hops.dirty) {
		path, _ := f.pathOf(a)
		f.fibStep(fib.SetHop{Addr: a, Path: path})
	}
	if f.hops.dirty, f.hops.allDirty = f.hops.dirty[:0], false; cap(f.hops.dirty) > maxDirty {
		f.hops.dirty = nil
	}
	for _, id := range f.conns.gone {
		f.do(DestroyQP{Conn: id})
	}
	f.conns.gone = f.conns.gone[:0]
}

// maxDirty bounds the room for next hops that is kept from one Step to the next.
const maxDirty = 1024

// groupPath returns how group or broadcast address a is reached. It returns zero if a is no
// such address any more, if the interface is down, or if packets to it are copied to a list
// of peers, which only this machine does.
func (f *Interface) groupPath(a netip.Addr) nexthop.Path {
	t := f.group.Table()
	g, ok := t.MGIDFor(a)
	if _, copies := t.Replicate(); !ok || copies || !f.up {
		return nexthop.Path{}
	}
	path := nexthop.Path{Kind: nexthop.PathGroup, Link: encap.LinkAddr{QPN: ib.QPNMulticast, GID: g}, MTU: f.udMTU()}
	if !f.groupKnown(g) {
		path.Kind = nexthop.PathMiss // so that the next packet has it joined
	}
	return path
}

// settleGroups tells fib anew how the groups are reached that the data path sends to by itself.
func (f *Interface) settleGroups() {
	for _, a := range slices.SortedFunc(maps.Keys(f.hops.groups), netip.Addr.Compare) {
		path, _ := f.pathOf(a)
		f.fibStep(fib.SetHop{Addr: a, Path: path})
	}
}

func (f *Interface) fibStep(ev fib.Event) {
	for _, a := range f.fib.Step(nil, f.now, ev) {
		f.onFIB(a)
	}
}

// onFIB carries out the actions of fib about packets and the device, and hands all others to
// the driver.
func (f *Interface) onFIB(a fib.Action) {
	switch a := a.(type) {
	case fib.Forward:
		if f.group.Table().IsGroup(a.Hop) {
			f.toGroup(a.Hop, a.Packet)
		} else {
			f.neighStep(neigh.Resolve{IP: a.Hop, Packet: a.Packet})
		}
	case fib.Lookup:
		if f.group.Table().IsGroup(a.Flow.Dst) { // no route of the kernel matters
			f.fibStep(fib.Answered{Lookup: a, NextHop: nexthop.Hop{Addr: a.Flow.Dst}})
			return
		}
		if a.Src.IsValid() {
			f.neighStep(neigh.Resolve{IP: a.Flow.Dst, Source: a.Src})
		}
		f.do(FIBAction{a})
	case fib.SetPath:
		f.do(FIBAction{a})
		if a.Path == (nexthop.Path{}) {
			delete(f.hops.groups, a.Hop)
			return
		}
		if f.group.Table().IsGroup(a.Hop) {
			f.hops.groups[a.Hop] = true
		}
		if path, ok := f.pathOf(a.Hop); ok && a.Path.Kind == nexthop.PathMiss {
			f.fibStep(fib.SetHop{Addr: a.Hop, Path: path})
		}
	case fib.IPv6Up:
		if f.ipv6 {
			f.do(SetUpIPv6{})
			if f.addrs.own.IsValid() {
				f.addLinkLocal() // it has gone with IPv6, even if we have not heard that it was there
			}
		}
	case fib.Device:
		f.onDevice(a.Event)
	case fib.Note:
		f.note(Note{Kind: NoteRoute, Addr: a.Addr, Text: a.Text})
	default:
		f.do(FIBAction{a})
	}
}

// onDevice takes a change of the device or its addresses.
func (f *Interface) onDevice(ev rtnl.Event) {
	switch l := ev.Link; ev.Kind {
	case rtnl.AddrSet:
		f.addrAdded(ev.Addr.Prefix)
	case rtnl.AddrGone:
		f.addrRemoved(ev.Addr.Prefix)
	case rtnl.LinkChange:
		if l.MTU != 0 && l.MTU != f.deviceMTU {
			f.deviceMTU, f.hops.allDirty = l.MTU, true
			f.note(Note{Kind: NoteLink, Text: fmt.Sprintf("device MTU is %d", l.MTU), Report: MTUChanged})
			f.settleGroups()
		}
		if l.Up {
			f.linkUp()
		} else {
			f.linkDown("the interface went down")
		}
	}
}
