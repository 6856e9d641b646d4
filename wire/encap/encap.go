// Package encap reads and writes what RFC 4755 and RFC 4391 put around an IP
// datagram: the 4-octet encapsulation header and the 20-octet link-layer
// address, and the 8 octets of CM private data (RFC 4755 section 6).
//
// It does not know ARP or ND, which only carry the address.
package encap

import (
	"bytes"
	"encoding/binary"
	"fmt"

	"ipoibcm/ib"
	"ipoibcm/wire"
)

// HeaderLen is the length of the encapsulation header in octets.
const HeaderLen = 4

// An EtherType is the Type field of the encapsulation header.
type EtherType uint16

// The types of RFC 4391 section 6; connected QPs carry only IPv4 and IPv6.
const (
	IPv4 EtherType = 0x0800
	ARP  EtherType = 0x0806
	RARP EtherType = 0x8035
	IPv6 EtherType = 0x86dd
	// InbandCM carries a CM MAD of 256 octets on the UD QP: an extension of our own,
	// under the first EtherType that IEEE 802 leaves to local experiments.
	InbandCM EtherType = 0x88b5
	// PathProbe carries a [Probe], under the second such EtherType. Other implementations,
	// and older versions of ours, drop a packet whose type they do not know.
	PathProbe EtherType = 0x88b6
)

var etherTypeNames = wire.Names[EtherType]{
	IPv4: "IPv4", ARP: "ARP", RARP: "RARP", IPv6: "IPv6", InbandCM: "CM in-band", PathProbe: "path MTU probe",
}

// String names the types we know and prints the others in hexadecimal.
func (t EtherType) String() string { return etherTypeNames.Of(t, "0x%04x") }

// A Header is the IPoIB encapsulation header (RFC 4391 section 6): Type, then
// 16 reserved bits.
type Header struct{ Type EtherType }

// AppendBinary appends the wire form of h to b. The error is always nil.
func (h Header) AppendBinary(b []byte) ([]byte, error) {
	b = binary.BigEndian.AppendUint16(b, uint16(h.Type))
	return append(b, 0, 0), nil // reserved
}

// UnmarshalBinary sets h from the first HeaderLen octets of b.
func (h *Header) UnmarshalBinary(b []byte) error {
	if len(b) < HeaderLen {
		return &wire.ShortError{What: "encapsulation header", Need: HeaderLen, Have: len(b)}
	}
	*h = Header{Type: EtherType(binary.BigEndian.Uint16(b))}
	return nil
}

// Put writes a header into b[:HeaderLen]. It is the hot path's AppendBinary.
func Put(b []byte, t EtherType) {
	_ = b[3]
	b[0], b[1], b[2], b[3] = byte(t>>8), byte(t), 0, 0
}

// LinkAddrLen is the length of a link-layer address in octets.
const LinkAddrLen = 20

// Flags is the first octet of a link-layer address (RFC 4755 section 3.1).
type Flags uint8

// Which connected modes an interface supports. None means UD only.
const (
	FlagRC Flags = 0x80
	FlagUC Flags = 0x40

	flagMask = FlagRC | FlagUC
)

// Known returns f without its reserved bits.
func (f Flags) Known() Flags { return f & flagMask }

var flagNames = wire.Names[Flags]{0: "ud", FlagRC: "rc", FlagUC: "uc", FlagRC | FlagUC: "rc+uc"}

// String prints "rc", "uc", "rc+uc" or "ud".
func (f Flags) String() string { return flagNames[f.Known()] }

// A LinkAddr is an IPoIB link-layer address: flags, UD QPN, GID.
type LinkAddr struct {
	Flags Flags // reserved bits are zero after UnmarshalBinary
	QPN   ib.QPN
	GID   ib.GID
}

// AppendBinary appends the 20 octets of a to b. The error is always nil.
func (a LinkAddr) AppendBinary(b []byte) ([]byte, error) {
	b = append(b, byte(a.Flags.Known()), byte(a.QPN>>16), byte(a.QPN>>8), byte(a.QPN))
	return append(b, a.GID[:]...), nil
}

// UnmarshalBinary sets a from the first 20 octets of b.
func (a *LinkAddr) UnmarshalBinary(b []byte) error {
	if len(b) < LinkAddrLen {
		return &wire.ShortError{What: "link-layer address", Need: LinkAddrLen, Have: len(b)}
	}
	*a = LinkAddr{
		Flags: Flags(b[0]).Known(),
		QPN:   ib.QPN(b[1])<<16 | ib.QPN(b[2])<<8 | ib.QPN(b[3]),
		GID:   ib.GID(b[4:20]),
	}
	return nil
}

// IsZero reports whether a is all zeros, as the target of an ARP request is.
func (a LinkAddr) IsZero() bool { return a == LinkAddr{} }

// Key returns a with the flags octet zeroed. It identifies the interface, whatever
// modes the interface offers at the moment.
func (a LinkAddr) Key() LinkAddr { a.Flags = 0; return a }

// Compare orders two link-layer addresses as RFC 4755 section 3.3 does: flags
// octet zeroed, most significant octet first, unsigned. It returns -1, 0 or 1.
func (a LinkAddr) Compare(b LinkAddr) int {
	if c := int64(a.QPN&ib.QPNMask) - int64(b.QPN&ib.QPNMask); c != 0 {
		if c < 0 {
			return -1
		}
		return 1
	}
	return bytes.Compare(a.GID[:], b.GID[:])
}

// String prints flags, QPN and GID: "80 000123 fe80::1".
func (a LinkAddr) String() string {
	return fmt.Sprintf("%02x %06x %s", uint8(a.Flags), uint32(a.QPN), a.GID)
}

// PrivateDataLen is the length of the IPoIB private data in octets.
const PrivateDataLen = 8

// PrivateData is what CM messages carry for IPoIB (RFC 4755 section 6): a
// reserved octet, the sender's UD QPN, its Receive MTU.
type PrivateData struct {
	QPN        ib.QPN
	ReceiveMTU uint32 // octets, the encapsulation header included
}

// AppendBinary appends the 8 octets of p to b. The error is always nil.
func (p PrivateData) AppendBinary(b []byte) ([]byte, error) {
	b = append(b, 0, byte(p.QPN>>16), byte(p.QPN>>8), byte(p.QPN))
	return binary.BigEndian.AppendUint32(b, p.ReceiveMTU), nil
}

// UnmarshalBinary sets p from the first 8 octets of b.
func (p *PrivateData) UnmarshalBinary(b []byte) error {
	if len(b) < PrivateDataLen {
		return &wire.ShortError{What: "IPoIB private data", Need: PrivateDataLen, Have: len(b)}
	}
	*p = PrivateData{
		QPN:        ib.QPN(b[1])<<16 | ib.QPN(b[2])<<8 | ib.QPN(b[3]),
		ReceiveMTU: binary.BigEndian.Uint32(b[4:8]),
	}
	return nil
}

// IsZero reports whether p is all zeros, as it is in the RTU and REJ of Linux.
func (p PrivateData) IsZero() bool { return p == PrivateData{} }
