package engine

import (
	"time"

	"ipoibcm/ib"
	"ipoibcm/verbs"
	"ipoibcm/wire/roce"
)

// A requester is the sending half of an RC or UC QP, and of UD.
//
// A request gets its PSNs when it is posted. On RC una <= next <= highest <= post always holds
// in the arithmetic of PSNs; a retransmission moves next back. On UC and UD una does not move.
type requester struct {
	cur    uint32 // position of the work request that next belongs to
	curPkt uint32 // packet within it

	una     ib.PSN // oldest packet not acknowledged
	next    ib.PSN // next packet to send
	highest ib.PSN // after the last packet ever sent
	post    ib.PSN // of the next request to be posted

	expected ib.PSN // the least that the peer expects, as far as we know

	limit     int    // packets in flight: the window, less after a loss or a timeout
	sinceLoss int    // packets acknowledged since the last loss, at most lossMemory windows
	lossEvery int    // packets between two losses, on average; 0 means that none was lost
	sinceNAK  int    // packets acknowledged since the last NAK for a lost packet, at most seldomLost
	sinceAck  int    // packets sent since one asked for an ACK
	gapAt     ib.PSN // una when a lost READ response was last seen
	gapSeen   bool   // gapAt is valid
	nakAt     ib.PSN // of the last sequence NAK since una moved
	nakSeen   bool
	retryLeft uint8
	rnrLeft   uint8
	backoff   uint8 // timeouts in a row
	probing   bool  // the next expiry is a probe, not a timeout

	probeAfter time.Duration // from the last probe, or else from arming the timer, to the next probe
	waited     time.Duration // from arming the timer to the last probe; 0: there was none since
	probe      probe
	rtt        roundTrip

	first          uint32 // position of the first work request: messages are counted from there
	msnRight       uint8  // ACKs in a row whose MSN was right, at most msnTrust
	msnSaysNothing bool   // there was a request that not all peers count

	challenge   challenge
	ackDeadline time.Time
	rnrDeadline time.Time // waiting out an RNR NAK

	missing missing
	cwnd    congestionWindow
	ecn     ecnRequester
	ours    bool // the peer knows sentAgain: it has said keepsEarly, or the length of a gap in a NAK
	ahead   bool // the peer knows sentAhead: an ACK of it has said keepsEarly
}

// Marks of a request packet, in the reserved bits of the BTH, for peers that know them. sentAgain:
// it was sent before, which shows the peer that the later packets that it has kept are genuine.
// sentAhead: the packet before it follows at once, see [Group].
const (
	sentAgain = 1
	sentAhead = 2
)

// A missing is the range of packets that the last NAK asked for, if the peer keeps the packets
// behind them.
type missing struct {
	next, end ib.PSN // still to be sent again
	behind    ib.PSN // after the last packet that had been sent when the NAK arrived
	asked     bool   // a NAK has asked for packets, and not all of these are acknowledged
	keeps     bool   // the last NAK gave the length of the gap: the peer kept what was behind
	congested bool   // it was a queue on the path that overflowed

	quarters uint8         // of the packets behind the gap that have arrived by now, as far as the time tells
	quarter  time.Duration // a quarter of a round trip
	arrives  time.Time     // when the next quarter will have arrived; zero: nothing waits for that
}

// forget stops sending again what the last NAK asked for.
func (m *missing) forget() { *m = missing{keeps: m.keeps} }

func (r *requester) start(q *QP) {
	psn := q.attr.SQPSN
	*r = requester{cur: q.sq.tail, first: q.sq.tail, una: psn, next: psn, highest: psn, post: psn, expected: psn, limit: q.window(),
		retryLeft: q.attr.RetryCount, rnrLeft: q.attr.RNRRetry}
}

// Health returns round trip, window and counters of loss of an RC QP in RTS. For any other QP ok
// is false.
func (q *QP) Health() (h verbs.Health, ok bool) {
	if q.cfg.Transport != ib.RC || q.state != verbs.StateRTS {
		return h, false
	}
	r, c := &q.req, &q.count
	return verbs.Health{RTT: r.rtt.mean, RTTSpread: r.rtt.spread, InFlight: r.next.Sub(r.una), Limit: r.limit, Window: q.window(),
		Packets: c.PacketsOut, Retransmits: c.Retransmits, Timeouts: c.Timeouts, Probes: c.Probes, NotReady: c.RNRIn}, true
}

// postWR queues wr, a message of n octets.
func (r *requester) postWR(q *QP, wr *verbs.SendWR, n int) {
	w := sendWQE{id: wr.ID, raddr: wr.RemoteAddr, rkey: wr.RKey, imm: wr.Imm, len: uint32(n), npkt: 1,
		psn: r.post, op: wr.Opcode, flags: wr.Flags, nsg: uint8(len(wr.SG))}
	if wr.Opcode == verbs.SendInv {
		w.imm = wr.InvKey
	}
	if q.cfg.Transport != ib.UD {
		w.npkt = packets(n, q.mtu)
	}
	switch wr.Opcode {
	case verbs.Send, verbs.SendImm, verbs.SendInv:
	default:
		r.msnRight, r.msnSaysNothing = 0, true
	}
	q.sq.push(&w, wr)
	r.post = w.end()
}

