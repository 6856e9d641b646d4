package ipoib

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"ipoibcm/ib"
	"ipoibcm/nexthop"
	"ipoibcm/wire/arp"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/ip"
	"ipoibcm/wire/mad"
	"ipoibcm/wire/nd"
)

// What a scene shows.

// say adds a line, and before it the time if that is another than of the line before.
func (s *scene) say(format string, args ...any) {
	if d := s.w.now.Sub(s.at); d >= time.Millisecond {
		s.at = s.w.now
		s.out = append(s.out, fmt.Sprintf("at +%v", s.at.Sub(s.start).Round(time.Millisecond)))
	}
	s.out = append(s.out, fmt.Sprintf(format, args...))
}

// message shows a CM message, and decides whether it is lost.
func (s *scene) message(from *node, m mad.Message) (lost bool) {
	s.w.madDelay = 0
	more := ""
	if name, ok := s.sent[m]; ok && name == from.name {
		more += ", again"
	}
	s.sent[m] = from.name
	if n := len(from.inband); n > s.inband[from] {
		s.inband[from] = n
		more += ", in-band"
	}
	for i, x := range s.fates {
		if x.from != "any" && x.from != from.name || x.what != "all" && x.what != m.Attr().String() {
			continue
		}
		if !x.every {
			s.fates = slices.Delete(s.fates, i, i+1)
		}
		if s.w.madDelay, lost = x.delay, x.lost; lost {
			more += ": lost"
		} else {
			more += fmt.Sprintf(": %v late", x.delay)
		}
		break
	}
	s.say("%s > %s %s%s", from.name, s.w.to.name, s.content(from, m), more)
	return lost
}

// content is what counts of a message.
func (s *scene) content(from *node, m mad.Message) string {
	switch m := m.(type) {
	case mad.REQ:
		return fmt.Sprintf("REQ %v %v qp=%s path=%d%s", m.ServiceID, m.Transport, s.qp(from, m.LocalQPN),
			m.PathMTU.Octets(), receiveMTU(m.PrivateData[:]))
	case mad.REP:
		return fmt.Sprintf("REP qp=%s%s", s.qp(from, m.LocalQPN), receiveMTU(m.PrivateData[:]))
	case mad.REJ:
		return fmt.Sprintf("REJ %d of %v, %v%s", m.Reason, m.MessageRejected, m.Reason, noPrivate(m.PrivateData[:]))
	}
	return m.Attr().String()
}

// receiveMTU shows the private data of a REQ or a REP. Its UD QPN is checked for
// every message (checkMAD).
func receiveMTU(b []byte) string {
	var p encap.PrivateData
	if p.UnmarshalBinary(b) != nil || p.IsZero() {
		return noPrivate(nil)
	}
	return fmt.Sprintf(" mtu=%d", p.ReceiveMTU)
}

// noPrivate says that there is no private data.
func noPrivate(b []byte) string {
	if bytes.ContainsFunc(b, func(r rune) bool { return r != 0 }) {
		return ""
	}
	return ", without private data"
}

// qp names the queue pairs of a host in the order in which messages name them: a1, a2.
func (s *scene) qp(n *node, q ib.QPN) string {
	i := slices.Index(s.qps[n], q)
	if i < 0 {
		i = len(s.qps[n])
		s.qps[n] = append(s.qps[n], q)
	}
	return fmt.Sprint(n.name, i+1)
}

