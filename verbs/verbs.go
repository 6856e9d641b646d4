// Package verbs is the contract between the product and whatever carries RDMA: provider/softroce,
// provider/ibverbs, provider/softiwarp, or a simulated fabric.
//
// It follows the verbs of InfiniBand and libibverbs as closely as Go allows. It implements nothing.
// Users ask [Caps] what a provider can do, and assume nothing; verbs/verbstest is the suite that
// every provider passes.
//
// # Memory
//
// Work requests name octets of a [Region] that the provider registered. A buffer belongs to the
// provider from post to completion. When a QP moves to [StateError], every work request outstanding
// on it completes with [WRFlushError]. When Destroy returns, the provider no longer touches the
// buffers of that QP and completes nothing further for it. Buffers of work requests that have not
// completed are then the caller's again.
//
// # Concurrency
//
// All methods may be called from several goroutines. Two goroutines may post to one QP at once, but
// the order of their requests is then undefined. A provider never calls back into its user, except
// through [Tap] and the optional interfaces that take a function, such as [CallbackCQ].
package verbs

import (
	"errors"
	"fmt"
	"time"

	"ipoibcm/ib"
)

// Errors that callers compare with errors.Is.
var (
	ErrClosed       = errors.New("verbs: closed")
	ErrQueueFull    = errors.New("verbs: queue full")
	ErrState        = errors.New("verbs: queue pair state does not allow this")
	ErrNotSupported = errors.New("verbs: provider does not support this")
	ErrInvalid      = errors.New("verbs: invalid argument")
	ErrNoResources  = errors.New("verbs: provider limit reached")
)

// GRHLen is the length of the area in front of every UD receive, in octets.
const GRHLen = 40

// A Provider is one open RDMA device and port.
type Provider interface {
	// Caps returns what the provider can do. The result does not change.
	Caps() Caps
	// Port returns the current state of the port. The provider reports changes of it as an [Event].
	Port() Port

	// Alloc returns n octets of registered memory, page-aligned and zeroed,
	// for local use (access 0). Close frees it.
	Alloc(n int) (*Region, error)
	// Register makes buf usable in work requests and, as far as access says,
	// by peers that know Addr and RKey.
	Register(buf []byte, access Access) (*Region, error)
	// Deregister ends the use of r. Peers' requests for it fail from then on.
	Deregister(r *Region) error

	// CreateCQ returns a completion queue for at least depth completions.
	CreateCQ(depth int) (CQ, error)
	// CreateSRQ returns a shared receive queue. ErrNotSupported if !Caps.SRQ.
	CreateSRQ(SRQInit) (SRQ, error)
	// CreateQP returns a queue pair in [StateReset] with an unpredictable QPN.
	CreateQP(QPInit) (QP, error)
	// CreateAH returns an address handle for UD sends.
	CreateAH(AHAttr) (AH, error)

	// MADPort returns the port's QP 1, or nil if the provider cannot give it.
	MADPort() MADPort

	// Events is the one channel of asynchronous events. It is bounded. When the reader lags, the
	// provider drops and counts events and does not block. Close closes it.
	Events() <-chan Event
	// SetTap makes the provider show each packet to t from now on; nil stops that.
	SetTap(t Tap)
	// Counters calls f for every counter of the provider, drops by reason
	// included, in a fixed order.
	Counters(f func(name string, value uint64))
	// Close destroys everything made from the provider.
	Close() error
}

// Caps are a provider's fixed capabilities.
type Caps struct {
	Name     string // "softroce", "ibverbs", "softiwarp", "sim"
	Device   string // "eth0", "rxe0"
	RC, UC   bool
	UD       bool
	SRQ      bool // shared receive queues for RC and UD
	SRQForUC bool // shared receive queues for UC too, which InfiniBand does not have
	RDMA     bool // RDMA WRITE and RDMA READ
	Inv      bool // SEND with invalidate
	MAD      bool // MADPort is not nil
	// IWARP reports whether reliable queue pairs are TCP connections, as libibverbs' transport type
	// does. There is no immediate data. A send or write completes when its buffer is the caller's
	// again, not when the peer has the data. If the peer then refuses the message, the queue pair
	// moves to [StateError] with a QPFatal event, and no completion shows the refusal. Timeouts and
	// retry counts are TCP's own. The tap sees nothing.
	IWARP bool

	Multicast bool
	// MaxMessage is the largest RC or UC message in octets.
	MaxMessage int
	// BestMessage is the size in octets of the RC or UC message that costs the least per octet.
	// Zero sets no limit: larger is better.
	BestMessage int
	// MaxUDPayload is the largest UD payload in octets. That of a software provider may exceed the
	// path MTU.
	MaxUDPayload int
	MaxSGE       int // scatter entries per work request
	MaxQPDepth   int // work requests per queue
}

