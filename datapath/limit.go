package datapath

import (
	"crypto/rand"
	"encoding/binary"
	"sync"
	"sync/atomic"

	"ipoibcm/ib"
	"ipoibcm/ratelimit"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/ip"
	"ipoibcm/wire/mad"
	"ipoibcm/wire/nd"
)

// How many frames a second the control plane takes from the UD QP: of ARP and ND, of CM, and of
// path probes, each. Anybody may send a request at any time, and we answer it. Each answer to an
// unknown source may make the kernel resolve an address of the underlay that does not exist, and
// the kernel's table of such addresses has 1024 entries by default. Answers come only after
// requests of ours.
var (
	requestRate = ratelimit.Options{Unknown: 128, Returning: 2048, Source: 64}
	answerRate  = ratelimit.Options{Unknown: 1024, Returning: 2048, Source: 64}
)

// dataRate is for UD data of sources that we send nothing to by UD, in packets a second: hosts
// that have only just found us, and those whose multicast we receive. Each packet costs a write to
// the TUN and the kernel's work on it. One source may send dataShare a second.
var dataRate = ratelimit.Options{Unknown: 2048, Returning: 32768, Source: dataShare}

const dataShare = 16384

// A source that sends senderRate packets of such data in a second is handed up ([RXSender]), at most
// twice a second: the control plane looks for a path to it, and then its data is no flood any more.
const senderRate = 1024

var senderAsks = ratelimit.Options{Unknown: 16, Returning: 64, Source: 1}

// limiters keep floods out of the ring up.
type limiters struct {
	resolve, resolved *ratelimit.Limiter // ARP and ND: requests, answers
	cm, cmAnswers     *ratelimit.Limiter // CM messages in-band
	probes, heard     *ratelimit.Limiter // probes of a path's MTU, answers to ours
}

// A dataLimits keeps floods of UD data out of the TUN. If the provider is a
// [verbs.DatagramFilterer], it applies the limits before a datagram uses up a receive. Otherwise
// the rxSide applies them.
type dataLimits struct {
	mu      sync.Mutex
	limiter *ratelimit.Limiter
	shares  *ratelimit.Shares

	senders *ratelimit.Shares  // finds the sources that send senderRate
	asks    *ratelimit.Limiter // bounds how often they are handed up

	last      udPeer // the source that was looked up last,
	lastKnown bool   // and whether udPeers had it
	lastGen   uint64 // at this generation of udPeers

	flood floodFilter
}

func newDataLimits() *dataLimits {
	return &dataLimits{limiter: ratelimit.New(dataRate, limiterKeys()), shares: ratelimit.NewShares(limiterKeys()),
		senders: ratelimit.NewShares(limiterKeys()), asks: ratelimit.New(senderAsks, limiterKeys()), flood: newFloodFilter()}
}

// A udPeer is a queue pair that UD packets come from.
type udPeer struct {
	gid ib.GID
	qpn ib.QPN
}

// udPeers are the peers' UD queue pairs that we send to. Their UD data is never refused as part of
// a flood.
type udPeers struct {
	gen atomic.Uint64 // of the last change
	mu  sync.RWMutex
	n   map[udPeer]int // number of paths that lead there
}

// KnowUD adds n to the number of paths that lead to a peer's UD QP: 1 for a new path, -1 for one
// that has gone. While there is such a path, UD data from that QP is not part of a flood.
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

// passDatagram reports whether a datagram is worth a receive. It refuses datagrams of sources that
// are not allowed, and IP packets that are part of a flood. The provider calls it
// ([verbs.DatagramFilterer]).
func (l *Loop) passDatagram(src ib.GID, qpn ib.QPN, frame []byte) bool {
	data := isData(frame)
	switch {
	case !l.isAllowed(src):
		l.c.RxNotAllowed.Add(1)
		if data {
			l.data.turnAway(nanotime(), src, qpn)
		}
		return false
	case !data || l.allowData(nanotime(), src, qpn, frame):
		return true
	}
	l.c.RxUDFlood.Add(1)
	return false
}

// isData reports whether a frame is for the TUN: an IP packet, and not neighbour discovery. A
// frame that is too short to tell is no data; takeUD and checkIP count it.
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

// allowData reports whether the IP packet in a frame may go to the TUN. It always may if we send to
// its source by UD. Otherwise the source must be within its share, and the limits of all sources must
// allow it. allowData hands up a source that sends many.
func (l *Loop) allowData(now int64, src ib.GID, qpn ib.QPN, frame []byte) bool {
	ok, many := l.data.allow(&l.udPeers, now, src, qpn)
	if many {
		l.c.RxSenders.Add(1)
		pkt := frame[headerLen:]
		l.handUp(Frame{Kind: RXSender, Type: encap.EtherType(binary.BigEndian.Uint16(frame)), Data: pkt[:ip.FlowLen(pkt)],
			SrcGID: src, SrcQPN: qpn})
	}
	return ok
}

// allow is allowData without frames. many says to hand up the source.
func (g *dataLimits) allow(u *udPeers, now int64, src ib.GID, qpn ib.QPN) (ok, many bool) {
	k := udPeer{src, qpn}
	g.mu.Lock()
	defer g.mu.Unlock()
	if gen := u.gen.Load(); k != g.last || gen != g.lastGen {
		u.mu.RLock()
		_, known := u.n[k]
		u.mu.RUnlock()
		g.last, g.lastKnown, g.lastGen = k, known, gen
	}
	if g.lastKnown {
		return true, false
	}
	if src.IsZero() { // no GRH: the QPN is all there is
		binary.BigEndian.PutUint32(src[12:], uint32(qpn))
	}
	many = !g.senders.Take(now, src, senderRate) && g.asks.Allow(now, src)
	inShare := g.shares.Take(now, src, dataShare)
	g.flood.saw(now, k, inShare)
	if inShare && g.limiter.Allow(now, src) {
		return true, many
	}
	g.flood.refused(now)
	return false, many
}

// turnAway notes in the flood filter a datagram that is refused because its source is not allowed.
func (g *dataLimits) turnAway(now int64, src ib.GID, qpn ib.QPN) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.flood.saw(now, udPeer{src, qpn}, false)
	g.flood.refused(now)
}

// limiterKeys returns new random keys for a limiter.
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

// allow reports whether a frame of the UD QP may go up. pkt is the part after the 4-octet header.
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

// controlKinds are the kinds of the frames that the UD QP hands up, by type.
var controlKinds = map[encap.EtherType]FrameKind{
	encap.ARP: RXARP, encap.IPv6: RXND, encap.InbandCM: RXCM, encap.PathProbe: RXProbe,
}

// control hands an ARP, ND, CM or probe frame of the UD QP up, unless its source or all sources
// send too many.
func (s *rxSide) control(t encap.EtherType, pkt []byte, src ib.GID, qpn ib.QPN, dst ib.GID, now int64) {
	k := controlKinds[t]
	if !s.limits.allow(now, k, pkt, src, qpn) {
		s.l.c.RxFlood.Add(1)
		return
	}
	s.l.handUp(Frame{Kind: k, Type: t, Data: pkt, SrcGID: src, SrcQPN: qpn, DstGID: dst})
}
