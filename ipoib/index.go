package ipoib

import (
	"iter"
	"net/netip"
	"slices"
)

// maxBlock is how many addresses one block of an addrIndex holds.
const maxBlock = 256

// An addrIndex is a set of addresses in order, for what a prefix holds to be found
// without looking at the others. It is a list of sorted blocks, none of them empty.
type addrIndex [][]netip.Addr

// block returns the last block that begins at or before a; the first if none does.
func (x addrIndex) block(a netip.Addr) int {
	i, found := slices.BinarySearchFunc(x, a, func(b []netip.Addr, a netip.Addr) int { return b[0].Compare(a) })
	if !found {
		i--
	}
	return max(0, i)
}

func (x *addrIndex) add(a netip.Addr) {
	if len(*x) == 0 {
		*x = addrIndex{{a}}
		return
	}
	i := x.block(a)
	b := (*x)[i]
	if len(b) == maxBlock { // the new half has room of its own
		(*x)[i] = slices.Clip(b[:maxBlock/2])
		*x = slices.Insert(*x, i+1, append(make([]netip.Addr, 0, maxBlock), b[maxBlock/2:]...))
		i = x.block(a)
		b = (*x)[i]
	}
	if at, found := slices.BinarySearchFunc(b, a, netip.Addr.Compare); !found {
		(*x)[i] = slices.Insert(b, at, a)
	}
}

func (x *addrIndex) remove(a netip.Addr) {
	if len(*x) == 0 {
		return
	}
	i := x.block(a)
	at, found := slices.BinarySearchFunc((*x)[i], a, netip.Addr.Compare)
	if !found {
		return
	}
	b := slices.Delete((*x)[i], at, at+1)
	(*x)[i] = b
	switch {
	case len(b) == 0:
		*x = slices.Delete(*x, i, i+1)
	case i+1 < len(*x) && len(b)+len((*x)[i+1]) <= maxBlock/2: // few blocks for few addresses
		(*x)[i] = append(b, (*x)[i+1]...)
		*x = slices.Delete(*x, i+1, i+2)
	}
}

// in yields the addresses that p holds, in order.
func (x addrIndex) in(p netip.Prefix) iter.Seq[netip.Addr] {
	return func(yield func(netip.Addr) bool) {
		if len(x) == 0 {
			return
		}
		first := p.Masked().Addr()
		for i := x.block(first); i < len(x); i++ {
			at, _ := slices.BinarySearchFunc(x[i], first, netip.Addr.Compare)
			for _, a := range x[i][at:] {
				if !p.Contains(a) || !yield(a) {
					return
				}
			}
		}
	}
}
