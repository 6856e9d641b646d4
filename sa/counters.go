package sa

import (
	"time"

	"ipoibcm/counters"
	wire "ipoibcm/wire/sa"
)

// A Drop is a reason why a received MAD changed nothing.
type Drop uint8

// Reasons to drop.
const (
	DropMalformed Drop = iota // not a MAD of this class, or a field has an impossible value
	DropMethod                // neither the answer to the question nor a report
	DropUnknown               // no question has its transaction ID
	DropSource                // not from the LID to which the question was sent
	DropMismatch              // about something else than was asked
	numDrops
)

var dropNames = [numDrops]string{"malformed", "method", "unknown_tid", "source", "mismatch"}

// String names d as the counters do.
func (d Drop) String() string { return dropNames[min(d, DropMismatch)] }

var kindNames = [numKinds]string{"info", "group", "path", "trap"}

// byKind are counters by kind of question, byDrop by reason.
type (
	byKind [numKinds]uint64
	byDrop [numDrops]uint64
)

// Name returns the name of counter k.
func (*byKind) Name(k int) string { return kindNames[k] }

// Name returns the name of counter d.
func (*byDrop) Name(d int) string { return Drop(d).String() }

// counts are the counters of a Client.
type counts struct {
	sent     byKind `name:"tx_"` // repeats included
	retried  byKind `name:"retry_"`
	answered byKind `name:"ok_"`
	refused  byKind `name:"refused_"`
	timeouts byKind `name:"timeout_"`
	drops    byDrop `name:"drop_"`

	busy          uint64 `name:"busy"`
	redirects     uint64 `name:"redirects"`
	badRedirects  uint64 `name:"bad_redirects"`
	reregisters   uint64 `name:"reregisters"`
	reports       uint64 `name:"reports"`
	strayReports  uint64 `name:"stray_reports"`
	pathHits      uint64 `name:"path_hits"`
	evictedPaths  uint64 `name:"evicted_paths"`
	refusedGroups uint64 `name:"refused_max_groups"`
	refusedPaths  uint64 `name:"refused_max_paths"`
	refusedTraps  uint64 `name:"refused_max_traps"`
}

// Counters calls f for every counter, in a fixed order.
func (c *Client) Counters(f func(name string, value uint64)) { counters.Each(&c.counters, f) }

// Info is the state of a Client for display.
type Info struct {
	State State
	Since time.Time
	Admin Address            // to which questions are sent
	Class wire.ClassPortInfo // zero before StateReady
	Paths int                // known and in question
	// InFlight counts questions without an answer yet, Waiting those not sent yet.
	InFlight, Waiting int
}

// Info returns the state of the Client.
func (c *Client) Info() Info {
	return Info{State: c.state, Since: c.since, Admin: c.admin, Class: c.info, Paths: len(c.paths),
		InFlight: c.inFlight(), Waiting: len(c.queue)}
}

// GroupInfo is the state of a group for display.
type GroupInfo struct {
	Join   Join
	Joined bool                // the Client has returned Joined for this Join
	Group  wire.MCMemberRecord // if Joined
	Failed *JoinFailed         // the last JoinFailed, if the join still fails
}

// Groups lists the groups that the user has joined, in the order of their first Join.
func (c *Client) Groups() []GroupInfo {
	out := make([]GroupInfo, 0, len(c.order))
	for _, g := range c.order {
		if g.want == 0 {
			continue
		}
		i := GroupInfo{Join: g.join, Joined: g.told}
		if g.told {
			i.Group = g.record
		}
		if g.failing {
			f := g.failed
			i.Failed = &f
		}
		out = append(out, i)
	}
	return out
}
