package neigh

import (
	"cmp"
	"net/netip"

	"ipoibcm/rtnl"
	"ipoibcm/wire/arp"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/ip"
	"ipoibcm/wire/nd"
)

// sendQuery asks for target from own address a, by ARP or by a solicitation. A solicitation for
// resolution is sent to the broadcast-GID (RFC 4755 section 3) although its IPv6 destination is the
// solicited-node group.
func (t *Table) sendQuery(a *ownAddr, target netip.Addr, to Dest) {
	if target.Is4() {
		t.send(encap.ARP, arp.NewRequest(t.link, a.ip, target), to)
		return
	}
	m := nd.NewNS(a.ip, target, t.link)
	if !to.Broadcast {
		m = nd.NewProbe(a.ip, target, t.link)
	}
	if a.state == AddrOptimistic {
		// RFC 4429 section 3.2: we must not overwrite the entry of the rightful owner at other
		// hosts. They answer to the source of the packet, or ask for our address themselves.
		m.Link, m.HasLink = encap.LinkAddr{}, false
	}
	t.send(encap.IPv6, m, to)
}

func (t *Table) recvND(from encap.LinkAddr, b []byte) {
	switch nd.KindOf(b) {
	case nd.NeighborSolicitation:
		t.n.RecvQueries++
		var m nd.NS
		if m.UnmarshalBinary(b) == nil {
			t.recvNS(from, m)
			return
		}
	case nd.NeighborAdvertisement:
		t.n.RecvAnswers++
		var m nd.NA
		if m.UnmarshalBinary(b) == nil {
			t.recvNA(from, m)
			return
		}
	}
	t.refuse(DropMalformed, netip.Addr{}, encap.LinkAddr{}, from)
}

// foreign reports whether a frame must be dropped, and why. link is the sender that the message
// names, zero if it names none; from is the source of the packet. A frame is dropped if one of the
// two is our own address, or if both are known and differ.
func (t *Table) foreign(link, from encap.LinkAddr) (Drop, bool) {
	hasLink, hasFrom := !link.IsZero(), !from.GID.IsZero()
	switch own := t.link.Key(); {
	case hasLink && link.Key() == own || hasFrom && from.Key() == own:
		return DropReflected, true
	case hasLink && hasFrom && link.Key() != from.Key():
		return DropSpoofed, true
	}
	return 0, false
}

// disputed checks a message that claims that a is at link. It handles the message, and returns
// true, if foreign drops it or if a is an own address: the caller must ignore the rest of the
// message.
func (t *Table) disputed(a netip.Addr, link, from encap.LinkAddr) bool {
	if why, bad := t.foreign(link, from); bad {
		t.refuse(why, a, link, from)
		return true
	}
	o := t.own[a]
	if o == nil {
		return false
	}
	// A host that sends from our address claims it: so RFC 5227 section 2.4 for ARP.
	t.claimed(o, cmp.Or(link, from))
	return true
}

// refuse drops the claim that a is at link. from is the source of the packet.
func (t *Table) refuse(why Drop, a netip.Addr, link, from encap.LinkAddr) {
	t.drop(why)
	if why != DropReflected { // that is no false claim, and as frequent as our own broadcasts
		t.act(Refused{IP: a, Claimed: link, From: from, Reason: why})
	}
}

func (t *Table) recvNS(from encap.LinkAddr, m nd.NS) {
	if m.HasLink && !validLink(m.Link) || !m.IsDAD() && !unicast(m.Src) || !unicast(m.Target) {
		t.refuse(DropBadSender, m.Src, m.Link, from)
		return
	}
	if t.disputed(m.Src, m.Link, from) {
		return
	}
	e := t.entries[m.Src]
	if e != nil && m.HasLink {
		t.known(e, m.Link, false)
	}
	q := question{ns: m, from: from}
	t.asks(m.Target, q.by())
	o := t.own[m.Target]
	if o == nil {
		if t.others(m.Target, q) != rtnl.AnswerNot {
			t.answerOtherNS(q)
		} else if e == nil || !m.HasLink {
			t.drop(DropNotForUs)
		}
		return
	}
	if t.answers(o, q.by(), m.IsDAD()) { // a solicitation that looks for duplicates names no link-layer address
		t.answerNS(q, o)
	}
}

// answerNS answers q for o. It reports whether it knew where to send the answer.
func (t *Table) answerNS(q question, o *ownAddr) bool {
	na := q.ns.Answer(t.link, t.router)
	if o.state == AddrOptimistic {
		na.Override = false // RFC 4429 section 3.3
	}
	e := t.entries[q.ns.Src]
	to := Dest{LinkAddr: q.ns.Link}
	switch {
	case q.ns.IsDAD():
		to = Dest{Group: ip.AllNodes} // the asker has no address yet
	case q.ns.HasLink:
		if e == nil {
			t.learn(q.ns.Src, q.ns.Link)
		}
	case e != nil && e.state.Known():
		to.LinkAddr = e.link
	case validLink(q.from):
		to.LinkAddr = q.from // an optimistic asker does not name its link-layer address
	default:
		t.drop(DropNoLinkAddr)
		return false
	}
	t.n.Answers++
	t.send(encap.IPv6, na, to)
	return true
}

// learn makes an entry for a host that has asked for us, because we are likely to talk to it soon.
func (t *Table) learn(a netip.Addr, link encap.LinkAddr) {
	if e := t.add(a, true); e != nil {
		t.known(e, link, false)
	} else {
		t.drop(DropLearnFull)
	}
}

// recvNA follows RFC 4861 section 7.2.5.
func (t *Table) recvNA(from encap.LinkAddr, m nd.NA) {
	if m.HasLink && !validLink(m.Link) || !unicast(m.Src) || !unicast(m.Target) {
		t.refuse(DropBadSender, m.Target, m.Link, from)
		return
	}
	if t.disputed(m.Target, m.Link, from) {
		return
	}
	e := t.entries[m.Target]
	switch {
	case e == nil:
		t.drop(DropUnsolicited)
		return
	case !m.HasLink && !e.state.Known():
		t.drop(DropNoLinkAddr)
		return
	case !m.HasLink:
		if why, bad := t.foreign(e.link, from); bad {
			t.refuse(why, m.Target, e.link, from)
			return
		}
		m.Link = e.link
	case e.state.Known() && m.Link.Key() != e.link.Key() && !m.Override:
		// If only the flags differ the link-layer address is the same: override does not matter
		// then.
		t.refuse(DropNotOverride, m.Target, m.Link, from)
		if e.state == StateReachable {
			t.setState(e, StateStale)
		}
		return
	}
	t.known(e, m.Link, m.Solicited)
	switch {
	case m.Link.Key() == e.link.Key(): // not a claim that was refused
		e.router = m.Router
	case e.rival != nil && m.Link == e.rival.link:
		e.rival.router = m.Router
	}
}
