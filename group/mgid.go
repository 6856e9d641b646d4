package group

import (
	"encoding/binary"
	"net/netip"

	"ipoibcm/ib"
	"ipoibcm/wire/ip"
)

// The signatures in the second pair of octets of an MGID (RFC 4391 section 4).
const (
	signature4 = 0x401b
	signature6 = 0x601b
)

// DefaultScope is link-local, which RFC 4391 section 4.1 recommends.
const DefaultScope = 2

// MGID returns the MGID of the IPv4 or IPv6 group a on partition pkey (the
// membership bit is set in the MGID, RFC 4391 section 4.1) with the given scope nibble.
// 255.255.255.255 gives the broadcast-GID. ok is false if a is no group, or an
// IPv6 group that never leaves its node (scopes 0 and 1).
func MGID(a netip.Addr, pkey ib.PKey, scope uint8) (g ib.GID, ok bool) {
	a = a.Unmap()
	if !ip.IsGroup(a) {
		return ib.GID{}, false
	}
	g[0], g[1] = 0xff, 0x10|scope&0xf // transient
	binary.BigEndian.PutUint16(g[4:], uint16(pkey|ib.PKeyFull))
	if a.Is4() {
		binary.BigEndian.PutUint16(g[2:], signature4)
		b := a.As4()
		copy(g[12:], b[:])
		if a != ip.LimitedBroadcast {
			g[12] &= 0x0f // only the low 28 bits: the other four are the same in all groups
		}
		return g, true
	}
	b := a.As16()
	if b[1]&0xf <= 1 {
		return ib.GID{}, false
	}
	binary.BigEndian.PutUint16(g[2:], signature6)
	copy(g[6:], b[6:])
	return g, true
}

// BroadcastGID returns the MGID of the link's broadcast group.
func BroadcastGID(pkey ib.PKey, scope uint8) ib.GID {
	g, _ := MGID(ip.LimitedBroadcast, pkey, scope)
	return g
}

// UnderlayGroup4 returns the one group that carries all others if the
// underlay is IPv4: 239.192.p.q, where p.q is the P_Key with its membership bit.
// RoCEv2 has no way to put an IPoIB MGID into an IPv4 header.
func UnderlayGroup4(pkey ib.PKey) netip.Addr {
	pkey |= ib.PKeyFull
	return netip.AddrFrom4([4]byte{239, 192, byte(pkey >> 8), byte(pkey)})
}
