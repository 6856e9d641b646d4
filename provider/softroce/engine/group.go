package engine

import (
	"ipoibcm/ib"
	"ipoibcm/wire/roce"
)

// MayGroup reports whether the packets of the next [QP.Output] may be given to [Group]: the
// peer has said that it keeps those that arrive early, and none is sent again.
func (q *QP) MayGroup() bool {
	r := &q.req
	return r.ahead && q.cfg.Transport == ib.RC && r.next == r.highest && !r.missing.asked
}

// Group orders the packets of messages that have two packets each, of the same two lengths: all
// first packets before all last ones. Then they leave in two UDP_SEGMENT calls, not in one
// for each message. It marks those that leave before the packet before them. scratch is memory for half as
// many packets as pkts.
func Group(pkts, scratch []Packet) {
	for len(pkts) > 0 {
		n := 0
		for 2*n+1 < len(pkts) && isPair(pkts[2*n:]) && sameLengths(pkts, pkts[2*n:]) {
			n++
		}
		if n < 2 {
			pkts = pkts[1:]
			continue
		}
		for i := range n {
			scratch[i] = pkts[2*i+1]
			if pkts[i] = pkts[2*i]; i > 0 {
				roce.BTH(pkts[i].Header[:]).SetReserved(sentAhead)
			}
		}
		copy(pkts[n:], scratch[:n])
		pkts = pkts[2*n:]
	}
}

// isPair reports whether the first two of pkts are a message.
func isPair(pkts []Packet) bool {
	first, last := roce.BTH(pkts[0].Header[:]).Opcode(), roce.BTH(pkts[1].Header[:]).Opcode()
	return first.IsFirst() && last.IsLast()
}

// sameLengths reports whether the first two of a and of b have the same lengths.
func sameLengths(a, b []Packet) bool { return a[0].Len() == b[0].Len() && a[1].Len() == b[1].Len() }
