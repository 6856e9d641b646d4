package fqcodel

import (
	"slices"
	"testing"
)

// The fattest flow gives way, however many packets the others have.
func TestDropFattest(t *testing.T) {
	w := newWorld(t, Options{}, 64)
	var q Queue
	for range 20 {
		w.put(&q, 1, 100, false, 0)
	}
	first := w.put(&q, 2, 3000, false, 0)
	w.put(&q, 2, 3000, false, 0)
	got := w.DropFattest(&q, 1, nil)
	if !slices.Equal(got, []int32{first}) {
		t.Errorf("got %v, want the first packet of flow 2, %d", got, first)
	}
	if n := len(w.DropFattest(&q, 1<<20, nil)); n != 1 {
		t.Errorf("%d packets, want the one that flow 2 has left", n)
	}
	if n := len(w.DropFattest(&q, 1<<20, nil)); n != 11 {
		t.Errorf("%d packets, want half of those of flow 1 and one, 11", n)
	}
	var none Queue
	if n := len(w.DropFattest(&none, 1, nil)); n != 0 {
		t.Errorf("%d packets of an empty queue, want none", n)
	}
}

// Flows that lost their only packet before their turn take no part any more: a flood of single packets does not fill
// the flows, so that others would have to share one.
func TestDroppedFlowsLeave(t *testing.T) {
	const waiting = 32
	s := New(Options{}, waiting+1)
	var q Queue
	dropped := []int32{waiting}
	for i := range int32(10_000) {
		id := i
		if i >= waiting {
			id = dropped[0]
		}
		s.Enqueue(&q, id, 8000, uint32(i)*0x9e3779b9, false, 0) // other hashes than the last ones had
		if q.own.packets > 0 {
			t.Fatalf("flow %d shares one", i)
		}
		if i < waiting {
			continue
		}
		if dropped = s.DropFattest(&q, 1, dropped[:0]); len(dropped) != 1 {
			t.Fatalf("%d packets dropped, want 1", len(dropped))
		}
	}
}

// A flow that was served and then lost the rest waits for its turn, as one does that was served whole.
func TestServedFlowsStay(t *testing.T) {
	w := newWorld(t, Options{}, 64)
	var q Queue
	w.makeOld(&q, 1)
	w.put(&q, 2, 1000, false, 0)
	w.put(&q, 2, 20_000, false, 0)
	if f, _, _ := w.take(&q, 0); f != 2 {
		t.Fatalf("got flow %d, want 2, which is new", f)
	}
	if n := len(w.DropFattest(&q, 1, nil)); n != 1 {
		t.Fatalf("%d packets dropped, want the long one", n)
	}
	w.take(&q, 0) // finds flow 2 empty
	w.put(&q, 2, 64, false, 0)
	if f, _, _ := w.take(&q, 0); f != 1 {
		t.Errorf("got flow %d, want 1, whose turn it is", f)
	}
}

// A packet of a new flow comes to a full queue of one packet of each flow, and one is dropped.
func BenchmarkDropFattest(b *testing.B) {
	const flows = 256
	s := New(Options{}, flows+1)
	var q Queue
	hash := uint32(0)
	put := func(id int32) {
		s.Enqueue(&q, id, 8000, hash, false, 0)
		hash += 0x9e3779b9 // other than the last ones
	}
	for i := range int32(flows) {
		put(i)
	}
	dropped := []int32{flows}
	for b.Loop() {
		put(dropped[0])
		dropped = s.DropFattest(&q, 1, dropped[:0])
	}
}
