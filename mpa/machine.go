package mpa

import "time"

// An Event is what happens to an [Initiator] or a [Responder].
type Event interface{ event() }

type (
	// Start begins: the TCP connection is there. An initiator that asked for [Redial] gets
	// Start a second time.
	Start struct{}
	// Recv is what TCP delivered, in any portion.
	Recv struct{ Data []byte }
	// PeerClosed says that TCP has ended or was lost. Err is for people; it may be nil.
	PeerClosed struct{ Err error }
	// Wake says that the deadline may have passed.
	Wake struct{}
	// Fail is a fault of this end that has no code of its own.
	Fail struct{ Detail string }
	// Accept answers a [Request]. Depths replaces those of the options if not nil.
	Accept struct {
		Private []byte
		Depths  *Depths
	}
	// Reject answers a [Request] with no.
	Reject struct {
		Private []byte
		Depths  *Depths
	}
	// FPDU is the initiator's first segment. The driver passes it to the responder, whose fence it
	// ends (see [Responder.Fenced]), and passes no segment after it.
	FPDU struct{ Segment Segment }
)

func (Start) event()      {}
func (Recv) event()       {}
func (PeerClosed) event() {}
func (Wake) event()       {}
func (Fail) event()       {}
func (Accept) event()     {}
func (Reject) event()     {}
func (FPDU) event()       {}

func (ev PeerClosed) fault() *Error {
	e := &Error{Reason: ReasonClosed}
	if ev.Err != nil {
		e.Detail = ev.Err.Error()
	}
	return e
}

// An Action is what the driver of a machine must do. Octets in it stay valid
// until the next Step.
type Action interface{ action() }

type (
	// Write sends octets over TCP as they are.
	Write struct{ Data []byte }
	// Request asks the user of a responder for [Accept] or [Reject].
	Request struct {
		Rev      uint8
		Enhanced bool     // the peer negotiates; Peer is valid
		Peer     Enhanced // as received
		Markers  bool     // the peer wants markers
		CRC      bool     // the peer wants CRCs
		Private  []byte   // of the peer's ULP
	}
	// SendRTR sends the RTR indication as the first FPDU; see [AppendRTR].
	// Nothing may be sent before it.
	SendRTR struct{ Type RTRTypes }
	// SendTerminate sends a Terminate as the last FPDU.
	SendTerminate struct{ Code Code }
	// Accepted says that a responder has sent its reply. Octets that arrive now are FPDUs, but the
	// responder may send none before [Established].
	Accepted struct{ Result Result }
	// Established says that FPDUs may be sent. Result.RTR is the kind of indication that
	// has been sent or received, if any; a received one is no message of the user's.
	Established struct{ Result Result }
	// Stream is octets that arrived behind the startup frames: FPDUs.
	Stream struct{ Data []byte }
	// Rejected says that the peer rejected. TCP is open; the user may close it.
	Rejected struct{ Result Result }
	// Failed is the reason why the connection failed.
	Failed struct{ Err *Error }
	// Close ends TCP. What was written before it is still delivered.
	Close struct{}
	// Redial asks for a new TCP connection to the same peer, and [Start].
	Redial struct{}
)

func (Write) action()         {}
func (Request) action()       {}
func (SendRTR) action()       {}
func (SendTerminate) action() {}
func (Accepted) action()      {}
func (Established) action()   {}
func (Stream) action()        {}
func (Rejected) action()      {}
func (Failed) action()        {}
func (Close) action()         {}
func (Redial) action()        {}

// A Result is what was agreed on.
type Result struct {
	Rev         uint8 // of the peer's frame
	Enhanced    bool  // depths and model were negotiated
	PeerToPeer  bool
	RTR         RTRTypes // kind of the indication; at a responder from Established on
	Sent, Peer  Enhanced // as sent and received, if Enhanced
	IRD, ORD    Depth    // of this end from now on
	SendMarkers bool     // the peer wants markers
	RecvMarkers bool     // we wanted markers
	CRC         bool     // CRCs are checked, both ways
	Private     []byte   // of the peer's ULP
	// Fallback says that an enhanced attempt had failed before.
	Fallback bool
}

// common is what both machines have.
type common struct {
	opts     Options
	reader   frameReader
	deadline time.Time
	count    Counters
	out      []byte // startup frame that is being sent
	res      Result
}

// Deadline returns when the machine wants [Wake]. Zero means never.
func (c *common) Deadline() time.Time { return c.deadline }

// Counters returns what was refused or ignored.
func (c *common) Counters() *Counters { return &c.count }

// due reports whether the deadline has passed at time now.
func (c *common) due(now time.Time) bool { return !c.deadline.IsZero() && !now.Before(c.deadline) }
