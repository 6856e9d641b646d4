package mpa

import (
	"cmp"
	"fmt"
	"time"
)

// An Initiator is the active side of a connection (RFC 6581 section 9.3): it
// sends the request, reads the reply, adjusts its depths and sends the RTR
// indication.
type Initiator struct {
	common
	private  []byte
	state    initiatorState
	asked    Enhanced
	depths   Depths
	enhanced bool // this attempt sends an enhanced request
	fallback bool // an enhanced attempt failed before
}

type initiatorState uint8

const (
	initiatorIdle initiatorState = iota
	initiatorWaiting
	initiatorUp
	initiatorDead // rejected, failed, or TCP has ended
)

// NewInitiator returns a machine that will send private as its ULP's private
// data.
func NewInitiator(opts Options, private []byte) (*Initiator, error) {
	if err := opts.Check(true); err != nil {
		return nil, err
	}
	if n := MaxULPData(opts.Enhanced()); len(private) > n {
		return nil, fmt.Errorf("mpa: %d octets of private data, at most %d can be sent", len(private), n)
	}
	return &Initiator{common: common{opts: opts}, private: append([]byte(nil), private...), enhanced: opts.Enhanced()}, nil
}

// Step applies ev at time now and appends to dst what the driver must do, in
// order.
func (m *Initiator) Step(dst []Action, now time.Time, ev Event) []Action {
	switch ev := ev.(type) {
	case Start:
		if m.state != initiatorIdle {
			return dst
		}
		return m.start(dst, now)
	case Recv:
		switch m.state {
		case initiatorWaiting:
			return m.recv(dst, ev.Data)
		case initiatorUp:
			return append(dst, Stream(ev))
		}
	case PeerClosed:
		if m.state == initiatorWaiting {
			return m.fail(dst, ev.fault())
		}
		m.state = initiatorDead
	case Wake:
		if m.state == initiatorWaiting && m.due(now) {
			return m.fail(dst, fault(ReasonTimeout, "%d octets of a reply in %v", m.reader.n, m.timeout()))
		}
	case Fail:
		if m.state != initiatorDead {
			return m.fail(dst, &Error{Reason: ReasonLocal, Detail: ev.Detail})
		}
	case Accept, Reject, FPDU:
		// A responder's; nothing to decide here.
	default:
		panic(fmt.Sprintf("mpa: unknown event %T", ev))
	}
	return dst
}

func (m *Initiator) timeout() time.Duration { return cmp.Or(m.opts.Timeout, 10*time.Second) }

func (m *Initiator) start(dst []Action, now time.Time) []Action {
	f := Frame{Markers: m.opts.Markers, CRC: m.opts.CRC, Rev: 1, S: m.enhanced, Private: m.private}
	if m.enhanced || m.opts.Revision == 2 {
		f.Rev = 2
	}
	m.asked, m.depths = m.opts.Offer()
	f.Enhanced = m.asked
	m.out, _ = f.AppendBinary(m.out[:0]) // its length was checked
	m.reader = frameReader{reply: true}
	m.state, m.deadline = initiatorWaiting, now.Add(m.timeout())
	return append(dst, Write{m.out})
}

func (m *Initiator) recv(dst []Action, data []byte) []Action {
	f, rest, ok, err := m.reader.read(data, &m.count)
	switch {
	case err != nil:
		return m.fail(dst, err)
	case !ok:
		return dst
	case m.opts.Revision == 1 && f.Rev != 1:
		return m.fail(dst, fault(ReasonRev, "%d", f.Rev))
	case f.S && !m.enhanced:
		return m.fail(dst, fault(ReasonUnaskedEnhanced, "%v", f.Enhanced))
	case m.enhanced && !f.S && !f.Reject:
		return m.fail(dst, fault(ReasonUnenhancedReply, "revision %d", f.Rev))
	}
	m.deadline = time.Time{}
	m.res = Result{Rev: f.Rev, Enhanced: m.enhanced && f.S, IRD: m.depths.IRD, ORD: m.depths.ORD, SendMarkers: f.Markers,
		RecvMarkers: m.opts.Markers, CRC: f.CRC || m.opts.CRC, Private: f.Private, Fallback: m.fallback}
	if m.res.Enhanced {
		m.res.Sent, m.res.Peer = m.asked, f.Enhanced
	}
	if f.Reject {
		m.state = initiatorDead
		m.count[ReasonPeerRejected]++
		return append(dst, Rejected{m.res})
	}
	m.state = initiatorUp
	if m.enhanced {
		d, rtr, err := m.opts.Settle(m.asked, f.Enhanced, m.depths)
		m.res.IRD, m.res.ORD = d.IRD, d.ORD
		if err != nil {
			return m.fail(dst, err)
		}
		m.res.PeerToPeer, m.res.RTR = m.asked.PeerToPeer, rtr
		if rtr != 0 {
			dst = append(dst, SendRTR{rtr})
		}
	}
	dst = append(dst, Established{m.res})
	if len(rest) > 0 {
		// The peer sent these octets before it can have had our first message. Or PD_Length was too
		// small, and the octets turn out to be no FPDUs.
		m.count[ReasonUnfenced]++
		dst = append(dst, Stream{rest})
	}
	return dst
}

// fail ends the attempt. Only after an accepting reply can a Terminate be sent.
func (m *Initiator) fail(dst []Action, err *Error) []Action {
	m.count[err.Reason]++
	m.deadline = time.Time{}
	if m.state == initiatorUp {
		// The result has the depths that the responder wanted.
		dst = append(dst, SendTerminate{err.Code()})
	}
	again := m.state == initiatorWaiting && m.enhanced && m.opts.Fallback &&
		(err.Reason == ReasonClosed || err.Reason == ReasonUnenhancedReply)
	m.state = initiatorDead
	if again {
		m.state, m.enhanced, m.fallback = initiatorIdle, false, true
		return append(dst, Close{}, Redial{})
	}
	return append(dst, Close{}, Failed{err})
}

// Result returns what is known so far, also after a failure: the user may want to see the peer's
// IRD and ORD.
func (m *Initiator) Result() Result { return m.res }
