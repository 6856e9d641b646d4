package ip

import "encoding/binary"

// The two parts of a TOS or traffic class (RFC 2474 section 3, RFC 3168 section 5).
const (
	DSCPMask = 0xfc
	ECNMask  = 3
)

// ECN codepoints, the low two bits of TOS and traffic class (RFC 3168 section 5).
const (
	notECT = 0
	ce     = 3
)

// TrafficClass returns the TOS of an IPv4 packet, or the traffic class of an IPv6 packet.
// The header in pkt must be whole.
func TrafficClass(pkt []byte) uint8 {
	if pkt[0]>>4 == 4 {
		return pkt[1]
	}
	return pkt[0]<<4 | pkt[1]>>4
}

// ECNCapable reports whether an IPv4 or IPv6 packet may be marked instead of dropped: its
// sender set an ECT codepoint, or a router has set CE already. The header in pkt must be whole.
func ECNCapable(pkt []byte) bool {
	return TrafficClass(pkt)&ECNMask != notECT
}

// SetCE marks a packet for which [ECNCapable] is true as having met congestion
// (RFC 3168 section 5). It updates the checksum of an IPv4 header (RFC 1624).
func SetCE(pkt []byte) {
	if pkt[0]>>4 != 4 {
		pkt[1] |= ce << 4
		return
	}
	sum := uint32(^binary.BigEndian.Uint16(pkt[10:])) + uint32(^binary.BigEndian.Uint16(pkt))
	pkt[1] |= ce
	sum += uint32(binary.BigEndian.Uint16(pkt))
	sum = sum&0xffff + sum>>16
	binary.BigEndian.PutUint16(pkt[10:], ^uint16(sum&0xffff+sum>>16))
}
