package cm

import (
	"encoding/binary"
	"fmt"

	"ipoibcm/ib"
	"ipoibcm/verbs"
	"ipoibcm/wire/mad"
)

// put encodes msg into buf.
func put(buf *[verbs.MADLen]byte, msg mad.Message) {
	msg.AppendBinary(buf[:0]) // the error is always nil
}

// fill copies private data into its zeroed field (4755-6-5).
func fill(dst, src []byte) {
	if len(src) > len(dst) {
		panic(fmt.Sprintf("cm: %d octets of private data do not fit %d", len(src), len(dst))) // ours
	}
	copy(dst, src)
}

// sendUntilAnswered sends msg. The timer sends it again until the state changes or c.maxRetries are
// used up.
func (m *Manager) sendUntilAnswered(c *conn, msg mad.Message) {
	m.send(c, msg)
	c.tries = 0
	m.setTimer(c, c.wait)
}

// send sends msg and keeps it, so that repeats of the peer's message get it again.
func (m *Manager) send(c *conn, msg mad.Message) {
	put(&c.msg, msg)
	m.transmit(c, &c.msg, msg, false)
}

// repeat sends the last message once more.
func (m *Manager) repeat(c *conn) {
	_, msg, err := mad.Parse(c.msg[:])
	if err != nil {
		panic(fmt.Sprintf("cm: a message of ours: %v", err)) // ours
	}
	m.counts.retried[attrIndex(msg.Attr())]++
	m.transmit(c, &c.msg, msg, true)
}

// transmit sends a MAD to the peer of c.
func (m *Manager) transmit(c *conn, buf *[verbs.MADLen]byte, msg mad.Message, again bool) {
	n := describe(msg, Sent)
	n.Handle, n.Remote, n.State, n.Repeat = c.handle, c.p.Remote, c.state, again
	m.emit(&verbs.MAD{Remote: c.p.Remote, Local: c.p.Local, QPN: c.p.CMQPN, PKey: c.pkey, Path: c.p.Path,
		Data: *buf}, msg, n)
}

// reply answers a MAD without a connection. It sends the answer to the MAD's source: to QP 1 if the
// MAD came at QP 1, whatever QPN it names as its sender, else to the UD QP that it came from.
func (m *Manager) reply(in *verbs.MAD, msg mad.Message) {
	out := &verbs.MAD{Remote: in.Remote, Local: in.Local, QPN: m.rx.from, PKey: in.PKey, Path: in.Path}
	put(&out.Data, msg)
	n := describe(msg, Sent)
	n.Remote = in.Remote
	m.emit(out, msg, n)
}

func (m *Manager) emit(out *verbs.MAD, msg mad.Message, n Note) {
	m.counts.tx[attrIndex(msg.Attr())]++
	n.Inband = out.QPN != ib.QPNGSI
	m.act(SendMAD{MAD: out})
	m.act(n)
}

// askPatience sends an MRA because the user is slow: it asks for the rest of UserTimeout.
func (m *Manager) askPatience(c *conn) {
	left := m.opt.UserTimeout - m.now.Sub(c.since)
	m.sendMRA(c, ib.TimeoutFor(left), c.private)
	m.setTimer(c, left)
}

// sendMRA asks the peer for patience by an MRA, and moves c to the state for that.
func (m *Manager) sendMRA(c *conn, wait ib.Timeout, private []byte) {
	mra := mad.MRA{TransactionID: c.tid, LocalCommID: c.p.LocalCommID, RemoteCommID: c.p.RemoteCommID,
		ServiceTimeout: wait & 31}
	if c.active {
		mra.MessageMRAed = mad.KindREP
		m.setState(c, StateMRAREPSent)
	} else {
		mra.MessageMRAed = mad.KindREQ
		m.setState(c, StateMRAREQSent)
	}
	fill(mra.PrivateData[:], private)
	m.send(c, mra)
}

// guidARI returns the ARI of a REJ 4: our CA GUID, by which the peer finds the
// connection although it may not know our communication ID.
func (m *Manager) guidARI() []byte { return binary.BigEndian.AppendUint64(nil, uint64(m.opt.CAGUID)) }

// rej makes a REJ for the state that c is in.
func (c *conn) rej(reason Reason, ari, private []byte) mad.REJ {
	rej := mad.REJ{TransactionID: c.tid, LocalCommID: c.p.LocalCommID, RemoteCommID: c.p.RemoteCommID,
		MessageRejected: mad.KindOther, Reason: reason, ARILength: uint8(len(ari))}
	switch c.state {
	case StateREQRcvd: // our communication ID was never told
		rej.LocalCommID = 0
		rej.MessageRejected = mad.KindREQ
	case StateMRAREQSent:
		rej.MessageRejected = mad.KindREQ
	case StateREPRcvd, StateMRAREPSent:
		rej.MessageRejected = mad.KindREP
	}
	fill(rej.ARI[:], ari)
	fill(rej.PrivateData[:], private)
	return rej
}

// rejectREQ rejects a REQ that gets no connection. If mayReply returns false, it sends nothing.
func (m *Manager) rejectREQ(in *verbs.MAD, req *mad.REQ, reason Reason, private []byte, why string) {
	if !m.mayReply(in) {
		return
	}
	m.took(nil, why)
	m.answerREQ(in, req, reason, private)
}

// answerREQ sends a REJ and keeps no record, so a repeat of the REQ is judged anew.
func (m *Manager) answerREQ(in *verbs.MAD, req *mad.REQ, reason Reason, private []byte) {
	rej := mad.REJ{TransactionID: req.TransactionID, RemoteCommID: req.LocalCommID, MessageRejected: mad.KindREQ,
		Reason: reason}
	fill(rej.PrivateData[:], private)
	m.reply(in, rej)
}
