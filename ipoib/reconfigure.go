package ipoib

import (
	"fmt"
	"slices"
	"time"

	"ipoibcm/group"
	"ipoibcm/ib"
	"ipoibcm/neigh"
)

// Reconfigure replaces settings while everything goes on: connections that are up stay
// as they are, and neighbours hear of another mode at once.
type Reconfigure struct {
	Mode       Mode
	ReceiveMTU int           // of new connections; zero means 65524
	Idle       time.Duration // as Options.Idle
	Peers      []ib.GID      // as Options.Peers
}

func (Reconfigure) event() {}

func (f *Interface) reconfigure(ev Reconfigure) {
	f.note(Note{Kind: NoteLink, Text: fmt.Sprintf("settings changed: mode %v, Receive MTU %d, %d peers", ev.Mode, ev.ReceiveMTU, len(ev.Peers))})
	mode, peers := ev.Mode != f.opt.Mode, !slices.Equal(ev.Peers, f.opt.Peers)
	f.opt.Mode, f.opt.ReceiveMTU, f.opt.Idle, f.opt.Peers = ev.Mode, ev.ReceiveMTU, ev.Idle, ev.Peers
	f.budget.Full = uint32(f.opt.receiveMTU())
	f.neighStep(neigh.SetStaleTime{After: f.staleTime()})
	for _, c := range f.conns.byAge() {
		f.arm(c.peer, f.idleEnd(c))
	}
	if peers {
		f.groupStep(group.SetPeers{Peers: ev.Peers})
	}
	if !mode {
		return
	}
	f.link.Flags = ev.Mode.Flags()
	f.neighStep(neigh.SetLinkAddr{LinkAddr: f.announced()})
	for _, p := range f.peers {
		f.touch(p) // what they can have with us may be another mode
	}
}
