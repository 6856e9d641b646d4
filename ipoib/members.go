package ipoib

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"ipoibcm/group"
	"ipoibcm/ib"
	"ipoibcm/neigh"
	"ipoibcm/wire/encap"
)

// SetMembers says which other hosts are on the link. A host that is not on the list any more
// gets no copies of broadcasts; its connections and neighbour entries go on.
type SetMembers struct {
	Peers  []ib.GID // as Options.Peers
	Copies bool     // as Options.Copies
	// Hints has the member at which an IP address is said to be. The map must not change afterwards.
	Hints map[netip.Addr]ib.GID
}

func (SetMembers) event() {}

func (f *Interface) setMembers(ev SetMembers) {
	if len(ev.Peers) > group.MaxPeers {
		ev.Peers = ev.Peers[:group.MaxPeers]
	}
	f.watchFor(ev.Peers)
	hints := make(map[netip.Addr]encap.LinkAddr, len(ev.Hints))
	for a, g := range ev.Hints {
		// The query goes to this one host as its copy of a broadcast would: unlike a UD QPN that
		// address still works after the host restarts.
		hints[a] = encap.LinkAddr{QPN: ib.QPNMulticast, GID: g}
	}
	f.neighStep(neigh.SetHints{Hints: hints})
	if slices.Equal(ev.Peers, f.opt.Peers) && ev.Copies == f.opt.Copies {
		return
	}
	f.opt.Peers, f.opt.Copies = ev.Peers, ev.Copies
	f.note(Note{Kind: NoteLink, Text: fmt.Sprintf("%d members to copy broadcasts to", len(ev.Peers))})
	f.groupStep(group.SetPeers{Peers: ev.Peers, Copies: ev.Copies})
}

// watchFor makes members the hosts of which we keep when they were last heard.
func (f *Interface) watchFor(members []ib.GID) {
	heard := make(map[ib.GID]time.Time, len(members))
	for _, g := range members {
		heard[g] = f.answers.members[g]
	}
	f.answers.members = heard
}

// Heard returns when each member was last heard; zero if it never was. Packets that the data
// path has received count from the next Usage on.
func (f *Interface) Heard() map[ib.GID]time.Time { return maps.Clone(f.answers.members) }
