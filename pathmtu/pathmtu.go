// Package pathmtu finds the largest packet that a path carries by sending packets that the
// other end answers, as RFC 8899 has it for datagrams: no message of a router is believed.
//
// A [Search] is pure: it says which sizes to send, and is told which were answered. It knows
// nothing of what a packet looks like or of who is at the other end. An end that answers not
// even the smallest one is an implementation that knows no probes: nothing is said of its path.
//
// Sources: RFC 8899 sections 4.3 (black holes), 5.2 (states) and 5.3 (search with a table of
// sizes). Missing: its timer of 15 s for one probe, because here a smaller probe leaves beside
// each one, and its answer tells when the other is late.
package pathmtu

import (
	"math/bits"
	"slices"
	"time"
)

const (
	// MaxSizes bounds the sizes of a search.
	MaxSizes = 16

	// maxRounds bounds the rounds of a search; maxSilent those in which nothing is answered.
	maxRounds = 10
	maxSilent = 4
	// heardFirst and heardAgain are in how many rounds the smallest size must be answered, and
	// a larger one not, for that to count as lost because of its size: for the first time on a
	// path, and where the larger one was answered before.
	heardFirst = 5
	heardAgain = 6
	// heardRaise is the same where more is tried than the path is known to carry.
	heardRaise = 2

	// confirmEvery is how long an answer proves the size, while there is traffic.
	confirmEvery = 15 * time.Second
	// raiseFirst and raiseMost are the times after which more is tried: twice as long each time.
	raiseFirst = 10 * time.Second
	raiseMost  = 10 * time.Minute
	// idleAfter is for how long a search without a result is of use to nobody while nothing is sent.
	idleAfter = time.Minute
	// silentFirst is when an end that answers nothing is asked again; raiseMost bounds that too.
	silentFirst = 30 * time.Second
)

// A State says how far a search is, in the words of RFC 8899 section 5.2.
type State uint8

// States.
const (
	Disabled  State = iota // the other end answers no probes
	Searching              // answers are waited for
	Complete               // the size is known
)

// String prints the state in a word.
func (s State) String() string {
	return [...]string{"disabled", "searching", "complete"}[min(s, Complete)]
}

// A Probe is one packet to send.
type Probe struct {
	Octets int
	ID     uint64
}

// A Search finds the largest of some sizes that a path carries. It begins with the largest,
// and that is what [Search.Octets] says until it is known to be lost. A zero Search is none; use
// [New].
type Search struct {
	sizes []int // ascending; the first is what every path is taken to carry

	state  State
	result int // index of the size in force
	most   int // index of the largest that can be sent

	target int // of the rounds under way: the largest size that is tried
	best   int // the largest that was answered in them; -1: none
	need   int // in how many rounds the smallest must be heard
	round  int
	known  bool   // the other end has answered a probe
	heard  uint16 // rounds whose smallest probe was answered
	id     uint64 // of the rounds under way; its last octet is that of the round
	due    time.Time

	used       time.Time // when it was begun, or packets went to the other end
	confirmed  time.Time // when the size in force was last answered
	lowered    time.Time // when the size in force became less
	again      time.Time // when more is tried, or a silent end is asked again
	raiseAfter time.Duration
	quietFor   time.Duration
}

// New returns a search among sizes, which ascend and are not changed any more. Nothing is sent
// before [Search.Start]. It panics if there are no sizes, or too many.
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

// Since returns when the size in force became less; zero if it never did.
func (s *Search) Since() time.Time { return s.lowered }

// RaiseDue reports whether it is time to try a larger size than that in force (RFC 8899 section
// 5.1.1, PMTU_RAISE_TIMER).
func (s *Search) RaiseDue(now time.Time) bool { return s.Lowered() && !now.Before(s.again) }

// Raise begins to try the largest size that can be sent, and appends the first probes to dst.
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

// IdleAt returns when the search need not be kept any more, of which there may be very many: it
// has found nothing that another would not, and nothing was sent for a while. Zero means never.
func (s *Search) IdleAt() time.Time {
	if s.state == Searching || s.Lowered() {
		return time.Time{}
	}
	return s.used.Add(idleAfter)
}

// Limit says that from now on no probe of more than n octets can be sent.
func (s *Search) Limit(n int) {
	for s.most = len(s.sizes) - 1; s.most > 0 && s.sizes[s.most] > n; s.most-- {
	}
	s.target = min(s.target, s.most)
}

// Start begins a search from nothing and appends its first probes to dst. Their IDs begin as id
// does, which nobody can guess.
func (s *Search) Start(dst []Probe, now time.Time, id uint64) []Probe {
	return s.begin(dst, now, id, min(s.result, s.most), -1, heardFirst)
}

func (s *Search) begin(dst []Probe, now time.Time, id uint64, target, best, need int) []Probe {
	s.state, s.target, s.best, s.need, s.round, s.heard, s.used = Searching, target, best, need, 0, 0, now
	s.id = id &^ 0xff
	return s.send(dst, now)
}

// send appends the probes of one round: the smallest size, which tells that the path carries
// anything at all, and what may be the largest. That alone at first; then what lies below, too.
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

// wait is how long answers of a round are waited for. Later ones count all the same.
func wait(round int) time.Duration {
	return 100 * time.Millisecond << max(0, min(round-heardFirst, 2))
}

// Answer takes the answer to a probe. It reports whether that was one of ours, and whether the
// size in force is another now. [Search.Deadline] may be another afterwards.
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
	case s.state == Disabled: // it was only slow
		s.state, s.due = Searching, now
	}
	return true, changed
}

// complete ends the rounds with the size in force.
func (s *Search) complete(now time.Time) {
	s.state, s.due = Complete, time.Time{}
	if s.target > s.result {
		s.again = now.Add(s.raiseAfter)
		s.raiseAfter = min(2*s.raiseAfter, raiseMost)
	}
}

// lower has a smaller size in force, if less than what was tried has been answered, and
// reports whether it did.
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

// Wake ends a round that is over, appends the probes of the next one, if there is one, to dst,
// and reports whether the size in force is another now.
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
	case s.round >= maxRounds: // too much is lost of all sizes to say anything
		s.complete(now)
		return dst, false
	}
	return s.send(dst, now), false
}

// Used says that packets have gone to the other end since it was called last, and appends to dst
// what is to be sent therefore: whether the path still carries the size in force, or more. A
// search that begins has that id.
func (s *Search) Used(dst []Probe, now time.Time, id uint64) []Probe {
	s.used = now
	switch {
	case s.state == Searching:
		return dst
	case s.state == Disabled:
		if now.Before(s.again) {
			return dst
		}
		return s.begin(dst, now, id, min(s.result, s.most), -1, heardFirst)
	case s.most > s.result && s.RaiseDue(now):
		return s.Raise(dst, now, id)
	case now.Sub(s.confirmed) >= confirmEvery:
		return s.begin(dst, now, id, min(s.result, s.most), -1, heardAgain)
	}
	return dst
}
