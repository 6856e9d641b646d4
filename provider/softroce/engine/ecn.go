package engine

import (
	"time"

	"ipoibcm/ib"
	"ipoibcm/verbs"
	"ipoibcm/wire/roce"
)

// An ECNMode says which packets leave ECN-capable (RFC 3168).
type ECNMode uint8

// Modes. In all of them the QP answers RC and UC packets that arrive with a CE mark with CNPs, at
// most one in cnpGap.
const (
	ECNOff  ECNMode = iota // none
	ECNAuto                // those of RC, once an ACK of the peer had answersCE, and while the path keeps ECT
	ECNOn                  // those of RC and UC
)

// ECN codepoints of a received packet, see [Source].
const (
	notECT = 0
	ce     = 3
)

// Flags of an ACK, in the reserved bits of the BTH, which other implementations send as zero
// and ignore (IBA volume 1, 9.2.4). keepsEarly: this responder keeps request packets that arrive
// early, and knows their marks sentAgain and sentAhead. answersCE: this responder reports CE marks. heardECT: an
// ECN-capable request packet has arrived since the last ACK. heardCE: so has one with a CE mark.
const (
	answersCE = 0x40
	heardECT  = 0x20
	heardCE   = 0x10

	keepsEarly = 0x08
)

const (
	// cnpGap is the least time between two CNPs of a queue pair, as adapters have it
	// (Zhu et al., SIGCOMM 2015, section 5).
	cnpGap = 50 * time.Microsecond
	// cnpRest is the least time between two reactions to CNPs, unless the round trip is
	// longer: there is one in a round trip at most.
	cnpRest = time.Millisecond
	// After bleachedAfter ACKs in a row that report no ECN-capable packet, although all that
	// left were ECN-capable, something on the path clears the codepoint (RFC 9000 section
	// 13.4.2).
	bleachedAfter = 10
	// alphaOne is an alpha of 1, and alphaShift the g of 1/16 (RFC 8257 section 3.3).
	alphaOne, alphaShift = 1 << 10, 4
	// leastMarked is how many packets may be in flight however many are marked.
	leastMarked = 4
)

// An ecnResponder notes the marks of the packets that arrive.
type ecnResponder struct {
	packet, message bool  // the packet at hand, or a packet of the message at hand, has a mark
	heard           uint8 // heardECT, heardCE: since the last ACK
	cnp             bool  // a CNP is to go out
	cnpAt           time.Time
}

// An ecnRequester reacts to the CE marks that the peer reports, as DCTCP does (RFC 8257).
type ecnRequester struct {
	peer     bool // it reports marks in its ACKs
	begun    bool // since is valid
	since    ib.PSN
	silent   int  // ACKs in a row that report no ECN-capable packet
	bleached bool // the path clears ECT

	alpha         int // the share of packets that are marked, smoothed from the first mark on
	seen          bool
	acked, marked int // in this round
	end           ib.PSN
	reduced       bool // in this round
	allowed       int  // packets in flight; 0: as many as without marks
	cnpAt         time.Time
}

// SendsECT reports whether the packets that go out are ECN-capable.
func (q *QP) SendsECT() bool {
	e := &q.req.ecn
	switch {
	case q.cfg.Transport == ib.UD, q.state != verbs.StateRTS:
		return false
	case q.cfg.ECN == ECNOn:
		return true
	}
	return q.cfg.ECN == ECNAuto && q.cfg.Transport == ib.RC && e.peer && !e.bleached
}

// heard notes the ECN codepoint of a packet that was expected and taken.
func (q *QP) heard(ecn uint8, now time.Time) {
	e := &q.rsp.ecn
	if ecn == notECT {
		return
	}
	e.heard |= heardECT
	if ecn != ce {
		return
	}
	e.heard |= heardCE
	q.count.CEIn++
	if now.Sub(e.cnpAt) >= cnpGap {
		e.cnp, e.cnpAt = true, now
	}
}

// marks moves the mark of the packet at hand to its message. first says that the packet
// begins the message.
func (e *ecnResponder) marks(first bool) {
	e.message, e.packet = e.packet || e.message && !first, false
}

// tells returns the flags of an ACK, and clears those that count from the last ACK on.
func (e *ecnResponder) tells() uint8 {
	h := answersCE | e.heard
	e.heard = 0
	return h
}

