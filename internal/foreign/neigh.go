package foreign

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"time"

	"ipoibcm/group"
	"ipoibcm/ib"
	"ipoibcm/wire/arp"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/ip"
	"ipoibcm/wire/nd"
)

// A neighbour is an entry of the host's cache. The link-layer address includes the
// flags: to Linux an address with other flags is another neighbour (ipoib_main.c).
type neighbour struct {
	addr     netip.Addr
	link     encap.LinkAddr
	known    bool
	queue    [][]byte
	asked    int
	deadline time.Time
}

// Output sends an IP packet of the host.
func (p *Peer) Output(pkt []byte) {
	dst, _ := ip.Dst(pkt)
	if ip.IsGroup(dst) {
		if g, ok := group.MGID(dst, ib.DefaultPKey, 2); ok {
			p.sendUD(encap.LinkAddr{QPN: ib.QPNMulticast, GID: g}, Frame(pkt))
		}
		return
	}
	n := p.neighbour(dst)
	if !n.known {
		if len(n.queue) < maxQueue {
			n.queue = append(n.queue, pkt)
		} else {
			p.Count["dropped unresolved"]++
		}
		if n.deadline.IsZero() {
			n.asked = 0
			p.ask(n)
		}
		return
	}
	p.send(n, pkt)
}

func (p *Peer) neighbour(a netip.Addr) *neighbour {
	n := p.neighs[a]
	if n == nil {
		n = &neighbour{addr: a}
		p.neighs[a] = n
		p.order = append(p.order, n)
	}
	return n
}

// own returns the peer's own address of the family of a.
func (p *Peer) own(a netip.Addr) netip.Addr {
	i := slices.IndexFunc(p.opt.Addrs, func(b netip.Addr) bool { return a.Is4() == b.Is4() })
	if i < 0 {
		return netip.Addr{}
	}
	return p.opt.Addrs[i]
}

func (p *Peer) ask(n *neighbour) {
	n.asked++
	n.deadline = p.now().Add(askEvery)
	if n.addr.Is4() {
		p.sendARP(encap.LinkAddr{QPN: ib.QPNMulticast, GID: group.BroadcastGID(ib.DefaultPKey, 2)},
			arp.NewRequest(p.link, p.own(n.addr), n.addr))
		return
	}
	b, err := nd.NewNS(p.own(n.addr), n.addr, p.link).AppendBinary(nil)
	if g, ok := group.MGID(ip.SolicitedNode(n.addr), ib.DefaultPKey, 2); ok && err == nil {
		p.sendUD(encap.LinkAddr{QPN: ib.QPNMulticast, GID: g}, Frame(b))
	}
}

func (p *Peer) askAgain(n *neighbour) {
	if n.asked < maxAsked {
		p.ask(n)
		return
	}
	n.deadline, n.queue = time.Time{}, nil
}

// Probe asks the neighbour with address a whether it is still there, with a
// unicast NS. The host sends it as it sends any other packet to a, over a connection
// if there is one (ipoib_main.c).
func (p *Peer) Probe(a netip.Addr) {
	n := p.neighs[a]
	if n == nil || !n.known {
		p.tell("%v is not resolved", a)
		return
	}
	if b, err := nd.NewProbe(p.own(a), a, p.link).AppendBinary(nil); err == nil {
		p.send(n, b)
	}
}

// ProbeARP sends an ARP request for a on the connection to a, which is never right.
func (p *Peer) ProbeARP(a netip.Addr) {
	if c := p.tx(p.neighbour(a).link); c != nil && c.state == stateUp {
		b, _ := arp.NewRequest(p.link, p.own(a), a).AppendBinary(nil)
		p.port.SendConn(c.qpn, append([]byte{byte(encap.ARP >> 8), byte(encap.ARP & 0xff), 0, 0}, b...))
	}
}

// SendOwn sends an IP packet on the connection that the peer itself has opened
// to a port; it reports whether there is one.
func (p *Peer) SendOwn(to ib.GID, pkt []byte) bool { return p.sendOn(true, to, pkt) }

// SendBack sends an IP packet on the connection that the port has opened; it reports
// whether there is one. No known implementation does that, but one may.
func (p *Peer) SendBack(to ib.GID, pkt []byte) bool { return p.sendOn(false, to, pkt) }

func (p *Peer) sendOn(active bool, to ib.GID, pkt []byte) bool {
	c := p.find(func(c *conn) bool {
		return c.active == active && c.state == stateUp && !c.lingering && c.link.GID == to
	})
	if c != nil {
		p.port.SendConn(c.qpn, Frame(pkt))
	}
	return c != nil
}

// learn notes a neighbour's link-layer address, and sends what waits for it. Only an
// answer makes WinOFED connect, and only if the flags are 0x80 and nothing else
// (ulp/ipoib of WinOFED).
func (p *Peer) learn(a netip.Addr, link encap.LinkAddr, answer bool) {
	p.endpoints[link.GID] = link.QPN
	n := p.neighbour(a)
	if p.prof.onAnswer && !answer && !n.known {
		return
	}
	n.link, n.known, n.deadline = link, true, time.Time{}
	if p.prof.onAnswer && answer && link.Flags == encap.FlagRC && p.tx(link) == nil {
		p.connect(link)
	}
	queue := n.queue
	n.queue = nil
	for _, pkt := range queue {
		p.send(n, pkt)
	}
}

