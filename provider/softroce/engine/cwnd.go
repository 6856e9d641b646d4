package engine

import (
	"time"

	"ipoibcm/ib"
)

const (
	// There is a queue on the path where the round trip exceeds the least one by queueTrip and by a quarter
	// of the least one. It is full where the round trip is seven eighths of the way from the least one to the
	// longest of late, or, where the path carries less than slowOctets in each millisecond by which the round trip
	// exceeds the least one, where that is longQueue.
	queueTrip, longQueue = 200 * time.Microsecond, time.Millisecond
	slowOctets           = 64 << 10
	// chanceShare is the share of the losses of late, in thousandths, that may have other reasons than a full
	// queue where a queue overflows. If it is larger, all losses are taken for those of a path that loses
	// packets by chance. It is an average over chanceLosses.
	chanceShare, chanceLosses = 300, 16
	// keptOf is how many tenths of what was in flight stay in flight after a queue
	// overflowed (RFC 9438 section 4.6).
	keptOf = 7
	// leastCwnd is how many octets may be in flight however often a queue overflows. It is four
	// packets at least.
	leastCwnd = 16 << 10
	// growOctets is how many octets the first round trip after stayRounds adds to the window. A window
	// below growSlowly grows by less, in proportion: a queue of few packets would overflow all the
	// time.
	growOctets, growSlowly = 4 << 10, 28 * growOctets
	// stayRounds is for how many round trips after a loss the window stays as it is.
	stayRounds = 8
	// After growFaster round trips more without a loss a round trip adds twice as much as the first.
	growFaster = 11
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
	chance  int    // share of the losses of late, in thousandths, that no full queue explains
}

// congested reports whether gap packets from psn on were lost because a queue overflowed, and then lowers the
// window. If another packet of the same window was lost so before, it returns true without lowering it again.
func (q *QP) congested(psn ib.PSN, gap int) bool {
	r := &q.req
	c := &r.cwnd
	if c.allowed > 0 && psn.Before(c.end) {
		return true
	}
	full := q.queueFull(gap)
	if full {
		c.chance -= c.chance / chanceLosses
	} else {
		c.chance += (1000 - c.chance) / chanceLosses
	}
	if !full || c.chance > chanceShare {
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

// queueFull reports whether a full queue on the path explains the loss of gap packets. Several in a row are
// seldom lost by chance.
func (q *QP) queueFull(gap int) bool {
	t := &q.req.rtt
	least := t.least()
	more := max(t.mean, t.last) - least
	if least == 0 || more < max(least/4, queueTrip) {
		return false
	}
	slow := time.Duration(q.req.highest.Sub(q.req.una)*q.mtu) * time.Millisecond / slowOctets
	return gap > 1 || more >= min(7*(t.most-least)/8, max(longQueue, slow))
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
	if grows := c.rounds - stayRounds; grows >= 0 {
		// These products do not fit an int of 32 bits.
		more := growOctets * wholePart * int64(growFaster+grows) / growFaster
		c.part += int(int64(n) * more / int64(max(c.allowed*q.mtu, growSlowly)))
		c.allowed, c.part = c.allowed+c.part/wholePart, c.part%wholePart
	}
	if !una.Before(c.round) {
		c.round = r.highest
		c.rounds++
	}
	if c.allowed >= q.window() {
		c.allowed = 0
	}
}
