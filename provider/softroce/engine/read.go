package engine

import (
	"ipoibcm/ib"
	"ipoibcm/verbs"
	"ipoibcm/wire/roce"
)

// A readJob is one READ that is being answered.
type readJob struct {
	psn    ib.PSN // of its first response
	npkt   uint32
	sent   uint32 // responses that have left
	va     uint64
	rkey   uint32
	len    uint32
	repeat bool // asked for again after it was answered
}

// startRead takes a READ request at the expected PSN.
func (q *QP) startRead(pkt *roce.Packet) DropReason {
	r := &q.rsp
	j, ok := q.readJob(pkt)
	switch {
	case r.msg != msgNone, len(pkt.Payload) != 0, j.len > MaxMessage:
		return DropLength
	case !ok:
		return DropAccess
	case r.jobs(false) >= int(q.attr.MaxDestRDAtomic):
		return DropReadBusy
	}
	r.reads = append(r.reads, j)
	r.epsn = r.epsn.Add(int(j.npkt))
	r.msn = (r.msn + 1) & 0xffffff
	return NoDrop
}

// readJob makes a job of a request, if the peer may read what it names.
func (q *QP) readJob(pkt *roce.Packet) (readJob, bool) {
	h := pkt.RETH()
	j := readJob{psn: pkt.BTH.PSN(), va: h.Addr(), rkey: h.RKey(), len: h.Length()}
	if j.len > MaxMessage {
		return j, false
	}
	n, ok := q.reach(h, verbs.RemoteRead)
	j.npkt = packets(n, q.mtu)
	return j, ok
}

// jobs counts the jobs that are, or are not, repetitions.
func (r *responder) jobs(repeat bool) (n int) {
	for i := range r.reads {
		if r.reads[i].repeat == repeat {
			n++
		}
	}
	return n
}

// repeatRead takes a READ request with a PSN before the expected one: the requester asks
// again for responses that it has not received. The data are read from memory again. At
// most MaxDestRDAtomic such requests wait, not counting those that a waiting READ covers.
func (q *QP) repeatRead(pkt *roce.Packet) DropReason {
	r := &q.rsp
	j, ok := q.readJob(pkt)
	switch {
	case len(pkt.Payload) != 0:
		return DropLength
	case !ok:
		return DropAccess
	case j.psn.Add(int(j.npkt)).Sub(r.epsn) > 0:
		return DropStale // it reaches past the expected PSN
	}
	at := len(r.reads)
	for i := range r.reads {
		o := &r.reads[i]
		if d := j.psn.Sub(o.psn); d >= 0 && d+int(j.npkt) <= int(o.npkt) {
			if int(o.sent) > d {
				o.sent = uint32(d) // it has passed that point: go back
			}
			return duplicate
		} else if d < 0 {
			at = min(at, i)
		}
	}
	if r.jobs(true) >= int(q.attr.MaxDestRDAtomic) {
		return DropReadBusy
	}
	j.repeat = true
	r.reads = append(r.reads, j)
	copy(r.reads[at+1:], r.reads[at:])
	r.reads[at] = j
	return duplicate
}

// nextReadResponse puts the next packet of the oldest READ into p. It returns false if the
// peer may not read the memory any more. A READ that is a repetition is then dropped: its
// requester has received the first answer, and the memory was deregistered after that. For
// any other READ a NAK is pending, and the QP is in ERR.
func (q *QP) nextReadResponse(p *Packet) bool {
	r := &q.rsp
	j := &r.reads[0]
	off := int(j.sent) * q.mtu
	n := min(q.mtu, int(j.len)-off)
	p.NPayload = 0
	if n > 0 {
		b, ok := q.lookup(j.rkey, j.va+uint64(off), n, verbs.RemoteRead)
		if !ok && j.repeat {
			r.reads = append(r.reads[:0], r.reads[1:]...)
			return false
		}
		if !ok {
			r.sendNAK(roce.NAKRemoteAccess, j.psn.Add(int(j.sent)))
			q.fail(verbs.RemoteAccess)
			return false
		}
		p.Payload[0], p.NPayload = b, 1
	}
	op := roce.RCReadResponseMiddle
	switch first, last := j.sent == 0, j.sent == j.npkt-1; {
	case first && last:
		op = roce.RCReadResponseOnly
	case first:
		op = roce.RCReadResponseFirst
	case last:
		op = roce.RCReadResponseLast
	}
	pad := roce.Pad(n)
	roce.PutBTH(p.Header[:], roce.BTHFields{Opcode: op, Pad: pad, PKey: q.attr.PKey, DestQPN: q.attr.DestQPN, PSN: j.psn.Add(int(j.sent))})
	h := roce.BTHLen
	if op.HasAETH() {
		roce.PutAETH(p.Header[h:], roce.SyndromeACK, r.msn)
		h += roce.AETHLen
	}
	p.HeaderLen, p.Pad, p.PayloadLen, p.AH = uint8(h), uint8(pad), n, nil
	q.count.PacketsOut++
	q.count.OctetsOut += uint64(n)
	j.sent++
	if j.sent == j.npkt {
		r.reads = append(r.reads[:0], r.reads[1:]...)
	}
	return true
}
