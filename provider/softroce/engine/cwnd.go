package engine

import (
	"time"

	"ipoibcm/ib"
)

const (
	// A queue on the path counts as full when the round trip exceeds the least one by
	// queueTrip and by a quarter of the least one. It may exceed it by less than longQueue because a
	// long message is on its way. Then it must be near the longest of late as well, three quarters
	// of the way from the least, or seven eighths if a single packet was lost: a queue loses packets when
	// it is full, mostly some in a row, and a path that loses some by itself does so at any time.
	queueTrip, longQueue = 200 * time.Microsecond, time.Millisecond
	// keptOf is how many tenths of what was in flight stay in flight after a queue
	// overflowed (RFC 9438 section 4.6).
	keptOf = 7
	// leastCwnd is how many octets may be in flight however often a queue overflows. It is four
	// packets at least.
	leastCwnd = 16 << 10
	// growOctets is how many octets the first round trip after a loss adds to the window. A window
	// below growSlowly grows by less, in proportion: a queue of few packets would overflow all the
	// time.
	growOctets, growSlowly = 4 << 10, 28 * growOctets
	// After growFaster round trips without a loss a round trip adds twice as much as the first.
	growFaster = 16
	// wholePart is one packet, in the unit of congestionWindow.part.
	wholePart = 1 << 10
)

// A congestionWindow bounds the packets in flight to a peer that keeps early packets, once a queue on
// the path has overflowed: additive increase and multiplicative decrease, once for each round trip
// (RFC 5681). The longer ago the last loss, the more is added (as in H-TCP, Leith and Shorten, 2004).
type congestionWindow struct {
	allowed int    // packets in flight; 0: not bounded
	part    int    // of a further packet, in 1/wholePart
	end     ib.PSN // losses before it are the same event
	round   ib.PSN // end of this round trip
	rounds  int    // since the last loss
}

// congested reports whether gap packets from psn on were lost because a queue overflowed, and then lowers the
// window. If another packet of the same window was lost so before, it returns true without lowering it again.
func (q *QP) congested(psn ib.PSN, gap int) bool {
	r := &q.req
	c := &r.cwnd
	if c.allowed > 0 && psn.Before(c.end) {
		return true
	}
	least, now := r.rtt.least(), max(r.rtt.mean, r.rtt.last)
	full := 3 * (r.rtt.most - least) / 4
	if gap == 1 {
		full = 7 * (r.rtt.most - least) / 8
	}
	if least == 0 || now < least+max(least/4, queueTrip, min(longQueue, full)) {
		return false
	}
	flight := r.highest.Sub(psn)
	if c.allowed > 0 {
		flight = min(flight, c.allowed)
	}
	c.allowed, c.part, c.rounds = max(4, leastCwnd/q.mtu, flight*keptOf/10), 0, 0
	c.end, c.round = r.highest, r.highest
	return true
}

// cwndAcked raises the window after an ACK of n packets, all before una.
func (q *QP) cwndAcked(n int, una ib.PSN) {
	r := &q.req
	c := &r.cwnd
	if c.allowed == 0 || una.Before(c.end) {
		return
	}
	c.end = una // nothing before it can be lost any more; a PSN that is left behind comes to be ahead
	if r.next.Sub(r.una) < c.allowed/2 {
		c.round = una
		return
	}
	// These products do not fit an int of 32 bits.
	more := growOctets * wholePart * int64(growFaster+c.rounds) / growFaster
	c.part += int(int64(n) * more / int64(max(c.allowed*q.mtu, growSlowly)))
	c.allowed, c.part = c.allowed+c.part/wholePart, c.part%wholePart
	if !una.Before(c.round) {
		c.round = r.highest
		c.rounds++
	}
	if c.allowed >= q.window() {
		c.allowed = 0
	}
}
