// Package mad reads and writes management datagrams of the communication
// management class: the common header and every CM message.
//
// Messages are plain comparable structs. Each holds the transaction ID of its MAD
// header, because the rest of the header follows from the message. AppendBinary
// writes a whole MAD of 256 octets and UnmarshalBinary reads one. The package keeps
// no connection and does not interpret private data.
//
// Sources: IBA volume 1 chapters 12 and 13. EE contexts, vendor IDs, ECE option bits
// and the alternate-path SAP bit are sent as zero and ignored on receipt.
package mad

import (
	"encoding/binary"
	"fmt"

	"ipoibcm/wire"
)

// Lengths in octets.
const (
	Len       = 256 // a whole MAD
	HeaderLen = 24  // the common header, in front of 232 octets of CM data
)

// Values of the common header in every CM message.
const (
	baseVersion       = 1
	ClassCM     uint8 = 0x07
	VersionCM   uint8 = 2
)

// A Method is the method octet. All CM messages use MethodSend.
type Method uint8

// Methods.
const (
	MethodGet     Method = 0x01
	MethodSend    Method = 0x03
	MethodGetResp Method = 0x81
)

// A CommID names a connection at one end.
type CommID uint32

// String prints id in eight hexadecimal digits.
func (id CommID) String() string { return fmt.Sprintf("%08x", uint32(id)) }

// An AttrID is the attribute ID of a MAD: which message it is.
type AttrID uint16

// Attribute IDs of the CM class.
const (
	AttrClassPortInfo AttrID = 0x0001
	AttrREQ           AttrID = 0x0010
	AttrMRA           AttrID = 0x0011
	AttrREJ           AttrID = 0x0012
	AttrREP           AttrID = 0x0013
	AttrRTU           AttrID = 0x0014
	AttrDREQ          AttrID = 0x0015
	AttrDREP          AttrID = 0x0016
	AttrSIDRREQ       AttrID = 0x0017
	AttrSIDRREP       AttrID = 0x0018
	AttrLAP           AttrID = 0x0019
	AttrAPR           AttrID = 0x001a
)

var attrNames = wire.Names[AttrID]{
	AttrClassPortInfo: "ClassPortInfo", AttrREQ: "REQ", AttrMRA: "MRA", AttrREJ: "REJ", AttrREP: "REP", AttrRTU: "RTU",
	AttrDREQ: "DREQ", AttrDREP: "DREP", AttrSIDRREQ: "SIDR_REQ", AttrSIDRREP: "SIDR_REP", AttrLAP: "LAP", AttrAPR: "APR",
}

// String names the message.
func (a AttrID) String() string { return attrNames.Of(a, "AttrID(0x%04x)") }

// A Header is the common MAD header. Base version 1 is not kept.
type Header struct {
	Class         uint8
	ClassVersion  uint8
	Method        Method
	Status        uint16
	ClassSpecific uint16
	TransactionID uint64
	Attr          AttrID
	Modifier      uint32 // some stacks put ECE option bits here
}

// AppendBinary appends the HeaderLen octets of h to b. The error is always nil.
func (h Header) AppendBinary(b []byte) ([]byte, error) {
	b = append(b, baseVersion, h.Class, h.ClassVersion, byte(h.Method))
	b = binary.BigEndian.AppendUint16(b, h.Status)
	b = binary.BigEndian.AppendUint16(b, h.ClassSpecific)
	b = binary.BigEndian.AppendUint64(b, h.TransactionID)
	b = binary.BigEndian.AppendUint16(b, uint16(h.Attr))
	b = append(b, 0, 0) // reserved
	return binary.BigEndian.AppendUint32(b, h.Modifier), nil
}

// UnmarshalBinary sets h from the first HeaderLen octets of b.
func (h *Header) UnmarshalBinary(b []byte) error {
	if len(b) < HeaderLen {
		return &wire.ShortError{What: "MAD header", Need: HeaderLen, Have: len(b)}
	}
	if b[0] != baseVersion {
		return &wire.FieldError{What: "MAD header", Field: "base version", Value: uint64(b[0])}
	}
	*h = Header{
		Class: b[1], ClassVersion: b[2], Method: Method(b[3]),
		Status:        binary.BigEndian.Uint16(b[4:]),
		ClassSpecific: binary.BigEndian.Uint16(b[6:]),
		TransactionID: binary.BigEndian.Uint64(b[8:]),
		Attr:          AttrID(binary.BigEndian.Uint16(b[16:])),
		Modifier:      binary.BigEndian.Uint32(b[20:]),
	}
	return nil
}

