package roce

import (
	"encoding/binary"
	"net/netip"

	"ipoibcm/ib"
	"ipoibcm/wire/sums"
)

// An IPHeader is the IP and UDP headers in front of a BTH, in either family. A
// provider with a socket sees neither header, and builds both for the ICRC, the GRH
// area and captures. The UDP checksum goes out as 0, as RoCEv2 senders do.
type IPHeader struct {
	Src, Dst     netip.Addr // both IPv4 or both IPv6, not IPv4-mapped
	TrafficClass uint8      // TOS on IPv4
	HopLimit     uint8      // TTL on IPv4
	FlowLabel    uint32     // IPv6 only, 20 bits
	ID           uint16     // IPv4 only: identification
	MayFragment  bool       // IPv4 only: DF is clear
	SrcPort      uint16
}

// Len returns the octets of IP and UDP header.
func (h IPHeader) Len() int {
	if h.Src.Is4() {
		return ipv4Len + udpLen
	}
	return ipv6Len + udpLen
}

// Append appends the IP and UDP headers of a packet with n octets of UDP
// payload, BTH through ICRC. n is at most 65507.
func (h IPHeader) Append(b []byte, n int) []byte {
	b = h.appendIP(b, n)
	b = binary.BigEndian.AppendUint16(b, h.SrcPort)
	b = binary.BigEndian.AppendUint16(b, Port)
	b = binary.BigEndian.AppendUint16(b, uint16(n+udpLen))
	return append(b, 0, 0)
}

// PutGRH writes into b[:40] what a UD receive finds in its GRH area: the IPv6
// header, or 20 zero octets and the IPv4 header. n is the length of the UDP
// payload in octets.
func (h IPHeader) PutGRH(b []byte, n int) {
	_ = b[ipv6Len-1]
	if h.Src.Is4() {
		clear(b[:ipv6Len-ipv4Len])
		h.appendIP(b[:ipv6Len-ipv4Len], n)
		return
	}
	h.appendIP(b[:0], n)
}

func (h IPHeader) appendIP(b []byte, n int) []byte {
	if !h.Src.Is4() {
		b = binary.BigEndian.AppendUint32(b, 6<<28|uint32(h.TrafficClass)<<20|h.FlowLabel&0xfffff)
		b = binary.BigEndian.AppendUint16(b, uint16(n+udpLen))
		b = append(b, protoUDP, h.HopLimit)
		src, dst := h.Src.As16(), h.Dst.As16()
		b = append(b, src[:]...)
		return append(b, dst[:]...)
	}
	start := len(b)
	b = append(b, 0x45, h.TrafficClass)
	b = binary.BigEndian.AppendUint16(b, uint16(n+udpLen+ipv4Len))
	b = binary.BigEndian.AppendUint16(b, h.ID)
	frag := uint16(ip4DF)
	if h.MayFragment {
		frag = 0
	}
	b = binary.BigEndian.AppendUint16(b, frag)
	b = append(b, h.HopLimit, protoUDP, 0, 0)
	src, dst := h.Src.As4(), h.Dst.As4()
	b = append(b, src[:]...)
	b = append(b, dst[:]...)
	binary.BigEndian.PutUint16(b[start+10:], ^uint16(sums.Internet(0, b[start:])))
	return b
}

const (
	protoUDP = 17
	ip4DF    = 0x4000
)

// SourcePort returns the UDP source port of a flow, 0xc000 to 0xffff, by the
// generic rule of RoCEv2: folded from the 20-bit flow label, or if that is 0
// from one made of both QPNs. On UD, dst is the destination QPN of the packet.
func SourcePort(flowLabel uint32, src, dst ib.QPN) uint16 {
	fl := flowLabel & 0xfffff
	if fl == 0 {
		v := uint64(src&ib.QPNMask) * uint64(dst&ib.QPNMask)
		v ^= v >> 20
		v ^= v >> 40
		fl = uint32(v) & 0xfffff
	}
	return uint16(fl&0x3fff^fl>>14) | 0xc000
}
