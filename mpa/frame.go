package mpa

import (
	"encoding/binary"
	"fmt"

	"ipoibcm/wire"
)

// Sizes of startup frames in octets.
const (
	FrameHeaderLen = 20
	MaxPrivateData = 512 // the whole field, enhanced data included
	MaxFrameLen    = FrameHeaderLen + MaxPrivateData
	keyLen         = 16
)

// LinuxPrivateData is the most private data that Linux takes and sends, in
// octets. Senders should warn above it.
const LinuxPrivateData = 256

const (
	requestKey = "MPA ID Req Frame"
	replyKey   = "MPA ID Rep Frame"
)

const (
	bitM, bitC, bitR, bitS = 0x80, 0x40, 0x20, 0x10
	maskRes                = 0x0f
)

// A Frame is an MPA Request Frame or MPA Reply Frame (RFC 6581 section 6).
type Frame struct {
	Reply   bool
	Markers bool // M: the sender wants markers in what it receives
	CRC     bool // C: the sender wants CRCs checked
	Reject  bool // R: the reply rejects; means nothing in a request
	S       bool // private data begins with Enhanced
	Rev     uint8
	// Enhanced is valid if S.
	Enhanced Enhanced
	// Private is the private data of the ULP, without the enhanced data.
	Private []byte
}

// MaxULPData returns how much private data is left to the ULP.
func MaxULPData(enhanced bool) int {
	if enhanced {
		return MaxPrivateData - EnhancedLen
	}
	return MaxPrivateData
}

// AppendBinary appends the wire form of f to b. It fails if S is set below revision 2, or if
// Private is longer than MaxULPData.
func (f *Frame) AppendBinary(b []byte) ([]byte, error) {
	switch {
	case f.S && f.Rev < 2:
		return b, &wire.FieldError{What: "enhanced MPA frame", Field: "Rev", Value: uint64(f.Rev)}
	case len(f.Private) > MaxULPData(f.S):
		return b, fmt.Errorf("mpa: %d octets of private data, at most %d can be sent", len(f.Private), MaxULPData(f.S))
	}
	key, n := requestKey, len(f.Private)
	if f.Reply {
		key = replyKey
	}
	var flags byte
	for _, bit := range []struct {
		on   bool
		mask byte
	}{{f.Markers, bitM}, {f.CRC, bitC}, {f.Reject && f.Reply, bitR}, {f.S, bitS}} {
		if bit.on {
			flags |= bit.mask
		}
	}
	if f.S {
		n += EnhancedLen
	}
	b = append(append(b, key...), flags, f.Rev)
	b = binary.BigEndian.AppendUint16(b, uint16(n))
	if f.S {
		b = f.Enhanced.Append(b)
	}
	return append(b, f.Private...), nil
}

// UnmarshalBinary sets f from b, which holds one whole frame and no more. The
// error is an [*Error] or a [*wire.ShortError]. Private is a part of b.
func (f *Frame) UnmarshalBinary(b []byte) error {
	reply := len(b) >= keyLen && string(b[:keyLen]) == replyKey
	if e := checkFrame(b, reply); e != nil {
		return e
	}
	need := FrameHeaderLen
	if len(b) >= FrameHeaderLen {
		need += int(binary.BigEndian.Uint16(b[18:]))
	}
	if len(b) < need {
		return &wire.ShortError{What: "MPA frame", Need: need, Have: len(b)}
	}
	if len(b) > need {
		return fault(ReasonEarlyData, "%d octets behind the frame", len(b)-need)
	}
	f.set(b)
	return nil
}

// set reads a frame that was checked.
func (f *Frame) set(b []byte) {
	flags := b[16]
	*f = Frame{Reply: string(b[:keyLen]) == replyKey, Markers: flags&bitM != 0, CRC: flags&bitC != 0,
		Reject: flags&bitR != 0, S: flags&bitS != 0 && b[17] >= 2, Rev: b[17], Private: b[FrameHeaderLen:]}
	if f.S {
		_ = f.Enhanced.UnmarshalBinary(f.Private)
		f.Private = f.Private[EnhancedLen:]
	}
}

// checkFrame returns the first fault in b, the beginning of a frame, or nil. It finds a fault as
// soon as b is long enough to show it. reply reports whether a reply is due.
func checkFrame(b []byte, reply bool) *Error {
	want, other, swapped := requestKey, replyKey, ReasonBothResponders
	if reply {
		want, other, swapped = replyKey, requestKey, ReasonBothInitiators
	}
	k := min(len(b), keyLen)
	switch {
	case string(b[:k]) == want[:k]:
	case string(b[:k]) == other[:k]:
		if k < keyLen {
			return nil // wait until it is certain
		}
		return fault(swapped, "%q", b[:k])
	default:
		return fault(ReasonKey, "%q", b[:k])
	}
	if len(b) > 17 && (b[17] < 1 || b[17] > 2) {
		return fault(ReasonRev, "%d", b[17])
	}
	if len(b) < FrameHeaderLen {
		return nil
	}
	n := binary.BigEndian.Uint16(b[18:])
	switch {
	case n > MaxPrivateData:
		return fault(ReasonTooLong, "PD_Length %d", n)
	case n < EnhancedLen && b[16]&bitS != 0 && b[17] >= 2:
		return fault(ReasonNoData, "PD_Length %d", n)
	}
	return nil
}

// A frameReader collects one startup frame from octets in any portions. It
// never holds more than the frame.
type frameReader struct {
	reply bool
	n     int
	buf   [MaxFrameLen]byte
}

// read takes what belongs to the frame from p and returns the rest. ok says that
// the frame is complete; f.Private is then a part of the reader.
func (r *frameReader) read(p []byte, count *Counters) (f Frame, rest []byte, ok bool, err *Error) {
	for {
		need := FrameHeaderLen
		if r.n >= FrameHeaderLen {
			need += int(binary.BigEndian.Uint16(r.buf[18:])) // checked below
		}
		if r.n == need {
			break
		}
		if len(p) == 0 {
			return f, nil, false, nil
		}
		k := copy(r.buf[r.n:need], p)
		r.n += k
		p = p[k:]
		if e := checkFrame(r.buf[:r.n], r.reply); e != nil {
			return f, nil, false, e
		}
	}
	f.set(r.buf[:r.n])
	r.note(&f, count)
	return f, p, true, nil
}

// note counts faults of a frame that the RFCs have a receiver ignore, such as reserved bits.
func (r *frameReader) note(f *Frame, count *Counters) {
	flags := r.buf[16]
	if flags&maskRes != 0 {
		count[ReasonReserved]++
	}
	if flags&bitS != 0 && !f.S {
		count[ReasonRev1S]++
	}
	if f.Reject && !f.Reply {
		count[ReasonRequestR]++
	}
	if f.S && !f.Enhanced.PeerToPeer && f.Enhanced.RTR != 0 {
		count[ReasonIdleFlags]++
	}
}
