package engine

import (
	"time"

	"ipoibcm/ib"
	"ipoibcm/verbs"
	"ipoibcm/wire/roce"
)

const (
	// earlyPackets and earlyOctets bound what one QP keeps of packets that arrive
	// before others; what is beyond is dropped, as all of them are elsewhere.
	earlyPackets, earlyOctets = 1 << 12, 4 << 20
	// patiencePackets and patienceTime are how many packets may overtake one, and for
	// how long, until it counts as lost. TCP waits for three (RFC 5681 section 3.2),
	// but does not lose all that is behind.
	patiencePackets, patienceTime = 8, 300 * time.Microsecond
	// maxGap is the longest gap that a NAK can tell: seven bits of the BTH.
	maxGap = 127
)

// An earlyBuffer keeps RC request packets that arrived before others, until those are
// here. Slots are found by PSN. Memory is taken at the first packet, and given back
// when the last one is gone.
type earlyBuffer struct {
	slots  [][]byte // BTH through pad, and room for the ICRC; the length is a power of two
	n      int
	octets int

	behind int       // packets since the gap was seen
	told   ib.PSN    // end of the gap that the peer was told of
	nakAt  time.Time // when the gap is told of, if it is still there; zero: it was, or there is none
}

// keep keeps a packet that is d ahead of what is expected. It reports whether there
// was room.
func (e *earlyBuffer) keep(pkt *roce.Packet, d int, bufs Buffers) bool {
	n := len(pkt.Covered) + roce.ICRCLen
	if d >= earlyPackets || e.octets+n > earlyOctets {
		return false
	}
	psn := pkt.BTH.PSN()
	if d >= len(e.slots) {
		e.grow(d)
	}
	at := int(psn) & (len(e.slots) - 1)
	if e.slots[at] != nil {
		return true // the same again
	}
	b := e.buffer(n, bufs)
	if b == nil {
		return false
	}
	copy(b, pkt.Covered)
	e.slots[at] = b
	e.n, e.octets = e.n+1, e.octets+n
	return true
}

// buffer returns n octets, nil if there are none.
func (e *earlyBuffer) buffer(n int, bufs Buffers) []byte {
	if bufs == nil {
		return make([]byte, n)
	}
	if b := bufs.Get(); len(b) >= n {
		return b[:n]
	}
	return nil
}

// free gives b back.
func (e *earlyBuffer) free(b []byte, bufs Buffers) {
	if bufs != nil {
		bufs.Put(b)
	}
}

// grow makes room for a packet that is d ahead.
func (e *earlyBuffer) grow(d int) {
	n := max(64, len(e.slots))
	for n <= d {
		n *= 2
	}
	slots := make([][]byte, n)
	for _, b := range e.slots {
		if b != nil {
			slots[int(roce.BTH(b).PSN())&(n-1)] = b
		}
	}
	e.slots = slots
}

// take returns the packet psn, nil if it is not there.
func (e *earlyBuffer) take(psn ib.PSN) []byte {
	if e.n == 0 {
		return nil
	}
	at := int(psn) & (len(e.slots) - 1)
	b := e.slots[at]
	if b == nil || roce.BTH(b).PSN() != psn {
		return nil
	}
	e.slots[at] = nil
	e.n, e.octets = e.n-1, e.octets-len(b)
	if e.n == 0 {
		e.slots = nil
	}
	return b
}

// gap returns how many packets are missing from psn on, at most maxGap.
func (e *earlyBuffer) gap(psn ib.PSN) int {
	for n := range maxGap {
		p := psn.Add(n)
		if b := e.slots[int(p)&(len(e.slots)-1)]; b != nil && roce.BTH(b).PSN() == p {
			return n
		}
	}
	return maxGap
}

// receiveEarly takes a request packet that is d ahead of the expected one.
func (q *QP) receiveEarly(pkt *roce.Packet, d int, now time.Time) DropReason {
	r := &q.rsp
	e := &r.early
	if !e.keep(pkt, d, q.cfg.Buffers) {
		if !r.waiting {
			q.nakGap()
		}
		return DropSequence
	}
	q.count.Early++
	e.behind++
	switch {
	case r.waiting:
	case e.behind >= patiencePackets:
		q.nakGap()
	case e.nakAt.IsZero():
		e.nakAt = now.Add(patienceTime)
	}
	return NoDrop
}

// nakGap asks for what is missing.
func (q *QP) nakGap() {
	r := &q.rsp
	r.early.nakAt, r.early.told = time.Time{}, r.epsn
	if r.early.n > 0 {
		r.early.told = r.epsn.Add(r.early.gap(r.epsn))
	}
	r.sendNAK(roce.NAKSequence, r.epsn)
}

// receiveKept takes the packets that were early and follow now. asked says that the
// peer was asked for what was missing: when all of that is here it is time to ask for
// what is missing behind it.
func (q *QP) receiveKept(asked bool, now time.Time) {
	r := &q.rsp
	e := &r.early
	e.behind, e.nakAt = 0, time.Time{}
	for taken := true; taken; {
		b := e.take(r.epsn)
		if b == nil {
			break
		}
		var pkt roce.Packet
		taken = pkt.Parse(b) == nil && q.takeRequest(&pkt) == NoDrop
		r.urged = r.ackPending // the peer waits already
		e.free(b, q.cfg.Buffers)
	}
	switch {
	case e.n == 0 || r.waiting || q.state == verbs.StateError:
	case asked && r.epsn.Before(e.told):
		r.waiting = true
	case asked:
		q.nakGap()
	default:
		e.nakAt = now.Add(patienceTime)
	}
}

// dropEarly forgets all packets that are kept.
func (q *QP) dropEarly() {
	e := &q.rsp.early
	for _, b := range e.slots {
		if b != nil {
			e.free(b, q.cfg.Buffers)
		}
	}
	*e = earlyBuffer{}
}

// gapOf returns how many packets a NAK for psn says are missing; zero says that it
// does not tell, and that all from there on must be sent again.
func (q *QP) gapOf(s roce.Syndrome, psn ib.PSN) uint8 {
	if e := &q.rsp.early; s == roce.NAKSequence && e.n > 0 {
		return uint8(e.gap(psn))
	}
	return 0
}
