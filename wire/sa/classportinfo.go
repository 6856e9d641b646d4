package sa

import (
	"encoding/binary"
	"fmt"

	"ipoibcm/ib"
	"ipoibcm/wire"
)

// ClassPortInfoLen is the length of a ClassPortInfo in octets.
const ClassPortInfoLen = 72

// Cap2SendOnlyFullMember is the bit of CapabilityMask2 by which a subnet
// administrator says that it knows SendOnlyFullMember joins.
const Cap2SendOnlyFullMember = 1 << 12

// A Locator is the address of a class manager, or of the receiver of its traps.
type Locator struct {
	GID          ib.GID
	TrafficClass uint8
	SL           uint8  // 4 bits
	FlowLabel    uint32 // 20 bits
	LID          ib.LID // zero means that the GID is the address
	PKey         ib.PKey
	QPN          ib.QPN
	QKey         ib.QKey
}

// append appends the 32 octets of l. hop is the octet in front of the QPN.
func (l Locator) append(b []byte, hop uint8) []byte {
	b = append(b, l.GID[:]...)
	b = binary.BigEndian.AppendUint32(b, uint32(l.TrafficClass)<<24|uint32(l.SL&15)<<20|l.FlowLabel&0xfffff)
	b = binary.BigEndian.AppendUint16(b, uint16(l.LID))
	b = binary.BigEndian.AppendUint16(b, uint16(l.PKey))
	b = binary.BigEndian.AppendUint32(b, uint32(hop)<<24|uint32(l.QPN&ib.QPNMask))
	return binary.BigEndian.AppendUint32(b, uint32(l.QKey))
}

func (l *Locator) unmarshal(b []byte) {
	_ = b[31]
	v := binary.BigEndian.Uint32(b[16:])
	*l = Locator{
		GID: ib.GID(b[:16]), TrafficClass: uint8(v >> 24), SL: uint8(v >> 20 & 15), FlowLabel: v & 0xfffff,
		LID: ib.LID(binary.BigEndian.Uint16(b[20:])), PKey: ib.PKey(binary.BigEndian.Uint16(b[22:])),
		QPN: ib.QPN(wire.Uint24(b[25:])), QKey: ib.QKey(binary.BigEndian.Uint32(b[28:])),
	}
}

// A ClassPortInfo says what a class manager can do, how long it may take to
// answer, and where it is.
type ClassPortInfo struct {
	BaseVersion     uint8
	ClassVersion    uint8
	CapabilityMask  uint16
	CapabilityMask2 uint32     // 27 bits
	ResponseTime    ib.Timeout // 5 bits
	Redirect, Trap  Locator
	TrapHopLimit    uint8
}

// Attr returns AttrClassPortInfo.
func (ClassPortInfo) Attr() Attr { return AttrClassPortInfo }
func (ClassPortInfo) isRecord()  {}

// AppendBinary appends the ClassPortInfoLen octets of r to b. The error is
// always nil.
func (r ClassPortInfo) AppendBinary(b []byte) ([]byte, error) {
	b = append(b, r.BaseVersion, r.ClassVersion)
	b = binary.BigEndian.AppendUint16(b, r.CapabilityMask)
	b = binary.BigEndian.AppendUint32(b, r.CapabilityMask2<<5|uint32(r.ResponseTime&31))
	b = r.Redirect.append(b, 0)
	return r.Trap.append(b, r.TrapHopLimit), nil
}

// UnmarshalBinary sets r from the first ClassPortInfoLen octets of b.
func (r *ClassPortInfo) UnmarshalBinary(b []byte) error {
	if len(b) < ClassPortInfoLen {
		return &wire.ShortError{What: "ClassPortInfo", Need: ClassPortInfoLen, Have: len(b)}
	}
	v := binary.BigEndian.Uint32(b[4:])
	*r = ClassPortInfo{BaseVersion: b[0], ClassVersion: b[1], CapabilityMask: binary.BigEndian.Uint16(b[2:]),
		CapabilityMask2: v >> 5, ResponseTime: ib.Timeout(v & 31), TrapHopLimit: b[64]}
	r.Redirect.unmarshal(b[8:40])
	r.Trap.unmarshal(b[40:72])
	return nil
}

// String prints versions, capabilities and response time.
func (r ClassPortInfo) String() string {
	return fmt.Sprintf("ClassPortInfo version=%d.%d cap=0x%04x cap2=0x%07x response=%v", r.BaseVersion, r.ClassVersion,
		r.CapabilityMask, r.CapabilityMask2, r.ResponseTime.Duration())
}
