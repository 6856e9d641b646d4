package engine

import (
	"time"

	"ipoibcm/ib"
	"ipoibcm/verbs"
	"ipoibcm/wire/roce"
)

// outputUnreliable is Output of UC and UD, which send each packet once. A work
// request completes in the call after the one that returned its last packet, when
// the caller has sent that packet.
func (q *QP) outputUnreliable(pkts []Packet) int {
	if q.state != verbs.StateRTS {
		return 0
	}
	q.completeSent()
	n := 0
	if len(pkts) > 0 && q.nextCNP(&pkts[0]) {
		n = 1
	}
	for r := &q.req; n < len(pkts) && r.cur != q.sq.tail; n++ {
		w := q.sq.at(r.cur)
		if q.cfg.Transport == ib.UD {
			q.putDatagram(&pkts[n], w)
		} else {
			q.putData(&pkts[n], r.cur, r.curPkt, false)
		}
		q.advanceNext(w, 1)
	}
	return n
}

// completeSent completes the requests whose packets have all left.
func (q *QP) completeSent() {
	for q.sq.head != q.req.cur {
		q.complete(verbs.Success)
	}
}

// receiveUC takes one UC packet (IBA volume 1 section 9.8). Any error drops the whole message.
func (q *QP) receiveUC(pkt *roce.Packet, ecn uint8, now time.Time) DropReason {
	r := &q.rsp
	r.ecn.packet = ecn == ce
	r.ecn.marks(pkt.Op.Starts())
	psn := pkt.BTH.PSN()
	if pkt.Op.Starts() {
		r.msg = msgNone // an unfinished one before it is lost; its buffer is reused
	} else if r.msg == msgNone || psn != r.epsn {
		r.msg = msgNone
		return DropSequence
	}
	r.epsn = psn.Add(1)
	m := msgSend
	if pkt.Op.IsWrite() {
		m = msgWrite
	}
	if !q.fits(pkt, m) {
		r.msg = msgNone
		return DropLength
	}
	reason := q.takeData(pkt, m)
	if reason == NoDrop {
		q.heard(ecn, now)
	}
	if r.msg = m; reason != NoDrop || pkt.Op.Ends() {
		r.msg = msgNone
	}
	return reason
}

// putDatagram makes the one packet of a UD message.
func (q *QP) putDatagram(p *Packet, w *sendWQE) {
	d := q.sq.dest(q.req.cur)
	op := roce.UDSendOnly
	if w.op == verbs.SendImm {
		op = roce.UDSendOnlyImm
	}
	qkey := d.qkey
	if qkey&ib.ControlledQKey != 0 { // IBA volume 1 section 10.2.5
		qkey = q.attr.QKey
	}
	pad := roce.Pad(int(w.len))
	roce.PutBTH(p.Header[:], roce.BTHFields{Opcode: op, Solicited: w.flags&verbs.Solicited != 0, Pad: pad,
		PKey: q.attr.PKey, DestQPN: d.qpn, PSN: q.req.next})
	roce.PutDETH(p.Header[roce.BTHLen:], qkey, q.cfg.QPN)
	h := roce.BTHLen + roce.DETHLen
	if op.HasImm() {
		roce.PutImmDt(p.Header[h:], w.imm)
		h += roce.ImmDtLen
	}
	p.HeaderLen, p.Pad, p.PayloadLen, p.AH = uint8(h), uint8(pad), int(w.len), d.ah
	p.NPayload = slice(&p.Payload, q.sq.sg(q.req.cur), 0, int(w.len))
	q.count.OctetsOut += uint64(w.len)
}

// receiveUD takes one datagram (IBA volume 1 section 9.8): the GRH area first, then the payload.
func (q *QP) receiveUD(pkt *roce.Packet, from *Source) DropReason {
	r := &q.rsp
	d := pkt.DETH()
	if d.QKey() != q.attr.QKey {
		return DropQKey
	}
	if !r.take() {
		return DropNoRecv
	}
	n := verbs.GRHLen + len(pkt.Payload)
	if n > size(r.wqe.SG) {
		return DropTooLong // the receive buffer waits for another packet
	}
	scatter(r.wqe.SG, 0, from.GRH[:])
	scatter(r.wqe.SG, verbs.GRHLen, pkt.Payload)
	wc := verbs.WC{Opcode: verbs.Recv, Flags: verbs.WithGRH, SrcQPN: d.SrcQPN(), ByteLen: n, PKey: pkt.BTH.PKey()}
	if pkt.Op.HasImm() {
		wc.Flags, wc.Imm = verbs.WithGRH|verbs.WithImm, pkt.ImmDt().Value()
	}
	r.ecn.message = from.ECN == ce
	q.finishRecv(wc)
	return NoDrop
}
