package neigh

import (
	"net/netip"
	"slices"
	"time"

	"ipoibcm/ib"
	"ipoibcm/wire/arp"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/ip"
	"ipoibcm/wire/nd"
)

const (
	announces        = 2                // of an address (RFC 5227 section 1.1: ANNOUNCE_NUM)
	announceInterval = 2 * time.Second  // ANNOUNCE_INTERVAL
	defendInterval   = 10 * time.Second // DEFEND_INTERVAL
	// claimRepeat is how long after a claim that we answered with a defence further claims count as
	// copies of it.
	claimRepeat = 100 * time.Millisecond

	// The pauses between detections of an address found duplicate. The first is
	// short, because while an address moves both hosts have it for a moment. The
	// longest is RATE_LIMIT_INTERVAL of RFC 5227.
	firstPause   = time.Second
	longestPause = time.Minute
	// contestedTime is how long we remember that another host wants an address of ours:
	// longer than that host pauses between its detections.
	contestedTime = 2 * longestPause
)

// An ownAddr is one of our own addresses.
type ownAddr struct {
	ip     netip.Addr
	prefix netip.Prefix
	state  AddrState

	by        encap.LinkAddr // who else last claimed it
	conflicts uint64
	defended  time.Time // when we last defended it; zero if never since it was verified
	insisted  time.Time // when insist took it into use
	announced time.Time // when we last announced it
	contested time.Time // when another host last looked for it, or claimed it
	pauses    int       // after detections in a row that found it duplicate

	probes    int // probes sent in this detection
	announces int // announcements still to send
	timer     timer
}

// addAddr takes an address into use at once and looks for duplicates meanwhile
// (RFC 4429), because the kernel already uses it.
func (t *Table) addAddr(p netip.Prefix) {
	a := plain(p.Addr())
	if !p.IsValid() || !unicast(a) {
		return
	}
	p = netip.PrefixFrom(a, min(p.Bits(), a.BitLen()))
	if o := t.own[a]; o != nil {
		o.prefix = p
		return
	}
	if len(t.addrs) >= t.o.maxAddrs() {
		t.drop(DropOwnAddrsFull)
		t.o.Log.Warn("too many addresses, this one is not answered for", "ip", a, "max", t.o.maxAddrs())
		return
	}
	if e := t.entries[a]; e != nil {
		t.remove(e, ExpireOwn, DropOwnAddress)
	}
	o := &ownAddr{ip: a, prefix: p}
	o.timer.own = o
	t.own[a] = o
	i, _ := slices.BinarySearchFunc(t.addrs, a, func(o *ownAddr, a netip.Addr) int { return o.ip.Compare(a) })
	t.addrs = slices.Insert(t.addrs, i, o)
	t.detect(o)
}

func (t *Table) removeAddr(a netip.Addr) {
	o := t.own[a]
	if o == nil {
		return
	}
	t.timers.Stop(&o.timer)
	delete(t.own, a)
	if t.o.AskOthers {
		// The kernel reports the removal of an address before it removes the address's local route.
		// Asked before that, it would answer that the host still has the address.
		t.asked[a] = &other{until: t.now.Add(goneTime)}
	}
	t.addrs = slices.DeleteFunc(t.addrs, func(x *ownAddr) bool { return x == o })
	if o.state != AddrReady || o.contested.IsZero() || t.now.Sub(o.contested) > contestedTime {
		return
	}
	// Another host waits for the address. A query of ours for it shows that host that we
	// no longer have it, so that it need not wait until its pause is over.
	if src := t.source(a, netip.Addr{}); src != nil {
		t.n.Queries++
		t.sendQuery(src, a, Dest{Broadcast: true})
	}
}

// reannounce announces our verified addresses, and begins detection anew for all others: those
// found duplicate may be free now.
func (t *Table) reannounce() {
	for _, o := range t.addrs {
		if o.state == AddrReady {
			o.announces = announces
			t.announce(o)
		} else {
			t.detect(o)
		}
	}
}

// setRouter changes the R flag and announces it. Neighbours that have us as a default router
// must hear when we are no router any more (RFC 4861 section 7.2.5).
func (t *Table) setRouter(on bool) {
	if t.router == on {
		return
	}
	t.router = on
	for _, o := range t.addrs {
		if o.state == AddrReady && o.ip.Is6() {
			o.announces = announces
			t.announce(o)
		}
	}
}