// nextCNP puts a congestion notification packet into p if one is to go out (Annex A17,
// 17.9.3): a BTH and sixteen reserved octets of zero.
func (q *QP) nextCNP(p *Packet) bool {
	if !q.rsp.ecn.cnp {
		return false
	}
	q.rsp.ecn.cnp = false
	const reserved = 16
	roce.PutBTH(p.Header[:], roce.BTHFields{Opcode: roce.CNP, PKey: q.attr.PKey, DestQPN: q.attr.DestQPN})
	roce.BTH(p.Header[:]).SetBECN(true)
	clear(p.Header[roce.BTHLen : roce.BTHLen+reserved])
	p.HeaderLen, p.Pad, p.NPayload, p.PayloadLen, p.AH = roce.BTHLen+reserved, 0, 0, 0, nil
	q.count.CNPsOut++
	q.count.PacketsOut++
	return true
}

// receiveCNP takes a congestion notification packet. It has no PSN, so whoever guesses the QPN can
// forge one. It has an effect only on an RC QP whose packets leave ECN-capable, to a peer that
// reports no marks in its ACKs, and at most once in a round trip. It leaves minFlight packets in
// flight.
func (q *QP) receiveCNP(from *Source, now time.Time) DropReason {
	if q.cfg.Transport == ib.UD {
		return DropOpcode
	}
	if from.Src != q.attr.Path.DGID {
		return DropSource
	}
	q.count.CNPsIn++
	r := &q.req
	e := &r.ecn
	if q.cfg.Transport == ib.RC && q.SendsECT() && !e.peer && now.Sub(e.cnpAt) >= max(cnpRest, r.rtt.mean) {
		e.cnpAt, e.alpha = now, alphaOne
		q.reduce(r.highest.Sub(r.una), minFlight)
		return NoDrop
	}
	q.count.CNPsIgnored++
	return NoDrop
}

// reduce lowers the number of packets that may be in flight: to flight, or to the present limit
// if that is less, minus alpha/2 of it, but not below least.
func (q *QP) reduce(flight, least int) {
	r := &q.req
	e := &r.ecn
	if e.allowed > 0 {
		flight = min(flight, e.allowed)
	}
	e.allowed = max(least, flight-flight*e.alpha/(2*alphaOne))
	e.reduced, e.end, e.acked, e.marked = true, r.next, 0, 0
	r.limit = min(r.limit, e.allowed)
	q.count.Reductions++
}

// ackSays handles said, the flags of an ACK. The ACK has acknowledged n packets; flight is how many were in
// flight before.
func (q *QP) ackSays(said uint8, n, flight int) {
	if said&keepsEarly != 0 {
		q.req.ours, q.req.ahead = true, true
	}
	q.ecnAcked(said, n, flight)
}

// ecnAcked handles said, the flags of an ACK. The ACK has acknowledged n packets; flight is how
// many were in flight before.
func (q *QP) ecnAcked(said uint8, n, flight int) {
	r := &q.req
	e := &r.ecn
	if q.cfg.ECN == ECNOff {
		return
	}
	if said&answersCE != 0 && !e.peer {
		e.peer, e.alpha = true, alphaOne
	}
	if n <= 0 {
		return
	}
	if q.SendsECT() && e.peer {
		q.checkPath(said)
	}
	e.acked += n
	if said&heardCE != 0 && e.begun {
		e.marked += n
		if !e.reduced {
			marked := e.marked
			q.reduce(flight, leastMarked)
			e.acked, e.marked = n, marked
		}
	}
	if r.una.Before(e.end) {
		return
	}
	if e.seen = e.seen || e.marked > 0; e.seen {
		e.alpha += (e.marked*alphaOne/max(e.acked, 1) - e.alpha) >> alphaShift
	}
	if e.allowed > 0 && e.marked == 0 {
		if e.allowed++; e.allowed >= q.window() {
			e.allowed = 0
		}
	}
	e.end, e.acked, e.marked, e.reduced = r.next, 0, 0, false
}

// checkPath notes whether ECN-capable packets arrive as such.
func (q *QP) checkPath(said uint8) {
	e := &q.req.ecn
	switch {
	case !e.begun:
		e.begun, e.since = true, q.req.highest
	case !e.since.Before(q.req.una): // the ACK is for packets that were sent before
	case said&(heardECT|heardCE) != 0:
		e.silent = 0
	default:
		if e.silent++; e.silent >= bleachedAfter && !e.bleached {
			e.bleached = true
			q.count.ECTLost++
		}
	}
}
