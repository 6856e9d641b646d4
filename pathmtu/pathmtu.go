// Package pathmtu finds the largest packet that a path carries. It has the caller send packets that
// the other end answers, as RFC 8899 specifies for datagrams, and believes no message of a router.
//
// A [Search] is pure: it returns which sizes to send, and its caller reports which were answered. It
// does not know what a packet looks like or who is at the other end. An end that does not answer even
// the smallest size does not support probes: then the search learns nothing about the path.
//
// Sources: RFC 8899 sections 4.3 (black holes), 5.2 (states) and 5.3 (search with a table of
// sizes). Missing: its timer of 15 s for one probe. Here a probe of the smallest size is sent with
// each larger one: once it is answered, the answer to the larger one is late.
package pathmtu

import (
	"math/bits"
	"slices"
	"time"
)

const (
	// MaxSizes bounds the sizes of a search.
	MaxSizes = 16

	// maxRounds bounds the rounds of a search. maxSilent is after how many rounds without any
	// answer a search gives up.
	maxRounds = 10
	maxSilent = 4
	// A path counts as too narrow for a size if no probe of the size had an answer while the smallest
	// size was answered in this many rounds: heardFirst in a search from nothing, heardAgain where the
	// size in force is confirmed, heardRaise where sizes above that in force are tried.
	heardFirst = 5
	heardAgain = 6
	heardRaise = 2

	// confirmEvery is how long an answer proves the size in force, while there is traffic.
	confirmEvery = 15 * time.Second
	// raiseFirst is the first time after which a larger size is tried. The time doubles with each
	// try, up to raiseMost.
	raiseFirst = 10 * time.Second
	raiseMost  = 10 * time.Minute
	// idleAfter is for how long a search that lowered nothing is kept while nothing is sent.
	idleAfter = time.Minute
	// silentFirst is the first time after which an end that answered nothing is asked again. It
	// doubles with each try, up to raiseMost.
	silentFirst = 30 * time.Second
)

// A State is how far a search is, in the terms of RFC 8899 section 5.2.
type State uint8

// States.
const (
	Disabled  State = iota // the other end answers no probes
	Searching              // probes are sent, and answers waited for
	Complete               // the size is known
)

// String returns the state in a word.
func (s State) String() string {
	return [...]string{"disabled", "searching", "complete"}[min(s, Complete)]
}

// A Probe is one packet to send.
type Probe struct {
	Octets int
	ID     uint64
}

// A Search finds the largest of some sizes that a path carries. The largest size is in force
// ([Search.Octets]) until it is known to be lost. A zero Search cannot be used; use [New].
type Search struct {
	sizes []int // ascending; every path is taken to carry the first

	state  State
	result int // index of the size in force
	most   int // index of the largest that can be sent

	target int // largest size that the present rounds try (index)
	best   int // largest size that was answered in them (index); -1: none
	need   int // number of rounds in which the smallest size must be answered
	round  int
	known  bool   // the other end has answered a probe
	heard  uint16 // by bit: the rounds in which the smallest size was answered
	id     uint64 // of the present rounds; in a probe's ID the last octet is the number of its round
	due    time.Time

	used       time.Time // when the search began last, or when packets last went to the other end
	confirmed  time.Time // when the size in force was last answered
	lowered    time.Time // when the size in force was last lowered
	again      time.Time // when a larger size is tried, or a silent end is asked again
	raiseAfter time.Duration
	quietFor   time.Duration
}

// New returns a search among sizes, which ascend and are not changed any more. Nothing is sent
// before [Search.Start]. It panics if there are no sizes, more than MaxSizes, or if they descend.
func New(sizes []int) *Search {
	if len(sizes) == 0 || len(sizes) > MaxSizes || !slices.IsSorted(sizes) {
		panic("pathmtu: New with bad sizes") // our bug
	}
	top := len(sizes) - 1
	return &Search{sizes: sizes, result: top, most: top, best: -1,
		raiseAfter: raiseFirst, quietFor: silentFirst}
}

// Octets returns the size in force: the largest that is not known to be lost.
func (s *Search) Octets() int { return s.sizes[s.result] }

// Lowered reports whether larger sizes are known to be lost.
func (s *Search) Lowered() bool { return s.result < len(s.sizes)-1 }

// Since returns when the size in force was last lowered; zero if it never was.
func (s *Search) Since() time.Time { return s.lowered }

// RaiseDue reports whether it is time to try a larger size than that in force (RFC 8899 section
// 5.1.1, PMTU_RAISE_TIMER).
func (s *Search) RaiseDue(now time.Time) bool { return s.Lowered() && !now.Before(s.again) }

// Raise begins to try the sizes above that in force, up to the largest that can be sent, and
// appends the first probes to dst. id is as in [Search.Start].
func (s *Search) Raise(dst []Probe, now time.Time, id uint64) []Probe {
	return s.begin(dst, now, id, s.most, s.result, heardRaise)
}

// State returns how far the search is.
func (s *Search) State() State { return s.state }

// Answered reports whether the other end has ever answered.
func (s *Search) Answered() bool { return s.known }

// Sizes returns all sizes. They must not be changed.
func (s *Search) Sizes() []int { return s.sizes }

// Deadline returns when [Search.Wake] is due; zero means never.
func (s *Search) Deadline() time.Time { return s.due }

