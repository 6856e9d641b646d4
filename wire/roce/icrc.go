package roce

import (
	"encoding/binary"
	"hash/crc32"
	"net/netip"

	"ipoibcm/wire/sums"
)

// An ICRC is the invariant CRC over the octets seen so far, in the form that
// hash/crc32 passes around: complemented, so that the value after the last
// octet is the one to send. It travels least significant octet first.
//
// A sender calls
//
//	flow.Start(srcPort, udpPayloadLen, 0).BTH(hdr).Update(hdr[BTHLen:]).Update(payload).Put(trailer)
type ICRC uint32

// Update continues c over p, which must not be the BTH (see [ICRC.BTH]).
func (c ICRC) Update(p []byte) ICRC { return ICRC(sums.CRC32(uint32(c), p)) }

// Put writes c, the ICRC of a whole packet, into b[:ICRCLen].
func (c ICRC) Put(b []byte) { binary.LittleEndian.PutUint32(b, uint32(c)) }

// BTH continues c over the BTH in b[:BTHLen], whose octet 4 (FECN, BECN) counts
// as ones whatever it holds.
func (c ICRC) BTH(b []byte) ICRC {
	_ = b[BTHLen-1]
	s := ^uint32(c)
	s = step4(s, binary.LittleEndian.Uint32(b))
	s = step4(s, binary.LittleEndian.Uint32(b[4:])|0xff)
	s = step4(s, binary.LittleEndian.Uint32(b[8:]))
	return ICRC(^s)
}

// Packet continues c over covered, a packet from BTH through pad. It writes octet 4 of covered and restores
// it, so nobody may read covered meanwhile. One fold over all takes less time than the BTH by tables, which
// moreover are seldom in the cache when packets are few.
func (c ICRC) Packet(covered []byte) ICRC {
	if len(covered) < sums.FoldLen {
		return c.BTH(covered).Update(covered[BTHLen:])
	}
	resv8a := covered[4]
	covered[4] = 0xff
	c = c.Update(covered)
	covered[4] = resv8a
	return c
}

// A Flow is the ICRC over the parts of the IP header that do not change between
// the packets of one source and destination address. It is made without
// allocation and cheaply enough to be made per packet; it is immutable.
type Flow struct {
	base uint32 // uncomplemented state behind the UDP header, variable fields zero
	is6  bool
}

// NewFlow returns the Flow of packets from src to dst, two addresses of the same
// family (IPv4-mapped ones count as IPv4). IPv4 packets have DF set.
func NewFlow(src, dst netip.Addr) Flow {
	src, dst = src.Unmap(), dst.Unmap()
	s := uint32(0xdebb20e3) // behind eight octets of ones, the LRH that is not there
	if src.Is4() {
		a, b := src.As4(), dst.As4()
		s = step4(s, 0x0000ff45) // version, IHL; TOS as ones; total length
		s = step4(s, 0x00400000) // identification; DF
		s = step4(s, 0xffff11ff) // TTL as ones, UDP, checksum as ones
		s = step4(s, binary.LittleEndian.Uint32(a[:]))
		s = step4(s, binary.LittleEndian.Uint32(b[:]))
		return Flow{base: udpStep(s)}
	}
	a, b := src.As16(), dst.As16()
	s = step4(s, 0xffffff6f) // version; traffic class and flow label as ones
	s = step4(s, 0xff110000) // length; UDP; hop limit as ones
	for _, addr := range [][16]byte{a, b} {
		for i := 0; i < 16; i += 4 {
			s = step4(s, binary.LittleEndian.Uint32(addr[i:]))
		}
	}
	return Flow{base: udpStep(s), is6: true}
}

// udpStep continues s over a UDP header with zero source port and length.
func udpStep(s uint32) uint32 {
	s = step4(s, uint32(Port>>8|Port&0xff<<8)<<16)
	return step4(s, 0xffff0000) // length; checksum as ones
}

