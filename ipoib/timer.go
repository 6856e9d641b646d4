package ipoib

import (
	"slices"
	"time"

	"ipoibcm/cm"
	"ipoibcm/group"
	"ipoibcm/neigh"
)

// legacyReap is how long a legacy peer's own connection may be silent before we
// take it as abandoned. Linux closes its own after 88 s; a DREQ from us would
// cost it packets (WF 4.13).
const legacyReap = 10 * time.Minute

// wake lets the parts and our own timers run that are due.
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
	if !due(f.nextTimer) {
		return
	}
	for _, p := range slices.Clone(f.order) {
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
		if p.unused() && due(p.touched.Add(classMemory)) {
			f.forgetPeer(p)
		}
	}
	f.nextTimer = f.timersDue()
}

// arm makes sure that wake looks at the peers at t. Timers that move away leave
// it early, which is harmless; looking at every peer in every Step is not.
func (f *Interface) arm(t time.Time) { f.nextTimer = earliest(f.nextTimer, t) }

// retire notes that p may be of no more use.
func (f *Interface) retire(p *peer) {
	p.touched = f.now
	f.arm(f.now.Add(classMemory))
}

// idleAt returns when c is torn down if nothing uses it; zero means never.
func (f *Interface) idleAt(c *conn) time.Time {
	idle := f.opt.idle()
	switch {
	case c.rxOnly():
		if c.state != connUp {
			return time.Time{}
		}
		return c.used.Add(max(legacyReap, 2*idle))
	case len(c.peer.addrs) == 0 && (idle < 0 || idle > orphanGrace):
		return c.used.Add(orphanGrace) // also where being idle is no reason to go
	case idle < 0:
		return time.Time{}
	}
	return c.used.Add(idle)
}

// timersDue looks at every peer for when wake has something to do for a peer.
func (f *Interface) timersDue() time.Time {
	var t time.Time
	for _, p := range f.order {
		t = earliest(t, earliest(p.waitUntil, p.holdUntil))
		if p.tx != nil {
			t = earliest(t, f.idleAt(p.tx))
		}
		for _, c := range p.rx {
			t = earliest(t, f.idleAt(c))
		}
		if p.unused() {
			t = earliest(t, p.touched.Add(classMemory))
		}
	}
	return t
}
