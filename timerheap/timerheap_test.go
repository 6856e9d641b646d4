package timerheap

import (
	"math/rand/v2"
	"slices"
	"testing"
)

type alarm struct {
	at, seq int
	Slot
}

func (a *alarm) Before(o *alarm) bool { return a.at < o.at || a.at == o.at && a.seq < o.seq }

// Values that are set, moved and stopped at random come out in order, each once.
func TestRandom(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	var h Heap[alarm, *alarm]
	in := map[*alarm]bool{}
	all := make([]alarm, 200)
	for i := range all {
		all[i].seq = i
	}
	for range 20_000 {
		a := &all[r.IntN(len(all))]
		if r.IntN(3) == 0 {
			h.Stop(a)
			delete(in, a)
		} else {
			a.at = r.IntN(50)
			h.Set(a)
			in[a] = true
		}
		if a.Armed() != in[a] {
			t.Fatalf("armed is %v, want %v", a.Armed(), in[a])
		}
	}
	if h.Len() != len(in) || len(h.All()) != len(in) {
		t.Fatalf("%d and %d values, want %d", h.Len(), len(h.All()), len(in))
	}
	var want, got []*alarm
	for a := range in {
		want = append(want, a)
	}
	slices.SortFunc(want, func(a, b *alarm) int {
		if a.Before(b) {
			return -1
		}
		return 1
	})
	for a := h.First(); a != nil; a = h.First() {
		h.Stop(a)
		got = append(got, a)
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %d values in another order than that of their times", len(got))
	}
}

// Setting and stopping does not allocate once the heap has had the room.
func TestNoAllocation(t *testing.T) {
	var h Heap[alarm, *alarm]
	a, b := &alarm{at: 2}, &alarm{at: 1}
	h.Set(a)
	h.Set(b)
	h.Stop(b)
	if n := testing.AllocsPerRun(100, func() { h.Set(b); b.at++; h.Set(b); h.Stop(b) }); n != 0 {
		t.Errorf("%v allocations, want none", n)
	}
}
