package mad

import (
	"fmt"

	"ipoibcm/ib"
)

// Lengths in octets.
const (
	DREQPrivateLen = 220
	DREPPrivateLen = 224
)

// A DREQ asks to end a connection.
type DREQ struct {
	TransactionID uint64
	LocalCommID   CommID
	RemoteCommID  CommID
	RemoteQPN     ib.QPN // of the receiver
	PrivateData   [DREQPrivateLen]byte
}

// Attr returns AttrDREQ.
func (DREQ) Attr() AttrID { return AttrDREQ }
func (DREQ) isMessage()   {}

// AppendBinary appends the MAD of m to b. The error is always nil.
func (m DREQ) AppendBinary(b []byte) ([]byte, error) {
	b, d := begin(b, AttrDREQ, MethodSend, m.TransactionID)
	putIDs(d, m.LocalCommID, m.RemoteCommID)
	put24(d[8:], uint32(m.RemoteQPN))
	copy(d[12:], m.PrivateData[:])
	return b, nil
}

// UnmarshalBinary sets m from the MAD in the first Len octets of b.
func (m *DREQ) UnmarshalBinary(b []byte) error { return unmarshal(m, b, DREQ.decode) }

func (m DREQ) decode(h Header, d []byte) DREQ {
	l, r := ids(d)
	return DREQ{h.TransactionID, l, r, ib.QPN(u24(d[8:])), [DREQPrivateLen]byte(d[12:])}
}

// String prints the communication IDs and the QPN.
func (m DREQ) String() string {
	return fmt.Sprintf("DREQ comm=%v remote=%v qpn=%v", m.LocalCommID, m.RemoteCommID, m.RemoteQPN)
}

// A DREP answers a DREQ.
type DREP struct {
	TransactionID uint64
	LocalCommID   CommID
	RemoteCommID  CommID
	PrivateData   [DREPPrivateLen]byte
}

// Attr returns AttrDREP.
func (DREP) Attr() AttrID { return AttrDREP }
func (DREP) isMessage()   {}

// AppendBinary appends the MAD of m to b. The error is always nil.
func (m DREP) AppendBinary(b []byte) ([]byte, error) {
	b, d := begin(b, AttrDREP, MethodSend, m.TransactionID)
	putIDs(d, m.LocalCommID, m.RemoteCommID)
	copy(d[8:], m.PrivateData[:])
	return b, nil
}

// UnmarshalBinary sets m from the MAD in the first Len octets of b.
func (m *DREP) UnmarshalBinary(b []byte) error { return unmarshal(m, b, DREP.decode) }

func (m DREP) decode(h Header, d []byte) DREP {
	l, r := ids(d)
	return DREP{h.TransactionID, l, r, [DREPPrivateLen]byte(d[8:])}
}

// String prints the communication IDs.
func (m DREP) String() string {
	return fmt.Sprintf("DREP comm=%v remote=%v", m.LocalCommID, m.RemoteCommID)
}
