package encap

import (
	"encoding/binary"
	"fmt"

	"ipoibcm/wire"
)

// ProbeLen is the length in octets of an answer, and of a probe before its padding of zeros.
const ProbeLen = 16

// Kinds of probes, in their first octet. Three reserved octets follow.
const (
	probeAsks    = 1
	probeAnswers = 2
)

// A Probe asks whether a frame of its size arrives, or answers that one did (RFC 8899
// section 3): an extension of our own.
type Probe struct {
	Answer bool
	// Octets is the length of the asking frame, without the encapsulation header; at least ProbeLen.
	Octets int
	// ID is drawn by the asking side. The answer repeats it.
	ID uint64
}

// AppendBinary appends the wire form of p to b, with the zeros that make a probe as long
// as it says. The error is always nil.
func (p Probe) AppendBinary(b []byte) ([]byte, error) {
	kind, pad := byte(probeAsks), p.Octets-ProbeLen
	if p.Answer {
		kind, pad = probeAnswers, 0
	}
	b = binary.BigEndian.AppendUint32(append(b, kind, 0, 0, 0), uint32(p.Octets))
	return append(binary.BigEndian.AppendUint64(b, p.ID), make([]byte, max(0, pad))...), nil
}

// UnmarshalBinary sets p from b, which is all that follows the encapsulation header.
func (p *Probe) UnmarshalBinary(b []byte) error {
	if len(b) < ProbeLen {
		return &wire.ShortError{What: "path MTU probe", Need: ProbeLen, Have: len(b)}
	}
	n := binary.BigEndian.Uint32(b[4:])
	switch {
	case b[0] != probeAsks && b[0] != probeAnswers:
		return fmt.Errorf("encap: path MTU probe of unknown kind %d", b[0])
	case n < ProbeLen || n > 1<<16:
		return fmt.Errorf("encap: path MTU probe of %d octets", n)
	case b[0] == probeAsks && int(n) != len(b): // cut short on the way, or a lie
		return fmt.Errorf("encap: path MTU probe of %d octets says that it has %d", len(b), n)
	}
	*p = Probe{Answer: b[0] == probeAnswers, Octets: int(n), ID: binary.BigEndian.Uint64(b[8:])}
	return nil
}
