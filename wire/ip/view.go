// Package ip holds what the interface must know about the packets it carries: views of IPv4 and
// IPv6 headers for the hot path, checksums, ECN, ICMP "too big" and "unreachable" messages, IPv4
// fragments, IGMP and MLD reports, VRRP advertisements, the addresses RFC 4391 derives from a GID,
// and which fields of a packet may decide its next hop ([FlowOf]).
//
// It is no IP stack: the kernel behind the TUN is. Reassembly, routing and
// every other ICMP message are left to it.
package ip

import (
	"encoding/binary"
	"net/netip"

	"ipoibcm/wire"
)

// Header lengths in octets.
const (
	V4HeaderLen = 20 // without options
	V6HeaderLen = 40
)

// Protocol numbers (IPv4 protocol, IPv6 next header).
const (
	ProtoHopByHop = 0
	ProtoICMP     = 1
	ProtoIGMP     = 2
	ProtoTCP      = 6
	ProtoUDP      = 17
	ProtoDCCP     = 33
	ProtoRouting  = 43
	ProtoFragment = 44
	ProtoAH       = 51
	ProtoICMPv6   = 58
	ProtoNone     = 59
	ProtoDestOpts = 60
	ProtoSCTP     = 132
)

// Version returns the version field of the IP packet b, unchecked, or 0 if b is empty.
func Version(b []byte) int {
	if len(b) == 0 {
		return 0
	}
	return int(b[0] >> 4)
}

// Dst returns the destination of the IPv4 or IPv6 packet b. It checks only the
// version, and that b is as long as a header without options; ok is false if not.
func Dst(b []byte) (dst netip.Addr, ok bool) {
	switch {
	case len(b) >= V4HeaderLen && b[0]>>4 == 4:
		return netip.AddrFrom4([4]byte(b[16:20])), true
	case len(b) >= V6HeaderLen && b[0]>>4 == 6:
		return netip.AddrFrom16([16]byte(b[24:40])), true
	}
	return netip.Addr{}, false
}

// Src returns the source of the IPv4 or IPv6 packet b, as [Dst] does.
func Src(b []byte) (src netip.Addr, ok bool) {
	switch {
	case len(b) >= V4HeaderLen && b[0]>>4 == 4:
		return netip.AddrFrom4([4]byte(b[12:16])), true
	case len(b) >= V6HeaderLen && b[0]>>4 == 6:
		return netip.AddrFrom16([16]byte(b[8:24])), true
	}
	return netip.Addr{}, false
}

// IsGroup reports whether a is multicast or the limited broadcast address.
// Subnet broadcasts need the interface's prefixes: see package group.
func IsGroup(a netip.Addr) bool { return a.IsMulticast() || a == LimitedBroadcast }

// LimitedBroadcast is 255.255.255.255.
var LimitedBroadcast = netip.AddrFrom4([4]byte{255, 255, 255, 255})

// A V4 is an IPv4 packet that [AsV4] has checked. Fields are in host order.
type V4 []byte

// AsV4 returns the IPv4 packet at the start of b, trimmed to its total length.
// Version, header length and total length are checked, the checksum is not.
func AsV4(b []byte) (V4, error) {
	if len(b) < V4HeaderLen {
		return nil, &wire.ShortError{What: "IPv4 header", Need: V4HeaderLen, Have: len(b)}
	}
	if b[0]>>4 != 4 {
		return nil, &wire.FieldError{What: "IPv4 header", Field: "version", Value: uint64(b[0] >> 4)}
	}
	hlen, total := int(b[0]&15)*4, int(binary.BigEndian.Uint16(b[2:]))
	if hlen < V4HeaderLen {
		return nil, &wire.FieldError{What: "IPv4 header", Field: "header length", Value: uint64(hlen)}
	}
	if total < hlen {
		return nil, &wire.FieldError{What: "IPv4 header", Field: "total length", Value: uint64(total)}
	}
	if len(b) < total {
		return nil, &wire.ShortError{What: "IPv4 packet", Need: total, Have: len(b)}
	}
	return V4(b[:total:total]), nil
}

// HeaderLen returns the length of the header with its options, in octets.
func (p V4) HeaderLen() int { return int(p[0]&15) * 4 }

// DF reports whether "don't fragment" is set.
func (p V4) DF() bool { return p[6]&0x40 != 0 }

// MF reports whether more fragments follow.
func (p V4) MF() bool { return p[6]&0x20 != 0 }

// FragOffset returns the offset of this fragment in octets.
func (p V4) FragOffset() int { return int(binary.BigEndian.Uint16(p[6:])&0x1fff) * 8 }

// Protocol returns the protocol number.
func (p V4) Protocol() uint8 { return p[9] }

// Src returns the source address.
func (p V4) Src() netip.Addr { return netip.AddrFrom4([4]byte(p[12:16])) }

// Dst returns the destination address.
func (p V4) Dst() netip.Addr { return netip.AddrFrom4([4]byte(p[16:20])) }

// Options returns the options, padding included.
func (p V4) Options() []byte { return p[V4HeaderLen:p.HeaderLen()] }

// Payload returns what follows the header.
func (p V4) Payload() []byte { return p[p.HeaderLen():] }

// A V6 is an IPv6 packet that [AsV6] has checked. Fields are in host order.
type V6 []byte

// AsV6 returns the IPv6 packet at the start of b, trimmed to its length.
// Jumbograms (payload length 0 with a jumbo option) look empty.
func AsV6(b []byte) (V6, error) {
	if len(b) < V6HeaderLen {
		return nil, &wire.ShortError{What: "IPv6 header", Need: V6HeaderLen, Have: len(b)}
	}
	if b[0]>>4 != 6 {
		return nil, &wire.FieldError{What: "IPv6 header", Field: "version", Value: uint64(b[0] >> 4)}
	}
	total := V6HeaderLen + int(binary.BigEndian.Uint16(b[4:]))
	if len(b) < total {
		return nil, &wire.ShortError{What: "IPv6 packet", Need: total, Have: len(b)}
	}
	return V6(b[:total:total]), nil
}

// NextHeader returns the type of the header that follows directly.
func (p V6) NextHeader() uint8 { return p[6] }

// HopLimit returns the hop limit.
func (p V6) HopLimit() uint8 { return p[7] }

// Src returns the source address.
func (p V6) Src() netip.Addr { return netip.AddrFrom16([16]byte(p[8:24])) }

// Dst returns the destination address.
func (p V6) Dst() netip.Addr { return netip.AddrFrom16([16]byte(p[24:40])) }

// maxExtensions bounds the walk over extension headers.
const maxExtensions = 8

// Upper walks the extension headers. It returns the protocol behind them and
// its offset in p. first is false in a fragment other than the first, where no
// such protocol header is present. ok is false if the chain is broken, or has
// more than 8 headers.
func (p V6) Upper() (proto uint8, off int, first, ok bool) {
	proto, off, first = p[6], V6HeaderLen, true
	for range maxExtensions {
		switch proto {
		case ProtoHopByHop, ProtoRouting, ProtoDestOpts, ProtoAH, ProtoFragment:
		default:
			return proto, off, first, true
		}
		if len(p) < off+8 {
			return proto, off, first, false
		}
		n := 8 + int(p[off+1])*8
		switch proto {
		case ProtoAH:
			n = 8 + int(p[off+1])*4
		case ProtoFragment:
			n = 8
			if binary.BigEndian.Uint16(p[off+2:])&0xfff8 != 0 {
				return p[off], off + n, false, true
			}
		}
		if len(p) < off+n {
			return proto, off, first, false
		}
		proto, off = p[off], off+n
	}
	return proto, off, first, false
}
