package mad

import "fmt"

// RTUPrivateLen is the length of the private data of an RTU, in octets.
const RTUPrivateLen = 224

// An RTU says that the REP arrived: ready to use. RFC 4755 section 3.2 prints
// it as "RTA".
type RTU struct {
	TransactionID uint64
	LocalCommID   CommID
	RemoteCommID  CommID
	PrivateData   [RTUPrivateLen]byte
}

// Attr returns AttrRTU.
func (RTU) Attr() AttrID { return AttrRTU }
func (RTU) isMessage()   {}

// AppendBinary appends the MAD of m to b. The error is always nil.
func (m RTU) AppendBinary(b []byte) ([]byte, error) {
	b, d := beginIDs(b, AttrRTU, m.TransactionID, m.LocalCommID, m.RemoteCommID)
	copy(d[8:], m.PrivateData[:])
	return b, nil
}

// UnmarshalBinary sets m from the MAD in the first Len octets of b.
func (m *RTU) UnmarshalBinary(b []byte) error { return unmarshal(m, b, decodeRTU) }

func decodeRTU(h Header, d []byte) RTU {
	return RTU{h.TransactionID, localID(d), remoteID(d), [RTUPrivateLen]byte(d[8:])}
}

// String prints the communication IDs.
func (m RTU) String() string {
	return fmt.Sprintf("RTU comm=%v remote=%v", m.LocalCommID, m.RemoteCommID)
}
