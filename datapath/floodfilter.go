package datapath

import (
	"context"
	"time"

	"ipoibcm/ratelimit"
	"ipoibcm/verbs"
)

const (
	// A flood begins when filterAfter datagrams have been refused within filterWindow. Until the
	// flood ends, a provider that is a [verbs.FloodFilterer] drops datagrams of unknown sources
	// itself. The flood ends when filterRest evaluations in a row estimate that fewer than
	// filterUntil datagrams of unknown sources come in a second.
	filterAfter  = 500
	filterWindow = int64(100 * time.Millisecond)
	filterUntil  = 2500
	filterRest   = 8

	// filterEvery is the longest time, and filterSoonest the shortest, between two lists of sources
	// that the provider gets. With each list it admits the next slice of the unknown sources.
	filterEvery   = 250 * time.Millisecond
	filterSoonest = 20 * time.Millisecond

	// A returning sender is a source of which two datagrams came within seconds, both within its
	// share. It is forgotten when returningFor has passed since its last datagram.
	maxReturning = 1024
	returningFor = int64(10 * time.Second)
)

// A floodFilter decides which sources' UD data the provider lets through during a flood. It
// belongs to a dataLimits, whose lock guards it.
type floodFilter struct {
	again chan struct{} // holds at most one element: a flood has begun, or the known sources have changed

	on        bool
	met       *ratelimit.Memory
	returning map[udPeer]*returningSender
	unknown   int   // datagrams of sources that are neither known nor returning, since looked
	looked    int64 // when unknown was evaluated last
	calm      int   // evaluations in a row that found few

	window  int64 // when the present window began
	refusal int   // datagrams refused in the window
}

// A returningSender is a source that nobody here sends to by UD and that keeps on sending.
type returningSender struct {
	at   int64 // when a datagram of it came last
	over int64 // the last second in which it sent more than its share
}

func newFloodFilter() floodFilter {
	return floodFilter{again: make(chan struct{}, 1), met: ratelimit.NewMemory(limiterKeys()),
		returning: map[udPeer]*returningSender{}}
}

// lookAgain wakes the goroutine of keepFloodFilter.
func (f *floodFilter) lookAgain() {
	select {
	case f.again <- struct{}{}:
	default:
	}
}

// refused counts a datagram that was refused, and wakes keepFloodFilter when a flood begins.
func (f *floodFilter) refused(now int64) {
	if age := now - f.window; age >= filterWindow || age < 0 {
		f.window, f.refusal = now, 0
	}
	if f.refusal++; f.refusal == filterAfter && !f.on {
		f.lookAgain()
	}
}

// flooded reports whether at time now there is a flood for the provider to filter.
func (f *floodFilter) flooded(now int64) bool {
	return f.refusal >= filterAfter && now-f.window < 2*filterWindow
}

// saw notes a datagram of a source that we send nothing to by UD, if the filter is on. inShare
// says whether it was within its source's share.
func (f *floodFilter) saw(now int64, k udPeer, inShare bool) {
	if !f.on {
		return
	}
	r := f.returning[k]
	if r == nil {
		f.unknown++
		if !inShare || !f.met.Seen(now, k.gid, k.qpn) || len(f.returning) >= maxReturning {
			return
		}
		r = &returningSender{}
		f.returning[k] = r
	}
	if r.at = now; !inShare {
		r.over = now / int64(time.Second)
	}
}

// begin switches the filter on.
func (f *floodFilter) begin(now int64) {
	f.on, f.calm, f.unknown, f.looked = true, 0, 0, now
	clear(f.returning)
}

// look appends the returning senders to known, except those that sent more than their share in
// this second. It reports whether the flood goes on, and switches the filter off if not.
func (f *floodFilter) look(now int64, known []verbs.DatagramSource) ([]verbs.DatagramSource, bool) {
	if since := now - f.looked; since >= int64(filterEvery) {
		if int64(f.unknown)*verbs.FloodSlices*int64(time.Second) < filterUntil*since {
			f.calm++
		} else {
			f.calm = 0
		}
		f.unknown, f.looked = 0, now
	}
	if f.calm >= filterRest {
		f.on = false
		return nil, false
	}
	for k, r := range f.returning {
		switch {
		case now-r.at > returningFor:
			delete(f.returning, k)
		case r.over != now/int64(time.Second):
			known = append(known, verbs.DatagramSource{GID: k.gid, QPN: k.qpn})
		}
	}
	return known, true
}

// known returns the peers' UD QPs that we send to.
func (u *udPeers) known() []verbs.DatagramSource {
	u.mu.RLock()
	defer u.mu.RUnlock()
	list := make([]verbs.DatagramSource, 0, len(u.n)+maxReturning/8)
	for k := range u.n {
		list = append(list, verbs.DatagramSource{GID: k.gid, QPN: k.qpn})
	}
	return list
}

// keepFloodFilter gives the provider, during floods, the lists of sources to let through, until ctx
// ends.
func (l *Loop) keepFloodFilter(ctx context.Context, p verbs.FloodFilterer) {
	g := l.data
	for {
		select {
		case <-ctx.Done():
			return
		case <-g.flood.again:
		}
		now := nanotime()
		g.mu.Lock()
		begins := g.flood.flooded(now)
		if begins {
			g.flood.begin(now)
		}
		g.mu.Unlock()
		if begins {
			l.filterWhile(ctx, p)
		}
	}
}

// filterWhile does the work of keepFloodFilter for one flood.
func (l *Loop) filterWhile(ctx context.Context, p verbs.FloodFilterer) {
	defer p.FilterFlood(nil)
	g, pause := l.data, time.NewTimer(0)
	defer pause.Stop()
	l.c.FloodFilters.Add(1)
	for {
		known := l.udPeers.known()
		g.mu.Lock()
		known, on := g.flood.look(nanotime(), known)
		g.mu.Unlock()
		if !on {
			return
		}
		p.FilterFlood(known)
		for _, wait := range []struct {
			d     time.Duration
			again <-chan struct{}
		}{{filterSoonest, nil}, {filterEvery - filterSoonest, g.flood.again}} {
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
