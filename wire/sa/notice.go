package sa

import (
	"encoding/binary"
	"fmt"

	"ipoibcm/ib"
	"ipoibcm/wire"
)

// Lengths in octets.
const (
	InformInfoLen = 36
	NoticeLen     = 80

	detailsLen = 54
)

// A Trap is the number of a generic notice.
type Trap uint16

// Traps that are of use to an interface.
const (
	TrapGIDInService     Trap = 64
	TrapGIDOutOfService  Trap = 65
	TrapGroupCreated     Trap = 66
	TrapGroupDeleted     Trap = 67
	TrapLinkState        Trap = 128 // at a switch
	TrapCapabilityChange Trap = 144 // at a port
)

var trapNames = wire.Names[Trap]{
	TrapGIDInService: "GID in service", TrapGIDOutOfService: "GID out of service",
	TrapGroupCreated: "group created", TrapGroupDeleted: "group deleted", TrapLinkState: "link state change",
	TrapCapabilityChange: "capability change",
}

// String names t.
func (t Trap) String() string { return trapNames.Of(t, "trap %d") }

// Values that stand for any in an [InformInfo].
const (
	AnyLID      ib.LID = 0xffff // as LIDBegin
	AnyType     uint16 = 0xffff
	AnyProducer uint32 = 0xffffff
)

// An InformInfo subscribes to notices, or ends a subscription.
type InformInfo struct {
	GID                ib.GID // subject of the notices; zero means that the LIDs name it
	LIDBegin, LIDEnd   ib.LID // AnyLID and 0 for all
	Generic, Subscribe bool
	Type               uint16 // of notice
	Trap               Trap   // or device ID, if not Generic
	QPN                ib.QPN // where reports go; only in requests that end a subscription
	ResponseTime       ib.Timeout
	Producer           uint32 // 24 bits: type of node, or vendor ID
}

// Attr returns AttrInformInfo.
func (InformInfo) Attr() Attr { return AttrInformInfo }
func (InformInfo) isRecord()  {}

// AppendBinary appends the InformInfoLen octets of r to b. The error is always nil.
func (r InformInfo) AppendBinary(b []byte) ([]byte, error) {
	b = append(b, r.GID[:]...)
	b = binary.BigEndian.AppendUint16(b, uint16(r.LIDBegin))
	b = binary.BigEndian.AppendUint16(b, uint16(r.LIDEnd))
	b = append(b, 0, 0, wire.Bit(r.Generic, 1), wire.Bit(r.Subscribe, 1))
	b = binary.BigEndian.AppendUint16(b, r.Type)
	b = binary.BigEndian.AppendUint16(b, uint16(r.Trap))
	b = binary.BigEndian.AppendUint32(b, uint32(r.QPN)<<8|uint32(r.ResponseTime&31))
	return binary.BigEndian.AppendUint32(b, r.Producer&0xffffff), nil
}

// UnmarshalBinary sets r from the first InformInfoLen octets of b.
func (r *InformInfo) UnmarshalBinary(b []byte) error {
	const what = "InformInfo"
	switch {
	case len(b) < InformInfoLen:
		return &wire.ShortError{What: what, Need: InformInfoLen, Have: len(b)}
	case b[22] > 1:
		return &wire.FieldError{What: what, Field: "generic", Value: uint64(b[22])}
	case b[23] > 1:
		return &wire.FieldError{What: what, Field: "subscribe", Value: uint64(b[23])}
	}
	v := binary.BigEndian.Uint32(b[28:])
	*r = InformInfo{
		GID:      ib.GID(b[:16]),
		LIDBegin: ib.LID(binary.BigEndian.Uint16(b[16:])), LIDEnd: ib.LID(binary.BigEndian.Uint16(b[18:])),
		Generic: b[22] == 1, Subscribe: b[23] == 1,
		Type: binary.BigEndian.Uint16(b[24:]), Trap: Trap(binary.BigEndian.Uint16(b[26:])),
		QPN: ib.QPN(v >> 8), ResponseTime: ib.Timeout(v & 31), Producer: wire.Uint24(b[33:]),
	}
	return nil
}

