package mpa

import (
	"cmp"
	"fmt"
	"time"
)

// A Responder is the passive side of a connection: it reads the request, asks
// its user, sends the reply and waits for the initiator's first message before
// anything else may be sent (MPA fencing).
type Responder struct {
	common
	state responderState
	req   Frame
}

type responderState uint8

const (
	responderIdle    responderState = iota
	responderWaiting                // for the request
	responderAsking                 // the user, for an answer
	responderFenced                 // the reply is out, the first message is not in
	responderUp
	responderDead
)

// NewResponder returns a machine for one incoming connection.
func NewResponder(opts Options) (*Responder, error) {
	if err := opts.Check(false); err != nil {
		return nil, err
	}
	return &Responder{common: common{opts: opts}}, nil
}

// Fenced reports whether the accepting reply was sent and the initiator's first message has not
// arrived.
func (m *Responder) Fenced() bool { return m.state == responderFenced }

// Step applies ev at time now and appends to dst what the driver must do, in
// order.
func (m *Responder) Step(dst []Action, now time.Time, ev Event) []Action {
	switch ev := ev.(type) {
	case Start:
		if m.state == responderIdle {
			m.state, m.deadline = responderWaiting, now.Add(m.timeout())
		}
	case Recv:
		switch m.state {
		case responderWaiting:
			return m.recv(dst, ev.Data)
		case responderAsking:
			if len(ev.Data) > 0 {
				return m.fail(dst, fault(ReasonEarlyData, "%d octets before the reply", len(ev.Data)))
			}
		case responderFenced, responderUp:
			return append(dst, Stream(ev))
		}
	case Accept:
		if m.state == responderAsking {
			return m.accept(dst, now, ev)
		}
	case Reject:
		if m.state == responderAsking {
			if err := m.tooLong(ev.Private); err != nil {
				return m.failLocally(dst, *err)
			}
			rep, _, _ := m.opts.Answer(m.req.Enhanced, m.own(ev.Depths))
			return m.reject(dst, rep, ev.Private, &Error{Reason: ReasonRejected})
		}
	case FPDU:
		if m.state == responderFenced {
			return m.first(dst, &ev.Segment)
		}
	case PeerClosed:
		if m.state > responderIdle && m.state < responderUp {
			return m.fail(dst, ev.fault())
		}
		m.state = responderDead
	case Wake:
		switch {
		case !m.due(now):
		case m.state == responderWaiting:
			return m.fail(dst, fault(ReasonTimeout, "%d octets of a request in %v", m.reader.n, m.timeout()))
		case m.state == responderFenced:
			return m.fail(dst, fault(ReasonRTRTimeout, "nothing in %v", m.rtrTimeout()))
		}
	case Fail:
		return m.failLocally(dst, ev)
	default:
		panic(fmt.Sprintf("mpa: unknown event %T", ev))
	}
	return dst
}

func (m *Responder) timeout() time.Duration { return cmp.Or(m.opts.Timeout, 5*time.Second) }

func (m *Responder) rtrTimeout() time.Duration { return cmp.Or(m.opts.RTRTimeout, 10*time.Second) }

func (m *Responder) own(d *Depths) Depths {
	if d != nil {
		return *d
	}
	return m.opts.Depths
}

func (m *Responder) recv(dst []Action, data []byte) []Action {
	f, rest, ok, err := m.reader.read(data, &m.count)
	switch {
	case err != nil:
		return m.fail(dst, err)
	case !ok:
		return dst
	case len(rest) > 0:
		return m.fail(dst, fault(ReasonEarlyData, "%d octets before the reply", len(rest)))
	case m.opts.Revision == 1 && f.S:
		return m.fail(dst, fault(ReasonEnhanced, "%v", f.Enhanced))
	case m.opts.Revision == 1 && f.Rev != 1:
		return m.fail(dst, fault(ReasonRev, "%d", f.Rev))
	}
	m.req, m.state, m.deadline = f, responderAsking, time.Time{}
	return append(dst, Request{Rev: f.Rev, Enhanced: f.S, Peer: f.Enhanced, Markers: f.Markers, CRC: f.CRC,
		Private: f.Private})
}

