// Package sa reads and writes the management datagrams of subnet
// administration: the header, and the records that an IPoIB interface needs,
// which are [MCMemberRecord], [PathRecord], [ClassPortInfo], [InformInfo] and
// [Notice].
//
// A [Message] is one MAD with one record. Answers in several segments (RMPP)
// are refused: nothing here asks for a table. In a request the component mask of
// the [Header] says which fields of the record count: the administrator ignores a
// field whose bit is not set.
//
// Sources: IBA volume 1, chapters 13.4 (MADs), 15.2 (subnet administration)
// and 13.4.8 (ClassPortInfo, Notice, InformInfo), as opensm's ib_types.h and
// Linux's include/rdma/ib_sa.h show them. Missing: every other attribute, and
// RMPP.
package sa

import (
	"encoding/binary"

	"ipoibcm/wire"
	"ipoibcm/wire/mad"
)

// Lengths in octets.
const (
	HeaderLen = 56  // MAD header, RMPP header and the header of subnet administration
	DataLen   = 200 // what is left for the record
)

// Values of the common header in every message.
const (
	Class   uint8 = 0x03
	Version uint8 = 2
)

// rmppActive is the flag of a segment of a longer message.
const rmppActive = 0x01

// A Header precedes every record. The RMPP header is not kept: it is sent as zero, and a MAD that
// is a segment of a longer message is refused.
type Header struct {
	Method        Method
	Status        Status
	TransactionID uint64
	Attr          Attr
	Modifier      uint32
	SMKey         uint64 // zero unless the sender is trusted
	AttrOffset    uint16 // from one record to the next, in units of 8 octets
	Mask          Mask
}

// AppendBinary appends the HeaderLen octets of h to b. The error is always nil.
func (h Header) AppendBinary(b []byte) ([]byte, error) {
	b, _ = mad.Header{Class: Class, ClassVersion: Version, Method: mad.Method(h.Method), Status: uint16(h.Status),
		TransactionID: h.TransactionID, Attr: mad.AttrID(h.Attr), Modifier: h.Modifier}.AppendBinary(b)
	b = append(b, make([]byte, 12)...) // RMPP
	b = binary.BigEndian.AppendUint64(b, h.SMKey)
	b = binary.BigEndian.AppendUint16(b, h.AttrOffset)
	b = append(b, 0, 0) // reserved
	return binary.BigEndian.AppendUint64(b, uint64(h.Mask)), nil
}

// UnmarshalBinary sets h from the first HeaderLen octets of b.
func (h *Header) UnmarshalBinary(b []byte) error {
	const what = "SA header"
	if len(b) < HeaderLen {
		return &wire.ShortError{What: what, Need: HeaderLen, Have: len(b)}
	}
	var m mad.Header
	if err := m.UnmarshalBinary(b); err != nil {
		return err
	}
	switch {
	case m.Class != Class:
		return &wire.FieldError{What: what, Field: "class", Value: uint64(m.Class)}
	case m.ClassVersion != Version:
		return &wire.FieldError{What: what, Field: "class version", Value: uint64(m.ClassVersion)}
	case b[26]&rmppActive != 0:
		return &wire.FieldError{What: what, Field: "RMPP flags", Value: uint64(b[26] & 7)}
	}
	*h = Header{
		Method: Method(m.Method), Status: Status(m.Status), TransactionID: m.TransactionID,
		Attr: Attr(m.Attr), Modifier: m.Modifier,
		SMKey:      binary.BigEndian.Uint64(b[36:]),
		AttrOffset: binary.BigEndian.Uint16(b[44:]),
		Mask:       Mask(binary.BigEndian.Uint64(b[48:])),
	}
	return nil
}

// A Record is one of the records of this package, as a value: [MCMemberRecord],
// [PathRecord], [ClassPortInfo], [InformInfo] or [Notice].
type Record interface {
	// Attr says which record it is.
	Attr() Attr
	// AppendBinary appends the record. The error is always nil.
	AppendBinary(b []byte) ([]byte, error)
	isRecord()
}

// A Message is one MAD: a header and the record behind it.
type Message struct {
	Header        // Attr is set from Record where there is one
	Record Record // nil means that all its octets are zero
}

// AppendBinary appends a whole MAD, mad.Len octets, to b. The error is always nil.
func (m Message) AppendBinary(b []byte) ([]byte, error) {
	if m.Record != nil {
		m.Attr = m.Record.Attr()
	}
	end := len(b) + mad.Len
	b, _ = m.Header.AppendBinary(b)
	if m.Record != nil {
		b, _ = m.Record.AppendBinary(b)
	}
	return append(b, make([]byte, end-len(b))...), nil
}

// UnmarshalBinary sets m from the MAD in the first mad.Len octets of b. Octets
// behind the record have no meaning and are not looked at.
func (m *Message) UnmarshalBinary(b []byte) error {
	var h Header
	if err := h.UnmarshalBinary(b); err != nil {
		return err
	}
	if len(b) < mad.Len {
		return &wire.ShortError{What: "SA MAD", Need: mad.Len, Have: len(b)}
	}
	r, err := readRecord(h.Attr, b[HeaderLen:mad.Len])
	if err != nil {
		return err
	}
	*m = Message{h, r}
	return nil
}

// readRecord reads the record of one attribute.
func readRecord(a Attr, b []byte) (Record, error) {
	switch a {
	case AttrMCMemberRecord:
		return record[MCMemberRecord](b)
	case AttrPathRecord:
		return record[PathRecord](b)
	case AttrClassPortInfo:
		return record[ClassPortInfo](b)
	case AttrInformInfo:
		return record[InformInfo](b)
	case AttrNotice:
		return record[Notice](b)
	}
	return nil, &wire.FieldError{What: "SA MAD", Field: "attribute", Value: uint64(a)}
}

func record[R Record, P interface {
	*R
	UnmarshalBinary([]byte) error
}](b []byte) (Record, error) {
	var r R
	if err := P(&r).UnmarshalBinary(b); err != nil {
		return nil, err
	}
	return r, nil
}
