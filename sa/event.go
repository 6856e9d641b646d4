package sa

import (
	"encoding/binary"
	"time"

	"ipoibcm/ib"
	"ipoibcm/verbs"
	"ipoibcm/wire/mad"
	wire "ipoibcm/wire/sa"
)

// An Address is the destination or the source of a MAD.
type Address struct {
	LID  ib.LID
	SL   uint8
	QPN  ib.QPN
	QKey ib.QKey
	PKey ib.PKey // zero means the default
	// GID, FlowLabel and TrafficClass are fields of the GRH. With a zero GID there is no GRH.
	GID          ib.GID
	FlowLabel    uint32
	TrafficClass uint8
}

// A MAD is one management datagram, sent to Peer or received from it.
type MAD struct {
	Peer Address
	Data [mad.Len]byte
}

// A Port is the state of the port at one moment.
type Port struct {
	Active bool
	LID    ib.LID
	SMLID  ib.LID // zero if there has been no subnet manager
	SMSL   uint8
	GID    ib.GID // subnet prefix and port GUID; the member of groups, and the source of paths
	// SubnetTimeout is the longest time that a MAD takes to cross the subnet. Zero means 18 (1.07
	// s).
	SubnetTimeout ib.Timeout
	// GRHRequired reports whether all packets of the port need a GRH.
	GRHRequired bool
}

// usable reports whether there is an administrator to ask.
func (p Port) usable() bool { return p.Active && p.LID != 0 && p.SMLID != 0 && !p.GID.IsZero() }

// wellKnownGUID is the GUID of subnet administration in every subnet (IBA 4.1.1).
const wellKnownGUID = 0x0200000000000002

// wellKnown returns the GID of the administrator of the port's subnet.
func (p Port) wellKnown() ib.GID {
	g := p.GID
	binary.BigEndian.PutUint64(g[8:], wellKnownGUID)
	return g
}

// An Event is something that happened: one of the types of this file.
type Event interface{ step(*Client) }

// SetPort sets the current state of the port. Repeating it is harmless.
type SetPort struct{ Port }

// Reregister says that the administrator may have forgotten our joins and subscriptions, or may
// treat the port differently now: after a client reregister, an SM change or a P_Key change event.
type Reregister struct{}

// RecvMAD says that a MAD of this class arrived. The Client does not keep MAD.
type RecvMAD struct{ MAD *MAD }

// Wake says that the deadline passed. Early ones are harmless.
type Wake struct{}

// Params are the parameters with which a group is created. RFC 4391 section 10 takes them from the
// broadcast group.
type Params struct {
	QKey         ib.QKey
	MTU          ib.MTU
	Rate         ib.Rate
	TrafficClass uint8
	SL           uint8
	FlowLabel    uint32
	HopLimit     uint8
}

// ParamsOf returns the Params for other groups of the link to which the group r belongs.
func ParamsOf(r wire.MCMemberRecord) Params {
	return Params{QKey: r.QKey, MTU: r.MTU, Rate: r.Rate, TrafficClass: r.TrafficClass,
		SL: r.SL, FlowLabel: r.FlowLabel, HopLimit: r.HopLimit}
}

// Join makes the port a member of a group, and keeps it one. A Join for a group that is joined
// already replaces the earlier one; an equal Join changes nothing.
type Join struct {
	MGID ib.GID
	PKey ib.PKey
	// State is the kind of membership: FullMember, or one that only sends. If the administrator
	// does not know SendOnlyFullMember, the Client asks for SendOnlyNonMember instead.
	State wire.JoinState
	// Create lets the administrator create the group with Params if it does not exist. If it
	// exists, it must match Params.
	Create bool
	Params Params
}

// Leave ends a Join. With Forget the Client sends no Delete: that is for groups that other users of
// this port need.
type Leave struct {
	MGID   ib.GID
	Forget bool
}

// A PathKey identifies a path from the port to DGID.
type PathKey struct {
	DGID         ib.GID
	PKey         ib.PKey
	TrafficClass uint8
}

// Query asks for a path.
type Query struct{ PathKey }

// Doubt says that a path does not seem to lead to its destination any more. The Client forgets it,
// so that a later Query asks the administrator.
type Doubt struct{ PathKey }

