// Package verbs is the contract between the product and whatever carries
// RDMA: provider/softroce, provider/ibverbs, provider/softiwarp, or a simulated
// fabric.
//
// It follows the verbs of InfiniBand and libibverbs as closely as Go allows.
// It implements nothing. What a provider can do is asked through [Caps], not
// assumed; verbs/verbstest is the suite that every provider passes.
//
// # Memory
//
// Work requests name octets of a [Region] that the provider registered. A
// buffer belongs to the provider from post to completion. When a QP moves to
// [StateError], every work request outstanding on it completes with
// [WRFlushError]. When Destroy returns, the provider touches the buffers of
// that QP no more and completes nothing further for it: those that have not
// completed are the caller's again.
//
// # Concurrency
//
// All methods may be called from several goroutines. Posting to one QP from
// two goroutines at once is allowed but their order is then undefined. A
// provider never calls back into its user, except for [Tap] and, where it
// offers it, [CallbackCQ].
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
	// Caps says what the provider can do. It does not change.
	Caps() Caps
	// Port returns the port as it is now; [Event]s tell when it changed.
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

	// Events is the one channel of asynchronous events. It is bounded; when the
	// reader lags, events are dropped and counted, never blocked on. It is
	// closed by Close.
	Events() <-chan Event
	// SetTap shows t each packet from now on; nil stops that.
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
	SRQForUC bool // and for UC, which InfiniBand does not have
	RDMA     bool // RDMA WRITE and RDMA READ
	Inv      bool // SEND with invalidate
	MAD      bool // MADPort is not nil
	// IWARP says that reliable queue pairs are TCP connections, as libibverbs'
	// transport type does. There is no immediate data. A send or write completes
	// when its buffer is the caller's again, not when the peer has it: what the
	// peer then refuses takes the queue pair to [StateError] with a QPFatal, and
	// does not show in the completion. Timeouts and retry counts are TCP's own.
	// The tap sees nothing.
	IWARP bool

	Multicast bool
	// MaxMessage is the largest RC or UC message in octets.
	MaxMessage int
	// BestMessage is the RC or UC message in octets that costs the least for what
	// it carries. Zero: the larger the better.
	BestMessage int
	// MaxUDPayload is the largest UD payload in octets, which a software
	// provider may have above the path MTU.
	MaxUDPayload int
	MaxSGE       int // scatter entries per work request
	MaxQPDepth   int // work requests per queue
}

// A Port is the state of the port at one moment.
type Port struct {
	Active     bool
	GIDs       []ib.GID // the first is the one to use by default
	GUID       ib.GUID  // of this CA instance; no two agents share one
	LID        ib.LID
	PKeys      []ib.PKey
	MTU        ib.MTU // largest path MTU that the underlay carries
	UnderlayIf string // network device below, "" on InfiniBand
	UnderMTU   int    // its MTU in octets, 0 if unknown

	// InfiniBand says that the link layer is InfiniBand: paths come from the subnet
	// administrator ([SubnetProvider]). What follows is zero on Ethernet.
	InfiniBand bool
	SMLID      ib.LID // of the subnet manager; zero: none has been here
	SMSL       uint8
	// SubnetTimeout is how long a MAD may be on its way; zero: not known.
	SubnetTimeout ib.Timeout
	GRHRequired   bool // all packets of the port need a GRH
}

// Access says what a region may be used for, beyond local sends and receives.
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
	RemoteQKey ib.QKey // with bit 31 set: use the QP's own
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
	Congested                     // a packet of the message had met congestion: a CE mark (RFC 3168)
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

// A CallbackCQ is a CQ whose provider can run its user's handler on the
// goroutine that took the packets in, so that no hand-off lies between the wire
// and the user. It is optional: ask with a type assertion.
type CallbackCQ interface {
	CQ
	// OnReady makes the provider call f, from a goroutine of its own, with no
	// lock held and never twice at once, whenever completions were added; f
	// polls until the CQ is empty. It replaces Wait and is set before use. After
	// Destroy has returned f is not called any more and is not running.
	OnReady(f func())
}

// A DatagramFilterer is a provider that can refuse datagrams before it has done with them
// what costs time, of which a flood takes much. It is optional: ask with a type
// assertion.
type DatagramFilterer interface {
	// FilterDatagrams has the provider call pass for each datagram to the UD queue pair
	// qpn, or to a group, and forget those for which it returns false. Several goroutines
	// may call it, with locks held; it does not block. payload is all behind the headers of
	// RoCE, nothing of it has been checked, and it is not kept. Nil ends it.
	FilterDatagrams(qpn ib.QPN, pass func(src ib.GID, srcQPN ib.QPN, payload []byte) bool)
}

// A DatagramSource is where a datagram comes from.
type DatagramSource struct {
	GID ib.GID
	QPN ib.QPN
}

// A FloodFilterer is a [DatagramFilterer] that can have datagrams dropped before they
// cost it anything, in the kernel or a device. It is optional.
type FloodFilterer interface {
	DatagramFilterer
	// FilterFlood drops IP packets in datagrams to the queue pair of FilterDatagrams, or to
	// a group, without asking, but for those of known sources (and a few that look like
	// them) and those of one in [FloodSlices] others. Which these are changes with each
	// call. Neighbour discovery passes, and so do ARP and CM. Nil ends it.
	FilterFlood(known []DatagramSource)
}

