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

// SetMembers replaces the list of other hosts on the link. A host that is not on the list any more
// gets no copies of broadcasts; its connections and neighbour entries stay.
type SetMembers struct {
	Peers  []ib.GID // as Options.Peers
	Copies bool     // as Options.Copies
	// Hints maps an IP address to the member that has it according to the list of members. The
	// map must not change afterwards.
	Hints map[netip.Addr]ib.GID
}

func (ev SetMembers) step(f *Interface) {
	if len(ev.Peers) > group.MaxPeers {
		ev.Peers = ev.Peers[:group.MaxPeers]
	}
	f.watchFor(ev.Peers)
	hints := make(map[netip.Addr]encap.LinkAddr, len(ev.Hints))
	for a, g := range ev.Hints {
		// QPN 0xffffff, as for its copy of a broadcast: unlike the host's UD QPN, this one still
		// reaches the host after a restart.
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

// watchFor makes members the hosts for which heardFrom keeps the time. Members that stay keep
// theirs.
func (f *Interface) watchFor(members []ib.GID) {
	heard := make(map[ib.GID]time.Time, len(members))
	for _, g := range members {
		heard[g] = f.answers.members[g]
	}
	f.answers.members = heard
}

// Heard returns when each member was last heard; zero if it never was. Packets on connections,
// which the data path receives, count from the next Usage on.
func (f *Interface) Heard() map[ib.GID]time.Time { return maps.Clone(f.answers.members) }