// Subscribe asks for the notices of a trap, and renews the subscription until Unsubscribe.
type Subscribe struct{ Trap wire.Trap }

// Unsubscribe ends a Subscribe.
type Unsubscribe struct{ Trap wire.Trap }

// Finish says that the user terminates, after its Leave and Unsubscribe events. In StateReady the
// Client sends at once the MADs that end memberships and subscriptions, except for a subscription
// whose own MAD has no answer yet. The driver need not wait for the answers.
type Finish struct{}

func (ev SetPort) step(c *Client)     { c.setPort(ev.Port) }
func (Reregister) step(c *Client)     { c.reregister() }
func (ev RecvMAD) step(c *Client)     { c.recv(ev.MAD) }
func (Wake) step(c *Client)           { c.wake() }
func (ev Join) step(c *Client)        { c.join(ev) }
func (ev Leave) step(c *Client)       { c.leave(ev) }
func (ev Query) step(c *Client)       { c.query(ev.PathKey) }
func (ev Doubt) step(c *Client)       { c.doubt(ev.PathKey) }
func (ev Subscribe) step(c *Client)   { c.subscribe(ev.Trap) }
func (ev Unsubscribe) step(c *Client) { c.unsubscribe(ev.Trap) }
func (Finish) step(c *Client)         { c.finish() }

// An Action is something the driver must do or tell the user: one of the types below.
type Action interface{ isAction() }

// SendMAD asks the driver to send MAD once. The driver may keep MAD. Wait is how long the Client
// waits for an answer; zero means that none is expected.
type SendMAD struct {
	MAD  *MAD
	Wait time.Duration
}

// StateChanged says that the State has changed.
type StateChanged struct{ State State }

// Joined says that the port is a member of a group, and what the group is like. The Client returns
// it again when the group has changed.
type Joined struct{ Group wire.MCMemberRecord }

// A Cause says why something failed.
type Cause uint8

// Causes of failure.
const (
	Refused     Cause = iota // the administrator said so: see Status
	TimedOut                 // it did not answer
	Busy                     // it answered BUSY too often, or until the time was over
	Redirected               // it redirected too often, or to no usable address
	NoAdmin                  // the port has no subnet manager
	NoRoom                   // MaxGroups or MaxPaths is reached; nothing was sent
	Deleted                  // the group is gone: trap 67
	BadArgument              // no multicast GID, no join state
	numCauses
)

var causeNames = [numCauses]string{"refused", "timed out", "busy", "redirected", "no subnet manager", "no room",
	"deleted", "bad argument"}

// String names c.
func (c Cause) String() string { return causeNames[min(c, BadArgument)] }

// JoinFailed says that the port is not, or no longer, a member of a group. Unless the cause is
// NoRoom or BadArgument the Client goes on trying.
type JoinFailed struct {
	MGID   ib.GID
	Cause  Cause
	Status wire.Status // Refused
	// NoGroup reports whether the group does not exist, or the port cannot send to it: the answers
	// of administrators do not distinguish the two. By RFC 4391 section 10 a sender then sends the
	// packet to the all-routers group, or drops it.
	NoGroup bool
}

// Left says that the port is no member of a group any more, as far as we can tell.
type Left struct{ MGID ib.GID }

// PathFound answers Query.
type PathFound struct {
	Key  PathKey
	Path verbs.Path
}

// PathFailed answers Query.
type PathFailed struct {
	Key    PathKey
	Cause  Cause
	Status wire.Status // Refused
}

// Flushed says that paths found so far may be wrong.
type Flushed struct{}

// PathGone says that a port has left the subnet, so that no path leads to it: trap 65.
type PathGone struct{ DGID ib.GID }

// Noticed says that a notice of a trap arrived to which the user has subscribed.
type Noticed struct {
	Trap wire.Trap
	GID  ib.GID // traps 64 to 67: of the port or the group
	LID  ib.LID // traps 128 and 144
}

func (SendMAD) isAction()      {}
func (StateChanged) isAction() {}
func (Joined) isAction()       {}
func (JoinFailed) isAction()   {}
func (Left) isAction()         {}
func (PathFound) isAction()    {}
func (PathFailed) isAction()   {}
func (Flushed) isAction()      {}
func (PathGone) isAction()     {}
func (Noticed) isAction()      {}