// FloodSlices is how many calls of [FloodFilterer] it takes until each source has had its
// turn.
const FloodSlices = 8

// An FDPoller is a provider one of whose receiving goroutines can look after a
// descriptor of its user as well, so that what arrives there and what arrives
// from the wire are handled by one thread and neither has to wake another. It is
// optional: ask with a type assertion.
type FDPoller interface {
	// PollFD makes the provider call step when fd can be read and each time it
	// has taken packets in, never twice at once and with no lock held. step does
	// some work and does not block. more asks for another call as soon as packets
	// that wait have been looked at. A positive wait asks not to look at fd, but
	// to call step after so long, and before if packets came. Completions that
	// step causes reach their handlers ([CallbackCQ]) when it has returned.
	//
	// stop returns when step is not running, will not run again, and fd is not
	// used any more; step must not call it. Where a descriptor is polled
	// already the error is ErrQueueFull.
	PollFD(fd int, step func() (more bool, wait time.Duration)) (stop func(), err error)
}

// A Successor is a provider that goes on with the sockets of a process before, under the
// same QPN, and hands them on. It is optional: ask with a type assertion.
type Successor interface {
	// Begin receives what waits at sockets that were taken over; until then nothing is
	// received from any. Calling it again, or without such sockets, is harmless.
	Begin()
	// Freeze ends reception for good. What arrives from then on waits at the sockets,
	// whose descriptors it returns, for the caller to hand on and close. Sending goes on
	// until Close. What an FDPoller looked after is let go.
	Freeze() ([]int, error)
}

// A Prober is a provider that can say whether its threads still move. It is
// optional: ask with a type assertion.
type Prober interface {
	// Alive makes each thread that carries packets do a turn and reports one that
	// has not within so long. It may block that long, and must not be called on
	// such a thread.
	Alive(within time.Duration) error
}

// An Offload is work that a provider gets done below it where it can, with a
// fallback where it cannot.
type Offload struct {
	Name string // as the configuration has it, such as "gso"
	What string // as the system has it, such as "UDP_SEGMENT"
	On   bool
	Why  string // why it is off, or what is doubtful; may be empty
	Uses uint64 // how often it was used: calls, chains of packets
}

// An Offloader is a provider that can say which offloads it uses. It is
// optional: ask with a type assertion.
type Offloader interface {
	// Offloads lists all that the provider knows, used or not, in a fixed order.
	Offloads() []Offload
}

// A Tuner is a provider of which some settings can change while packets move. It is optional: ask
// with a type assertion.
type Tuner interface {
	// SetOffload switches an offload, and may take a second to try it. What it does not know, or
	// cannot have, stays as it is:
	// Offloads says so.
	SetOffload(name string, on bool)
	// SetTrafficClass changes the traffic class of paths that are made from now on and have none
	// of their own.
	SetTrafficClass(class uint8)
}

// A Trimmer is a provider that keeps things at hand which it could do without. It
// is optional: ask with a type assertion.
type Trimmer interface {
	// Trim gives them back. Work goes on meanwhile, and may need them again.
	Trim()
}

// A PathMTUer is a provider that knows when the path to one destination carries
// less than its port does. It is optional: see [PathMTU].
type PathMTUer interface {
	// PathMTU returns the largest path MTU of packets to dgid, that of the port or less.
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
	// QPN asks for a number, of a provider that lets its users choose
	// ([Successor]); others give any. Zero: any.
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

// A QPAttr carries the attributes of one transition. All attributes of the
// group that belongs to State are used, the others are ignored.
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
	SQPSN       ib.PSN // UD too
	Timeout     ib.Timeout
	RetryCount  uint8 // 0 to 7
	RNRRetry    uint8 // 0 to 7; 7 is for ever
	MaxRDAtomic uint8 // outbound reads at a time
	// MaxRNRWait bounds how long an RNR NAK is waited out, whatever it says; zero:
	// as long as it says. Providers that are programs obey, adapters cannot.
	MaxRNRWait time.Duration
}

// A QP is a queue pair.
type QP interface {
	QPN() ib.QPN
	Transport() ib.Transport
	State() QPState
	// Modify moves the QP to attr.State: RESET, INIT, RTR, RTS in this order,
	// ERR from anywhere. UD QPs take every step too. ErrState if out of order.
	Modify(attr QPAttr) error
	// PostSend posts wrs in order and returns how many were taken; the error is
	// nil only if all were, ErrQueueFull if room was lacking. In ERR the
	// requests are taken and flushed.
	PostSend(wrs []SendWR) (int, error)
	// PostRecv does the same for the receive queue. ErrInvalid with an SRQ.
	PostRecv(wrs []RecvWR) (int, error)
	// AttachMulticast joins the group and delivers its packets here. UD only.
	// Attaching twice is no error; one Detach undoes it. A provider whose
	// underlay is Ethernet also takes a GID of its own: then what peers send to
	// QPN 0xffffff at that GID comes here, their way to replicate a multicast
	// packet where the underlay carries none.
	AttachMulticast(mgid ib.GID) error
	DetachMulticast(mgid ib.GID) error
	Destroy() error
}

