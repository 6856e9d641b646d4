package ipoib

import (
	"maps"
	"net/netip"
	"slices"
	"time"
)

// addrs are the addresses of the device, each with its prefix lengths: the kernel
// allows one address with several.
type addrs struct {
	prefixes map[netip.Addr][]netip.Prefix // sorted
	own      netip.Prefix                  // the link-local address that we put on the device
	ownGone  bool                          // own has been removed since
	claims   []claim                       // oldest first
}

// A claim is an address that a VRRP advertisement of this host named before the device
// had it: a VRRP program adds its addresses and advertises them at the same time, and
// we hear of the two in any order.
type claim struct {
	addr netip.Addr
	at   time.Time
}

// claimFor is how long a claim holds. maxClaims bounds the claims; the oldest makes room.
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

// unclaim removes the claim to a and all claims that are too old, and reports whether there
// was a claim to a that still held.
func (s *addrs) unclaim(a netip.Addr, now time.Time) (found bool) {
	s.claims = slices.DeleteFunc(s.claims, func(c claim) bool {
		fresh := now.Sub(c.at) < claimFor
		found = found || fresh && c.addr == a
		return !fresh || c.addr == a
	})
	return found
}

// add adds p and reports whether it is new.
func (s *addrs) add(p netip.Prefix) bool {
	have := s.prefixes[p.Addr()]
	i, found := slices.BinarySearchFunc(have, p, netip.Prefix.Compare)
	if !found {
		s.prefixes[p.Addr()] = slices.Insert(have, i, p)
	}
	return !found
}

// remove removes p and reports whether it was there.
func (s *addrs) remove(p netip.Prefix) bool {
	have := s.prefixes[p.Addr()]
	i, found := slices.BinarySearchFunc(have, p, netip.Prefix.Compare)
	if !found {
		return false
	}
	if have = slices.Delete(have, i, i+1); len(have) == 0 {
		delete(s.prefixes, p.Addr())
	} else {
		s.prefixes[p.Addr()] = have
	}
	return true
}

func (s *addrs) has(a netip.Addr) bool { return len(s.prefixes[a]) > 0 }

// sorted returns all prefixes in order.
func (s *addrs) sorted() []netip.Prefix {
	all := slices.Concat(slices.Collect(maps.Values(s.prefixes))...)
	slices.SortFunc(all, netip.Prefix.Compare)
	return all
}
