package ipoib

import (
	"net/netip"
	"slices"
	"time"
)

// addrs are the addresses of the device, each with its prefix length: the kernel
// lets one address be there with several.
type addrs struct {
	prefixes map[netip.Addr][]netip.Prefix // sorted
	own      netip.Prefix                  // the link-local address that we put there
	ownGone  bool                          // and that has been removed since
	claims   []claim                       // oldest first
}

// A claim is an address that a VRRP advertisement of this host named before the device
// had it: the program that sends them adds its addresses and advertises them at once, and
// we hear of the two in any order.
type claim struct {
	addr netip.Addr
	at   time.Time
}

// claimFor is how long a claim holds, and maxClaims how many there may be.
const (
	claimFor  = time.Second
	maxClaims = 64
)

// claim notes a claim to a.
func (s *addrs) claim(a netip.Addr, now time.Time) {
	s.unclaim(a, now)
	if len(s.claims) == maxClaims {
		s.claims = slices.Delete(s.claims, 0, 1)
	}
	s.claims = append(s.claims, claim{a, now})
}

// unclaim takes away the claim to a, and those that are too old, and reports whether
// there was one.
func (s *addrs) unclaim(a netip.Addr, now time.Time) (found bool) {
	s.claims = slices.DeleteFunc(s.claims, func(c claim) bool {
		fresh := now.Sub(c.at) < claimFor
		found = found || fresh && c.addr == a
		return !fresh || c.addr == a
	})
	return found
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
