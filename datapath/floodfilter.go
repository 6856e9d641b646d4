package datapath

import (
	"context"
	"time"

	"ipoibcm/ratelimit"
	"ipoibcm/verbs"
)

const (
	// While more than filterAfter datagrams are refused within filterWindow, the provider
	// drops them before they reach it, if it can. It goes on until fewer than
	// filterUntil came in a second, for filterRest in a row.
	filterAfter  = 500
	filterWindow = int64(100 * time.Millisecond)
	filterUntil  = 2500
	filterRest   = 8

	// filterEvery is how often the provider is told anew, and the next slice of those that
	// nobody knows has its turn; filterSoonest is the least time between two.
	filterEvery   = 250 * time.Millisecond
	filterSoonest = 20 * time.Millisecond

	// Returning senders have come twice within seconds, and not more than their share. They
	// are forgotten after returningFor.
	maxReturning = 1024
	returningFor = int64(10 * time.Second)
)

// A floodFilter decides which sources of UD data pass below the provider during a flood. It belongs
// to a dataLimits, and is under its lock.
type floodFilter struct {
	again chan struct{} // holds at most one: a flood has begun, or what is known has changed

	on        bool
	met       *ratelimit.Memory
	returning map[udPeer]*returningSender
	unknown   int   // datagrams of others since the last look
	looked    int64 // when that was
	calm      int   // looks in a row that found few

	window  int64 // its begin
	refusal int   // datagrams refused in it
}

// A returningSender is a source that nobody here sends to by UD and that keeps on sending.
type returningSender struct {
	at   int64 // when it was seen last
	over int64 // the second in which it had more than its share
}

func newFloodFilter() floodFilter {
	return floodFilter{again: make(chan struct{}, 1), met: ratelimit.NewMemory(limiterKeys()),
		returning: map[udPeer]*returningSender{}}
}

// lookAgain wakes whoever tells the provider.
func (f *floodFilter) lookAgain() {
	select {
	case f.again <- struct{}{}:
	default:
	}
}

// refused counts a datagram that was.
func (f *floodFilter) refused(now int64) {
	if age := now - f.window; age >= filterWindow || age < 0 {
		f.window, f.refusal = now, 0
	}
	if f.refusal++; f.refusal == filterAfter && !f.on {
		f.lookAgain()
	}
}

// flooded reports whether there is a flood at time now that is worth a filter.
func (f *floodFilter) flooded(now int64) bool {
	return f.refusal >= filterAfter && now-f.window < 2*filterWindow
}

// saw takes in a datagram of a source that we send nothing to, which may have had its share.
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

// begin makes it work.
func (f *floodFilter) begin(now int64) {
	f.on, f.calm, f.unknown, f.looked = true, 0, 0, now
	clear(f.returning)
}

// look appends the returning senders to known at time now, and reports whether the flood goes on.
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

// known returns those that we send to by UD.
func (u *udPeers) known() []verbs.DatagramSource {
	u.mu.RLock()
	defer u.mu.RUnlock()
	list := make([]verbs.DatagramSource, 0, len(u.n)+maxReturning/8)
	for k := range u.n {
		list = append(list, verbs.DatagramSource{GID: k.gid, QPN: k.qpn})
	}
	return list
}

// keepFloodFilter tells the provider what to let through while there is a flood, until ctx ends.
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

// filterWhile does so for one flood.
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
