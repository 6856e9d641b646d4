package roce

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"ipoibcm/ib"
	"ipoibcm/wire"
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
	binary.BigEndian.PutUint16(b[start+10:], ^onesSum(b[start:]))
	return b
}

const (
	protoUDP = 17
	ip4DF    = 0x4000
)

// onesSum returns the ones' complement sum of b, an even number of octets.
func onesSum(b []byte) uint16 {
	var s uint32
	for i := 0; i < len(b); i += 2 {
		s += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for s > 0xffff {
		s = s&0xffff + s>>16
	}
	return uint16(s)
}

// ParseIP takes apart an IP packet that carries RoCEv2, as captures hold them:
// header and UDP payload, BTH through ICRC. IPv4 options, IPv6 extension
// headers and fragments are refused; octets behind the packet are ignored.
func ParseIP(b []byte) (h IPHeader, payload []byte, err error) {
	if len(b) < 1 {
		return h, nil, &wire.ShortError{What: "IP header", Need: ipv4Len, Have: 0}
	}
	switch b[0] >> 4 {
	case 4:
		payload, err = h.parse4(b)
	case 6:
		payload, err = h.parse6(b)
	default:
		err = &wire.FieldError{What: "IP header", Field: "version", Value: uint64(b[0] >> 4)}
	}
	if err != nil {
		return IPHeader{}, nil, err
	}
	return h, payload, nil
}

func (h *IPHeader) parse4(b []byte) ([]byte, error) {
	if len(b) < ipv4Len+udpLen {
		return nil, &wire.ShortError{What: "IPv4 and UDP headers", Need: ipv4Len + udpLen, Have: len(b)}
	}
	if b[0] != 0x45 {
		return nil, &wire.FieldError{What: "IPv4 header", Field: "header length", Value: uint64(b[0] & 0x0f)}
	}
	frag := binary.BigEndian.Uint16(b[6:])
	if frag&^ip4DF != 0 {
		return nil, &wire.FieldError{What: "IPv4 header", Field: "fragment", Value: uint64(frag)}
	}
	if b[9] != protoUDP {
		return nil, &wire.FieldError{What: "IPv4 header", Field: "protocol", Value: uint64(b[9])}
	}
	if onesSum(b[:ipv4Len]) != 0xffff {
		return nil, &wire.FieldError{What: "IPv4 header", Field: "checksum", Value: uint64(binary.BigEndian.Uint16(b[10:]))}
	}
	h.TrafficClass, h.HopLimit = b[1], b[8]
	h.ID, h.MayFragment = binary.BigEndian.Uint16(b[4:]), frag == 0
	h.Src, h.Dst = netip.AddrFrom4([4]byte(b[12:16])), netip.AddrFrom4([4]byte(b[16:20]))
	return h.parseUDP(b, ipv4Len, int(binary.BigEndian.Uint16(b[2:])))
}

func (h *IPHeader) parse6(b []byte) ([]byte, error) {
	if len(b) < ipv6Len+udpLen {
		return nil, &wire.ShortError{What: "IPv6 and UDP headers", Need: ipv6Len + udpLen, Have: len(b)}
	}
	if b[6] != protoUDP {
		return nil, &wire.FieldError{What: "IPv6 header", Field: "next header", Value: uint64(b[6])}
	}
	v := binary.BigEndian.Uint32(b)
	h.TrafficClass, h.FlowLabel, h.HopLimit = uint8(v>>20), v&0xfffff, b[7]
	h.Src, h.Dst = netip.AddrFrom16([16]byte(b[8:24])), netip.AddrFrom16([16]byte(b[24:40]))
	if h.Src.Is4In6() || h.Dst.Is4In6() {
		// Never on a wire, where they are IPv4 packets; see IPHeader.
		return nil, fmt.Errorf("IPv6 header: %v to %v are no IPv6 addresses", h.Src, h.Dst)
	}
	return h.parseUDP(b, ipv6Len, ipv6Len+int(binary.BigEndian.Uint16(b[4:])))
}

// parseUDP reads the UDP header at offset off of an IP packet of total octets.
func (h *IPHeader) parseUDP(b []byte, off, total int) ([]byte, error) {
	if len(b) < total {
		return nil, &wire.ShortError{What: "IP packet", Need: total, Have: len(b)}
	}
	if p := binary.BigEndian.Uint16(b[off+2:]); p != Port {
		return nil, &wire.FieldError{What: "UDP header", Field: "destination port", Value: uint64(p)}
	}
	n := int(binary.BigEndian.Uint16(b[off+4:]))
	if n < udpLen || off+n != total {
		return nil, &wire.FieldError{What: "UDP header", Field: "length", Value: uint64(n)}
	}
	h.SrcPort = binary.BigEndian.Uint16(b[off:])
	return b[off+udpLen : total], nil
}

// Seal computes the ICRC of a whole IP packet and writes it into the last four
// octets. It is for tests and synthesised captures; senders use a [Flow].
func Seal(ip []byte) error {
	c, payload, err := sumIP(ip)
	if err != nil {
		return err
	}
	c.Put(payload[len(payload)-ICRCLen:])
	return nil
}

// CheckIP reports whether a whole IP packet has the right ICRC.
func CheckIP(ip []byte) (bool, error) {
	c, payload, err := sumIP(ip)
	if err != nil {
		return false, err
	}
	return binary.LittleEndian.Uint32(payload[len(payload)-ICRCLen:]) == uint32(c), nil
}

func sumIP(ip []byte) (ICRC, []byte, error) {
	h, payload, err := ParseIP(ip)
	if err != nil {
		return 0, nil, err
	}
	if len(payload) < BTHLen+ICRCLen {
		return 0, nil, &wire.ShortError{What: "RoCE packet", Need: BTHLen + ICRCLen, Have: len(payload)}
	}
	covered := payload[:len(payload)-ICRCLen]
	if h.MayFragment {
		return sumNoDF(ip, covered), payload, nil
	}
	return NewFlow(h.Src, h.Dst).Sum(h.SrcPort, covered, h.ID), payload, nil
}

// sumNoDF is the ICRC of an IPv4 packet with DF clear, which no [Flow] makes.
func sumNoDF(ip, covered []byte) ICRC {
	s := uint32(0xdebb20e3)
	for i := 0; i < ipv4Len+udpLen; i += 4 {
		v := binary.LittleEndian.Uint32(ip[i:])
		switch i {
		case 0:
			v |= 0xff00 // TOS
		case 8:
			v |= 0xffff00ff // TTL, checksum
		case ipv4Len + 4:
			v |= 0xffff0000 // UDP checksum
		}
		s = step4(s, v)
	}
	return ICRC(^s).BTH(covered).Update(covered[BTHLen:])
}

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
