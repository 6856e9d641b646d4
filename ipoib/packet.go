package ipoib

import (
	"errors"
	"net/netip"
	"slices"

	"ipoibcm/fib"
	"ipoibcm/group"
	"ipoibcm/ib"
	"ipoibcm/mtu"
	"ipoibcm/neigh"
	"ipoibcm/rtnl"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/ip"
	"ipoibcm/wire/nd"
)

// fromTUN forwards a packet of the kernel that the data path could not forward.
func (f *Interface) fromTUN(b []byte) {
	f.count(nPackets)
	if !f.up {
		f.count(dropDown)
		return
	}
	dst, ok := ip.Dst(b)
	if ok && dst.Is4() {
		_, err := ip.AsV4(b)
		ok = err == nil
	} else if ok {
		_, err := ip.AsV6(b)
		ok = err == nil
	}
	switch {
	case !ok:
		f.count(dropMalformed)
		return
	case dst.Is6() && !f.ipv6:
		f.count(dropIPv6Off)
		return
	}
	pkt := slices.Clone(b) // the driver wants its octets back
	switch nd.KindOf(pkt) {
	case nd.None:
	case nd.NeighborSolicitation, nd.NeighborAdvertisement:
		f.count(dropFromTUN) // we are the neighbour stack
		return
	default:
		if pkt = f.addLink(pkt); pkt == nil {
			return
		}
	}
	if ip.IsReport(pkt) {
		if cs, err := ip.AppendChanges(nil, pkt); err == nil {
			f.groupStep(group.Report{Changes: cs})
		}
	}
	if ip.IsVRRP(pkt) {
		f.insist(pkt)
	}
	if _, wanted := f.group.Table().MGIDFor(dst); f.group.Table().IsGroup(dst) &&
		(!wanted || nd.KindOf(pkt) != nd.None || ip.IsReport(pkt) || ip.IsVRRP(pkt)) { // packets of these kinds come up each time
		f.toGroup(dst, pkt)
		return
	}
	f.resolve(pkt)
}

// insist announces the addresses that a VRRP advertisement of this host names: another host may
// still have them. The VRRP program would have to announce them itself (RFC 9568 section 6.4.1),
// but no program can send gratuitous ARP or unsolicited advertisements by a TUN.
func (f *Interface) insist(pkt []byte) {
	for _, a := range ip.AppendVirtual(nil, pkt) {
		if f.addrs.has(a) {
			f.neighStep(neigh.Insist{IP: a})
		} else {
			f.addrs.claim(a, f.now)
		}
	}
}

// addLink gives an RS, RA or Redirect from the kernel its link-layer address option, because the
// kernel has no link-layer addresses on a TUN. The address is ours, or that of a Redirect's target.
// A Redirect to a target that we do not know stays as it is. A malformed packet is counted and
// gives nil.
func (f *Interface) addLink(pkt []byte) []byte {
	link := f.announced()
	if t, ok := nd.RedirectTarget(pkt); ok && !f.addrs.has(t) {
		p := f.hops.peers[t]
		if p == nil {
			return pkt // the option is not required
		}
		link = p.key
		link.Flags = p.flags
	}
	out, err := nd.AddLink(nil, pkt, link)
	if err != nil {
		f.count(dropMalformed)
		return nil
	}
	f.count(nRouterOut)
	return out
}

// resolve asks fib for the next hop of pkt, and then neigh for the link-layer address of the
// next hop. The packet comes back in neigh.Deliver or neigh.Discard.
func (f *Interface) resolve(pkt []byte) {
	if flow, ok := ip.FlowOf(pkt, f.fib.Fields()); ok {
		f.fibStep(fib.Resolve{Flow: flow, Packet: pkt})
		return
	}
	f.count(dropMalformed)
}

// answerTo looks for the path of an answer to pkt, the start of an IP packet.
func (f *Interface) answerTo(pkt []byte) {
	table := f.group.Table()
	flow, ok := ip.FlowOf(pkt, rtnl.WithPorts)
	if src, known := ip.Src(pkt); !f.up || !ok || !known || src.IsUnspecified() || table.IsGroup(src) {
		return
	} else if flow.Src, flow.Dst = flow.Dst, src; table.IsGroup(flow.Src) {
		flow.Src = netip.Addr{}
	}
	flow.SrcPort, flow.DstPort = flow.DstPort, flow.SrcPort
	f.fibStep(fib.Resolve{Flow: f.fib.Fields().Of(flow)})
}

