// Package rocetest reads and seals whole IP packets that carry RoCEv2, for tests. It computes the
// ICRC as IBA annex A17.3.3 defines it, over a packet with ones where routers may write, and
// shares no code for that with [roce.Flow].
package rocetest

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"net/netip"

	"ipoibcm/wire"
	"ipoibcm/wire/ip"
	"ipoibcm/wire/roce"
)

const (
	ipv4Len, ipv6Len, udpLen = 20, 40, 8

	protoUDP = 17
	ip4DF    = 0x4000
)

// ParseIP takes apart an IP packet that carries RoCEv2, as captures hold them:
// header and UDP payload, BTH through ICRC. IPv4 options, IPv6 extension
// headers and fragments are refused; octets behind the packet are ignored.
func ParseIP(b []byte) (h roce.IPHeader, payload []byte, err error) {
	if len(b) < 1 {
		return h, nil, &wire.ShortError{What: "IP header", Need: ipv4Len, Have: 0}
	}
	switch b[0] >> 4 {
	case 4:
		payload, err = parse4(&h, b)
	case 6:
		payload, err = parse6(&h, b)
	default:
		err = &wire.FieldError{What: "IP header", Field: "version", Value: uint64(b[0] >> 4)}
	}
	if err != nil {
		return roce.IPHeader{}, nil, err
	}
	return h, payload, nil
}

func parse4(h *roce.IPHeader, b []byte) ([]byte, error) {
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
	if ip.Checksum(b[:ipv4Len]) != 0 {
		return nil, &wire.FieldError{What: "IPv4 header", Field: "checksum", Value: uint64(binary.BigEndian.Uint16(b[10:]))}
	}
	h.TrafficClass, h.HopLimit = b[1], b[8]
	h.ID, h.MayFragment = binary.BigEndian.Uint16(b[4:]), frag == 0
	h.Src, h.Dst = netip.AddrFrom4([4]byte(b[12:16])), netip.AddrFrom4([4]byte(b[16:20]))
	return parseUDP(h, b, ipv4Len, int(binary.BigEndian.Uint16(b[2:])))
}

func parse6(h *roce.IPHeader, b []byte) ([]byte, error) {
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
		// Never on a wire, where they are IPv4 packets; see [roce.IPHeader].
		return nil, fmt.Errorf("IPv6 header: %v to %v are no IPv6 addresses", h.Src, h.Dst)
	}
	return parseUDP(h, b, ipv6Len, ipv6Len+int(binary.BigEndian.Uint16(b[4:])))
}

// parseUDP reads the UDP header at offset off of an IP packet of total octets.
func parseUDP(h *roce.IPHeader, b []byte, off, total int) ([]byte, error) {
	if len(b) < total {
		return nil, &wire.ShortError{What: "IP packet", Need: total, Have: len(b)}
	}
	if p := binary.BigEndian.Uint16(b[off+2:]); p != roce.Port {
		return nil, &wire.FieldError{What: "UDP header", Field: "destination port", Value: uint64(p)}
	}
	n := int(binary.BigEndian.Uint16(b[off+4:]))
	if n < udpLen || off+n != total {
		return nil, &wire.FieldError{What: "UDP header", Field: "length", Value: uint64(n)}
	}
	h.SrcPort = binary.BigEndian.Uint16(b[off:])
	return b[off+udpLen : total], nil
}

// Seal computes the ICRC of a whole IP packet and writes it into the last four octets.
func Seal(packet []byte) error {
	sum, field, err := icrc(packet)
	if err != nil {
		return err
	}
	binary.LittleEndian.PutUint32(field, sum)
	return nil
}

// CheckIP reports whether a whole IP packet has the right ICRC.
func CheckIP(packet []byte) (bool, error) {
	sum, field, err := icrc(packet)
	if err != nil {
		return false, err
	}
	return binary.LittleEndian.Uint32(field) == sum, nil
}

// icrc returns the ICRC that a packet should have, and the packet's field for it.
func icrc(packet []byte) (sum uint32, field []byte, err error) {
	h, payload, err := ParseIP(packet)
	if err != nil {
		return 0, nil, err
	}
	if len(payload) < roce.BTHLen+roce.ICRCLen {
		return 0, nil, &wire.ShortError{What: "RoCE packet", Need: roce.BTHLen + roce.ICRCLen, Have: len(payload)}
	}
	var head [8 + ipv6Len + udpLen + roce.BTHLen]byte
	binary.BigEndian.PutUint64(head[:], ^uint64(0)) // in the place of the LRH
	n := h.Len() + roce.BTHLen
	b := head[8 : 8+n]
	copy(b, packet)
	if h.Src.Is4() {
		b[1], b[8], b[10], b[11] = 0xff, 0xff, 0xff, 0xff // TOS, TTL, checksum
	} else {
		b[0], b[1], b[2], b[3], b[7] = 0x6f, 0xff, 0xff, 0xff, 0xff // traffic class, flow label, hop limit
	}
	b[h.Len()-2], b[h.Len()-1] = 0xff, 0xff // UDP checksum
	b[h.Len()+4] = 0xff                     // FECN, BECN and reserved bits
	end := h.Len() + len(payload) - roce.ICRCLen
	sum = crc32.Update(crc32.ChecksumIEEE(head[:8+n]), crc32.IEEETable, packet[n:end])
	return sum, packet[end : end+roce.ICRCLen], nil
}
