package datapath

import "net/netip"

// A Table maps destinations to paths by longest prefix. It never changes: With
// and Without return a new one that shares all but the changed path. The zero
// value and nil are empty tables.
type Table struct {
	v4, v6 *node
	n      int
}

type node struct{}

// With returns t with dst leading to p, instead of whatever it led to.
func (t *Table) With(dst netip.Prefix, p *Path) *Table { return t }

// Without returns t without the entry for exactly dst.
func (t *Table) Without(dst netip.Prefix) *Table { return t }

// Lookup returns the path of the longest prefix that holds a, nil if none does.
func (t *Table) Lookup(a netip.Addr) *Path { return nil }

// Len returns the number of entries.
func (t *Table) Len() int { return t.n }

// All calls f for each entry, IPv4 first, in address order, until it is false.
func (t *Table) All(f func(dst netip.Prefix, p *Path) bool) {}
