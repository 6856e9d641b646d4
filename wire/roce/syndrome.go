package roce

import (
	"fmt"

	"ipoibcm/ib"
	"ipoibcm/wire"
)

// A Syndrome is the first octet of an AETH.
type Syndrome uint8

// Syndromes. RNR NAKs are made with [RNRSyndrome].
const (
	SyndromeACK      Syndrome = 0x1f // ACK, credits not used
	NAKSequence      Syndrome = 0x60 // PSN sequence error
	NAKInvalidReq    Syndrome = 0x61
	NAKRemoteAccess  Syndrome = 0x62
	NAKRemoteOp      Syndrome = 0x63
	NAKInvalidRDReq  Syndrome = 0x64
	syndromeKindMask Syndrome = 0xe0
)

// RNRSyndrome returns the RNR NAK that asks for the delay of timer code t.
func RNRSyndrome(t ib.RNRTimer) Syndrome { return 0x20 | Syndrome(t&0x1f) }

// IsACK reports whether s acknowledges, with whatever credit code.
func (s Syndrome) IsACK() bool { return s&syndromeKindMask == 0 }

// IsRNR reports whether s is a receiver-not-ready NAK.
func (s Syndrome) IsRNR() bool { return s&syndromeKindMask == 0x20 }

// IsNAK reports whether s is a NAK other than RNR. Its code may be unknown.
func (s Syndrome) IsNAK() bool { return s&syndromeKindMask == 0x60 }

// RNRTimer returns the timer code of an RNR NAK.
func (s Syndrome) RNRTimer() ib.RNRTimer { return ib.RNRTimer(s & 0x1f) }

var nakNames = wire.Names[Syndrome]{
	NAKSequence: "NAK PSN sequence error", NAKInvalidReq: "NAK invalid request",
	NAKRemoteAccess: "NAK remote access error", NAKRemoteOp: "NAK remote operational error",
	NAKInvalidRDReq: "NAK invalid RD request",
}

// String names s.
func (s Syndrome) String() string {
	switch {
	case s.IsACK():
		return "ACK"
	case s.IsRNR():
		return fmt.Sprintf("RNR NAK (%v)", s.RNRTimer().Duration())
	}
	return nakNames.Of(s, "Syndrome(0x%02x)")
}
