package rpcrdma

import "time"

// An Event is what happens to a [Conn].
type Event interface{ event() }

type (
	// Connected begins: the queue pair can send. Private is the private data that
	// the peer sent at connection time, whatever is in it.
	Connected struct{ Private []byte }
	// Disconnected says that the connection has ended or was lost, and that no
	// peer can reach our memory by it any more. Err is for people.
	Disconnected struct{ Err error }
	// Recv is a message that came by a Send. If WithInv, that Send has invalidated
	// the handle Invalidated here, as the completion says. Data need not outlive
	// the actions of this Step.
	Recv struct {
		Data        []byte
		WithInv     bool
		Invalidated uint32
	}
	// Wake says that the deadline may have passed.
	Wake struct{}

	// Submit asks for a call. It is answered by [Done], sooner or later.
	Submit struct {
		// ID is the user's name for it. One in use must not be used again.
		ID uint64
		// Payload is the whole RPC call. The machine keeps a copy, in which it
		// sets the XID.
		Payload []byte
		// Reduce lists items of the payload that the program's binding allows to be
		// moved by themselves, in order. They are if the call does not fit inline.
		Reduce []Span
		// MaxReply is the most octets that the RPC reply can have, without
		// Results. If that may not fit inline memory is exposed for it.
		MaxReply int
		// Results are the most octets of each item of the reply that the
		// program's binding allows to be written by itself.
		Results []int
		// Timeout replaces that of the options if it is not zero.
		Timeout time.Duration
		// Option makes it an RDMA2_OPTIONAL of version two. Payload may then be
		// empty, a part of the RPC call (see [Options.TailTypes]) or the whole; and
		// Reduce, MaxReply and Results must be empty.
		Option *Option
	}
	// Cancel ends a call; [Done] follows.
	Cancel struct{ ID uint64 }
	// Registered answers [Register]: a peer can reach the memory by Segments,
	// which are as long together as it is. Buf is that memory, read when the call
	// is done; it stays the call's until Done was carried out. Invalidatable says
	// that a peer may invalidate the handles: they were made for this use only.
	Registered struct {
		Reg           RegID
		Segments      []Segment
		Buf           []byte
		Invalidatable bool
		Err           error // the memory could not be exposed
	}
	// ReleaseFailed says that memory could not be taken back from the peer.
	ReleaseFailed struct{ Reg RegID }
	// PeerReady says that the peer's program expects backward calls, which a
	// server must not make before (RFC 8167 section 6).
	PeerReady struct{}

	// Answer is the reply to a [Serve]. Payload is the whole RPC reply, whose XID
	// the machine sets. Reduce lists items of it for the Write chunks of the call,
	// the first for the first; those without a chunk stay in the payload.
	Answer struct {
		ID      uint64
		Payload []byte
		Reduce  []Span
		OptInfo []byte // of an Option, whose Payload is as in [Submit]
	}
	// CannotAnswer says before the program has done anything that the reply to a
	// [Serve] would have Need octets, and that this is too much for the memory
	// that the call offers.
	CannotAnswer struct {
		ID   uint64
		Need int
	}
	// ReadDone answers [Read]: the octets, or why there are none.
	ReadDone struct {
		Read ReadID
		Data []byte
		Err  error
	}
	// SetGrant changes how many calls the peer may have unanswered, from the next
	// reply on: from 1 to what the options say.
	SetGrant struct{ Grant int }
)

func (Connected) event()     {}
func (Disconnected) event()  {}
func (Recv) event()          {}
func (Wake) event()          {}
func (Submit) event()        {}
func (Cancel) event()        {}
func (Registered) event()    {}
func (ReleaseFailed) event() {}
func (PeerReady) event()     {}
func (Answer) event()        {}
func (CannotAnswer) event()  {}
func (ReadDone) event()      {}
func (SetGrant) event()      {}

// A Span is a part of a payload, in octets. Offset is a multiple of four, and
// XDR's padding belongs to the item without being counted.
type Span struct{ Offset, Len int }

// An Option is what an RDMA2_OPTIONAL carries beside its payload.
type Option struct {
	Type uint32
	Info []byte // at most MaxOptInfo octets
}

// A RegID names memory that was to be registered, a ReadID an RDMA READ. Both
// are used once per Conn.
type (
	RegID  uint64
	ReadID uint64
)

// An Action is what the driver of a [Conn] must do, in order. Octets in it stay
// valid until the next Step.
type Action interface{ action() }

type (
	// Send posts one Send, behind all that was posted before. If WithInv it is a
	// Send with Invalidate of the peer's handle Invalidate.
	Send struct {
		Data       []byte
		WithInv    bool
		Invalidate uint32
	}
	// Register makes memory that the peer can reach, and is answered by
	// [Registered]. With Data it holds these octets and may only be read;
	// otherwise it has Len octets, is zero and may only be written.
	Register struct {
		Reg  RegID
		Data []byte
		Len  int
	}
	// Release ends the reach of the peer before anything else is done: a driver that
	// cannot takes the queue pair down and says [ReleaseFailed]. Its octets stay
	// until [Done]. Invalidated is the handle that the peer has invalidated
	// already, 0 if none. Memory that is not there is no fault.
	Release struct {
		Reg         RegID
		Invalidated uint32
	}
	// Read reads the peer's memory, Segments in order, Len octets together, and
	// is answered by [ReadDone].
	Read struct {
		Read     ReadID
		Segments []Segment
		Len      int
	}
	// Write posts RDMA WRITEs of Data to the peer's memory: each segment gets as
	// many octets as it has, in order. It has no answer; the Send behind it tells
	// the peer.
	Write struct {
		Segments []Segment
		Data     []byte
	}
	// Serve gives a call to the program, which says [Answer] or [CannotAnswer].
	// Payload is the whole RPC call. MaxReply and Results are the octets that fit
	// into the reply and, item by item, into the memory offered for its results.
	Serve struct {
		ID       uint64
		Payload  []byte
		MaxReply int
		Results  []int
		Option   *Option
	}
	// Done ends a call. Without Err there is a reply: Payload, without the items
	// that were written by themselves, which are Results.
	Done struct {
		ID        uint64
		Payload   []byte
		Results   [][]byte
		Option    *Option
		Err       *Error
		Transport TransportError // if Err's reason is ReasonPeerError
	}
	// Ready says that the version is settled. It comes once.
	Ready struct{ Info Info }
	// Learned is worth remembering of this peer for later connections; see
	// [VersionCache]. Version is 0 if there is none in common. Assumed says that
	// the peer has not said so itself.
	Learned struct {
		Version Version
		Assumed bool
	}
	// Close ends the connection. It comes at most once; what follows it in the
	// same Step only tidies up.
	Close struct{ Err *Error }
)

func (Send) action()     {}
func (Register) action() {}
func (Release) action()  {}
func (Read) action()     {}
func (Write) action()    {}
func (Serve) action()    {}
func (Done) action()     {}
func (Ready) action()    {}
func (Learned) action()  {}
func (Close) action()    {}

// Info is what holds on a connection now.
type Info struct {
	Version Version // offered, until Settled
	Settled bool    // a call was answered, or at a server was received
	Refused Version // the version that the peer refused, 0 if none

	SendInline, RecvInline int // largest messages now, in octets

	Own, Peer PrivateData // as sent and as heard
	PeerAt    int         // offset of Peer in the private data, negative if there was none

	Asked   int // credits that we ask for
	Granted int // credits that the peer granted, 0 before it did
	// RemoteInv says that replies may invalidate a handle of their call: both
	// ends have said so (version one), or each call says it (version two).
	RemoteInv bool
}