// frame shows ARP and ND.
func (s *scene) frame(from *node, conn bool, fr []byte) {
	to := "all"
	if s.w.to != nil {
		to = s.w.to.name
	}
	pkt := fr[encap.HeaderLen:]
	if encap.EtherType(binary.BigEndian.Uint16(fr)) == encap.ARP {
		var p arp.Packet
		switch err := p.UnmarshalBinary(pkt); {
		case err != nil:
			s.w.Fatalf("%s sends ARP that cannot be read: %v", from.name, err)
		case p.IsProbe():
			s.say("%s > %s ARP probe %v", from.name, to, p.TargetIP)
		case p.IsAnnouncement():
			s.say("%s > %s ARP announcement %v", from.name, to, p.SenderIP)
		case p.Op == arp.Request:
			s.say("%s > %s ARP request %v", from.name, to, p.TargetIP)
		default:
			s.say("%s > %s ARP reply %v", from.name, to, p.SenderIP)
		}
		return
	}
	switch nd.KindOf(pkt) {
	case nd.NeighborSolicitation:
		var m nd.NS
		if m.UnmarshalBinary(pkt) == nil && !m.Target.IsLinkLocalUnicast() {
			s.say("%s > %s NS %v", from.name, to, m.Target)
		}
	case nd.NeighborAdvertisement:
		var m nd.NA
		if m.UnmarshalBinary(pkt) == nil && !m.Target.IsLinkLocalUnicast() {
			s.say("%s > %s NA %v", from.name, to, m.Target)
		}
	}
}

// packet shows what arrives at the IP layer of a host. conn is zero for UD, and for what
// the machine itself gave its kernel.
func (s *scene) packet(to *node, conn nexthop.Conn, pkt []byte) {
	by := " by UD"
	if q := to.qps[conn]; q != nil {
		by = " on " + s.qp(to, q.qpn)
	} else if to.legacy != nil {
		by = "" // it does not tell
	}
	for _, p := range s.pings {
		if bytes.Equal(p.pkt, pkt) {
			s.say("%s receives %d octets from %s%s", to.name, len(pkt), p.from.name, by)
			return
		}
	}
	src, _ := ip.Src(pkt)
	dst, _ := ip.Dst(pkt)
	switch {
	case dst.IsMulticast():
	case pkt[0]>>4 == 4 && pkt[9] == 1 && pkt[20] == 3 && pkt[6]&0x3f == 0 && pkt[7] == 0:
		text := fmt.Sprintf("%s receives ICMP %d/%d from %v", to.name, pkt[20], pkt[21], src)
		if pkt[21] == 4 {
			text += fmt.Sprintf(", MTU %d", binary.BigEndian.Uint16(pkt[26:]))
		}
		s.say("%s", text)
	default:
		s.say("%s receives a fragment of %d octets from %v%s", to.name, len(pkt), src, by)
	}
}

// note shows why a host does something.
func (s *scene) note(n *node, a Note) {
	switch a.Kind {
	case NoteCrossing, NoteConn:
		s.say("%s: %s", n.name, drawn.ReplaceAllString(a.Text, ""))
	}
}

// show shows the connections and host routes of a host. Nothing means that nothing is left
// of any connection.
func (s *scene) show(n *node) {
	if n.legacy != nil {
		if own, peers := n.legacy.p.Up(); len(own)+len(peers) > 0 {
			s.say("%s conns dialled=%d accepted=%d", n.name, len(own), len(peers))
		}
		return
	}
	qps := len(n.qps)
	for _, c := range n.f.Conns() {
		q := n.qps[c.Conn]
		text := fmt.Sprintf("%s conn %s %s %v %s", n.name, s.hostOf(c.Peer), c.State, c.Transport, c.Class)
		if q == nil {
			s.say("%s without a QP", text)
			continue
		}
		qps--
		for _, flag := range []struct {
			on   bool
			name string
		}{{c.Active, "active"}, {!c.Active, "passive"}, {c.Tx, "tx"}, {c.Rx, "rx"}} {
			if flag.on {
				text += " " + flag.name
			}
		}
		s.say("%s mtu=%d path=%d %s-%s%s", text, c.MTU, q.pathMTU.Octets(), s.qp(n, c.LocalQPN), s.remote(c), addresses(c))
	}
	if qps != 0 {
		s.say("%s %d QPs without a connection", n.name, qps)
	}
	if left := len(n.dests) + len(n.paths) + len(n.joined); !n.f.up && left > 0 {
		s.say("%s is down, with %d destinations, %d paths and %d groups", n.name, len(n.dests), len(n.paths), len(n.joined))
	}
	if n.f.shutdown && !n.f.Deadline().IsZero() {
		s.say("%s has ended, with a deadline", n.name)
	}
	routes := n.hostRoutes()
	var to []netip.Addr
	for a := range routes {
		to = append(to, a)
	}
	slices.SortFunc(to, netip.Addr.Compare)
	for _, a := range to {
		s.say("%s route %v mtu=%d", n.name, a, routes[a])
	}
}

