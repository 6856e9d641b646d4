package sctp

import (
	"cmp"
	"encoding/binary"
	"fmt"

	"ipoibcm/mpa"
)

// Bounds of an [Endpoint].
const (
	// sessionWindow is how far the DDP-SSN of a chunk may be ahead of the one that is due. If a
	// packet is lost, all chunks sent behind it arrive before it, and small chunks may be many.
	sessionWindow = 4096
	// sessionWindowOctets bounds the octets of the chunks that a session keeps until the chunks
	// before them arrive.
	sessionWindowOctets = 1 << 20
	// endpointWindowOctets bounds what all sessions keep in this way, in octets, with
	// chunkOverhead for each chunk.
	endpointWindowOctets = 16 << 20
	chunkOverhead        = 64
)

// A SessionReason is one kind of fault of a DDP stream session. Each is counted.
type SessionReason uint8

// Reasons that a session ends for, or that a chunk is dropped for. What becomes
// of each, and the clause that says so, is in the table below.
const (
	SessionMalformed   SessionReason = iota // chunk too short, too long, unknown function or PPID
	SessionIllegal                          // a sequence that RFC 5043 section 6 and RFC 6581 section 7 do not have
	SessionWindow                           // a chunk is too far ahead, or too many octets are
	SessionStray                            // for a stream without session; dropped
	SessionRepeated                         // a DDP-SSN that was there already; dropped
	SessionPending                          // too many waiting requests, or sessions; answered with Terminate
	SessionUnsupported                      // enhanced, and we are to speak RFC 5043 only
	SessionSettle                           // the depths or kinds of RTR of the two ends do not fit
	SessionLost                             // the association ended
	NumSessionReasons
)

// sessionReasons says what each reason leads to. [mpa.Terminate] stands for a session Terminate. An
// active side that cannot settle sends an RDMAP Terminate in front of it; a passive side sends an
// Enhanced Reject instead. A malformed chunk for a stream without session is dropped.
var sessionReasons = [NumSessionReasons]struct {
	name    string
	outcome mpa.Outcome
	clause  string
}{
	SessionMalformed:   {"malformed", mpa.Terminate, "RFC 5043 section 6.1, RFC 6581 section 7"},
	SessionIllegal:     {"illegal_sequence", mpa.Terminate, "RFC 5043 section 6.1, RFC 6581 section 7"},
	SessionWindow:      {"window", mpa.Terminate, "RFC 5043 section 5.2"},
	SessionStray:       {"stray", mpa.Ignore, "RFC 5043 section 6.1"},
	SessionRepeated:    {"repeated", mpa.Ignore, "RFC 5043 section 5.2"},
	SessionPending:     {"pending_limit", mpa.Terminate, "RFC 5043 section 6.4"},
	SessionUnsupported: {"unsupported", mpa.Terminate, "RFC 6581 section 10"},
	SessionSettle:      {"settle", mpa.Terminate, "RFC 6581 sections 9.1 and 9.2"},
	SessionLost:        {"lost", mpa.CloseTCP, "RFC 5044 section 8"},
}

// String is the name of r in counters.
func (r SessionReason) String() string { return sessionReasons[min(r, NumSessionReasons-1)].name }

// Outcome returns what r leads to.
func (r SessionReason) Outcome() mpa.Outcome {
	return sessionReasons[min(r, NumSessionReasons-1)].outcome
}

// Clause names the clause that says what r leads to.
func (r SessionReason) Clause() string { return sessionReasons[min(r, NumSessionReasons-1)].clause }

// A SessionEvent is what happens to an [Endpoint]. Stream is the number of the
// pair of SCTP streams that the session has to itself.
type SessionEvent interface{ sessionEvent() }

type (
	// SessionConnect starts a session as active side. Private is for the peer's
	// ULP.
	SessionConnect struct {
		Stream  uint16
		Options mpa.Options
		Private []byte
	}
	// SessionAnswer accepts or rejects a [SessionRequest]. Depths replaces those
	// of the endpoint's options if not nil.
	SessionAnswer struct {
		Stream  uint16
		Reject  bool
		Depths  *mpa.Depths
		Private []byte
	}
	// SessionSend sends a DDP segment.
	SessionSend struct {
		Stream  uint16
		Segment []byte
	}
	// SessionClose ends a session.
	SessionClose struct{ Stream uint16 }
	// ChunkIn is what the association delivered.
	ChunkIn struct{ Chunk Chunk }
	// AssociationDown ends all sessions.
	AssociationDown struct{}
)

