package neigh

import (
	"net/netip"
	"time"

	"ipoibcm/rtnl"
	"ipoibcm/wire/arp"
	"ipoibcm/wire/encap"
)

func (t *Table) sendARP(dst []Action, p arp.Packet, to Dest) []Action {
	b, err := p.AppendBinary(make([]byte, 0, arp.Len))
	if err != nil {
		panic("neigh: " + err.Error()) // only IPv4 comes here
	}
	return append(dst, SendUD{To: to, EtherType: encap.ARP, Payload: b})
}

func (t *Table) recvARP(dst []Action, now time.Time, from encap.LinkAddr, b []byte) []Action {
	var p arp.Packet
	if p.UnmarshalBinary(b) != nil {
		return t.refuse(dst, DropMalformed, netip.Addr{}, encap.LinkAddr{}, from)
	}
	if p.Op == arp.Request {
		t.n.RecvQueries++
	} else {
		t.n.RecvAnswers++
	}
	probe := p.IsProbe()
	if !validLink(p.Sender) || !probe && !unicast(p.SenderIP) {
		return t.refuse(dst, DropBadSender, p.SenderIP, p.Sender, from)
	}
	dst, done := t.disputed(dst, now, p.SenderIP, p.Sender, from)
	if done {
		return dst
	}
	// RFC 826: the sender's pair updates what we know, whatever the packet is.
	known := false
	if e := t.entries[p.SenderIP]; e != nil && !probe {
		known = true
		dst = t.known(dst, now, e, p.Sender, p.Op == arp.Reply && p.Target.Key() == t.link.Key())
	}
	if p.Op == arp.Request && p.SenderIP != p.TargetIP {
		dst = t.asks(dst, now, p.TargetIP, p.Sender)
	}
	if p.Op == arp.Reply {
		if !known {
			t.drop(DropUnsolicited)
		}
		return dst
	}
	return t.answerARP(dst, now, p, known)
}

func (t *Table) answerARP(dst []Action, now time.Time, p arp.Packet, known bool) []Action {
	o := t.own[p.TargetIP]
	if o == nil {
		dst, as := t.others(dst, now, p.TargetIP, question{arp: p})
		if as != rtnl.AnswerNot {
			return t.answerOtherARP(dst, now, p, as)
		}
		if !known {
			t.drop(DropNotForUs)
		}
		return dst
	}
	if why, ok := t.limit.allow(now, p.Sender); !ok {
		t.drop(why)
		return dst
	}
	probe := p.IsProbe()
	if probe && o.detecting() {
		// Both hosts look for duplicates at the same time: neither may have the address
		// (RFC 5227 section 2.1.1).
		return t.claimed(dst, now, o, p.Sender)
	}
	if o.state == AddrDuplicate {
		if !probe && p.Sender.Key() == o.by.Key() {
			return t.released(dst, now, o) // a host that has the address does not ask for it
		}
		t.drop(DropDuplicate)
		return dst
	}
	if probe {
		o.contested = now
	}
	if !known && !probe {
		// A host that asks for us is about to talk to us (RFC 826).
		dst = t.learn(dst, now, p.SenderIP, p.Sender)
	}
	t.n.Answers++
	return t.sendARP(dst, p.ReplyFrom(t.link), Dest{LinkAddr: p.Sender})
}
