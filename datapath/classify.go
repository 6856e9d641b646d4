package datapath

import (
	"encoding/binary"
	"slices"

	"ipoibcm/wire/encap"
	"ipoibcm/wire/ip"
	"ipoibcm/wire/nd"
)

// ICMPv6 types of MLD (RFC 2710, RFC 3810).
const (
	icmp6MLDQuery  = 130
	icmp6MLDReport = 131
	icmp6MLDDone   = 132
	icmp6MLDv2     = 143
)

const minIPv4, minIP6 = ip.V4HeaderLen, ip.V6HeaderLen

// ipType returns the type for the encapsulation header of pkt, 0 if pkt is not IP.
func ipType(pkt []byte) encap.EtherType {
	if len(pkt) < minIPv4 {
		return 0
	}
	switch pkt[0] >> 4 {
	case 4:
		return encap.IPv4
	case 6:
		if len(pkt) >= minIP6 {
			return encap.IPv6
		}
	}
	return 0
}

// isMulticast4 reports whether dst is a multicast group or the limited broadcast. Packets to these
// never take a connection. It does not report a subnet broadcast, which the address alone does not
// show.
func isMulticast4(dst []byte) bool {
	return dst[0]>>4 == 0xe || dst[0]&dst[1]&dst[2]&dst[3] == 0xff
}

// isGroup reports whether an IP packet is multicast or broadcast. A subnet broadcast counts only if
// SetBroadcasts has it.
func (l *Loop) isGroup(t encap.EtherType, pkt []byte) bool {
	if t == encap.IPv6 {
		return pkt[24] == 0xff
	}
	dst := pkt[16:20]
	if isMulticast4(dst) {
		return true
	}
	subnets := l.broadcasts.Load()
	if subnets == nil {
		return false
	}
	_, found := slices.BinarySearch(*subnets, binary.BigEndian.Uint32(dst))
	return found
}

// toMulticast reports whether pkt must not take a connection because of its destination.
func toMulticast(t encap.EtherType, pkt []byte) bool {
	if t == encap.IPv4 {
		return isMulticast4(pkt[16:20])
	}
	return pkt[24] == 0xff
}

// isControl reports whether a packet from the TUN is IGMP, MLD or ND. Such a packet goes to the
// control plane only.
func isControl(pkt []byte, t encap.EtherType) bool {
	if t == encap.IPv4 {
		return pkt[9] == ip.ProtoIGMP
	}
	off := ip.ICMPv6Offset(pkt)
	if off < 0 {
		return false
	}
	switch pkt[off] {
	case icmp6MLDQuery, icmp6MLDReport, icmp6MLDDone, icmp6MLDv2:
		return true
	}
	return nd.KindOf(pkt) != nd.None
}