func (SessionConnect) sessionEvent()  {}
func (SessionAnswer) sessionEvent()   {}
func (SessionSend) sessionEvent()     {}
func (SessionClose) sessionEvent()    {}
func (ChunkIn) sessionEvent()         {}
func (AssociationDown) sessionEvent() {}

// A SessionAction is what the driver of an [Endpoint] must do. Octets in it that arrived in a chunk
// stay valid as long as those of the chunk.
type SessionAction interface{ sessionAction() }

type (
	// SendChunk hands a chunk to the [Association].
	SendChunk struct{ Chunk Chunk }
	// SessionRequest asks the user for [SessionAnswer].
	SessionRequest struct {
		Stream   uint16
		Enhanced bool
		Peer     mpa.Enhanced // as received
		Private  []byte
	}
	// SessionUp says that segments may be sent and will arrive. Either side may send first: over
	// SCTP no RTR indication is needed or sent.
	SessionUp struct {
		Stream uint16
		Result mpa.Result
	}
	// SessionRejected says that the peer's user rejected.
	SessionRejected struct {
		Stream uint16
		Result mpa.Result
	}
	// SegmentIn is a DDP segment, in the order of the peer's DDP-SSNs.
	SegmentIn struct {
		Stream  uint16
		Segment []byte
	}
	// SessionDown says that a session ended. Err is nil if one side closed it, or our user
	// rejected it.
	SessionDown struct {
		Stream uint16
		Err    *SessionError
	}
)

func (SendChunk) sessionAction()       {}
func (SessionRequest) sessionAction()  {}
func (SessionUp) sessionAction()       {}
func (SessionRejected) sessionAction() {}
func (SegmentIn) sessionAction()       {}
func (SessionDown) sessionAction()     {}

// A SessionError says why a session ended.
type SessionError struct {
	Reason SessionReason
	Code   mpa.Code // what RFC 6581 calls it; 0 if nothing
	Detail string
}

func (e *SessionError) Error() string {
	return fmt.Sprintf("sctp: session: %v: %s (%s)", e.Reason, e.Detail, e.Reason.Clause())
}

// EndpointOptions configures an [Endpoint].
type EndpointOptions struct {
	// Options are the options of passive sessions. Revision 1 means RFC 5043 alone.
	mpa.Options
	// Listen lets the peer start sessions.
	Listen bool
	// MaxPending bounds the requests that wait for the user. Zero means 16.
	MaxPending int
	// MaxSessions bounds all sessions. Zero means 1024.
	MaxSessions int
}

func (o *EndpointOptions) maxPending() int  { return cmp.Or(o.MaxPending, 16) }
func (o *EndpointOptions) maxSessions() int { return cmp.Or(o.MaxSessions, 1024) }

type sessionState uint8

const (
	sessionAsked   sessionState = iota // our Initiate is out
	sessionPending                     // the peer's is in, the user has not answered
	sessionUp
)

type session struct {
	stream   uint16
	state    sessionState
	enhanced bool
	opts     mpa.Options
	asked    mpa.Enhanced // of an active session: sent; of a passive one: received
	depths   mpa.Depths
	private  []byte
	tx, rx   uint16           // next DDP-SSN of each direction
	early    map[uint16]Chunk // by DDP-SSN: what overtook the one that is due
	octets   int              // in early
}

// An Endpoint is one end of an SCTP association with the DDP stream sessions on it (RFC 5043
// section 6, RFC 6581 section 7). It has no deadlines: SCTP finds out that an association has
// failed, and the driver passes [AssociationDown].
type Endpoint struct {
	opts     EndpointOptions
	sessions map[uint16]*session
	pending  int
	octets   int // that sessions hold, with chunkOverhead
	count    [NumSessionReasons]uint64
}

// NewEndpoint returns an endpoint without sessions.
func NewEndpoint(opts EndpointOptions) (*Endpoint, error) {
	if err := opts.Check(false); err != nil {
		return nil, err
	}
	return &Endpoint{opts: opts, sessions: make(map[uint16]*session)}, nil
}