// A Port is the state of the port at one moment.
type Port struct {
	Active     bool
	GIDs       []ib.GID // the first is the one to use by default
	GUID       ib.GUID  // of this agent, not of the adapter: no two agents share a GUID
	LID        ib.LID
	PKeys      []ib.PKey
	MTU        ib.MTU // largest path MTU that the underlay carries
	UnderlayIf string // network device below, "" on InfiniBand
	UnderMTU   int    // its MTU in octets, 0 if unknown

	// InfiniBand reports whether the link layer is InfiniBand: then paths come from the subnet
	// administrator ([SubnetProvider]). The fields below are zero on Ethernet.
	InfiniBand bool
	SMLID      ib.LID // of the subnet manager; zero if there has been none
	SMSL       uint8
	// SubnetTimeout is the longest time that a MAD takes to cross the subnet. Zero means unknown.
	SubnetTimeout ib.Timeout
	GRHRequired   bool // all packets of the port need a GRH
}

// Access is what peers may do with a region. Local sends and receives need no right.
type Access uint8

// Access rights.
const (
	RemoteWrite Access = 1 << iota
	RemoteRead
)

// A Region is registered memory. Its fields are set by the provider and are
// read-only.
type Region struct {
	Buf  []byte
	Addr uint64 // virtual address of Buf[0] as peers name it
	LKey uint32
	RKey uint32
}

// An SGE is one entry of a scatter or gather list. Buf is a part of Region.Buf.
type SGE struct {
	Region *Region
	Buf    []byte
}

// An Opcode is the operation of a send work request or a completion.
type Opcode uint8

// Operations. Recv and RecvWriteImm appear in completions only.
const (
	Send Opcode = iota
	SendImm
	SendInv
	Write
	WriteImm
	Read
	Recv
	RecvWriteImm
)

// String prints the operation in capitals.
func (o Opcode) String() string {
	names := [...]string{"SEND", "SEND_WITH_IMM", "SEND_WITH_INV", "RDMA_WRITE", "RDMA_WRITE_WITH_IMM", "RDMA_READ",
		"RECV", "RECV_RDMA_WITH_IMM"}
	if int(o) < len(names) {
		return names[o]
	}
	return fmt.Sprintf("Opcode(%d)", uint8(o))
}

// SendFlags modify a send work request.
type SendFlags uint8

// Send flags. A send that is not Signaled completes only if it fails; its
// buffer is the caller's again when a later signaled one on that QP completes.
const (
	Signaled SendFlags = 1 << iota
	Solicited
	Fence
)

// A SendWR is a work request for a send queue. The provider copies it and its
// SG list when it is posted, but not the octets they name.
type SendWR struct {
	ID     uint64 // comes back in the completion
	Opcode Opcode
	Flags  SendFlags
	SG     []SGE

	Imm    uint32 // SendImm, WriteImm: host order of the 32 bits on the wire
	InvKey uint32 // SendInv: R_Key to invalidate at the peer

	RemoteAddr uint64 // Write, WriteImm, Read
	RKey       uint32

	AH         AH // UD only, as are the next two
	RemoteQPN  ib.QPN
	RemoteQKey ib.QKey // if bit 31 is set, the QP's own Q_Key is sent
}

// A RecvWR is a work request for a receive queue. On a UD QP the first GRHLen
// octets of the list receive the GRH area, and the message follows.
type RecvWR struct {
	ID uint64
	SG []SGE
}

// A Status is the outcome of a work request; the values are libibverbs'.
type Status uint8

// Outcomes.
const (
	Success          Status = 0
	LocalLengthError Status = 1
	LocalQPOpError   Status = 2
	LocalProtError   Status = 4
	WRFlushError     Status = 5
	RemoteInvReq     Status = 9
	RemoteAccess     Status = 10
	RemoteOpError    Status = 11
	RetryExceeded    Status = 12
	RNRExceeded      Status = 13
	GeneralError     Status = 21
)

