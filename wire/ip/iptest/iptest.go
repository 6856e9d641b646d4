// Package iptest makes IP packets for tests.
package iptest

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"net/netip"

	"ipoibcm/wire/ip"
)

// Types of ICMP and ICMPv6 messages.
const (
	echo4 = 8
	echo6 = 128
)

// An Echo is an ICMP or ICMPv6 echo request, with its IP header.
type Echo struct {
	Src, Dst netip.Addr // both IPv4 or both IPv6
	ID, Seq  uint16
	TTL      uint8 // hop limit in IPv6; zero means 64
	DF       bool  // IPv4 only
	Data     []byte
}

// AppendBinary appends the whole IP packet to b.
func (e Echo) AppendBinary(b []byte) ([]byte, error) {
	n := 8 + len(e.Data)
	if !e.Src.IsValid() || !e.Dst.IsValid() || e.Src.Is4() != e.Dst.Is4() {
		return b, fmt.Errorf("echo: %v and %v are not addresses of one family", e.Src, e.Dst)
	}
	if ip.V4HeaderLen+n > 0xffff {
		return b, fmt.Errorf("echo: %d octets are too many", n)
	}
	ttl, v4 := cmp.Or(e.TTL, 64), e.Src.Is4()
	typ := byte(echo6)
	if v4 {
		typ = echo4
		// The sequence number is also the identification, so fragments of several echoes do not
		// mix.
		b = ip.AppendV4Header(b, e.Src, e.Dst, ip.ProtoICMP, ttl, e.Seq, e.DF, n)
	} else {
		b = ip.AppendV6Header(b, e.Src, e.Dst, ip.ProtoICMPv6, ttl, n)
	}
	start := len(b)
	b = append(b, typ, 0, 0, 0)
	b = binary.BigEndian.AppendUint16(b, e.ID)
	b = binary.BigEndian.AppendUint16(b, e.Seq)
	b = append(b, e.Data...)
	sum := ip.Checksum(b[start:])
	if !v4 {
		sum = ip.Checksum6(e.Src, e.Dst, ip.ProtoICMPv6, b[start:])
	}
	binary.BigEndian.PutUint16(b[start+2:], sum)
	return b, nil
}
