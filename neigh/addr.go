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
func (t *Table) addAddr(dst []Action, now time.Time, p netip.Prefix) []Action {
	a := plain(p.Addr())
	if !p.IsValid() || !unicast(a) {
		return dst
	}
	p = netip.PrefixFrom(a, min(p.Bits(), a.BitLen()))
	if o := t.own[a]; o != nil {
		o.prefix = p
		return dst
	}
	if len(t.addrs) >= t.o.maxAddrs() {
		t.drop(DropOwnAddrsFull)
		t.o.Log.Warn("too many addresses, this one is not answered for", "ip", a, "max", t.o.maxAddrs())
		return dst
	}
	if e := t.entries[a]; e != nil {
		dst = t.remove(dst, e, ExpireOwn, DropOwnAddress)
	}
	o := &ownAddr{ip: a, prefix: p}
	o.timer.own = o
	t.own[a] = o
	i, _ := slices.BinarySearchFunc(t.addrs, a, func(o *ownAddr, a netip.Addr) int { return o.ip.Compare(a) })
	t.addrs = slices.Insert(t.addrs, i, o)
	return t.detect(dst, now, o)
}

func (t *Table) removeAddr(dst []Action, now time.Time, a netip.Addr) []Action {
	o := t.own[a]
	if o == nil {
		return dst
	}
	t.timers.Stop(&o.timer)
	delete(t.own, a)
	if t.o.AskOthers {
		// The kernel reports the removal of an address before it removes the address's local route.
		// Asked before that, it would answer that the host still has the address.
		t.asked[a] = &other{until: now.Add(goneTime)}
	}
	t.addrs = slices.DeleteFunc(t.addrs, func(x *ownAddr) bool { return x == o })
	if o.state != AddrReady || o.contested.IsZero() || now.Sub(o.contested) > contestedTime {
		return dst
	}
	// Another host waits for the address. A query of ours for it shows that host that we
	// no longer have it, so that it need not wait until its pause is over.
	src := t.source(a, netip.Addr{})
	if src == nil {
		return dst
	}
	t.n.Queries++
	return t.sendQuery(dst, src, a, Dest{Broadcast: true})
}

// reannounce announces our verified addresses, and begins detection anew for all others: those
// found duplicate may be free now.
func (t *Table) reannounce(dst []Action, now time.Time) []Action {
	for _, o := range t.addrs {
		if o.state == AddrReady {
			o.announces = announces
			dst = t.announce(dst, now, o)
		} else {
			dst = t.detect(dst, now, o)
		}
	}
	return dst
}

// setRouter changes the R flag and announces it. Neighbours that have us as a default router
// must hear when we are no router any more (RFC 4861 section 7.2.5).
func (t *Table) setRouter(dst []Action, now time.Time, on bool) []Action {
	if t.router == on {
		return dst
	}
	t.router = on
	for _, o := range t.addrs {
		if o.state == AddrReady && o.ip.Is6() {
			o.announces = announces
			dst = t.announce(dst, now, o)
		}
	}
	return dst
}

// detect starts duplicate address detection. Without a link-layer address of our
// own it waits for SetLinkAddr.
func (t *Table) detect(dst []Action, now time.Time, o *ownAddr) []Action {
	o.state, o.probes, o.pauses, o.by = AddrOptimistic, 0, 0, encap.LinkAddr{}
	t.timers.Stop(&o.timer)
	if !validLink(t.link) {
		return dst
	}
	return t.addrTimer(dst, now, o)
}

func (t *Table) addrTimer(dst []Action, now time.Time, o *ownAddr) []Action {
	switch {
	case o.state == AddrReady && o.announces > 0:
		return t.announce(dst, now, o)
	case o.state == AddrReady:
		return dst
	case o.probes >= t.o.dadProbes():
		return t.verified(dst, now, o)
	}
	// RFC 4862 has one probe after a random wait. We send three by default, because a broadcast may
	// be lost, and without that wait: after a restart, peers learn our new QPN only from the
	// announcement that follows the probes. The fabric answers in microseconds.
	o.probes++
	t.n.DADProbes++
	i := t.o.dadInterval()
	t.set(&o.timer, now.Add(i*3/4+time.Duration(t.o.Rand.Int64N(int64(i)/2+1))))
	if o.ip.Is4() {
		return t.sendARP(dst, arp.NewProbe(t.link, o.ip), Dest{Broadcast: true, Later: true})
	}
	return t.sendNS(dst, nd.NewDAD(o.ip), Dest{Broadcast: true, Later: true})
}

func (t *Table) verified(dst []Action, now time.Time, o *ownAddr) []Action {
	o.state, o.announces, o.probes, o.pauses = AddrReady, announces, 0, 0
	o.defended = time.Time{}
	dst = append(dst, AddrVerified{IP: o.ip})
	return t.announce(dst, now, o)
}