var statusNames = map[Status]string{
	Success: "success", LocalLengthError: "local length error", LocalQPOpError: "local QP operation error",
	LocalProtError: "local protection error", WRFlushError: "work request flushed", RemoteInvReq: "remote invalid request",
	RemoteAccess: "remote access error", RemoteOpError: "remote operation error",
	RetryExceeded: "transport retry counter exceeded",
	RNRExceeded:   "RNR retry counter exceeded", GeneralError: "general error",
}

// String names s.
func (s Status) String() string {
	if n, ok := statusNames[s]; ok {
		return n
	}
	return fmt.Sprintf("status %d", uint8(s))
}

// WCFlags say which optional parts of a WC are valid.
type WCFlags uint8

// Completion flags.
const (
	WithGRH   WCFlags = 1 << iota // UD: the GRH area was filled
	WithImm                       // Imm is valid
	WithInv                       // Imm is the R_Key that was invalidated
	Congested                     // a packet of the message arrived with a CE mark: it met congestion (RFC 3168)
)

// A WC is a work completion.
type WC struct {
	ID      uint64
	Status  Status
	Opcode  Opcode
	Flags   WCFlags
	QPN     ib.QPN // local QP
	SrcQPN  ib.QPN // UD receives: the sender's
	ByteLen int    // receives and reads: octets, GRH area included for UD
	Imm     uint32
	PKey    ib.PKey // UD receives
}

// A CQ is a completion queue.
type CQ interface {
	// Poll fills wcs with what has completed and returns how many; it never blocks.
	Poll(wcs []WC) int
	// Wait blocks until Poll may find something. Spurious returns are allowed,
	// a lost wake-up is not. It returns ErrClosed once the CQ is destroyed.
	// Only one goroutine waits on a CQ.
	Wait() error
	// Destroy ends a Wait. Its QPs must have been destroyed first.
	Destroy() error
}

// A CallbackCQ is a CQ whose provider can run its user's handler on the goroutine that received the
// packets. No hand-off then lies between the wire and the user. It is optional: ask with a type
// assertion.
type CallbackCQ interface {
	CQ
	// OnReady makes the provider call f whenever it has added completions; f polls until the CQ is
	// empty. The calls come from a goroutine of the provider, with no lock held and never two at
	// once. The user calls OnReady before it uses the CQ, and does not call Wait. After Destroy has
	// returned f is not running and is not called any more.
	OnReady(f func())
}

// A DatagramFilterer is a provider that can refuse datagrams early, before it spends much time on
// them. That matters in a flood. It is optional: ask with a type assertion.
type DatagramFilterer interface {
	// FilterDatagrams makes the provider call pass for each datagram to the UD queue pair qpn or to
	// a multicast group. It drops those for which pass returns false. Several goroutines may call
	// pass at once, with locks held; pass must not block. payload is everything behind the RoCE
	// headers. Nothing of it has been checked, and pass must not keep it. A nil pass ends the
	// filtering.
	FilterDatagrams(qpn ib.QPN, pass func(src ib.GID, srcQPN ib.QPN, payload []byte) bool)
}

// A DatagramSource identifies the sender of a datagram.
type DatagramSource struct {
	GID ib.GID
	QPN ib.QPN
}

// A FloodFilterer is a [DatagramFilterer] that can have the kernel or a device drop datagrams, so
// that they cost the provider nothing. It is optional.
type FloodFilterer interface {
	DatagramFilterer
	// FilterFlood drops datagrams to the queue pair of FilterDatagrams, or to a group, that hold an
	// IP packet, without calling pass. It spares datagrams of known sources (and of a few sources
	// whose hash is the same). The unknown sources form [FloodSlices] slices, and it spares one
	// slice at a time; each call moves to the next slice. Neighbour discovery, ARP and CM always
	// pass. A nil known ends the filtering.
	FilterFlood(known []DatagramSource)
}

// FloodSlices is how many slices the unknown sources form. Each call of FilterFlood spares the next
// slice.
const FloodSlices = 8

