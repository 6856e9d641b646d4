package netns

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"ipoibcm/control"
	"ipoibcm/ib"
	"ipoibcm/internal/lab"
	"ipoibcm/wire/arp"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/nd"
	"ipoibcm/wire/roce"
)

// announce has x say five times a second, for d, that it has the addresses of peer: in
// packets with its own GID and a QPN.
func (s *segment) announce(x, victim, peer *host, d time.Duration) (packets int) {
	s.Helper()
	gid, err := x.LinkLocal(underlay)
	s.must(err)
	me := encap.LinkAddr{Flags: encap.FlagRC, QPN: 0x777777, GID: ib.GIDFromAddr(gid)}
	f := s.forger(x, victim)
	r := rand.New(rand.NewPCG(1, 2))
	var claims [][]byte
	for range int(d / (200 * time.Millisecond)) {
		a, err := arp.NewAnnouncement(me, peer.v4).AppendBinary([]byte{byte(encap.ARP >> 8), byte(encap.ARP & 0xff), 0, 0})
		s.must(err)
		n, err := nd.NewAnnouncement(peer.v6, me, false).AppendBinary([]byte{byte(encap.IPv6 >> 8),
			byte(encap.IPv6 & 0xff), 0, 0})
		s.must(err)
		for _, b := range [][]byte{a, n} {
			claims = append(claims, forgedUD(r, gid, f.gid, me.QPN, f.qpn, ib.QKeyIPoIB, b))
		}
	}
	f.load(claims)
	ctx, stop := context.WithTimeout(s.ctx, d+patience)
	defer stop()
	sent, err := f.send(ctx, roce.Port, 10)
	s.must(err)
	return sent
}

// at returns where the agent of h has an address.
func (h *host) at(a netip.Addr) string {
	h.seg.Helper()
	var n control.Neighbours
	h.seg.must(h.agent.Get(h.seg.ctx, control.PathNeigh, &n))
	i := slices.IndexFunc(n.Neighbours, func(n control.Neighbour) bool { return n.IP == a.String() })
	if i < 0 || len(n.Neighbours[i].LinkAddr) < 3 {
		return ""
	}
	return n.Neighbours[i].LinkAddr[2:]
}

// TestTakeover: a host on the link announces the addresses of another, five times a
// second. What goes there goes on going there, over the same connection. With
// arp_accept always the same packets take them.
func TestTakeover(t *testing.T) {
	parallel(t)
	for _, accept := range []string{"probe", "always"} {
		t.Run(accept, func(t *testing.T) {
			parallel(t)
			s := newSegment(t, topology{hosts: 3})
			victim, peer, x := s.hosts[0], s.hosts[1], s.hosts[2]
			victim.run("--arp-accept", accept, "--log-level", "info")
			peer.run()
			was, _ := victim.connect(peer, "RC")
			victim.reach(peer.v6)
			right := peer.link()
			moved, looks := 0, 0
			done := make(chan struct{})
			go func() {
				defer close(done)
				s.announce(x, victim, peer, 4*time.Second)
			}()
			for on := true; on; {
				select {
				case <-done:
					on = false
				case <-time.After(50 * time.Millisecond):
				}
				for _, a := range []netip.Addr{peer.v4, peer.v6} {
					if looks++; victim.at(a) != right {
						moved++
					}
				}
			}
			if accept == "always" {
				if moved < looks/4 {
					t.Errorf("the addresses were elsewhere in %d of %d looks: these packets take nothing", moved, looks)
				}
				return
			}
			if moved != 0 {
				t.Errorf("the addresses were elsewhere in %d of %d looks", moved, looks)
			}
			if n := victim.counter("ipoib", "neigh_drop_still_there"); n == 0 {
				t.Error("no claim was refused because the neighbour still answers")
			}
			victim.send(peer, peer.v4, 1<<20)
			if now := victim.conns(peer); len(now) != 1 || now[0].LocalCommID != was.LocalCommID {
				t.Errorf("connections are now %+v, want that with communication ID %s", now, was.LocalCommID)
			}
			t.Logf("%d looks", looks)
		})
	}
}

