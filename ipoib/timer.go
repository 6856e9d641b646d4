package ipoib

import (
	"math"
	"slices"
	"time"

	"ipoibcm/cm"
	"ipoibcm/fib"
	"ipoibcm/group"
	"ipoibcm/neigh"
	"ipoibcm/sa"
)

// legacyReap is how long a connection that a legacy peer opened may be silent before we
// take it as abandoned. Linux closes its own after 88 s. A DREQ from us would
// cost Linux packets: its queue for a neighbour has room for three (ipoib.h).
const legacyReap = 10 * time.Minute

// wake runs the timers of the parts and of peers that are due.
func (f *Interface) wake() {
	due := func(t time.Time) bool { return !t.IsZero() && !f.now.Before(t) }
	if due(f.cm.Deadline()) {
		f.cmStep(cm.Wake{})
	}
	if due(f.neigh.Deadline()) {
		f.neighStep(neigh.Wake{})
	}
	if due(f.group.Deadline()) {
		f.groupStep(group.Wake{})
	}
	if due(f.fib.Deadline()) {
		f.fibStep(fib.Wake{})
	}
	if due(f.fabricDeadline()) {
		f.saStep(sa.Wake{})
	}
	if due(f.copies.deadline()) {
		f.drainCopies()
	}
	for p := f.peers.timers.First(); p != nil && due(p.at); p = f.peers.timers.First() {
		f.wakePeer(p, due)
		f.peers.timers.Stop(p)
		if t := f.peerDue(p); f.peers.byLink[p.key] == p && !t.IsZero() {
			if due(t) {
				t = f.now.Add(1) // later: others are due as well
			}
			f.arm(p, t)
		}
	}
}

// wakePeer does what is due for p.
func (f *Interface) wakePeer(p *peer, due func(time.Time) bool) {
	if due(p.waitUntil) {
		f.waited(p)
	}
	if due(p.holdUntil) {
		p.holdUntil = time.Time{}
		f.touch(p) // the path may be a Miss again
	}
	if c := p.tx; c != nil && due(f.idleAt(c)) {
		if len(p.addrs) == 0 {
			f.count(nOrphaned)
			f.hangUp(c, "no neighbour leads to it")
		} else {
			f.count(nIdle)
			f.hangUp(c, "idle")
		}
	}
	for _, c := range slices.Clone(p.rx) {
		if due(f.idleAt(c)) {
			f.count(nIdle)
			f.hangUp(c, "the peer has long been silent")
		}
	}
	if due(p.searchDue()) {
		f.wakeSearch(p)
	}
	if p.unused() && due(p.touched.Add(classMemory)) {
		f.forgetPeer(p)
	}
}

// retire notes that p was of use until now: it is forgotten after classMemory if it stays unused.
func (f *Interface) retire(p *peer) {
	p.touched = f.now
	f.arm(p, f.now.Add(classMemory))
	f.peers.unused.file(p)
}

// idleAt returns when c is torn down if nothing uses it; zero means never. It is also zero if that
// time has passed but no Usage has come since: between two of them a connection in use looks idle,
// and usage arms the timer again.
func (f *Interface) idleAt(c *conn) time.Time {
	t := f.idleEnd(c)
	if !f.now.Before(t) && f.counted.Before(t) && !f.counted.IsZero() {
		return time.Time{}
	}
	return t
}

// idleEnd returns when c has carried nothing for so long that it may go; zero means
// never.
func (f *Interface) idleEnd(c *conn) time.Time {
	idle := f.opt.idle()
	switch {
	case c.rxOnly():
		if c.state != connUp {
			return time.Time{}
		}
		return c.used.Add(max(legacyReap, 2*min(idle, math.MaxInt64/2)))
	case len(c.peer.addrs) == 0 && (idle < 0 || idle > orphanGrace):
		return c.used.Add(orphanGrace) // also if idle connections stay for ever
	case idle < 0:
		return time.Time{}
	}
	return c.used.Add(idle)
}

// peerDue returns when wake has something to do for p; zero means never.
func (f *Interface) peerDue(p *peer) time.Time {
	t := earliest(p.waitUntil, p.holdUntil, p.searchDue())
	if p.tx != nil {
		t = earliest(t, f.idleAt(p.tx))
	}
	for _, c := range p.rx {
		t = earliest(t, f.idleAt(c))
	}
	if p.unused() {
		t = earliest(t, p.touched.Add(classMemory))
	}
	return t
}

// arm makes sure that wake looks at p at t or earlier; a zero t changes nothing. If something
// becomes due later than it was, wake still comes at the earlier time, which is harmless.
func (f *Interface) arm(p *peer, t time.Time) {
	if t.IsZero() || f.peers.byLink[p.key] != p || p.Armed() && !t.Before(p.at) {
		return // it has been forgotten, or is looked at sooner
	}
	p.at = t
	f.peers.timers.Set(p)
}

// firstPeer returns when wake must look at a peer next; zero means never.
func (f *Interface) firstPeer() time.Time {
	if p := f.peers.timers.First(); p != nil {
		return p.at
	}
	return time.Time{}
}

// Before orders peers by when wake must look at them, then by link-layer address.
func (p *peer) Before(o *peer) bool {
	if c := p.at.Compare(o.at); c != 0 {
		return c < 0
	}
	return p.key.Compare(o.key) < 0
}
