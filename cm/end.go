package cm

import (
	"encoding/binary"
	"slices"
	"time"

	"ipoibcm/ib"
	"ipoibcm/verbs"
	"ipoibcm/wire/mad"
)

const (
	// maxHold bounds how long a REJ is kept, so that repeats of the rejected message get it again.
	maxHold = 10 * time.Second
	// maxRejected bounds how many REJs to REQs are kept; the oldest makes room.
	maxRejected = 512
)

// refuse sends the REJ that the state of c asks for. A connection that has sent a REP then enters
// timewait. Any other enters StateRejected, where repeats of the peer's message get the same REJ.
func (m *Manager) refuse(c *conn, reason Reason, ari, private []byte) {
	rej := c.rej(reason, ari, private)
	if c.state == StateREPSent || c.state == StateMRAREPRcvd {
		m.transmitOnce(c, rej)
		m.timewait(c)
		return
	}
	m.hold(c)
	m.send(c, rej)
}

// transmitOnce sends msg without keeping it for repeats.
func (m *Manager) transmitOnce(c *conn, msg mad.Message) {
	var buf [verbs.MADLen]byte
	put(&buf, msg)
	m.transmit(c, &buf, msg, false)
}

// hold keeps c in StateRejected for as long as the peer may repeat its message, but at most
// maxHold.
func (m *Manager) hold(c *conn) {
	m.setState(c, StateRejected)
	m.setTimer(c, min(maxHold, max(m.opt.MinTimewait, time.Duration(c.maxRetries+1)*c.wait)))
	if c.active {
		return
	}
	m.forgetRemoteQP(c) // a new REQ may name the peer's QP at once
	if len(m.rejected) >= maxRejected {
		m.counts.evicted++
		m.release(m.rejected[0])
	}
	m.rejected = append(m.rejected, c)
}

// reject sends the user's REJ.
func (m *Manager) reject(ev Reject) {
	c := m.user(ev.Handle, "Reject", StateREQRcvd, StateMRAREQSent, StateREPRcvd, StateMRAREPSent)
	if c == nil {
		return
	}
	m.refuse(c, ev.Reason, ev.ARI, ev.PrivateData)
	if c.active {
		m.end(c, Failed{Handle: c.handle, Cause: Refused, Reason: ev.Reason})
	}
	c.ended = true
}

// postpone sends the user's MRA.
func (m *Manager) postpone(ev Defer) {
	c := m.user(ev.Handle, "Defer", StateREQRcvd, StateMRAREQSent, StateREPRcvd, StateMRAREPSent)
	if c == nil {
		return
	}
	m.sendMRA(c, ev.Timeout, ev.PrivateData)
	m.setTimer(c, max(m.opt.UserTimeout, min(ev.Timeout.Duration(), maxMRA)))
}

// cancel abandons a REQ in silence. The record stays, so that a late REP is rejected.
func (m *Manager) cancel(ev Cancel) {
	c := m.user(ev.Handle, "Cancel")
	if c == nil {
		return
	}
	if c.state != StateREQSent && c.state != StateMRAREQRcvd {
		m.disconnect(Disconnect{Handle: ev.Handle})
		return
	}
	m.hold(c)
	m.decide(c, "abandoned")
	m.end(c, Failed{Handle: c.handle, Cause: Cancelled})
}

// refuseLateREP rejects a REP to a REQ that we have given up.
func (m *Manager) refuseLateREP(c *conn, rep *mad.REP) {
	rej := mad.REJ{TransactionID: c.tid, LocalCommID: c.p.LocalCommID, RemoteCommID: rep.LocalCommID,
		MessageRejected: mad.KindREP, Reason: ReasonConsumer}
	fill(rej.PrivateData[:], c.private)
	m.transmitOnce(c, rej)
}

// disconnect ends a connection: with a DREQ if it is established, else with a REJ.
func (m *Manager) disconnect(ev Disconnect) {
	c := m.user(ev.Handle, "Disconnect", StateREQSent, StateMRAREQRcvd, StateREPRcvd, StateMRAREPSent,
		StateREQRcvd, StateMRAREQSent, StateREPSent, StateMRAREPRcvd, StateEstablished)
	if c == nil {
		return
	}
	private := c.private
	if ev.PrivateData != nil {
		private = ev.PrivateData
	}
	switch c.state {
	case StateEstablished:
		m.sendDREQ(c, ev.PrivateData)
		return
	case StateREQSent, StateMRAREQRcvd:
		m.refuse(c, ReasonTimeout, m.guidARI(), private)
	default:
		m.refuse(c, ReasonConsumer, nil, private)
	}
	m.end(c, Failed{Handle: c.handle, Cause: Cancelled})
}

// sendDREQ starts the teardown of an established connection.
func (m *Manager) sendDREQ(c *conn, private []byte) {
	c.tid = m.opt.Rand.Uint64() // a DREQ is an exchange of its own
	dreq := mad.DREQ{TransactionID: c.tid, LocalCommID: c.p.LocalCommID, RemoteCommID: c.p.RemoteCommID,
		RemoteQPN: c.p.RemoteQPN}
	fill(dreq.PrivateData[:], private)
	c.maxRetries = m.opt.MaxRetries // not the number that the peer's REQ named
	m.setState(c, StateDREQSent)
	m.sendUntilAnswered(c, dreq)
}

