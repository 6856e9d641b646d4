package ipoib

import (
	"ipoibcm/neigh"
	"ipoibcm/nexthop"
)

// An Outcome is what would become of a packet that the host sends now.
type Outcome uint8

// Outcomes.
const (
	OutcomeDropped   Outcome = iota // nobody gets the packet
	OutcomeUnknown                  // it waits for a next hop that has not been asked for, or has not answered yet
	OutcomeElsewhere                // it goes by another device
	OutcomeSent                     // it goes to a known neighbour, a group, or this host
)

// String prints dropped, unknown, elsewhere or sent.
func (o Outcome) String() string {
	return [...]string{"dropped", "unknown", "elsewhere", "sent"}[min(o, OutcomeSent)]
}

// outcome returns what would become of a packet to e.Addr, which the kernel sends to hop.
func (f *Interface) outcome(e *Explanation, hop nexthop.Hop) Outcome {
	switch {
	case !e.Addr.IsValid(), !f.up, e.Addr.Is6() && !f.ipv6:
		return OutcomeDropped
	case f.addrs.has(e.Addr):
		return OutcomeSent
	case !f.active:
		return OutcomeDropped
	case f.group.Table().IsGroup(e.Addr):
		return OutcomeSent
	case !hop.Leaves || hop.Bound:
		if hop.Answer.OK() {
			return OutcomeElsewhere
		}
		return OutcomeDropped
	case f.hops.peers[e.NextHop] != nil:
		return OutcomeSent
	}
	switch n, known := f.neigh.Lookup(e.NextHop); {
	case !known || n.State == neigh.StateIncomplete && n.Lost.IsZero():
		return OutcomeUnknown
	case n.State.Known():
		return OutcomeSent
	}
	return OutcomeDropped
}
