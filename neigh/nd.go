package neigh

import (
	"net/netip"
	"time"

	"ipoibcm/rtnl"
	"ipoibcm/wire/arp"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/ip"
	"ipoibcm/wire/nd"
)

func (t *Table) sendNS(dst []Action, m nd.NS, to Dest) []Action {
	b, err := m.AppendBinary(nil)
	if err != nil {
		panic("neigh: " + err.Error()) // only IPv6 comes here
	}
	return append(dst, SendUD{To: to, EtherType: encap.IPv6, Payload: b})
}

func (t *Table) sendNA(dst []Action, m nd.NA, to Dest) []Action {
	b, err := m.AppendBinary(nil)
	if err != nil {
		panic("neigh: " + err.Error())
	}
	return append(dst, SendUD{To: to, EtherType: encap.IPv6, Payload: b})
}

// sendQuery asks for target from own address a, by ARP or by a solicitation. A solicitation for
// resolution is sent to the broadcast-GID (RFC 4755 section 3) although its IPv6 destination is the
// solicited-node group.
func (t *Table) sendQuery(dst []Action, a *ownAddr, target netip.Addr, to Dest) []Action {
	if target.Is4() {
		return t.sendARP(dst, arp.NewRequest(t.link, a.ip, target), to)
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
	return t.sendNS(dst, m, to)
}

func (t *Table) recvND(dst []Action, now time.Time, from encap.LinkAddr, b []byte) []Action {
	switch nd.KindOf(b) {
	case nd.NeighborSolicitation:
		t.n.RecvQueries++
		var m nd.NS
		if m.UnmarshalBinary(b) == nil {
			return t.recvNS(dst, now, from, m)
		}
	case nd.NeighborAdvertisement:
		t.n.RecvAnswers++
		var m nd.NA
		if m.UnmarshalBinary(b) == nil {
			return t.recvNA(dst, now, from, m)
		}
	}
	return t.refuse(dst, DropMalformed, netip.Addr{}, encap.LinkAddr{}, from)
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

// disputed checks a message that claims that a is at link. If foreign drops the message, or if a is
// an own address, disputed handles it and returns done: the caller must ignore the rest of the
// message.
func (t *Table) disputed(dst []Action, now time.Time, a netip.Addr, link, from encap.LinkAddr) (_ []Action, done bool) {
	if why, bad := t.foreign(link, from); bad {
		return t.refuse(dst, why, a, link, from), true
	}
	o := t.own[a]
	if o == nil {
		return dst, false
	}
	// A host that sends from our address claims it: so RFC 5227 section 2.4 for ARP.
	if link.IsZero() {
		link = from
	}
	return t.claimed(dst, now, o, link), true
}

// refuse drops the claim that a is at link. from is the source of the packet.
func (t *Table) refuse(dst []Action, why Drop, a netip.Addr, link, from encap.LinkAddr) []Action {
	t.drop(why)
	if why == DropReflected {
		return dst // it is no false claim, and as frequent as our own broadcasts
	}
	return append(dst, Refused{IP: a, Claimed: link, From: from, Reason: why})
}

func (t *Table) recvNS(dst []Action, now time.Time, from encap.LinkAddr, m nd.NS) []Action {
	if m.HasLink && !validLink(m.Link) || !m.IsDAD() && !unicast(m.Src) || !unicast(m.Target) {
		return t.refuse(dst, DropBadSender, m.Src, m.Link, from)
	}
	dst, done := t.disputed(dst, now, m.Src, m.Link, from)
	if done {
		return dst
	}
	e := t.entries[m.Src]
	if e != nil && m.HasLink {
		dst = t.known(dst, now, e, m.Link, false)
	}
	by := from
	if m.HasLink {
		by = m.Link
	}
	dst = t.asks(dst, now, m.Target, by)
	o := t.own[m.Target]
	if o == nil {
		q := question{ns: m, from: from}
		dst, as := t.others(dst, now, m.Target, q)
		if as != rtnl.AnswerNot {
			return t.answerOtherNS(dst, now, q)
		}
		if e == nil || !m.HasLink {
			t.drop(DropNotForUs)
		}
		return dst
	}
	if why, ok := t.limit.allow(now, by); !ok {
		t.drop(why)
		return dst
	}
	if m.IsDAD() && o.detecting() {
		return t.claimed(dst, now, o, from) // RFC 4862 section 5.4.3
	}
	if o.state == AddrDuplicate {
		if !m.IsDAD() && by.Key() == o.by.Key() {
			return t.released(dst, now, o) // a host that has the address does not ask for it
		}
		t.drop(DropDuplicate)
		return dst
	}
	if m.IsDAD() {
		o.contested = now
	}
	return t.answerNS(dst, now, from, m, e, o)
}

func (t *Table) answerNS(dst []Action, now time.Time, from encap.LinkAddr, m nd.NS, e *entry, o *ownAddr) []Action {
	na := m.Answer(t.link, t.router)
	if o.state == AddrOptimistic {
		na.Override = false // RFC 4429 section 3.3
	}
	to := Dest{LinkAddr: m.Link}
	switch {
	case m.IsDAD():
		to = Dest{Group: ip.AllNodes} // the asker has no address yet
	case m.HasLink:
		if e == nil {
			dst = t.learn(dst, now, m.Src, m.Link)
		}
	case e != nil && e.state.Known():
		to.LinkAddr = e.link
	case validLink(from):
		to.LinkAddr = from // an optimistic asker does not name its link-layer address
	default:
		t.drop(DropNoLinkAddr)
		return dst
	}
	t.n.Answers++
	return t.sendNA(dst, na, to)
}

// learn makes an entry for a host that has asked for us, because we are likely to talk to it soon.
func (t *Table) learn(dst []Action, now time.Time, a netip.Addr, link encap.LinkAddr) []Action {
	dst, e := t.add(dst, a, true)
	if e == nil {
		t.drop(DropLearnFull)
		return dst
	}
	return t.known(dst, now, e, link, false)
}

// recvNA follows RFC 4861 section 7.2.5.
func (t *Table) recvNA(dst []Action, now time.Time, from encap.LinkAddr, m nd.NA) []Action {
	if m.HasLink && !validLink(m.Link) || !unicast(m.Src) || !unicast(m.Target) {
		return t.refuse(dst, DropBadSender, m.Target, m.Link, from)
	}
	dst, done := t.disputed(dst, now, m.Target, m.Link, from)
	if done {
		return dst
	}
	e := t.entries[m.Target]
	if e == nil {
		t.drop(DropUnsolicited)
		return dst
	}
	if !e.state.Known() {
		if !m.HasLink {
			t.drop(DropNoLinkAddr)
			return dst
		}
		e.router = m.Router
		return t.known(dst, now, e, m.Link, m.Solicited)
	}
	// If only the flags differ the link-layer address is the same: override does not matter
	// then.
	if m.HasLink && m.Link.Key() != e.link.Key() && !m.Override {
		dst = t.refuse(dst, DropNotOverride, m.Target, m.Link, from)
		if e.state == StateReachable {
			t.setState(now, e, StateStale)
		}
		return dst
	}
	e.router = m.Router
	link := e.link
	if m.HasLink {
		link = m.Link
	}
	return t.known(dst, now, e, link, m.Solicited)
}
