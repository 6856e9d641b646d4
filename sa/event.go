package sa

import (
	"encoding/binary"
	"time"

	"ipoibcm/ib"
	"ipoibcm/verbs"
	"ipoibcm/wire/mad"
	wire "ipoibcm/wire/sa"
)

// An Address is where a MAD goes, or came from.
type Address struct {
	LID  ib.LID
	SL   uint8
	QPN  ib.QPN
	QKey ib.QKey
	PKey ib.PKey // zero: the default
	// Of the GRH; zero GID: none.
	GID          ib.GID
	FlowLabel    uint32
	TrafficClass uint8
}

// A MAD is one management datagram: to Peer, or from it.
type MAD struct {
	Peer Address
	Data [mad.Len]byte
}

// A Port is what the port is like at one moment.
type Port struct {
	Active bool
	LID    ib.LID
	SMLID  ib.LID // zero: no subnet manager has been here
	SMSL   uint8
	GID    ib.GID // subnet prefix and port GUID: member of all groups, beginning of all paths
	// SubnetTimeout is how long a MAD may be on its way. Zero means 18 (1.07 s).
	SubnetTimeout ib.Timeout
	// GRHRequired says that all packets of the port need a GRH.
	GRHRequired bool
}

// usable reports whether there is an administrator to ask.
func (p Port) usable() bool { return p.Active && p.LID != 0 && p.SMLID != 0 && !p.GID.IsZero() }

// wellKnownGUID is that of subnet administration, in every subnet (IBA 4.1.1).
const wellKnownGUID = 0x0200000000000002

// wellKnown is the GID by which the administrator of the port's subnet is reached.
func (p Port) wellKnown() ib.GID {
	g := p.GID
	binary.BigEndian.PutUint64(g[8:], wellKnownGUID)
	return g
}

// An Event is something that happened: one of the types of this file.
type Event interface{ isEvent() }

// SetPort tells what the port is like now. Repeating it is harmless.
type SetPort struct{ Port }

// Reregister says that the administrator may have forgotten us, or thinks
// otherwise of us now: a client reregister, an SM change or a P_Key change event.
type Reregister struct{}

// RecvMAD says that a MAD of this class arrived. The Client does not keep it.
type RecvMAD struct{ MAD *MAD }

// Wake says that the deadline passed. Early ones are harmless.
type Wake struct{}

// Params are what a group is made with. RFC 4391 section 10 takes them from the
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

// ParamsOf returns what another group of the link of group r is made with.
func ParamsOf(r wire.MCMemberRecord) Params {
	return Params{QKey: r.QKey, MTU: r.MTU, Rate: r.Rate, TrafficClass: r.TrafficClass,
		SL: r.SL, FlowLabel: r.FlowLabel, HopLimit: r.HopLimit}
}

// Join makes the port a member of a group, and keeps it one. Joining a group again
// changes how.
type Join struct {
	MGID ib.GID
	PKey ib.PKey
	// State is how: FullMember, or one of those that only send. An administrator
	// that does not know SendOnlyFullMember is asked for SendOnlyNonMember.
	State wire.JoinState
	// Create makes the group if it does not exist. A group that exists must be
	// like Params then.
	Create bool
	Params Params
}

// Leave ends a Join. Forget does so without a word to the administrator, for
// groups that others on this port need.
type Leave struct {
	MGID   ib.GID
	Forget bool
}

// A PathKey says which path is meant: from the port to DGID.
type PathKey struct {
	DGID         ib.GID
	PKey         ib.PKey
	TrafficClass uint8
}

// Query asks for a path.
type Query struct{ PathKey }

// Doubt says that a path does not seem to lead to its port any more: what is known of
// it is forgotten, and a later Query asks.
type Doubt struct{ PathKey }

// Subscribe asks for the notices of a trap, and keeps asking.
type Subscribe struct{ Trap wire.Trap }

// Unsubscribe ends a Subscribe.
type Unsubscribe struct{ Trap wire.Trap }

// Finish says that the user ends. What ends memberships and subscriptions is sent at
// once, and what is left of them need not be waited for.
type Finish struct{}

func (SetPort) isEvent()     {}
func (Reregister) isEvent()  {}
func (RecvMAD) isEvent()     {}
func (Wake) isEvent()        {}
func (Join) isEvent()        {}
func (Leave) isEvent()       {}
func (Query) isEvent()       {}
func (Doubt) isEvent()       {}
func (Subscribe) isEvent()   {}
func (Unsubscribe) isEvent() {}
func (Finish) isEvent()      {}

// An Action is something the driver must do or tell: one of the types below.
type Action interface{ isAction() }

// SendMAD asks to send a MAD once. MAD is the driver's to keep. An answer is
// waited for until Wait is over; zero: there is none.
type SendMAD struct {
	MAD  *MAD
	Wait time.Duration
}

// StateChanged says how the administrator is reached now.
type StateChanged struct{ State State }

// Joined says that the port is a member of a group, which is as Group says. It
// comes again when the group has changed.
type Joined struct{ Group wire.MCMemberRecord }

// A Cause says why something failed.
type Cause uint8

// Causes of failure.
const (
	Refused     Cause = iota // the administrator said so: see Status
	TimedOut                 // it did not answer
	Busy                     // it said for too long that it was busy
	Redirected               // it pointed elsewhere too often, or nowhere
	NoAdmin                  // the port has no subnet manager
	NoRoom                   // MaxGroups or MaxPaths; nothing was sent
	Deleted                  // the group is gone: trap 67
	BadArgument              // no multicast GID, no join state
	numCauses
)

var causeNames = [numCauses]string{"refused", "timed out", "busy", "redirected", "no subnet manager", "no room",
	"deleted", "bad argument"}

// String names c.
func (c Cause) String() string { return causeNames[min(c, BadArgument)] }

// JoinFailed says that the port is not a member of a group, or not any more.
// Unless the cause is NoRoom or BadArgument the Client goes on trying.
type JoinFailed struct {
	MGID   ib.GID
	Cause  Cause
	Status wire.Status // Refused
	// NoGroup says that the group does not exist, or may be one that the port cannot
	// send to, which administrators do not tell apart: RFC 4391 section 10 then has
	// the packet go to the all-routers group, or nowhere.
	NoGroup bool
}

// Left says that the port is no member any more, as far as we can tell.
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

// Flushed says that no path that was found need be right any more.
type Flushed struct{}

// PathGone says that a port has gone, and with it the paths to it: trap 65.
type PathGone struct{ DGID ib.GID }

// Noticed says that a notice came which was subscribed to.
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
