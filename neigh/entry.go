package neigh

import (
	"net/netip"
	"time"

	"ipoibcm/lru"
	"ipoibcm/wire/encap"
)

// lockTime is how long after a change of a link-layer address the Table refuses further claims,
// unless they answer a probe: two hosts with one address, or an impostor, cost at most one change,
// or one challenge, per second (RFC 4755 section 8). A claim that keeps the GID means that the host
// restarted. For it lockTime counts from the last move, not from the resolution.
const lockTime = time.Second

// linkProofTimes is a number of reachable times. For so long after a neighbour's last own answer,
// acknowledgements on a connection confirm the neighbour.
const linkProofTimes = 2

// maxFailedShare bounds the neighbours that did not answer to MaxNeighbors/maxFailedShare, a
// quarter of the table: a scan of absent hosts must not displace the other entries.
const maxFailedShare = 4

// evictScan bounds how many entries victim looks at.
const evictScan = 64

// An entry is one neighbour. There may be very many: what most entries do not need is behind a
// pointer, and times are instants.
type entry struct {
	ip      netip.Addr
	link    encap.LinkAddr // valid if state.Known()
	state   State
	router  bool
	heard   bool  // the neighbour spoke first, and has neither been used nor confirmed since
	held    bool  // in StateFailed: nothing is asked until the hold-down is over
	queries int32 // sent in this resolution or probing

	since, confirmed, used instant
	changed, moved         instant // when link was last set; when it last replaced another
	answered               instant // when it last answered for ip itself
	lost                   instant // when it first failed to answer; zero while it is known

	queue *queue // nil if nothing waits
	rival *rival // another link-layer address that a claim gives for it; nil if none
	moves *moves // its last move, and what was logged; nil before a move or a refused claim
	timer timer

	lru.Links[entry]        // in the list that listOf names
	next, prev       *entry // of the ring in Table.byLink; nil if not there
}

func (t *Table) snapshot(e *entry) Neighbor {
	n := Neighbor{
		IP: e.ip, LinkAddr: e.link, State: e.state, Router: e.router,
		Since: t.time(e.since), Confirmed: t.time(e.confirmed), Used: t.time(e.used), Lost: t.time(e.lost),
		Queries: int(e.queries),
	}
	if q := e.queue; q != nil {
		n.QueuedPackets, n.QueuedOctets = len(q.packets), q.octets
	}
	return n
}

func (t *Table) resolve(dst []Action, now time.Time, ip netip.Addr, pkt []byte, src netip.Addr) []Action {
	if pkt != nil {
		src = sourceOf(pkt)
	}
	switch {
	case !unicast(ip):
		return t.discard(dst, ip, pkt, DropNotUnicast)
	case t.own[ip] != nil:
		return t.discard(dst, ip, pkt, DropOwnAddress)
	}
	e := t.entries[ip]
	if e == nil {
		if t.source(ip, src) == nil {
			return t.discard(dst, ip, pkt, DropNoSource)
		}
		if dst, e = t.add(dst, ip, false); e == nil {
			return t.discard(dst, ip, pkt, DropTableFull)
		}
		t.setState(now, e, StateIncomplete)
		t.use(now, e)
		dst = t.enqueue(dst, e, pkt)
		return t.query(dst, now, e, src)
	}
	t.use(now, e)
	switch {
	case e.state == StateIncomplete:
		return t.enqueue(dst, e, pkt)
	case e.state == StateFailed && e.held && t.since(now, e.since) < t.o.holdDown():
		return t.discard(dst, ip, pkt, DropHeldDown)
	case e.state == StateFailed && t.source(ip, src) == nil:
		return t.discard(dst, ip, pkt, DropNoSource)
	case e.state == StateFailed:
		t.setState(now, e, StateIncomplete)
		dst = t.enqueue(dst, e, pkt)
		return t.query(dst, now, e, src)
	case pkt == nil:
		return dst
	}
	return append(dst, Deliver{IP: ip, LinkAddr: e.link, Packet: pkt})
}

func (t *Table) discard(dst []Action, ip netip.Addr, pkt []byte, why Drop) []Action {
	if pkt == nil {
		return dst
	}
	t.drop(why)
	return append(dst, Discard{IP: ip, Packet: pkt, Reason: why})
}

