package ipoib

import (
	"net/netip"
	"slices"
)

// addrs are the addresses of the device, each with its prefix length: the kernel
// lets one address be there with several.
type addrs struct {
	prefixes map[netip.Addr][]netip.Prefix // sorted
	own      netip.Prefix                  // the link-local address that we put there
	ownGone  bool                          // and that has been removed since
}

// add reports whether p is new.
func (s *addrs) add(p netip.Prefix) bool {
	have := s.prefixes[p.Addr()]
	i, found := slices.BinarySearchFunc(have, p, netip.Prefix.Compare)
	if !found {
		s.prefixes[p.Addr()] = slices.Insert(have, i, p)
	}
	return !found
}

// remove reports whether p was there.
func (s *addrs) remove(p netip.Prefix) bool {
	have := s.prefixes[p.Addr()]
	i, found := slices.BinarySearchFunc(have, p, netip.Prefix.Compare)
	if !found {
		return false
	}
	if len(have) == 1 {
		delete(s.prefixes, p.Addr())
		return true
	}
	s.prefixes[p.Addr()] = slices.Delete(have, i, i+1)
	return true
}

func (s *addrs) has(a netip.Addr) bool { return len(s.prefixes[a]) > 0 }

// sorted returns all in order.
func (s *addrs) sorted() []netip.Prefix {
	out := make([]netip.Prefix, 0, len(s.prefixes))
	for _, ps := range s.prefixes { // sorted below
		out = append(out, ps...)
	}
	slices.SortFunc(out, netip.Prefix.Compare)
	return out
}
