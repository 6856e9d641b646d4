package neigh

import (
	"encoding"
	"net/netip"

	"ipoibcm/rtnl"
	"ipoibcm/wire/arp"
	"ipoibcm/wire/encap"
)

// send sends message m of protocol as.
func (t *Table) send(as encap.EtherType, m encoding.BinaryAppender, to Dest) {
	b, err := m.AppendBinary(nil)
	if err != nil {
		panic("neigh: " + err.Error()) // an address of the other family
	}
	t.act(SendUD{To: to, EtherType: as, Payload: b})
}

func (t *Table) recvARP(from encap.LinkAddr, b []byte) {
	var p arp.Packet
	if p.UnmarshalBinary(b) != nil {
		t.refuse(DropMalformed, netip.Addr{}, encap.LinkAddr{}, from)
		return
	}
	if p.Op == arp.Request {
		t.n.RecvQueries++
	} else {
		t.n.RecvAnswers++
	}
	probe := p.IsProbe()
	if !validLink(p.Sender) || !probe && !unicast(p.SenderIP) {
		t.refuse(DropBadSender, p.SenderIP, p.Sender, from)
		return
	}
	if t.disputed(p.SenderIP, p.Sender, from) {
		return
	}
	// RFC 826: the sender's pair updates what we know, whatever the packet is.
	e := t.entries[p.SenderIP]
	known := e != nil && !probe
	if known {
		t.known(e, p.Sender, p.Op == arp.Reply && p.Target.Key() == t.link.Key())
	}
	if p.Op == arp.Reply {
		if !known {
			t.drop(DropUnsolicited)
		}
		return
	}
	if p.SenderIP != p.TargetIP {
		t.asks(p.TargetIP, p.Sender)
	}
	t.answerARP(p, known)
}

func (t *Table) answerARP(p arp.Packet, known bool) {
	o := t.own[p.TargetIP]
	if o == nil {
		if as := t.others(p.TargetIP, question{arp: p}); as != rtnl.AnswerNot {
			t.answerOtherARP(p, as)
		} else if !known {
			t.drop(DropNotForUs)
		}
		return
	}
	probe := p.IsProbe()
	if !t.answers(o, p.Sender, probe) {
		return
	}
	if !known && !probe {
		// A host that asks for us is about to talk to us (RFC 826).
		t.learn(p.SenderIP, p.Sender)
	}
	t.n.Answers++
	t.send(encap.ARP, p.ReplyFrom(t.link), Dest{LinkAddr: p.Sender})
}

// answers reports whether we answer a question for o from the host at by. probe says that the
// host looks for duplicates.
func (t *Table) answers(o *ownAddr, by encap.LinkAddr, probe bool) bool {
	switch {
	case !t.allowed(by):
	case probe && o.detecting():
		// Both hosts look for duplicates at the same time: neither may have the address (RFC 5227
		// section 2.1.1, RFC 4862 section 5.4.3).
		t.claimed(o, by)
	case o.state == AddrDuplicate && !probe && by.Key() == o.by.Key():
		t.released(o) // a host that has the address does not ask for it
	case o.state == AddrDuplicate:
		t.drop(DropDuplicate)
	default:
		if probe {
			o.contested = t.now
		}
		return true
	}
	return false
}

// allowed reports whether we act on one more request from the host at by. It counts one that is
// refused.
func (t *Table) allowed(by encap.LinkAddr) bool {
	why, ok := t.limit.allow(t.now, by)
	if !ok {
		t.drop(why)
	}
	return ok
}
