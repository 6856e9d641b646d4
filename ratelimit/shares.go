package ratelimit

import (
	"time"

	"ipoibcm/ib"
)

// Shares bound how many packets one source may send within a second, for bounds that are large. The hash
// of a source selects one sum in each of two tables. A sum counts the packets of all sources that select it,
// and the smaller of a source's two sums is compared with the bound. Unlike the shares of a [Limiter], which
// are small and exact while there are few sources, these hold during a flood from any number of others.
//
// Memory is fixed. Shares have no clock and belong to one caller at a time.
type Shares struct {
	keys [2]uint64
	sums [2][shares]sum
}

// A sum counts packets within one second.
type sum struct {
	second int64
	count  int
}

// NewShares returns Shares; keys are as in [New].
func NewShares(keys [2]uint64) *Shares { return &Shares{keys: keys} }

// Take counts a packet from src at time now, in nanoseconds. It reports whether the packets of src in this
// second are no more than the limit, most.
func (s *Shares) Take(now int64, src ib.GID, most int) bool {
	h, second := hash(s.keys, src), now/int64(time.Second)
	fewest := 0
	for i := range s.sums {
		p := &s.sums[i][h>>(16*i)%shares]
		if p.second != second {
			*p = sum{second: second}
		}
		if p.count++; i == 0 || p.count < fewest {
			fewest = p.count
		}
	}
	return fewest <= most
}
