package ip

import (
	"encoding/binary"

	"ipoibcm/rtnl"
)

// FlowOf returns the fields of the IPv4 or IPv6 packet pkt that decide its next hop if routes
// depend on the fields f. The other fields are zero. For a packet to a multicast group or to the
// limited broadcast it returns the destination alone, whatever f is. ok is false if pkt has no
// whole header.
//
// Ports are those of TCP, UDP, DCCP and SCTP. They are 0 for any other packet,
// such as a fragment after the first. If the chain of extension headers is
// broken, the protocol is that of the header where it breaks.
func FlowOf(pkt []byte, f rtnl.Fields) (flow rtnl.Flow, ok bool) {
	if flow.Dst, ok = Dst(pkt); !ok || f == rtnl.DstOnly || isGroupOf(pkt) {
		return flow, ok
	}
	flow.Src, _ = Src(pkt)
	flow.TOS = TrafficClass(pkt) &^ ECNMask // no route looks at ECN
	if f == rtnl.WithPorts {
		flow.Proto, flow.SrcPort, flow.DstPort = ports(pkt)
	}
	return flow, true
}

// flowV4 is the length in octets of the longest IPv4 header and the ports behind it.
const flowV4 = V4HeaderLen + maxV4Options + 4

// FlowLen returns how many octets at the start of pkt are enough for [FlowOf] to return the same
// flow: 64, or, if that is more, the IPv6 header, its extension headers and 8 octets, but never
// more than pkt has.
func FlowLen(pkt []byte) int {
	n := flowV4
	if len(pkt) >= V6HeaderLen && pkt[0]>>4 == 6 {
		_, off, _, _ := V6(pkt).Upper()
		n = max(n, off+8)
	}
	return min(n, len(pkt))
}

// isGroupOf reports whether pkt, whose header is whole, goes to a group or to the
// limited broadcast. An IPv4-mapped IPv6 address is neither.
func isGroupOf(pkt []byte) bool {
	if pkt[0]>>4 == 4 {
		return pkt[16]>>4 == 0xe || pkt[16]&pkt[17]&pkt[18]&pkt[19] == 0xff
	}
	return pkt[24] == 0xff
}

// ports returns protocol and ports of a packet whose header is whole.
func ports(pkt []byte) (proto uint8, src, dst uint16) {
	var off int
	first, ok := true, true
	if pkt[0]>>4 == 4 {
		proto, off = pkt[9], int(pkt[0]&15)*4
		first, ok = binary.BigEndian.Uint16(pkt[6:])&0x1fff == 0, off >= V4HeaderLen
	} else {
		proto, off, first, ok = V6(pkt).Upper()
	}
	if !first || !ok || len(pkt) < off+4 {
		return proto, 0, 0
	}
	switch proto {
	case ProtoTCP, ProtoUDP, ProtoDCCP, ProtoSCTP:
		return proto, binary.BigEndian.Uint16(pkt[off:]), binary.BigEndian.Uint16(pkt[off+2:])
	}
	return proto, 0, 0
}

// ICMPv6Offset returns the offset of the ICMPv6 message in the IPv6 packet pkt, or
// -1 if pkt has none or ends before it. For TCP and UDP without extension headers one
// comparison decides.
//
// It skips the extension headers that Linux skips on the way to ICMPv6 (net/ipv6/exthdrs.c):
// hop-by-hop options directly behind the IPv6 header only (RFC 8200 section 4.1), routing headers
// without segments left, destination options. A message behind a fragment header does not count:
// RFC 6980 section 5 has neighbour discovery in fragments ignored, and reports are never so long
// that they are fragmented. Neither does a message behind an authentication header, which only the
// kernel can check.
func ICMPv6Offset(pkt []byte) int {
	if len(pkt) < V6HeaderLen || pkt[0]>>4 != 6 {
		return -1
	}
	next, off := pkt[6], V6HeaderLen
	for range maxExtensions + 1 {
		switch next {
		case ProtoICMPv6:
			if off >= len(pkt) {
				return -1
			}
			return off
		case ProtoHopByHop, ProtoRouting, ProtoDestOpts:
			if off+8 > len(pkt) || next == ProtoHopByHop && off != V6HeaderLen || next == ProtoRouting && pkt[off+3] != 0 {
				return -1
			}
			next, off = pkt[off], off+8+8*int(pkt[off+1])
		default:
			return -1
		}
	}
	return -1
}