// stale handles a connection whose peer has named the same QP in another connection: the peer
// may have lost this one.
func (m *Manager) stale(c *conn) {
	switch c.state {
	case StateREQRcvd, StateMRAREQSent: // the user has not accepted it yet
		m.decide(c, "the peer asks anew with the same QP")
		m.end(c, Failed{Handle: c.handle, Cause: Refused, Reason: ReasonStale})
		m.refuse(c, ReasonStale, nil, c.private)
	case StateREPSent, StateMRAREPRcvd, StateREPRcvd, StateMRAREPSent, StateEstablished:
		m.challenge(c, "the peer's QP is named in another connection")
	}
}

// recvREJ ends the connection that the peer rejects.
func (m *Manager) recvREJ(rej *mad.REJ) {
	c := m.subject(rej)
	if !m.fromPeer(c) {
		return
	}
	ari := slices.Clone(rej.ARI[:min(int(rej.ARILength), len(rej.ARI))])
	failed := Failed{Handle: c.handle, Cause: Rejected, Reason: rej.Reason, ARI: ari,
		PrivateData: slices.Clone(rej.PrivateData[:])}
	switch c.state {
	case StateREQSent, StateMRAREQRcvd, StateREQRcvd, StateMRAREQSent: // to our REQ, or the peer has changed its mind
		m.took(c, "")
		m.end(c, failed)
		if c.active && rej.Reason == ReasonStale { // the peer still has a connection with our QPN
			m.timewait(c)
		} else {
			m.release(c)
		}
	case StateREPSent, StateMRAREPRcvd, StateREPRcvd, StateMRAREPSent:
		m.took(c, "")
		m.over(c, failed)
	case StateEstablished, StateDREQSent:
		m.took(c, "")
		m.over(c, Disconnected{Handle: c.handle, By: c.endedBy(), Reason: rej.Reason})
	case StateRejected:
		if !c.active || c.p.RemoteQPN != 0 {
			m.drop(c, DropState, "")
			return
		}
		m.took(c, "the REQ was abandoned already") // no REP can follow a REJ
		m.release(c)
	default:
		m.drop(c, DropState, "")
	}
}

// endedBy says who has ended c if a message of the peer ends it now.
func (c *conn) endedBy() Side {
	if c.state == StateDREQSent {
		return ByUser
	}
	return ByPeer
}

// subject returns the connection that a REJ is about, or nil. A peer that timed out while it
// waited for our REP may not know our communication ID: its REJ names its own ID, and its CA
// GUID. The CA GUID is no secret, so by these two subject finds only half-open connections that
// the peer asked for.
func (m *Manager) subject(rej *mad.REJ) *conn {
	if rej.Reason == ReasonTimeout && rej.ARILength >= 8 {
		guid := ib.GUID(binary.BigEndian.Uint64(rej.ARI[:]))
		if c := m.byRemote[remoteID{m.rx.mad.Remote, guid, rej.LocalCommID}]; c != nil && c.isHalfOpen() {
			return c
		}
	}
	c := m.begun(rej.RemoteCommID, rej.LocalCommID)
	if c != nil && rej.MessageRejected == mad.KindREQ && !c.active {
		return nil
	}
	return c
}

// recvDREQ ends a connection. A DREQ for a connection that we do not know is answered too.
func (m *Manager) recvDREQ(in *verbs.MAD, dreq *mad.DREQ) {
	c := m.conn(dreq.RemoteCommID, dreq.LocalCommID)
	if c == nil {
		if m.mayReply(in) {
			m.took(nil, "the connection is not known")
			m.reply(in, drep(dreq))
		}
		return
	}
	if !m.fromPeer(c) {
		return
	}
	if dreq.RemoteQPN != c.p.LocalQPN {
		m.drop(c, DropDREQQPN, "it names another QPN than ours")
		return
	}
	switch c.state {
	case StateEstablished, StateREPSent, StateMRAREPRcvd, StateREPRcvd, StateMRAREPSent,
		StateDREQSent: // the DREQs crossed
		m.took(c, "")
		m.transmitOnce(c, drep(dreq))
		m.over(c, Disconnected{Handle: c.handle, By: c.endedBy()})
	case StateTimewait:
		m.duplicate(c)
		m.transmitOnce(c, drep(dreq))
	default:
		m.drop(c, DropState, "")
	}
}

func drep(dreq *mad.DREQ) mad.DREP {
	return mad.DREP{TransactionID: dreq.TransactionID, LocalCommID: dreq.RemoteCommID, RemoteCommID: dreq.LocalCommID}
}

// recvDREP completes our teardown, or takes the answer to a challenge.
func (m *Manager) recvDREP(drep *mad.DREP) {
	c := m.conn(drep.RemoteCommID, drep.LocalCommID)
	switch {
	case !m.fromPeer(c):
	case c.state == StateDREQSent:
		m.took(c, "")
		m.over(c, Disconnected{Handle: c.handle, By: ByUser})
	case m.challenged(c) && (c.state == StateEstablished || c.isHalfOpen() || c.state == StateREPRcvd ||
		c.state == StateMRAREPSent):
		m.lostByPeer(c)
	default:
		m.drop(c, DropState, "")
	}
}
