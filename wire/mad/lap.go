package mad

import (
	"fmt"

	"ipoibcm/ib"
	"ipoibcm/wire"
)

// Lengths in octets.
const (
	LAPPrivateLen = 168
	APRPrivateLen = 148
	APRInfoLen    = 72
)

// A LAP offers an alternate path for a connection.
type LAP struct {
	TransactionID           uint64
	LocalCommID             CommID
	RemoteCommID            CommID
	RemoteQPN               ib.QPN // of the receiver
	RemoteCMResponseTimeout ib.Timeout
	Alternate               PathInfo
	PrivateData             [LAPPrivateLen]byte
}

// Attr returns AttrLAP.
func (LAP) Attr() AttrID { return AttrLAP }
func (LAP) isMessage()   {}

// AppendBinary appends the MAD of m to b. The error is always nil.
func (m LAP) AppendBinary(b []byte) ([]byte, error) {
	b, d := beginIDs(b, AttrLAP, m.TransactionID, m.LocalCommID, m.RemoteCommID)
	wire.PutUint24(d[12:], uint32(m.RemoteQPN))
	d[15] = byte(m.RemoteCMResponseTimeout) << 3
	m.Alternate.putLAP(d[20:])
	copy(d[64:], m.PrivateData[:])
	return b, nil
}

// UnmarshalBinary sets m from the MAD in the first Len octets of b.
func (m *LAP) UnmarshalBinary(b []byte) error { return unmarshal(m, b, decodeLAP) }

func decodeLAP(h Header, d []byte) LAP {
	return LAP{
		TransactionID: h.TransactionID, LocalCommID: localID(d), RemoteCommID: remoteID(d),
		RemoteQPN:               ib.QPN(wire.Uint24(d[12:])),
		RemoteCMResponseTimeout: ib.Timeout(d[15] >> 3),
		Alternate:               readPathInfoLAP(d[20:]),
		PrivateData:             [LAPPrivateLen]byte(d[64:]),
	}
}

// String prints the communication IDs.
func (m LAP) String() string {
	return fmt.Sprintf("LAP comm=%v remote=%v", m.LocalCommID, m.RemoteCommID)
}

// An APRStatus is the outcome of a LAP.
type APRStatus uint8

// Outcomes.
const (
	APRSuccess APRStatus = iota
	APRInvalidCommID
	APRUnsupported
	APRReject
	APRRedirect
	APRIsCurrent
	APRInvalidQPN
	APRInvalidLID
	APRInvalidGID
	APRInvalidFlowLabel
	APRInvalidTrafficClass
	APRInvalidHopLimit
	APRInvalidPacketRate
	APRInvalidSL
)

var aprNames = wire.Names[APRStatus]{
	APRSuccess: "success", APRInvalidCommID: "invalid communication ID", APRUnsupported: "unsupported",
	APRReject: "reject", APRRedirect: "redirect", APRIsCurrent: "is current", APRInvalidQPN: "invalid QPN or EECN",
	APRInvalidLID: "invalid LID", APRInvalidGID: "invalid GID", APRInvalidFlowLabel: "invalid flow label",
	APRInvalidTrafficClass: "invalid traffic class", APRInvalidHopLimit: "invalid hop limit",
	APRInvalidPacketRate: "invalid packet rate", APRInvalidSL: "invalid SL",
}

// String names s.
func (s APRStatus) String() string { return aprNames.Of(s, "status %d") }

// An APR answers a LAP.
type APR struct {
	TransactionID uint64
	LocalCommID   CommID
	RemoteCommID  CommID
	InfoLength    uint8 // octets of Info that count, as the peer says
	Status        APRStatus
	Info          [APRInfoLen]byte
	PrivateData   [APRPrivateLen]byte
}

// Attr returns AttrAPR.
func (APR) Attr() AttrID { return AttrAPR }
func (APR) isMessage()   {}

// AppendBinary appends the MAD of m to b. The error is always nil.
func (m APR) AppendBinary(b []byte) ([]byte, error) {
	b, d := beginIDs(b, AttrAPR, m.TransactionID, m.LocalCommID, m.RemoteCommID)
	d[8], d[9] = m.InfoLength, byte(m.Status)
	copy(d[12:], m.Info[:])
	copy(d[84:], m.PrivateData[:])
	return b, nil
}

// UnmarshalBinary sets m from the MAD in the first Len octets of b.
func (m *APR) UnmarshalBinary(b []byte) error { return unmarshal(m, b, decodeAPR) }

func decodeAPR(h Header, d []byte) APR {
	return APR{h.TransactionID, localID(d), remoteID(d), d[8], APRStatus(d[9]), [APRInfoLen]byte(d[12:]), [APRPrivateLen]byte(d[84:])}
}

// String prints the communication IDs and the outcome.
func (m APR) String() string {
	return fmt.Sprintf("APR comm=%v remote=%v %v", m.LocalCommID, m.RemoteCommID, m.Status)
}
