package group

import (
	"maps"
	"net/netip"
	"slices"

	"ipoibcm/ib"
	"ipoibcm/wire/ip"
)

// A Table is what the data path needs to know about groups. It never changes, so any goroutine may
// read it. When something changes the Machine publishes another Table.
type Table struct {
	pkey      ib.PKey
	scope     uint8
	underlay4 ib.GID // carries every group; zero if each has its own MGID
	peers     []ib.GID
	list      bool                    // copies go to peers instead of multicast, even if there are no peers
	wanted    map[netip.Addr]struct{} // IP groups we have joined
	broadcast map[netip.Addr]struct{} // subnet broadcasts
}

// MGIDFor returns the GID to which a packet for dst is sent on the UD QP: the MGID of a group, the
// broadcast-GID for a limited or subnet broadcast, and always the one underlay group on an IPv4
// underlay. ok is false if dst is unicast, or a group that never leaves the host. If
// [Table.Replicate] returns copies as true, the packet is sent to each of the peers instead.
func (t *Table) MGIDFor(dst netip.Addr) (g ib.GID, ok bool) {
	if t.isSubnetBroadcast(dst) {
		dst = ip.LimitedBroadcast
	}
	g, ok = MGID(dst, t.pkey, t.scope)
	if ok && !t.underlay4.IsZero() {
		g = t.underlay4
	}
	return g, ok
}

// Broadcast returns the GID of the broadcast group, to which ARP requests and Neighbor
// Solicitations for resolution are sent.
func (t *Table) Broadcast() ib.GID {
	if !t.underlay4.IsZero() {
		return t.underlay4
	}
	return BroadcastGID(t.pkey, t.scope)
}

// IsGroup reports whether dst is multicast, or a limited or subnet broadcast: such packets are sent
// by UD whatever connections there are (RFC 4755 section 2.1).
func (t *Table) IsGroup(dst netip.Addr) bool {
	return ip.IsGroup(dst) || t.isSubnetBroadcast(dst)
}

func (t *Table) isSubnetBroadcast(dst netip.Addr) bool {
	if !dst.Is4() || len(t.broadcast) == 0 {
		return false
	}
	_, ok := t.broadcast[dst]
	return ok
}

// SubnetBroadcasts lists the broadcast addresses of the subnets that the device
// is in, in address order.
func (t *Table) SubnetBroadcasts() []netip.Addr {
	return slices.SortedFunc(maps.Keys(t.broadcast), netip.Addr.Compare)
}

// Wanted reports whether we take an arriving IP packet for dst: one for a group only if we are
// joined to that group, one for any other address always. The check is needed because all groups of
// an IPv4 underlay arrive by one group, several IPv6 groups share an MGID, and the kernel also
// gives sockets packets of groups that only other sockets on the host have joined.
func (t *Table) Wanted(dst netip.Addr) bool {
	if !ip.IsGroup(dst) {
		return true
	}
	_, ok := t.wanted[dst]
	return ok || dst == ip.LimitedBroadcast
}

// Replicate returns the GIDs of the peers if the underlay has no multicast: then each peer
// gets its own copy of a multicast packet, by unicast UD to QPN 0xffffff. copies is false if
// the underlay has multicast. The caller must not change the list.
func (t *Table) Replicate() (peers []ib.GID, copies bool) { return t.peers, t.list }

// Groups lists the IP groups that are wanted, in address order. The limited broadcast address
// is one of them, subnet broadcasts are not.
func (t *Table) Groups() []netip.Addr {
	return slices.SortedFunc(maps.Keys(t.wanted), netip.Addr.Compare)
}
