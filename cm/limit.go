package cm

import (
	"time"

	"ipoibcm/ib"
)

// maxSources bounds how many sources a limiter tells apart; the one that was
// silent longest makes room.
const maxSources = 1024

// A limiter is a token bucket for each source GID.
type limiter struct {
	perSecond int // negative: no limit
	buckets   map[ib.GID]*bucket
	// The list of buckets by last use, newest first; a ring around this one.
	ring bucket
}

type bucket struct {
	gid        ib.GID
	tokens     float64
	last       time.Time
	prev, next *bucket
}

func newLimiter(perSecond int) limiter {
	return limiter{perSecond: perSecond, buckets: make(map[ib.GID]*bucket)}
}

// allow takes a token of gid's bucket.
func (l *limiter) allow(now time.Time, gid ib.GID) bool {
	if l.perSecond < 0 {
		return true
	}
	if l.ring.next == nil {
		l.ring.next, l.ring.prev = &l.ring, &l.ring
	}
	burst := float64(2 * l.perSecond)
	b := l.buckets[gid]
	switch {
	case b != nil:
		b.prev.next, b.next.prev = b.next, b.prev
	case len(l.buckets) >= maxSources:
		b = l.ring.prev
		delete(l.buckets, b.gid)
		b.prev.next, b.next.prev = b.next, b.prev
		fallthrough
	default:
		b = &bucket{gid: gid, tokens: burst, last: now}
		l.buckets[gid] = b
	}
	b.prev, b.next = &l.ring, l.ring.next
	b.prev.next, b.next.prev = b, b

	if d := now.Sub(b.last); d > 0 {
		b.tokens = min(burst, b.tokens+d.Seconds()*float64(l.perSecond))
		b.last = now
	}
	if b.tokens < 1 {
		return false
	}
	b.tokens--
	return true
}
