package engine

import (
	"math"
	"time"

	"ipoibcm/ib"
	"ipoibcm/verbs"
	"ipoibcm/wire/roce"
)

// A message is the kind of the inbound message that is in progress.
type message uint8

const (
	msgNone message = iota
	msgSend
	msgWrite
)

// A responder is the receiving half of a QP.
type responder struct {
	queue RecvQueue // own or shared
	ring  *RecvRing // own, made when first posted to

	wqe  RecvWQE // the work request being filled
	have bool

	msg  message
	off  int    // octets of the message so far
	va   uint64 // WRITE: where the message is written,
	rkey uint32 // the R_Key of that region,
	want int    // and the length of the message in octets

	epsn    ib.PSN // expected
	msn     uint32 // 24 bits
	commEst bool   // CommEst was reported

	waiting    bool // a NAK for epsn was made; packets ahead cause no other one
	early      earlyBuffer
	ackPending bool
	unacked    int  // packets accepted since the last ACK or NAK
	urged      bool // the ACK must not wait
	nakPending bool
	nak        roce.Syndrome
	nakPSN     ib.PSN

	ecn   ecnResponder
	reads []readJob // being answered, by PSN
}

// take makes sure that r.wqe is a receive work request to fill. It returns false if
// none is posted.
func (r *responder) take() bool {
	if !r.have && r.queue != nil {
		r.have = r.queue.Pop(&r.wqe)
	}
	return r.have
}

// sendNAK makes Output send one NAK with s and psn.
func (r *responder) sendNAK(s roce.Syndrome, psn ib.PSN) {
	r.nakPending, r.nak, r.nakPSN, r.waiting = true, s, psn, true
}

// receiveRequest takes one RC request packet (IBA volume 1, 9.7.4).
func (q *QP) receiveRequest(pkt *roce.Packet, ecn uint8, now time.Time) DropReason {
	r := &q.rsp
	psn := pkt.BTH.PSN()
	switch d := psn.Sub(r.epsn); {
	case d > 0:
		return q.receiveEarly(pkt, ecn, d, now)
	case d < 0 && pkt.Op.IsReadRequest():
		return q.repeatRead(pkt)
	case d < 0:
		r.ackPending, r.urged = true, true // the peer has waited already
		return duplicate
	}
	asked := r.waiting
	reason := q.takeMarked(pkt, ecn, now)
	if e := &r.early; e.n > 0 && reason == NoDrop && q.state != verbs.StateError {
		q.receiveKept(pkt.BTH.Reserved() == sentAgain, asked, now)
	} else if e.n > 0 {
		q.dropEarly()
	}
	return reason
}

// takeMarked takes the packet that is expected, which has the ECN codepoint ecn.
func (q *QP) takeMarked(pkt *roce.Packet, ecn uint8, now time.Time) DropReason {
	q.rsp.ecn.packet = ecn == ce
	reason := q.takeRequest(pkt)
	if reason == NoDrop {
		q.heard(ecn, now)
	}
	return reason
}

// takeRequest takes the packet that is expected.
func (q *QP) takeRequest(pkt *roce.Packet) DropReason {
	r := &q.rsp
	// What was missing is here: a NAK that has not left yet is not needed.
	r.waiting, r.nakPending = false, false
	r.ecn.marks(pkt.Op.Starts())

	reason := DropOpcode // atomics
	switch {
	case pkt.Op.IsReadRequest():
		reason = q.startRead(pkt)
	case pkt.Op.IsSend():
		reason = q.receiveData(pkt, msgSend)
	case pkt.Op.IsWrite():
		reason = q.receiveData(pkt, msgWrite)
	}
	if reason != NoDrop {
		q.refuse(reason)
	}
	return reason
}

// fits reports whether the opcode may come next in a message of kind m, and the payload
// has a length that the opcode allows (IBA volume 1 section 9.7; rxe_resp.c).
func (q *QP) fits(pkt *roce.Packet, m message) bool {
	r, n := &q.rsp, len(pkt.Payload)
	switch {
	case pkt.Op.Starts() != (r.msg == msgNone), r.msg != msgNone && r.msg != m:
		return false
	case !pkt.Op.Ends():
		return n == q.mtu
	case pkt.Op.IsLast():
		return n > 0 && n <= q.mtu
	}
	return n <= q.mtu
}

