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

// SetMembers says who else is on the link. Who is not on the list any more gets no
// copies of broadcasts; connections and neighbour entries go on.
type SetMembers struct {
	Peers  []ib.GID // as Options.Peers
	Copies bool     // as Options.Copies
	// Hints say at which member an IP address is. The map must not change afterwards.
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
		// The copy of a broadcast that this one host gets: unlike a UD QPN it is good
		// after a restart.
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

// watchFor keeps when members were heard, and forgets it of others.
func (f *Interface) watchFor(members []ib.GID) {
	heard := make(map[ib.GID]time.Time, len(members))
	for _, g := range members {
		heard[g] = f.answers.members[g]
	}
	f.answers.members = heard
}

// Heard says when each member was last heard; zero if it never was. What the data path
// has counted is as old as the last Usage.
func (f *Interface) Heard() map[ib.GID]time.Time { return maps.Clone(f.answers.members) }
