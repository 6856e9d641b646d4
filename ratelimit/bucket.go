package ratelimit

import "time"

// A Bucket is a token bucket. Its zero value is full. The rate, in tokens a second, and the burst, which is
// the most tokens there may be, are the same in each call.
type Bucket struct {
	used float64 // tokens that are missing
	at   time.Time
}

// Left returns how many tokens there are at time now.
func (b *Bucket) Left(now time.Time, rate, burst float64) float64 {
	if d := now.Sub(b.at); d > 0 {
		b.used = max(0, b.used-d.Seconds()*rate)
	}
	b.at = now
	return burst - b.used
}

// Spend takes n tokens, even if there are fewer.
func (b *Bucket) Spend(n float64) { b.used += n }

// Take takes one token if there is one, and reports whether it did.
func (b *Bucket) Take(now time.Time, rate, burst float64) bool {
	if b.Left(now, rate, burst) < 1 {
		return false
	}
	b.Spend(1)
	return true
}

// Full reports whether no token is missing at time now. A full bucket has nothing to remember.
func (b *Bucket) Full(now time.Time, rate float64) bool { return b.Left(now, rate, 0) == 0 }
