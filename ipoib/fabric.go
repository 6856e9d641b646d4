package ipoib

import (
	"cmp"
	"fmt"
	"time"

	"ipoibcm/ib"
	"ipoibcm/lru"
	"ipoibcm/sa"
	"ipoibcm/verbs"
	wire "ipoibcm/wire/sa"
)

// This file is what an InfiniBand port needs beside an Ethernet one: a client of its
// subnet administrator. Paths are in portpath.go, groups in mlid.go.

// A Fabric says that the port's link layer is InfiniBand.
type Fabric struct {
	Port sa.Port // at the start; PortChanged tells of another
	// CreateBroadcast makes the broadcast group where the subnet manager has none.
	CreateBroadcast bool
	// Shared says that the kernel has an IPoIB interface of its own on this port and
	// P_Key: the administrator does not count members, so that what one leaves the
	// other has left (docs/adr/0032-groups-through-umad.md).
	Shared bool
	// NoReports says that reports of the administrator do not arrive: somebody else on
	// the host takes them. Traps are not subscribed to then.
	NoReports bool
	SA        sa.Options // Rand need not be given
}

// Events and actions of an InfiniBand port.
type (
	// RecvSubnet is a MAD of subnet administration.
	RecvSubnet struct{ MAD *sa.MAD }

	// PortChanged says what the port is like now, and Reregister that the subnet
	// manager asks for all joins again: an event of its own, a new subnet manager, or
	// other P_Keys. Moved says that our P_Key has another place in the port's table than
	// before, which queue pairs go by: connections are set up anew. UnderlayChanged says
	// the rest.
	PortChanged struct {
		Port       sa.Port
		Shared     bool // as in Fabric
		Reregister bool
		Moved      bool
	}

	// SendSubnet sends a MAD of subnet administration once; an answer is let in for Wait.
	SendSubnet struct {
		MAD  *sa.MAD
		Wait time.Duration
	}

	// UsePath says how datagrams to Path.DGID get there from now on: to a port, or to a
	// group. It comes before the first of them. On Ethernet it never comes: there a GID
	// leads to its port.
	UsePath struct{ Path verbs.Path }

	// ForgetPath says that UsePath need not be remembered.
	ForgetPath struct{ DGID ib.GID }

	// SetQKey gives the UD QP another Q_Key, and datagrams as well.
	SetQKey struct{ QKey ib.QKey }
)

func (RecvSubnet) event()  {}
func (PortChanged) event() {}

func (SendSubnet) action() {}
func (UsePath) action()    {}
func (ForgetPath) action() {}
func (SetQKey) action()    {}

// A fabric is the InfiniBand side of an Interface.
type fabric struct {
	opt   Fabric
	sa    *sa.Client
	state sa.State

	// The broadcast group, and why it is not joined.
	broadcast wire.MCMemberRecord
	joined    bool
	failed    *sa.JoinFailed
	udMTU     int // that was configured; zero: the group's

	groups   map[ib.GID]*mcGroup
	traps    bool // of groups made and gone: subscribed to
	sendOnly lru.List[mcGroup, *mcGroup]

	paths   map[ib.GID]*portPath
	unused  lru.List[portPath, *portPath] // all paths, by their use
	waiting int                           // jobs of all of them
}

func newFabric(opt *Options) *fabric {
	if opt.Fabric == nil {
		return nil
	}
	o := *opt.Fabric
	o.SA.Rand = opt.Rand
	o.SA.MaxGroups = cmp.Or(o.SA.MaxGroups, 2048) // package group's, and maxSendOnly
	o.SA.MaxPaths = cmp.Or(o.SA.MaxPaths, opt.maxPeers())
	return &fabric{opt: o, sa: sa.New(o.SA), udMTU: opt.UDMTU, groups: map[ib.GID]*mcGroup{}, paths: map[ib.GID]*portPath{}}
}

