package rpcrdma

import (
	"encoding/binary"

	"ipoibcm/wire"
)

// An xdrReader reads XDR (RFC 4506) from the octets of one message. It keeps its first error, and
// all values read after that are zero.
type xdrReader struct {
	b    []byte // what is left
	what string // the name of the field being read, for errors
	err  *Error
}

func (r *xdrReader) fail(reason Reason, format string, args ...any) {
	if r.err == nil {
		r.err = fault(reason, format, args...)
	}
}

func (r *xdrReader) u32() uint32 {
	if r.err != nil {
		return 0
	}
	if len(r.b) < 4 {
		r.fail(ReasonTruncated, "%s ends after %d octets of a word", r.what, len(r.b))
		return 0
	}
	v := binary.BigEndian.Uint32(r.b)
	r.b = r.b[4:]
	return v
}

func (r *xdrReader) u64() uint64 {
	hi := r.u32()
	return uint64(hi)<<32 | uint64(r.u32())
}

// bool reads a bool, or the flag in front of an optional item, which has the same form.
func (r *xdrReader) bool() bool {
	v := r.u32()
	if v > 1 {
		r.fail(ReasonEnum, "%s: a bool of %d", r.what, v)
	}
	return v == 1
}

// opaque reads a variable opaque of at most limit octets. It returns a part of the message, not a
// copy.
func (r *xdrReader) opaque(limit int) []byte {
	n := r.u32()
	if r.err != nil {
		return nil
	}
	if uint64(n) > uint64(limit) {
		r.fail(ReasonBound, "%s: %d octets, at most %d are taken", r.what, n, limit)
		return nil
	}
	whole := roundUp(int(n))
	if whole > len(r.b) {
		r.fail(ReasonTruncated, "%s: %d octets announced, %d there", r.what, n, len(r.b))
		return nil
	}
	v := r.b[:n:n]
	r.b = r.b[whole:]
	return v
}

// roundUp returns the length of n octets with XDR's padding.
func roundUp(n int) int { return (n + 3) &^ 3 }

func appendU32(b []byte, v ...uint32) []byte {
	for _, v := range v {
		b = binary.BigEndian.AppendUint32(b, v)
	}
	return b
}

func appendBool(b []byte, v bool) []byte { return appendU32(b, uint32(wire.Bit(v, 1))) }

func appendOpaque(b, v []byte) []byte {
	b = append(appendU32(b, uint32(len(v))), v...)
	return append(b, zeros[:roundUp(len(v))-len(v)]...)
}

var zeros [3]byte
