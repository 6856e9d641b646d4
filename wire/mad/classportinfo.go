package mad

import (
	"encoding/binary"
	"fmt"

	"ipoibcm/ib"
)

// A ClassPortInfo says what a class manager can do and where it is. The parts
// about redirection and traps are kept as octets; CM agents leave them zero.
type ClassPortInfo struct {
	TransactionID   uint64
	Method          Method // MethodGet asks, MethodGetResp answers
	BaseVersion     uint8
	ClassVersion    uint8
	CapabilityMask  uint16
	CapabilityMask2 uint32     // 27 bits
	ResponseTime    ib.Timeout // how long the manager may take to answer
	Redirect, Trap  [32]byte
}

// Attr returns AttrClassPortInfo.
func (ClassPortInfo) Attr() AttrID { return AttrClassPortInfo }
func (ClassPortInfo) isMessage()   {}

// AppendBinary appends the MAD of m to b. The error is always nil.
func (m ClassPortInfo) AppendBinary(b []byte) ([]byte, error) {
	b, d := begin(b, AttrClassPortInfo, m.Method, m.TransactionID)
	d[0], d[1] = m.BaseVersion, m.ClassVersion
	binary.BigEndian.PutUint16(d[2:], m.CapabilityMask)
	binary.BigEndian.PutUint32(d[4:], m.CapabilityMask2<<5|uint32(m.ResponseTime&0x1f))
	copy(d[8:40], m.Redirect[:])
	copy(d[40:72], m.Trap[:])
	return b, nil
}

// UnmarshalBinary sets m from the MAD in the first Len octets of b.
func (m *ClassPortInfo) UnmarshalBinary(b []byte) error {
	return unmarshal(m, b, decodeClassPortInfo)
}

func decodeClassPortInfo(h Header, d []byte) ClassPortInfo {
	v := binary.BigEndian.Uint32(d[4:])
	return ClassPortInfo{
		TransactionID: h.TransactionID, Method: h.Method,
		BaseVersion: d[0], ClassVersion: d[1],
		CapabilityMask:  binary.BigEndian.Uint16(d[2:]),
		CapabilityMask2: v >> 5,
		ResponseTime:    ib.Timeout(v & 0x1f),
		Redirect:        [32]byte(d[8:40]),
		Trap:            [32]byte(d[40:72]),
	}
}

// String prints method and versions.
func (m ClassPortInfo) String() string {
	return fmt.Sprintf("ClassPortInfo method=0x%02x version=%d.%d", uint8(m.Method), m.BaseVersion, m.ClassVersion)
}
