package mtu

import "cmp"

// A Budget decides the Receive MTU of UC connections. UC has no shared receive queue, so every
// connection holds a ring of buffers of its own. Take returns the full size while the sum of the
// rings stays within a limit, and a smaller size after that (docs/adr/0003-verbs-contract.md).
type Budget struct {
	// Limit bounds the octets of all rings: a ring that would exceed it gets Small instead of Full.
	// Rings of Small have no limit. Zero means 64 MiB.
	Limit int
	// Ring is the number of buffers of a connection. Zero means 16.
	Ring int
	// Full and Small are Receive MTUs. Zero means 65524 and 16388.
	Full, Small uint32

	used int64
}

// SmallReceive is the Receive MTU offered to UC connections past the limit: 16384 and the header.
const SmallReceive = 16384 + headerLen

// Take returns the Receive MTU for one more UC connection and books its ring.
func (b *Budget) Take() uint32 {
	m := cmp.Or(b.Full, DefaultReceive)
	if b.used+b.octets(m) > int64(cmp.Or(b.Limit, 64<<20)) {
		m = min(m, cmp.Or(b.Small, SmallReceive))
	}
	b.used += b.octets(m)
	return m
}

// Release gives back the ring that Take booked. receive is the result of Take.
func (b *Budget) Release(receive uint32) { b.used = max(0, b.used-b.octets(receive)) }

// Used returns the octets of the booked rings.
func (b *Budget) Used() int64 { return b.used }

// octets returns the octets of one ring with this Receive MTU.
func (b *Budget) octets(receive uint32) int64 { return int64(cmp.Or(b.Ring, 16)) * int64(receive) }