// packets returns how many packets carry n octets.
func packets(n, mtu int) uint32 { return uint32(max(1, (n+mtu-1)/mtu)) }

// nextRequest puts the next RC request packet into p, if one may go out now.
func (q *QP) nextRequest(p *Packet, now time.Time) bool {
	r := &q.req
	if !r.rnrDeadline.IsZero() {
		return false
	}
	if r.missing.next.Before(r.missing.end) && q.nextMissing(p) {
		return true
	}
	if r.cur == q.sq.tail {
		return false
	}
	flight, most := r.next.Sub(r.una), q.mostInFlight()
	if flight >= most {
		return false
	}
	w := q.sq.at(r.cur)
	if r.curPkt == 0 && w.flags&verbs.Fence != 0 && q.readsOut() > 0 {
		return false
	}
	n := uint32(1) // PSNs that this packet takes
	if w.op == verbs.Read {
		if q.readsOut() >= int(q.attr.MaxRDAtomic) {
			return false
		}
		n = min(ReadChunk-r.curPkt%ReadChunk, w.npkt-r.curPkt)
		q.putRead(p, w, n)
	} else {
		// Ask for an ACK where the peer's silence would make us wait.
		r.sinceAck++
		ack := r.curPkt == w.npkt-1 || r.sinceAck >= min(q.cfg.ackEvery(), max(r.limit/4, minFlight/4)) || flight == most-1
		if ack {
			r.sinceAck = 0
			r.rtt.begin(r.next, r.next == r.highest, r.missing.asked, now)
		}
		q.putData(p, r.cur, r.curPkt, ack)
	}
	if r.next.Before(r.highest) {
		q.markAgain(p)
		q.count.Retransmits++
	}
	q.advanceNext(w, n)
	return true
}

// mostInFlight returns how many packets may have been sent and not be acknowledged: r.limit, and while a gap
// is repaired that the path made by chance, as many more as have arrived behind it. The peer keeps these, so
// they are not in flight any more (as pipe in RFC 6675 section 4 counts).
func (q *QP) mostInFlight() int {
	r := &q.req
	m := &r.missing
	if !m.asked || m.quarters == 0 {
		return r.limit
	}
	w := q.window()
	kept := max(w, min(2*w, q.cfg.MaxWindowOctets/max(q.mtu, 1), earlyPackets))
	return max(r.limit, min(r.limit+m.behind.Sub(m.end)*int(m.quarters)/4, kept))
}

// arriving begins to count the packets behind the gap that have arrived: what was sent in the last round trip
// arrives within the next.
func (q *QP) arriving(now time.Time) {
	m := &q.req.missing
	if m.quarter = q.req.rtt.last / 4; m.quarter > 0 && !m.congested && q.req.ecn.allowed == 0 {
		m.arrives = now.Add(m.quarter)
	}
}

// arrived counts the quarters of the packets behind the gap that have arrived by now.
func (m *missing) arrived(now time.Time) {
	for !m.arrives.IsZero() && !now.Before(m.arrives) {
		m.arrives = m.arrives.Add(m.quarter)
		if m.quarters++; m.quarters == 4 {
			m.arrives = time.Time{}
		}
	}
}

// advanceNext moves next past n PSNs of w, the work request at cur.
func (q *QP) advanceNext(w *sendWQE, n uint32) {
	r := &q.req
	r.next = r.next.Add(int(n))
	if r.highest.Before(r.next) {
		r.highest = r.next
	}
	r.curPkt += n
	if r.curPkt == w.npkt {
		r.cur, r.curPkt = r.cur+1, 0
	}
	q.count.PacketsOut++
}

// nextMissing puts into p the next packet that the peer lacks. It returns false if there is none.
// If a READ is among them, it returns false too, and all from una on is sent again.
func (q *QP) nextMissing(p *Packet) bool {
	m := &q.req.missing
	if m.next.Before(q.req.una) {
		m.next = q.req.una // m.next has come after all
	}
	if !m.next.Before(m.end) {
		return false
	}
	for i := q.sq.head; i != q.sq.tail; i++ {
		w := q.sq.at(i)
		d := m.next.Sub(w.psn)
		if d >= int(w.npkt) {
			continue
		}
		if d < 0 || w.op == verbs.Read {
			break
		}
		m.next = m.next.Add(1)
		q.putData(p, i, uint32(d), m.next == m.end)
		q.markAgain(p)
		q.count.Retransmits++
		q.count.PacketsOut++
		return true
	}
	m.forget() // not for us to say which READ responses it lacks
	q.goBack()
	return false
}

// markAgain marks p as sent before, if the peer knows the mark.
func (q *QP) markAgain(p *Packet) {
	if q.req.ours {
		roce.BTH(p.Header[:]).SetReserved(sentAgain)
	}
}

