package cm

import (
	"time"

	"ipoibcm/ib"
	"ipoibcm/lru"
	"ipoibcm/ratelimit"
)

// maxSources bounds the sources of a limiter; the source that was silent longest makes room.
const maxSources = 1024

// A limiter is a token bucket for each source GID.
type limiter struct {
	perSecond int // negative: no limit
	sources   map[ib.GID]*source
	used      lru.List[source, *source]
}

type source struct {
	gid ib.GID
	ratelimit.Bucket
	lru.Links[source]
}

func newLimiter(perSecond int) limiter {
	return limiter{perSecond: perSecond, sources: make(map[ib.GID]*source)}
}

// allow takes a token from gid's bucket, which holds the tokens of two seconds, and reports
// whether there was one.
func (l *limiter) allow(now time.Time, gid ib.GID) bool {
	if l.perSecond < 0 {
		return true
	}
	s := l.sources[gid]
	switch {
	case s != nil:
		l.used.Remove(s)
	case len(l.sources) >= maxSources:
		old := l.used.Oldest()
		l.used.Remove(old)
		delete(l.sources, old.gid)
		fallthrough
	default:
		s = &source{gid: gid}
		l.sources[gid] = s
	}
	l.used.Push(s)
	return s.Take(now, float64(l.perSecond), float64(2*l.perSecond))
}
