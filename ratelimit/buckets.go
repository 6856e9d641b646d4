package ratelimit

import (
	"maps"
	"time"
)

// Buckets are buckets by key, such as one for each source. The zero value has none. Callers bound their
// number.
type Buckets[K comparable] struct {
	byKey map[K]*Bucket
	swept time.Time
}

// Len returns the number of buckets.
func (b *Buckets[K]) Len() int { return len(b.byKey) }

// Get returns the bucket of key, and makes it if there is none. If there are most buckets, Get first forgets
// those that are full, but at most once a second. It returns nil if there is still no room. All buckets have
// the same rate.
func (b *Buckets[K]) Get(now time.Time, key K, rate float64, most int) *Bucket {
	if have := b.byKey[key]; have != nil {
		return have
	}
	if len(b.byKey) >= most && now.Sub(b.swept) >= time.Second {
		b.swept = now
		maps.DeleteFunc(b.byKey, func(_ K, have *Bucket) bool { return have.Full(now, rate) })
	}
	if len(b.byKey) >= most {
		return nil
	}
	if b.byKey == nil {
		b.byKey = make(map[K]*Bucket)
	}
	made := new(Bucket)
	b.byKey[key] = made
	return made
}