// Ready reports whether there is a link: on InfiniBand the broadcast group is joined
// (RFC 4391 section 5). It is always so on Ethernet.
func (f *Interface) Ready() bool { return f.fab == nil || f.fab.joined }

// startFabric begins to join the broadcast group.
func (f *Interface) startFabric() {
	if f.fab == nil {
		return
	}
	f.saStep(sa.SetPort{Port: f.fab.opt.Port})
	f.joinBroadcast()
}

func (f *Interface) portChanged(ev PortChanged) {
	if f.fab == nil {
		return
	}
	f.fab.opt.Port, f.fab.opt.Shared = ev.Port, ev.Shared
	f.saStep(sa.SetPort{Port: ev.Port})
	if ev.Moved {
		f.linkDown("the P_Key has another place in the table of the port")
		if f.fib.Link().Up {
			f.linkUp()
		}
	}
	if ev.Reregister {
		f.saStep(sa.Reregister{})
	}
}

func (f *Interface) saStep(ev sa.Event) {
	for _, a := range f.fab.sa.Step(nil, f.now, ev) {
		f.onSA(a)
	}
}

func (f *Interface) onSA(a sa.Action) {
	switch a := a.(type) {
	case sa.SendMAD:
		f.do(SendSubnet{MAD: a.MAD, Wait: a.Wait})
	case sa.StateChanged:
		f.fab.state = a.State
		f.note(Note{Kind: NoteLink, Text: fmt.Sprintf("subnet administrator: %v", a.State), Report: reportOf(a.State)})
		if a.State == sa.StateReady {
			f.askAgain()
		}
	case sa.Joined:
		f.groupJoined(a.Group)
	case sa.JoinFailed:
		f.groupFailed(a)
	case sa.Left: // nothing hangs on it any more
	case sa.PathFound:
		f.pathFound(a.Path)
	case sa.PathFailed:
		f.pathFailed(a)
	case sa.Flushed:
		for _, p := range f.fab.paths {
			p.stale = true
		}
		f.askAgain()
	case sa.PathGone:
		if p := f.fab.paths[a.DGID]; p != nil {
			f.losePath(p)
		}
	case sa.Noticed: // the client joins the group again, or says that it is gone
		if f.fab.groups[a.GID] != nil {
			f.note(Note{Kind: NoteGroup, Text: fmt.Sprintf("the subnet administrator reports: %v, %v", a.Trap, a.GID)})
		}
	default:
		panic(fmt.Sprintf("ipoib: unknown action %T of sa", a))
	}
}

// reportOf is what an operator should hear of a state of the administrator.
func reportOf(s sa.State) Report {
	switch s {
	case sa.StateDown:
		return NoSubnetManager
	case sa.StateReady:
		return SubnetReady
	}
	return NoReport
}

// fabricDeadline is when the client of subnet administration has something to do.
func (f *Interface) fabricDeadline() time.Time {
	if f.fab == nil {
		return time.Time{}
	}
	return f.fab.sa.Deadline()
}

// A FabricStatus is how an InfiniBand port stands.
type FabricStatus struct {
	Port       sa.Port
	Admin      sa.Info
	Joined     bool                // the broadcast group is, and so there is a link
	Broadcast  wire.MCMemberRecord // if Joined
	Failed     *sa.JoinFailed      // why not, as far as it is known
	Paths      int                 // that are known
	SharesPort bool
}

// Fabric returns how the InfiniBand port stands; nil on Ethernet.
func (f *Interface) Fabric() *FabricStatus {
	if f.fab == nil {
		return nil
	}
	s := &FabricStatus{Port: f.fab.opt.Port, Admin: f.fab.sa.Info(), Joined: f.fab.joined, Failed: f.fab.failed, SharesPort: f.fab.opt.Shared}
	if s.Joined {
		s.Broadcast = f.fab.broadcast
	}
	for _, p := range f.fab.paths {
		if p.known {
			s.Paths++
		}
	}
	return s
}
