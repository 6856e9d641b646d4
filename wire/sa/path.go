package sa

import (
	"encoding/binary"
	"fmt"

	"ipoibcm/ib"
	"ipoibcm/wire"
)

// PathRecordLen is the length of a PathRecord in octets.
const PathRecordLen = 64

// Components of a PathRecord. The service ID has two bits, one for each half.
const (
	PathServiceID8MSB Mask = 1 << iota
	PathServiceID56LSB
	PathDGID
	PathSGID
	PathDLID
	PathSLID
	PathRaw
	_
	PathFlowLabel
	PathHopLimit
	PathTrafficClass
	PathReversible
	PathNumb
	PathPKey
	PathQoSClass
	PathSL
	PathMTUSelector
	PathMTU
	PathRateSelector
	PathRate
	PathLifeSelector
	PathLife
	PathPreference
)

// PathMask has the components that Linux's ib_ipoib fills in when it asks for a path:
// both GIDs, the number of paths, the traffic class and the P_Key.
const PathMask = PathDGID | PathSGID | PathNumb | PathTrafficClass | PathPKey

// A PathRecord says how packets get from one port to another.
type PathRecord struct {
	ServiceID    uint64
	DGID, SGID   ib.GID
	DLID, SLID   ib.LID
	Raw          bool   // raw packets; never for IPoIB
	FlowLabel    uint32 // 20 bits
	HopLimit     uint8
	TrafficClass uint8
	Reversible   bool
	Numb         uint8 // 7 bits: in a request, how many paths are wanted
	PKey         ib.PKey
	QoSClass     uint16 // 12 bits
	SL           uint8  // 4 bits
	MTUSelector  Selector
	MTU          ib.MTU // 6 bits
	RateSelector Selector
	Rate         ib.Rate // 6 bits
	LifeSelector Selector
	Life         ib.Timeout // packet life time, 6 bits
	Preference   uint8
}

// Attr returns AttrPathRecord.
func (PathRecord) Attr() Attr { return AttrPathRecord }
func (PathRecord) isRecord()  {}

// AppendBinary appends the PathRecordLen octets of r to b. The error is always nil.
func (r PathRecord) AppendBinary(b []byte) ([]byte, error) {
	b = binary.BigEndian.AppendUint64(b, r.ServiceID)
	b = append(b, r.DGID[:]...)
	b = append(b, r.SGID[:]...)
	b = binary.BigEndian.AppendUint16(b, uint16(r.DLID))
	b = binary.BigEndian.AppendUint16(b, uint16(r.SLID))
	b = binary.BigEndian.AppendUint32(b, uint32(wire.Bit(r.Raw, 0x80))<<24|r.FlowLabel<<12>>4|uint32(r.HopLimit))
	b = append(b, r.TrafficClass, wire.Bit(r.Reversible, 0x80)|r.Numb&0x7f)
	b = binary.BigEndian.AppendUint16(b, uint16(r.PKey))
	b = binary.BigEndian.AppendUint16(b, r.QoSClass<<4|uint16(r.SL&15))
	b = append(b, selected(r.MTUSelector, uint8(r.MTU)), selected(r.RateSelector, uint8(r.Rate)),
		selected(r.LifeSelector, uint8(r.Life)), r.Preference)
	return append(b, 0, 0, 0, 0, 0, 0), nil // reserved
}

// UnmarshalBinary sets r from the first PathRecordLen octets of b.
func (r *PathRecord) UnmarshalBinary(b []byte) error {
	if len(b) < PathRecordLen {
		return &wire.ShortError{What: "PathRecord", Need: PathRecordLen, Have: len(b)}
	}
	v, q := binary.BigEndian.Uint32(b[44:]), binary.BigEndian.Uint16(b[52:])
	*r = PathRecord{
		ServiceID: binary.BigEndian.Uint64(b),
		DGID:      ib.GID(b[8:24]), SGID: ib.GID(b[24:40]),
		DLID: ib.LID(binary.BigEndian.Uint16(b[40:])), SLID: ib.LID(binary.BigEndian.Uint16(b[42:])),
		Raw: v>>31 != 0, FlowLabel: v >> 8 & 0xfffff, HopLimit: uint8(v),
		TrafficClass: b[48], Reversible: b[49]&0x80 != 0, Numb: b[49] & 0x7f,
		PKey:     ib.PKey(binary.BigEndian.Uint16(b[50:])),
		QoSClass: q >> 4, SL: uint8(q & 15),
		MTUSelector: Selector(b[54] >> 6), MTU: ib.MTU(b[54] & 0x3f),
		RateSelector: Selector(b[55] >> 6), Rate: ib.Rate(b[55] & 0x3f),
		LifeSelector: Selector(b[56] >> 6), Life: ib.Timeout(b[56] & 0x3f),
		Preference: b[57],
	}
	return nil
}

// String prints the fields that distinguish paths.
func (r PathRecord) String() string {
	return fmt.Sprintf("PathRecord dgid=%v sgid=%v dlid=0x%04x slid=0x%04x pkey=%v mtu=%v rate=%d life=%d sl=%d hop=%d",
		r.DGID, r.SGID, uint16(r.DLID), uint16(r.SLID), r.PKey, r.MTU, uint8(r.Rate), uint8(r.Life), r.SL, r.HopLimit)
}
