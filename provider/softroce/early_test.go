package softroce

import "testing"

// Early packets of all queue pairs have a bound, and what it refuses is counted.
func TestEarlyPool(t *testing.T) {
	var p earlyPool
	var kept [][]byte
	for range maxEarly {
		b := p.Get()
		if len(b) != earlyLen {
			t.Fatalf("a buffer of %d octets, want %d", len(b), earlyLen)
		}
		kept = append(kept, b)
	}
	if b := p.Get(); b != nil {
		t.Error("one more than the bound")
	}
	if n := p.full.Load(); n != 1 {
		t.Errorf("%d refused, want 1", n)
	}
	p.Put(kept[0][:100])
	if b := p.Get(); len(b) != earlyLen {
		t.Errorf("after one was given back: a buffer of %d octets, want %d", len(b), earlyLen)
	}
}
