package netns

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"testing"
	"time"

	"ipoibcm/control"
	"ipoibcm/internal/long"
)

var soakFor = flag.Duration("soak", 0,
	"how long TestSoak goes on, of load, deaths and restarts; without it a minute, in the long form")

// One agent lives through load, deaths and restarts of its peer, links that go
// and come, and addresses that are added and removed. In the end it uses what it
// used after the first round.
func TestSoak(t *testing.T) {
	if *soakFor == 0 {
		long.Only(t)
	}
	if raceDetector {
		t.Skip("the race detector's own memory would be measured: run without it")
	}
	parallel(t)
	d := cmp.Or(*soakFor, time.Minute)
	s := newSegment(t, topology{})
	ctx, cancel := context.WithTimeout(context.Background(), d+10*patience)
	defer cancel()
	s.ctx = ctx
	s.start()
	a, b := s.hosts[0], s.hosts[1]
	begin := time.Now()
	var before control.Runtime
	rounds, octets := 0, int64(0)
	for ; rounds < 3 || time.Since(begin) < d; rounds++ {
		octets += s.soakRound(rounds)
		if rounds == 1 { // both ways to die have been seen
			before = s.atRest()
		}
	}
	after := s.atRest()
	t.Logf(
		"%d rounds in %v, %d MB carried; goroutines %d and %d, descriptors %d and %d, heap %d and %d KiB in %d and %d "+
			"objects",
		rounds, time.Since(begin).Round(time.Second), octets/1e6, before.Goroutines, after.Goroutines, before.Descriptors,
		after.Descriptors,
		before.HeapOctets>>10, after.HeapOctets>>10, before.HeapObjects, after.HeapObjects)
	if after.Goroutines != before.Goroutines || after.Descriptors != before.Descriptors {
		t.Errorf("%d goroutines and %d descriptors, after the first rounds %d and %d",
			after.Goroutines, after.Descriptors, before.Goroutines, before.Descriptors)
	}
	if float64(after.HeapOctets) > 1.1*float64(before.HeapOctets) {
		t.Errorf("a heap of %d octets, after the first rounds %d", after.HeapOctets, before.HeapOctets)
	}
	a.connect(b, "RC")
}

// soakRound is one round of what happens; it returns the octets carried.
func (s *segment) soakRound(n int) int64 {
	s.Helper()
	a, b := s.hosts[0], s.hosts[1]
	b.reach(a.v6)
	a.connect(b, "RC")
	stop := s.load(a, b)
	s.moving(a, b)
	s.must(a.AddAddr(ifName, "10.0.7.1/24"))
	if n%2 == 0 {
		b.kill()
	} else {
		b.stop()
	}
	b.run()
	a.backWithin(patience, b)
	s.must(a.DelAddr(ifName, "10.0.7.1/24"))
	octets := stop()
	if n%3 == 2 {
		s.must(a.Down(underlay))
		a.waitState("underlay down")
		s.must(a.Up(underlay))
		a.waitState("up")
	}
	a.reach(b.v4)
	a.connect(b, "RC")
	return octets
}

// atRest waits until the connection that the restarted peer replaced is gone for
// good, and asks what a uses.
func (s *segment) atRest() (r control.Runtime) {
	s.Helper()
	a := s.hosts[0]
	var last control.Runtime
	same := 0
	s.eventually(patience, "a comes to rest", func() error {
		time.Sleep(200 * time.Millisecond)
		last = r
		r = control.Runtime{}
		if err := a.agent.Get(s.ctx, control.PathRuntime, &r); err != nil {
			return err
		}
		if same++; r.Goroutines != last.Goroutines || r.Descriptors != last.Descriptors ||
			r.HeapObjects > last.HeapObjects+200 {
			same = 0
		}
		if same < 5 {
			return fmt.Errorf("it still changes: %+v, before %+v", r, last)
		}
		return nil
	})
	return r
}
