package rdmacm

import (
	"encoding/binary"
	"errors"
	"net/netip"
)

const (
	// HeaderLen is the length of a Header in octets.
	HeaderLen = 36
	// MaxPrivateData is how many octets of private data fit into a REQ behind the header; a REP
	// holds more, [MaxReplyData].
	MaxPrivateData = 92 - HeaderLen
	// MaxReplyData is how many octets of private data fit into a REP.
	MaxReplyData = 196
	// MaxRejectData is how many octets of private data fit into a REJ.
	MaxRejectData = 148
)

// A Header begins the private data of every REQ of the RDMA IP CM service. Both
// addresses are of one family.
type Header struct {
	SrcPort  uint16
	Src, Dst netip.Addr
}

// Append appends the octets of h: versions (0, and 4 or 6 for the family), source
// port, and both addresses in 16 octets each, IPv4 in the last four.
func (h Header) Append(b []byte) []byte {
	family := byte(6)
	if h.Src.Is4() {
		family = 4
	}
	b = append(b, 0, family<<4)
	b = binary.BigEndian.AppendUint16(b, h.SrcPort)
	for _, a := range []netip.Addr{h.Src, h.Dst} {
		var field [16]byte
		copy(field[16-a.BitLen()/8:], a.AsSlice())
		b = append(b, field[:]...)
	}
	return b
}

var (
	errHeaderShort   = errors.New("rdmacm: private data is shorter than the header")
	errHeaderVersion = errors.New("rdmacm: header of another version")
	errHeaderFamily  = errors.New("rdmacm: header of no IP version")
)

// ParseHeader reads the header of the private data of a REQ. rest is the part of b behind it.
func ParseHeader(b []byte) (h Header, rest []byte, err error) {
	if len(b) < HeaderLen {
		return h, nil, errHeaderShort
	}
	if b[0]>>4 != 0 {
		return h, nil, errHeaderVersion
	}
	h.SrcPort = binary.BigEndian.Uint16(b[2:])
	switch b[1] >> 4 {
	case 4:
		h.Src, h.Dst = netip.AddrFrom4([4]byte(b[16:20])), netip.AddrFrom4([4]byte(b[32:36]))
	case 6:
		h.Src, h.Dst = netip.AddrFrom16([16]byte(b[4:20])), netip.AddrFrom16([16]byte(b[20:36]))
	default:
		return h, nil, errHeaderFamily
	}
	return h, b[HeaderLen:], nil
}