// deliver sends a packet to next hop a, which is at link.
func (f *Interface) deliver(a netip.Addr, link encap.LinkAddr, pkt []byte) {
	p := f.hops.peers[a]
	if p == nil || p.key != link.Key() || nd.KindOf(pkt) != nd.None {
		// Neighbour discovery goes by UD always (RFC 4755 section 7).
		f.sendUD(link, pkt)
		return
	}
	if !f.takePath(p.key.GID) {
		f.awaitPath(pathJob{link: link, hop: a, packet: pkt})
		return
	}
	if f.mayDial(p) {
		f.endAttempt(p)
		f.dial(p)
	}
	f.sendPeer(p, pkt)
}

// sendPeer sends pkt to p in the mode that there is now, or keeps it until p's
// connection is up (RFC 4755 sections 7 and 7.2).
func (f *Interface) sendPeer(p *peer, pkt []byte) {
	dst, ok := ip.Dst(pkt)
	if !ok {
		return
	}
	hop := mtu.NextHop{MTU: f.udMTUTo(p)}
	c := p.sending()
	if c != nil {
		hop.MTU = mtu.Effective(f.deviceMTU, c.mtu)
	} else if p.tx != nil || p.connecting() {
		hop.Pending = mtu.Effective(f.deviceMTU, mtu.IPMTU(uint32(f.opt.receiveMTU())))
	}
	send := func(pkt []byte) {
		if c != nil {
			f.do(SendConn{Conn: c.id, Frame: frame(pkt)})
		} else {
			f.sendUD(p.key, pkt)
		}
	}
	d := mtu.Decide(mtu.Packet{Len: len(pkt), Dst: dst, DF: df(pkt)}, hop)
	switch d.Verdict {
	case mtu.Send:
		send(pkt)
	case mtu.Wait:
		f.enqueue(p, pkt)
	default:
		f.oversize(d, pkt, netip.Addr{}, send)
	}
}

// oversize fragments pkt, answers it with a Too Big message from source, or drops it, as d says.
func (f *Interface) oversize(d mtu.Decision, pkt []byte, source netip.Addr, send func([]byte)) {
	switch d.Verdict {
	case mtu.Fragment:
		fr, err := ip.NewFragmenter(pkt, d.MTU)
		if err != nil {
			f.count(dropOversize)
			return
		}
		f.count(nFragmented)
		for fr.More() {
			send(fr.Append(nil))
		}
	case mtu.TooBig:
		out, err := ip.AppendTooBig(nil, pkt, source, d.MTU)
		if errors.Is(err, ip.ErrSilent) {
			f.count(dropSilent)
			return
		}
		if err != nil {
			f.count(dropOversize)
			return
		}
		f.count(nTooBig)
		f.fibStep(fib.TooBig{})
		f.do(WriteTUN{IP: out})
	default:
		f.count(dropOversize)
	}
}

// toGroup sends pkt to a group or broadcast address: over the UD QP, whatever
// connections there are (RFC 4755 section 2.1).
func (f *Interface) toGroup(dst netip.Addr, pkt []byte) {
	if _, ok := f.group.Table().MGIDFor(dst); !ok {
		f.count(dropNotWanted) // packets to this group never leave the host
		return
	}
	send := func(pkt []byte) { f.sendGroup(dst, frame(pkt)) }
	d := mtu.Decide(mtu.Packet{Len: len(pkt), Dst: dst, DF: df(pkt), Broadcast: !dst.IsMulticast()}, mtu.NextHop{MTU: f.udMTU()})
	if d.Verdict == mtu.Send {
		send(pkt)
		return
	}
	// A Too Big message needs a unicast source, and for IPv6 any will do.
	f.oversize(d, pkt, ip.LinkLocal(f.link.GID), send)
}

