// Package serviceid makes and takes apart the service IDs that connected-mode
// IPoIB listens on: that of RFC 4755 section 3.5, and the one that Linux,
// FreeBSD and WinOFED use instead.
package serviceid

import (
	"fmt"

	"ipoibcm/ib"
)

// An ID is a 64-bit service ID in host order; on the wire it is big-endian.
type ID uint64

// The two bases; the UD QPN fills the low 24 bits.
const (
	BaseRFC    ID = 0x01_00_000000_000000 // octet 0 = 0x01, type 0, reserved 0
	BaseLegacy ID = 0x10_00_000000_000000 // Linux, FreeBSD, WinOFED, illumos
)

// A Form is the convention that a service ID follows.
type Form uint8

// Forms.
const (
	Other  Form = iota // not an IPoIB service ID
	RFC                // RFC 4755 section 3.5
	Legacy             // 0x10…
)

// String prints "rfc", "legacy" or "other".
func (f Form) String() string { return [...]string{"other", "rfc", "legacy"}[min(f, Legacy)] }

// New returns the service ID of form f for the interface with UD QPN q. Bits
// of q above 24 are dropped. For Other it returns 0.
func New(f Form, q ib.QPN) ID {
	switch f {
	case RFC:
		return BaseRFC | ID(q&ib.QPNMask)
	case Legacy:
		return BaseLegacy | ID(q&ib.QPNMask)
	}
	return 0
}

// Parse returns the form of id and the UD QPN in it. The type octet and the
// reserved octets must be zero, else the form is Other.
func Parse(id ID) (Form, ib.QPN) {
	switch id &^ ID(ib.QPNMask) {
	case BaseRFC:
		return RFC, ib.QPN(id) & ib.QPNMask
	case BaseLegacy:
		return Legacy, ib.QPN(id) & ib.QPNMask
	}
	return Other, 0
}

// String prints the 16 hexadecimal digits.
func (id ID) String() string { return fmt.Sprintf("0x%016x", uint64(id)) }