// A Message is one of the messages of this package, as a value: [REQ], [MRA],
// [REJ], [REP], [RTU], [DREQ], [DREP], [SIDRREQ], [SIDRREP], [LAP], [APR] or
// [ClassPortInfo].
type Message interface {
	// Attr says which message it is.
	Attr() AttrID
	// AppendBinary appends the whole MAD, Len octets. The error is always nil.
	AppendBinary(b []byte) ([]byte, error)
	isMessage()
}

// decoders make a message of its header and its CM data.
var decoders = map[AttrID]func(Header, []byte) Message{
	AttrREQ: decoder(decodeREQ), AttrMRA: decoder(decodeMRA), AttrREJ: decoder(decodeREJ), AttrREP: decoder(decodeREP),
	AttrRTU: decoder(decodeRTU), AttrDREQ: decoder(decodeDREQ), AttrDREP: decoder(decodeDREP),
	AttrSIDRREQ: decoder(decodeSIDRREQ), AttrSIDRREP: decoder(decodeSIDRREP), AttrLAP: decoder(decodeLAP),
	AttrAPR: decoder(decodeAPR), AttrClassPortInfo: decoder(decodeClassPortInfo),
}

func decoder[M Message](decode func(Header, []byte) M) func(Header, []byte) Message {
	return func(h Header, d []byte) Message { return decode(h, d) }
}

// Parse reads a whole MAD. If only the message is wrong or unknown, the Header is
// valid beside the error.
func Parse(b []byte) (Header, Message, error) {
	var h Header
	if err := h.UnmarshalBinary(b); err != nil {
		return h, nil, err
	}
	decode := decoders[h.Attr]
	if decode == nil {
		return h, nil, &wire.FieldError{What: "CM MAD", Field: "attribute", Value: uint64(h.Attr)}
	}
	if err := check(h, b, h.Attr); err != nil {
		return h, nil, err
	}
	return h, decode(h, b[HeaderLen:Len]), nil
}

// unmarshal is the common part of every UnmarshalBinary.
func unmarshal[M Message](m *M, b []byte, decode func(Header, []byte) M) error {
	var h Header
	if err := h.UnmarshalBinary(b); err != nil {
		return err
	}
	if err := check(h, b, (*m).Attr()); err != nil {
		return err
	}
	*m = decode(h, b[HeaderLen:Len])
	return nil
}

// check returns why b is no CM MAD with attribute a, or nil if it is one.
func check(h Header, b []byte, a AttrID) error {
	what := "CM " + a.String()
	method := h.Method == MethodSend
	if a == AttrClassPortInfo {
		method = h.Method == MethodGet || h.Method == MethodGetResp
	}
	switch {
	case len(b) < Len:
		return &wire.ShortError{What: what, Need: Len, Have: len(b)}
	case h.Attr != a:
		return &wire.FieldError{What: what, Field: "attribute", Value: uint64(h.Attr)}
	case h.Class != ClassCM:
		return &wire.FieldError{What: what, Field: "class", Value: uint64(h.Class)}
	case h.ClassVersion != VersionCM:
		return &wire.FieldError{What: what, Field: "class version", Value: uint64(h.ClassVersion)}
	case !method:
		return &wire.FieldError{What: what, Field: "method", Value: uint64(h.Method)}
	}
	return nil
}

// beginIDs is begin for a message whose body begins with both communication IDs.
func beginIDs(b []byte, a AttrID, tid uint64, local, remote CommID) (out, body []byte) {
	b, d := begin(b, a, MethodSend, tid)
	binary.BigEndian.PutUint32(d, uint32(local))
	binary.BigEndian.PutUint32(d[4:], uint32(remote))
	return b, d
}

// begin appends a MAD with an all-zero body and returns b and the body.
func begin(b []byte, a AttrID, method Method, tid uint64) (out, body []byte) {
	h := Header{Class: ClassCM, ClassVersion: VersionCM, Method: method, TransactionID: tid, Attr: a}
	b, _ = h.AppendBinary(b)
	n := len(b)
	b = append(b, make([]byte, Len-HeaderLen)...)
	return b, b[n:]
}

// localID and remoteID return the communication IDs with which most bodies begin.
func localID(d []byte) CommID  { return CommID(binary.BigEndian.Uint32(d)) }
func remoteID(d []byte) CommID { return CommID(binary.BigEndian.Uint32(d[4:])) }

// Asks reports whether a MAD begins something or is answered without a connection:
// anything but REP, RTU, MRA, REJ, DREP, SIDR_REP and APR. It looks at the attribute ID
// only. It returns true for a MAD that is shorter than a header.
func Asks(b []byte) bool {
	if len(b) < HeaderLen {
		return true
	}
	switch AttrID(binary.BigEndian.Uint16(b[16:])) {
	case AttrREP, AttrRTU, AttrMRA, AttrREJ, AttrDREP, AttrSIDRREP, AttrAPR:
		return false
	}
	return true
}
