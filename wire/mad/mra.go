package mad

import (
	"fmt"

	"ipoibcm/ib"
	"ipoibcm/wire"
)

// MRAPrivateLen is the length of the private data of an MRA, in octets.
const MRAPrivateLen = 222

// A MessageKind says in an MRA or REJ which message is meant.
type MessageKind uint8

// Kinds. In a REJ, 2 stands for every other message.
const (
	KindREQ   MessageKind = 0
	KindREP   MessageKind = 1
	KindLAP   MessageKind = 2 // MRA
	KindOther MessageKind = 2 // REJ
)

var messageKindNames = wire.Names[MessageKind]{KindREQ: "REQ", KindREP: "REP", KindOther: "other"}

// String prints REQ, REP, or "other".
func (k MessageKind) String() string { return messageKindNames.Of(k, "MessageKind(%d)") }

// An MRA says that a message arrived and that the answer takes longer.
type MRA struct {
	TransactionID  uint64
	LocalCommID    CommID
	RemoteCommID   CommID
	MessageMRAed   MessageKind // 2 bits
	ServiceTimeout ib.Timeout  // how much longer
	PrivateData    [MRAPrivateLen]byte
}

// Attr returns AttrMRA.
func (MRA) Attr() AttrID { return AttrMRA }
func (MRA) isMessage()   {}

// AppendBinary appends the MAD of m to b. The error is always nil.
func (m MRA) AppendBinary(b []byte) ([]byte, error) {
	b, d := beginIDs(b, AttrMRA, m.TransactionID, m.LocalCommID, m.RemoteCommID)
	d[8] = byte(m.MessageMRAed) << 6
	d[9] = byte(m.ServiceTimeout) << 3
	copy(d[10:], m.PrivateData[:])
	return b, nil
}

// UnmarshalBinary sets m from the MAD in the first Len octets of b.
func (m *MRA) UnmarshalBinary(b []byte) error { return unmarshal(m, b, decodeMRA) }

func decodeMRA(h Header, d []byte) MRA {
	return MRA{h.TransactionID, localID(d), remoteID(d), MessageKind(d[8] >> 6), ib.Timeout(d[9] >> 3), [MRAPrivateLen]byte(d[10:])}
}

// String prints the communication IDs and the wait.
func (m MRA) String() string {
	return fmt.Sprintf("MRA comm=%v remote=%v of=%v wait=%v", m.LocalCommID, m.RemoteCommID, m.MessageMRAed,
		m.ServiceTimeout.Duration())
}
