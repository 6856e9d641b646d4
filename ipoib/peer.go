package ipoib

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"ipoibcm/ib"
	"ipoibcm/lru"
	"ipoibcm/pathmtu"
	"ipoibcm/serviceid"
	"ipoibcm/timerheap"
	"ipoibcm/wire/encap"
)

const (
	// classMemory is how long we remember which service ID a peer answers to.
	classMemory = 10 * time.Minute
	// maxLegacyRx bounds the one-way connections that one legacy peer may hold.
	maxLegacyRx = 4
	// maxQuickRetries bounds retries without a pause within one attempt.
	maxQuickRetries = 4
	// settled is how long a connection must have been up so that we may dial again at
	// once after its loss.
	settled = 5 * time.Second
	// orphanGrace is how long a connection without a neighbour must have been
	// silent before it is closed: the peer may still be sending to us.
	orphanGrace = 30 * time.Second
)

// A peer is one interface at the other end of the link, known by its
// link-layer address with the flags zeroed. It owns at most one connection to
// send on, whatever the mode (RFC 4755 section 3.3).
type peer struct {
	key   encap.LinkAddr
	addrs []netip.Addr // neighbours that resolve to it, sorted
	flags encap.Flags  // as address resolution told them; zero before
	// Small fields stand together to save memory: there may be very many peers.

	class      Class
	listed     bool      // in peers.unused
	legacy     bool      // a connection of the 0x10 form has proven ClassLegacy, and nothing the contrary
	classUntil time.Time // when ClassLegacy is forgotten

	tx     *conn   // up, ours to send on; two-way unless legacy
	rx     []*conn // legacy connections of the peer, receive only
	dial   *conn   // our attempt
	accept *conn   // the peer's 0x01 attempt, not established yet

	queue       [][]byte // packets too large for UD, waiting for the connection
	queueOctets int

	// One attempt may try several things without a pause.
	quick     int32
	triedForm [3]bool // by serviceid.Form
	tried26   bool
	receive   uint32 // Receive MTU to offer instead of ours, after a REJ 26
	pathMTU   ib.MTU // path MTU to ask for instead of ours, after a REJ 26 or a black hole
	blackHole ib.MTU // path MTU whose packets were lost, for which pathMTU was set; zero: none

	// via is the path of CM messages on which the last connection came up, good until viaUntil.
	// turned says that the attempt under way has turned to path turnedTo.
	via      CMPath
	turned   bool
	turnedTo CMPath
	viaUntil time.Time
	// CM messages in-band.
	inbandHeard   bool      // one came from the peer
	inbandSilence int32     // attempts in-band without any answer; 0 once inbandHeard
	inbandAfter   time.Time // no attempt in-band before; zero means at any time

	failures  int32
	holdUntil time.Time // no attempt before
	waitUntil time.Time // a crossing was decided for the peer: its REQ is due

	udPackets uint64 // sent by UD, as the data path counted

	search *pathmtu.Search // for the largest packet that the path carries; nil means that it is not probed

	touched time.Time    // when the peer was last of use
	diag    *diagnostics // nil means that there is nothing to tell

	at time.Time // when wake looks at the peer: never later than something is due

	timerheap.Slot  // in peers.timers
	lru.Links[peer] // in peers.unused
}

// Diagnostics are what users are told of a peer. Nothing is decided by them, except that endAttempt
// looks at lowered. Most peers have none.
type diagnostics struct {
	lastREJ, lastFail, verdict, viaWhy string

	lowered time.Time // when receive or pathMTU of the peer was last set
}

// diagnostics returns what users are told of p.
func (p *peer) diagnostics() diagnostics {
	if p.diag == nil {
		return diagnostics{}
	}
	return *p.diag
}

// diagnose returns the diagnostics of p for changes.
func (p *peer) diagnose() *diagnostics {
	if p.diag == nil {
		p.diag = new(diagnostics)
	}
	return p.diag
}

// connecting reports whether a connection is on its way. A 0x01 REQ in the name of a proven legacy
// peer does not count before its connection is established: anybody may have sent it
// (docs/security.md).
func (p *peer) connecting() bool {
	return p.dial != nil || p.accept != nil && !p.provenLegacy() || !p.waitUntil.IsZero()
}

