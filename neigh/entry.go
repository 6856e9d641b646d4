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

func (t *Table) resolve(ip netip.Addr, pkt []byte, src netip.Addr) {
	if pkt != nil {
		src = sourceOf(pkt)
	}
	e := t.entries[ip]
	if e != nil {
		t.use(e)
	}
	unknown := e == nil || e.state == StateFailed
	switch {
	case !unicast(ip):
		t.discard(ip, pkt, DropNotUnicast)
	case t.own[ip] != nil:
		t.discard(ip, pkt, DropOwnAddress)
	case unknown && e != nil && e.held && t.since(e.since) < t.o.holdDown():
		t.discard(ip, pkt, DropHeldDown)
	case unknown && t.source(ip, src) == nil:
		t.discard(ip, pkt, DropNoSource)
	case unknown:
		t.ask(ip, pkt, src)
	case e.state == StateIncomplete:
		t.enqueue(e, pkt)
	case pkt != nil:
		t.act(Deliver{IP: ip, LinkAddr: e.link, Packet: pkt})
	}
}

// ask begins a resolution, for which pkt waits.
func (t *Table) ask(ip netip.Addr, pkt []byte, src netip.Addr) {
	e := t.entries[ip]
	if e == nil {
		if e = t.add(ip, false); e == nil {
			t.discard(ip, pkt, DropTableFull)
			return
		}
	}
	t.setState(e, StateIncomplete)
	t.use(e)
	t.enqueue(e, pkt)
	t.query(e, src)
}

func (t *Table) discard(ip netip.Addr, pkt []byte, why Drop) {
	if pkt != nil {
		t.drop(why)
		t.act(Discard{IP: ip, Packet: pkt, Reason: why})
	}
}

// add makes an entry without state. It evicts another if the table is full, or if heard is set and
// such entries fill half of the table. It returns a nil entry if none can be evicted. heard means
// that nobody has asked for the neighbour: it spoke first.
func (t *Table) add(ip netip.Addr, heard bool) *entry {
	switch full := len(t.entries) >= t.o.maxNeighbors(); {
	case heard && t.heard.Len() >= max(1, t.o.maxNeighbors()/2):
		t.evict(t.heard.Oldest())
	case full && !t.evict(t.victim()):
		return nil
	}
	e := &entry{ip: ip, heard: heard}
	e.timer.entry = e
	t.listOf(e).Push(e)
	t.entries[ip] = e
	return e
}

// evict removes e to make room, and reports whether there is such an entry.
func (t *Table) evict(e *entry) bool {
	if e == nil {
		return false
	}
	t.n.Evicted++
	t.remove(e, ExpireEvicted, DropUnresolved)
	return true
}

