package engine

import (
	"bytes"
	"time"

	"ipoibcm/ib"
	"ipoibcm/verbs"
	"ipoibcm/wire/roce"
)

const (
	// earlyPackets and earlyOctets bound what one QP keeps of packets that arrive
	// before others; what is beyond is dropped and sent again.
	earlyPackets, earlyOctets = 4 << 10, 8 << 20
	// patiencePackets and patienceTime are how many packets may overtake one, and for
	// how long, until it counts as lost. TCP waits for three (RFC 5681 section 3.2),
	// but does not lose all that is behind.
	patiencePackets, patienceTime = 8, 300 * time.Microsecond
	// lateTime is how long a single packet that was overtaken may take until what
	// overtook it is taken for forged.
	lateTime = 20 * time.Millisecond
	// fewKept is how many packets between two gaps are rather sent again than told
	// apart: about what leaves in a short round trip.
	fewKept = 12
	// smallRing is how many slots stay when nothing is kept any more. nearRing is how many
	// there may be for a single packet: so many that are lost in a row are told from a forgery
	// far ahead. Beyond that there are sparseRing at most for each that is kept, and none
	// is kept that needs more than half of these: the slots of all queue pairs are
	// bounded by what they keep.
	smallRing, nearRing = 64, 512
	sparseRing          = 64
)

// An earlyBuffer keeps RC request packets that arrived before others, until those are
// here. Whoever guesses the QPN, but not the PSN, can have a packet kept. So what is
// kept proves nothing: it is taken only if the peer itself says, by a packet with the
// expected PSN that is marked as sent again, that there was a gap. Without the mark
// that holds for a gap of one packet, and not for long. docs/adr/0023 has the rest.
type earlyBuffer struct {
	slots  [][]byte // found by PSN: BTH through pad, and room for the ICRC
	n      int
	octets int

	single bool      // one packet is missing before those kept
	beyond bool      // some were dropped, for which there was no room
	since  time.Time // when the first of those kept came
	behind int       // packets since then
	told   ib.PSN    // end of the gap that the peer was told of
	nakAt  time.Time // when the gap is told of, if it is still there; zero: it was, or there is none
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

// keep keeps a packet that is d ahead of what is expected, of which there is none
// yet. It reports whether there was room.
func (e *earlyBuffer) keep(pkt *roce.Packet, d int, bufs Buffers) bool {
	n := len(pkt.Covered) + roce.ICRCLen
	if d >= earlyPackets || d >= max(nearRing, sparseRing/2*(e.n+1)) || e.octets+n > earlyOctets {
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
	*e.slot(pkt.BTH.PSN()) = b
	e.n, e.octets = e.n+1, e.octets+n
	return true
}

// buffer returns n octets for one that has so many buffers already, nil if there are none.
func buffer(n, held int, bufs Buffers) []byte {
	if bufs == nil {
		return make([]byte, n)
	}
	if b := bufs.Get(held); len(b) >= n {
		return b[:n]
	}
	return nil
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

// take returns the packet psn, which is kept no more; nil if it was not.
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
// For each gap that is told by itself a round trip goes by.
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

// samePacket reports whether two packets with one PSN say the same. What a packet
// that is sent again may say otherwise, and the bits of congestion, do not count.
func samePacket(a, b []byte) bool {
	const resv8, ackReq, psn = 4, 8, 9
	return len(a) == len(b) && bytes.Equal(a[:resv8], b[:resv8]) && bytes.Equal(a[resv8+1:ackReq], b[resv8+1:ackReq]) &&
		bytes.Equal(a[psn:], b[psn:])
}

// receiveEarly takes a request packet that is d ahead of the expected one.
func (q *QP) receiveEarly(pkt *roce.Packet, d int, now time.Time) DropReason {
	r := &q.rsp
	e := &r.early
	psn := pkt.BTH.PSN()
	if r.waiting && r.nak.IsRNR() {
		return DropSequence // where is no buffer for one there is none for those behind
	}
	if e.has(psn) {
		b := *e.slot(psn)
		if samePacket(b[:len(b)-roce.ICRCLen], pkt.Covered) {
			return duplicate
		}
		q.dropEarly() // one of the two was forged
		q.nakGap()
		return DropSequence
	}
	first := e.n == 0
	if !e.keep(pkt, d, q.cfg.Buffers) {
		e.beyond = true
		if !r.waiting {
			q.nakGap()
		}
		return DropSequence
	}
	q.count.Early++
	e.behind++
	if first {
		e.since, e.behind, e.single, e.beyond = now, 1, d == 1, false
	}
	switch {
	case r.waiting:
	case !e.single, e.behind >= patiencePackets:
		q.nakGap()
	case e.nakAt.IsZero():
		e.nakAt = now.Add(patienceTime)
	}
	return NoDrop
}

// nakGap asks for what is missing.
func (q *QP) nakGap() {
	r := &q.rsp
	e := &r.early
	e.nakAt, e.told = time.Time{}, r.epsn.Add(e.span(r.epsn))
	if e.n == 0 {
		e.told, e.beyond = r.epsn, false
	}
	r.sendNAK(roce.NAKSequence, r.epsn)
}

// receiveKept takes the packets that were early and follow the one just taken, if
// that one proves them. again says that it was sent again, asked that we had asked.
func (q *QP) receiveKept(again, asked bool, now time.Time) {
	r := &q.rsp
	e := &r.early
	if !again && !(e.single && now.Sub(e.since) <= lateTime) {
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
			taken = q.takeRequest(&pkt) == NoDrop
		}
		q.freeEarly(b)
		if !taken || q.state == verbs.StateError {
			q.dropEarly()
			if doubt {
				q.nakGap() // it comes again, and counts then
			}
			return
		}
		r.urged = r.ackPending // the peer waits already
	}
	switch {
	case e.n == 0 && e.beyond:
		q.nakGap()
	case e.n == 0:
	case asked && r.epsn.Before(e.told):
		r.waiting = true // the rest is on its way
	case again, e.gap(r.epsn) > 1:
		e.single = e.gap(r.epsn) == 1
		e.since = now
		q.nakGap()
	default:
		e.since, e.nakAt = now, now.Add(patienceTime)
	}
	q.shrinkEarly()
}

// follows reports whether pkt can be what comes next.
func (q *QP) follows(pkt *roce.Packet) bool {
	switch {
	case pkt.Op.IsSend():
		return q.fits(pkt, msgSend)
	case pkt.Op.IsWrite():
		return q.fits(pkt, msgWrite)
	}
	return q.rsp.msg == msgNone
}

// freeEarly gives b back.
func (q *QP) freeEarly(b []byte) {
	if q.cfg.Buffers != nil {
		q.cfg.Buffers.Put(b)
	}
}

// shrinkEarly lets go of a large ring that is empty, or that few packets are left in: these
// come again.
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

// gapOf returns how many packets a NAK for psn says are missing; zero says that it
// does not tell, and that all from there on must be sent again.
func (q *QP) gapOf(s roce.Syndrome, psn ib.PSN) uint8 {
	if e := &q.rsp.early; s == roce.NAKSequence && e.n > 0 {
		return uint8(e.span(psn))
	}
	return 0
}