// provenLegacy reports whether a connection of the 0x10 form has proven that p uses this form, and none
// the contrary.
func (p *peer) provenLegacy() bool { return p.class == ClassLegacy && p.legacy }

// sending returns the connection that packets to p go on; nil if there is none yet.
func (p *peer) sending() *conn {
	if p.tx != nil && p.tx.unproven {
		return nil
	}
	return p.tx
}

// unused reports whether p has no neighbour, no connection and no attempt.
func (p *peer) unused() bool {
	return len(p.addrs) == 0 && p.tx == nil && len(p.rx) == 0 && p.accept == nil && !p.connecting()
}

// peer returns the record of key, and makes it if there is none; nil if there is no room.
func (f *Interface) peer(key encap.LinkAddr) *peer {
	key = key.Key()
	p := f.peers.byLink[key]
	if p == nil {
		if len(f.peers.byLink) >= f.opt.maxPeers() && !f.evictPeer() {
			f.count(dropPeers)
			f.atLimit(fmt.Sprintf("%d interfaces are on record: there is no room for one more", len(f.peers.byLink)))
			return nil
		}
		p = &peer{key: key}
		f.peers.byLink[key] = p
		f.arm(p, f.now.Add(classMemory))
	}
	p.touched = f.now
	f.peers.unused.file(p)
	return p
}

// evictPeer forgets the peer that has been unused for longest, and reports whether there was one.
func (f *Interface) evictPeer() bool {
	for p := f.peers.unused.Oldest(); p != nil; p = f.peers.unused.Oldest() {
		if p.unused() {
			f.forgetPeer(p)
			return true
		}
		f.peers.unused.remove(p)
	}
	return false
}

func (f *Interface) forgetPeer(p *peer) {
	f.setSearch(p, nil)
	delete(f.peers.byLink, p.key)
	f.peers.unused.remove(p)
	f.peers.timers.Stop(p)
}

// allPeers returns the peers in the order of their link-layer addresses: what is
// done to all of them must not depend on the order of a map.
func (f *Interface) allPeers() []*peer {
	return slices.SortedFunc(maps.Values(f.peers.byLink), func(a, b *peer) int { return a.key.Compare(b.key) })
}

// peers are the peers on record.
type peers struct {
	byLink   map[encap.LinkAddr]*peer
	timers   timerheap.Heap[peer, *peer]
	unused   unusedPeers
	queued   int // octets of packets that wait for connections
	searches int // peers whose path is probed
}

// An unusedPeers lists the unused peers, the one touched longest ago first.
type unusedPeers struct{ lru.List[peer, *peer] }

// file puts p at the end of the list if it is unused, else takes it off.
func (s *unusedPeers) file(p *peer) {
	s.remove(p)
	if p.unused() {
		p.listed = true
		s.Push(p)
	}
}

func (s *unusedPeers) remove(p *peer) {
	if p.listed {
		p.listed = false
		s.Remove(p)
	}
}

// form returns the service ID form to dial p with (docs/adr/0007-both-service-ids.md).
func (f *Interface) form(p *peer) serviceid.Form {
	switch {
	case f.cmVia(p) == ViaInband:
		return serviceid.RFC // only our own kind knows messages in-band
	case p.class == ClassLegacy && f.now.Before(p.classUntil):
		return serviceid.Legacy
	case p.class != ClassRFC && f.opt.LinuxFirst && !p.triedForm[serviceid.Legacy]:
		return serviceid.Legacy
	}
	return serviceid.RFC
}

func (f *Interface) setClass(p *peer, c Class, why string) {
	switch c {
	case ClassLegacy:
		p.classUntil = f.now.Add(classMemory)
	case ClassRFC:
		p.legacy = false
	}
	if p.class != c {
		p.class = c
		f.note(Note{Kind: NoteConn, Peer: p.key, Text: fmt.Sprintf("peer class is %v: %s", c, why)})
	}
}

