// Package sctp is the adaptation of iWARP to SCTP: DDP stream sessions, with the
// enhanced connection establishment of RFC 6581, as a codec and a machine without
// clock or I/O.
//
// An [Endpoint] does for an association what package mpa's initiator and responder
// do for a TCP connection. No program here runs it: there is no SCTP that offers
// the adaptation layer indication.
//
// Sources: RFC 5043, RFC 6581 section 7.
package sctp

import (
	"encoding/binary"
	"fmt"

	"ipoibcm/mpa"
	"ipoibcm/wire"
)

// A PPID is an SCTP payload protocol identifier.
type PPID uint32

// Payload protocol identifiers of DDP over SCTP (RFC 5043 section 5.2).
const (
	PPIDSegment PPID = 16 // DDP-SSN and a DDP segment
	PPIDControl PPID = 17 // DDP-SSN, function code, private data
)

// AdaptationDDP is the adaptation layer indication that INIT and INIT-ACK must
// carry; without the peer's there is no DDP on the association (RFC 5043
// sections 5.1 and 11.1).
const AdaptationDDP = 1

// A Function is the function code of a session control chunk.
type Function uint16

// Function codes: 1 to 4 are RFC 5043's, 5 to 7 RFC 6581's (section 7, where 3
// digits are printed; the field has 16 bits).
const (
	FuncInitiate         Function = 1
	FuncAccept           Function = 2
	FuncReject           Function = 3
	FuncTerminate        Function = 4
	FuncEnhancedInitiate Function = 5
	FuncEnhancedAccept   Function = 6
	FuncEnhancedReject   Function = 7
)

// String names the function.
func (f Function) String() string {
	names := [...]string{"function 0", "Initiate", "Accept", "Reject", "Terminate", "Enhanced Initiate",
		"Enhanced Accept", "Enhanced Reject"}
	if int(f) < len(names) {
		return names[f]
	}
	return fmt.Sprintf("function %#x", uint16(f))
}

func (f Function) enhanced() bool { return f >= FuncEnhancedInitiate && f <= FuncEnhancedReject }

const (
	ssnLen     = 2
	controlLen = 4
)

// A Control is a DDP stream session control chunk.
type Control struct {
	SSN      uint16
	Function Function
	// HasData says that Enhanced was received. UnmarshalBinary sets it, and AppendBinary ignores
	// it. Enhanced Initiate and Accept always have Enhanced. RFC 6581 does not say whether an
	// Enhanced Reject has it. We send it there. If a received Enhanced Reject has at least four
	// octets of data, UnmarshalBinary takes the first four as Enhanced.
	HasData  bool
	Enhanced mpa.Enhanced
	Private  []byte // of the ULP
}

// AppendBinary appends the wire form of c. It fails if Function is unknown, if the private data
// (with Enhanced, where that is sent) is longer than mpa.MaxPrivateData, or if a Terminate has any.
func (c *Control) AppendBinary(b []byte) ([]byte, error) {
	n := len(c.Private)
	if c.Function.enhanced() {
		n += mpa.EnhancedLen
	}
	switch {
	case c.Function < FuncInitiate || c.Function > FuncEnhancedReject:
		return b, &wire.FieldError{What: "DDP session control", Field: "function code", Value: uint64(c.Function)}
	case n > mpa.MaxPrivateData:
		return b, fmt.Errorf("sctp: %v with %d octets of private data, at most %d can be sent",
			c.Function, n, mpa.MaxPrivateData)
	case c.Function == FuncTerminate && n > 0:
		return b, fmt.Errorf("sctp: a session Terminate has no private data")
	}
	b = binary.BigEndian.AppendUint16(b, c.SSN)
	b = binary.BigEndian.AppendUint16(b, uint16(c.Function))
	if c.Function.enhanced() {
		b = c.Enhanced.Append(b)
	}
	return append(b, c.Private...), nil
}

// UnmarshalBinary sets c from a whole chunk. Private is a part of b.
func (c *Control) UnmarshalBinary(b []byte) error {
	if len(b) < controlLen {
		return &wire.ShortError{What: "DDP session control", Need: controlLen, Have: len(b)}
	}
	*c = Control{SSN: binary.BigEndian.Uint16(b), Function: Function(binary.BigEndian.Uint16(b[ssnLen:])),
		Private: b[controlLen:]}
	n := len(c.Private)
	switch {
	case c.Function < FuncInitiate || c.Function > FuncEnhancedReject:
		return &wire.FieldError{What: "DDP session control", Field: "function code", Value: uint64(c.Function)}
	case n > mpa.MaxPrivateData || c.Function == FuncTerminate && n > 0:
		return &wire.FieldError{What: "DDP session " + c.Function.String(), Field: "length", Value: uint64(n)}
	case !c.Function.enhanced():
	case n >= mpa.EnhancedLen:
		c.HasData = true
		_ = c.Enhanced.UnmarshalBinary(c.Private)
		c.Private = c.Private[mpa.EnhancedLen:]
	case c.Function != FuncEnhancedReject:
		return &wire.ShortError{What: "DDP session " + c.Function.String(), Need: controlLen + mpa.EnhancedLen, Have: len(b)}
	}
	return nil
}

// A Chunk is one SCTP user message of a DDP stream. It is sent unordered (RFC
// 5043 section 10); its DDP-SSN gives the order.
type Chunk struct {
	Stream uint16
	PPID   PPID
	Data   []byte
}

// An Association carries chunks. It is an SCTP association whose peer sent
// [AdaptationDDP] and that has as many inbound as outbound streams.
type Association interface {
	// Send sends c reliably and unordered. It keeps no part of c.
	Send(c Chunk) error
}