// sendGroup sends a frame to the MGID of dst, or a copy to each peer if there is a list of
// peers.
func (f *Interface) sendGroup(dst netip.Addr, fr []byte) {
	if g, ok := f.group.Table().MGIDFor(dst); ok {
		f.sendMGID(g, fr)
	}
}

func (f *Interface) sendMGID(g ib.GID, fr []byte) {
	if peers, copies := f.group.Table().Replicate(); copies {
		f.sendCopies(peers, fr)
	} else {
		f.sendMulticast(g, fr)
	}
}

// sendUD sends an IP packet by UD. It drops a packet that is too large: as a rule that is
// neighbour discovery of the kernel (RA), which cannot be fragmented.
func (f *Interface) sendUD(link encap.LinkAddr, pkt []byte) {
	if len(pkt) > f.opt.udMTU() {
		f.count(dropOversize)
		return
	}
	f.sendTo(link, frame(pkt))
}

// frame puts the encapsulation header before an IP packet.
func frame(pkt []byte) []byte {
	t := encap.IPv4
	if ip.Version(pkt) == 6 {
		t = encap.IPv6
	}
	return frameOf(t, pkt)
}

func frameOf(t encap.EtherType, payload []byte) []byte {
	b, _ := encap.Header{Type: t}.AppendBinary(make([]byte, 0, encap.HeaderLen+len(payload)))
	return append(b, payload...)
}

// df reports whether an IPv4 packet must not be fragmented.
func df(pkt []byte) bool { return ip.Version(pkt) == 4 && ip.V4(pkt).DF() }

// fromFabric takes a frame that is not plain IP data.
func (f *Interface) fromFabric(ev RecvFrame) {
	var h encap.Header
	if isInband(ev) {
		f.recvInband(ev) // also while the interface is down, as with MADs at QP 1
		return
	}
	if !f.up {
		f.count(dropDown)
		return
	}
	if h.UnmarshalBinary(ev.Frame) != nil {
		f.count(dropFrame)
		return
	}
	body := ev.Frame[encap.HeaderLen:]
	from := encap.LinkAddr{QPN: ev.SrcQPN, GID: ev.SrcGID}
	if ev.Conn != 0 {
		c := f.connOf(ev.Conn)
		if c == nil {
			return
		}
		from = c.peer.key
	}
	switch {
	case from == f.link.Key():
		f.count(dropReflected)
	case h.Type == encap.PathProbe:
		f.recvProbe(from, ev.Conn != 0, body)
	case h.Type == encap.ARP && ev.Conn != 0:
		f.count(dropARPOnConn) // connected QPs carry no ARP (RFC 4755 section 4)
	case h.Type == encap.ARP:
		f.neighStep(neigh.RecvARP{From: from, Payload: body})
	case h.Type == encap.IPv6 && f.ipv6:
		if ev.Conn != 0 {
			f.count(nNDOnConn) // Linux sends ND so: we accept it, and answer by UD
		}
		f.recvND(from, body)
	default:
		f.count(dropFrame)
	}
}

// isInband reports whether ev is a CM message in-band. Connections carry none.
func isInband(ev RecvFrame) bool {
	var h encap.Header
	return ev.Conn == 0 && h.UnmarshalBinary(ev.Frame) == nil && h.Type == encap.InbandCM
}

// recvND hands neighbour discovery from the fabric to neigh (NS and NA) or to the kernel (the rest).
func (f *Interface) recvND(from encap.LinkAddr, pkt []byte) {
	switch nd.KindOf(pkt) {
	case nd.None:
		f.count(dropFrame)
	case nd.NeighborSolicitation, nd.NeighborAdvertisement:
		f.neighStep(neigh.RecvND{From: from, Payload: pkt})
	default:
		dst, _ := ip.Dst(pkt)
		if !f.group.Table().Wanted(dst) {
			f.count(dropNotWanted)
			return
		}
		// An MTU option in an RA passes through: accept_ra_mtu is 0.
		out, _, _, err := nd.StripLink(nil, pkt)
		if err != nil {
			f.count(dropFrame)
			return
		}
		f.count(nRouterIn)
		f.do(WriteTUN{IP: out})
	}
}