// transport returns the mode for p: what both ends announce, RC before UC (RFC
// 4755 section 3.1), UD if nothing is left or p's answers rule it out.
func (f *Interface) transport(p *peer) ib.Transport {
	common := f.opt.Mode.Flags() & p.flags.Known()
	if p.flags.Known() == 0 && f.foreignREQs() { // the peer may announce no mode for the same reason
		common = f.opt.Mode.Flags()
	}
	switch {
	case common&encap.FlagRC != 0:
		return ib.RC
	case common&encap.FlagUC != 0 && f.form(p) != serviceid.Legacy: // Linux rejects UC with 28
		return ib.UC
	}
	return ib.UD
}

// mayDial reports whether a packet to p should open a connection now.
func (f *Interface) mayDial(p *peer) bool {
	return f.up && f.transport(p) != ib.UD && p.tx == nil && !p.connecting() &&
		!f.now.Before(p.holdUntil) && p.key != f.link.Key()
}

// enqueue keeps pkt until p's connection is up. It owns pkt from then on.
func (f *Interface) enqueue(p *peer, pkt []byte) {
	switch {
	case len(p.queue) >= f.opt.queuePackets() || p.queueOctets+len(pkt) > f.opt.queueOctets():
		f.count(dropQueueFull)
	case f.peers.queued+len(pkt) > maxQueuedOctets:
		f.count(dropQueueTotal)
	default:
		p.queue = append(p.queue, pkt)
		p.queueOctets += len(pkt)
		f.peers.queued += len(pkt)
		f.count(nQueued)
	}
}

// takeQueue empties p's queue.
func (f *Interface) takeQueue(p *peer) [][]byte {
	q := p.queue
	f.peers.queued -= p.queueOctets
	p.queue, p.queueOctets = nil, 0
	return q
}

// sendQueue sends what waits for p on the connection that is up.
func (f *Interface) sendQueue(p *peer) {
	for _, pkt := range f.takeQueue(p) {
		f.count(nQueueSent)
		f.sendPeer(p, pkt)
	}
}

// dropQueue gives up what waits for p, because p itself is given up.
func (f *Interface) dropQueue(p *peer) { f.n[dropQueueGone] += uint64(len(f.takeQueue(p))) }

// fail ends an attempt. Packets go by UD until the next attempt, which comes after a pause
// that doubles with each failure.
func (f *Interface) fail(p *peer, why string) {
	pause := min(f.opt.retryMin()<<min(p.failures, 16), f.opt.retryMax())
	pause = pause/2 + time.Duration(f.opt.Rand.Int64N(int64(pause))) // 0.5 to 1.5 of it
	p.failures++
	p.holdUntil = f.now.Add(pause)
	if !f.gsi() && p.holdUntil.Before(p.inbandAfter) {
		p.holdUntil = p.inbandAfter // REQs can go in-band only
	}
	f.arm(p, p.holdUntil)
	p.diagnose().lastFail = why
	f.endAttempt(p)
	f.note(Note{Kind: NoteConn, Peer: p.key, Report: ConnectionFailed, Text: fmt.Sprintf("no connection: %s; UD until the next attempt in %v at the earliest", why, p.holdUntil.Sub(f.now).Round(time.Millisecond))})
	for _, pkt := range f.takeQueue(p) {
		f.sendPeer(p, pkt)
	}
	f.touch(p)
}

// endAttempt forgets what the attempt has tried, and lowered MTUs that are older than classMemory.
func (f *Interface) endAttempt(p *peer) {
	p.quick, p.triedForm, p.tried26, p.turned = 0, [3]bool{}, false, false
	p.waitUntil = time.Time{}
	if (p.receive != 0 || p.pathMTU != 0) && f.now.Sub(p.diagnostics().lowered) >= classMemory {
		f.forgetBlackHole(p)
		p.receive, p.pathMTU = 0, 0 // the peer may take more by now
	}
	f.retire(p)
}

// touch marks every next hop of p for settle.
func (f *Interface) touch(p *peer) {
	f.hops.dirty = append(f.hops.dirty, p.addrs...)
}
