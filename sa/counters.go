package sa

import (
	"time"

	wire "ipoibcm/wire/sa"
)

// A Drop is a reason why a received MAD changed nothing.
type Drop uint8

// Reasons to drop.
const (
	DropMalformed Drop = iota // not a MAD of this class, or a field that cannot be
	DropMethod                // neither the answer to the question nor a report
	DropUnknown               // no question has its transaction ID
	DropSource                // not from where the question went
	DropMismatch              // about something else than was asked
	numDrops
)

var dropNames = [numDrops]string{"malformed", "method", "unknown_tid", "source", "mismatch"}

// String names d as the counters do.
func (d Drop) String() string { return dropNames[min(d, DropMismatch)] }

var kindNames = [numKinds]string{"info", "group", "path", "trap"}

// counts are the counters of a Client.
type counts struct {
	sent, retried, answered, refused, timeouts [numKinds]uint64
	drops                                      [numDrops]uint64

	busy, redirects, badRedirects, reregisters uint64
	reports, strayReports                      uint64
	refusedGroups, refusedPaths, refusedTraps  uint64
	evictedPaths, pathHits                     uint64
}

// Counters calls f for every counter, in a fixed order: tx_info … (sent, repeats
// included), retry_info …, ok_info … (answered), refused_info …, timeout_info …
// for each kind of question, drop_malformed … (by reason), and the others.
func (c *Client) Counters(f func(name string, value uint64)) {
	n := &c.counters
	for _, set := range []struct {
		name   string
		values *[numKinds]uint64
	}{
		{"tx_", &n.sent}, {"retry_", &n.retried}, {"ok_", &n.answered}, {"refused_", &n.refused}, {"timeout_", &n.timeouts},
	} {
		for i, v := range set.values {
			f(set.name+kindNames[i], v)
		}
	}
	for d := range numDrops {
		f("drop_"+d.String(), n.drops[d])
	}
	f("busy", n.busy)
	f("redirects", n.redirects)
	f("bad_redirects", n.badRedirects)
	f("reregisters", n.reregisters)
	f("reports", n.reports)
	f("stray_reports", n.strayReports)
	f("path_hits", n.pathHits)
	f("evicted_paths", n.evictedPaths)
	f("refused_max_groups", n.refusedGroups)
	f("refused_max_paths", n.refusedPaths)
	f("refused_max_traps", n.refusedTraps)
}

// Info is what there is to show of a Client.
type Info struct {
	State State
	Since time.Time
	Admin Address            // where questions go
	Class wire.ClassPortInfo // zero before StateReady
	Paths int                // known and in question
	// InFlight and Waiting are questions.
	InFlight, Waiting int
}

// Info returns how the Client fares.
func (c *Client) Info() Info {
	return Info{State: c.state, Since: c.since, Admin: c.admin, Class: c.info, Paths: len(c.paths),
		InFlight: c.inFlight(), Waiting: len(c.queue)}
}

// GroupInfo is what there is to show of a group.
type GroupInfo struct {
	Join   Join
	Joined bool                // the administrator has said so
	Group  wire.MCMemberRecord // if Joined
	Failed *JoinFailed         // why not, if that was told
}

// Groups lists the groups that the user has joined, in that order.
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
