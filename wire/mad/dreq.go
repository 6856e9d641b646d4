package mad

import (
	"fmt"

	"ipoibcm/ib"
	"ipoibcm/wire"
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
	b, d := beginIDs(b, AttrDREQ, m.TransactionID, m.LocalCommID, m.RemoteCommID)
	wire.PutUint24(d[8:], uint32(m.RemoteQPN))
	copy(d[12:], m.PrivateData[:])
	return b, nil
}

// UnmarshalBinary sets m from the MAD in the first Len octets of b.
func (m *DREQ) UnmarshalBinary(b []byte) error { return unmarshal(m, b, decodeDREQ) }

func decodeDREQ(h Header, d []byte) DREQ {
	return DREQ{h.TransactionID, localID(d), remoteID(d), ib.QPN(wire.Uint24(d[8:])), [DREQPrivateLen]byte(d[12:])}
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
	b, d := beginIDs(b, AttrDREP, m.TransactionID, m.LocalCommID, m.RemoteCommID)
	copy(d[8:], m.PrivateData[:])
	return b, nil
}

// UnmarshalBinary sets m from the MAD in the first Len octets of b.
func (m *DREP) UnmarshalBinary(b []byte) error { return unmarshal(m, b, decodeDREP) }

func decodeDREP(h Header, d []byte) DREP {
	return DREP{h.TransactionID, localID(d), remoteID(d), [DREPPrivateLen]byte(d[8:])}
}

// String prints the communication IDs.
func (m DREP) String() string {
	return fmt.Sprintf("DREP comm=%v remote=%v", m.LocalCommID, m.RemoteCommID)
}
