package ipoib

import (
	"fmt"
	"net/netip"
	"time"

	"ipoibcm/cm"
	"ipoibcm/fib"
	"ipoibcm/group"
	"ipoibcm/ib"
	"ipoibcm/neigh"
	"ipoibcm/nexthop"
	"ipoibcm/rtnl"
	"ipoibcm/verbs"
	"ipoibcm/wire/encap"
)

// An Event is something that happened to the interface. The set is closed.
// Octet slices inside an event belong to the driver again when Step returns.
type Event interface{ step(*Interface) }

type (
	// Start begins the life of the interface: the UD QP is in RTS and the TUN exists. The
	// driver sends it first, and once. The link counts as down until a FIBEvent says that the
	// device is up.
	Start struct{}

	// FIBEvent is for [fib.Table]: a change in the kernel, or the outcome of a
	// FIBAction. A [fib.Host] says when the device is up, and which addresses and
	// MTU it has, whoever set them.
	FIBEvent struct{ fib.Event }

	// KernelGroups is the full list of multicast groups of the device as the
	// kernel holds them.
	KernelGroups struct{ Groups []netip.Addr }

	// KernelConf has the device's sysctls. They decide whether we are a router.
	KernelConf struct{ rtnl.Conf }

	// OtherIs answers AskOther: it reports whether and how the host answers for Addr.
	OtherIs struct {
		Addr   netip.Addr
		Answer rtnl.Answering
	}

	// Packet is an IP packet from the TUN that the route table had no ready
	// path for: a miss, one larger than its path's MTU, or one that only this
	// machine may forward (IGMP, and ICMPv6 types 130 to 137 and 143).
	Packet struct{ IP []byte }

	// RecvFrame is a frame from the fabric that is not plain IP data: ARP, IPv6
	// with an ICMPv6 type of 133 to 137, a path MTU probe, or a CM message in-band. Frame starts
	// with the 4-octet encapsulation header. On the UD QP SrcGID, SrcQPN and DstGID come from
	// GRH area and completion; a frame from a connected QP has only Conn.
	RecvFrame struct {
		SrcGID, DstGID ib.GID
		SrcQPN         ib.QPN
		Conn           nexthop.Conn
		Frame          []byte
	}

	// RecvMAD is a MAD from QP 1 of management class 7.
	RecvMAD struct{ MAD *verbs.MAD }

	// QPCreated answers CreateQP: the queue pair is in INIT, its receives are
	// posted. PathMTU is the MTU of the path to the peer; zero means that of the
	// port.
	QPCreated struct {
		Conn    nexthop.Conn
		QPN     ib.QPN
		PathMTU ib.MTU
	}

	// QPFailed says that CreateQP or ConnectQP could not be done. The driver has
	// destroyed what there was of the queue pair.
	QPFailed struct {
		Conn nexthop.Conn
		Text string
	}

	// QPError says that a working queue pair went to the error state. DestroyQP
	// follows.
	QPError struct {
		Conn   nexthop.Conn
		Status verbs.Status
		Text   string
	}

	// CommEst says that data arrived on a queue pair still waiting for its RTU.
	// For any other queue pair it is harmless.
	CommEst struct{ Conn nexthop.Conn }

	// Usage reports what the data path has counted. The driver sends it every
	// few seconds and whenever it likes; the numbers are totals, never reset.
	Usage struct {
		Conns []ConnUse
		UD    []UDUse
	}

	// Sender says that the source of IP, the start of an IP packet, sends many datagrams, and that we send nothing to
	// it by UD. The machine looks for its path, as for a packet to that source.
	Sender struct{ IP []byte }

	// UnderlayChanged says that the port's GIDs, MTU or state changed. Link is
	// the interface's link-layer address from now on (flags ignored). A PathMTU or UDMTU of
	// zero changes nothing. On InfiniBand UDMTU is ignored: the broadcast group sets it.
	UnderlayChanged struct {
		Link    encap.LinkAddr
		PathMTU ib.MTU
		UDMTU   int
		Active  bool
	}

	// JoinFailed answers a JoinGroup that did not work. Another JoinGroup follows later.
	JoinFailed struct {
		MGID ib.GID
		Err  error
	}

	// CopiesTook says how much processor time the SendCopies of one Step took.
	CopiesTook struct{ Time time.Duration }

	// Shutdown ends the interface: a DREQ for every connection that is up, and all groups,
	// neighbours and destinations given up. The driver keeps stepping until Deadline is zero,
	// or until it does not want to wait any longer.
	Shutdown struct{}

	// Wake says that Deadline has passed. Spurious ones are harmless.
	Wake struct{}
)

