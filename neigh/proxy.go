package neigh

import (
	"cmp"
	"maps"
	"net/netip"
	"time"

	"ipoibcm/rtnl"
	"ipoibcm/wire/arp"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/nd"
)

const (
	// othersTime is how long an answer of the driver about an address holds. The kernel does not
	// notify us when the answer changes.
	othersTime = 5 * time.Second
	// maxOthers bounds the addresses for which we keep an answer, or wait for one.
	maxOthers = 1024
	// maxAsking bounds the questions that wait for the driver's answer about one address.
	maxAsking = 4
	// goneTime is how long we do not answer for an address that has just left the device.
	goneTime = time.Second
	// othersRate bounds the addresses per second about which we ask the driver.
	othersRate = 128
)

// An other is an address that is not on the device: another host asked for it, or it has just been
// removed.
type other struct {
	answer  rtnl.Answering
	asking  bool       // the driver has not answered yet
	until   time.Time  // when answer, or the question to the driver, is out of date
	waiting []question // for the driver's answer
}

// A question is an ARP request or a solicitation.
type question struct {
	arp  arp.Packet
	ns   nd.NS
	from encap.LinkAddr
}

// by returns the link-layer address of the host that sent a solicitation.
func (q question) by() encap.LinkAddr { return cmp.Or(q.ns.Link, q.from) }

// others returns how to answer a question for target, which is none of our addresses. If that is
// not known it returns AnswerNot and asks the driver; otherIs answers q later. Above maxAsking,
// maxOthers or othersRate nobody answers q.
func (t *Table) others(target netip.Addr, q question) rtnl.Answering {
	if !t.o.AskOthers || !unicast(target) {
		return rtnl.AnswerNot
	}
	if e := t.entries[target]; e != nil && e.state.Known() {
		return rtnl.AnswerNot // target is another host on the link
	}
	o := t.asked[target]
	switch fresh := o != nil && t.now.Before(o.until); {
	case fresh && !o.asking:
		return o.answer
	case fresh && len(o.waiting) < maxAsking:
		o.waiting = append(o.waiting, q)
	case fresh, o == nil && len(t.asked) >= maxOthers && !t.sweepOthers(), !takeOf(&t.askRate, t.now, othersRate):
		t.drop(DropAskFull)
	default:
		t.asked[target] = &other{asking: true, until: t.now.Add(othersTime), waiting: []question{q}}
		t.act(AskOther{IP: target})
	}
	return rtnl.AnswerNot
}

// sweepOthers forgets the addresses whose answer is out of date, and reports whether another
// address fits. It does so at most once a second; in between it returns false.
func (t *Table) sweepOthers() bool {
	if t.now.Sub(t.askSwept) < time.Second {
		return false
	}
	t.askSwept = t.now
	maps.DeleteFunc(t.asked, func(_ netip.Addr, o *other) bool { return !t.now.Before(o.until) })
	return len(t.asked) < maxOthers
}

// otherIs keeps the driver's answer about an address, and answers the questions that wait for it.
func (t *Table) otherIs(ev OtherIs) {
	a := plain(ev.IP)
	o := t.asked[a]
	if o == nil {
		return
	}
	waiting := o.waiting
	o.answer, o.asking, o.until, o.waiting = ev.Answer, false, t.now.Add(othersTime), nil
	if ev.Answer == rtnl.AnswerNot || t.own[a] != nil {
		return
	}
	for _, q := range waiting {
		if a.Is4() {
			t.answerOtherARP(q.arp, ev.Answer)
		} else {
			t.answerOtherNS(q)
		}
	}
}

// answerOtherARP answers for an address of another device of this host, or as a proxy for another
// host. A probe for duplicates is answered only for an address of this host.
func (t *Table) answerOtherARP(p arp.Packet, as rtnl.Answering) {
	if p.IsProbe() && as != rtnl.AnswerLocal || !validLink(t.link) || !t.allowed(p.Sender) {
		return
	}
	if !p.IsProbe() && t.entries[p.SenderIP] == nil {
		t.learn(p.SenderIP, p.Sender)
	}
	t.n.Answers++
	t.n.OtherAnswers++
	t.send(encap.ARP, p.ReplyFrom(t.link), Dest{LinkAddr: p.Sender})
}

// answerOtherNS answers as RFC 4861 section 7.2.8 says: without Override, because
// an answer of the host itself takes precedence.
func (t *Table) answerOtherNS(q question) {
	if t.allowed(q.by()) && t.answerNS(q, &ownAddr{ip: q.ns.Target, state: AddrOptimistic}) {
		t.n.OtherAnswers++
	}
}