// detect starts duplicate address detection. Without a link-layer address of our
// own it waits for SetLinkAddr.
func (t *Table) detect(o *ownAddr) {
	o.state, o.probes, o.pauses, o.by = AddrOptimistic, 0, 0, encap.LinkAddr{}
	t.timers.Stop(&o.timer)
	if validLink(t.link) {
		t.addrTimer(o)
	}
}

func (t *Table) addrTimer(o *ownAddr) {
	switch {
	case o.state == AddrReady && o.announces > 0:
		t.announce(o)
	case o.state == AddrReady:
	case o.probes >= t.o.dadProbes():
		t.verified(o)
	default:
		t.probeOwn(o)
	}
}

// probeOwn asks whether another host has o. RFC 4862 has one probe after a random wait. We send
// three by default, because a broadcast may be lost, and without that wait: after a restart, peers
// learn our new QPN only from the announcement that follows the probes. The fabric answers in
// microseconds.
func (t *Table) probeOwn(o *ownAddr) {
	o.probes++
	t.n.DADProbes++
	i := t.o.dadInterval()
	t.set(&o.timer, t.now.Add(i*3/4+time.Duration(t.o.Rand.Int64N(int64(i)/2+1))))
	if o.ip.Is4() {
		t.send(encap.ARP, arp.NewProbe(t.link, o.ip), Dest{Broadcast: true, Later: true})
	} else {
		t.send(encap.IPv6, nd.NewDAD(o.ip), Dest{Broadcast: true, Later: true})
	}
}

func (t *Table) verified(o *ownAddr) {
	o.state, o.announces, o.probes, o.pauses = AddrReady, announces, 0, 0
	o.defended = time.Time{}
	t.act(AddrVerified{IP: o.ip})
	t.announce(o)
}

func (t *Table) announce(o *ownAddr) {
	t.timers.Stop(&o.timer)
	if !validLink(t.link) {
		return
	}
	o.announces = max(0, o.announces-1)
	if o.announces > 0 {
		t.set(&o.timer, t.now.Add(announceInterval))
	}
	t.sendAnnouncement(o)
}

func (t *Table) sendAnnouncement(o *ownAddr) {
	t.n.Announces++
	o.announced = t.now
	if o.ip.Is4() {
		t.send(encap.ARP, arp.NewAnnouncement(t.link, o.ip), Dest{Broadcast: true, Later: true})
	} else {
		t.send(encap.IPv6, nd.NewAnnouncement(o.ip, t.link, t.router), Dest{Group: ip.AllNodes, Later: true})
	}
}

// claimed handles a claim of another host to own address o. While detection runs we give o up. Once
// o is verified, we defend it against the first claim. At a second claim within ten seconds of that
// we give o up until a detection finds it free (RFC 5227 section 2.4 (b)), because otherwise both
// hosts would announce it for ever. So the last host to announce an address has it. We do not give
// o up for a copy of the first claim, within ten seconds of insist, or without detection.
func (t *Table) claimed(o *ownAddr, by encap.LinkAddr) {
	o.by = by
	switch o.state {
	case AddrDuplicate:
		if o.detecting() { // not merely between two detections
			t.pause(o)
		}
	case AddrOptimistic:
		t.duplicate(o, false)
	case AddrReady:
		o.conflicts++
		o.contested = t.now
		t.n.Conflicts++
		switch last := t.now.Sub(o.defended); {
		case o.defended.IsZero() || last >= defendInterval:
			t.defend(o)
		case last < claimRepeat || t.now.Sub(o.insisted) < defendInterval:
			// a copy of the last claim, or the other host has to yield
		case t.o.dadProbes() == 0:
			// without detection nothing would ever find o free
		default:
			t.duplicate(o, true)
		}
	}
}

// defend announces o, which another host claims.
func (t *Table) defend(o *ownAddr) {
	o.defended = t.now
	t.o.Log.Warn("another host claims our address", "ip", o.ip, "by", o.by)
	t.act(Conflict{IP: o.ip, By: o.by})
	if validLink(t.link) {
		t.sendAnnouncement(o)
	}
}