// add makes an entry without state. It evicts another if the table is full, or if heard is set and
// such entries fill half of the table. It returns a nil entry if none can be evicted. heard means
// that nobody has asked for the neighbour: it spoke first.
func (t *Table) add(dst []Action, ip netip.Addr, heard bool) ([]Action, *entry) {
	switch full := len(t.entries) >= t.o.maxNeighbors(); {
	case heard && t.heard.Len() >= max(1, t.o.maxNeighbors()/2):
		dst = t.evict(dst, t.heard.Oldest())
	case full:
		victim := t.victim()
		if victim == nil {
			return dst, nil
		}
		dst = t.evict(dst, victim)
	}
	e := &entry{ip: ip, heard: heard}
	e.timer.entry = e
	t.listOf(e).Push(e)
	t.entries[ip] = e
	return dst, e
}

func (t *Table) evict(dst []Action, e *entry) []Action {
	t.n.Evicted++
	return t.remove(dst, e, ExpireEvicted, DropUnresolved)
}

// shrink evicts entries above the bounds, which have changed.
func (t *Table) shrink(dst []Action) []Action {
	for t.heard.Len() > max(1, t.o.maxNeighbors()/2) {
		dst = t.evict(dst, t.heard.Oldest())
	}
	for len(t.entries) > t.o.maxNeighbors() {
		victim := t.victim()
		if victim == nil {
			return dst // entries in use stay
		}
		dst = t.evict(dst, victim)
	}
	return dst
}

// victim returns the entry to evict: the oldest that did not answer, else the oldest that was only
// heard of, else a stale one among the evictScan entries used longest ago, else nil. So claims from
// forged sources replace each other.
func (t *Table) victim() *entry {
	if e := t.failed.Oldest(); e != nil {
		return e
	}
	if e := t.heard.Oldest(); e != nil {
		return e
	}
	e := t.lru.Oldest()
	for range evictScan {
		// Entries in use are in another state, and so are entries being resolved.
		if e == nil || e.state == StateStale {
			return e
		}
		e = e.Newer()
	}
	return nil
}

// listOf returns the list that e belongs to.
func (t *Table) listOf(e *entry) *order {
	switch {
	case e.heard:
		return &t.heard
	case e.state == StateFailed:
		return &t.failed
	}
	return &t.lru
}

// settle notes that e has been used or confirmed, and is not only heard of any more.
func (t *Table) settle(e *entry) {
	if e.heard {
		t.heard.Remove(e)
		e.heard = false
		t.lru.Push(e)
	}
}

// recall handles the event Recall: it adds a neighbour that an earlier Table knew.
func (t *Table) recall(dst []Action, now time.Time, ev Recall) []Action {
	ip := plain(ev.IP)
	if !unicast(ip) || t.own[ip] != nil || t.entries[ip] != nil || ev.LinkAddr.IsZero() ||
		len(t.entries) >= t.o.maxNeighbors() {
		return dst
	}
	dst, e := t.add(dst, ip, false)
	t.setLink(now, e, ev.LinkAddr)
	e.router = ev.Router
	t.setState(now, e, StateStale)
	return append(dst, Resolved{IP: ip, LinkAddr: ev.LinkAddr})
}

// setState puts e into state s and sets the timer for the end of that state.
func (t *Table) setState(now time.Time, e *entry, s State) {
	if e.state != s {
		t.o.Log.Debug("neighbour state", "ip", e.ip, "from", e.state, "to", s)
		t.listOf(e).Remove(e)
		e.state, e.since = s, t.instant(now)
		t.listOf(e).Push(e)
	}
	switch s {
	case StateIncomplete, StateProbe:
		e.queries = 0 // query, probe and challenge set the timer
	case StateReachable:
		r := t.o.reachableTime()
		t.set(&e.timer, now.Add(r/2+time.Duration(t.o.Rand.Int64N(int64(r)+1))))
	case StateStale:
		t.set(&e.timer, now.Add(t.o.staleTime()))
	case StateDelay:
		t.set(&e.timer, now.Add(t.o.delayTime()))
	case StateFailed:
		t.set(&e.timer, now.Add(t.o.failedTime()))
	}
}

// use notes traffic to e. A stale neighbour enters StateDelay. At the end of that it is probed,
// unless it was confirmed.
func (t *Table) use(now time.Time, e *entry) {
	e.used = t.instant(now)
	t.settle(e)
	t.listOf(e).Remove(e)
	t.listOf(e).Push(e)
	if e.state == StateStale {
		t.setState(now, e, StateDelay)
	}
}

