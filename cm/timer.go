package cm

import (
	"time"

	"ipoibcm/ib"
)

// Bounds on the times that peers name; the codes reach to 2.4 hours.
const (
	minWait = 50 * time.Millisecond // between two tries
	maxWait = 10 * time.Second      // for one time that a peer names
	maxMRA  = 60 * time.Second      // for the time that one MRA asks for
	maxMRAs = 16                    // MRAs that one connection honours
	// halfOpenAge is how long a half-open connection is safe from making room for
	// another: two tries of an honest peer.
	halfOpenAge = time.Second
)

// bounded returns the duration of t, at most maxWait.
func bounded(t ib.Timeout) time.Duration { return min(t.Duration(), maxWait) }

// maxTryLife bounds the ACK timeout (2 x packet life time) in the wait for the answer to our
// REQ. Subnet managers give out the packet life of the worst fabric (opensm: 1.07 s). But a
// lost REQ must be repeated before the peer's user stops waiting for it: package ipoib waits
// for a REQ that won a crossing.
const maxTryLife ib.Timeout = 14 // 67 ms

// tryWait returns how long one try waits for an answer: respond for the peer to answer, and the
// ACK timeout ack (2 x packet life time) for the way there and back.
func tryWait(respond, ack ib.Timeout) time.Duration {
	return max(minWait, bounded(respond)+bounded(ack))
}

// patience returns how long we may take to answer, or to send an MRA, if the peer waits respond for
// our answer. The other half of respond is left for the way.
func patience(respond ib.Timeout) time.Duration { return max(minWait, bounded(respond)/2) }

// Before orders connections by deadline, then by age.
func (c *conn) Before(o *conn) bool {
	if !c.deadline.Equal(o.deadline) {
		return c.deadline.Before(o.deadline)
	}
	return c.seq < o.seq
}

// wake handles every deadline that has passed.
func (m *Manager) wake() {
	for c := m.timers.First(); c != nil && !m.now.Before(c.deadline); c = m.timers.First() {
		m.timers.Stop(c)
		m.expire(c)
	}
}

// expire handles the deadline of c.
func (m *Manager) expire(c *conn) {
	switch c.state {
	case StateREQSent, StateMRAREQRcvd, StateREPSent, StateMRAREPRcvd, StateDREQSent:
		if c.tries >= c.maxRetries {
			m.giveUp(c)
			return
		}
		c.tries++
		if c.active || c.state == StateDREQSent || !m.manyHalfOpen() {
			m.repeat(c)
		}
		m.setTimer(c, c.wait)
	case StateREQRcvd, StateMRAREQSent, StateREPRcvd, StateMRAREPSent:
		if (c.state == StateREQRcvd || c.state == StateREPRcvd) && m.now.Before(c.since.Add(m.opt.UserTimeout)) {
			m.decide(c, "the user is slow")
			m.askPatience(c)
			return
		}
		m.timeOut(c, "the user did not answer in time")
	case StateTimewait, StateRejected:
		m.release(c)
	}
}

// manyHalfOpen reports whether so many connections are half-open that they may come from
// forged REQs. Then no timer sends a REP again, because nobody may be at the address. A peer
// that has not got the REP repeats its REQ, and gets the REP then.
func (m *Manager) manyHalfOpen() bool { return len(m.halfOpen) > max(1, m.opt.MaxHalfOpen/4) }

// giveUp ends c after the last try.
func (m *Manager) giveUp(c *conn) {
	if c.state == StateDREQSent {
		m.decide(c, "no DREP came")
		m.over(c, Disconnected{Handle: c.handle, By: ByUser})
		return
	}
	m.timeOut(c, "no answer came")
}

// timeOut ends c, because an answer did not come in time. The peer may hold half a connection; the
// REJ ends that.
func (m *Manager) timeOut(c *conn, text string) {
	m.decide(c, text)
	m.end(c, Failed{Handle: c.handle, Cause: TimedOut})
	m.refuse(c, ReasonTimeout, m.guidARI(), c.private)
}