// String prints what is subscribed to.
func (r InformInfo) String() string {
	verb := "unsubscribe"
	if r.Subscribe {
		verb = "subscribe"
	}
	return fmt.Sprintf("InformInfo %s: %v", verb, r.Trap)
}

// A Notice reports an event in the subnet.
type Notice struct {
	Generic   bool
	Type      uint8  // 7 bits
	Producer  uint32 // 24 bits: type of node, or vendor ID
	Trap      Trap   // or device ID, if not Generic
	IssuerLID ib.LID
	Toggle    bool
	Count     uint16 // 15 bits
	Details   [detailsLen]byte
	IssuerGID ib.GID
}

// Attr returns AttrNotice.
func (Notice) Attr() Attr { return AttrNotice }
func (Notice) isRecord()  {}

// AppendBinary appends the NoticeLen octets of r to b. The error is always nil.
func (r Notice) AppendBinary(b []byte) ([]byte, error) {
	b = binary.BigEndian.AppendUint32(b, uint32(wire.Bit(r.Generic, 0x80)|r.Type&0x7f)<<24|r.Producer&0xffffff)
	b = binary.BigEndian.AppendUint16(b, uint16(r.Trap))
	b = binary.BigEndian.AppendUint16(b, uint16(r.IssuerLID))
	b = binary.BigEndian.AppendUint16(b, uint16(wire.Bit(r.Toggle, 0x80))<<8|r.Count&0x7fff)
	b = append(b, r.Details[:]...)
	return append(b, r.IssuerGID[:]...), nil
}

// UnmarshalBinary sets r from the first NoticeLen octets of b.
func (r *Notice) UnmarshalBinary(b []byte) error {
	if len(b) < NoticeLen {
		return &wire.ShortError{What: "Notice", Need: NoticeLen, Have: len(b)}
	}
	count := binary.BigEndian.Uint16(b[8:])
	*r = Notice{
		Generic: b[0]&0x80 != 0, Type: b[0] & 0x7f, Producer: wire.Uint24(b[1:]),
		Trap: Trap(binary.BigEndian.Uint16(b[4:])), IssuerLID: ib.LID(binary.BigEndian.Uint16(b[6:])),
		Toggle: count&0x8000 != 0, Count: count & 0x7fff,
		Details: [detailsLen]byte(b[10:64]), IssuerGID: ib.GID(b[64:80]),
	}
	return nil
}

// GID returns the subject of traps 64 to 67, a port or a multicast group. ok is
// false for other notices.
func (r Notice) GID() (gid ib.GID, ok bool) {
	if !r.Generic || r.Trap < TrapGIDInService || r.Trap > TrapGroupDeleted {
		return ib.GID{}, false
	}
	return ib.GID(r.Details[6:22]), true
}

// LID returns the LID of the switch (trap 128) or port (trap 144) whose change the notice reports.
// ok is false for other notices.
func (r Notice) LID() (lid ib.LID, ok bool) {
	switch {
	case r.Generic && r.Trap == TrapLinkState:
		return ib.LID(binary.BigEndian.Uint16(r.Details[0:])), true
	case r.Generic && r.Trap == TrapCapabilityChange:
		return ib.LID(binary.BigEndian.Uint16(r.Details[2:])), true
	}
	return 0, false
}

// CapabilityMask returns the new capability mask of the port that trap 144 reports.
// ok is false for other notices.
func (r Notice) CapabilityMask() (mask uint32, ok bool) {
	if !r.Generic || r.Trap != TrapCapabilityChange {
		return 0, false
	}
	return binary.BigEndian.Uint32(r.Details[6:]), true
}

// String prints trap, issuer and what the trap is about.
func (r Notice) String() string {
	s := fmt.Sprintf("Notice %v from 0x%04x", r.Trap, uint16(r.IssuerLID))
	if gid, ok := r.GID(); ok {
		s += fmt.Sprintf(" about %v", gid)
	}
	if lid, ok := r.LID(); ok {
		s += fmt.Sprintf(" about 0x%04x", uint16(lid))
	}
	return s
}
