package ip

import (
	"net/netip"

	"ipoibcm/wire/sums"
)

// Sum adds the 16-bit words of b, an odd last octet padded with zero, to the
// running one's complement sum. Every piece but the last must have even length.
func Sum(sum uint32, b []byte) uint32 { return sums.Internet(sum, b) }

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
