package ipoib

import (
	"net/netip"
	"slices"
)

// addrs are the addresses of the device, each with its prefix length: the kernel
// lets one address be there with several.
type addrs map[netip.Addr][]netip.Prefix // sorted

// add reports whether p is new.
func (s addrs) add(p netip.Prefix) bool {
	have := s[p.Addr()]
	i, found := slices.BinarySearchFunc(have, p, netip.Prefix.Compare)
	if !found {
		s[p.Addr()] = slices.Insert(have, i, p)
	}
	return !found
}

// remove reports whether p was there.
func (s addrs) remove(p netip.Prefix) bool {
	have := s[p.Addr()]
	i, found := slices.BinarySearchFunc(have, p, netip.Prefix.Compare)
	if !found {
		return false
	}
	if len(have) == 1 {
		delete(s, p.Addr())
		return true
	}
	s[p.Addr()] = slices.Delete(have, i, i+1)
	return true
}

func (s addrs) has(a netip.Addr) bool { return len(s[a]) > 0 }

// sorted returns all in order.
func (s addrs) sorted() []netip.Prefix {
	out := make([]netip.Prefix, 0, len(s))
	for _, ps := range s { // sorted below
		out = append(out, ps...)
	}
	slices.SortFunc(out, netip.Prefix.Compare)
	return out
}