// receiveData takes a packet of a SEND or a WRITE.
func (q *QP) receiveData(pkt *roce.Packet, m message) DropReason {
	if !q.fits(pkt, m) {
		return DropLength
	}
	reason := q.takeData(pkt, m)
	if reason == NoDrop {
		q.rsp.msg = m
		q.accept(pkt)
	}
	return reason
}

// takeData puts the payload of a packet of RC or UC into its place, and completes the receive work
// request at the end of the message.
func (q *QP) takeData(pkt *roce.Packet, m message) DropReason {
	if m == msgSend {
		return q.takeSend(pkt)
	}
	return q.takeWrite(pkt)
}

func (q *QP) takeSend(pkt *roce.Packet) DropReason {
	r := &q.rsp
	if pkt.Op.Starts() {
		if !r.take() {
			return DropNoRecv
		}
		r.off = 0
	}
	if r.off+len(pkt.Payload) > size(r.wqe.SG) {
		return DropTooLong
	}
	if pkt.Op.HasInv() && (q.cfg.Memory == nil || !q.cfg.Memory.Invalidate(pkt.IETH().RKey())) {
		return DropAccess
	}
	scatter(r.wqe.SG, r.off, pkt.Payload)
	r.off += len(pkt.Payload)
	if pkt.Op.Ends() {
		q.deliver(pkt, verbs.Recv)
	}
	return NoDrop
}

// deliver completes the receive work request with the message that pkt ended.
func (q *QP) deliver(pkt *roce.Packet, op verbs.Opcode) {
	wc := verbs.WC{Opcode: op, ByteLen: q.rsp.off}
	if pkt.Op.HasImm() {
		wc.Flags, wc.Imm = verbs.WithImm, pkt.ImmDt().Value()
	}
	if pkt.Op.HasInv() {
		wc.Flags, wc.Imm = verbs.WithInv, pkt.IETH().RKey()
	}
	q.finishRecv(wc)
}

func (q *QP) finishRecv(wc verbs.WC) {
	r := &q.rsp
	if wc.ID = r.wqe.ID; r.ecn.message {
		wc.Flags |= verbs.Congested
	}
	r.have = false
	clear(r.wqe.SG)
	q.recvDone(wc)
}

func (q *QP) takeWrite(pkt *roce.Packet) DropReason {
	r := &q.rsp
	if h := pkt.RETH(); h != nil {
		var ok bool
		if r.want, ok = q.reach(h, verbs.RemoteWrite); !ok { // all of it, before any of it is written
			return DropAccess
		}
		r.va, r.rkey, r.off = h.Addr(), h.RKey(), 0
	}
	n := len(pkt.Payload)
	if r.off+n > r.want || pkt.Op.Ends() && r.off+n != r.want {
		return DropLength
	}
	if pkt.Op.HasImm() && !r.take() {
		return DropNoRecv // on RC the peer sends the packet again; its payload is written then
	}
	if n > 0 {
		dst, ok := q.lookup(r.rkey, r.va+uint64(r.off), n, verbs.RemoteWrite)
		if !ok {
			return DropAccess
		}
		r.off += copy(dst, pkt.Payload)
	}
	if pkt.Op.HasImm() {
		q.deliver(pkt, verbs.RecvWriteImm)
	}
	return NoDrop
}

// lookup returns the n octets at va of the region with rkey. It returns false unless the
// peer of this QP has all rights of access to them.
func (q *QP) lookup(rkey uint32, va uint64, n int, access verbs.Access) ([]byte, bool) {
	if q.cfg.Memory == nil || q.attr.Access&access != access {
		return nil, false
	}
	b, ok := q.cfg.Memory.Lookup(rkey, va, n, access)
	return b, ok && len(b) == n
}

// reach returns the number of octets that h names. ok reports whether the peer has all
// rights of access to them.
func (q *QP) reach(h roce.RETH, access verbs.Access) (n int, ok bool) {
	switch {
	case h.Length() == 0:
		return 0, true
	case h.Length() > math.MaxInt32: // more than any message has, and perhaps than an int
		return 0, false
	}
	_, ok = q.lookup(h.RKey(), h.Addr(), int(h.Length()), access)
	return int(h.Length()), ok
}

