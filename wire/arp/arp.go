// Package arp reads and writes ARP as IPoIB carries it (RFC 826 with hardware
// type 32, RFC 4391 section 9.2): 56 octets behind the encapsulation header,
// with 20-octet link-layer addresses and IPv4.
//
// It keeps no cache and answers nothing: that is neigh. RARP is not here.
package arp

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"ipoibcm/ib"
	"ipoibcm/wire"
	"ipoibcm/wire/encap"
)

// Len is the length of an ARP packet in octets, the encapsulation header not
// included.
const Len = 56

// The fixed fields (RFC 4391 section 9.2).
const (
	hardwareType = 32 // InfiniBand
	hardwareLen  = encap.LinkAddrLen
	protocolLen  = 4
)

// An Op is an ARP operation code.
type Op uint16

// The operations we use. Every other one is an error when read.
const (
	Request Op = 1
	Reply   Op = 2
)

var opNames = wire.Names[Op]{Request: "request", Reply: "reply"}

// String prints "request" or "reply".
func (o Op) String() string { return opNames.Of(o, "Op(%d)") }

// A Packet is one ARP packet. A request is sent to the broadcast-GID, or by unicast UD to the
// link-layer address that the target is supposed to have. A reply is sent by unicast UD to the QPN
// of the request's Sender.
type Packet struct {
	Op       Op
	Sender   encap.LinkAddr
	SenderIP netip.Addr     // IPv4; 0.0.0.0 in a probe (RFC 5227)
	Target   encap.LinkAddr // zero in a request
	TargetIP netip.Addr     // IPv4
}

// NewRequest asks who has target, on behalf of sender.
func NewRequest(sender encap.LinkAddr, senderIP, target netip.Addr) Packet {
	return Packet{Op: Request, Sender: sender, SenderIP: senderIP, TargetIP: target}
}

// NewProbe asks whether anybody uses a, without claiming it (RFC 5227 section 2.1.1).
func NewProbe(sender encap.LinkAddr, a netip.Addr) Packet {
	return NewRequest(sender, netip.IPv4Unspecified(), a)
}

// NewAnnouncement tells everybody that sender has a (RFC 5227 section 2.3).
func NewAnnouncement(sender encap.LinkAddr, a netip.Addr) Packet {
	return NewRequest(sender, a, a)
}

// ReplyFrom returns the answer to request p by the owner of p.TargetIP, whose
// link-layer address is own.
func (p Packet) ReplyFrom(own encap.LinkAddr) Packet {
	return Packet{Op: Reply, Sender: own, SenderIP: p.TargetIP, Target: p.Sender, TargetIP: p.SenderIP}
}

// IsProbe reports whether p only asks if an address is in use: its sender has
// no address yet and must not be entered into a cache.
func (p Packet) IsProbe() bool { return p.Op == Request && p.SenderIP.IsUnspecified() }

// IsAnnouncement reports whether p, request or reply, announces its sender's
// own address (gratuitous ARP).
func (p Packet) IsAnnouncement() bool {
	return !p.SenderIP.IsUnspecified() && p.SenderIP == p.TargetIP
}

// AppendBinary appends the 56 octets of p to b. Addresses that are not IPv4 are
// an error.
func (p Packet) AppendBinary(b []byte) ([]byte, error) {
	if !p.SenderIP.Is4() || !p.TargetIP.Is4() {
		return b, fmt.Errorf("ARP packet: %v and %v are not both IPv4", p.SenderIP, p.TargetIP)
	}
	b = binary.BigEndian.AppendUint16(b, hardwareType)
	b = binary.BigEndian.AppendUint16(b, uint16(encap.IPv4))
	b = append(b, hardwareLen, protocolLen)
	b = binary.BigEndian.AppendUint16(b, uint16(p.Op))
	sip, tip := p.SenderIP.As4(), p.TargetIP.As4()
	b, _ = p.Sender.AppendBinary(b)
	b = append(b, sip[:]...)
	b, _ = p.Target.AppendBinary(b)
	return append(b, tip[:]...), nil
}

// UnmarshalBinary sets p from the first 56 octets of b. It fails if the hardware type, the protocol
// type or a length is not that of IPoIB, if the operation is neither request nor reply, if the
// sender's GID is zero or multicast, or if its QPN is 0, 1 or 0xFFFFFF.
func (p *Packet) UnmarshalBinary(b []byte) error {
	const what = "ARP packet"
	if len(b) < Len {
		return &wire.ShortError{What: what, Need: Len, Have: len(b)}
	}
	op := Op(binary.BigEndian.Uint16(b[6:]))
	switch v := binary.BigEndian.Uint16(b); {
	case v != hardwareType:
		return &wire.FieldError{What: what, Field: "hardware type", Value: uint64(v)}
	case binary.BigEndian.Uint16(b[2:]) != uint16(encap.IPv4):
		return &wire.FieldError{What: what, Field: "protocol type", Value: uint64(binary.BigEndian.Uint16(b[2:]))}
	case b[4] != hardwareLen:
		return &wire.FieldError{What: what, Field: "hardware length", Value: uint64(b[4])}
	case b[5] != protocolLen:
		return &wire.FieldError{What: what, Field: "protocol length", Value: uint64(b[5])}
	case op != Request && op != Reply:
		return &wire.FieldError{What: what, Field: "operation", Value: uint64(op)}
	}
	q := Packet{
		Op:       op,
		SenderIP: netip.AddrFrom4([4]byte(b[28:32])),
		TargetIP: netip.AddrFrom4([4]byte(b[52:56])),
	}
	_ = q.Sender.UnmarshalBinary(b[8:28]) // the lengths fit
	_ = q.Target.UnmarshalBinary(b[32:52])
	// Nobody can be reached at such an address, and caching it would let one
	// forged packet turn unicast into multicast.
	if q.Sender.GID.IsZero() || q.Sender.GID.IsMulticast() {
		return fmt.Errorf("%s: sender GID %s is no port's", what, q.Sender.GID)
	}
	if q.Sender.QPN <= ib.QPNGSI || q.Sender.QPN == ib.QPNMulticast {
		return &wire.FieldError{What: what, Field: "sender QPN", Value: uint64(q.Sender.QPN)}
	}
	*p = q
	return nil
}

// String prints p as tcpdump would: "request who-has 10.0.0.2 tell 10.0.0.1 (80 …)".
func (p Packet) String() string {
	if p.Op == Request {
		return fmt.Sprintf("request who-has %s tell %s (%s)", p.TargetIP, p.SenderIP, p.Sender)
	}
	return fmt.Sprintf("%s %s is-at %s", p.Op, p.SenderIP, p.Sender)
}
