package engine

import (
	"bytes"
	"time"

	"ipoibcm/ib"
	"ipoibcm/verbs"
	"ipoibcm/wire/roce"
)

const (
	// earlyPackets and earlyOctets bound what one QP keeps of packets that arrive early: how
	// far ahead of the expected PSN a packet may be, and how many octets are kept. The QP
	// drops a packet beyond these bounds, and the peer sends it again.
	earlyPackets, earlyOctets = 4 << 10, 8 << 20
	// A single missing packet counts as lost once patiencePackets have overtaken it, or
	// patienceTime after the first of these. TCP waits for three (RFC 5681 section 3.2), but a
	// NAK can make a peer send all later packets again. Several missing in a row count as lost
	// at once.
	patiencePackets, patienceTime = 8, 300 * time.Microsecond
	// aheadTime is how long packets that are marked with sentAhead may wait for those before them.
	aheadTime = 10 * time.Millisecond
	// lateTime is how late a single overtaken packet may arrive without the mark of a packet
	// sent again. After that the packets that overtook it count as forged.
	lateTime = 20 * time.Millisecond
	// Two gaps with fewer than fewKept kept packets between them are reported to the peer as
	// one. It sends those packets again too: about as many as leave in a short round trip.
	fewKept = 12
	// smallRing is how many slots are left at most when no packet is kept any more. A ring may
	// grow to nearRing for a single packet; one that is farther ahead counts as a forgery.
	// Beyond that there are at most sparseRing slots for each packet that is kept, and no packet
	// is kept that needs more than half of them. So the packets that all queue pairs keep bound
	// the slots that these have.
	smallRing, nearRing = 64, 512
	sparseRing          = 64
)

// An earlyBuffer keeps RC request packets that arrive early, until the missing packets before
// them have arrived. Whoever guesses the QPN, but not the PSN, can have a packet kept, so a kept
// packet proves nothing. It is taken only if the peer itself shows that there was a
// gap: by a packet with the expected PSN that is marked as sent again. Without the
// mark it is taken only after a gap of one packet, and for no longer than lateTime.
// docs/adr/0023 has the rest.
type earlyBuffer struct {
	slots  [][]byte // found by PSN: BTH through pad, three octets, and the ECN codepoint
	n      int
	octets int

	single bool      // one packet is missing before those kept
	beyond bool      // some were dropped, for which there was no room
	ahead  bool      // some were marked with sentAhead: what is missing follows
	since  time.Time // when the first of those kept arrived, or the gap before this one closed
	behind int       // packets since then
	told   ib.PSN    // end of the gap for which a NAK was sent last
	nakAt  time.Time // when to send a NAK for the gap; zero: it was sent, or there is no gap
}

// slot returns where psn is or would be.
func (e *earlyBuffer) slot(psn ib.PSN) *[]byte { return &e.slots[int(psn)&(len(e.slots)-1)] }

// has reports whether psn is kept.
func (e *earlyBuffer) has(psn ib.PSN) bool {
	if e.n == 0 {
		return false
	}
	b := *e.slot(psn)
	return b != nil && roce.BTH(b).PSN() == psn
}

// keep keeps a packet with the ECN codepoint ecn that is d ahead of the expected one and is not
// kept yet. It reports whether there was room.
func (e *earlyBuffer) keep(pkt *roce.Packet, ecn uint8, d int, bufs Buffers) bool {
	n := len(pkt.Covered) + roce.ICRCLen
	taken := d < len(e.slots) && *e.slot(pkt.BTH.PSN()) != nil // by a packet that a READ has overtaken
	if taken || d >= earlyPackets || d >= max(nearRing, sparseRing/2*(e.n+1)) || e.octets+n > earlyOctets {
		return false
	}
	b := buffer(n, e.n, bufs)
	if b == nil {
		return false
	}
	if d >= len(e.slots) {
		e.grow(d)
	}
	copy(b, pkt.Covered)
	b[n-1] = ecn
	*e.slot(pkt.BTH.PSN()) = b
	e.n, e.octets = e.n+1, e.octets+n
	return true
}

