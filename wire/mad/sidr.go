package mad

import (
	"encoding/binary"
	"fmt"

	"ipoibcm/ib"
	"ipoibcm/serviceid"
	"ipoibcm/wire"
)

// Lengths in octets.
const (
	SIDRREQPrivateLen = 216
	SIDRREPPrivateLen = 136
	SIDRInfoLen       = 72
)

// A SIDRREQ asks which UD QP serves a service ID.
type SIDRREQ struct {
	TransactionID uint64
	RequestID     CommID
	PKey          ib.PKey
	ServiceID     serviceid.ID
	PrivateData   [SIDRREQPrivateLen]byte
}

// Attr returns AttrSIDRREQ.
func (SIDRREQ) Attr() AttrID { return AttrSIDRREQ }
func (SIDRREQ) isMessage()   {}

// AppendBinary appends the MAD of m to b. The error is always nil.
func (m SIDRREQ) AppendBinary(b []byte) ([]byte, error) {
	b, d := begin(b, AttrSIDRREQ, MethodSend, m.TransactionID)
	binary.BigEndian.PutUint32(d, uint32(m.RequestID))
	binary.BigEndian.PutUint16(d[4:], uint16(m.PKey))
	binary.BigEndian.PutUint64(d[8:], uint64(m.ServiceID))
	copy(d[16:], m.PrivateData[:])
	return b, nil
}

// UnmarshalBinary sets m from the MAD in the first Len octets of b.
func (m *SIDRREQ) UnmarshalBinary(b []byte) error { return unmarshal(m, b, decodeSIDRREQ) }

func decodeSIDRREQ(h Header, d []byte) SIDRREQ {
	return SIDRREQ{
		TransactionID: h.TransactionID,
		RequestID:     CommID(binary.BigEndian.Uint32(d)),
		PKey:          ib.PKey(binary.BigEndian.Uint16(d[4:])),
		ServiceID:     serviceid.ID(binary.BigEndian.Uint64(d[8:])),
		PrivateData:   [SIDRREQPrivateLen]byte(d[16:]),
	}
}

// String prints request and service ID.
func (m SIDRREQ) String() string {
	return fmt.Sprintf("SIDR_REQ id=%v service=%v", m.RequestID, m.ServiceID)
}

// A SIDRStatus is the outcome of a SIDR_REQ.
type SIDRStatus uint8

// Outcomes.
const (
	SIDRValidQPN SIDRStatus = iota
	SIDRUnsupportedServiceID
	SIDRRejected
	SIDRNoQP
	SIDRRedirect
	SIDRUnsupportedVersion
)

var sidrNames = wire.Names[SIDRStatus]{
	SIDRValidQPN: "valid QPN", SIDRUnsupportedServiceID: "service ID unsupported", SIDRRejected: "rejected",
	SIDRNoQP: "no QP", SIDRRedirect: "redirect", SIDRUnsupportedVersion: "version unsupported",
}

// String names s.
func (s SIDRStatus) String() string { return sidrNames.Of(s, "status %d") }

// A SIDRREP answers a SIDR_REQ.
type SIDRREP struct {
	TransactionID uint64
	RequestID     CommID
	Status        SIDRStatus
	InfoLength    uint8 // octets of Info that count, as the peer says
	QPN           ib.QPN
	ServiceID     serviceid.ID
	QKey          ib.QKey
	Info          [SIDRInfoLen]byte
	PrivateData   [SIDRREPPrivateLen]byte
}

// Attr returns AttrSIDRREP.
func (SIDRREP) Attr() AttrID { return AttrSIDRREP }
func (SIDRREP) isMessage()   {}

// AppendBinary appends the MAD of m to b. The error is always nil.
func (m SIDRREP) AppendBinary(b []byte) ([]byte, error) {
	b, d := begin(b, AttrSIDRREP, MethodSend, m.TransactionID)
	binary.BigEndian.PutUint32(d, uint32(m.RequestID))
	d[4], d[5] = byte(m.Status), m.InfoLength
	wire.PutUint24(d[8:], uint32(m.QPN))
	binary.BigEndian.PutUint64(d[12:], uint64(m.ServiceID))
	binary.BigEndian.PutUint32(d[20:], uint32(m.QKey))
	copy(d[24:], m.Info[:])
	copy(d[96:], m.PrivateData[:])
	return b, nil
}

// UnmarshalBinary sets m from the MAD in the first Len octets of b.
func (m *SIDRREP) UnmarshalBinary(b []byte) error { return unmarshal(m, b, decodeSIDRREP) }

func decodeSIDRREP(h Header, d []byte) SIDRREP {
	return SIDRREP{
		TransactionID: h.TransactionID,
		RequestID:     CommID(binary.BigEndian.Uint32(d)),
		Status:        SIDRStatus(d[4]),
		InfoLength:    d[5],
		QPN:           ib.QPN(wire.Uint24(d[8:])),
		ServiceID:     serviceid.ID(binary.BigEndian.Uint64(d[12:])),
		QKey:          ib.QKey(binary.BigEndian.Uint32(d[20:])),
		Info:          [SIDRInfoLen]byte(d[24:]),
		PrivateData:   [SIDRREPPrivateLen]byte(d[96:]),
	}
}

// String prints request ID and outcome.
func (m SIDRREP) String() string {
	return fmt.Sprintf("SIDR_REP id=%v %v qpn=%v", m.RequestID, m.Status, m.QPN)
}
