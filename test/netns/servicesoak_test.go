package netns

import (
	"cmp"
	"context"
	"flag"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"ipoibcm/control"
	"ipoibcm/internal/long"
)

var serviceSoakFor = flag.Duration("servicesoak", 0,
	"how long TestServiceSoak goes on, with a reload every 10 s and a handover every minute; "+
		"without it two minutes, in the long form")

// An operator who never rests: the daemon reloads again and again and is handed over now
// and then, while streams go both ways. No reload ends a connection, every stream arrives
// as it was sent, and neither the processes nor the manager's store grow.
func TestServiceSoak(t *testing.T) {
	if *serviceSoakFor == 0 {
		long.Only(t)
	}
	if raceDetector {
		t.Skip("the race detector's own memory would be measured: run without it")
	}
	parallel(t)
	const reloadEvery, handOverEvery = 10 * time.Second, time.Minute
	d := cmp.Or(*serviceSoakFor, 2*time.Minute)
	s := newSegment(t, topology{})
	ctx, cancel := context.WithTimeout(context.Background(), d+10*patience)
	defer cancel()
	s.ctx = ctx
	a, b := s.hosts[0], s.hosts[1]
	b.run()
	k := newKeeper(a)
	start := func() {
		t.Helper()
		k.startWith("--config", a.path(".yaml"))
	}
	a.rewrite(a.settings("mode: rc\n"))
	start()
	a.connect(b, "RC")
	s.must(a.AddRoute(ifName, "10.77.0.0/16", b.v4.String()))
	index := a.index(ifName)

	stop := streams(ctx, a, b)
	reloads, handOvers := 0, 0
	modes := []string{"auto", "rc"}
	nextHandOver := time.Now().Add(handOverEvery)
	for end := time.Now().Add(d); time.Now().Before(end) || handOvers < 2; {
		time.Sleep(reloadEvery)
		a.paired(b, "RC")
		a.reloadKeeps(b, "mode: "+modes[reloads%2]+"\nidle_timeout: 5m\n")
		reloads++
		if time.Now().Before(nextHandOver) {
			continue
		}
		a.stop()
		start()
		handOvers++
		nextHandOver = time.Now().Add(handOverEvery)
		k.hasInterface()
		if got := a.index(ifName); got != index {
			t.Fatalf("handover %d: interface %d, want %d", handOvers, got, index)
		}
	}
	sent, octets := stop()
	a.reach(b.v4)
	last, lastPeer := a.atRestHere(), b.atRestHere()
	// Again, for the figures of a process that has just begun.
	a.stop()
	start()
	a.reach(b.v4)
	a.connect(b, "RC")
	first, firstPeer := a.atRestHere(), b.atRestHere()
	t.Logf("%d reloads, %d handovers, %d streams with %d MB; descriptors %d, fresh %d; the peer's goroutines %d and %d",
		reloads, handOvers,
		sent, octets/1e6, last.Descriptors, first.Descriptors, lastPeer.Goroutines, firstPeer.Goroutines)
	nothingGrew(t, first, last, firstPeer, lastPeer)
	if out, err := a.tryIP("route show 10.77.0.0/16"); err == nil && !strings.Contains(out, ifName) {
		t.Errorf("the user's route: %q", out)
	}
}

// nothingGrew compares a process that was reloaded and handed over with a fresh one, and
// its peer with itself later.
func nothingGrew(t *testing.T, first, last, firstPeer, lastPeer control.Runtime) {
	t.Helper()
	if last.Descriptors > first.Descriptors+2 {
		t.Errorf("%d descriptors, a fresh process has %d", last.Descriptors, first.Descriptors)
	}
	if lastPeer.Goroutines > firstPeer.Goroutines+4 {
		t.Errorf("the peer has %d goroutines, later %d", lastPeer.Goroutines, firstPeer.Goroutines)
	}
}

// reloadKeeps reloads with settings, which must not end the connection to p.
func (h *host) reloadKeeps(p *host, yaml string) {
	h.seg.Helper()
	before := h.conns(p)
	h.rewrite(h.settings(yaml))
	h.reload(0)
	after := h.conns(p)
	if len(before) == 0 || !slices.ContainsFunc(after,
		func(c control.Conn) bool { return c.LocalCommID == before[0].LocalCommID }) {
		h.seg.Errorf("reload: connections %+v, before it %+v", after, before)
	}
}

// streams sends one TCP stream after the other both ways, each of which must arrive as it
// was sent, until stop.
func streams(ctx context.Context, a, b *host) (stop func() (sent int, octets int64)) {
	var wg sync.WaitGroup
	var mu sync.Mutex
	sent, octets, end := 0, int64(0), make(chan struct{})
	for _, way := range [][2]*host{{a, b}, {b, a}} {
		wg.Go(func() {
			for {
				select {
				case <-end:
					return
				default:
				}
				one, cancel := context.WithTimeout(ctx, patience)
				got, err := way[0].Send(one, way[1].Host, way[1].v4, 8<<20, 0)
				cancel()
				mu.Lock()
				sent, octets = sent+1, octets+got.Octets
				mu.Unlock()
				if err != nil {
					a.seg.Errorf("stream from %s: %v", way[0].Name, err)
				}
			}
		})
	}
	return func() (int, int64) {
		close(end)
		wg.Wait()
		return sent, octets
	}
}

// atRestHere asks what the host's agent uses, once that has not changed for a second.
func (h *host) atRestHere() (r control.Runtime) {
	h.seg.Helper()
	var last control.Runtime
	for same := 0; same < 5; time.Sleep(200 * time.Millisecond) {
		last, r = r, control.Runtime{}
		h.seg.must(h.agent.Get(h.seg.ctx, control.PathRuntime, &r))
		if same++; r.Goroutines != last.Goroutines || r.Descriptors != last.Descriptors {
			same = 0
		}
		h.seg.must(h.seg.ctx.Err())
	}
	return r
}
