package mad

import (
	"encoding/binary"
	"fmt"

	"ipoibcm/wire"
)

// Lengths in octets.
const (
	REJPrivateLen = 148
	ARILen        = 72 // additional reject information
)

// A REJ refuses or ends the setup of a connection.
type REJ struct {
	TransactionID   uint64
	LocalCommID     CommID // 0 when a REQ is rejected before an ID was assigned
	RemoteCommID    CommID
	MessageRejected MessageKind // 2 bits
	ARILength       uint8       // octets of ARI that count, 0 to 127 as the peer says
	Reason          RejectReason
	ARI             [ARILen]byte
	PrivateData     [REJPrivateLen]byte
}

// Attr returns AttrREJ.
func (REJ) Attr() AttrID { return AttrREJ }
func (REJ) isMessage()   {}

// AppendBinary appends the MAD of m to b. The error is always nil.
func (m REJ) AppendBinary(b []byte) ([]byte, error) {
	b, d := beginIDs(b, AttrREJ, m.TransactionID, m.LocalCommID, m.RemoteCommID)
	d[8] = byte(m.MessageRejected) << 6
	d[9] = m.ARILength << 1
	binary.BigEndian.PutUint16(d[10:], uint16(m.Reason))
	copy(d[12:], m.ARI[:])
	copy(d[84:], m.PrivateData[:])
	return b, nil
}

// UnmarshalBinary sets m from the MAD in the first Len octets of b.
func (m *REJ) UnmarshalBinary(b []byte) error { return unmarshal(m, b, decodeREJ) }

func decodeREJ(h Header, d []byte) REJ {
	return REJ{
		TransactionID: h.TransactionID, LocalCommID: localID(d), RemoteCommID: remoteID(d),
		MessageRejected: MessageKind(d[8] >> 6),
		ARILength:       d[9] >> 1,
		Reason:          RejectReason(binary.BigEndian.Uint16(d[10:])),
		ARI:             [ARILen]byte(d[12:]),
		PrivateData:     [REJPrivateLen]byte(d[84:]),
	}
}

// String prints the communication IDs and the reason.
func (m REJ) String() string {
	return fmt.Sprintf("REJ comm=%v remote=%v of=%v reason=%d (%v)", m.LocalCommID, m.RemoteCommID,
		m.MessageRejected, uint16(m.Reason), m.Reason)
}

// A RejectReason is the reason code of a REJ. It is a wire code, not an error.
type RejectReason uint16

// Reasons.
const (
	RejNoQP                           RejectReason = 1
	RejNoEEC                          RejectReason = 2
	RejNoResources                    RejectReason = 3
	RejTimeout                        RejectReason = 4 // ARI holds the sender's CA GUID
	RejUnsupported                    RejectReason = 5
	RejInvalidCommID                  RejectReason = 6
	RejInvalidCommInstance            RejectReason = 7
	RejInvalidServiceID               RejectReason = 8
	RejInvalidTransport               RejectReason = 9
	RejStaleConnection                RejectReason = 10
	RejRDCNotExist                    RejectReason = 11
	RejInvalidPrimaryGID              RejectReason = 12
	RejInvalidPrimaryLID              RejectReason = 13
	RejInvalidPrimarySL               RejectReason = 14
	RejInvalidPrimaryTrafficClass     RejectReason = 15
	RejInvalidPrimaryHopLimit         RejectReason = 16
	RejInvalidPrimaryPacketRate       RejectReason = 17
	RejInvalidAlternateGID            RejectReason = 18
	RejInvalidAlternateLID            RejectReason = 19
	RejInvalidAlternateSL             RejectReason = 20
	RejInvalidAlternateTrafficClass   RejectReason = 21
	RejInvalidAlternateHopLimit       RejectReason = 22
	RejInvalidAlternatePacketRate     RejectReason = 23
	RejPortCMRedirect                 RejectReason = 24
	RejPortRedirect                   RejectReason = 25
	RejInvalidPathMTU                 RejectReason = 26
	RejInsufficientResponderResources RejectReason = 27
	RejConsumer                       RejectReason = 28 // the crossing verdict of RFC 4755 section 3.3
	RejRNRRetryCount                  RejectReason = 29
	RejDuplicateCommID                RejectReason = 30
	RejInvalidClassVersion            RejectReason = 31
	RejInvalidPrimaryFlowLabel        RejectReason = 32
	RejInvalidAlternateFlowLabel      RejectReason = 33
	RejVendorOption                   RejectReason = 35
)

var rejectNames = wire.Names[RejectReason]{
	RejNoQP: "no QP available", RejNoEEC: "no EE context available", RejNoResources: "no resources", RejTimeout: "timeout",
	RejUnsupported: "unsupported request", RejInvalidCommID: "invalid communication ID",
	RejInvalidCommInstance: "invalid communication instance", RejInvalidServiceID: "invalid service ID",
	RejInvalidTransport: "invalid transport service type", RejStaleConnection: "stale connection",
	RejRDCNotExist: "RDC does not exist", RejInvalidPrimaryGID: "invalid primary remote GID",
	RejInvalidPrimaryLID: "invalid primary remote LID", RejInvalidPrimarySL: "invalid primary SL",
	RejInvalidPrimaryTrafficClass: "invalid primary traffic class",
	RejInvalidPrimaryHopLimit:     "invalid primary hop limit",
	RejInvalidPrimaryPacketRate:   "invalid primary packet rate", RejInvalidAlternateGID: "invalid alternate GID",
	RejInvalidAlternateLID: "invalid alternate LID", RejInvalidAlternateSL: "invalid alternate SL",
	RejInvalidAlternateTrafficClass: "invalid alternate traffic class",
	RejInvalidAlternateHopLimit:     "invalid alternate hop limit",
	RejInvalidAlternatePacketRate:   "invalid alternate packet rate", RejPortCMRedirect: "port and CM redirection",
	RejPortRedirect: "port redirection", RejInvalidPathMTU: "invalid path MTU",
	RejInsufficientResponderResources: "insufficient responder resources", RejConsumer: "consumer reject",
	RejRNRRetryCount: "RNR retry count reject", RejDuplicateCommID: "duplicate local communication ID",
	RejInvalidClassVersion: "unsupported class version", RejInvalidPrimaryFlowLabel: "invalid primary flow label",
	RejInvalidAlternateFlowLabel: "invalid alternate flow label", RejVendorOption: "vendor option not supported",
}

// String names r.
func (r RejectReason) String() string { return rejectNames.Of(r, "reason %d") }
