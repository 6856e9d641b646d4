package datapath

import (
	"encoding/binary"
	"math/bits"
	"net/netip"
)

// A Table maps destinations to paths by longest prefix. It never changes: With
// and Without return a new one that shares all but the changed path. The zero
// value and nil are empty tables.
//
// It is a binary trie whose chains of single children are folded into one node,
// so that a lookup visits as many nodes as there are nested prefixes and forks
// on its way, not as many as there are bits.
type Table struct {
	v4, v6 *node
	n      int
}

// A key is an address, its first bit the highest of hi. IPv4 fills 32 bits.
type key struct{ hi, lo uint64 }

type node struct {
	key   key   // bits beyond len are zero
	len   uint8 // bits
	path  *Path // nil: only a fork
	child [2]*node
}

// With returns t with dst leading to p, instead of whatever it led to.
func (t *Table) With(dst netip.Prefix, p *Path) *Table {
	if !dst.IsValid() || p == nil {
		panic("datapath: table entry without prefix or path")
	}
	nt := t.clone()
	added := false
	r, k, n := nt.root(dst)
	*r = insert(*r, k, n, p, &added)
	if added {
		nt.n++
	}
	return nt
}

// Without returns t without the entry for exactly dst.
func (t *Table) Without(dst netip.Prefix) *Table {
	nt := t.clone()
	removed := false
	r, k, n := nt.root(dst)
	*r = remove(*r, k, n, &removed)
	if !removed {
		return t
	}
	nt.n--
	return nt
}

// Lookup returns the path of the longest prefix that holds a, nil if none does.
func (t *Table) Lookup(a netip.Addr) *Path {
	if t == nil || !a.IsValid() {
		return nil
	}
	if a = a.Unmap(); a.Is4() {
		b := a.As4()
		return t.lookup4(b[:])
	}
	b := a.As16()
	return t.lookup6(b[:])
}

// Len returns the number of entries.
func (t *Table) Len() int {
	if t == nil {
		return 0
	}
	return t.n
}

// All calls f for each entry, IPv4 first, in address order, until it is false.
func (t *Table) All(f func(dst netip.Prefix, p *Path) bool) {
	if t != nil {
		_ = t.v4.walk(true, f) && t.v6.walk(false, f)
	}
}

func (t *Table) lookup4(b []byte) *Path {
	if t == nil {
		return nil
	}
	return t.v4.lookup(key{hi: uint64(binary.BigEndian.Uint32(b)) << 32})
}

func (t *Table) lookup6(b []byte) *Path {
	if t == nil {
		return nil
	}
	return t.v6.lookup(key{binary.BigEndian.Uint64(b), binary.BigEndian.Uint64(b[8:])})
}

func (t *Table) clone() *Table {
	if t == nil {
		return &Table{}
	}
	c := *t
	return &c
}

func (t *Table) root(dst netip.Prefix) (**node, key, uint8) {
	dst = dst.Masked()
	if dst.Addr().Is4() {
		b := dst.Addr().As4()
		return &t.v4, key{hi: uint64(binary.BigEndian.Uint32(b[:])) << 32}, uint8(dst.Bits())
	}
	b := dst.Addr().As16()
	return &t.v6, key{binary.BigEndian.Uint64(b[:]), binary.BigEndian.Uint64(b[8:])}, uint8(dst.Bits())
}

func (n *node) lookup(k key) (best *Path) {
	for n != nil && k.common(n.key) >= n.len {
		if n.path != nil {
			best = n.path
		}
		n = n.child[k.bit(n.len)] // nil below the longest prefix
	}
	return best
}

func insert(n *node, k key, length uint8, p *Path, added *bool) *node {
	if n == nil {
		*added = true
		return &node{key: k, len: length, path: p}
	}
	c := min(k.common(n.key), n.len, length)
	switch {
	case c == n.len && c == length:
		m := *n
		*added = m.path == nil
		m.path = p
		return &m
	case c == n.len:
		m := *n
		b := k.bit(c)
		m.child[b] = insert(m.child[b], k, length, p, added)
		return &m
	case c == length:
		*added = true
		m := &node{key: k, len: length, path: p}
		m.child[n.key.bit(c)] = n
		return m
	default:
		*added = true
		m := &node{key: k.masked(c), len: c}
		m.child[n.key.bit(c)] = n
		m.child[k.bit(c)] = &node{key: k, len: length, path: p}
		return m
	}
}

func remove(n *node, k key, length uint8, removed *bool) *node {
	if n == nil || n.len > length || k.common(n.key) < n.len {
		return n
	}
	m := *n
	if n.len == length {
		*removed = m.path != nil
		m.path = nil
	} else {
		b := k.bit(n.len)
		m.child[b] = remove(m.child[b], k, length, removed)
	}
	if !*removed {
		return n
	}
	if m.path == nil { // a fork is needed only between two
		if m.child[0] == nil {
			return m.child[1]
		}
		if m.child[1] == nil {
			return m.child[0]
		}
	}
	return &m
}

func (n *node) walk(v4 bool, f func(netip.Prefix, *Path) bool) bool {
	if n == nil {
		return true
	}
	if n.path != nil && !f(n.prefix(v4), n.path) {
		return false
	}
	return n.child[0].walk(v4, f) && n.child[1].walk(v4, f)
}

func (n *node) prefix(v4 bool) netip.Prefix {
	var b [16]byte
	binary.BigEndian.PutUint64(b[:], n.key.hi)
	binary.BigEndian.PutUint64(b[8:], n.key.lo)
	if v4 {
		return netip.PrefixFrom(netip.AddrFrom4([4]byte(b[:4])), int(n.len))
	}
	return netip.PrefixFrom(netip.AddrFrom16(b), int(n.len))
}

// bit returns bit i; beyond the last it is 0, where no node has a child.
func (k key) bit(i uint8) uint8 {
	if i < 64 {
		return uint8(k.hi >> (63 - i) & 1)
	}
	return uint8(k.lo >> ((127 - i) & 63) & 1)
}

// common returns how many leading bits k and j share.
func (k key) common(j key) uint8 {
	if x := k.hi ^ j.hi; x != 0 {
		return uint8(bits.LeadingZeros64(x))
	}
	return uint8(64 + bits.LeadingZeros64(k.lo^j.lo))
}

func (k key) masked(n uint8) key {
	if n <= 64 {
		return key{hi: k.hi &^ (^uint64(0) >> n)}
	}
	return key{k.hi, k.lo &^ (^uint64(0) >> (n - 64))}
}
