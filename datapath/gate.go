package datapath

import (
	"crypto/rand"
	"encoding/binary"
	"sync"
	"sync/atomic"

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

// dataGate is for UD data of sources that we send nothing to by UD: hosts that have
// only just found us, and those whose multicast we receive. Each packet costs a write to
// the TUN and what the kernel does with it. One of them has dataShare a second.
var dataGate = gate.Options{Strangers: 2048, Returning: 32768, Source: dataShare}

const dataShare = 16384

// gates keep floods out of the ring up.
type gates struct {
	resolve, resolved *gate.Gate // ARP and ND: requests, answers
	cm, cmAnswers     *gate.Gate // CM messages in-band
}

// A dataGates keeps floods of UD data out of the TUN. The provider asks, where it can, or
// the receiving side.
type dataGates struct {
	mu     sync.Mutex
	gate   *gate.Gate
	shares *gate.Shares

	last      udPeer // the source that was looked up last,
	lastKnown bool   // and what was found
	lastGen   uint64

	flood floodFilter
}

func newDataGates() *dataGates {
	return &dataGates{gate: gate.New(dataGate, gateKeys()), shares: gate.NewShares(gateKeys()), flood: newFloodFilter()}
}

// A udPeer is where UD packets come from.
type udPeer struct {
	gid ib.GID
	qpn ib.QPN
}

// udPeers are those that we send to by UD. They may send us as much as they like.
type udPeers struct {
	gen atomic.Uint64 // of the last change
	mu  sync.RWMutex
	n   map[udPeer]int
}

// KnowUD counts a path, or with n = -1 one that has gone, that leads to a UD QP of a
// peer. UD data from there is not part of a flood.
func (l *Loop) KnowUD(gid ib.GID, qpn ib.QPN, n int) {
	u, k := &l.udPeers, udPeer{gid, qpn}
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.n == nil {
		u.n = map[udPeer]int{}
	}
	if u.n[k] += n; u.n[k] <= 0 {
		delete(u.n, k)
	}
	u.gen.Add(1)
	l.data.flood.lookAgain()
}

// passDatagram reports whether a datagram is worth a receive: all but those of sources
// that are not allowed, and IP packets that are part of a flood. It implements [verbs.DatagramFilterer].
func (l *Loop) passDatagram(src ib.GID, qpn ib.QPN, frame []byte) bool {
	data := isData(frame)
	switch {
	case !l.isAllowed(src):
		l.c.RxNotAllowed.Add(1)
		if data {
			l.data.turnAway(nanotime(), src, qpn)
		}
		return false
	case !data || l.allowData(nanotime(), src, qpn):
		return true
	}
	l.c.RxUDFlood.Add(1)
	return false
}

// isData reports whether a frame is for the TUN: an IP packet, and not neighbour discovery. What
// is too short to tell is counted elsewhere.
func isData(frame []byte) bool {
	if len(frame) < headerLen+minIPv4 {
		return false
	}
	pkt := frame[headerLen:]
	switch encap.EtherType(binary.BigEndian.Uint16(frame)) {
	case encap.IPv4:
		return true
	case encap.IPv6:
		return len(pkt) >= minIP6 && nd.KindOf(pkt) == nd.None
	}
	return false
}

// allowData reports whether an IP packet may go to the TUN.
func (l *Loop) allowData(now int64, src ib.GID, qpn ib.QPN) bool {
	g, u, k := l.data, &l.udPeers, udPeer{src, qpn}
	g.mu.Lock()
	defer g.mu.Unlock()
	if gen := u.gen.Load(); k != g.last || gen != g.lastGen {
		u.mu.RLock()
		_, known := u.n[k]
		u.mu.RUnlock()
		g.last, g.lastKnown, g.lastGen = k, known, gen
	}
	if g.lastKnown {
		return true
	}
	if src.IsZero() { // no GRH: the QPN is all there is
		binary.BigEndian.PutUint32(src[12:], uint32(qpn))
	}
	inShare := g.shares.Take(now, src, dataShare)
	g.flood.saw(now, k, inShare)
	if inShare && g.gate.Allow(now, src) {
		return true
	}
	g.flood.refused(now)
	return false
}

// turnAway has the flood filter know of a datagram that is refused whatever comes.
func (g *dataGates) turnAway(now int64, src ib.GID, qpn ib.QPN) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.flood.saw(now, udPeer{src, qpn}, false)
	g.flood.refused(now)
}

// gateKeys are drawn anew for each gate.
func gateKeys() [2]uint64 {
	var b [16]byte
	rand.Read(b[:]) // it never fails
	return [2]uint64{binary.LittleEndian.Uint64(b[:8]), binary.LittleEndian.Uint64(b[8:])}
}

func newGates() gates {
	next := func(o gate.Options) *gate.Gate { return gate.New(o, gateKeys()) }
	return gates{resolve: next(requestGate), resolved: next(answerGate), cm: next(requestGate), cmAnswers: next(answerGate)}
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
