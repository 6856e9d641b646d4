package netns

import (
	"fmt"
	"net/netip"
	"testing"
)

// What one frame of the underlay carries leaves without fragments, on IPv6 and on IPv4.
// A host of an older version, or an explicit ud_mtu, sends more, and that is taken.
func TestAutoUDMTU(t *testing.T) {
	parallel(t)
	for _, tt := range []struct {
		name string
		top  topology
		ud   int // of the first host
		fits int // of the second, explicitly
	}{
		{"IPv6", topology{mtu: 1500}, 1424, 2044},
		{"IPv4", topology{mtu: 1500, ipv4: true}, 1444, 1280},
	} {
		t.Run(tt.name, func(t *testing.T) {
			parallel(t)
			s := newSegment(t, tt.top)
			a, b := s.hosts[0], s.hosts[1]
			a.run("--mode", "ud", "--ud-mtu", "auto")
			b.run("--mode", "ud", "--ud-mtu", fmt.Sprint(tt.fits))
			both(b, func(dst netip.Addr) {
				a.waitRoute(patience, dst, tt.ud)
				a.reach(dst)
				a.send(b, dst, 4<<20)
			})
			both(a, func(dst netip.Addr) { b.send(a, dst, 4<<20) })
			if got := a.status().Interface.UDMTU; got != tt.ud {
				t.Errorf("status has UD MTU %d, want %d", got, tt.ud)
			}
			if n := a.counter("softroce", "tx_fragmented"); n != 0 {
				t.Errorf("%d datagrams left in fragments", n)
			}
			for _, h := range []*host{a, b} {
				if w := h.status().Warnings; len(w) != 0 {
					t.Errorf("%s warns: %q", h.Name, w)
				}
			}
			s.must(a.SetMTU(underlay, 9000))
			a.waitRoute(patience, b.v4, 2044)
			s.must(a.SetMTU(underlay, 1500))
			a.waitRoute(patience, b.v4, tt.ud)
		})
	}
}
