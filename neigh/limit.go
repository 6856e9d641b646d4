package neigh

import (
	"time"

	"ipoibcm/wire/encap"
)

// maxSources bounds the sources whose rate is known one by one. The others
// share one allowance, so a flood from forged addresses starves only them.
const maxSources = 1024

// A limiter bounds the requests we act on, by source and in all.
type limiter struct {
	all, other       bucket
	rate, sourceRate int
	sources          map[encap.LinkAddr]*bucket
	swept            time.Time
}

func newLimiter(rate, sourceRate int) limiter {
	return limiter{rate: rate, sourceRate: sourceRate, sources: make(map[encap.LinkAddr]*bucket)}
}

// allow reports whether one more request from link may be acted on, and if not,
// which bound refused it.
func (l *limiter) allow(now time.Time, link encap.LinkAddr) (Drop, bool) {
	if l.sourceRate > 0 && !l.source(now, link.Key()).take(now, l.sourceRate) {
		return DropRateSource, false
	}
	if l.rate > 0 && !l.all.take(now, l.rate) {
		return DropRateAll, false
	}
	return 0, true
}

func (l *limiter) source(now time.Time, key encap.LinkAddr) *bucket {
	if b := l.sources[key]; b != nil {
		return b
	}
	if len(l.sources) >= maxSources {
		if now.Sub(l.swept) < time.Second {
			return &l.other
		}
		l.swept = now
		for k, b := range l.sources { // what is deleted does not depend on the order
			if now.Sub(b.at) >= time.Second {
				delete(l.sources, k) // full again: nothing to remember
			}
		}
		if len(l.sources) >= maxSources {
			return &l.other
		}
	}
	b := new(bucket)
	l.sources[key] = b
	return b
}

// A bucket holds up to one second's worth of tokens. Its zero value is full.
type bucket struct {
	used float64 // tokens missing
	at   time.Time
}

func (b *bucket) take(now time.Time, rate int) bool {
	if d := now.Sub(b.at); d > 0 {
		b.used = max(0, b.used-d.Seconds()*float64(rate))
		b.at = now
	}
	if b.used+1 > float64(rate) {
		return false
	}
	b.used++
	return true
}