// putData makes packet k of the SEND or WRITE at position i.
func (q *QP) putData(p *Packet, i, k uint32, ack bool) {
	w := q.sq.at(i)
	off := int(k) * q.mtu
	n := min(int(w.len)-off, q.mtu)
	first, last := k == 0, k == w.npkt-1
	op := dataOpcode(w.op, first, last)
	pad := roce.Pad(n)
	roce.PutBTH(p.Header[:], roce.BTHFields{
		Opcode: op.With(q.cfg.Transport), Solicited: last && w.flags&verbs.Solicited != 0, Pad: pad,
		PKey: q.attr.PKey, DestQPN: q.attr.DestQPN, AckReq: ack, PSN: w.psn.Add(int(k)),
	})
	h := roce.BTHLen
	if op.HasRETH() {
		roce.PutRETH(p.Header[h:], w.raddr, w.rkey, w.len)
		h += roce.RETHLen
	}
	if op.HasImm() || op.HasInv() { // same place, same length
		roce.PutImmDt(p.Header[h:], w.imm)
		h += roce.ImmDtLen
	}
	p.HeaderLen, p.Pad, p.PayloadLen, p.AH = uint8(h), uint8(pad), n, nil
	p.NPayload = slice(&p.Payload, q.sq.sg(i), off, n)
	q.count.OctetsOut += uint64(n)
}

// dataOpcode returns the RC opcode of a packet of a SEND or WRITE.
func dataOpcode(op verbs.Opcode, first, last bool) roce.Opcode {
	o := &dataOpcodes[op]
	switch {
	case first && last:
		return o.only
	case first:
		return o.first
	case last:
		return o.last
	}
	return o.middle
}

// dataOpcodes are the RC opcodes of the packets of a message.
var dataOpcodes = [...]struct{ first, middle, last, only roce.Opcode }{
	verbs.Send:     {roce.RCSendFirst, roce.RCSendMiddle, roce.RCSendLast, roce.RCSendOnly},
	verbs.SendImm:  {roce.RCSendFirst, roce.RCSendMiddle, roce.RCSendLastImm, roce.RCSendOnlyImm},
	verbs.SendInv:  {roce.RCSendFirst, roce.RCSendMiddle, roce.RCSendLastInv, roce.RCSendOnlyInv},
	verbs.Write:    {roce.RCWriteFirst, roce.RCWriteMiddle, roce.RCWriteLast, roce.RCWriteOnly},
	verbs.WriteImm: {roce.RCWriteFirst, roce.RCWriteMiddle, roce.RCWriteLastImm, roce.RCWriteOnlyImm},
}

// putRead makes the request for n packets of a READ from curPkt on.
func (q *QP) putRead(p *Packet, w *sendWQE, n uint32) {
	r := &q.req
	off := r.curPkt * uint32(q.mtu)
	roce.PutBTH(p.Header[:], roce.BTHFields{
		Opcode: roce.RCReadRequest, PKey: q.attr.PKey, DestQPN: q.attr.DestQPN, AckReq: true, PSN: r.next,
	})
	roce.PutRETH(p.Header[roce.BTHLen:], w.raddr+uint64(off), w.rkey, min(w.len-off, n*uint32(q.mtu)))
	p.HeaderLen, p.Pad, p.NPayload, p.PayloadLen, p.AH = roce.BTHLen+roce.RETHLen, 0, 0, 0, nil
	r.sinceAck = 0
}

// readsOut returns how many READ requests are sent and not wholly answered. It walks the send
// queue, so it is called for READs and fences only.
func (q *QP) readsOut() (n int) {
	r := &q.req
	for i := q.sq.head; i != q.sq.tail && i-q.sq.head <= r.cur-q.sq.head; i++ {
		w := q.sq.at(i)
		if w.op != verbs.Read {
			continue
		}
		lo, hi := max(0, r.una.Sub(w.psn)), min(int(w.npkt), r.next.Sub(w.psn))
		if hi > lo {
			n += (hi+ReadChunk-1)/ReadChunk - lo/ReadChunk
		}
	}
	return n
}

// seek makes psn, which is not before una, the next to be sent.
func (q *QP) seek(psn ib.PSN) {
	r := &q.req
	r.next, r.sinceAck = psn, 0
	r.rtt.boundFrom(psn)
	for i := q.sq.head; i != q.sq.tail; i++ {
		w := q.sq.at(i)
		if d := psn.Sub(w.psn); d < int(w.npkt) {
			r.cur, r.curPkt = i, uint32(d)
			return
		}
	}
	r.cur, r.curPkt = q.sq.tail, 0
}

// goBack sends again from the oldest unacknowledged packet.
func (q *QP) goBack() { q.seek(q.req.una) }

// complete ends the oldest work request. A success that was not to be signaled has no completion.
func (q *QP) complete(status verbs.Status) {
	w := *q.sq.at(q.sq.head)
	q.sq.pop()
	if w.flags&verbs.Signaled == 0 && status == verbs.Success {
		return
	}
	q.sendDone(w.id, w.op, int(w.len), status)
}
