package ip

import "net/netip"

// ProtoVRRP is the protocol of VRRP advertisements (RFC 9568).
const ProtoVRRP = 112

const (
	vrrpHeaderLen = 8
	vrrpAdvert    = 1
)

// The groups to which routers send VRRP advertisements.
var vrrp4, vrrp6 = netip.AddrFrom4([4]byte{224, 0, 0, 18}), netip.AddrFrom16([16]byte{0: 0xff, 1: 2, 15: 0x12})

// IsVRRP reports whether pkt goes to the group of VRRP. It reads the destination
// only.
func IsVRRP(pkt []byte) bool {
	dst, ok := Dst(pkt)
	return ok && (dst == vrrp4 || dst == vrrp6)
}

// AppendVirtual appends to dst the virtual addresses that the VRRP advertisement in pkt, version 2
// or 3, lists. It appends nothing if pkt is no such advertisement, is broken, or has priority 0:
// then its sender gives up the addresses.
func AppendVirtual(dst []netip.Addr, pkt []byte) []netip.Addr {
	var m []byte
	addrLen := 4
	if p, err := AsV4(pkt); err == nil {
		if p.Protocol() != ProtoVRRP || p.MF() || p.FragOffset() != 0 {
			return dst
		}
		m = p.Payload()
	} else if p, err := AsV6(pkt); err == nil {
		proto, off, first, ok := p.Upper()
		if !ok || !first || proto != ProtoVRRP || off > len(p) {
			return dst
		}
		m, addrLen = p[off:], 16
	}
	if len(m) < vrrpHeaderLen || m[0]&15 != vrrpAdvert || m[2] == 0 {
		return dst
	}
	if v := m[0] >> 4; v != 3 && (v != 2 || addrLen != 4) {
		return dst
	}
	n, m := int(m[3]), m[vrrpHeaderLen:]
	if len(m) < n*addrLen { // behind them there may be authentication data
		return dst
	}
	for ; n > 0; n, m = n-1, m[addrLen:] {
		a, _ := netip.AddrFromSlice(m[:addrLen])
		dst = append(dst, a)
	}
	return dst
}