func addresses(c ConnInfo) string {
	if len(c.Addrs) == 0 {
		return ""
	}
	return " for " + strings.Trim(fmt.Sprint(c.Addrs), "[]")
}

// hostOf names the host at a link-layer address.
func (s *scene) hostOf(l encap.LinkAddr) string {
	for _, n := range s.w.nodes {
		if n.opt.Link.GID == l.GID && n.opt.Link.QPN == l.QPN {
			return n.name
		} else if n.opt.Link.GID == l.GID {
			return n.name + " of before"
		}
	}
	return l.String()
}

// remote names the queue pair at the other end of a connection.
func (s *scene) remote(c ConnInfo) string {
	for _, n := range s.w.nodes {
		if n.opt.Link.GID == c.Peer.GID && c.RemoteQPN != 0 {
			return s.qp(n, c.RemoteQPN)
		}
	}
	return "none"
}

// list shows the peers of a host, its addresses, or its data path.
func (s *scene) list(what, host string) error {
	n, err := s.node(host)
	if err != nil {
		return err
	}
	if what == "peers" {
		for _, m := range s.w.nodes {
			if p := n.f.peers.byLink[m.link()]; p != nil {
				s.say("%s %v", m.name, p.class)
			}
		}
		return nil
	}
	if what == "paths" {
		s.paths(n)
		return nil
	}
	for _, p := range n.addrs {
		if n.f.addrs.has(p.Addr()) {
			s.say("%v", p)
		}
	}
	return nil
}

// paths shows the data path of a host: to which next hop packets to an address go, and by what.
func (s *scene) paths(n *node) {
	var lines []string
	for flow, hop := range n.dests {
		p := n.paths[hop]
		by := p.Kind.String()
		if q := n.qps[p.Conn]; q != nil {
			by = "on " + s.qp(n, q.qpn)
		}
		lines = append(lines, fmt.Sprintf("%v next hop %v %s mtu=%d", flow.Dst, hop, by, p.MTU))
	}
	slices.Sort(lines)
	for _, l := range lines {
		s.say("%s", l)
	}
}

// counters shows the counters of a host that begin with one of names.
func (s *scene) counters(host string, names []string) error {
	n, err := s.node(host)
	if err != nil {
		return err
	}
	all := append(n.f.Counters(), Counter{Name: "kernel_flushes", Value: uint64(n.k.Flushed)})
	for _, c := range all {
		if c.Value != 0 && slices.ContainsFunc(names, func(name string) bool { return strings.HasPrefix(c.Name, name) }) {
			s.say("%s %d", c.Name, c.Value)
		}
	}
	return nil
}

// explain shows how a host sends to an address, as the agent tells it.
func (s *scene) explain(host, dst string) error {
	n, err := s.node(host)
	if err != nil {
		return err
	}
	if dst, err = s.addr(dst); err != nil {
		return err
	}
	e := n.explain(ip4(dst))
	s.say("%s by %s, next hop %v, MTU %d, class %v", dst, e.Mode, e.NextHop, e.Path.MTU, e.Class)
	if p := n.f.hops.peers[e.NextHop]; p != nil && p.diagnostics().verdict != "" {
		s.say("%s", p.diagnostics().verdict)
	}
	if e.LastREJ != "" {
		s.say("last REJ: %s", e.LastREJ)
	}
	return nil
}