func (Start) step(f *Interface)              { f.start() }
func (ev FIBEvent) step(f *Interface)        { f.fibStep(ev.Event) }
func (ev KernelGroups) step(f *Interface)    { f.groupStep(group.Kernel{Groups: ev.Groups}) }
func (ev KernelConf) step(f *Interface)      { f.neighStep(neigh.SetRouter{On: ev.Forward6}) }
func (ev OtherIs) step(f *Interface)         { f.neighStep(neigh.OtherIs{IP: ev.Addr, Answer: ev.Answer}) }
func (ev Packet) step(f *Interface)          { f.fromTUN(ev.IP) }
func (ev Sender) step(f *Interface)          { f.answerTo(ev.IP) }
func (ev QPCreated) step(f *Interface)       { f.qpCreated(ev) }
func (ev QPFailed) step(f *Interface)        { f.qpFailed(ev) }
func (ev QPError) step(f *Interface)         { f.qpError(ev) }
func (ev Usage) step(f *Interface)           { f.usage(ev) }
func (ev UnderlayChanged) step(f *Interface) { f.underlay(ev) }
func (ev CopiesTook) step(f *Interface)      { f.copiesTook(ev.Time) }
func (Shutdown) step(f *Interface)           { f.stop() }
func (Wake) step(f *Interface)               { f.wake() }

func (ev RecvFrame) step(f *Interface) {
	f.heardFrom(ev.SrcGID)
	f.fromFabric(ev)
}

func (ev RecvMAD) step(f *Interface) {
	f.heardFrom(ev.MAD.Remote)
	f.recvMAD(ev.MAD)
}

func (ev CommEst) step(f *Interface) {
	if c := f.conns.byID[ev.Conn]; c != nil && c.state == connReplied {
		f.cmStep(cm.DataOnQP{QPN: c.qpn})
	}
}

func (ev JoinFailed) step(f *Interface) {
	f.note(Note{Kind: NoteGroup, Text: fmt.Sprintf("joining %v failed: %v", ev.MGID, ev.Err)})
	f.groupStep(group.JoinFailed{MGID: ev.MGID, Err: ev.Err})
}

// A ConnUse is what the data path counted on one connection.
type ConnUse struct {
	Conn                 nexthop.Conn
	TxPackets, TxOctets  uint64
	RxPackets, RxOctets  uint64
	TxDropped, TxUnacked uint64 // queue full; posted and not completed
}

// A UDUse is what the data path counted towards one UD neighbour.
type UDUse struct {
	Link                encap.LinkAddr
	TxPackets, TxOctets uint64
}

// An Action is something the driver must do, in the order given. The set is
// closed. Octet slices and pointers inside an action belong to the driver.
type Action interface{ action() }

