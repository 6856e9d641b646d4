package ip

import (
	"encoding/binary"
	"errors"
	"net/netip"
)

// ErrSilent says that a packet must not be answered with an ICMP error.
var ErrSilent = errors.New("ip: this packet must not be answered with an ICMP error")

// Sizes and limits of "too big" messages, in octets.
const (
	MinMTU4 = 68   // RFC 791: every link carries this much
	MinMTU6 = 1280 // RFC 8200 section 5; the kernel ignores a smaller one

	maxQuote4 = 576     // of the whole message, RFC 1812 section 4.3.2.3
	maxQuote6 = MinMTU6 // of the whole message, RFC 4443 section 3.2
	icmpLen   = 8
	errorTTL  = 64
)

// ICMP types and codes.
const (
	icmp4EchoReply    = 0
	icmp4Unreachable  = 3
	icmp4FragNeeded   = 4 // code
	icmp4SourceQuench = 4
	icmp4Redirect     = 5
	icmp4EchoRequest  = 8
	icmp4TimeExceeded = 11
	icmp4Parameter    = 12

	icmp6TooBig      = 2
	icmp6EchoRequest = 128
	icmp6EchoReply   = 129
	icmp6Redirect    = 137
)

// AppendTooBig appends to b the ICMP message that tells the sender of orig that
// orig is larger than mtu octets: "fragmentation needed" for IPv4 (RFC 1191),
// "packet too big" for IPv6 (RFC 4443).
//
// The message's source is nextHop if that is a unicast address of the same family,
// else orig's destination: the kernel behind a TUN ignores a message from an address
// of its own. It quotes as much of orig as fits a message of 576 octets (IPv4) or
// 1280 octets (IPv6).
//
// The error is [ErrSilent] if orig is an ICMP error or redirect, a fragment other than the first,
// an IPv4 packet to a group, or an IPv6 packet with a broken chain of extension headers. It is also
// ErrSilent if orig's source is no single host's address, if neither nextHop nor orig's destination
// can be the message's source, or if mtu is below 68 (IPv4) or 1280 (IPv6), because no sender would
// believe that.
func AppendTooBig(b, orig []byte, nextHop netip.Addr, mtu int) ([]byte, error) {
	mtu = max(mtu, 0)
	if Version(orig) == 6 {
		return appendError6(b, orig, nextHop, icmp6TooBig, 0, uint32(mtu))
	}
	return appendError4(b, orig, nextHop, icmp4FragNeeded, uint32(min(mtu, 0xffff)))
}

// appendError4 appends a "destination unreachable" about orig, with the octets of
// word after the checksum, unless RFC 1122 section 3.2.2 wants silence. The word of
// "fragmentation needed" is the MTU.
func appendError4(b, orig []byte, nextHop netip.Addr, code uint8, word uint32) ([]byte, error) {
	p, err := AsV4(orig)
	if err != nil {
		return b, err
	}
	src := p.Dst()
	if IsGroup(src) || !isHost(p.Src()) || p.FragOffset() != 0 || code == icmp4FragNeeded && word < MinMTU4 {
		return b, ErrSilent
	}
	if nextHop.Is4() && isHost(nextHop) {
		src = nextHop
	}
	if !isHost(src) {
		return b, ErrSilent
	}
	if p.Protocol() == ProtoICMP {
		if len(p.Payload()) == 0 {
			return b, ErrSilent
		}
		switch p.Payload()[0] {
		case icmp4Unreachable, icmp4SourceQuench, icmp4Redirect, icmp4TimeExceeded, icmp4Parameter:
			return b, ErrSilent
		}
	}
	quote := p[:min(len(p), maxQuote4-V4HeaderLen-icmpLen)]
	b = AppendV4Header(b, src, p.Src(), ProtoICMP, errorTTL, 0, true, icmpLen+len(quote))
	start := len(b)
	b = append(b, icmp4Unreachable, code, 0, 0)
	b = binary.BigEndian.AppendUint32(b, word)
	b = append(b, quote...)
	binary.BigEndian.PutUint16(b[start+2:], Checksum(b[start:]))
	return b, nil
}

// appendError6 appends an error about orig, with the octets of word after the
// checksum, unless RFC 4443 section 2.4 (e) wants silence. The word of "packet too
// big" is the MTU, and only this error may answer a packet to a group.
func appendError6(b, orig []byte, nextHop netip.Addr, typ, code uint8, word uint32) ([]byte, error) {
	p, err := AsV6(orig)
	if err != nil {
		return b, err
	}
	src := p.Dst()
	if typ == icmp6TooBig && word < MinMTU6 || typ != icmp6TooBig && src.IsMulticast() {
		return b, ErrSilent
	}
	if nextHop.Is6() && !nextHop.Is4In6() && isHost(nextHop) {
		src = nextHop.WithZone("")
	}
	proto, off, first, ok := p.Upper()
	if !isHost(p.Src()) || !isHost(src) || !ok || !first {
		return b, ErrSilent
	}
	if proto == ProtoICMPv6 {
		// RFC 4443 section 2.4 (e): errors are the types below 128.
		if off >= len(p) || p[off] < icmp6EchoRequest || p[off] == icmp6Redirect {
			return b, ErrSilent
		}
	}
	quote := p[:min(len(p), maxQuote6-V6HeaderLen-icmpLen)]
	dst := p.Src()
	b = AppendV6Header(b, src, dst, ProtoICMPv6, errorTTL, icmpLen+len(quote))
	start := len(b)
	b = append(b, typ, code, 0, 0)
	b = binary.BigEndian.AppendUint32(b, word)
	b = append(b, quote...)
	binary.BigEndian.PutUint16(b[start+2:], Checksum6(src, dst, ProtoICMPv6, b[start:]))
	return b, nil
}

// isHost reports whether a can be the address of one host on a network: it is no group, limited
// broadcast, class E, loopback or unspecified address.
func isHost(a netip.Addr) bool {
	if a.Is4() && a.As4()[0] >= 240 { // class E and limited broadcast
		return false
	}
	return a.IsValid() && !a.IsUnspecified() && !a.IsMulticast() && !a.IsLoopback()
}

// AppendV4Header appends an IPv4 header without options, TOS 0, in front of n octets of
// payload.
func AppendV4Header(b []byte, src, dst netip.Addr, proto, ttl uint8, id uint16, df bool, n int) []byte {
	start := len(b)
	var flags byte
	if df {
		flags = 0x40
	}
	b = append(b, 0x45, 0)
	b = binary.BigEndian.AppendUint16(b, uint16(V4HeaderLen+n))
	b = binary.BigEndian.AppendUint16(b, id)
	b = append(b, flags, 0, ttl, proto, 0, 0)
	s, d := src.As4(), dst.As4()
	b = append(append(b, s[:]...), d[:]...)
	binary.BigEndian.PutUint16(b[start+10:], Checksum(b[start:]))
	return b
}

// AppendV6Header appends an IPv6 header, traffic class and flow label 0, in
// front of n octets of payload whose first header is proto.
func AppendV6Header(b []byte, src, dst netip.Addr, proto, hopLimit uint8, n int) []byte {
	b = append(b, 0x60, 0, 0, 0)
	b = binary.BigEndian.AppendUint16(b, uint16(n))
	b = append(b, proto, hopLimit)
	s, d := src.As16(), dst.As16()
	return append(append(b, s[:]...), d[:]...)
}