// duplicate gives o up until a detection finds it free.
func (t *Table) duplicate(o *ownAddr, yielded bool) {
	o.state, o.announces, o.pauses = AddrDuplicate, 0, 0
	t.n.Duplicates++
	t.o.Log.Warn("address is in use elsewhere", "ip", o.ip, "by", o.by, "yielded", yielded)
	t.pause(o)
	t.act(Duplicate{IP: o.ip, By: o.by, Yielded: yielded})
}

// pause sets the timer for the next detection of duplicate o. Each pause is twice the one before,
// up to longestPause. Half of it is random, because two hosts that detect at the same time both
// lose.
func (t *Table) pause(o *ownAddr) {
	p := min(firstPause<<min(o.pauses, 16), longestPause)
	o.probes = 0
	o.pauses++
	t.set(&o.timer, t.now.Add(p/2+time.Duration(t.o.Rand.Int64N(int64(p/2)+1))))
}

// released begins a detection of duplicate o at once: the other host has shown that it does not
// have the address, or is gone.
func (t *Table) released(o *ownAddr) {
	if o.state == AddrDuplicate && !o.detecting() {
		t.addrTimer(o)
	}
}

// releasedBy calls released for all own addresses that the host at link was the last to claim.
func (t *Table) releasedBy(link encap.LinkAddr) {
	for _, o := range t.addrs {
		if o.by.Key() == link.Key() {
			t.released(o)
		}
	}
}

// insist takes o into use although another host may have it, because a program on this host claims
// it. It does so at most once in ten seconds, as often as a defence. In these ten seconds each
// further Insist announces the address again, at least 3/4 of lockTime after the last announcement:
// neighbours that had just heard another claim ignored the first one. For an address that was
// verified without insist, it does nothing.
func (t *Table) insist(o *ownAddr) {
	if o == nil || !validLink(t.link) {
		return
	}
	recent := !o.insisted.IsZero() && t.now.Sub(o.insisted) < defendInterval
	switch {
	case o.state == AddrReady && recent && t.now.Sub(o.announced) >= lockTime*3/4:
		t.sendAnnouncement(o)
	case o.state == AddrReady, recent:
	default:
		o.insisted = t.now
		t.o.Log.Info("address is ours although it is in use elsewhere", "ip", o.ip, "by", o.by)
		t.verified(o)
	}
}

// sourceOf returns the source of an IP packet; zero if pkt is none.
func sourceOf(pkt []byte) netip.Addr {
	src, _ := ip.Src(pkt)
	return src
}

// source picks the own address from which to ask for target: src, the source of the packet that
// waits (RFC 4861 section 7.2.2), else an address in target's subnet, else any of the same family,
// but never a duplicate. Among equals it prefers the same scope, then a verified address. src may
// be zero. It returns nil if there is no such address, or if we have no link-layer address.
func (t *Table) source(target, src netip.Addr) *ownAddr {
	if !validLink(t.link) {
		return nil
	}
	if o := t.own[src]; o.usable(target) {
		return o
	}
	var best *ownAddr
	rank := func(o *ownAddr) (r int) {
		if o.prefix.Contains(target) {
			r += 4
		}
		if o.ip.IsLinkLocalUnicast() == target.IsLinkLocalUnicast() {
			r += 2
		}
		if o.state == AddrReady {
			r++
		}
		return r
	}
	for _, o := range t.addrs {
		if o.usable(target) && (best == nil || rank(o) > rank(best)) {
			best = o
		}
	}
	return best
}

// detecting reports whether detection of duplicates is under way for o.
func (o *ownAddr) detecting() bool {
	return o.state == AddrOptimistic || o.state == AddrDuplicate && o.probes > 0
}

// usable reports whether o may be the source of a query for target.
func (o *ownAddr) usable(target netip.Addr) bool {
	return o != nil && o.state != AddrDuplicate && o.ip.Is4() == target.Is4()
}

// validLink reports whether an interface can have link-layer address a: its GID is that of a
// port, and its QPN is not 0, 1 or that of multicast.
func validLink(a encap.LinkAddr) bool {
	return !a.GID.IsZero() && !a.GID.IsMulticast() && a.QPN > ib.QPNGSI && a.QPN < ib.QPNMulticast
}