func (t *Table) announce(dst []Action, now time.Time, o *ownAddr) []Action {
	t.timers.Stop(&o.timer)
	if !validLink(t.link) {
		return dst
	}
	if o.announces > 0 {
		o.announces--
	}
	if o.announces > 0 {
		t.set(&o.timer, now.Add(announceInterval))
	}
	return t.sendAnnouncement(dst, now, o)
}

func (t *Table) sendAnnouncement(dst []Action, now time.Time, o *ownAddr) []Action {
	t.n.Announces++
	o.announced = now
	if o.ip.Is4() {
		return t.sendARP(dst, arp.NewAnnouncement(t.link, o.ip), Dest{Broadcast: true, Later: true})
	}
	return t.sendNA(dst, nd.NewAnnouncement(o.ip, t.link, t.router), Dest{Group: ip.AllNodes, Later: true})
}

// claimed handles a claim of another host to own address o. While detection runs we give o up. Once
// o is verified, we defend it against the first claim. At a second claim within ten seconds of that
// we give o up until a detection finds it free (RFC 5227 section 2.4 (b)), because otherwise both
// hosts would announce it for ever. So the last host to announce an address has it. We do not give
// o up for a copy of the first claim, within ten seconds of insist, or without detection.
func (t *Table) claimed(dst []Action, now time.Time, o *ownAddr, by encap.LinkAddr) []Action {
	o.by = by
	switch o.state {
	case AddrDuplicate:
		if o.detecting() { // not merely between two detections
			t.pause(now, o)
		}
	case AddrOptimistic:
		return t.duplicate(dst, now, o, false)
	case AddrReady:
		o.conflicts++
		o.contested = now
		t.n.Conflicts++
		switch last := now.Sub(o.defended); {
		case o.defended.IsZero() || last >= defendInterval:
		case last < claimRepeat || now.Sub(o.insisted) < defendInterval:
			return dst // a copy of the last claim, or the other host has to yield
		case t.o.dadProbes() == 0:
			return dst // without detection nothing would ever find o free
		default:
			return t.duplicate(dst, now, o, true)
		}
		o.defended = now
		t.o.Log.Warn("another host claims our address", "ip", o.ip, "by", by)
		dst = append(dst, Conflict{IP: o.ip, By: by})
		if !validLink(t.link) {
			return dst
		}
		return t.sendAnnouncement(dst, now, o)
	}
	return dst
}

// duplicate gives o up until a detection finds it free.
func (t *Table) duplicate(dst []Action, now time.Time, o *ownAddr, yielded bool) []Action {
	o.state, o.announces, o.pauses = AddrDuplicate, 0, 0
	t.n.Duplicates++
	t.o.Log.Warn("address is in use elsewhere", "ip", o.ip, "by", o.by, "yielded", yielded)
	t.pause(now, o)
	return append(dst, Duplicate{IP: o.ip, By: o.by, Yielded: yielded})
}

// pause sets the timer for the next detection of duplicate o. Each pause is twice the one before,
// up to longestPause. Half of it is random, because two hosts that detect at the same time both
// lose.
func (t *Table) pause(now time.Time, o *ownAddr) {
	p := min(firstPause<<min(o.pauses, 16), longestPause)
	o.probes = 0
	o.pauses++
	t.set(&o.timer, now.Add(p/2+time.Duration(t.o.Rand.Int64N(int64(p/2)+1))))
}

// released begins a detection of duplicate o at once: the other host has shown that it does not
// have the address, or is gone.
func (t *Table) released(dst []Action, now time.Time, o *ownAddr) []Action {
	if o.state != AddrDuplicate || o.detecting() {
		return dst
	}
	return t.addrTimer(dst, now, o)
}

// releasedBy calls released for all own addresses that the host at link was the last to claim.
func (t *Table) releasedBy(dst []Action, now time.Time, link encap.LinkAddr) []Action {
	for _, o := range t.addrs {
		if o.by.Key() == link.Key() {
			dst = t.released(dst, now, o)
		}
	}
	return dst
}

// insist takes o into use although another host may have it, because a program on this host claims
// it. It does so at most once in ten seconds, as often as a defence. In these ten seconds each
// further Insist announces the address again, at least 3/4 of lockTime after the last announcement:
// neighbours that had just heard another claim ignored the first one. For an address that was
// verified without insist, it does nothing.
func (t *Table) insist(dst []Action, now time.Time, o *ownAddr) []Action {
	if o == nil || !validLink(t.link) {
		return dst
	}
	recent := !o.insisted.IsZero() && now.Sub(o.insisted) < defendInterval
	switch {
	case o.state == AddrReady && recent && now.Sub(o.announced) >= lockTime*3/4:
		return t.sendAnnouncement(dst, now, o)
	case o.state == AddrReady, recent:
		return dst
	}
	o.insisted = now
	t.o.Log.Info("address is ours although it is in use elsewhere", "ip", o.ip, "by", o.by)
	return t.verified(dst, now, o)
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
