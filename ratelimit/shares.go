package ratelimit

import (
	"time"

	"ipoibcm/ib"
)

// Shares bound how many packets one source may send within a second, where that is
// many. Unlike the shares of a [Limiter], which are small and exact while there are few sources,
// they hold beside a flood from any number of others: what is counted are the sums of
// all sources that meet in a place, in two tables, and the smaller sum counts.
//
// Memory is fixed. It is pure and belongs to one caller at a time.
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

// Take counts a packet from src at time now, in nanoseconds, and reports whether there
// were at most most of it in this second.
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
