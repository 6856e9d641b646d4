package neigh

import (
	"net/netip"
	"time"

	"ipoibcm/wire/encap"
)

const (
	// challengeProbes is how many probes go to the place where a neighbour is known to be
	// before we believe that it has moved. challengeWait is how long we wait for the answer to
	// each. Anybody can forge an announcement, but a forger cannot silence the old place.
	challengeProbes = 2
	challengeWait   = 250 * time.Millisecond
	// restartWait is that wait if the claim names the same GID with another QPN. An agent that
	// has restarted does so, and no other host could gain the address.
	restartWait = 100 * time.Millisecond
	// maxChallenges bounds how many neighbours are asked at a time: one packet, which may be
	// forged, costs two of ours.
	maxChallenges = 256
	// settledTime is how long a neighbour must have stayed in one place for its next move to
	// be logged as its first.
	settledTime = 10 * time.Minute
)

// A rival is another place where a known neighbour is said to be.
type rival struct {
	link      encap.LinkAddr
	solicited bool // the claim answered a query of ours
}

// moves says what was logged of a neighbour's moves.
type moves struct {
	from     encap.LinkAddr // link-layer address before the last move
	at       instant        // when the last move was
	flapping bool           // logged that the neighbour moves back and forth
	refused  bool           // logged that a claim was refused
}

// silent reports whether the place of e has answered none of its probes, so that we believe the
// answer of another place to the last probe, which went to everybody.
func (t *Table) silent(e *entry, solicited bool) bool {
	return solicited && e.state == StateProbe && e.rival == nil && int(e.queries) >= t.o.probes() &&
		int(e.queries) > challengeProbes
}

// claim notes that e is said to be at link, and asks at the old place. Without an own address to
// ask from it believes the claim.
func (t *Table) claim(dst []Action, now time.Time, e *entry, link encap.LinkAddr, solicited bool) []Action {
	last := e.changed
	if link.GID == e.link.GID {
		last = e.moved
	}
	switch r := e.rival; {
	case r != nil:
		// The first claim counts, unless this one is the first that keeps the GID of e.
		if link.GID == e.link.GID && r.link.GID != link.GID || link.Key() == r.link.Key() {
			r.link, r.solicited = link, solicited || r.solicited && link.Key() == r.link.Key()
			return dst
		}
		return t.refuse(dst, DropLocked, e.ip, link, link)
	case t.since(now, last) < lockTime:
		return t.refuse(dst, DropLocked, e.ip, link, link)
	case t.challenges >= maxChallenges:
		return t.refuse(dst, DropChallenges, e.ip, link, link)
	case t.source(e.ip, netip.Addr{}) == nil:
		return t.move(dst, now, e, link, solicited)
	}
	e.rival = &rival{link, solicited}
	t.challenges++
	t.n.Challenges++
	t.setState(now, e, StateProbe)
	return t.challenge(dst, now, e)
}

// challenge asks the old place of e, or believes the rival after challengeProbes without an answer.
func (t *Table) challenge(dst []Action, now time.Time, e *entry) []Action {
	a := t.source(e.ip, netip.Addr{})
	if r := *e.rival; int(e.queries) >= challengeProbes || a == nil {
		return t.move(dst, now, e, r.link, r.solicited)
	}
	e.queries++
	t.n.Probes++
	wait := challengeWait
	if e.rival.link.GID == e.link.GID {
		wait = restartWait
	}
	t.set(&e.timer, now.Add(wait))
	return t.sendQuery(dst, a, e.ip, Dest{LinkAddr: e.link})
}

// endChallenge forgets the rival of e.
func (t *Table) endChallenge(e *entry) {
	if e.rival != nil {
		e.rival = nil
		t.challenges--
	}
}

// defended notes that e has spoken where it is known to be: its rival's claim is false, or
// both have the address.
func (t *Table) defended(dst []Action, now time.Time, e *entry) []Action {
	if e.rival == nil {
		return dst
	}
	r := *e.rival
	t.endChallenge(e)
	e.changed = t.instant(now) // the next claim must wait for lockTime, as after a change
	e.moved = e.changed
	if e.used == 0 || t.since(now, e.used) > t.o.reachableTime() {
		t.setState(now, e, StateStale)
	} else {
		t.setState(now, e, StateDelay)
	}
	if m := t.movesOf(e); !m.refused {
		m.refused = true
		t.o.Log.Warn("another host claims the address of a neighbour, which still answers", "ip", e.ip, "neighbour",
			e.link, "claimed", r.link)
	}
	return t.refuse(dst, DropStillThere, e.ip, r.link, r.link)
}

// asks notes that the host at by asks for ip, so that it does not have ip. If we know neighbour
// ip to be at by, its rival is believed at once.
func (t *Table) asks(dst []Action, now time.Time, ip netip.Addr, by encap.LinkAddr) []Action {
	if e := t.entries[ip]; e != nil && e.rival != nil && by.Key() == e.link.Key() {
		return t.move(dst, now, e, e.rival.link, e.rival.solicited)
	}
	return dst
}

func (t *Table) movesOf(e *entry) *moves {
	if e.moves == nil {
		e.moves = new(moves)
	}
	return e.moves
}

// move records that e is at link from now on.
func (t *Table) move(dst []Action, now time.Time, e *entry, link encap.LinkAddr, solicited bool) []Action {
	old := e.link
	t.setLink(now, e, link)
	e.moved = t.instant(now)
	t.n.Changed++
	t.tellMove(now, e, old)
	dst = append(dst, Changed{IP: e.ip, Old: old, New: link})
	if solicited {
		e.answered = t.instant(now)
		t.confirm(now, e)
		return dst
	}
	e.confirmed = 0
	t.setState(now, e, StateStale)
	return dst
}

// tellMove logs a move. It logs the first move back to the place before within settledTime as
// moving back and forth, and no further moves.
func (t *Table) tellMove(now time.Time, e *entry, old encap.LinkAddr) {
	m := t.movesOf(e)
	if m.at != 0 && t.since(now, m.at) >= settledTime {
		*m = moves{}
	}
	switch back := m.at != 0 && m.from == e.link; {
	case m.flapping:
	case back:
		m.flapping = true
		t.o.Log.Warn("neighbour moves back and forth", "ip", e.ip, "old", old, "new", e.link)
	default:
		t.o.Log.Info("neighbour changed its link-layer address", "ip", e.ip, "old", old, "new", e.link)
	}
	m.from, m.at = old, t.instant(now)
}