func (m *Responder) accept(dst []Action, now time.Time, ev Accept) []Action {
	if err := m.tooLong(ev.Private); err != nil {
		return m.failLocally(dst, *err)
	}
	d := m.own(ev.Depths).Limited()
	m.res = Result{Rev: m.req.Rev, Enhanced: m.req.S, SendMarkers: m.req.Markers, RecvMarkers: m.opts.Markers,
		CRC: m.req.CRC || m.opts.CRC, Private: m.req.Private}
	if m.req.S {
		rep, settled, why := m.opts.Answer(m.req.Enhanced, d)
		if why != ReasonNone {
			return m.reject(dst, rep, ev.Private, fault(why, "the initiator has %v", m.req.Enhanced))
		}
		m.res.Sent, m.res.Peer, m.res.PeerToPeer, d = rep, m.req.Enhanced, rep.PeerToPeer, settled
	}
	m.res.IRD, m.res.ORD = d.IRD, d.ORD
	m.state = responderFenced
	if m.res.PeerToPeer {
		m.deadline = now.Add(m.rtrTimeout())
	}
	return append(dst, Write{m.reply(m.res.Sent, ev.Private, false)}, Accepted{m.res})
}

// reply builds the frame. S and Rev are those of the request.
func (m *Responder) reply(data Enhanced, private []byte, reject bool) []byte {
	f := Frame{Reply: true, Markers: m.opts.Markers, CRC: m.req.CRC || m.opts.CRC, Reject: reject,
		Rev: m.req.Rev, S: m.req.S, Enhanced: data, Private: private}
	m.out, _ = f.AppendBinary(m.out[:0]) // its length was checked
	return m.out
}

func (m *Responder) tooLong(private []byte) *Fail {
	if n := MaxULPData(m.req.S); len(private) > n {
		return &Fail{fmt.Sprintf("%d octets of private data, at most %d can be sent", len(private), n)}
	}
	return nil
}

// reject sends a rejecting reply, which ends MPA. TCP stays open for the peer and for our user.
func (m *Responder) reject(dst []Action, rep Enhanced, private []byte, err *Error) []Action {
	m.count[err.Reason]++
	m.state, m.deadline = responderDead, time.Time{}
	return append(dst, Write{m.reply(rep, private, true)}, Failed{err})
}

// first looks at the initiator's first message. In the peer-to-peer model it must be an RTR
// indication that the reply named, or a Terminate with the reason why the initiator sends none. In
// the client-server model any message will do.
func (m *Responder) first(dst []Action, s *Segment) []Action {
	if m.res.PeerToPeer {
		if s.Opcode == OpTerminate {
			cause, _ := ParseTerminate(s.Payload) // a short one says nothing
			return m.fail(dst, &Error{Reason: ReasonTerminated, Detail: cause.String(), Cause: cause})
		}
		t := s.RTR()
		if t&m.res.Sent.RTR == 0 {
			m.state = responderUp // a Terminate may be sent: an FPDU has arrived
			return m.fail(dst, fault(ReasonNotRTR, "%v, the reply named %v", s, m.res.Sent.RTR))
		}
		m.res.RTR = t
	}
	m.state, m.deadline = responderUp, time.Time{}
	return append(dst, Established{m.res})
}

// failLocally ends the connection after a fault of this end. Between request and reply it
// rejects. After the first FPDU it sends a Terminate and closes TCP. At any other stage it
// only closes TCP.
func (m *Responder) failLocally(dst []Action, ev Fail) []Action {
	err := &Error{Reason: ReasonLocal, Detail: ev.Detail}
	switch m.state {
	case responderDead:
		return dst
	case responderAsking:
		rep, _, _ := m.opts.Answer(m.req.Enhanced, m.opts.Depths)
		return m.reject(dst, rep, nil, err)
	}
	return m.fail(dst, err)
}

func (m *Responder) fail(dst []Action, err *Error) []Action {
	m.count[err.Reason]++
	if m.state == responderUp {
		dst = append(dst, SendTerminate{err.Code()})
	}
	m.state, m.deadline = responderDead, time.Time{}
	return append(dst, Close{}, Failed{err})
}

// Result returns what is known so far.
func (m *Responder) Result() Result { return m.res }
