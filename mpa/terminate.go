package mpa

import (
	"encoding/binary"
	"fmt"

	"ipoibcm/wire"
)

// A Cause is what a Terminate says: layer, error type and error code, four, four
// and eight bits (RFC 5040 section 4.8).
type Cause uint16

// Causes that we send or give a meaning to (RFC 6580 section 3).
const (
	RDMAPCatastrophic Cause = 0x0000
	RDMAPInvalidSTag  Cause = 0x0100
	RDMAPBounds       Cause = 0x0101
	RDMAPAccess       Cause = 0x0102
	RDMAPWrap         Cause = 0x0104
	RDMAPInvalidate   Cause = 0x0109
	RDMAPVersion      Cause = 0x0205
	RDMAPOpcode       Cause = 0x0206
	RDMAPStream       Cause = 0x0207

	DDPCatastrophic    Cause = 0x1000
	DDPInvalidSTag     Cause = 0x1100
	DDPBounds          Cause = 0x1101
	DDPWrap            Cause = 0x1103
	DDPTaggedVersion   Cause = 0x1104
	DDPQueue           Cause = 0x1201
	DDPNoBuffer        Cause = 0x1202
	DDPMSN             Cause = 0x1203
	DDPMO              Cause = 0x1204
	DDPTooLong         Cause = 0x1205
	DDPUntaggedVersion Cause = 0x1206

	llp Cause = 0x2000
)

// Cause returns what a Terminate for c says: layer 2, type 0 (RFC 6581 section 8).
func (c Code) Cause() Cause { return llp | Cause(c) }

// Layer returns 0 for RDMAP, 1 for DDP, 2 for MPA.
func (c Cause) Layer() uint8 { return uint8(c >> 12) }

// Type returns the error type.
func (c Cause) Type() uint8 { return uint8(c>>8) & 0xf }

// Code returns the error code.
func (c Cause) Code() uint8 { return uint8(c) }

// Access reports whether the cause is about memory: its STag, bounds or rights.
func (c Cause) Access() bool { return c.Layer() <= 1 && c.Type() == 1 && c != DDPTaggedVersion }

// String prints layer, type and code.
func (c Cause) String() string {
	s := fmt.Sprintf("%d/%d/%d", c.Layer(), c.Type(), c.Code())
	if c&0xff00 == llp {
		s += " " + Code(c.Code()).String()
	}
	return s
}

// A TermError is a fault of the peer above MPA. It ends the connection with a
// Terminate.
type TermError struct {
	Cause  Cause
	Detail string
}

func (e *TermError) Error() string { return fmt.Sprintf("rdmap: terminate %v: %s", e.Cause, e.Detail) }

func termError(c Cause, format string, args ...any) *TermError {
	return &TermError{Cause: c, Detail: fmt.Sprintf(format, args...)}
}

// AppendTerminate appends the ULPDU of a Terminate that carries no headers of
// the offending segment.
func AppendTerminate(b []byte, c Cause) []byte {
	b = (&Segment{Opcode: OpTerminate, Last: true, QN: QueueTerminate, MSN: 1}).AppendHeader(b)
	b = binary.BigEndian.AppendUint16(b, uint16(c))
	return append(b, 0, 0) // M, D, R and reserved
}

// ParseTerminate reads the payload of a Terminate. Headers that follow the cause
// are not looked at: they are the ones we sent.
func ParseTerminate(payload []byte) (Cause, error) {
	if len(payload) < terminateLen {
		return 0, &wire.ShortError{What: "Terminate", Need: terminateLen, Have: len(payload)}
	}
	return Cause(binary.BigEndian.Uint16(payload)), nil
}