// accept counts one good RC packet as received: it advances the expected PSN, and at the
// end of a message the MSN. If the packet asks for an ACK, one is pending then.
func (q *QP) accept(pkt *roce.Packet) {
	r := &q.rsp
	r.epsn = r.epsn.Add(1)
	r.unacked++
	if pkt.Op.Ends() {
		r.msn = (r.msn + 1) & 0xffffff
		r.msg = msgNone
	}
	if pkt.BTH.AckReq() {
		r.ackPending = true
	}
}

// refuse answers a request that was dropped. Without a receive work request for it the peer is to
// send it again. After any other reason the QP is in ERR.
func (q *QP) refuse(why DropReason) {
	r := &q.rsp
	nak, status := roce.NAKInvalidReq, verbs.RemoteInvReq
	switch why {
	case DropNoRecv:
		r.sendNAK(roce.RNRSyndrome(q.attr.MinRNRTimer), r.epsn)
		return
	case DropTooLong:
		status = verbs.LocalLengthError
		q.finishRecv(verbs.WC{Status: status, Opcode: verbs.Recv})
	case DropAccess:
		nak, status = roce.NAKRemoteAccess, verbs.RemoteAccess
	}
	r.sendNAK(nak, r.epsn)
	q.fail(status)
}

// nextResponse puts the next READ response or NAK into p.
func (q *QP) nextResponse(p *Packet) bool {
	r := &q.rsp
	for len(r.reads) > 0 && q.state != verbs.StateError {
		if q.nextReadResponse(p) {
			return true
		}
	}
	if !r.nakPending {
		return false
	}
	r.nakPending, r.ackPending = false, false
	if r.nak.IsRNR() {
		q.count.RNROut++
	} else {
		q.count.NAKsOut++
	}
	q.putAck(p, r.nak, r.nakPSN)
	return true
}

// nextAck puts an ACK into p if one is pending, and if it may not wait any longer or
// can leave in one call with the requests in before. Output sends it after READ
// responses, so that the PSNs stay in order, and after requests. One ACK acknowledges
// all packets since the last one.
func (q *QP) nextAck(p *Packet, before []Packet) bool {
	r := &q.rsp
	if !r.ackPending || q.AckWaits() && !takesAlong(before) {
		return false
	}
	r.ackPending = false
	q.count.ACKsOut++
	q.putAck(p, roce.SyndromeACK, r.epsn.Add(-1))
	return true
}

// takesAlong reports whether a shorter packet can follow pkts in one UDP_SEGMENT call,
// where all but the last have one length. The shorter packet then costs next to nothing.
func takesAlong(pkts []Packet) bool {
	n := len(pkts)
	return n == 1 || n > 1 && pkts[n-1].Len() == pkts[n-2].Len()
}

// AckWaits reports whether an ACK is pending that [QP.Output] holds back.
func (q *QP) AckWaits() bool {
	r := &q.rsp
	return r.ackPending && !r.urged && r.unacked < q.cfg.AckWithin
}

// UrgeAck ends the wait of an ACK: the next [QP.Output] returns it.
func (q *QP) UrgeAck() { q.rsp.urged = q.rsp.ackPending }

// putAck makes an ACK or a NAK. Other implementations ignore the reserved bits of the
// BTH. In a sequence NAK they hold the number of packets to send again (see gapOf), in
// an ACK keepsEarly and the flags about CE marks (see answersCE).
func (q *QP) putAck(p *Packet, s roce.Syndrome, psn ib.PSN) {
	roce.PutBTH(p.Header[:], roce.BTHFields{Opcode: roce.RCAck, PKey: q.attr.PKey, DestQPN: q.attr.DestQPN, PSN: psn})
	said := q.gapOf(s, psn)
	if s.IsACK() {
		if q.cfg.ECN != ECNOff {
			said = q.rsp.ecn.tells()
		}
		if q.cfg.Ahead {
			said |= keepsEarly
		}
	}
	roce.BTH(p.Header[:]).SetReserved(said)
	roce.PutAETH(p.Header[roce.BTHLen:], s, q.rsp.msn)
	p.HeaderLen, p.Pad, p.NPayload, p.PayloadLen, p.AH = roce.BTHLen+roce.AETHLen, 0, 0, 0, nil
	q.rsp.unacked, q.rsp.urged = 0, false
	q.count.PacketsOut++
}