// Counters calls f for every counter, in a fixed order.
func (e *Endpoint) Counters(f func(name string, value uint64)) {
	for r := range NumSessionReasons {
		f(r.String(), e.count[r])
	}
}

// Sessions returns how many sessions there are.
func (e *Endpoint) Sessions() int { return len(e.sessions) }

// Carry hands the chunks among acts to a and returns the other actions, which
// are the user's.
func Carry(a Association, acts []SessionAction) ([]SessionAction, error) {
	var rest []SessionAction
	for _, act := range acts {
		send, ok := act.(SendChunk)
		if !ok {
			rest = append(rest, act)
			continue
		}
		if err := a.Send(send.Chunk); err != nil {
			return rest, fmt.Errorf("send on stream %d: %w", send.Chunk.Stream, err)
		}
	}
	return rest, nil
}

// Step applies ev and appends to dst what the driver must do, in order. A [SessionConnect] that
// cannot start a session gets [SessionDown]. Any other event of the user's does nothing if the
// session is not in the right state. If Step cannot carry it out in that state, it ends the
// session.
func (e *Endpoint) Step(dst []SessionAction, ev SessionEvent) []SessionAction {
	switch ev := ev.(type) {
	case SessionConnect:
		return e.connect(dst, ev)
	case SessionAnswer:
		if s := e.sessions[ev.Stream]; s != nil && s.state == sessionPending {
			return e.answer(dst, s, ev)
		}
	case SessionSend:
		s := e.sessions[ev.Stream]
		if s == nil || s.state != sessionUp {
			return dst
		}
		b := binary.BigEndian.AppendUint16(make([]byte, 0, ssnLen+len(ev.Segment)), s.tx)
		s.tx++
		return append(dst, SendChunk{Chunk{s.stream, PPIDSegment, append(b, ev.Segment...)}})
	case SessionClose:
		if s := e.sessions[ev.Stream]; s != nil {
			return append(e.terminate(dst, s), SessionDown{Stream: s.stream})
		}
	case ChunkIn:
		return e.chunk(dst, ev.Chunk)
	case AssociationDown:
		for stream := range 1 << 16 { // in order: a map has none
			if len(e.sessions) == 0 {
				break
			}
			if s := e.sessions[uint16(stream)]; s != nil {
				e.remove(s)
				e.count[SessionLost]++
				dst = append(dst, SessionDown{s.stream, &SessionError{SessionLost, mpa.CodeClosed, "association down"}})
			}
		}
	default:
		panic(fmt.Sprintf("sctp: unknown event %T", ev))
	}
	return dst
}

func (e *Endpoint) connect(dst []SessionAction, ev SessionConnect) []SessionAction {
	if e.sessions[ev.Stream] != nil || len(e.sessions) >= e.opts.maxSessions() {
		return append(dst, SessionDown{ev.Stream,
			&SessionError{SessionIllegal, mpa.CodeLocal, "stream in use, or too many sessions"}})
	}
	s := &session{stream: ev.Stream, opts: ev.Options, enhanced: ev.Options.Enhanced(), state: sessionAsked}
	c := Control{Function: FuncInitiate, Private: ev.Private}
	if s.enhanced {
		c.Function = FuncEnhancedInitiate
		s.asked, s.depths = ev.Options.Offer()
		c.Enhanced = s.asked
	} else {
		s.depths = ev.Options.Depths.Limited()
	}
	e.sessions[s.stream] = s
	return e.control(dst, s, &c)
}

// control sends c. What cannot be sent ends the session.
func (e *Endpoint) control(dst []SessionAction, s *session, c *Control) []SessionAction {
	c.SSN = s.tx
	b, err := c.AppendBinary(nil)
	if err != nil {
		if s.state == sessionPending {
			dst = e.terminate(dst, s)
		}
		e.remove(s)
		return append(dst, SessionDown{s.stream, &SessionError{SessionMalformed, mpa.CodeLocal, err.Error()}})
	}
	s.tx++
	return append(dst, SendChunk{Chunk{s.stream, PPIDControl, b}})
}