// An FDPoller is a provider whose receiving goroutine can also poll a descriptor of its user. One
// thread then handles what arrives there and what arrives from the wire, and neither has to wake
// another. It is optional: ask with a type assertion.
type FDPoller interface {
	// PollFD makes the provider call step when fd is readable and each time it has received
	// packets. It never makes two calls at once, and holds no lock. step does some work and does
	// not block. more asks for another call as soon as the provider has handled waiting packets. A
	// positive wait asks the provider not to poll fd, but to call step after that time, or earlier
	// if packets came. Completions that step causes reach their handlers ([CallbackCQ]) when step
	// has returned.
	//
	// stop returns when step is not running, will not run again, and fd is no longer used; step
	// must not call stop. The error is ErrQueueFull if the provider already polls a descriptor.
	PollFD(fd int, step func() (more bool, wait time.Duration)) (stop func(), err error)
}

// A Successor is a provider that can take over the sockets of a previous process and its QPN, and
// can hand its own sockets on. It is optional: ask with a type assertion.
type Successor interface {
	// Begin starts reception, first of the packets that wait at sockets that were taken over. Until
	// then the provider receives nothing from any socket. Calling it again, or without such
	// sockets, is harmless.
	Begin()
	// Freeze ends reception for good. Packets that arrive later wait at the sockets. Freeze returns
	// descriptors of these, which the caller hands on and closes. Sending goes on until Close. The
	// provider stops polling the descriptor of [FDPoller].
	Freeze() ([]int, error)
}

// A Prober is a provider that can say whether its threads still make progress. It is optional: ask
// with a type assertion.
type Prober interface {
	// Alive wakes each thread that carries packets, and returns an error if one has not gone round
	// its loop within the given time. It may block that long, and must not be called on such a
	// thread.
	Alive(within time.Duration) error
}

// An Offload is work that a provider leaves to the layer below it, the kernel or a device, where
// that can do it. Elsewhere the provider falls back to doing it itself.
type Offload struct {
	Name string // its name in the configuration, such as "gso"
	What string // its name in the system, such as "UDP_SEGMENT"
	On   bool
	Why  string // why it is off, or what is doubtful; may be empty
	Uses uint64 // how often it was used: calls, chains of packets
}

// An Offloader is a provider that can say which offloads it uses. It is
// optional: ask with a type assertion.
type Offloader interface {
	// Offloads lists all offloads that the provider knows, used or not, in a fixed order.
	Offloads() []Offload
}

// A Tuner is a provider some of whose settings can change while packets move. It is optional: ask
// with a type assertion.
type Tuner interface {
	// SetOffload switches an offload on or off, which may include a test of up to a second. An
	// offload that the provider does not know, or cannot have, stays as it is; Offloads shows the
	// outcome.
	SetOffload(name string, on bool)
	// SetTrafficClass changes the traffic class of paths that are made from now on and have no
	// class of their own.
	SetTrafficClass(class uint8)
}

// A Trimmer is a provider that keeps resources it could do without. It is optional: ask with a type
// assertion.
type Trimmer interface {
	// Trim releases these resources. Work goes on meanwhile, and may acquire them again.
	Trim()
}

// A PathMTUer is a provider that knows when the path to one destination carries
// less than its port does. It is optional: see [PathMTU].
type PathMTUer interface {
	// PathMTU returns the path MTU to dgid: that of the port, or less.
	PathMTU(dgid ib.GID) ib.MTU
}

// PathMTU returns the path MTU to dgid as far as p knows: that of the port, or less.
func PathMTU(p Provider, dgid ib.GID) ib.MTU {
	if q, ok := p.(PathMTUer); ok {
		return q.PathMTU(dgid)
	}
	return p.Port().MTU
}

// SRQInit says how large a shared receive queue is.
type SRQInit struct {
	Depth  int // receive work requests
	MaxSGE int
}

// An SRQ is a shared receive queue. Receive work requests are used in any order.
type SRQ interface {
	// PostRecv posts wrs in order and returns how many were taken; the error is
	// nil only if all were.
	PostRecv(wrs []RecvWR) (int, error)
	// Destroy discards what is posted. Its QPs must have been destroyed first.
	Destroy() error
}

