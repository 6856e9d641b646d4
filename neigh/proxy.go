package neigh

import (
	"net/netip"
	"slices"
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

// others returns how to answer a question for target, which is none of our addresses. If that is
// not known it returns AnswerNot and asks the driver; otherIs answers q later. Above maxAsking,
// maxOthers or othersRate nobody answers q.
func (t *Table) others(dst []Action, now time.Time, target netip.Addr, q question) ([]Action, rtnl.Answering) {
	if !t.o.AskOthers || !unicast(target) {
		return dst, rtnl.AnswerNot
	}
	if e := t.entries[target]; e != nil && e.state.Known() {
		return dst, rtnl.AnswerNot // target is another host on the link
	}
	o := t.asked[target]
	switch {
	case o != nil && o.asking && now.Before(o.until):
		if len(o.waiting) >= maxAsking {
			t.drop(DropAskFull)
			return dst, rtnl.AnswerNot
		}
		o.waiting = append(o.waiting, q)
		return dst, rtnl.AnswerNot
	case o != nil && now.Before(o.until):
		return dst, o.answer
	case o == nil && len(t.asked) >= maxOthers && !t.sweepOthers(now):
		t.drop(DropAskFull)
		return dst, rtnl.AnswerNot
	case !takeOf(&t.askRate, now, othersRate):
		t.drop(DropAskFull)
		return dst, rtnl.AnswerNot
	}
	t.asked[target] = &other{asking: true, until: now.Add(othersTime), waiting: []question{q}}
	return append(dst, AskOther{IP: target}), rtnl.AnswerNot
}

// sweepOthers forgets the addresses whose answer is out of date, and reports whether another
// address fits. It does so at most once a second; in between it returns false.
func (t *Table) sweepOthers(now time.Time) bool {
	if now.Sub(t.askSwept) < time.Second {
		return false
	}
	t.askSwept = now
	for a, o := range t.asked { // what is deleted does not depend on the order
		if !now.Before(o.until) {
			delete(t.asked, a)
		}
	}
	return len(t.asked) < maxOthers
}

// otherIs keeps the driver's answer about an address, and answers the questions that wait for it.
func (t *Table) otherIs(dst []Action, now time.Time, ev OtherIs) []Action {
	a := plain(ev.IP)
	o := t.asked[a]
	if o == nil {
		return dst
	}
	waiting := o.waiting
	o.answer, o.asking, o.until, o.waiting = ev.Answer, false, now.Add(othersTime), nil
	if ev.Answer == rtnl.AnswerNot || t.own[a] != nil {
		return dst
	}
	for _, q := range waiting {
		if a.Is4() {
			dst = t.answerOtherARP(dst, now, q.arp, ev.Answer)
		} else {
			dst = t.answerOtherNS(dst, now, q)
		}
	}
	return dst
}

// answerOtherARP answers for an address of another device of this host, or as a proxy for another
// host. A probe for duplicates is answered only for an address of this host.
func (t *Table) answerOtherARP(dst []Action, now time.Time, p arp.Packet, as rtnl.Answering) []Action {
	if p.IsProbe() && as != rtnl.AnswerLocal || !validLink(t.link) {
		return dst
	}
	if why, ok := t.limit.allow(now, p.Sender); !ok {
		t.drop(why)
		return dst
	}
	if !p.IsProbe() && t.entries[p.SenderIP] == nil {
		dst = t.learn(dst, now, p.SenderIP, p.Sender)
	}
	t.n.Answers++
	t.n.OtherAnswers++
	return t.sendARP(dst, p.ReplyFrom(t.link), Dest{LinkAddr: p.Sender})
}

// answerOtherNS answers as RFC 4861 section 7.2.8 says: without Override, because
// an answer of the host itself takes precedence.
func (t *Table) answerOtherNS(dst []Action, now time.Time, q question) []Action {
	by := q.from
	if q.ns.HasLink {
		by = q.ns.Link
	}
	if why, ok := t.limit.allow(now, by); !ok {
		t.drop(why)
		return dst
	}
	e := t.entries[q.ns.Src]
	sent := len(dst)
	dst = t.answerNS(dst, now, q.from, q.ns, e, &ownAddr{ip: q.ns.Target, state: AddrOptimistic})
	if slices.ContainsFunc(dst[sent:], func(a Action) bool { _, is := a.(SendUD); return is }) {
		t.n.OtherAnswers++
	}
	return dst
}