// IdleAt returns from when on the search need not be kept: it has lowered nothing, so a new search
// would begin with the same size in force, and nothing was sent for a while. There may be very many
// such searches. Zero means never: the search is under way, or has lowered the size in force.
func (s *Search) IdleAt() time.Time {
	if s.state == Searching || s.Lowered() {
		return time.Time{}
	}
	return s.used.Add(idleAfter)
}

// Limit bounds the probes from now on to n octets, the most that the caller can send.
func (s *Search) Limit(n int) {
	for s.most = len(s.sizes) - 1; s.most > 0 && s.sizes[s.most] > n; s.most-- {
	}
	s.target = min(s.target, s.most)
}

// Start begins a search from nothing and appends its first probes to dst. All octets of their IDs
// but the last are those of id, which nobody must be able to guess.
func (s *Search) Start(dst []Probe, now time.Time, id uint64) []Probe {
	return s.begin(dst, now, id, min(s.result, s.most), -1, heardFirst)
}

func (s *Search) begin(dst []Probe, now time.Time, id uint64, target, best, need int) []Probe {
	s.state, s.target, s.best, s.need, s.round, s.heard, s.used = Searching, target, best, need, 0, 0, now
	s.id = id &^ 0xff
	return s.send(dst, now)
}

// send appends the probes of one round: the smallest size, whose answer shows that the path carries
// anything at all, and the target. Once the smallest has been answered, it adds the sizes between
// the best one and the target.
func (s *Search) send(dst []Probe, now time.Time) []Probe {
	id, from := s.id|uint64(s.round), s.best+1
	if s.heard == 0 {
		from = s.target
	}
	dst = append(dst, Probe{s.sizes[0], id})
	for i := max(from, 1); i <= s.target; i++ {
		dst = append(dst, Probe{s.sizes[i], id})
	}
	s.round++
	s.due = now.Add(wait(s.round))
	return dst
}

// wait returns how long a round waits for its answers. Later answers count all the same.
func wait(round int) time.Duration {
	return 100 * time.Millisecond << max(0, min(round-heardFirst, 2))
}

// Answer takes the answer to a probe. ours reports whether it belongs to the present rounds, and
// changed whether it changed the size in force. Answer may change [Search.Deadline].
func (s *Search) Answer(now time.Time, p Probe) (ours, changed bool) {
	i, ok := slices.BinarySearch(s.sizes, p.Octets)
	if !ok || s.id == 0 || p.ID&^0xff != s.id || int(p.ID&0xff) >= s.round {
		return false, false
	}
	s.quietFor, s.known = silentFirst, true
	if i == 0 {
		s.heard |= 1 << (p.ID & 0xff)
	}
	s.best = max(s.best, i)
	if i >= s.result {
		s.confirmed = now
	}
	if changed = i > s.result; changed {
		s.result = i
	}
	switch {
	case s.state != Complete && s.best >= s.target:
		s.complete(now)
	case s.state == Disabled: // the other end was only slow
		s.state, s.due = Searching, now
	}
	return true, changed
}

// complete ends the rounds. If a larger size than that in force was tried, the next try is due
// after s.raiseAfter, which then doubles, up to raiseMost.
func (s *Search) complete(now time.Time) {
	s.state, s.due = Complete, time.Time{}
	if s.target > s.result {
		s.again = now.Add(s.raiseAfter)
		s.raiseAfter = min(2*s.raiseAfter, raiseMost)
	}
}

// lower puts the best answered size in force if that is smaller than the target and the size in
// force. It reports whether it did.
func (s *Search) lower(now time.Time) bool {
	best := max(s.best, 0)
	if best >= s.target || best >= s.result {
		return false
	}
	if now.Sub(s.lowered) > 2*raiseMost {
		s.raiseAfter = raiseFirst
	}
	s.result, s.lowered, s.confirmed = best, now, now
	return true
}

// Wake ends the round that is over. It appends the probes of the next round, if there is one, to
// dst. changed says whether the size in force has changed.
func (s *Search) Wake(dst []Probe, now time.Time) (probes []Probe, changed bool) {
	if s.due.IsZero() || now.Before(s.due) {
		return dst, false
	}
	heard := bits.OnesCount16(s.heard)
	switch {
	case heard >= s.need:
		changed = s.lower(now)
		s.complete(now)
		return dst, changed
	case s.best < 0 && s.round >= maxSilent:
		s.state, s.due = Disabled, time.Time{}
		s.again = now.Add(s.quietFor)
		s.quietFor = min(2*s.quietFor, raiseMost)
		return dst, false
	case s.round >= maxRounds: // too many probes of all sizes are lost to say anything
		s.complete(now)
		return dst, false
	}
	return s.send(dst, now), false
}

// Used notes that packets have left for the other end since the last call. It appends the probes
// that are due to dst: to confirm that the path carries the size in force, to try a larger one, or
// to ask a silent end again. If it begins new rounds, their id is id.
func (s *Search) Used(dst []Probe, now time.Time, id uint64) []Probe {
	s.used = now
	switch {
	case s.state == Disabled && !now.Before(s.again):
		return s.Start(dst, now, id)
	case s.state != Complete:
		return dst
	case s.most > s.result && s.RaiseDue(now):
		return s.Raise(dst, now, id)
	case now.Sub(s.confirmed) >= confirmEvery:
		return s.begin(dst, now, id, min(s.result, s.most), -1, heardAgain)
	}
	return dst
}
