package datapath

import (
	"encoding/binary"
	"slices"

	"ipoibcm/wire/encap"
)

// IP protocol numbers and ICMPv6 types that the loop must know.
const (
	protoHopByHop = 0
	protoIGMP     = 2
	protoRouting  = 43
	protoFragment = 44
	protoICMPv6   = 58
	protoDestOpts = 60

	icmp6MLDQuery   = 130
	icmp6MLDReport  = 131
	icmp6MLDDone    = 132
	icmp6RS         = 133
	icmp6NS         = 135
	icmp6NDFirst    = icmp6RS
	icmp6NDLast     = 137 // redirect
	icmp6MLDv2      = 143
	maxExtHeaders   = 8 // more than any stack sends; what has more is data
	minIPv4, minIP6 = 20, 40
)

// ipType returns the type of header that pkt needs, 0 if it is not IP.
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

// isMulticast4 is true of groups and the limited broadcast, which no route may
// lead to a connection. Subnet broadcasts cannot be told by the address.
func isMulticast4(dst []byte) bool {
	return dst[0]>>4 == 0xe || dst[0]&dst[1]&dst[2]&dst[3] == 0xff
}

// isGroup reports whether an IP packet from the fabric is multicast or broadcast;
// of subnet broadcasts it knows those of SetBroadcasts.
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

// isControl reports whether a packet from the TUN is for the control plane to
// see before anyone else: IGMP, MLD and ND.
func isControl(pkt []byte, t encap.EtherType) bool {
	if t == encap.IPv4 {
		return pkt[9] == protoIGMP
	}
	switch typ := icmp6Type(pkt); typ {
	case icmp6MLDQuery, icmp6MLDReport, icmp6MLDDone, icmp6MLDv2:
		return true
	default:
		return typ >= icmp6NDFirst && typ <= icmp6NDLast
	}
}

// isND reports whether an IPv6 packet from the fabric is ND.
func isND(pkt []byte) bool {
	typ := icmp6Type(pkt)
	return typ >= icmp6NDFirst && typ <= icmp6NDLast
}

// icmp6Type returns the ICMPv6 type of an IPv6 packet, -1 if it is none. TCP and
// UDP are known after one comparison.
func icmp6Type(pkt []byte) int {
	next, off := pkt[6], minIP6
	for range maxExtHeaders {
		switch next {
		case protoICMPv6:
			if off >= len(pkt) {
				return -1
			}
			return int(pkt[off])
		case protoHopByHop, protoRouting, protoDestOpts:
			if off+2 > len(pkt) {
				return -1
			}
			next, off = pkt[off], off+8+8*int(pkt[off+1])
		case protoFragment:
			if off+8 > len(pkt) || pkt[off+2] != 0 || pkt[off+3]&0xf8 != 0 {
				return -1 // not the first fragment
			}
			next, off = pkt[off], off+8
		default:
			return -1
		}
	}
	return -1
}