type (
	// SendUD sends a frame, encapsulation header included, from the UD QP: to the group MGID
	// if that is not zero, else to Link. A Link with QPN 0xffffff is one member of
	// Options.Peers. The frame is a query that goes only to it, or its copy of a SendCopies.
	SendUD struct {
		MGID  ib.GID
		Link  encap.LinkAddr
		Frame []byte
	}

	// SendCopies sends a frame, encapsulation header included, from the UD QP to QPN 0xffffff
	// at each GID in To. These are members of Options.Peers, and the frame is their copy of a
	// multicast packet. The driver must change neither slice: a later SendCopies may share them.
	SendCopies struct {
		To    []ib.GID
		Frame []byte
	}

	// HoldGroups with On says that this machine would now drop Packet events to multicast and
	// broadcast addresses. Until a HoldGroups without On the driver may drop such packets itself,
	// except those that only this machine may forward (IGMP, ICMPv6 types 130 to 137 and 143).
	HoldGroups struct{ On bool }

	// SendConn sends a frame, encapsulation header included, on a connection.
	SendConn struct {
		Conn  nexthop.Conn
		Frame []byte
	}

	// WriteTUN gives an IP packet to the kernel.
	WriteTUN struct{ IP []byte }

	// SendMAD sends a MAD to QP 1 of the peer.
	SendMAD struct{ MAD *verbs.MAD }

	// CreateQP asks for a queue pair in INIT with receives posted. The answer is
	// QPCreated or QPFailed. ReceiveMTU is the largest message, in octets with
	// the encapsulation header, that a receive buffer of it must hold.
	CreateQP struct {
		Conn       nexthop.Conn
		Peer       ib.GID
		Transport  ib.Transport
		ReceiveMTU int
		Init       verbs.QPAttr
	}

	// ConnectQP moves the queue pair to RTR and at once to RTS. Peer is the interface at
	// the other end. The driver reports a failure with QPFailed. No path ever names a connection
	// that a legacy peer opened, because such a connection is for receiving only.
	ConnectQP struct {
		Conn     nexthop.Conn
		Peer     encap.LinkAddr
		RTR, RTS verbs.QPAttr
	}

	// DestroyQP moves the queue pair to ERR, waits for its completions and
	// destroys it. The handle is invalid from this action on.
	DestroyQP struct{ Conn nexthop.Conn }

	// JoinGroup attaches the UD QP to a group of the underlay. MLID is the LID of the group on
	// InfiniBand, where the port is a member of the group by now; zero on Ethernet.
	JoinGroup struct {
		MGID ib.GID
		MLID ib.LID
	}

	// LeaveGroup undoes JoinGroup.
	LeaveGroup struct {
		MGID ib.GID
		MLID ib.LID
	}

	// PublishGroups hands the data path a new table of groups: which groups it may accept
	// packets for, and where it sends multicast.
	PublishGroups struct{ Table *group.Table }

	// FIBAction is what [fib.Table] wants done: paths and destinations of the data
	// path, questions to the kernel, routes. This machine keeps the actions of fib about
	// packets and the state of the device to itself.
	FIBAction struct{ fib.Action }

	// SetUpIPv6 makes the device's IPv6 settings, and puts back the IPv6 addresses
	// that it was configured with: the kernel has dropped them and does IPv6 again.
	SetUpIPv6 struct{}

	// AddAddr puts an address on the device (the RFC 4391 link-local one).
	AddAddr struct{ Prefix netip.Prefix }

	// RemoveAddr removes an address that AddAddr put on the device: a duplicate, or
	// one that a new GID replaces.
	RemoveAddr struct{ Prefix netip.Prefix }

	// AskOther asks whether the host answers for Addr, which is not on the device but which
	// others have asked for. The driver calls [rtnl.Conf.Answer], not on the goroutine that
	// steps the machine, and sends OtherIs.
	AskOther struct{ Addr netip.Addr }

	// Note tells people what happened. It asks for nothing.
	Note struct {
		Kind NoteKind
		Peer encap.LinkAddr // flags zero; zero if none is concerned
		Addr netip.Addr     // IP address concerned, if any
		Conn nexthop.Conn   // connection concerned, if any
		Text string
		// Report is the kind of event that an operator should find in the log; zero for all else.
		Report Report
	}
)

func (SendUD) action()        {}
func (SendCopies) action()    {}
func (HoldGroups) action()    {}
func (SendConn) action()      {}
func (WriteTUN) action()      {}
func (SendMAD) action()       {}
func (CreateQP) action()      {}
func (ConnectQP) action()     {}
func (DestroyQP) action()     {}
func (JoinGroup) action()     {}
func (LeaveGroup) action()    {}
func (PublishGroups) action() {}
func (FIBAction) action()     {}
func (SetUpIPv6) action()     {}
func (AddAddr) action()       {}
func (RemoveAddr) action()    {}
func (AskOther) action()      {}
func (Note) action()          {}

// A NoteKind groups notes, so that a reader can follow only some kinds.
type NoteKind string

// Kinds of notes.
const (
	NoteCMSent   NoteKind = "cm-sent"   // a CM message left; Text describes it
	NoteCMRecv   NoteKind = "cm-recv"   // a CM message came
	NoteConn     NoteKind = "conn"      // a connection came, went or failed, and why
	NoteCrossing NoteKind = "crossing"  // REQs crossed; the verdict
	NoteNeigh    NoteKind = "neighbour" // resolved, failed, changed its address
	NoteAddr     NoteKind = "address"   // added, removed, duplicate
	NoteGroup    NoteKind = "group"     // joined, left
	NoteRoute    NoteKind = "route"     // a path or MTU changed
	NoteLink     NoteKind = "link"      // interface up, down, underlay changed
)

// A Class says which conventions a peer follows.
type Class uint8

// Peer classes (docs/adr/0007-both-service-ids.md).
const (
	ClassUnknown Class = iota
	ClassRFC           // 0x01 service IDs, two-way connections, crossing rule
	ClassLegacy        // 0x10 service IDs, one-way connections
)

