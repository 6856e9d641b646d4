package datapath

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
)

// linear is what a Table is, slowly.
type linear map[netip.Prefix]*Path

func (m linear) lookup(a netip.Addr) (best *Path) {
	bits := -1
	for p, path := range m {
		if p.Contains(a) && p.Bits() > bits {
			best, bits = path, p.Bits()
		}
	}
	return best
}

func randPrefix(r *rand.Rand) netip.Prefix {
	if r.IntN(2) == 0 {
		b := [4]byte{10, byte(r.IntN(2) * 128), byte(r.IntN(4)), byte(r.IntN(256))}
		return netip.PrefixFrom(netip.AddrFrom4(b), r.IntN(33)).Masked()
	}
	b := [16]byte{0: 0xfd, 7: byte(r.IntN(4)), 8: byte(r.IntN(2) * 128), 15: byte(r.IntN(256))}
	return netip.PrefixFrom(netip.AddrFrom16(b), r.IntN(129)).Masked()
}

func TestTableAgainstLinearSearch(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	var tab *Table
	m := linear{}
	type version struct {
		t *Table
		n int
	}
	var olds []version
	for i := range 4000 {
		p := randPrefix(r)
		if r.IntN(3) == 0 {
			tab = tab.Without(p)
			delete(m, p)
		} else {
			path := &Path{Tag: uint64(i)}
			tab = tab.With(p, path)
			m[p] = path
		}
		if tab.Len() != len(m) {
			t.Fatalf("step %d: %d entries, want %d", i, tab.Len(), len(m))
		}
		for range 5 {
			a := randPrefix(r).Addr()
			if got, want := tab.Lookup(a), m.lookup(a); got != want {
				t.Fatalf("step %d: lookup %v = %v, want %v", i, a, got, want)
			}
		}
		if i%500 == 0 {
			olds = append(olds, version{tab, tab.Len()})
		}
	}
	for i, o := range olds { // older versions are as they were
		n := 0
		o.t.All(func(netip.Prefix, *Path) bool { n++; return true })
		if n != o.n {
			t.Errorf("version %d has %d entries, had %d", i, n, o.n)
		}
	}
	tab.All(func(p netip.Prefix, path *Path) bool {
		if m[p] != path {
			t.Errorf("All gives %v: %v, want %v", p, path, m[p])
		}
		delete(m, p)
		return true
	})
	if len(m) != 0 {
		t.Errorf("All left out %v", m)
	}
}

func TestEmptyTable(t *testing.T) {
	var tab *Table
	a := netip.MustParseAddr("10.0.0.1")
	if tab.Lookup(a) != nil || (&Table{}).Lookup(a) != nil || tab.Lookup(netip.Addr{}) != nil || tab.Len() != 0 {
		t.Error("an empty table has entries")
	}
	p := &Path{}
	tab = tab.With(netip.MustParsePrefix("0.0.0.0/0"), p)
	if tab.Lookup(a) != p || tab.Lookup(netip.MustParseAddr("::1")) != nil {
		t.Error("default routes of the families are not apart")
	}
	if tab = tab.Without(netip.MustParsePrefix("0.0.0.0/0")); tab.Lookup(a) != nil || tab.Len() != 0 {
		t.Error("not removed")
	}
}

func BenchmarkLookup(b *testing.B) {
	for _, n := range []int{10, 1000, 100000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			r := rand.New(rand.NewPCG(1, 2))
			var t *Table
			p := &Path{}
			keys := make([][]byte, 1024)
			for i := range n {
				a := [4]byte{10, byte(r.Uint32()), byte(r.Uint32()), byte(r.Uint32())}
				t = t.With(netip.PrefixFrom(netip.AddrFrom4(a), 32), p)
				keys[i%1024] = append([]byte(nil), a[:]...)
			}
			for i := range keys {
				if keys[i] == nil {
					keys[i] = keys[i%min(n, 1024)]
				}
			}
			i := 0
			for b.Loop() {
				t.lookup4(keys[i&1023])
				i++
			}
		})
	}
}