// shrink evicts entries above the bounds, which have changed. Entries in use stay.
func (t *Table) shrink() {
	for t.heard.Len() > max(1, t.o.maxNeighbors()/2) {
		t.evict(t.heard.Oldest())
	}
	for len(t.entries) > t.o.maxNeighbors() && t.evict(t.victim()) {
	}
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
func (t *Table) recall(ev Recall) {
	ip := plain(ev.IP)
	if !unicast(ip) || t.own[ip] != nil || t.entries[ip] != nil || ev.LinkAddr.IsZero() ||
		len(t.entries) >= t.o.maxNeighbors() {
		return
	}
	e := t.add(ip, false)
	t.setLink(e, ev.LinkAddr)
	e.router = ev.Router
	t.setState(e, StateStale)
	t.act(Resolved{IP: ip, LinkAddr: ev.LinkAddr})
}

// setState puts e into state s and sets the timer for the end of that state.
func (t *Table) setState(e *entry, s State) {
	if e.state != s {
		t.o.Log.Debug("neighbour state", "ip", e.ip, "from", e.state, "to", s)
		t.listOf(e).Remove(e)
		e.state, e.since = s, t.instant(t.now)
		t.listOf(e).Push(e)
	}
	switch s {
	case StateIncomplete, StateProbe:
		e.queries = 0 // query, probe and challenge set the timer
	case StateReachable:
		r := t.o.reachableTime()
		t.set(&e.timer, t.now.Add(r/2+time.Duration(t.o.Rand.Int64N(int64(r)+1))))
	case StateStale:
		t.set(&e.timer, t.now.Add(t.o.staleTime()))
	case StateDelay:
		t.set(&e.timer, t.now.Add(t.o.delayTime()))
	case StateFailed:
		t.set(&e.timer, t.now.Add(t.o.failedTime()))
	}
}

// use notes traffic to e. A stale neighbour enters StateDelay. At the end of that it is probed,
// unless it was confirmed.
func (t *Table) use(e *entry) {
	e.used = t.instant(t.now)
	t.settle(e)
	t.listOf(e).Remove(e)
	t.listOf(e).Push(e)
	if e.state == StateStale {
		t.setState(e, StateDelay)
	}
}

// confirm notes proof that a known neighbour receives what we send.
func (t *Table) confirm(e *entry) {
	e.confirmed = t.instant(t.now)
	t.settle(e)
	if e.rival == nil { // otherwise the probes of the challenge go on
		t.setState(e, StateReachable)
	}
}

// confirmLink notes proof that the interface of a neighbour receives what we send. That proves
// nothing about the IP address, which the host may have given up. So it counts only within
// linkProofTimes reachable times after the neighbour last answered for that address, or its
// link-layer address was set.
func (t *Table) confirmLink(e *entry) {
	if t.since(max(e.answered, e.changed)) < linkProofTimes*t.o.reachableTime() {
		t.confirm(e)
	}
}

// doubt probes e at once if it was used within the last reachable time. Otherwise it makes e stale,
// so that e is probed after its next use.
func (t *Table) doubt(e *entry) {
	switch {
	case e.state != StateReachable && e.state != StateStale && e.state != StateDelay:
		// e is being probed, or not known
	case t.inUse(e):
		t.setState(e, StateProbe)
		t.probe(e)
	default:
		t.setState(e, StateStale)
	}
}

// inUse reports whether e was used within the last reachable time.
func (t *Table) inUse(e *entry) bool { return e.used != 0 && t.since(e.used) <= t.o.reachableTime() }

func (t *Table) entryTimer(e *entry) {
	switch {
	case e.state == StateIncomplete && int(e.queries) >= len(t.o.retries()):
		t.fail(e)
	case e.state == StateIncomplete:
		t.query(e, netip.Addr{})
	case e.state == StateReachable:
		t.setState(e, StateStale)
	case e.state == StateStale:
		t.remove(e, ExpireUnused, DropUnresolved)
	case e.state == StateDelay:
		t.setState(e, StateProbe)
		t.probe(e)
	case e.rival != nil: // in StateProbe
		t.challenge(e)
	case e.state == StateProbe && int(e.queries) >= t.o.probes():
		t.unreachable(e)
	case e.state == StateProbe:
		t.probe(e)
	case e.state == StateFailed:
		t.remove(e, 0, DropUnresolved)
	}
}

// query asks for an unknown neighbour. It sends the first query to the hint if there is one, and
// all others to the broadcast group.
func (t *Table) query(e *entry, src netip.Addr) {
	e.queries++
	t.set(&e.timer, t.now.Add(t.o.retries()[e.queries-1]))
	if e.queue != nil {
		src = sourceOf(e.queue.packets[0])
	}
	a := t.source(e.ip, src)
	if a == nil {
		return // our address is gone; another may come before the last retry
	}
	t.n.Queries++
	to := Dest{Broadcast: true}
	if e.queries == 1 {
		to = t.hinted(e)
	}
	t.sendQuery(a, e.ip, to)
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
func (t *Table) probe(e *entry) {
	e.queries++
	t.set(&e.timer, t.now.Add(t.o.probeInterval()))
	a := t.source(e.ip, netip.Addr{})
	if a == nil {
		return
	}
	t.n.Probes++
	to := Dest{LinkAddr: e.link}
	if int(e.queries) >= t.o.probes() {
		to = t.hinted(e)
	}
	t.sendQuery(a, e.ip, to)
}

// known handles a claim that e is at link. solicited means that the claim answers a query of ours,
// which proves that the sender received it.
func (t *Table) known(e *entry, link encap.LinkAddr, solicited bool) {
	switch {
	case !e.state.Known():
		t.resolved(e, link, solicited)
	case link == e.link:
		t.defended(e)
		if solicited {
			e.answered = t.instant(t.now)
			t.confirm(e)
		}
	case link.Key() == e.link.Key() && e.rival != nil:
		t.defended(e) // new flags are taken at the next claim
	case link.Key() != e.link.Key() && !t.o.AcceptAlways && !t.silent(e, solicited):
		t.claim(e, link, solicited)
	// Of two answers to one query the first counts. Only the answer to a probe, which asks
	// whether the address has changed, may change it at any time.
	case t.locked(e, link) && !(solicited && e.state == StateProbe):
		t.refuse(DropLocked, e.ip, link, link)
	default:
		t.move(e, link, solicited)
	}
}

// resolved sets the link-layer address of a neighbour that was not known, which ends a resolution.
func (t *Table) resolved(e *entry, link encap.LinkAddr, solicited bool) {
	t.setLink(e, link)
	e.queries = 0
	t.n.Resolved++
	t.act(Resolved{IP: e.ip, LinkAddr: link})
	switch {
	case solicited:
		t.confirm(e)
	case e.queue != nil:
		t.setState(e, StateDelay) // packets wait: it is in use
	default:
		t.setState(e, StateStale)
	}
	for _, pkt := range t.takeQueue(e) {
		t.act(Deliver{IP: e.ip, LinkAddr: link, Packet: pkt})
	}
}

func (t *Table) setLink(e *entry, link encap.LinkAddr) {
	t.unindex(e)
	t.endChallenge(e)
	e.link, e.changed, e.lost = link, t.instant(t.now), 0
	t.index(e)
}

// fail ends a resolution without an answer. The entry stays for a while: first so that an absent
// host does not cost a broadcast for each packet, then so that users see it.
func (t *Table) fail(e *entry) {
	t.n.Failed++
	t.o.Log.Info("neighbour did not answer", "ip", e.ip, "queries", e.queries)
	t.act(Failed{IP: e.ip})
	t.discardQueue(e, DropUnresolved)
	t.setFailed(e, true)
}

// unreachable ends the probing of a known neighbour without an answer. The next
// packet begins a resolution at once, without a hold-down.
func (t *Table) unreachable(e *entry) {
	t.expired(e, ExpireUnreachable)
	t.unindex(e)
	t.endChallenge(e)
	e.link = encap.LinkAddr{}
	t.setFailed(e, false)
}

func (t *Table) setFailed(e *entry, held bool) {
	if e.lost == 0 {
		e.lost = t.instant(t.now)
	}
	e.held = held
	t.setState(e, StateFailed)
	if t.failed.Len() > max(1, t.o.maxNeighbors()/maxFailedShare) {
		t.remove(t.failed.Oldest(), 0, DropUnresolved)
	}
}

// remove drops an entry. It returns the packets that wait for it in Discard, with the reason why.
func (t *Table) remove(e *entry, reason ExpireReason, why Drop) {
	if e.state.Known() {
		t.expired(e, reason)
	}
	t.discardQueue(e, why)
	t.unindex(e)
	t.endChallenge(e)
	t.timers.Stop(&e.timer)
	t.listOf(e).Remove(e)
	delete(t.entries, e.ip)
}

// expired counts and logs that a neighbour is no longer known, and returns Expired for it.
func (t *Table) expired(e *entry, reason ExpireReason) {
	t.n.Expired++
	t.o.Log.Info("neighbour expired", "ip", e.ip, "link", e.link, "reason", reason)
	t.act(Expired{IP: e.ip, LinkAddr: e.link, Reason: reason})
}
