package neigh

import (
	"net/netip"
	"time"

	"ipoibcm/wire/encap"
)

const (
	// challengeProbes is how many probes we send to a neighbour's known link-layer address, its
	// place, before we believe that it has moved. challengeWait is how long we wait for the answer
	// to each. Anybody can forge an announcement, but a forger cannot silence the old place.
	challengeProbes = 2
	challengeWait   = 250 * time.Millisecond
	// restartWait replaces challengeWait if the claim has the same GID with another QPN. An agent
	// that has restarted sends such a claim, and no other host can gain the address by it.
	restartWait = 100 * time.Millisecond
	// maxChallenges bounds the neighbours that are challenged at a time: one packet, which may be
	// forged, makes us send two.
	maxChallenges = 256
	// settledTime is how long a neighbour must have stayed in one place for its next move to
	// be logged as its first.
	settledTime = 10 * time.Minute
)

// A rival is another place of a known neighbour, which a claim names and which is not proven.
type rival struct {
	link      encap.LinkAddr
	solicited bool // the claim answered a query of ours
	router    bool // what the claim says of e.router
}

// moves are a neighbour's last move, and what was logged about it.
type moves struct {
	from     encap.LinkAddr // link-layer address before the last move
	at       instant        // when the last move was
	flapping bool           // logged that the neighbour moves back and forth
	refused  bool           // logged that a claim was refused
}

// silent reports whether we believe the answer of another place to a probe at once. We do if all
// probes of e are sent, and the known place has answered none. The last probe was sent to the hint
// or the broadcast group, so that another place could answer.
func (t *Table) silent(e *entry, solicited bool) bool {
	return solicited && e.state == StateProbe && e.rival == nil && int(e.queries) >= t.o.probes() &&
		int(e.queries) > challengeProbes
}

// claim handles a claim that e has moved to link: it begins a challenge, which probes the old
// place. Without an own address to probe from it believes the claim.
func (t *Table) claim(e *entry, link encap.LinkAddr, solicited bool) {
	switch r := e.rival; {
	case r != nil && (link.GID == e.link.GID && r.link.GID != link.GID || link.Key() == r.link.Key()):
		// The first claim counts, unless this one is the first that keeps the GID of e.
		r.link, r.solicited = link, solicited || r.solicited && link.Key() == r.link.Key()
	case r != nil, t.locked(e, link):
		t.refuse(DropLocked, e.ip, link, link)
	case t.challenges >= maxChallenges:
		t.refuse(DropChallenges, e.ip, link, link)
	case t.source(e.ip, netip.Addr{}) == nil:
		t.move(e, link, solicited)
	default:
		e.rival = &rival{link, solicited, e.router}
		t.challenges++
		t.n.Challenges++
		t.setState(e, StateProbe)
		t.challenge(e)
	}
}

// locked reports whether it is too soon after a change of e for a claim that e is at link.
func (t *Table) locked(e *entry, link encap.LinkAddr) bool {
	if link.GID == e.link.GID {
		return t.since(e.moved) < lockTime
	}
	return t.since(e.changed) < lockTime
}

// challenge probes the old place of e. After challengeProbes without an answer, or without an own
// address, it believes the rival.
func (t *Table) challenge(e *entry) {
	a := t.source(e.ip, netip.Addr{})
	if int(e.queries) >= challengeProbes || a == nil {
		t.believe(e)
		return
	}
	e.queries++
	t.n.Probes++
	wait := challengeWait
	if e.rival.link.GID == e.link.GID {
		wait = restartWait
	}
	t.set(&e.timer, t.now.Add(wait))
	t.sendQuery(a, e.ip, Dest{LinkAddr: e.link})
}

// believe moves e to the place of its rival.
func (t *Table) believe(e *entry) {
	r := *e.rival
	e.router = r.router
	t.move(e, r.link, r.solicited)
}

// endChallenge forgets the rival of e.
func (t *Table) endChallenge(e *entry) {
	if e.rival != nil {
		e.rival = nil
		t.challenges--
	}
}

// defended notes a message from the known place of e: the claim of its rival is false, or both have
// the address.
func (t *Table) defended(e *entry) {
	if e.rival == nil {
		return
	}
	r := *e.rival
	t.endChallenge(e)
	e.changed = t.instant(t.now) // the next claim must wait for lockTime, as after a change
	e.moved = e.changed
	if t.inUse(e) {
		t.setState(e, StateDelay)
	} else {
		t.setState(e, StateStale)
	}
	if m := t.movesOf(e); !m.refused {
		m.refused = true
		t.o.Log.Warn("another host claims the address of a neighbour, which still answers", "ip", e.ip, "neighbour",
			e.link, "claimed", r.link)
	}
	t.refuse(DropStillThere, e.ip, r.link, r.link)
}

// asks notes that the host at by asks for ip. So that host does not have ip. If by is the known
// place of neighbour ip, we believe its rival at once.
func (t *Table) asks(ip netip.Addr, by encap.LinkAddr) {
	if e := t.entries[ip]; e != nil && e.rival != nil && by.Key() == e.link.Key() {
		t.believe(e)
	}
}

func (t *Table) movesOf(e *entry) *moves {
	if e.moves == nil {
		e.moves = new(moves)
	}
	return e.moves
}

// move records that e is at link from now on.
func (t *Table) move(e *entry, link encap.LinkAddr, solicited bool) {
	old := e.link
	t.setLink(e, link)
	e.moved = t.instant(t.now)
	t.n.Changed++
	t.tellMove(e, old)
	t.act(Changed{IP: e.ip, Old: old, New: link})
	if solicited {
		e.answered = t.instant(t.now)
		t.confirm(e)
		return
	}
	e.confirmed = 0
	t.setState(e, StateStale)
}

// tellMove logs a move. When e first moves back to the place before, within settledTime, it logs
// that e moves back and forth. After that it logs nothing until e has stayed in one place for
// settledTime.
func (t *Table) tellMove(e *entry, old encap.LinkAddr) {
	m := t.movesOf(e)
	if m.at != 0 && t.since(m.at) >= settledTime {
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
	m.from, m.at = old, t.instant(t.now)
}
