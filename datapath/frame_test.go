package datapath

import (
	"testing"

	"ipoibcm/wire/encap"
)

// Frames that were large once do not hold memory for ever; small ones go up
// without allocating.
func TestFreeFramesAreSmall(t *testing.T) {
	const depth = 64
	r := newUpRing(depth)
	large, small := make([]byte, 60000), make([]byte, 2044)
	for range 2 * depth {
		r.get(Frame{Kind: TXMiss, Type: encap.IPv4, Data: large}).Release()
	}
	for range depth {
		f := r.get(Frame{Kind: TXMiss, Type: encap.IPv4, Data: nil})
		if f == nil {
			break // all are out
		}
		if cap(f.Data) > keepOctets {
			t.Fatalf("a free frame keeps %d octets", cap(f.Data))
		}
	}
	r = newUpRing(depth)
	for range 2 * depth {
		r.get(Frame{Kind: RXND, Type: encap.IPv6, Data: small}).Release()
	}
	if n := testing.AllocsPerRun(100, func() { r.get(Frame{Kind: RXND, Type: encap.IPv6, Data: small}).Release() }); n != 0 {
		t.Errorf("%v allocations for a small frame", n)
	}
}
