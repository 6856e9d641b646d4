package neigh

import (
	"cmp"
	"time"

	"ipoibcm/ratelimit"
	"ipoibcm/wire/encap"
)

// maxSources bounds the sources with a bucket of their own. All other sources share
// one bucket, so that a flood from forged addresses starves only those.
const maxSources = 1024

// A limiter bounds the requests that we act on, from each source and in all.
type limiter struct {
	all, other       ratelimit.Bucket
	rate, sourceRate int
	sources          ratelimit.Buckets[encap.LinkAddr]
}

func newLimiter(rate, sourceRate int) limiter { return limiter{rate: rate, sourceRate: sourceRate} }

// allow reports whether one more request from link may be acted on, and if not,
// which bound refused it.
func (l *limiter) allow(now time.Time, link encap.LinkAddr) (Drop, bool) {
	if l.sourceRate > 0 && !takeOf(l.source(now, link.Key()), now, l.sourceRate) {
		return DropRateSource, false
	}
	if l.rate > 0 && !takeOf(&l.all, now, l.rate) {
		return DropRateAll, false
	}
	return 0, true
}

func (l *limiter) source(now time.Time, key encap.LinkAddr) *ratelimit.Bucket {
	return cmp.Or(l.sources.Get(now, key, float64(l.sourceRate), maxSources), &l.other)
}

// takeOf takes a token from b and reports whether there was one. b holds at most the tokens of one
// second.
func takeOf(b *ratelimit.Bucket, now time.Time, rate int) bool {
	return b.Take(now, float64(rate), float64(rate))
}
