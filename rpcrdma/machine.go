package rpcrdma

import "time"

// An Event is something that happened to a [Conn].
type Event interface{ event() }

type (
	// Connected says that the queue pair can send. Private is the private data that the peer sent
	// at connection time, in any format.
	Connected struct{ Private []byte }
	// Disconnected says that the connection has ended or was lost, and that no peer can reach our
	// memory through it any more. Err is for people. Own says that this end has ended it, which says
	// nothing of the peer.
	Disconnected struct {
		Err error
		Own bool
	}
	// Recv is a message that arrived in a Send. If WithInv is set, that Send has invalidated our
	// handle Invalidated, which otherwise has no meaning. Data need only last until the actions of
	// this Step are carried out.
	Recv struct {
		Data        []byte
		WithInv     bool
		Invalidated uint32
	}
	// Wake says that the deadline may have passed.
	Wake struct{}

	// Submit asks for a call. Exactly one [Done] answers it.
	Submit struct {
		// ID is the user's name for the call. It must differ from those of calls that are not done.
		ID uint64
		// Payload is the whole RPC call. The machine keeps a copy, in which it sets the XID.
		Payload []byte
		// Reduce lists, in order, the items of the payload that the program's binding allows in
		// Read chunks of their own. The machine moves all of them there if the call does not fit
		// inline. If that is not enough, it puts the whole payload into one Read chunk instead.
		Reduce []Span
		// MaxReply is the largest length of the RPC reply in octets, without Results. If such a
		// reply may not fit inline, the machine exposes memory for it.
		MaxReply int
		// Results are the largest lengths, in octets, of the items of the reply that the program's
		// binding allows in Write chunks of their own.
		Results []int
		// Timeout, if it is not zero, replaces Options.CallTimeout.
		Timeout time.Duration
		// Option makes the call an RDMA2_OPTIONAL of version two. Payload may then be empty, a part
		// of the RPC call (see [Options.TailTypes]) or the whole call; Reduce, MaxReply and Results
		// must be empty.
		Option *Option
	}
	// Cancel ends a call; [Done] follows.
	Cancel struct{ ID uint64 }
	// Registered answers [Register]: a peer can reach the memory through Segments, whose lengths
	// add up to that of the memory. Buf is the memory itself. The machine reads it when the call is
	// done, and the driver must keep it until then. Invalidatable says that a peer may invalidate
	// the handles, because they were made for this use only.
	Registered struct {
		Reg           RegID
		Segments      []Segment
		Buf           []byte
		Invalidatable bool
		Err           error // the memory could not be exposed
	}
	// ReleaseFailed says that the peer's access to memory could not be ended.
	ReleaseFailed struct{ Reg RegID }
	// PeerReady says that the peer's program expects backward calls. A server must make none before
	// (RFC 8167 section 6).
	PeerReady struct{}

	// Answer is the reply to a [Serve]. Payload is the whole RPC reply; the machine sets its XID.
	// Reduce lists items of the reply: the first goes into the first Write chunk of the call, the
	// second into the second, and so on. An item stays in the payload if it has no chunk, or one of
	// zero octets.
	Answer struct {
		ID      uint64
		Payload []byte
		Reduce  []Span
		OptInfo []byte // of an Option; then Payload is as in [Submit]
	}
	// CannotAnswer says, before the program has done anything, that the reply to a [Serve] would
	// have Need octets and that the memory offered by the call is too small for it.
	CannotAnswer struct {
		ID   uint64
		Need int
	}
	// ReadDone answers [Read] with the octets, or with the error that prevented the READ.
	ReadDone struct {
		Read ReadID
		Data []byte
		Err  error
	}
	// SetGrant changes the credits that we grant the peer, from the next reply on. A Grant below 1
	// becomes 1, one above Options.Grant becomes Options.Grant.
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

// A Span is a part of a payload, in octets. Offset is a multiple of four. XDR's padding belongs to
// the item, but Len does not count it.
type Span struct{ Offset, Len int }

// An Option is the content of an RDMA2_OPTIONAL besides its payload.
type Option struct {
	Type uint32
	Info []byte // at most MaxOptInfo octets
}

// A RegID names memory that the machine asked to register, a ReadID an RDMA READ. A Conn uses each
// only once.
type (
	RegID  uint64
	ReadID uint64
)

// An Action is something that the driver of a [Conn] must do. Actions are carried out in order.
// Octets in an Action stay valid until the next Step.
type Action interface{ action() }

type (
	// Send posts one Send, behind all that was posted before. If WithInv is set it is a Send with
	// Invalidate of the peer's handle Invalidate.
	Send struct {
		Data       []byte
		WithInv    bool
		Invalidate uint32
	}
	// Register makes memory that the peer can reach; [Registered] answers it. With Data the memory
	// holds these octets and peers may only read it. Without Data it has Len zero octets and peers
	// may only write it.
	Register struct {
		Reg  RegID
		Data []byte
		Len  int
	}
	// Release ends the peer's access to memory before the driver does anything else. If the driver
	// cannot end the access, it moves the queue pair to ERR and passes [ReleaseFailed]. The driver
	// keeps the octets until it has carried out [Done]. Invalidated is the handle that the peer has
	// invalidated already, 0 if none. A Release of memory that is not registered does nothing.
	Release struct {
		Reg         RegID
		Invalidated uint32
	}
	// Read reads Len octets of the peer's memory, from Segments in order. [ReadDone] answers it.
	Read struct {
		Read     ReadID
		Segments []Segment
		Len      int
	}
	// Write posts RDMA WRITEs of Data to the peer's memory: each segment in order takes Length
	// octets of it. No event answers it. The Send behind it tells the peer that the data is there.
	Write struct {
		Segments []Segment
		Data     []byte
	}
	// Serve gives a call to the program, whose answer is an [Answer] or a [CannotAnswer] event.
	// Payload is the whole RPC call, or that of the Option. MaxReply is the length of the largest
	// reply that fits, without its results. Results are the lengths of the memory that the call
	// offers for each result. All are in octets.
	Serve struct {
		ID       uint64
		Payload  []byte
		MaxReply int
		Results  []int
		Option   *Option
	}
	// Done ends a call. Without Err there is a reply: Payload is the RPC reply without the items
	// that the peer wrote by themselves, and Results are these items.
	Done struct {
		ID        uint64
		Payload   []byte
		Results   [][]byte
		Option    *Option
		Err       *Error
		Transport TransportError // the peer's ERROR, if the reason of Err is ReasonPeerError
	}
	// Ready says that the version is settled. A Conn returns it at most once.
	Ready struct{ Info Info }
	// Learned is the version to remember for later connections to this peer; see [VersionCache].
	// Version is 0 if both ends have none in common. Assumed means that the peer has not named the
	// version: we infer it from a missing or useless answer.
	Learned struct {
		Version Version
		Assumed bool
	}
	// Close ends the connection. A Conn returns it at most once. The actions behind it in the same
	// Step only release memory and end calls.
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

// Info is the current state of a connection.
type Info struct {
	Version Version // only offered until Settled is set
	Settled bool    // a client has had a reply, a server a call
	Refused Version // the version that the peer refused, 0 if none

	SendInline, RecvInline int // inline thresholds now

	Own, Peer PrivateData // as we sent it, and as the peer did
	PeerAt    int         // offset of Peer in the private data, negative if there was none

	Asked   int // credits that we ask for
	Granted int // credits that the peer granted, 0 before it did
	// RemoteInv says that replies may invalidate a handle of their call. In version one both ends
	// have said that they can; in version two each call names the handle.
	RemoteInv bool
}