// buffer returns n octets for a queue pair that holds held buffers already, nil if there
// are none.
func buffer(n, held int, bufs Buffers) []byte {
	if bufs == nil {
		return make([]byte, n)
	}
	b := bufs.Get(held)
	if b != nil && len(b) < n { // a packet longer than any path MTU allows
		bufs.Put(b)
		return nil
	}
	return b[:min(n, len(b))]
}

// grow makes room for a packet that is d ahead.
func (e *earlyBuffer) grow(d int) {
	n := max(smallRing, len(e.slots))
	for n <= d {
		n *= 2
	}
	old := e.slots
	e.slots = make([][]byte, n)
	for _, b := range old {
		if b != nil {
			*e.slot(roce.BTH(b).PSN()) = b
		}
	}
}

// take removes the packet psn from those kept and returns it, nil if it is not among them.
func (e *earlyBuffer) take(psn ib.PSN) []byte {
	if !e.has(psn) {
		return nil
	}
	b := *e.slot(psn)
	*e.slot(psn) = nil
	e.n, e.octets = e.n-1, e.octets-len(b)
	return b
}

// gap returns how many packets are missing from psn on, at most roce.MaxReserved.
func (e *earlyBuffer) gap(psn ib.PSN) int {
	n := 0
	for n < roce.MaxReserved && !e.has(psn.Add(n)) {
		n++
	}
	return n
}

// span returns how many packets from psn on are to be sent again, at most
// roce.MaxReserved: those that are missing, and the few that are kept between two gaps.
// Each gap that has a NAK of its own costs a round trip.
func (e *earlyBuffer) span(psn ib.PSN) int {
	end := e.gap(psn)
	for n, left := end, e.n; n < min(end+fewKept, roce.MaxReserved) && left > 0; n++ {
		if e.has(psn.Add(n)) {
			left--
		} else {
			end = n + e.gap(psn.Add(n))
			n = end - 1
		}
	}
	return min(end, roce.MaxReserved)
}

// samePacket reports whether two packets with the same PSN have the same contents. Fields that
// may change when a packet is sent again, and the congestion bits, do not count.
func samePacket(a, b []byte) bool {
	const resv8, ackReq, psn = 4, 8, 9
	return len(a) == len(b) && bytes.Equal(a[:resv8], b[:resv8]) && bytes.Equal(a[resv8+1:ackReq], b[resv8+1:ackReq]) &&
		bytes.Equal(a[psn:], b[psn:])
}

// receiveEarly takes a request packet that is d ahead of the expected one.
func (q *QP) receiveEarly(pkt *roce.Packet, ecn uint8, d int, now time.Time) DropReason {
	r := &q.rsp
	e := &r.early
	psn := pkt.BTH.PSN()
	if r.waiting && r.nak.IsRNR() {
		return DropSequence // no receive buffer for the expected one, so none for those behind
	}
	if e.has(psn) {
		b := *e.slot(psn)
		if samePacket(b[:len(b)-roce.ICRCLen], pkt.Covered) {
			return duplicate
		}
		q.dropEarly() // one of the two was forged
		if !r.waiting {
			q.nakGap()
		}
		return DropSequence
	}
	first := e.n == 0
	if !e.keep(pkt, ecn, d, q.cfg.Buffers) {
		e.beyond = true
		if !r.waiting {
			q.nakGap()
		}
		return DropSequence
	}
	if first {
		e.since, e.behind, e.single, e.beyond = now, 0, d == 1, false
	}
	patience := patienceTime
	if q.cfg.Ahead && pkt.BTH.Reserved() == sentAhead {
		e.ahead = true
		if e.single {
			patience = aheadTime
		}
		q.count.Ahead++
	} else {
		e.behind++
		q.count.Early++
	}
	switch {
	case r.waiting:
	case !e.ahead && (!e.single || e.behind >= patiencePackets):
		q.nakGap()
	case e.nakAt.IsZero(), now.Add(patience).Before(e.nakAt):
		e.nakAt = now.Add(patience)
	}
	return NoDrop
}

