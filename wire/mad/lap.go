package mad

import (
	"fmt"

	"ipoibcm/ib"
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
	b, d := begin(b, AttrLAP, MethodSend, m.TransactionID)
	putIDs(d, m.LocalCommID, m.RemoteCommID)
	put24(d[12:], uint32(m.RemoteQPN))
	d[15] = byte(m.RemoteCMResponseTimeout) << 3
	m.Alternate.putLAP(d[20:])
	copy(d[64:], m.PrivateData[:])
	return b, nil
}

// UnmarshalBinary sets m from the MAD in the first Len octets of b.
func (m *LAP) UnmarshalBinary(b []byte) error { return unmarshal(m, b, LAP.decode) }

func (m LAP) decode(h Header, d []byte) LAP {
	l, r := ids(d)
	return LAP{
		TransactionID: h.TransactionID, LocalCommID: l, RemoteCommID: r,
		RemoteQPN:               ib.QPN(u24(d[12:])),
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

// String names s.
func (s APRStatus) String() string {
	names := [...]string{"success", "invalid communication ID", "unsupported", "reject", "redirect", "is current",
		"invalid QPN or EECN", "invalid LID", "invalid GID", "invalid flow label", "invalid traffic class",
		"invalid hop limit", "invalid packet rate", "invalid SL"}
	if int(s) < len(names) {
		return names[s]
	}
	return fmt.Sprintf("status %d", uint8(s))
}

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
	b, d := begin(b, AttrAPR, MethodSend, m.TransactionID)
	putIDs(d, m.LocalCommID, m.RemoteCommID)
	d[8], d[9] = m.InfoLength, byte(m.Status)
	copy(d[12:], m.Info[:])
	copy(d[84:], m.PrivateData[:])
	return b, nil
}

// UnmarshalBinary sets m from the MAD in the first Len octets of b.
func (m *APR) UnmarshalBinary(b []byte) error { return unmarshal(m, b, APR.decode) }

func (m APR) decode(h Header, d []byte) APR {
	l, r := ids(d)
	return APR{h.TransactionID, l, r, d[8], APRStatus(d[9]), [APRInfoLen]byte(d[12:]), [APRPrivateLen]byte(d[84:])}
}

// String prints the communication IDs and the outcome.
func (m APR) String() string {
	return fmt.Sprintf("APR comm=%v remote=%v %v", m.LocalCommID, m.RemoteCommID, m.Status)
}
