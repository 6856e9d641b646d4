package softiwarp

import (
	"errors"
	"fmt"
	"sync/atomic"

	"ipoibcm/mpa"
	"ipoibcm/verbs"
)

// Bounds of a queue pair.
const (
	// MaxMessage is the longest Send, Write or Read in octets.
	MaxMessage = 1 << 30
	maxSGE     = 16
	maxDepth   = 1 << 15
	// maxReads bounds IRD and ORD of queue pairs that Modify connects.
	maxReads = 128
)

// An engine is RDMAP and DDP of one queue pair: it turns work requests into
// segments and segments into completions (RFC 5040, 5041). It has no goroutine,
// lock or clock; whoever calls it holds the queue pair's lock.
type engine struct {
	mem     *memory
	access  verbs.Access // what the peer may do with our regions
	sent    func(verbs.WC)
	recvd   func(verbs.WC)
	pop     func() (recvWQE, bool)
	overIRD *atomic.Uint64 // counts Read Requests above the IRD

	// Sending. The counters run for ever: completed <= handed <= started <= posted.
	sq                                 []sendWQE // the slot is the counter modulo the length
	completed, handed, started, posted uint64
	msn, readMSN                       uint32 // message numbers: next of queue 0 and 1
	maxULPDU                           int
	ord, ird                           int
	reads                              []outRead // wait for their response, in order
	token                              uint32    // STag of the next read's sink
	responses                          []mpa.ReadRequest
	cur                                current
	turn                               bool // the last message was a response
	term                               *mpa.TermError
	termDone                           bool
	scratch, head                      []byte

	// Receiving.
	inMSN, inReadMSN uint32 // message numbers that are due
	recv             recvWQE
	recvOpen         bool // recv is being filled
	recvOff          int
}

// A sendWQE is one send work request.
type sendWQE struct {
	id     uint64
	op     verbs.Opcode
	flags  verbs.SendFlags
	sg     [][]byte
	len    int
	inv    uint32
	stag   uint32
	to     uint64
	filled bool // a Read whose response has arrived
}

// An outRead is a Read that waits for its response.
type outRead struct {
	stag uint32
	wqe  uint64 // counter of its work request
	rtr  bool   // it was the RTR indication and has no work request
	got  int
}

// current is the message that is being sent.
type current struct {
	kind messageKind
	off  int
}

type messageKind uint8

const (
	noMessage messageKind = iota
	aRequest              // the work request started-1
	aResponse             // responses[0]
)

// errNoReceive is the error of a Send for which no receive is posted.
var errNoReceive = errors.New("softiwarp: no receive is posted")

// errTerminated is the Terminate with which the peer ended the stream.
type errTerminated struct{ cause mpa.Cause }

func (e *errTerminated) Error() string {
	return fmt.Sprintf("softiwarp: the peer terminated: %v", e.cause)
}

func terminate(c mpa.Cause, format string, args ...any) *mpa.TermError {
	return &mpa.TermError{Cause: c, Detail: fmt.Sprintf(format, args...)}
}

// begin sets e up for a stream. initiator reports whether we are the initiator, which has sent the
// RTR indication, if any. That takes a message number if it is a Send or a Read.
func (e *engine) begin(res *mpa.Result, maxULPDU int, initiator bool) {
	e.msn, e.readMSN, e.inMSN, e.inReadMSN = 1, 1, 1, 1
	e.maxULPDU = maxULPDU
	e.ord, e.ird = int(res.ORD), int(res.IRD)
	if !initiator {
		return
	}
	switch res.RTR {
	case mpa.RTRSend:
		e.msn++
	case mpa.RTRRead:
		e.readMSN++
		e.reads = append(e.reads, outRead{rtr: true})
	}
}

// rtr takes the RTR indication of the peer, which is no message for the user: a Send takes
// none of the posted receives, a Read is answered.
func (e *engine) rtr(s *mpa.Segment) {
	switch {
	case s.Opcode.Send():
		e.inMSN++
	case s.Opcode == mpa.OpReadRequest:
		var r mpa.ReadRequest
		_ = r.UnmarshalBinary(s.Payload) // it was recognised as an RTR
		e.inReadMSN++
		e.responses = append(e.responses, r)
	}
}

// flush completes the oldest outstanding send with status, and the other sends and a receive that
// is being filled as flushed.
func (e *engine) flush(status verbs.Status) {
	for ; e.completed != e.posted; e.completed++ {
		w := e.wqe(e.completed)
		e.sent(verbs.WC{ID: w.id, Status: status, Opcode: w.op})
		w.sg = nil
		status = verbs.WRFlushError
	}
	e.handed, e.started = e.posted, e.posted
	if e.recvOpen {
		e.recvOpen = false
		e.recvd(verbs.WC{ID: e.recv.id, Status: verbs.WRFlushError, Opcode: verbs.Recv})
	}
	e.reads, e.responses, e.cur = nil, nil, current{}
}

// forget drops all that is outstanding without completing it.
func (e *engine) forget() {
	for i := range e.sq {
		e.sq[i] = sendWQE{}
	}
	*e = engine{mem: e.mem, access: e.access, sent: e.sent, recvd: e.recvd, pop: e.pop, overIRD: e.overIRD, sq: e.sq,
		token: e.token}
}

func (e *engine) wqe(n uint64) *sendWQE { return &e.sq[n%uint64(len(e.sq))] }

// busy reports whether there is something that output may send.
func (e *engine) busy() bool {
	return e.term != nil && !e.termDone || e.cur.kind != noMessage || len(e.responses) > 0 || e.started != e.posted
}