// Start returns the ICRC up to the end of the UDP header. n is the length of
// the UDP payload in octets, BTH through ICRC. id is the IPv4 identification:
// 0, or i for segment i of a UDP_SEGMENT batch; IPv6 ignores it.
func (f Flow) Start(srcPort uint16, n int, id uint16) ICRC {
	// CRC is linear: what a field adds to the state behind the header depends
	// on that field alone.
	udp := uint16(n + udpLen)
	s := f.base ^ at8[0][srcPort>>8] ^ at8[1][srcPort&0xff] ^ at8[4][udp>>8] ^ at8[5][udp&0xff]
	if f.is6 {
		return ICRC(^(s ^ ip6Len[0][udp>>8] ^ ip6Len[1][udp&0xff]))
	}
	total := uint16(n + udpLen + ipv4Len)
	s ^= ip4Len[0][total>>8] ^ ip4Len[1][total&0xff] ^ ip4ID[0][id>>8] ^ ip4ID[1][id&0xff]
	return ICRC(^s)
}

// Sum returns the ICRC of a packet. covered is the packet from BTH through pad, srcPort its UDP source
// port, and id its IPv4 identification, which IPv6 ignores. As with [ICRC.Packet], nobody may read covered
// meanwhile.
func (f Flow) Sum(srcPort uint16, covered []byte, id uint16) ICRC {
	return f.Start(srcPort, len(covered)+ICRCLen, id).Packet(covered)
}

// Verify checks the ICRC of a parsed packet that came from srcPort. A UDP socket hides the IPv4
// identification, which the ICRC covers; Verify returns the only identification with which the ICRC
// is right. ok is false if there is none, or if the ICRC of an IPv6 packet is wrong.
//
// A caller that accepts any id weakens the check from 32 bits to 16. So the caller decides which
// ids to accept, beside the few that our own agents send, and counts them.
func (f Flow) Verify(srcPort uint16, p *Packet) (id uint16, ok bool) {
	d := uint32(f.Sum(srcPort, p.Covered, 0) ^ p.ICRC)
	if d == 0 {
		return 0, true
	}
	if f.is6 {
		return 0, false
	}
	// d is the difference that the identification makes to the ICRC. Run the CRC register backwards
	// over one zero octet for each octet behind the identification, and over the two of the field
	// itself. If an identification caused d, the register then holds just those two octets.
	d = rewind(d, len(p.Covered)+udpLen+ipv4Len-ip4IDOffset)
	if d>>16 != 0 {
		return 0, false
	}
	return uint16(d)<<8 | uint16(d)>>8, true
}

const (
	ipv4Len     = 20
	ipv6Len     = 40
	udpLen      = 8
	ip4IDOffset = 4
)

// Delta tables, one for each octet: entry v is what the value v of the octet adds to
// the state behind the UDP header.
var (
	at8    [6][256]uint32 // UDP header octets 0 to 5; 2 and 3 (port 4791) unused
	ip4Len = deltas(2, ipv4Len+udpLen-2)
	ip4ID  = deltas(2, ipv4Len+udpLen-ip4IDOffset)
	ip6Len = deltas(2, ipv6Len+udpLen-4)
)

func init() {
	copy(at8[:], deltas(6, udpLen))
}

// deltas returns the tables of n octets in a row. There are from octets from the
// start of the first one to the end of the UDP header.
func deltas(n, from int) [][256]uint32 {
	t := make([][256]uint32, n)
	for i := range t {
		for v := range t[i] {
			s := crc32.IEEETable[v]
			for range from - i - 1 {
				s = crc32.IEEETable[byte(s)] ^ s>>8
			}
			t[i][v] = s
		}
	}
	return t
}

// step4 continues the uncomplemented state s over the four octets of v, the
// first in the low bits.
func step4(s, v uint32) uint32 {
	s ^= v
	return slice4[3][byte(s)] ^ slice4[2][byte(s>>8)] ^ slice4[1][byte(s>>16)] ^ slice4[0][s>>24]
}

// slice4[k][v] is the state that octet v leaves after k more zero octets.
var slice4 = func() (t [4][256]uint32) {
	for v := range 256 {
		s := crc32.IEEETable[v]
		for k := range t {
			t[k][v] = s
			s = crc32.IEEETable[byte(s)] ^ s>>8
		}
	}
	return t
}()