// String prints "unknown", "rfc" or "legacy".
func (c Class) String() string {
	return [...]string{"unknown", "rfc", "legacy"}[min(c, ClassLegacy)]
}

// A Status is the interface at one moment.
type Status struct {
	Up         bool
	Link       encap.LinkAddr // flags as Mode has them, also while none are announced
	Mode       Mode
	PKey       ib.PKey
	QKey       ib.QKey
	PathMTU    ib.MTU
	Broadcast  ib.GID // MGID of the broadcast group
	UDMTU      int    // largest datagram sent, octets of IP
	UDAccept   int    // largest datagram that may come
	UDAuto     bool   // UDMTU is what one frame of the underlay carries
	ReceiveMTU int    // octets with the encapsulation header
	DeviceMTU  int
	IPv6       bool // UD MTU allows IPv6
	Addrs      []AddrInfo
	Conns      int // established
	Peers      int // link-layer addresses with a record
	Neighbours int
	Crossings  Crossings
	Silence    Silence

	CMTransport CMTransport
	GSI, Inband bool // CM messages may go by QP 1; in-band
}

// A Silence says that nobody on the link answers. It is zero if somebody does, or if nobody
// was asked of late.
type Silence struct {
	Asked netip.Addr // the last address that nobody answered for
	At    time.Time  // when we gave up asking
	Heard time.Time  // when another host was last heard; zero means never
}

// Crossings counts REQs that crossed (RFC 4755 section 3.3).
type Crossings struct {
	Seen     uint64 // crossings noticed, each counted once
	Accepted uint64 // we were smaller: the peer's REQ was accepted
	Rejected uint64 // we were larger: the peer's REQ got REJ 28
	Yielded  uint64 // REJ 28 came as a verdict before the winner's REQ did
	Expired  uint64 // the winner's REQ never completed; we asked again
}

// An AddrInfo is one address of the device.
type AddrInfo struct {
	Prefix    netip.Prefix
	Ours      bool // we put it there
	Tentative bool // DAD runs; the address is used meanwhile
	Duplicate bool // somebody else has it; we do not answer for it
}

// A ConnInfo is one connection in the record (RFC 4755 section 3.2).
type ConnInfo struct {
	Conn        nexthop.Conn
	Peer        encap.LinkAddr // flags as last seen in address resolution
	State       string         // as the CM names it
	Transport   ib.Transport
	Class       Class
	Active      bool // we sent the REQ
	Tx, Rx      bool // directions used
	LocalQPN    ib.QPN
	RemoteQPN   ib.QPN
	ServiceID   uint64
	LocalComm   uint32
	RemoteComm  uint32
	ReceiveMTU  uint32 // the peer's
	MTU         int    // octets of IP
	PathMTU     ib.MTU // that both ends use; before they have agreed, the one that our REQ asks for
	Established time.Time
	LastUsed    time.Time
	Use         ConnUse
	Addrs       []netip.Addr // neighbours at this peer
	Via         CMPath       // of CM messages
	Crossing    string       // verdict when our REQ and the peer's last crossed; "" if they never did
	Why         string       // what the connection is there for, and what will end it
}

// A NeighbourInfo is one entry of the neighbour cache.
type NeighbourInfo struct {
	Addr  netip.Addr
	Link  encap.LinkAddr // zero until resolved
	State string         // REACHABLE, STALE, …
	// Queued packets of QueuedOctets wait for the neighbour's link-layer address, or for the
	// connection that it shares with other addresses of its peer.
	Queued, QueuedOctets int
	Updated              time.Time // last proof that it hears us; if it does not answer, since when
	Path                 nexthop.Path
}

// A GroupInfo is one multicast group.
type GroupInfo struct {
	Group   netip.Addr // zero for the IPv4 broadcast group
	MGID    ib.GID
	Joined  bool
	Reasons []string // "always", "solicited-node", "report", "kernel", …
}

// A Counter is one number with its name.
type Counter struct {
	Name  string
	Value uint64
}

// An Explanation describes how a destination is reached, and why.
type Explanation struct {
	Addr     netip.Addr
	NextHop  netip.Addr
	Link     encap.LinkAddr
	ByCM     bool   // a connection to the peer is possible, or there is one
	Via      CMPath // of CM messages to the peer, if ByCM
	Path     nexthop.Path
	Class    Class
	Mode     string // "RC", "UC", "UD", "none"
	LastREJ  string // "" if there was none
	Crossing string // verdict when our REQ and the peer's last crossed; "" if they never did
	Outcome  Outcome
	Reasons  []string
}
