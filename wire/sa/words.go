package sa

import (
	"fmt"
	"strings"

	"ipoibcm/wire"
)

// A Method is the method octet of a MAD.
type Method uint8

// Methods. A response has the top bit set.
const (
	MethodGet        Method = 0x01
	MethodSet        Method = 0x02
	MethodReport     Method = 0x06
	MethodGetTable   Method = 0x12
	MethodDelete     Method = 0x15
	MethodGetResp    Method = 0x81 // answers Get and Set
	MethodReportResp Method = 0x86
	MethodDeleteResp Method = 0x95
)

// IsResponse reports whether m answers something.
func (m Method) IsResponse() bool { return m&0x80 != 0 }

var methodNames = wire.Names[Method]{
	MethodGet: "Get", MethodSet: "Set", MethodReport: "Report", MethodGetTable: "GetTable",
	MethodDelete: "Delete", MethodGetResp: "GetResp", MethodReportResp: "ReportResp",
	MethodDeleteResp: "DeleteResp",
}

// String names m.
func (m Method) String() string { return methodNames.Of(m, "Method(0x%02x)") }

// An Attr is an attribute ID: which record a MAD carries.
type Attr uint16

// Attributes.
const (
	AttrClassPortInfo  Attr = 0x0001
	AttrNotice         Attr = 0x0002
	AttrInformInfo     Attr = 0x0003
	AttrPathRecord     Attr = 0x0035
	AttrMCMemberRecord Attr = 0x0038
)

var attrNames = wire.Names[Attr]{
	AttrClassPortInfo: "ClassPortInfo", AttrNotice: "Notice", AttrInformInfo: "InformInfo",
	AttrPathRecord: "PathRecord", AttrMCMemberRecord: "MCMemberRecord",
}

// String names a.
func (a Attr) String() string { return attrNames.Of(a, "Attr(0x%04x)") }

// A Status is the status of an answer: common bits in the low octet (IBA
// 13.4.7), those of subnet administration in the high one (IBA 15.2.5.1).
type Status uint16

// Statuses. The first two are bits.
const (
	StatusBusy     Status = 0x0001 // ask again later
	StatusRedirect Status = 0x0002 // ask another port; the record is its ClassPortInfo

	StatusBadVersion   Status = 0x0004
	StatusBadMethod    Status = 0x0008
	StatusBadAttribute Status = 0x000c // method and attribute do not go together
	StatusBadField     Status = 0x001c

	StatusNoResources            Status = 0x0100
	StatusInvalid                Status = 0x0200
	StatusNoRecords              Status = 0x0300
	StatusTooManyRecords         Status = 0x0400
	StatusInvalidGID             Status = 0x0500
	StatusInsufficientComponents Status = 0x0600
	StatusDenied                 Status = 0x0700
)

// statusNames names the statuses that are values, not bits.
var statusNames = map[Status]string{
	StatusBadVersion: "class or version not supported", StatusBadMethod: "method not supported",
	StatusBadAttribute: "attribute not supported", StatusBadField: "invalid field",
	StatusNoResources: "no resources", StatusInvalid: "request invalid", StatusNoRecords: "no records",
	StatusTooManyRecords: "too many records", StatusInvalidGID: "invalid GID",
	StatusInsufficientComponents: "insufficient components", StatusDenied: "request denied",
}

// String names the parts of s that have a name, and gives the number.
func (s Status) String() string {
	if s == 0 {
		return "success"
	}
	var parts []string
	if s&StatusBusy != 0 {
		parts = append(parts, "busy")
	}
	if s&StatusRedirect != 0 {
		parts = append(parts, "redirect")
	}
	for _, part := range []Status{s & 0x001c, s & 0xff00} {
		if name := statusNames[part]; part != 0 && name != "" {
			parts = append(parts, name)
		}
	}
	if len(parts) == 0 {
		return fmt.Sprintf("status 0x%04x", uint16(s))
	}
	return fmt.Sprintf("%s (0x%04x)", strings.Join(parts, ", "), uint16(s))
}

// A Mask says which components of a record count in a request. Each attribute
// has bits of its own.
type Mask uint64

// A Selector says how a request compares the MTU, rate or packet life time in the same octet.
type Selector uint8

// Selectors.
const (
	Greater Selector = iota
	Less
	Exactly
	Best // the largest MTU or rate, the shortest life time
)

// String names s.
func (s Selector) String() string {
	return [...]string{"greater than", "less than", "exactly", "best"}[s&3]
}
