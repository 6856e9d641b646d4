package netns

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// Between two hosts with jumbo frames the path carries 1500 octets only and says so to
// nobody. TCP is carried all the same, and no connection is made anew for ever.
func TestBlackHole(t *testing.T) {
	parallel(t)
	needNFT(t)
	s := newSegment(t, topology{udMTU: 1280})
	a, b := s.hosts[0], s.hosts[1]
	s.must(a.Swallow(underlay, b.Host, underlay, 1500))
	s.must(b.Swallow(underlay, a.Host, underlay, 1500))
	s.start("--ud-mtu", "1280")
	a.reach(b.v4)
	a.connect(b, "RC")
	began := time.Now()
	a.send(b, b.v4, 8<<20)
	t.Logf("8 MiB in %v, the black hole found in them", time.Since(began).Round(time.Millisecond))
	a.foundPathMTU(b, "RC", 1024)
	if n := a.counter("ipoib", "path_mtu_lowered"); n != 1 {
		t.Errorf("the path MTU was lowered %d times, want once", n)
	}
	before := a.counter("ipoib", "qp_errors")
	r := a.send(b, b.v6, 8<<20)
	t.Logf("8 MiB more in %v", r.Duration.Round(time.Millisecond))
	if n := a.counter("ipoib", "qp_errors") - before; n != 0 {
		t.Errorf("%d connections were lost after that, want none", n)
	}
}

// foundPathMTU sees that both ends of their connection have that path MTU.
func (h *host) foundPathMTU(p *host, mode string, pathMTU int) {
	h.seg.Helper()
	mine, theirs := h.paired(p, mode)
	if mine.PathMTU != pathMTU {
		h.seg.Errorf("%s has a connection with path MTU %d, want %d", h.Name, mine.PathMTU, pathMTU)
	}
	if theirs.PathMTU != pathMTU {
		h.seg.Errorf("%s has a connection with path MTU %d, want %d", p.Name, theirs.PathMTU, pathMTU)
	}
}

// Over UC and UD, which tell nothing of losses, such a path is found by probes: TCP has it within
// two seconds of its first packet, and then loses no packet to it.
func TestBlackHoleWithoutAcks(t *testing.T) {
	needNFT(t)
	for _, mode := range []string{"UC", "UD"} {
		for _, ipv4 := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, IPv4 %v", mode, ipv4), func(t *testing.T) {
				parallel(t)
				s := newSegment(t, topology{ipv4: ipv4})
				a, b := s.hosts[0], s.hosts[1]
				s.must(a.Swallow(underlay, b.Host, underlay, 1500))
				s.must(b.Swallow(underlay, a.Host, underlay, 1500))
				s.start("--mode", strings.ToLower(mode))
				datagram := 1424
				if ipv4 {
					datagram = 1444
				}
				w := s.stopwatch().withTest()
				a.send(b, b.v4, 256<<10)
				if err := w.over(2 * time.Second); err != nil {
					t.Errorf("the first 256 KiB of TCP: %v", err)
				}
				if mode == "UC" {
					a.foundPathMTU(b, mode, 1024)
				} else if got := a.explain(b.v4).MTU; got != datagram {
					t.Errorf("explain has MTU %d, want %d", got, datagram)
				}
				// Where the other end was faster its new connection has it, and our own search ends later.
				s.eventually(patience, "a has found it itself", func() error {
					why := strings.Join(a.explain(b.v4).Why, "\n")
					if !strings.Contains(why, fmt.Sprintf("datagrams of up to %d octets", datagram)) {
						return fmt.Errorf("explained as:\n%s", why)
					}
					return nil
				})
				w = s.stopwatch().withTest()
				r := a.send(b, b.v6, 8<<20)
				t.Logf("8 MiB more in %v", r.Duration.Round(time.Millisecond))
				if err := w.over(2 * time.Second); err != nil {
					t.Errorf("8 MiB more: %v", err)
				}
			})
		}
	}
}
