package netns

import (
	"fmt"
	"net/netip"
	"testing"

	"ipoibcm/control"
)

// Where the underlay carries no multicast, the broadcast group is a list of
// peers: nobody joins a group, and three hosts find each other all the same.
func TestPeerListInsteadOfMulticast(t *testing.T) {
	parallel(t)
	s := newSegment(t, topology{hosts: 3})
	var gids []netip.Addr
	for _, h := range s.hosts {
		ll, err := h.LinkLocal(underlay)
		s.must(err)
		gids = append(gids, ll)
	}
	for i, h := range s.hosts {
		list := "peers:\n"
		for j, g := range gids {
			if j != i {
				list += fmt.Sprintf("  - %q\n", g)
			}
		}
		h.run(h.config(list)...)
	}
	a, b, c := s.hosts[0], s.hosts[1], s.hosts[2]
	for _, pair := range [][2]*host{{a, b}, {b, c}, {c, a}} {
		pair[0].connect(pair[1], "RC")
		both(pair[1], func(dst netip.Addr) { pair[0].reach(dst) })
	}
	for _, h := range s.hosts {
		var g control.Groups
		s.must(h.agent.Get(s.ctx, control.PathGroups, &g))
		if len(g.Groups) != 0 {
			t.Errorf("%s has joined %v", h.Name, g.Groups)
		}
	}
	for _, to := range []*host{b, c} {
		if err := a.Multicast(ifName, to.Host, ifName, netip.MustParseAddr("239.9.9.9"), 1200, patience); err != nil {
			t.Error(err)
		}
	}
}
