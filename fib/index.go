package fib

import (
	"iter"
	"net/netip"
	"slices"

	"ipoibcm/rtnl"
)

// maxBlock is how many entries one block of an index holds.
const maxBlock = 256

// An index is a set of entries in the order of their flows, for what a prefix holds
// to be found without looking at the others. It is a list of sorted blocks, none of
// them empty.
type index[T interface{ key() rtnl.Flow }] [][]T

// find returns the block that f is or belongs in, and where.
func (x index[T]) find(f rtnl.Flow) (i, at int, found bool) {
	i, found = slices.BinarySearchFunc(x, f, func(b []T, f rtnl.Flow) int { return b[0].key().Compare(f) })
	if found || i == 0 {
		return i, 0, found
	}
	at, found = slices.BinarySearchFunc(x[i-1], f, func(e T, f rtnl.Flow) int { return e.key().Compare(f) })
	return i - 1, at, found
}

// get returns the entry of f; the zero T if there is none.
func (x index[T]) get(f rtnl.Flow) (e T) {
	if i, at, found := x.find(f); found {
		return x[i][at]
	}
	return e
}

// add adds e, whose flow is not there.
func (x *index[T]) add(e T) {
	if len(*x) == 0 {
		*x = index[T]{{e}}
		return
	}
	i, at, _ := x.find(e.key())
	b := slices.Insert((*x)[i], at, e)
	if len(b) > maxBlock { // each half has room of its own
		*x = slices.Insert(*x, i+1, append(make([]T, 0, maxBlock), b[maxBlock/2:]...))
		b = slices.Clone(b[:maxBlock/2])
	}
	(*x)[i] = b
}

// remove takes e out, which is there.
func (x *index[T]) remove(e T) {
	i, at, _ := x.find(e.key())
	b := slices.Delete((*x)[i], at, at+1)
	if i+1 < len(*x) && len(b)+len((*x)[i+1]) <= maxBlock/2 { // few blocks for few entries
		b = append(b, (*x)[i+1]...)
		*x = slices.Delete(*x, i+1, i+2)
	}
	if (*x)[i] = b; len(b) == 0 {
		*x = slices.Delete(*x, i, i+1)
	}
}

// in yields the entries inside p, in order; all with a zero p.
func (x index[T]) in(p netip.Prefix) iter.Seq[T] {
	return func(yield func(T) bool) {
		i, at, _ := x.find(rtnl.Flow{Dst: p.Masked().Addr()})
		for ; i < len(x); i, at = i+1, 0 {
			for _, e := range x[i][at:] {
				if p.IsValid() && !p.Contains(e.key().Dst) || !yield(e) {
					return
				}
			}
		}
	}
}
