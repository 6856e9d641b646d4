package softroce

import (
	"sync/atomic"
	"testing"
)

// Early packets of all queue pairs have a bound, and what it refuses is counted.
func TestEarlyPool(t *testing.T) {
	p := earlyPool{full: new(atomic.Uint64)}
	var kept [][]byte
	for range maxEarly {
		b := p.Get(0)
		if len(b) != earlyLen {
			t.Fatalf("a buffer of %d octets, want %d", len(b), earlyLen)
		}
		kept = append(kept, b)
	}
	if b := p.Get(0); b != nil {
		t.Error("one more than the bound")
	}
	if n := p.full.Load(); n != 1 {
		t.Errorf("%d refused, want 1", n)
	}
	p.Put(kept[0][:100])
	if b := p.Get(0); len(b) != earlyLen {
		t.Errorf("after one was given back: a buffer of %d octets, want %d", len(b), earlyLen)
	}
}

// Some queue pairs that keep all they can leave a share to the others.
func TestEarlyPoolIsShared(t *testing.T) {
	p := earlyPool{full: new(atomic.Uint64)}
	for greedy := range 4 {
		held := 0
		for p.Get(held) != nil {
			held++
		}
		if held < maxEarly/16 {
			t.Errorf("queue pair %d has %d, want %d at least", greedy, held, maxEarly/16)
		}
		if left := maxEarly - int(p.inUse.Load()); left < held-1 {
			t.Errorf("queue pair %d has %d and leaves %d", greedy, held, left)
		}
	}
}
