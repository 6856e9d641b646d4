package netns

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"ipoibcm/internal/lab"
)

// load keeps TCP transfers going both ways, each begun anew when it breaks,
// until the returned function is called; that returns how many octets arrived.
func (s *segment) load(a, b *host) (stop func() int64) {
	ctx, cancel := context.WithCancel(s.ctx)
	var wg sync.WaitGroup
	var mu sync.Mutex
	var octets int64
	for _, way := range []struct {
		from, to *host
		dst      netip.Addr
	}{{a, b, b.v4}, {b, a, a.v6}} {
		wg.Go(func() {
			for ctx.Err() == nil {
				one, end := context.WithTimeout(ctx, 5*time.Second)
				t, err := way.from.Send(one, way.to.Host, way.dst, 0, 2*time.Second)
				end()
				if err == nil {
					mu.Lock()
					octets += t.Octets
					mu.Unlock()
				} else {
					time.Sleep(20 * time.Millisecond)
				}
			}
		})
	}
	return func() int64 {
		cancel()
		wg.Wait()
		return octets
	}
}

// moving waits until the connection of a and b has carried more.
func (s *segment) moving(a, b *host) {
	s.Helper()
	s.eventually(patience, "the load moves both ways", func() error {
		c := a.conns(b)
		if len(c) == 0 || c[0].TxOctets < 2<<20 || c[0].RxOctets < 2<<20 {
			return fmt.Errorf("%+v", c)
		}
		return nil
	})
}

// A daemon that is killed while both ends send is back within three seconds of
// its start, and nothing of its predecessor is left anywhere.
func TestKilledUnderLoad(t *testing.T) {
	parallel(t)
	connectedModes(t, func(t *testing.T, mode string) {
		policy := []string{"--mode", strings.ToLower(mode)}
		s, a, b := startedPair(t, policy...)
		a.connect(b, mode)
		b.reach(a.v6)
		for round, victim := range []*host{b, a, b} {
			survivor := a
			if victim == a {
				survivor = b
			}
			stop := s.load(a, b)
			s.moving(a, b)
			victim.kill()
			time.Sleep(time.Duration(round) * 300 * time.Millisecond)
			if _, err := victim.Link(ifName); err == nil {
				t.Error("the interface outlived its agent")
			}
			victim.run(policy...)
			start := time.Now()
			survivor.backWithin(3*time.Second, victim)
			t.Logf("round %d: traffic back after %v", round+1, time.Since(start).Round(time.Millisecond))
			stop()
			a.reach(b.v4)
			a.recovers(b, mode, 4<<20)
			s.onlyOwnRoutes()
		}
	})
}

// onlyOwnRoutes checks that every host route of an agent leads to a peer's
// address, and that no device of ours is left over.
func (s *segment) onlyOwnRoutes() {
	s.Helper()
	for _, h := range s.hosts {
		known := map[string]bool{}
		for _, p := range s.hosts {
			if p != h {
				known[p.v4.String()], known[p.v6.String()] = true, true
				if ll, err := p.LinkLocal(ifName); err == nil {
					known[ll.String()] = true
				}
			}
		}
		for _, r := range h.hostRoutes() {
			dst, _, _ := strings.Cut(r, " ")
			dst, _, _ = strings.Cut(dst, "/")
			if strings.Contains(r, "multicast") || strings.HasPrefix(dst, "224.") {
				continue
			}
			if !known[dst] {
				s.Errorf("%s has a stray route %q", h.Name, r)
			}
		}
		links, err := h.Netlink().LinkList()
		s.must(err)
		for _, l := range links {
			switch n := l.Attrs().Name; n {
			case "lo", underlay, ifName:
			default:
				s.Errorf("%s has a stray device %s", h.Name, n)
			}
		}
	}
}

// The underlay is down for ten seconds under load: sending fails or waits, and
// all is back when it is up.
func TestUnderlayDownUnderLoad(t *testing.T) {
	parallel(t)
	const down = 10 * time.Second
	s, a, b := connectedPair(t)
	b.reach(a.v6)
	stop := s.load(a, b)
	s.moving(a, b)
	s.must(a.Down(underlay))
	a.waitState("underlay down")
	end := time.Now().Add(down)
	for time.Now().Before(end) {
		if _, err := b.Ping(lab.Ping{Dst: a.v4, Timeout: 200 * time.Millisecond}); err == nil {
			t.Fatal("a ping crossed an underlay that is down")
		}
		time.Sleep(100 * time.Millisecond)
	}
	s.must(a.Up(underlay))
	start := time.Now()
	a.backWithin(3*time.Second, b)
	t.Logf("traffic back after %v", time.Since(start).Round(time.Millisecond))
	stop()
	a.recovers(b, "RC", 16<<20)
	s.onlyOwnRoutes()
}