// terminate sends the ordinary termination, whatever function codes made the
// session, and forgets it.
func (e *Endpoint) terminate(dst []SessionAction, s *session) []SessionAction {
	dst = e.control(dst, s, &Control{Function: FuncTerminate})
	e.remove(s)
	return dst
}

func (e *Endpoint) remove(s *session) {
	if e.sessions[s.stream] != s {
		return
	}
	if s.state == sessionPending {
		e.pending--
	}
	e.octets -= s.octets + len(s.early)*chunkOverhead
	s.early, s.octets = nil, 0
	delete(e.sessions, s.stream)
}

// end terminates a session because of the peer's fault r.
func (e *Endpoint) end(dst []SessionAction, s *session, r SessionReason, format string, args ...any) []SessionAction {
	e.count[r]++
	dst = e.terminate(dst, s)
	return append(dst, SessionDown{s.stream, &SessionError{Reason: r, Detail: fmt.Sprintf(format, args...)}})
}

// chunk puts chunks into the order of their DDP-SSN.
func (e *Endpoint) chunk(dst []SessionAction, c Chunk) []SessionAction {
	s := e.sessions[c.Stream]
	if len(c.Data) < ssnLen || c.PPID != PPIDControl && c.PPID != PPIDSegment {
		if s == nil {
			e.count[SessionMalformed]++
			return dst
		}
		return e.end(dst, s, SessionMalformed, "PPID %d, %d octets", c.PPID, len(c.Data))
	}
	if s == nil {
		return e.unknown(dst, c)
	}
	switch ahead := binary.BigEndian.Uint16(c.Data) - s.rx; {
	case ahead >= 1<<15:
		e.count[SessionRepeated]++
		return dst
	case ahead > 0:
		return e.keep(dst, s, c, ahead)
	}
	dst = e.due(dst, s, c)
	for e.sessions[s.stream] == s { // what waited for this one
		next, ok := s.early[s.rx]
		if !ok {
			break
		}
		delete(s.early, s.rx)
		s.octets -= len(next.Data)
		e.octets -= len(next.Data) + chunkOverhead
		dst = e.due(dst, s, next)
	}
	return dst
}

// keep holds a chunk that overtook another.
func (e *Endpoint) keep(dst []SessionAction, s *session, c Chunk, ahead uint16) []SessionAction {
	if n := len(c.Data); ahead > sessionWindow || s.octets+n > sessionWindowOctets ||
		e.octets+n+chunkOverhead > endpointWindowOctets {
		return e.end(dst, s, SessionWindow, "DDP-SSN is %d ahead", ahead)
	}
	ssn := s.rx + ahead
	if _, known := s.early[ssn]; known {
		e.count[SessionRepeated]++
		return dst
	}
	if s.early == nil {
		s.early = make(map[uint16]Chunk)
	}
	c.Data = append([]byte(nil), c.Data...)
	s.early[ssn] = c
	s.octets += len(c.Data)
	e.octets += len(c.Data) + chunkOverhead
	return dst
}

// unknown takes a chunk for a stream without session. It begins a session, or it is the
// remainder of one and dropped.
func (e *Endpoint) unknown(dst []SessionAction, c Chunk) []SessionAction {
	var m Control
	if c.PPID != PPIDControl {
		e.count[SessionStray]++
		return dst
	}
	if m.UnmarshalBinary(c.Data) != nil {
		e.count[SessionMalformed]++
		return dst
	}
	if !e.opts.Listen || m.SSN != 0 || m.Function != FuncInitiate && m.Function != FuncEnhancedInitiate {
		e.count[SessionStray]++
		return dst
	}
	s := &session{stream: c.Stream, state: sessionPending, enhanced: m.Function.enhanced(), rx: 1,
		asked: m.Enhanced, opts: e.opts.Options, private: append([]byte(nil), m.Private...)}
	e.sessions[s.stream] = s
	e.pending++
	switch {
	case s.enhanced && e.opts.Revision == 1:
		e.count[SessionUnsupported]++
		return e.terminate(dst, s)
	case e.pending > e.opts.maxPending() || len(e.sessions) > e.opts.maxSessions():
		e.count[SessionPending]++
		return e.terminate(dst, s) // not a Reject: no user has said no
	}
	return append(dst, SessionRequest{Stream: s.stream, Enhanced: s.enhanced, Peer: m.Enhanced, Private: m.Private})
}

