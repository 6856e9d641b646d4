package datapath

import (
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"

	"ipoibcm/ib"
)

// The table has what a map has.
func TestConnTable(t *testing.T) {
	var table connTable
	want := map[ib.QPN]*Conn{}
	r := rand.New(rand.NewPCG(1, 2))
	for range 5000 {
		q, c := ib.QPN(r.IntN(500)), new(Conn)
		if want[q] = c; r.IntN(3) == 0 {
			delete(want, q)
			c = nil
		}
		table.set(q, c)
		if got := table.get(q); got != want[q] {
			t.Fatalf("QP %v: %p, want %p", q, got, want[q])
		}
	}
	if n := len(slices.Collect(table.all())); n != len(want) {
		t.Errorf("%d connections, want %d", n, len(want))
	}
	for c := range table.all() {
		if !slices.Contains(slices.Collect(maps.Values(want)), c) {
			t.Errorf("%p is not in the map", c)
		}
	}
}

// One connection more costs nearly the same among many as among few.
func TestConnTableCost(t *testing.T) {
	cost := func(n int) uint64 {
		var table connTable
		for q := range ib.QPN(n) {
			table.set(q, new(Conn))
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		const rounds = 256
		for q := range ib.QPN(rounds) {
			table.set(ib.QPN(n)+q, nil)
		}
		runtime.ReadMemStats(&after)
		return (after.TotalAlloc - before.TotalAlloc) / rounds
	}
	if got, most := cost(4096), uint64(8192); got > most {
		t.Errorf("%d octets are copied for one change among 4096, want at most %d", got, most)
	}
}
