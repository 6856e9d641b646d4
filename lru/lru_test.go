package lru

import (
	"math/rand/v2"
	"slices"
	"testing"
)

type item struct {
	n int
	Links[item]
}

// A list has the values in the order in which they came, whichever have gone
// since: against a slice.
func TestList(t *testing.T) {
	for seed := range uint64(50) {
		r := rand.New(rand.NewPCG(seed, 1))
		var l List[item, *item]
		var want []*item
		for i := range 200 {
			if len(want) == 0 || r.IntN(3) > 0 {
				v := &item{n: i}
				l.Push(v)
				want = append(want, v)
			} else {
				at := r.IntN(len(want))
				v := want[at]
				l.Remove(v)
				want = slices.Delete(want, at, at+1)
				if r.IntN(2) == 0 { // used again
					l.Push(v)
					want = append(want, v)
				}
			}
			if l.Len() != len(want) {
				t.Fatalf("seed %d: %d values, want %d", seed, l.Len(), len(want))
			}
			var got []*item
			for v := l.Oldest(); v != nil; v = v.Newer() {
				got = append(got, v)
			}
			if !slices.Equal(got, want) {
				t.Fatalf("seed %d, step %d: %d values in another order than they came", seed, i, len(got))
			}
		}
	}
}