// confirm notes proof that a known neighbour receives what we send.
func (t *Table) confirm(now time.Time, e *entry) {
	e.confirmed = t.instant(now)
	t.settle(e)
	if e.rival == nil { // otherwise the probes of the challenge go on
		t.setState(now, e, StateReachable)
	}
}

// confirmLink notes proof that the interface of a neighbour receives what we send. That proves
// nothing about the IP address, which the host may have given up. So it counts only within
// linkProofTimes reachable times after the neighbour last answered for that address, or its
// link-layer address was set.
func (t *Table) confirmLink(now time.Time, e *entry) {
	if t.since(now, max(e.answered, e.changed)) < linkProofTimes*t.o.reachableTime() {
		t.confirm(now, e)
	}
}

func (t *Table) confirmAll(now time.Time, link encap.LinkAddr) {
	first := t.byLink[link.Key()]
	for e := first; e != nil; e = e.next {
		if t.confirmLink(now, e); e.next == first {
			return
		}
	}
}

// doubt probes e at once if it was used within the last reachable time. Otherwise it makes e stale,
// so that e is probed after its next use.
func (t *Table) doubt(dst []Action, now time.Time, e *entry) []Action {
	switch {
	case e.state != StateReachable && e.state != StateStale && e.state != StateDelay:
		return dst // e is being probed, or not known
	case e.used == 0 || t.since(now, e.used) > t.o.reachableTime():
		t.setState(now, e, StateStale)
		return dst
	}
	t.setState(now, e, StateProbe)
	return t.probe(dst, now, e)
}

func (t *Table) entryTimer(dst []Action, now time.Time, e *entry) []Action {
	switch e.state {
	case StateIncomplete:
		if int(e.queries) >= len(t.o.retries()) {
			return t.fail(dst, now, e)
		}
		return t.query(dst, now, e, netip.Addr{})
	case StateReachable:
		t.setState(now, e, StateStale)
	case StateStale:
		return t.remove(dst, e, ExpireUnused, DropUnresolved)
	case StateDelay:
		t.setState(now, e, StateProbe)
		return t.probe(dst, now, e)
	case StateProbe:
		if e.rival != nil {
			return t.challenge(dst, now, e)
		}
		if int(e.queries) >= t.o.probes() {
			return t.unreachable(dst, now, e)
		}
		return t.probe(dst, now, e)
	case StateFailed:
		return t.remove(dst, e, 0, DropUnresolved)
	}
	return dst
}

// query asks for an unknown neighbour. It sends the first query to the hint if there is one, and
// all others to the broadcast group.
func (t *Table) query(dst []Action, now time.Time, e *entry, src netip.Addr) []Action {
	e.queries++
	t.set(&e.timer, now.Add(t.o.retries()[e.queries-1]))
	if e.queue != nil {
		src = sourceOf(e.queue.packets[0])
	}
	a := t.source(e.ip, src)
	if a == nil {
		return dst // our address is gone; another may come before the last retry
	}
	t.n.Queries++
	if e.queries == 1 {
		return t.sendQuery(dst, a, e.ip, t.hinted(e))
	}
	return t.sendQuery(dst, a, e.ip, Dest{Broadcast: true})
}

// hinted returns the link-layer address that a hint gives for e. If there is no hint, or it has our
// own GID, hinted returns the broadcast group.
func (t *Table) hinted(e *entry) Dest {
	at, ok := t.hints[e.ip]
	if !ok || at.GID == t.link.GID {
		return Dest{Broadcast: true}
	}
	t.n.Hinted++
	return Dest{LinkAddr: at}
}

// probe asks a known neighbour whether it is still there. It sends the last probe to the hint or
// the broadcast group (see hinted): after a restart the neighbour has another QPN (RFC 4391 section
// 9.4), and if its announcements were lost, only such a probe finds it before the entry fails.
func (t *Table) probe(dst []Action, now time.Time, e *entry) []Action {
	e.queries++
	t.set(&e.timer, now.Add(t.o.probeInterval()))
	a := t.source(e.ip, netip.Addr{})
	if a == nil {
		return dst
	}
	t.n.Probes++
	if int(e.queries) >= t.o.probes() {
		return t.sendQuery(dst, a, e.ip, t.hinted(e))
	}
	return t.sendQuery(dst, a, e.ip, Dest{LinkAddr: e.link})
}

