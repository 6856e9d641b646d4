package ipoib

import (
	"net/netip"
	"time"

	"ipoibcm/ib"
)

// silenceMemory is how long a question that nobody answered counts as a sign that nobody on
// the link answers.
const silenceMemory = 10 * time.Minute

// answers shows whether anybody on the link hears us, and whether we hear anybody.
type answers struct {
	heard  time.Time  // when the last frame, message or packet of another host came
	failed time.Time  // when a query for asked last failed
	asked  netip.Addr // the last address that nobody answered for
	// members holds when each member of Options.Peers was last heard; zero if it never was.
	members map[ib.GID]time.Time
}

// heardFrom notes that something came from the host at gid.
func (f *Interface) heardFrom(gid ib.GID) {
	if gid != f.link.GID {
		f.answers.heard = f.now
		if _, ok := f.answers.members[gid]; ok {
			f.answers.members[gid] = f.now
		}
	}
}

// noAnswerFor notes that nobody answers for an address.
func (f *Interface) noAnswerFor(addr netip.Addr) { f.answers.asked, f.answers.failed = addr, f.now }

// silence returns a Silence if nobody on the link answers: a question failed of late, nobody
// has been heard since, and there is no connection. Otherwise it returns the zero Silence.
func (f *Interface) silence() Silence {
	a := &f.answers
	if a.failed.IsZero() || a.failed.Before(a.heard) || f.conns.up > 0 || f.now.Sub(a.failed) > silenceMemory {
		return Silence{}
	}
	return Silence{Asked: a.asked, At: a.failed, Heard: a.heard}
}
