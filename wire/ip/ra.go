package ip

import "encoding/binary"

const (
	raFixedLen = 16 // octets of a router advertisement before its options
	optMTU     = 5  // RFC 4861 section 4.6.4
)

// RAMTU returns the MTU option, in octets, of the router advertisement in the
// IPv6 packet pkt. ok is false if pkt is no router advertisement, has extension
// headers, is cut short, or has no such option. The checksum is not checked.
func RAMTU(pkt []byte) (mtu uint32, ok bool) {
	p, err := AsV6(pkt)
	if err != nil || p.NextHeader() != ProtoICMPv6 || len(p) < V6HeaderLen+raFixedLen || p[V6HeaderLen] != icmp6RA {
		return 0, false
	}
	for o := p[V6HeaderLen+raFixedLen:]; len(o) >= 8; {
		n := int(o[1]) * 8
		if n == 0 || n > len(o) {
			return 0, false
		}
		if o[0] == optMTU && n == 8 {
			return binary.BigEndian.Uint32(o[4:]), true
		}
		o = o[n:]
	}
	return 0, false
}
