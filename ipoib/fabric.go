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

// This file holds what an InfiniBand port needs and an Ethernet port does not: a client of the
// subnet administrator. Paths are in portpath.go, groups in mlid.go.

// A Fabric says that the port's link layer is InfiniBand.
type Fabric struct {
	Port sa.Port // at the start; PortChanged changes it
	// CreateBroadcast creates the broadcast group if the subnet manager has none.
	CreateBroadcast bool
	// Shared says that the kernel has an IPoIB interface of its own on this port and
	// P_Key. The administrator does not count the members on a port: a group that one
	// interface leaves, the other has left too (docs/adr/0032-groups-through-umad.md).
	Shared bool
	// NoReports says that reports of the administrator do not arrive, because somebody else
	// on the host takes them. The machine then subscribes to no traps.
	NoReports bool
	SA        sa.Options // Rand need not be given
}

// Events and actions of an InfiniBand port.
type (
	// RecvSubnet is a MAD of subnet administration.
	RecvSubnet struct{ MAD *sa.MAD }

	// PortChanged says what the port is like now. Reregister says that all groups must be
	// joined again: the port became active, the subnet manager asked for it or is a new one, the
	// P_Keys changed, or the kernel's interface of Fabric.Shared is gone. Moved says that our P_Key
	// has another place in the port's table. Queue pairs name their P_Key by that place, so that
	// connections are set up anew. UnderlayChanged says the rest.
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

	// UsePath says how datagrams get to Path.DGID, a port or a group, from now on. It comes
	// before the first such datagram. On Ethernet it never comes: there the GID is enough.
	UsePath struct{ Path verbs.Path }

	// ForgetPath undoes UsePath: no more datagrams go to DGID.
	ForgetPath struct{ DGID ib.GID }

	// SetQKey gives another Q_Key to the UD QP and to the datagrams that it sends.
	SetQKey struct{ QKey ib.QKey }
)

func (ev RecvSubnet) step(f *Interface) {
	if f.fab != nil {
		f.saStep(sa.RecvMAD{MAD: ev.MAD})
	}
}

func (ev PortChanged) step(f *Interface) { f.portChanged(ev) }

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
	udMTU     int // as configured; zero means that of the group

	groups   map[ib.GID]*mcGroup
	traps    bool // subscribed to the traps about groups created and deleted
	sendOnly lru.List[mcGroup, *mcGroup]

	paths   map[ib.GID]*portPath
	unused  lru.List[portPath, *portPath] // all paths, the one used longest ago first
	waiting int                           // jobs of all paths
}

func newFabric(opt *Options) *fabric {
	if opt.Fabric == nil {
		return nil
	}
	o := *opt.Fabric
	o.SA.Rand = opt.Rand
	o.SA.MaxGroups = cmp.Or(o.SA.MaxGroups, 2048) // room for those of package group and for maxSendOnly
	o.SA.MaxPaths = cmp.Or(o.SA.MaxPaths, opt.maxPeers())
	return &fabric{opt: o, sa: sa.New(o.SA), udMTU: opt.UDMTU, groups: map[ib.GID]*mcGroup{}, paths: map[ib.GID]*portPath{}}
}

// Ready reports whether there is a link: on InfiniBand if the broadcast group is joined
// (RFC 4391 section 5), on Ethernet always.
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
	moved := f.fab.opt.Port.LID != ev.Port.LID
	f.fab.opt.Port, f.fab.opt.Shared = ev.Port, ev.Shared
	if moved {
		for _, p := range f.fab.paths {
			p.path.SLID = ev.Port.LID // REQs name it before the paths are asked for again
		}
		f.leaveLIDs(ib.GID{})
	}
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
	case sa.Left: // forgetGroup has dropped the group already
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

// reportOf returns the Report for a state of the administrator.
func reportOf(s sa.State) Report {
	switch s {
	case sa.StateDown:
		return NoSubnetManager
	case sa.StateReady:
		return SubnetReady
	}
	return NoReport
}

// fabricDeadline returns when the client of subnet administration has something to do; zero means never.
func (f *Interface) fabricDeadline() time.Time {
	if f.fab == nil {
		return time.Time{}
	}
	return f.fab.sa.Deadline()
}

// A FabricStatus is the state of an InfiniBand port.
type FabricStatus struct {
	Port       sa.Port
	Admin      sa.Info
	Joined     bool                // the broadcast group is joined, so there is a link
	Broadcast  wire.MCMemberRecord // of the broadcast group, if Joined
	Failed     *sa.JoinFailed      // why it is not joined, as far as that is known
	Paths      int                 // how many paths are known
	SharesPort bool                // as Fabric.Shared
}

// Fabric returns the state of the InfiniBand port; nil on Ethernet.
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
