package explore

import (
	"math/rand/v2"
	"testing"

	"ipoibcm/internal/long"
)

// A search goes on from copies of states. A copy behaves as what it was made
// of, and nothing that is done to it shows there: random walks by copies, with
// every other choice tried at each step, lead to the same prints as walks by
// one world that is never copied.
func TestSnapshots(t *testing.T) {
	long.OneGoroutine(t)
	for seed := range uint64(40) {
		r := rand.New(rand.NewPCG(seed, 1))
		s := worlds(true)[seed%uint64(len(worlds(true)))]
		w := s.begin(newTools())
		straight := s.begin(newTools())
		if w.print() != straight.print() {
			t.Fatalf("%s: does not begin alike", s.name)
		}
		for range 60 {
			cs := w.choices()
			if len(cs) == 0 {
				break
			}
			before := w.print()
			var next *world
			chosen := r.IntN(len(cs))
			for i, c := range cs {
				f := w.fork()
				f.apply(c)
				f.fork().recover(&memory{m: map[print]rest{}})
				if i == chosen {
					next = f
				}
			}
			if w.print() != before {
				t.Fatalf("%s, seed %d: what was done to a copy shows in the original", s.name, seed)
			}
			w = next
			straight.apply(cs[chosen])
			if w.print() != straight.print() {
				t.Fatalf("%s, seed %d: a copy behaves otherwise than its original", s.name, seed)
			}
		}
	}
}
