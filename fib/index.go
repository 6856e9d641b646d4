package fib

import (
	"cmp"
	"iter"
	"net/netip"
	"slices"

	"ipoibcm/rtnl"
)

// maxBlock is how many destinations one block of an index holds.
const maxBlock = 256

// An index is a set of destinations in the order of their flows, for what a prefix
// holds to be found without looking at the others. It is a list of sorted blocks,
// none of them empty.
type index [][]*dest

func compareFlows(a, b rtnl.Flow) int {
	if c := a.Dst.Compare(b.Dst); c != 0 {
		return c
	}
	if a == b {
		return 0
	}
	return cmp.Or(a.Src.Compare(b.Src), cmp.Compare(a.TOS, b.TOS), cmp.Compare(a.Proto, b.Proto),
		cmp.Compare(a.SrcPort, b.SrcPort), cmp.Compare(a.DstPort, b.DstPort))
}

func compareDest(d *dest, f rtnl.Flow) int { return compareFlows(d.flow, f) }

// block returns the last block that begins at or before f; the first if none does.
func (x index) block(f rtnl.Flow) int {
	i, found := slices.BinarySearchFunc(x, f, func(b []*dest, f rtnl.Flow) int { return compareFlows(b[0].flow, f) })
	if !found {
		i--
	}
	return max(0, i)
}

// get returns the destination of f, nil if there is none.
func (x index) get(f rtnl.Flow) *dest {
	if len(x) == 0 {
		return nil
	}
	b := x[x.block(f)]
	if at, found := slices.BinarySearchFunc(b, f, compareDest); found {
		return b[at]
	}
	return nil
}

func (x *index) add(d *dest) {
	if len(*x) == 0 {
		*x = index{append(make([]*dest, 0, maxBlock), d)}
		return
	}
	i := x.block(d.flow)
	b := (*x)[i]
	if len(b) == maxBlock { // the new half has room of its own
		(*x)[i] = slices.Clip(b[:maxBlock/2])
		*x = slices.Insert(*x, i+1, append(make([]*dest, 0, maxBlock), b[maxBlock/2:]...))
		i = x.block(d.flow)
		b = (*x)[i]
	}
	if at, found := slices.BinarySearchFunc(b, d.flow, compareDest); !found {
		(*x)[i] = slices.Insert(b, at, d)
	}
}

func (x *index) remove(d *dest) {
	if len(*x) == 0 {
		return
	}
	i := x.block(d.flow)
	at, found := slices.BinarySearchFunc((*x)[i], d.flow, compareDest)
	if !found {
		return
	}
	b := slices.Delete((*x)[i], at, at+1)
	(*x)[i] = b
	switch {
	case len(b) == 0:
		if *x = slices.Delete(*x, i, i+1); len(*x) == 0 {
			*x = nil
		}
	case i+1 < len(*x) && len(b)+len((*x)[i+1]) <= maxBlock/2: // few blocks for few destinations
		(*x)[i] = append(b, (*x)[i+1]...)
		*x = slices.Delete(*x, i+1, i+2)
	}
}

// all yields every destination, in order.
func (x index) all() iter.Seq[*dest] {
	return func(yield func(*dest) bool) {
		for _, b := range x {
			for _, d := range b {
				if !yield(d) {
					return
				}
			}
		}
	}
}

// in yields the destinations inside p, in order.
func (x index) in(p netip.Prefix) iter.Seq[*dest] {
	return func(yield func(*dest) bool) {
		if len(x) == 0 {
			return
		}
		first := rtnl.Flow{Dst: p.Masked().Addr()}
		for i := x.block(first); i < len(x); i++ {
			at, _ := slices.BinarySearchFunc(x[i], first, compareDest)
			for _, d := range x[i][at:] {
				if !p.Contains(d.flow.Dst) || !yield(d) {
					return
				}
			}
		}
	}
}
