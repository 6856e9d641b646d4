package datapath

import (
	"crypto/rand"
	"encoding/binary"
	"sync"
	"sync/atomic"

	"ipoibcm/ib"
	"ipoibcm/ratelimit"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/mad"
	"ipoibcm/wire/nd"
)

// What the control plane takes from the UD QP, per second. Requests are what
// anybody may send at any time and what we answer: each answer to an unknown source may make
// the kernel resolve an address of the underlay that does not exist, and its
// table of those has 1024 entries by default. Answers follow requests of ours.
var (
	requestRate = ratelimit.Options{Unknown: 128, Returning: 2048, Source: 64}
	answerRate  = ratelimit.Options{Unknown: 1024, Returning: 2048, Source: 64}
)

// dataRate is for UD data of sources that we send nothing to by UD: hosts that have
// only just found us, and those whose multicast we receive. Each packet costs a write to
// the TUN and what the kernel does with it. One of them has dataShare a second.
var dataRate = ratelimit.Options{Unknown: 2048, Returning: 32768, Source: dataShare}

const dataShare = 16384

// limiters keep floods out of the ring up.
type limiters struct {
	resolve, resolved *ratelimit.Limiter // ARP and ND: requests, answers
	cm, cmAnswers     *ratelimit.Limiter // CM messages in-band
	probes, heard     *ratelimit.Limiter // probes of a path's MTU, answers to ours
}

// A dataLimits keeps floods of UD data out of the TUN. The provider asks, where it can, or
// the receiving side.
type dataLimits struct {
	mu      sync.Mutex
	limiter *ratelimit.Limiter
	shares  *ratelimit.Shares

	last      udPeer // the source that was looked up last,
	lastKnown bool   // and what was found
	lastGen   uint64

	flood floodFilter
}

func newDataLimits() *dataLimits {
	return &dataLimits{limiter: ratelimit.New(dataRate, limiterKeys()), shares: ratelimit.NewShares(limiterKeys()),
		flood: newFloodFilter()}
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
	if inShare && g.limiter.Allow(now, src) {
		return true
	}
	g.flood.refused(now)
	return false
}

// turnAway has the flood filter know of a datagram that is refused whatever comes.
func (g *dataLimits) turnAway(now int64, src ib.GID, qpn ib.QPN) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.flood.saw(now, udPeer{src, qpn}, false)
	g.flood.refused(now)
}

// limiterKeys are drawn anew for each limiter.
func limiterKeys() [2]uint64 {
	var b [16]byte
	rand.Read(b[:]) // it never fails
	return [2]uint64{binary.LittleEndian.Uint64(b[:8]), binary.LittleEndian.Uint64(b[8:])}
}

func newLimiters() limiters {
	next := func(o ratelimit.Options) *ratelimit.Limiter { return ratelimit.New(o, limiterKeys()) }
	return limiters{resolve: next(requestRate), resolved: next(answerRate), cm: next(requestRate),
		cmAnswers: next(answerRate), probes: next(requestRate), heard: next(answerRate)}
}

// allow reports whether a frame of the UD QP may go up. pkt is what follows the
// 4-octet header.
func (g *limiters) allow(now int64, k FrameKind, pkt []byte, src ib.GID, qpn ib.QPN) bool {
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
	case RXProbe:
		var p encap.Probe
		asks = p.UnmarshalBinary(pkt) != nil || !p.Answer
		to, from = g.probes, g.heard
	}
	if asks {
		return to.Allow(now, src)
	}
	return from.Allow(now, src)
}

// control hands an ARP, ND or CM frame of the UD QP up, unless there is a flood
// of them that it belongs to.
func (s *rxSide) control(k FrameKind, t encap.EtherType, pkt []byte, src ib.GID, qpn ib.QPN, dst ib.GID, now int64) {
	if !s.limits.allow(now, k, pkt, src, qpn) {
		s.l.c.RxFlood.Add(1)
		return
	}
	s.l.recvUp(k, t, pkt, src, qpn, dst, nil)
}
