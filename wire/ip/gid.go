package ip

import (
	"net/netip"

	"ipoibcm/ib"
)

// InterfaceID returns the interface identifier of a port (RFC 4391 section 8):
// the low 64 bits of its GID with the u bit (0x02 of the first octet) set, as
// Linux does it.
func InterfaceID(g ib.GID) (id [8]byte) {
	copy(id[:], g[8:])
	id[0] |= 0x02
	return id
}

// LinkLocal returns the link-local address of an interface with GID g:
// fe80::/64 and [InterfaceID].
func LinkLocal(g ib.GID) netip.Addr {
	a := [16]byte{0: 0xfe, 1: 0x80}
	id := InterfaceID(g)
	copy(a[8:], id[:])
	return netip.AddrFrom16(a)
}

// SolicitedNode returns the solicited-node group ff02::1:ffxx:xxxx of the IPv6
// address a (RFC 4291 section 2.7.1).
func SolicitedNode(a netip.Addr) netip.Addr {
	b := a.As16()
	g := [16]byte{0: 0xff, 1: 0x02, 11: 0x01, 12: 0xff}
	copy(g[13:], b[13:])
	return netip.AddrFrom16(g)
}

// The groups of all routers and of all nodes on a link.
var (
	AllRouters4 = netip.AddrFrom4([4]byte{224, 0, 0, 2}) // 224.0.0.2
	AllRouters6 = netip.IPv6LinkLocalAllRouters()        // ff02::2
	AllSystems  = netip.AddrFrom4([4]byte{224, 0, 0, 1}) // 224.0.0.1
	AllNodes    = netip.IPv6LinkLocalAllNodes()          // ff02::1
)
