package datapath

import (
	"context"
	"time"

	"ipoibcm/gate"
	"ipoibcm/verbs"
)

const (
	// While more than sieveAfter datagrams are refused within sieveWindow, the provider
	// drops them before they reach it, if it can. It goes on until fewer than
	// sieveUntil came in a second, for sieveRest in a row.
	sieveAfter  = 500
	sieveWindow = int64(100 * time.Millisecond)
	sieveUntil  = 2500
	sieveRest   = 8

	// sieveEvery is how often the provider is told anew, and the next slice of those that
	// nobody knows has its turn; sieveSoonest is the least time between two.
	sieveEvery   = 250 * time.Millisecond
	sieveSoonest = 20 * time.Millisecond

	// Regulars have come twice within seconds, and not more than their share. They
	// are forgotten after regularFor.
	maxRegulars = 1024
	regularFor  = int64(10 * time.Second)
)

// A sieve decides which sources of UD data pass below the provider during a flood. It belongs
// to a dataGates, and is under its lock.
type sieve struct {
	again chan struct{} // holds at most one: a flood has begun, or what is known has changed

	on       bool
	met      *gate.Memory
	regulars map[udPeer]*regular
	unknown  int   // datagrams of others since the last look
	looked   int64 // when that was
	calm     int   // looks in a row that found few

	window  int64 // its begin
	refusal int   // datagrams refused in it
}

// A regular is a source that nobody here sends to by UD and that keeps on sending.
type regular struct {
	at   int64 // when it was seen last
	over int64 // the second in which it had more than its share
}

func newSieve() sieve {
	return sieve{again: make(chan struct{}, 1), met: gate.NewMemory(gateKeys()), regulars: map[udPeer]*regular{}}
}

// lookAgain wakes whoever tells the provider.
func (s *sieve) lookAgain() {
	select {
	case s.again <- struct{}{}:
	default:
	}
}

// refused counts a datagram that was.
func (s *sieve) refused(now int64) {
	if age := now - s.window; age >= sieveWindow || age < 0 {
		s.window, s.refusal = now, 0
	}
	if s.refusal++; s.refusal == sieveAfter && !s.on {
		s.lookAgain()
	}
}

// flooded reports whether there is a flood at time now that is worth a sieve.
func (s *sieve) flooded(now int64) bool {
	return s.refusal >= sieveAfter && now-s.window < 2*sieveWindow
}

// saw takes in a datagram of a source that we send nothing to, which may have had its share.
func (s *sieve) saw(now int64, k udPeer, inShare bool) {
	if !s.on {
		return
	}
	r := s.regulars[k]
	if r == nil {
		s.unknown++
		if !inShare || !s.met.Seen(now, k.gid, k.qpn) || len(s.regulars) >= maxRegulars {
			return
		}
		r = &regular{}
		s.regulars[k] = r
	}
	if r.at = now; !inShare {
		r.over = now / int64(time.Second)
	}
}

// begin makes it work.
func (s *sieve) begin(now int64) {
	s.on, s.calm, s.unknown, s.looked = true, 0, 0, now
	clear(s.regulars)
}

// look appends the regulars to known at time now, and reports whether the flood goes on.
func (s *sieve) look(now int64, known []verbs.DatagramSource) ([]verbs.DatagramSource, bool) {
	if since := now - s.looked; since >= int64(sieveEvery) {
		if int64(s.unknown)*verbs.SieveSlices*int64(time.Second) < sieveUntil*since {
			s.calm++
		} else {
			s.calm = 0
		}
		s.unknown, s.looked = 0, now
	}
	if s.calm >= sieveRest {
		s.on = false
		return nil, false
	}
	for k, r := range s.regulars {
		switch {
		case now-r.at > regularFor:
			delete(s.regulars, k)
		case r.over != now/int64(time.Second):
			known = append(known, verbs.DatagramSource{GID: k.gid, QPN: k.qpn})
		}
	}
	return known, true
}

// known returns those that we send to by UD.
func (u *udPeers) known() []verbs.DatagramSource {
	u.mu.RLock()
	defer u.mu.RUnlock()
	list := make([]verbs.DatagramSource, 0, len(u.n)+maxRegulars/8)
	for k := range u.n {
		list = append(list, verbs.DatagramSource{GID: k.gid, QPN: k.qpn})
	}
	return list
}

// keepSieve tells the provider what to let through while there is a flood, until ctx ends.
func (l *Loop) keepSieve(ctx context.Context, p verbs.DatagramSiever) {
	g := l.data
	for {
		select {
		case <-ctx.Done():
			return
		case <-g.sieve.again:
		}
		now := nanotime()
		g.mu.Lock()
		begins := g.sieve.flooded(now)
		if begins {
			g.sieve.begin(now)
		}
		g.mu.Unlock()
		if begins {
			l.sieveWhile(ctx, p)
		}
	}
}

// sieveWhile does so for one flood.
func (l *Loop) sieveWhile(ctx context.Context, p verbs.DatagramSiever) {
	defer p.SieveDatagrams(nil)
	g, pause := l.data, time.NewTimer(0)
	defer pause.Stop()
	l.c.Sieves.Add(1)
	for {
		known := l.udPeers.known()
		g.mu.Lock()
		known, on := g.sieve.look(nanotime(), known)
		g.mu.Unlock()
		if !on {
			return
		}
		p.SieveDatagrams(known)
		for _, wait := range []struct {
			d     time.Duration
			again <-chan struct{}
		}{{sieveSoonest, nil}, {sieveEvery - sieveSoonest, g.sieve.again}} {
			pause.Reset(wait.d)
			select {
			case <-ctx.Done():
				return
			case <-wait.again:
			case <-pause.C:
			}
		}
	}
}