// QPInit says what a queue pair is made of.
type QPInit struct {
	Transport ib.Transport
	// QPN is the number to use, with a provider that lets its users choose ([Successor]). Others
	// ignore it. Zero lets the provider choose.
	QPN            ib.QPN
	SendCQ, RecvCQ CQ
	SRQ            SRQ // nil: the QP has a receive queue of its own
	SendDepth      int
	RecvDepth      int // ignored with an SRQ
	MaxSendSGE     int
	MaxRecvSGE     int
}

// A QPState is the state of a queue pair.
type QPState uint8

// Queue pair states; SQD and SQE are not used by anything here.
const (
	StateReset QPState = iota
	StateInit
	StateRTR
	StateRTS
	StateError
)

// String prints the state as libibverbs does.
func (s QPState) String() string {
	return [...]string{"RESET", "INIT", "RTR", "RTS", "ERR"}[min(s, StateError)]
}

// A QPAttr carries the attributes of one transition. The provider uses all attributes of the group
// that belongs to State and ignores the others.
type QPAttr struct {
	State QPState

	// To INIT.
	PKey   ib.PKey
	QKey   ib.QKey // UD
	Access Access  // what the peer may do with our regions

	// To RTR; RC and UC unless noted.
	Path            AHAttr
	PathMTU         ib.MTU
	DestQPN         ib.QPN
	RQPSN           ib.PSN
	MaxDestRDAtomic uint8 // RC: inbound reads at a time
	MinRNRTimer     ib.RNRTimer

	// To RTS.
	SQPSN       ib.PSN // also for UD
	Timeout     ib.Timeout
	RetryCount  uint8 // 0 to 7
	RNRRetry    uint8 // 0 to 7; 7 is for ever
	MaxRDAtomic uint8 // outbound reads at a time
	// MaxRNRWait bounds the delay that an RNR NAK asks for. Zero sets no limit. Software providers
	// obey it, adapters cannot.
	MaxRNRWait time.Duration
}

// A QP is a queue pair.
type QP interface {
	QPN() ib.QPN
	Transport() ib.Transport
	State() QPState
	// Modify moves the QP to attr.State. Any state may go to RESET or ERR. Otherwise the order is
	// RESET, INIT, RTR, RTS, for UD QPs too. Any other step returns ErrState.
	Modify(attr QPAttr) error
	// PostSend posts wrs in order and returns how many were taken; the error is
	// nil only if all were, ErrQueueFull if room was lacking. In ERR the
	// requests are taken and flushed.
	PostSend(wrs []SendWR) (int, error)
	// PostRecv does for the receive queue what PostSend does for the send queue. It returns
	// ErrInvalid if the QP has an SRQ.
	PostRecv(wrs []RecvWR) (int, error)
	// AttachMulticast joins the group and delivers its packets to this QP. UD only. Attaching twice
	// is no error; one Detach undoes both. A provider whose underlay is Ethernet also accepts one
	// of its own GIDs. This QP then receives what peers send to QPN 0xffffff at that GID: where the
	// underlay carries no multicast, peers replicate multicast packets so.
	AttachMulticast(mgid ib.GID) error
	DetachMulticast(mgid ib.GID) error
	Destroy() error
}

// A Monitored QP reports its health. QPs of software providers may do so; ask with a type
// assertion.
type Monitored interface {
	// Health returns the health of an RC QP as a requester; ok is false for other transports and
	// before RTS.
	Health() (h Health, ok bool)
}

// Health is what an RC QP, as a requester, has measured of its path.
type Health struct {
	RTT       time.Duration // from a packet to its ACK, smoothed as by TCP; zero before the first sample
	RTTSpread time.Duration // mean deviation of RTT
	InFlight  int           // packets not acknowledged
	Limit     int           // how many may be in flight now: fewer than Window after losses
	Window    int           // how many may ever be in flight

	Packets     uint64 // sent, ACKs included
	Retransmits uint64 // packets sent again, included in Packets
	Timeouts    uint64 // of the ACK timer
	Probes      uint64 // packets sent again as a probe before the ACK timer expired
	NotReady    uint64 // RNR NAKs received
}

// An AHAttr is the address of a peer's port, with the attributes of the path there.
type AHAttr struct {
	SGID         ib.GID // one of Port.GIDs; zero: the first of the same family as DGID
	DGID         ib.GID
	FlowLabel    uint32 // RoCEv2 derives the UDP source port from it
	TrafficClass uint8
	HopLimit     uint8 // zero means 64 on RoCE
	SL           uint8

	// InfiniBand only.
	LID  ib.LID  // of the peer's port, or of the group if DGID is multicast; zero on Ethernet
	GRH  bool    // packets carry a GRH; on Ethernet they always do
	Rate ib.Rate // zero means the rate of the port
}

