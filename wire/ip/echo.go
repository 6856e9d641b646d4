package ip

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"ipoibcm/wire"
)

// An Echo is an ICMP or ICMPv6 echo request or reply, with its IP header.
type Echo struct {
	Src, Dst netip.Addr // both IPv4 or both IPv6
	Reply    bool
	ID, Seq  uint16
	TTL      uint8 // hop limit in IPv6; zero means 64 when sent
	DF       bool  // IPv4 only
	Data     []byte
}

// AppendBinary appends the whole IP packet to b.
func (e Echo) AppendBinary(b []byte) ([]byte, error) {
	if !e.Src.IsValid() || e.Src.Is4() != e.Dst.Is4() || !e.Dst.IsValid() {
		return b, fmt.Errorf("echo: %v and %v are not addresses of one family", e.Src, e.Dst)
	}
	ttl, n := e.TTL, icmpLen+len(e.Data)
	if ttl == 0 {
		ttl = 64
	}
	if V4HeaderLen+n > 0xffff {
		return b, &wire.FieldError{What: "echo", Field: "length", Value: uint64(n)}
	}
	v4 := e.Src.Is4()
	var typ byte
	switch {
	case v4 && e.Reply:
		typ = icmp4EchoReply
	case v4:
		typ = icmp4EchoRequest
	case e.Reply:
		typ = icmp6EchoReply
	default:
		typ = icmp6EchoRequest
	}
	if v4 {
		// The sequence number keeps fragments of several echoes apart.
		b = appendV4Header(b, e.Src, e.Dst, ProtoICMP, ttl, e.Seq, e.DF, n)
	} else {
		b = AppendV6Header(b, e.Src, e.Dst, ProtoICMPv6, ttl, n)
	}
	start := len(b)
	b = append(b, typ, 0, 0, 0)
	b = binary.BigEndian.AppendUint16(b, e.ID)
	b = binary.BigEndian.AppendUint16(b, e.Seq)
	b = append(b, e.Data...)
	sum := Checksum(b[start:])
	if !v4 {
		sum = Checksum6(e.Src, e.Dst, ProtoICMPv6, b[start:])
	}
	binary.BigEndian.PutUint16(b[start+2:], sum)
	return b, nil
}

// UnmarshalBinary sets e from the IP packet b; Data is a part of b. Anything but
// a whole echo message with a right checksum is an error. IPv6 extension
// headers are passed over.
func (e *Echo) UnmarshalBinary(b []byte) error {
	var (
		out            Echo
		m              []byte
		sum            uint16
		request, reply byte
	)
	if Version(b) == 6 {
		p, err := AsV6(b)
		if err != nil {
			return err
		}
		proto, off, first, ok := p.Upper()
		if !ok || !first || proto != ProtoICMPv6 {
			return &wire.FieldError{What: "echo", Field: "protocol", Value: uint64(proto)}
		}
		m, request, reply = p[off:], icmp6EchoRequest, icmp6EchoReply
		out = Echo{Src: p.Src(), Dst: p.Dst(), TTL: p.HopLimit()}
		sum = Checksum6(out.Src, out.Dst, ProtoICMPv6, m)
	} else {
		p, err := AsV4(b)
		if err != nil {
			return err
		}
		if p.Protocol() != ProtoICMP || p.MF() || p.FragOffset() != 0 {
			return &wire.FieldError{What: "echo", Field: "protocol", Value: uint64(p.Protocol())}
		}
		m, request, reply = p.Payload(), icmp4EchoRequest, icmp4EchoReply
		out = Echo{Src: p.Src(), Dst: p.Dst(), TTL: p.TTL(), DF: p.DF()}
		sum = Checksum(m)
	}
	if len(m) < icmpLen {
		return &wire.ShortError{What: "echo", Need: icmpLen, Have: len(m)}
	}
	if m[0] != request && m[0] != reply {
		return &wire.FieldError{What: "echo", Field: "type", Value: uint64(m[0])}
	}
	if sum != 0 {
		return &wire.FieldError{What: "echo", Field: "checksum", Value: uint64(binary.BigEndian.Uint16(m[2:]))}
	}
	out.Reply = m[0] == reply
	out.ID, out.Seq = binary.BigEndian.Uint16(m[4:]), binary.BigEndian.Uint16(m[6:])
	out.Data = m[icmpLen:]
	*e = out
	return nil
}

// String prints the ends, kind, identifier and sequence number of e.
func (e Echo) String() string {
	kind := "request"
	if e.Reply {
		kind = "reply"
	}
	return fmt.Sprintf("echo %s %s > %s id=%d seq=%d len=%d", kind, e.Src, e.Dst, e.ID, e.Seq, len(e.Data))
}