// nakGap makes the NAK that asks for the missing packets.
func (q *QP) nakGap() {
	r := &q.rsp
	e := &r.early
	e.nakAt, e.told, e.ahead = time.Time{}, r.epsn.Add(e.span(r.epsn)), false
	if e.n == 0 {
		e.told, e.beyond = r.epsn, false
	}
	r.sendNAK(roce.NAKSequence, r.epsn)
}

// receiveKept takes the kept packets that follow the packet just taken, if that packet proves
// them genuine, and else drops them. again says that it was marked as sent again, and asked that
// a NAK had asked for it.
func (q *QP) receiveKept(again, asked bool, now time.Time) {
	r := &q.rsp
	e := &r.early
	if !again && !(e.single && now.Sub(e.since) <= lateTime) {
		if e.ahead && !e.has(r.epsn) { // nothing is to be believed yet, and the rest may be on its way
			e.nakAt = now.Add(patienceTime)
			return
		}
		q.dropEarly()
		return
	}
	e.behind, e.nakAt = 0, time.Time{}
	for {
		b := e.take(r.epsn)
		if b == nil {
			break
		}
		var pkt roce.Packet
		taken, doubt := false, pkt.Parse(b) != nil || !q.follows(&pkt)
		if !doubt {
			taken = q.takeMarked(&pkt, b[len(b)-1], now) == NoDrop
		}
		q.freeEarly(b)
		if !taken || q.state == verbs.StateError {
			q.dropEarly()
			if doubt {
				q.nakGap() // the packet comes again, and counts then
			}
			return
		}
		r.urged = r.ackPending // the peer waits already
	}
	switch {
	case e.n == 0 && e.beyond:
		q.nakGap()
	case e.n == 0:
		e.ahead = false
	case asked && r.epsn.Before(e.told):
		r.waiting = true // the rest is on its way
	case again, e.gap(r.epsn) > 1:
		e.single = e.gap(r.epsn) == 1
		if e.since = now; e.ahead {
			e.nakAt = now.Add(patienceTime)
		} else {
			q.nakGap()
		}
	case e.ahead:
		e.since, e.nakAt = now, now.Add(aheadTime)
	default:
		e.since, e.nakAt = now, now.Add(patienceTime)
	}
	q.shrinkEarly()
}

// follows reports whether pkt can be the next packet of the present message, or can begin one
// if there is none.
func (q *QP) follows(pkt *roce.Packet) bool {
	switch {
	case pkt.Op.IsSend():
		return q.fits(pkt, msgSend)
	case pkt.Op.IsWrite():
		return q.fits(pkt, msgWrite)
	}
	return q.rsp.msg == msgNone
}

// freeEarly gives b back to the Buffers.
func (q *QP) freeEarly(b []byte) {
	if q.cfg.Buffers != nil {
		q.cfg.Buffers.Put(b)
	}
}

// shrinkEarly releases a ring that is too large for the packets kept in it. It drops these
// packets, and the peer sends them again.
func (q *QP) shrinkEarly() {
	switch e := &q.rsp.early; {
	case len(e.slots) <= smallRing:
	case e.n == 0:
		e.slots = nil
	case len(e.slots) > max(nearRing, sparseRing*(e.n+1)):
		q.dropEarly()
	}
}

// dropEarly forgets all packets that are kept.
func (q *QP) dropEarly() {
	e := &q.rsp.early
	for i, b := range e.slots {
		if b != nil {
			q.freeEarly(b)
			e.slots[i] = nil
		}
	}
	*e = earlyBuffer{slots: e.slots}
	q.shrinkEarly()
}

// gapOf returns how many packets from psn on a NAK for psn asks for. Zero means that the NAK
// names no number, and that all packets from psn on must be sent again.
func (q *QP) gapOf(s roce.Syndrome, psn ib.PSN) uint8 {
	if e := &q.rsp.early; s == roce.NAKSequence && e.n > 0 {
		return uint8(e.span(psn))
	}
	return 0
}
