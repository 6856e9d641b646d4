package datapath

import (
	"crypto/rand"
	"encoding/binary"

	"ipoibcm/gate"
	"ipoibcm/ib"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/mad"
	"ipoibcm/wire/nd"
)

// What the control plane takes from the UD QP, per second. Requests are what
// anybody may send at any time and what we answer: each answer to a stranger may make
// the kernel resolve an address of the underlay that does not exist, and its
// table of those has 1024 entries by default. Answers follow requests of ours.
var (
	requestGate = gate.Options{Strangers: 128, Returning: 2048, Source: 64}
	answerGate  = gate.Options{Strangers: 1024, Returning: 2048, Source: 64}
)

// gates keep floods out of the ring up.
type gates struct {
	resolve, resolved *gate.Gate // ARP and ND: requests, answers
	cm, cmAnswers     *gate.Gate // CM messages in-band
}

func newGates() gates {
	next := func(o gate.Options) *gate.Gate {
		var b [16]byte
		rand.Read(b[:]) // it never fails
		return gate.New(o, [2]uint64{binary.LittleEndian.Uint64(b[:8]), binary.LittleEndian.Uint64(b[8:])})
	}
	return gates{next(requestGate), next(answerGate), next(requestGate), next(answerGate)}
}

// allow reports whether a frame of the UD QP may go up. pkt is what follows the
// 4-octet header.
func (g *gates) allow(now int64, k FrameKind, pkt []byte, src ib.GID, qpn ib.QPN) bool {
	if src.IsZero() { // no GRH: the QPN is all there is
		binary.BigEndian.PutUint32(src[12:], uint32(qpn))
	}
	asks, to, from := false, g.resolve, g.resolved
	switch k {
	case RXARP:
		asks = len(pkt) < 8 || pkt[7] == 1
	case RXND:
		kind := nd.KindOf(pkt)
		asks = kind == nd.RouterSolicitation || kind == nd.NeighborSolicitation
	case RXCM:
		asks = mad.Asks(pkt)
		to, from = g.cm, g.cmAnswers
	}
	if asks {
		return to.Allow(now, src)
	}
	return from.Allow(now, src)
}

// control hands an ARP, ND or CM frame of the UD QP up, unless there is a flood
// of them that it belongs to.
func (s *rxSide) control(k FrameKind, t encap.EtherType, pkt []byte, src ib.GID, qpn ib.QPN, dst ib.GID, now int64) {
	if !s.gates.allow(now, k, pkt, src, qpn) {
		s.l.c.RxFlood.Add(1)
		return
	}
	s.l.recvUp(k, t, pkt, src, qpn, dst, nil)
}
