package ipoib

import (
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
)

// An addrIndex finds what a look at every address would find.
func TestAddrIndex(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 3))
	var x addrIndex
	all := map[netip.Addr]bool{}
	draw := func() netip.Addr {
		if r.IntN(8) == 0 {
			return netip.AddrFrom16([16]byte{0: 0xfd, 14: byte(r.IntN(4)), 15: byte(r.IntN(256))})
		}
		return netip.AddrFrom4([4]byte{10, 0, byte(r.IntN(12)), byte(r.IntN(256))})
	}
	for i := range 20000 {
		grow := i/4000%2 == 0 // to thousands, to few, and so on
		if a := draw(); r.IntN(10) == 0 != grow {
			x.add(a)
			all[a] = true
		} else {
			x.remove(a)
			delete(all, a)
		}
		if i%97 != 0 {
			continue
		}
		p := netip.PrefixFrom(draw(), r.IntN(33))
		var want []netip.Addr
		for _, a := range slices.SortedFunc(maps.Keys(all), netip.Addr.Compare) {
			if p.Contains(a) {
				want = append(want, a)
			}
		}
		if got := slices.Collect(x.in(p)); !slices.Equal(got, want) {
			t.Fatalf("step %d: %v holds %v, found %v", i, p, want, got)
		}
		n := 0
		for _, b := range x {
			if n += len(b); len(b) == 0 || len(b) > maxBlock {
				t.Fatalf("step %d: a block of %d", i, len(b))
			}
		}
		if n != len(all) || len(x) > 2+8*n/maxBlock {
			t.Fatalf("step %d: %d blocks hold %d addresses, there are %d", i, len(x), n, len(all))
		}
	}
}
