package fib

import (
	"iter"
	"net/netip"

	"github.com/tidwall/btree"

	"ipoibcm/rtnl"
)

// An entry is a member of an index, found by its flow.
type entry struct{ flow rtnl.Flow }

func (e *entry) key() *rtnl.Flow { return &e.flow }

// An index is a set of entries in the order of their flows. It finds those inside a prefix directly.
type index[T interface{ key() *rtnl.Flow }] struct {
	*btree.BTreeG[T]
	probe T // scratch entry for searches
}

func newIndex[T interface{ key() *rtnl.Flow }](probe T) index[T] {
	less := func(a, b T) bool { return a.key().Compare(*b.key()) < 0 }
	return index[T]{btree.NewBTreeGOptions(less, btree.Options{NoLocks: true}), probe}
}

// get returns the entry of f, the zero T if there is none.
func (x index[T]) get(f rtnl.Flow) (e T) {
	*x.probe.key() = f
	e, _ = x.Get(x.probe)
	return e
}

// in yields the entries inside p, in order, or all if p is zero. The caller must not add or delete any meanwhile.
func (x index[T]) in(p netip.Prefix) iter.Seq[T] {
	return func(yield func(T) bool) {
		*x.probe.key() = rtnl.Flow{Dst: p.Masked().Addr()}
		x.Ascend(x.probe, func(e T) bool { return (!p.IsValid() || p.Contains(e.key().Dst)) && yield(e) })
	}
}