// claim has f's victim asked by a host that says it has the addresses of peer: once in ARP, once in ND.
func (f *forger) claim(r *rand.Rand, at encap.LinkAddr, peer *host) {
	s := peer.seg
	s.Helper()
	a, err := arp.NewRequest(at, peer.v4, f.victim.v4).AppendBinary([]byte{byte(encap.ARP >> 8), byte(encap.ARP & 0xff), 0, 0})
	s.must(err)
	n, err := nd.NewNS(peer.v6, f.victim.v6, at).AppendBinary([]byte{byte(encap.IPv6 >> 8), byte(encap.IPv6 & 0xff), 0, 0})
	s.must(err)
	var claims [][]byte
	for _, b := range [][]byte{a, n} {
		claims = append(claims, forgedUD(r, at.GID.Addr(), f.gid, at.QPN, f.qpn, ib.QKeyIPoIB, b))
	}
	f.load(claims)
	sent, err := f.send(s.ctx, roce.Port, 1000)
	s.must(err)
	if sent != len(claims) {
		s.Fatalf("%d of %d claims left", sent, len(claims))
	}
}

// announced waits until the agent of h has announced its addresses, twice and two seconds apart.
func (h *host) announced() {
	s := h.seg
	s.Helper()
	last, at := uint64(0), time.Now()
	s.eventually(patience, h.Name+" has announced its addresses", func() error {
		switch n := h.counter("ipoib", "neigh_announces"); {
		case n != last:
			last, at = n, time.Now()
		case n > 0 && time.Since(at) > 3*time.Second:
			return nil
		}
		return fmt.Errorf("%d announcements, the last %v ago", last, time.Since(at))
	})
}

// nowhere returns a link-layer address that no host has.
func nowhere(r *rand.Rand) encap.LinkAddr {
	gid := netip.MustParseAddr(fmt.Sprintf("fe80::dead:%x", r.Uint32N(1<<16)))
	return encap.LinkAddr{Flags: encap.FlagRC, QPN: 2 + ib.QPN(r.Uint32N(1<<24-3)), GID: ib.GIDFromAddr(gid)}
}

// TestTakeoverOfUnknown: two hosts that have not met, and one on the link says where the other is. That is believed; the
// right host is found when nobody answers there. Claims of other places every two seconds keep it so.
func TestTakeoverOfUnknown(t *testing.T) {
	parallel(t)
	const again = 5
	for _, name := range []string{"once", "again and again"} {
		t.Run(name, func(t *testing.T) {
			parallel(t)
			s := newSegment(t, topology{hosts: 3})
			victim, peer, x := s.hosts[0], s.hosts[1], s.hosts[2]
			victim.run()
			peer.run()
			peer.announced()
			r := rand.New(rand.NewPCG(4791, uint64(len(name))))
			f := s.forger(x, victim)
			right := peer.link()
			at := nowhere(r)
			f.claim(r, at, peer)
			s.eventually(patience, "the claims are believed", func() error {
				for _, a := range []netip.Addr{peer.v4, peer.v6} {
					if got := victim.at(a); got == "" || got == right {
						return fmt.Errorf("%v is at %q", a, got)
					}
				}
				return nil
			})
			begin := time.Now()
			if name != "once" {
				for range again {
					for end := time.Now().Add(2 * time.Second); time.Now().Before(end); {
						if _, err := victim.Ping(lab.Ping{Dst: peer.v4, Timeout: 100 * time.Millisecond}); err == nil {
							t.Errorf("the peer answers %v after the first claim, beside others", time.Since(begin))
						}
					}
					f.claim(r, nowhere(r), peer)
				}
				begin = time.Now()
			}
			both(peer, func(a netip.Addr) {
				victim.reach(a)
				t.Logf("%v answers after %v", a, time.Since(begin).Round(100*time.Millisecond))
			})
			victim.pairedBy(peer, "RC", func() { _, _ = victim.Ping(lab.Ping{Dst: peer.v4, Timeout: 100 * time.Millisecond}) })
			victim.send(peer, peer.v4, 1<<20)
		})
	}
}
