package mad

import (
	"encoding/binary"
	"fmt"

	"ipoibcm/ib"
	"ipoibcm/wire"
)

// REPPrivateLen is the length of the private data of a REP, in octets.
const REPPrivateLen = 196

// A REP accepts a REQ. "Local" is its sender, the passive side.
type REP struct {
	TransactionID       uint64
	LocalCommID         CommID
	RemoteCommID        CommID
	LocalQKey           ib.QKey
	LocalQPN            ib.QPN
	StartingPSN         ib.PSN // the receiver of the REP starts sending with it
	ResponderResources  uint8
	InitiatorDepth      uint8
	TargetACKDelay      ib.Timeout
	FailoverAccepted    uint8 // 2 bits
	EndToEndFlowControl bool
	RNRRetryCount       uint8 // 0 to 7; the receiver of the REP uses it
	SRQ                 bool
	LocalCAGUID         ib.GUID
	PrivateData         [REPPrivateLen]byte
}

// Attr returns AttrREP.
func (REP) Attr() AttrID { return AttrREP }
func (REP) isMessage()   {}

// AppendBinary appends the MAD of m to b. The error is always nil.
func (m REP) AppendBinary(b []byte) ([]byte, error) {
	b, d := beginIDs(b, AttrREP, m.TransactionID, m.LocalCommID, m.RemoteCommID)
	binary.BigEndian.PutUint32(d[8:], uint32(m.LocalQKey))
	wire.PutUint24(d[12:], uint32(m.LocalQPN))
	wire.PutUint24(d[20:], uint32(m.StartingPSN))
	d[24], d[25] = m.ResponderResources, m.InitiatorDepth
	d[26] = byte(m.TargetACKDelay)<<3 | m.FailoverAccepted&3<<1 | wire.Bit(m.EndToEndFlowControl, 1)
	d[27] = m.RNRRetryCount<<5 | wire.Bit(m.SRQ, 0x10)
	binary.BigEndian.PutUint64(d[28:], uint64(m.LocalCAGUID))
	copy(d[36:], m.PrivateData[:])
	return b, nil
}

// UnmarshalBinary sets m from the MAD in the first Len octets of b.
func (m *REP) UnmarshalBinary(b []byte) error { return unmarshal(m, b, decodeREP) }

func decodeREP(h Header, d []byte) REP {
	return REP{
		TransactionID: h.TransactionID, LocalCommID: localID(d), RemoteCommID: remoteID(d),
		LocalQKey:           ib.QKey(binary.BigEndian.Uint32(d[8:])),
		LocalQPN:            ib.QPN(wire.Uint24(d[12:])),
		StartingPSN:         ib.PSN(wire.Uint24(d[20:])),
		ResponderResources:  d[24],
		InitiatorDepth:      d[25],
		TargetACKDelay:      ib.Timeout(d[26] >> 3),
		FailoverAccepted:    d[26] >> 1 & 3,
		EndToEndFlowControl: d[26]&1 != 0,
		RNRRetryCount:       d[27] >> 5,
		SRQ:                 d[27]&0x10 != 0,
		LocalCAGUID:         ib.GUID(binary.BigEndian.Uint64(d[28:])),
		PrivateData:         [REPPrivateLen]byte(d[36:]),
	}
}

// String prints what identifies the connection.
func (m REP) String() string {
	return fmt.Sprintf("REP comm=%v remote=%v qpn=%v psn=%v", m.LocalCommID, m.RemoteCommID, m.LocalQPN, m.StartingPSN)
}
