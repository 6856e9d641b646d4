package ipoib

import (
	"net/netip"
	"time"

	"ipoibcm/ib"
)

// silenceMemory is how long a question that nobody answered says something of the
// whole link.
const silenceMemory = 10 * time.Minute

// answers is what shows whether anybody on the link hears us, and we them.
type answers struct {
	heard  time.Time  // the last frame, message or packet of another host
	failed time.Time  // nobody answered for asked
	asked  netip.Addr // the last address that nobody answered for
	// members are when those on the list of members were last heard.
	members map[ib.GID]time.Time
}

// heardFrom notes that a host said something.
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

// silence returns what is known of a link on which nobody answers: nobody has been
// heard since a question failed, and there is no connection.
func (f *Interface) silence() Silence {
	a := &f.answers
	if a.failed.IsZero() || a.failed.Before(a.heard) || f.conns.up > 0 || f.now.Sub(a.failed) > silenceMemory {
		return Silence{}
	}
	return Silence{Asked: a.asked, At: a.failed, Heard: a.heard}
}