// due takes a chunk whose turn it is.
func (e *Endpoint) due(dst []SessionAction, s *session, c Chunk) []SessionAction {
	s.rx++
	if c.PPID == PPIDSegment {
		if s.state != sessionUp {
			return e.end(dst, s, SessionIllegal, "segment before the session was accepted")
		}
		return append(dst, SegmentIn{s.stream, c.Data[ssnLen:]})
	}
	var m Control
	if err := m.UnmarshalBinary(c.Data); err != nil {
		return e.end(dst, s, SessionMalformed, "%v", err)
	}
	accept, reject := FuncAccept, FuncReject
	if s.enhanced {
		accept, reject = FuncEnhancedAccept, FuncEnhancedReject
	}
	switch {
	case m.Function == FuncTerminate:
		e.remove(s)
		return append(dst, SessionDown{Stream: s.stream})
	case m.Function == accept && s.state == sessionAsked:
		return e.accepted(dst, s, &m)
	case m.Function == reject && s.state == sessionAsked:
		e.remove(s)
		return append(dst, SessionRejected{s.stream, s.result(&m)})
	}
	return e.end(dst, s, SessionIllegal, "%v", m.Function)
}

// result returns what an active session knows after the answer m.
func (s *session) result(m *Control) mpa.Result {
	return mpa.Result{Enhanced: m.HasData, Sent: s.asked, Peer: m.Enhanced, IRD: s.depths.IRD, ORD: s.depths.ORD,
		Private: m.Private}
}

func (e *Endpoint) accepted(dst []SessionAction, s *session, m *Control) []SessionAction {
	res := s.result(m)
	if s.enhanced {
		d, rtr, err := s.opts.Settle(s.asked, m.Enhanced, s.depths)
		if err != nil {
			// As over TCP, the last segment before the end of the session is a Terminate with the
			// reason.
			e.count[SessionSettle]++
			s.state = sessionUp
			dst = e.Step(dst, SessionSend{s.stream, mpa.AppendTerminate(nil, err.Code().Cause())})
			dst = e.terminate(dst, s)
			return append(dst, SessionDown{s.stream, &SessionError{SessionSettle, err.Code(), err.Detail}})
		}
		res.IRD, res.ORD, res.PeerToPeer, res.RTR = d.IRD, d.ORD, s.asked.PeerToPeer, rtr
	}
	s.state = sessionUp
	return append(dst, SessionUp{s.stream, res})
}

// answer carries out the decision of a passive session's user. If the depths do not fit, it sends
// an Enhanced Reject with what is needed (RFC 6581 section 7), even if the user accepted.
func (e *Endpoint) answer(dst []SessionAction, s *session, ev SessionAnswer) []SessionAction {
	d := s.opts.Depths.Limited()
	if ev.Depths != nil {
		d = ev.Depths.Limited()
	}
	c, why := Control{Function: FuncAccept, Private: ev.Private}, mpa.ReasonNone
	if ev.Reject {
		c.Function = FuncReject
	}
	if s.enhanced {
		c.Enhanced, d, why = s.opts.Answer(s.asked, d)
		c.Function += FuncEnhancedAccept - FuncAccept
		if why != mpa.ReasonNone {
			c.Function = FuncEnhancedReject
		}
	}
	if dst = e.control(dst, s, &c); e.sessions[s.stream] != s {
		return dst
	}
	if ev.Reject || why != mpa.ReasonNone {
		e.remove(s)
		down := SessionDown{Stream: s.stream}
		if why != mpa.ReasonNone {
			down.Err = &SessionError{SessionSettle, why.Code(), why.String()}
			e.count[SessionSettle]++
		}
		return append(dst, down)
	}
	e.pending--
	s.state = sessionUp
	res := mpa.Result{Enhanced: s.enhanced, Sent: c.Enhanced, Peer: s.asked, PeerToPeer: c.Enhanced.PeerToPeer,
		IRD: d.IRD, ORD: d.ORD, Private: s.private}
	s.private = nil
	return append(dst, SessionUp{s.stream, res})
}
