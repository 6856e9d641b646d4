package sa

import (
	"encoding/binary"
	"fmt"
	"strings"

	"ipoibcm/ib"
	"ipoibcm/wire"
)

// MCMemberRecordLen is the length of an MCMemberRecord in octets.
const MCMemberRecordLen = 52

// Components of an MCMemberRecord.
const (
	MCMGID Mask = 1 << iota
	MCPortGID
	MCQKey
	MCMLID
	MCMTUSelector
	MCMTU
	MCTrafficClass
	MCPKey
	MCRateSelector
	MCRate
	MCLifeSelector
	MCLife
	MCSL
	MCFlowLabel
	MCHopLimit
	MCScope
	MCJoinState
	MCProxyJoin
)

// Masks of joins. JoinMask joins a group that exists, or leaves it. CreateMask joins
// a group, and creates it if it does not exist.
const (
	JoinMask   = MCMGID | MCPortGID | MCPKey | MCJoinState
	CreateMask = JoinMask | MCQKey | MCMTUSelector | MCMTU | MCTrafficClass | MCRateSelector | MCRate |
		MCSL | MCFlowLabel | MCHopLimit
)

// A JoinState says in which ways a port is a member of a group.
type JoinState uint8

// Ways of membership.
const (
	FullMember JoinState = 1 << iota
	NonMember
	SendOnlyNonMember
	SendOnlyFullMember // as SendOnlyNonMember, but the group lives as long as the member
)

// String names the bits of j.
func (j JoinState) String() string {
	if j == 0 {
		return "no member"
	}
	var parts []string
	for i, name := range [...]string{"full", "non-member", "send-only", "send-only full"} {
		if j&(1<<i) != 0 {
			parts = append(parts, name)
		}
	}
	return strings.Join(parts, ", ")
}

// An MCMemberRecord says that a port is a member of a multicast group, and
// what the group is like.
type MCMemberRecord struct {
	MGID, PortGID ib.GID
	QKey          ib.QKey
	MLID          ib.LID
	MTUSelector   Selector
	MTU           ib.MTU // 6 bits
	TrafficClass  uint8
	PKey          ib.PKey
	RateSelector  Selector
	Rate          ib.Rate // 6 bits
	LifeSelector  Selector
	Life          ib.Timeout // packet life time, 6 bits
	SL            uint8      // 4 bits
	FlowLabel     uint32     // 20 bits
	HopLimit      uint8
	Scope         uint8 // 4 bits
	JoinState     JoinState
	ProxyJoin     bool
}

// Attr returns AttrMCMemberRecord.
func (MCMemberRecord) Attr() Attr { return AttrMCMemberRecord }
func (MCMemberRecord) isRecord()  {}

// AppendBinary appends the MCMemberRecordLen octets of r to b. The error is
// always nil.
func (r MCMemberRecord) AppendBinary(b []byte) ([]byte, error) {
	b = append(b, r.MGID[:]...)
	b = append(b, r.PortGID[:]...)
	b = binary.BigEndian.AppendUint32(b, uint32(r.QKey))
	b = binary.BigEndian.AppendUint16(b, uint16(r.MLID))
	b = append(b, selected(r.MTUSelector, uint8(r.MTU)), r.TrafficClass)
	b = binary.BigEndian.AppendUint16(b, uint16(r.PKey))
	b = append(b, selected(r.RateSelector, uint8(r.Rate)), selected(r.LifeSelector, uint8(r.Life)))
	b = binary.BigEndian.AppendUint32(b, uint32(r.SL)<<28|r.FlowLabel<<12>>4|uint32(r.HopLimit))
	return append(b, r.Scope<<4|byte(r.JoinState)&15, wire.Bit(r.ProxyJoin, 0x80), 0, 0), nil
}

// UnmarshalBinary sets r from the first MCMemberRecordLen octets of b.
func (r *MCMemberRecord) UnmarshalBinary(b []byte) error {
	if len(b) < MCMemberRecordLen {
		return &wire.ShortError{What: "MCMemberRecord", Need: MCMemberRecordLen, Have: len(b)}
	}
	v := binary.BigEndian.Uint32(b[44:])
	*r = MCMemberRecord{
		MGID: ib.GID(b[:16]), PortGID: ib.GID(b[16:32]),
		QKey:        ib.QKey(binary.BigEndian.Uint32(b[32:])),
		MLID:        ib.LID(binary.BigEndian.Uint16(b[36:])),
		MTUSelector: Selector(b[38] >> 6), MTU: ib.MTU(b[38] & 0x3f),
		TrafficClass: b[39],
		PKey:         ib.PKey(binary.BigEndian.Uint16(b[40:])),
		RateSelector: Selector(b[42] >> 6), Rate: ib.Rate(b[42] & 0x3f),
		LifeSelector: Selector(b[43] >> 6), Life: ib.Timeout(b[43] & 0x3f),
		SL: uint8(v >> 28), FlowLabel: v >> 8 & 0xfffff, HopLimit: uint8(v),
		Scope: b[48] >> 4, JoinState: JoinState(b[48] & 15), ProxyJoin: b[49]&0x80 != 0,
	}
	return nil
}

// String prints the fields that distinguish memberships.
func (r MCMemberRecord) String() string {
	return fmt.Sprintf("MCMemberRecord mgid=%v port=%v mlid=0x%04x pkey=%v qkey=%v mtu=%v rate=%d sl=%d join=%v",
		r.MGID, r.PortGID, uint16(r.MLID), r.PKey, r.QKey, r.MTU, uint8(r.Rate), r.SL, r.JoinState)
}

// selected puts a selector in front of a value of six bits.
func selected(s Selector, v uint8) byte { return byte(s)<<6 | v&0x3f }