// A Monitored QP says how it fares. The QPs of providers that are programs may be;
// ask with a type assertion.
type Monitored interface {
	// Health is that of an RC QP as a requester; ok is false for other transports
	// and before RTS.
	Health() (h Health, ok bool)
}

// Health is how an RC QP fares as a requester: what is to be seen of its path.
type Health struct {
	RTT       time.Duration // from a packet to its ACK, smoothed as by TCP; zero: not known yet
	RTTSpread time.Duration // mean deviation of it
	InFlight  int           // packets not acknowledged
	Limit     int           // how many there may be now: fewer than Window where packets are lost
	Window    int           // how many there may be at most

	Packets     uint64 // sent, ACKs included
	Retransmits uint64 // of them, sent again
	Timeouts    uint64 // of the ACK timer
	Probes      uint64 // packets sent again to find out, before it expired
	NotReady    uint64 // RNR NAKs that came
}

// An AHAttr is the address of a peer's port, with what the path needs.
type AHAttr struct {
	SGID         ib.GID // one of Port.GIDs; zero: the first of the same family as DGID
	DGID         ib.GID
	FlowLabel    uint32 // 20 bits; RoCEv2 takes the UDP source port from it
	TrafficClass uint8
	HopLimit     uint8 // zero means 64 on RoCE
	SL           uint8

	// InfiniBand only.
	LID  ib.LID  // of the port, or of the group of a multicast GID; zero on Ethernet
	GRH  bool    // packets carry one; on Ethernet they always do
	Rate ib.Rate // zero: that of the port
}

// An AH is an address handle. It stays usable until Destroy.
type AH interface {
	Attr() AHAttr
	Destroy() error
}

// A ClassAH is an address handle whose packets can have traffic classes of their own.
// It is optional.
type ClassAH interface {
	AH
	// WithClass returns the address handle that leads where this one does, with another
	// traffic class for its packets. It is the same for each class, and ends with this one.
	WithClass(class uint8) AH
}

// MADLen is the length of every MAD in octets.
const MADLen = 256

// A MAD is one management datagram as it came in or goes out.
type MAD struct {
	Remote ib.GID  // sender or destination
	Local  ib.GID  // ours; zero on output: the default GID of the family
	QPN    ib.QPN  // sender's QPN; on output the destination, usually QPNGSI
	PKey   ib.PKey // zero on output: the default
	// Path is the way to Remote, on receipt the way back to the sender as the packet
	// shows it: LIDs, SL and GRH. Zero on Ethernet, where Remote says all. On InfiniBand
	// Remote is zero where the packet had no GRH.
	Path Path
	Data [MADLen]byte
}

// A MADPort is access to QP 1 for the messages of CM: class 7, version 2, method
// Send. Others may be neither sent nor delivered. The upper half of the
// transaction ID may be the provider's on the wire: CM goes by communication IDs.
type MADPort interface {
	// SendMAD sends m once, unreliably. It does not block on the peer.
	SendMAD(m *MAD) error
	// MADs is the bounded channel of what arrives; when the reader lags, MADs
	// are dropped and counted. It is closed with the provider.
	MADs() <-chan *MAD
}

// An EventKind says what an Event is about.
type EventKind uint8

// Kinds of events.
const (
	QPFatal     EventKind = iota // QPN went to ERR by itself; Status says why
	CommEst                      // first packet on QPN while still in RTR
	PortActive                   // link up
	PortError                    // link down or address gone
	GIDChange                    // Port().GIDs changed
	MTUChange                    // Port().MTU or UnderMTU changed
	DeviceFatal                  // the device is gone; only Close is left
	LIDChange                    // Port().LID changed
	SMChange                     // another subnet manager, or another place of it
	PKeyChange                   // Port().PKeys changed
	Reregister                   // the subnet manager asks for all joins and subscriptions again
)

// String names k.
func (k EventKind) String() string {
	return [...]string{"QP_FATAL", "COMM_EST", "PORT_ACTIVE", "PORT_ERR", "GID_CHANGE", "MTU_CHANGE", "DEVICE_FATAL",
		"LID_CHANGE", "SM_CHANGE", "PKEY_CHANGE", "CLIENT_REREGISTER"}[min(k, Reregister)]
}

// An Event is an asynchronous event.
type Event struct {
	Kind   EventKind
	QPN    ib.QPN
	Status Status
	Text   string // for people; may be empty
}

// A Tap is shown every packet of a provider: an IP packet from its IP header
// through the ICRC, real or synthesised. It must not keep or change ip, must
// not block, and may be called from several goroutines at once.
type Tap func(out bool, ip []byte)

// GRHAddrs returns source and destination GID from a GRH area: an IPv6 header,
// or 20 octets of anything and an IPv4 header. v4 is taken from the family of
// the GID in use, because the area does not say which it holds.
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
