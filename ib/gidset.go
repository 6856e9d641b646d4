package ib

import (
	"net/netip"
	"slices"
)

// A GIDSet is a set of GIDs that prefixes define. Its zero value is empty.
type GIDSet struct {
	disjoint []netip.Prefix // sorted by address
}

// NewGIDSet returns the set of GIDs that begin with one of prefixes. An IPv4 prefix stands for the
// IPv4-mapped GIDs (::ffff:0:0/96) of its addresses. An IPv6 prefix contains no IPv4-mapped GID,
// not even ::/0.
func NewGIDSet(prefixes []netip.Prefix) GIDSet {
	sorted := make([]netip.Prefix, 0, len(prefixes))
	for _, p := range prefixes {
		sorted = append(sorted, p.Masked())
	}
	slices.SortFunc(sorted, netip.Prefix.Compare) // a prefix sorts behind the shorter one that contains it
	var s GIDSet
	for _, p := range sorted {
		if n := len(s.disjoint); n == 0 || !s.disjoint[n-1].Overlaps(p) {
			s.disjoint = append(s.disjoint, p)
		}
	}
	return s
}

// IsEmpty reports whether no GID is in s.
func (s GIDSet) IsEmpty() bool { return len(s.disjoint) == 0 }

// Contains reports whether g is in s. Its time grows with the logarithm of the number of prefixes,
// and it does not allocate.
func (s GIDSet) Contains(g GID) bool {
	a := g.Addr().Unmap()
	i, found := slices.BinarySearchFunc(s.disjoint, a,
		func(p netip.Prefix, a netip.Addr) int { return p.Addr().Compare(a) })
	if found {
		return true
	}
	return i > 0 && s.disjoint[i-1].Contains(a)
}
