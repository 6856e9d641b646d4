package ipoib

import (
	"fmt"
	"time"

	"ipoibcm/cm"
	"ipoibcm/ib"
	"ipoibcm/neigh"
)

// Reconfigure replaces settings of a running interface. Connections that are up stay as they are,
// except those that Allow, MaxConns and Idle end. A new mode is announced to neighbours at once.
type Reconfigure struct {
	Mode       Mode
	ReceiveMTU int           // of new connections; zero means 65524
	Idle       time.Duration // as Options.Idle
	Allow      ib.GIDSet     // as Options.Allow; connections to other GIDs end
	// AcceptAlways is as in Options.Neigh.
	AcceptAlways bool
	// MaxConns and MaxPeers are as in Options, and MaxPeers sets Options.Neigh.MaxNeighbors too.
	// Idle connections above a lower bound end with the next Usage, in the order of their last
	// use. Peers and neighbours above a lower bound are forgotten at once if they are not in use.
	MaxConns, MaxPeers int
}

func (ev Reconfigure) step(f *Interface) {
	f.note(Note{Kind: NoteLink, Text: fmt.Sprintf("settings changed: mode %v, Receive MTU %d", ev.Mode, ev.ReceiveMTU)})
	mode := ev.Mode != f.opt.Mode
	f.opt.Mode, f.opt.ReceiveMTU, f.opt.Idle, f.opt.Allow = ev.Mode, ev.ReceiveMTU, ev.Idle, ev.Allow
	f.budget.Full = uint32(f.opt.receiveMTU())
	f.neighStep(neigh.SetStaleTime{After: f.staleTime()})
	for _, c := range f.conns.byAge() {
		f.arm(c.peer, f.idleEnd(c))
	}
	f.expel()
	f.relimit(ev)
	if !mode {
		return
	}
	f.link.Flags = ev.Mode.Flags()
	f.neighStep(neigh.SetLinkAddr{LinkAddr: f.announced()})
	for _, p := range f.peers.byLink {
		f.touch(p) // another mode may be in common now
	}
}

// relimit puts the limits of ev in force.
func (f *Interface) relimit(ev Reconfigure) {
	f.opt.MaxConns, f.opt.MaxPeers = ev.MaxConns, ev.MaxPeers
	f.cmStep(cm.SetMaxConns{MaxConns: 4 * f.opt.maxConns()}) // half-open ones and TIMEWAIT included
	f.neighStep(neigh.SetPolicy{AcceptAlways: ev.AcceptAlways, MaxNeighbors: f.opt.maxPeers()})
	for len(f.peers.byLink) > f.opt.maxPeers() && f.evictPeer() {
	}
}

// allows reports whether Options.Allow has g.
func (f *Interface) allows(g ib.GID) bool { return f.opt.Allow.IsEmpty() || f.opt.Allow.Contains(g) }

// expel ends connections, attempts and neighbour entries of peers that are not allowed any more.
func (f *Interface) expel() {
	for _, c := range f.conns.byAge() {
		if !f.allows(c.peer.key.GID) {
			f.hangUp(c, "the peer is not allowed any more")
		}
	}
	for _, p := range f.allPeers() {
		if !f.allows(p.key.GID) {
			f.dropQueue(p)
			f.endAttempt(p)
			f.neighStep(neigh.ForgetLink{LinkAddr: p.key})
		}
	}
}
