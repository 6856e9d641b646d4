package cm

import (
	"ipoibcm/ib"
	"ipoibcm/verbs"
	"ipoibcm/wire/mad"
)

// received is the MAD that a Step is about.
type received struct {
	mad  *verbs.MAD
	attr mad.AttrID
	from ib.QPN // QP that answers go to: QP 1, or the peer's UD QP
	note Note   // of the MAD, without its outcome
}

// recv handles a MAD. The peer's QP from gets the answers to it: QP 1, or the peer's UD QP. Exactly
// one Note reports what became of the MAD, written by took, duplicate or drop.
func (m *Manager) recv(in *verbs.MAD, from ib.QPN) {
	inband := from != ib.QPNGSI
	m.rx = received{mad: in, from: from, note: Note{Dir: Received, Remote: in.Remote, Inband: inband}}
	defer func() { m.rx = received{} }()
	var h mad.Header
	if h.UnmarshalBinary(in.Data[:]) != nil {
		m.drop(nil, DropMalformed, "no MAD header")
		return
	}
	m.rx.attr, m.rx.note.Message = h.Attr, h.Attr.String()
	switch {
	case h.Class != mad.ClassCM:
		m.drop(nil, DropClass, "not the CM class")
		return
	case h.ClassVersion != mad.VersionCM:
		m.wrongVersion(in, h)
		return
	case h.Method != mad.MethodSend:
		m.drop(nil, DropMethod, "")
		return
	}
	_, msg, err := mad.Parse(in.Data[:])
	if err != nil {
		m.drop(nil, DropAttribute, "")
		return
	}
	m.rx.note = describe(msg, Received)
	m.rx.note.Remote, m.rx.note.Inband = in.Remote, inband
	m.counts.rx[attrIndex(h.Attr)]++
	switch msg := msg.(type) {
	case mad.REQ:
		m.recvREQ(in, &msg)
	case mad.REP:
		m.recvREP(&msg)
	case mad.RTU:
		m.recvRTU(&msg)
	case mad.MRA:
		m.recvMRA(&msg)
	case mad.REJ:
		m.recvREJ(&msg)
	case mad.DREQ:
		m.recvDREQ(in, &msg)
	case mad.DREP:
		m.recvDREP(&msg)
	case mad.LAP:
		m.recvLAP(in, &msg)
	case mad.SIDRREQ:
		m.recvSIDRREQ(in, &msg)
	default: // SIDR_REP, APR: we never ask; ClassPortInfo has other methods
		m.drop(nil, DropAttribute, "")
	}
}

// wrongVersion rejects a REQ of another class version, and drops other messages. It can read the
// communication ID of the REQ, because that has the same place in all versions.
func (m *Manager) wrongVersion(in *verbs.MAD, h mad.Header) {
	if h.Attr != mad.AttrREQ || h.Method != mad.MethodSend {
		m.drop(nil, DropClass, "another class version")
		return
	}
	data := in.Data
	data[2] = mad.VersionCM
	var req mad.REQ
	if req.UnmarshalBinary(data[:]) != nil {
		m.drop(nil, DropClass, "another class version")
		return
	}
	only := mad.REQ{TransactionID: req.TransactionID, LocalCommID: req.LocalCommID}
	m.rejectREQ(in, &only, ReasonInvalidVersion, m.ownerData(m.local(in.Local)), "another class version")
}

// conn returns the connection with both communication IDs, or nil.
func (m *Manager) conn(local, remote mad.CommID) *conn {
	if c := m.begun(local, remote); c != nil && c.p.RemoteQPN != 0 {
		return c
	}
	return nil
}

// begun is like conn, but also returns a connection whose peer has not named its communication ID
// yet.
func (m *Manager) begun(local, remote mad.CommID) *conn {
	if c := m.byLocal[local]; c != nil && (c.p.RemoteQPN == 0 || c.p.RemoteCommID == remote) {
		return c
	}
	return nil
}

// fromPeer reports whether the MAD at hand is about a connection, c, and comes from the peer's GID,
// or has no source GID, and, if both the MAD and the connection are in-band, from the peer's UD QP.
// It drops any other MAD (docs/security.md).
func (m *Manager) fromPeer(c *conn) bool {
	src, from := m.rx.mad.Remote, m.rx.from
	switch {
	case c == nil:
		m.drop(nil, DropUnknownConn, "")
	case !src.IsZero() && src != c.p.Remote:
		m.drop(c, DropSource, "it comes from another GID than the connection's")
	case from != ib.QPNGSI && c.p.CMQPN != ib.QPNGSI && from != c.p.CMQPN:
		m.drop(c, DropSource, "it comes from another UD QP than the connection's")
	default:
		return true
	}
	return false
}

// follow makes us send the CM messages of c to the QP that the MAD at hand came from: QP 1, or the
// peer's UD QP. A MAD that was dropped has no such effect.
func (m *Manager) follow(c *conn) {
	if c != nil {
		c.p.CMQPN = m.rx.from
	}
}

// recvMRA grants the peer's user more time.
func (m *Manager) recvMRA(mra *mad.MRA) {
	c := m.begun(mra.RemoteCommID, mra.LocalCommID)
	if !m.fromPeer(c) {
		return
	}
	state := StateMRAREQRcvd
	switch {
	case mra.MessageMRAed == mad.KindREQ && (c.state == StateREQSent || c.state == StateMRAREQRcvd):
	case mra.MessageMRAed == mad.KindREP && (c.state == StateREPSent || c.state == StateMRAREPRcvd):
		state = StateMRAREPRcvd
	default:
		m.drop(c, DropState, "nothing is waiting for it")
		return
	}
	if c.mras >= maxMRAs {
		m.drop(c, DropMRALimit, "")
		return
	}
	c.mras++
	m.took(c, "")
	m.setState(c, state)
	m.setTimer(c, c.wait+min(mra.ServiceTimeout.Duration(), maxMRA))
}

// recvLAP refuses an alternate path, because we support none.
func (m *Manager) recvLAP(in *verbs.MAD, lap *mad.LAP) {
	c := m.conn(lap.RemoteCommID, lap.LocalCommID)
	if c != nil && !m.fromPeer(c) {
		return
	}
	if !m.mayReply(in) {
		return
	}
	m.took(c, "alternate paths are not supported")
	apr := mad.APR{TransactionID: lap.TransactionID, LocalCommID: lap.RemoteCommID, RemoteCommID: lap.LocalCommID,
		Status: mad.APRUnsupported}
	if c == nil || c.state != StateEstablished {
		apr.Status = mad.APRInvalidCommID
	}
	m.reply(in, apr)
}

// recvSIDRREQ answers that SIDR is not supported.
func (m *Manager) recvSIDRREQ(in *verbs.MAD, req *mad.SIDRREQ) {
	if !m.mayReply(in) {
		return
	}
	m.took(nil, "SIDR is not supported")
	m.reply(in, mad.SIDRREP{TransactionID: req.TransactionID, RequestID: req.RequestID,
		Status: mad.SIDRUnsupportedServiceID, ServiceID: req.ServiceID})
}

// mayReply takes one answer from the budget of answers without a connection. If the budget is used
// up it drops the MAD at hand and returns false.
func (m *Manager) mayReply(in *verbs.MAD) bool {
	if m.replies.allow(m.now, in.Remote) {
		return true
	}
	m.drop(nil, DropReplyRate, "")
	return false
}

// isQPN reports whether q can be the QP of a connection.
func isQPN(q ib.QPN) bool { return q > ib.QPNGSI && q < ib.QPNMulticast }