// An AH is an address handle. It stays usable until Destroy.
type AH interface {
	Attr() AHAttr
	Destroy() error
}

// A ClassAH is an address handle that offers variants of itself with other traffic classes. It is
// optional.
type ClassAH interface {
	AH
	// WithClass returns an address handle that leads to the same destination and gives its packets
	// the traffic class. Calls with one class return the same handle. Destroy of the original
	// handle ends it too.
	WithClass(class uint8) AH
}

// MADLen is the length of every MAD in octets.
const MADLen = 256

// A MAD is one management datagram, received or to be sent.
type MAD struct {
	Remote ib.GID  // sender or destination
	Local  ib.GID  // our GID; zero on output means the default GID of the family
	QPN    ib.QPN  // sender's QPN; on output the destination, usually QPNGSI
	PKey   ib.PKey // zero on output means the default P_Key
	// Path is the path to Remote. On input it is the path back to the sender as the packet shows
	// it: LIDs, SL and GRH. It is zero on Ethernet, where Remote suffices. On InfiniBand Remote is
	// zero if the packet had no GRH.
	Path Path
	Data [MADLen]byte
}

// A MADPort is access to QP 1 for the messages of CM: class 7, version 2, method Send. Other MADs
// need be neither sent nor delivered. The provider may write the upper half of the transaction ID
// on the wire: CM matches messages by communication IDs.
type MADPort interface {
	// SendMAD sends m once, unreliably. It does not block on the peer.
	SendMAD(m *MAD) error
	// MADs is the bounded channel of MADs that arrive. When its reader lags, MADs are dropped and
	// counted. It is closed with the provider.
	MADs() <-chan *MAD
}

// An EventKind is the kind of an Event.
type EventKind uint8

// Kinds of events.
const (
	QPFatal     EventKind = iota // QPN went to ERR by itself; Status says why
	CommEst                      // first packet to QPN in RTR or RTS; over iWARP in RTR only
	PortActive                   // link up
	PortError                    // link down or address gone
	GIDChange                    // Port().GIDs changed
	MTUChange                    // Port().MTU or UnderMTU changed
	DeviceFatal                  // the device is gone; only Close is left
	LIDChange                    // Port().LID changed
	SMChange                     // the LID or SL of the subnet manager changed, or whether it requires GRHs
	PKeyChange                   // Port().PKeys changed
	Reregister                   // the subnet manager asks for all joins and subscriptions again
	EventsLost                   // there was no room for further events: look at the port and at the state of each QP
)

// String names k.
func (k EventKind) String() string {
	return [...]string{"QP_FATAL", "COMM_EST", "PORT_ACTIVE", "PORT_ERR", "GID_CHANGE", "MTU_CHANGE", "DEVICE_FATAL",
		"LID_CHANGE", "SM_CHANGE", "PKEY_CHANGE", "CLIENT_REREGISTER",
		"EVENTS_LOST"}[min(k, EventsLost)]
}

// An Event is an asynchronous event.
type Event struct {
	Kind   EventKind
	QPN    ib.QPN
	Status Status
	Text   string // for people; may be empty
}

// A Tap is called with every packet of a provider: an IP packet from its IP header through the
// ICRC, real or synthesised. It must not keep or change ip, must not block, and may be called from
// several goroutines at once.
type Tap func(out bool, ip []byte)

// GRHAddrs returns the source and destination GID of a GRH area. The area holds an IPv6 header, or
// 20 octets of anything and an IPv4 header, and does not say which. Callers take v4 from the family
// of the GID in use.
func GRHAddrs(grh []byte, v4 bool) (src, dst ib.GID) {
	_ = grh[GRHLen-1]
	if v4 {
		src[10], src[11], dst[10], dst[11] = 0xff, 0xff, 0xff, 0xff
		copy(src[12:], grh[32:36])
		copy(dst[12:], grh[36:40])
		return src, dst
	}
	copy(src[:], grh[8:24])
	copy(dst[:], grh[24:40])
	return src, dst
}