// send sends a packet to a neighbour whose link-layer address is known.
func (p *Peer) send(n *neighbour, pkt []byte) {
	c := p.tx(n.link)
	if c == nil && !p.prof.onAnswer && n.link.Flags&encap.FlagRC != 0 {
		if p.now().Before(p.sulkUntil) {
			p.Count["dropped sulking"]++
			return
		}
		c = p.connect(n.link)
	}
	switch {
	case c != nil && c.state == stateUp && !c.lingering:
		p.sendConn(c, pkt)
	case c != nil && c.state == stateUp:
		p.Count["dropped lingering"]++ // into a queue pair that the peer has given up
	case c != nil && !p.prof.fallback:
		if len(c.queue) < maxQueue {
			c.queue = append(c.queue, pkt)
		} else {
			p.Count["dropped connecting"]++
		}
	case len(pkt) <= p.opt.UDMTU:
		p.sendUD(n.link, Frame(pkt))
	default:
		p.Count["dropped too big for UD"]++
	}
}

func (p *Peer) sendConn(c *conn, pkt []byte) {
	if p.prof.readsMTU && len(pkt)+encap.HeaderLen > int(c.max) {
		p.Count["dropped too big"]++
		return
	}
	c.used = p.now()
	p.setIdle(c)
	p.Count["sent by connection"]++
	p.port.SendConn(c.qpn, Frame(pkt))
}

func (p *Peer) sendUD(to encap.LinkAddr, fr []byte) {
	p.Count["sent by UD"]++
	p.port.SendUD(to, fr)
}

func (p *Peer) sendARP(to encap.LinkAddr, m arp.Packet) {
	b, err := m.AppendBinary([]byte{byte(encap.ARP >> 8), byte(encap.ARP & 0xff), 0, 0})
	if err == nil {
		p.sendUD(to, b)
	}
}

// RecvUD takes a frame from the UD QP.
func (p *Peer) RecvUD(from encap.LinkAddr, fr []byte) { p.recv(fr, false) }

// RecvConn takes a frame from a connection.
func (p *Peer) RecvConn(qpn ib.QPN, fr []byte) {
	c := p.byQPN(qpn)
	switch {
	case c == nil:
		return
	case c.active:
		// Linux posts no receives there, and does not survive a frame that arrives
		// (ipoib_cm.c).
		p.die("a frame on the connection that it opened itself, QPN %v", qpn)
		return
	case len(fr) > int(p.opt.ReceiveMTU):
		p.die("%d octets on a connection, more than it announced", len(fr))
		return
	}
	c.used = p.now()
	p.established(c) // data stands for an RTU
	p.setIdle(c)
	p.recv(fr, true)
}

func (p *Peer) recv(fr []byte, connected bool) {
	if len(fr) < encap.HeaderLen {
		return
	}
	b := fr[encap.HeaderLen:]
	switch encap.EtherType(binary.BigEndian.Uint16(fr)) {
	case encap.ARP:
		var m arp.Packet
		if m.UnmarshalBinary(b) == nil {
			p.recvARP(m)
		}
	case encap.IPv6:
		if nd.KindOf(b) != nd.None {
			p.recvND(b, connected)
			return
		}
		fallthrough
	case encap.IPv4:
		if dst, ok := ip.Dst(b); ok && slices.Contains(p.opt.Addrs, dst) {
			p.port.Deliver(b)
		}
	}
}

func (p *Peer) recvARP(m arp.Packet) {
	toUs := slices.Contains(p.opt.Addrs, m.TargetIP)
	switch {
	case m.IsProbe():
	case m.Op == arp.Reply && toUs:
		p.learn(m.SenderIP, m.Sender, true)
	case toUs || p.neighs[m.SenderIP] != nil && p.neighs[m.SenderIP].known:
		p.learn(m.SenderIP, m.Sender, false)
	default:
		p.endpoints[m.Sender.GID] = m.Sender.QPN
	}
	if m.Op == arp.Request && toUs && !m.IsAnnouncement() {
		p.sendARP(m.Sender, m.ReplyFrom(p.link))
	}
}

func (p *Peer) recvND(b []byte, connected bool) {
	p.Count[map[bool]string{true: "nd by connection", false: "nd by UD"}[connected]]++
	switch nd.KindOf(b) {
	case nd.NeighborSolicitation:
		var m nd.NS
		if m.UnmarshalBinary(b) != nil || m.IsDAD() || !slices.Contains(p.opt.Addrs, m.Target) {
			return
		}
		if m.HasLink {
			p.learn(m.Src, m.Link, false)
		}
		na, err := m.Answer(p.link, false).AppendBinary(nil)
		if n := p.neighs[m.Src]; n != nil && n.known && err == nil {
			p.send(n, na)
		}
	case nd.NeighborAdvertisement:
		var m nd.NA
		if m.UnmarshalBinary(b) == nil && p.neighs[m.Target] != nil {
			p.Count["advertisements"]++
			if m.HasLink {
				p.learn(m.Target, m.Link, false)
			}
		}
	}
}

// Frame puts the encapsulation header before an IP packet.
func Frame(pkt []byte) []byte {
	t := encap.IPv4
	if ip.Version(pkt) == 6 {
		t = encap.IPv6
	}
	b, _ := encap.Header{Type: t}.AppendBinary(make([]byte, 0, encap.HeaderLen+len(pkt)))
	return append(b, pkt...)
}
