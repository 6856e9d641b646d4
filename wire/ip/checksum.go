package ip

import (
	"encoding/binary"
	"net/netip"
)

// Sum adds the 16-bit words of b, an odd last octet padded with zero, to the
// running one's complement sum. Every piece but the last must have even length.
func Sum(sum uint32, b []byte) uint32 {
	s := uint64(sum)
	for len(b) >= 4 {
		s += uint64(binary.BigEndian.Uint32(b))
		b = b[4:]
	}
	if len(b) >= 2 {
		s += uint64(binary.BigEndian.Uint16(b))
		b = b[2:]
	}
	if len(b) == 1 {
		s += uint64(b[0]) << 8
	}
	for s>>16 != 0 {
		s = s&0xffff + s>>16
	}
	return uint32(s)
}

// Checksum returns the internet checksum of b (RFC 1071): over octets that hold
// their own correct checksum it is 0.
func Checksum(b []byte) uint16 { return ^uint16(Sum(0, b)) }

// Checksum6 returns the checksum of an upper-layer message in IPv6: the
// pseudo-header of RFC 8200 section 8.1, then b.
func Checksum6(src, dst netip.Addr, proto uint8, b []byte) uint16 {
	s, d := src.As16(), dst.As16()
	sum := Sum(Sum(0, s[:]), d[:])
	sum += uint32(len(b)>>16) + uint32(len(b)&0xffff) + uint32(proto)
	return ^uint16(Sum(sum, b))
}