// known handles a claim that e is at link. solicited means that the claim answers a query of ours,
// which proves that the sender received it.
func (t *Table) known(dst []Action, now time.Time, e *entry, link encap.LinkAddr, solicited bool) []Action {
	if !e.state.Known() {
		return t.resolved(dst, now, e, link, solicited)
	}
	switch {
	case link == e.link:
		dst = t.defended(dst, now, e)
		if solicited {
			e.answered = t.instant(now)
			t.confirm(now, e)
		}
		return dst
	case link.Key() == e.link.Key() && e.rival != nil:
		return t.defended(dst, now, e) // new flags are taken at the next claim
	case link.Key() == e.link.Key() || t.o.AcceptAlways || t.silent(e, solicited):
		// Of two answers to one query the first counts. Only the answer to a probe, which asks
		// whether the address has changed, may change it at any time.
		last := e.changed
		if link.GID == e.link.GID {
			last = e.moved
		}
		if t.since(now, last) < lockTime && !(solicited && e.state == StateProbe) {
			return t.refuse(dst, DropLocked, e.ip, link, link)
		}
		return t.move(dst, now, e, link, solicited)
	}
	return t.claim(dst, now, e, link, solicited)
}

// resolved sets the link-layer address of a neighbour that was not known, which ends a resolution.
func (t *Table) resolved(dst []Action, now time.Time, e *entry, link encap.LinkAddr, solicited bool) []Action {
	t.setLink(now, e, link)
	e.queries = 0
	t.n.Resolved++
	dst = append(dst, Resolved{IP: e.ip, LinkAddr: link})
	switch {
	case solicited:
		t.confirm(now, e)
	case e.queue != nil:
		t.setState(now, e, StateDelay) // packets wait: it is in use
	default:
		t.setState(now, e, StateStale)
	}
	for _, pkt := range t.takeQueue(e) {
		dst = append(dst, Deliver{IP: e.ip, LinkAddr: link, Packet: pkt})
	}
	return dst
}

func (t *Table) setLink(now time.Time, e *entry, link encap.LinkAddr) {
	t.unindex(e)
	t.endChallenge(e)
	e.link, e.changed, e.lost = link, t.instant(now), 0
	t.index(e)
}

// fail ends a resolution without an answer. The entry stays for a while: first so that an absent
// host does not cost a broadcast for each packet, then so that users see it.
func (t *Table) fail(dst []Action, now time.Time, e *entry) []Action {
	t.n.Failed++
	t.o.Log.Info("neighbour did not answer", "ip", e.ip, "queries", e.queries)
	dst = append(dst, Failed{IP: e.ip})
	dst = t.discardQueue(dst, e, DropUnresolved)
	return t.setFailed(dst, now, e, true)
}

// unreachable ends the probing of a known neighbour without an answer. The next
// packet begins a resolution at once, without a hold-down.
func (t *Table) unreachable(dst []Action, now time.Time, e *entry) []Action {
	dst = t.expired(dst, e, ExpireUnreachable)
	t.unindex(e)
	t.endChallenge(e)
	e.link = encap.LinkAddr{}
	return t.setFailed(dst, now, e, false)
}

func (t *Table) setFailed(dst []Action, now time.Time, e *entry, held bool) []Action {
	if e.lost == 0 {
		e.lost = t.instant(now)
	}
	e.held = held
	t.setState(now, e, StateFailed)
	if t.failed.Len() > max(1, t.o.maxNeighbors()/maxFailedShare) {
		return t.remove(dst, t.failed.Oldest(), 0, DropUnresolved)
	}
	return dst
}

// remove drops an entry. It returns the packets that wait for it in Discard, with the reason why.
func (t *Table) remove(dst []Action, e *entry, reason ExpireReason, why Drop) []Action {
	if e.state.Known() {
		dst = t.expired(dst, e, reason)
	}
	dst = t.discardQueue(dst, e, why)
	t.unindex(e)
	t.endChallenge(e)
	t.timers.Stop(&e.timer)
	t.listOf(e).Remove(e)
	delete(t.entries, e.ip)
	return dst
}

// expired counts and logs that a neighbour is no longer known, and returns Expired for it.
func (t *Table) expired(dst []Action, e *entry, reason ExpireReason) []Action {
	t.n.Expired++
	t.o.Log.Info("neighbour expired", "ip", e.ip, "link", e.link, "reason", reason)
	return append(dst, Expired{IP: e.ip, LinkAddr: e.link, Reason: reason})
}
