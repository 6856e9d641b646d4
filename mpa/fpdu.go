package mpa

import (
	"encoding/binary"
	"hash/crc32"
)

// Sizes of FPDUs in octets (RFC 5044 section 4).
const (
	MaxULPDU       = 64768
	MinMULPDU      = 128
	lengthLen      = 2
	crcLen         = 4
	markerLen      = 4
	markerInterval = 512
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// MULPDU returns the largest ULPDU that fits a TCP segment of emss octets, so that FPDUs and
// segments begin together (RFC 5044 section 4.5). It is at least MinMULPDU, even if that does not
// fit.
func MULPDU(emss int, markers bool) int {
	n := emss - (lengthLen + crcLen + emss%4)
	if markers {
		n -= markerLen * ((emss + markerInterval - 1) / markerInterval)
	}
	return max(MinMULPDU, min(n, MaxULPDU))
}

// A Framer makes FPDUs of one direction of a stream. The zero value makes
// them without markers and with a CRC field of zero.
type Framer struct {
	Markers bool // the receiver asked for markers
	CRC     bool
	pos     int // octets since the last marker began; 0: one is due
}

// Append appends the FPDU whose ULPDU is head and body. Together they are at most MaxULPDU
// octets; Append panics if they are longer.
//
// A CRC that is not in use is sent as zero, as Linux does.
func (f *Framer) Append(dst, head, body []byte) []byte {
	n := len(head) + len(body)
	if n > MaxULPDU {
		panic("mpa: ULPDU too long")
	}
	if !f.Markers {
		start := len(dst)
		dst = binary.BigEndian.AppendUint16(dst, uint16(n))
		dst = append(append(dst, head...), body...)
		dst = append(dst, zeros[:pad(n)]...)
		return f.appendCRC(dst, start)
	}
	start := len(dst)
	if f.pos == 0 {
		dst = f.marker(dst, 0) // between two FPDUs: belongs to this one
	}
	first := len(dst)
	var length [lengthLen]byte
	binary.BigEndian.PutUint16(length[:], uint16(n))
	for _, part := range [...][]byte{length[:], head, body, zeros[:pad(n)]} {
		for len(part) > 0 {
			if f.pos == 0 {
				dst = f.marker(dst, len(dst)-first)
			}
			k := min(len(part), markerInterval-f.pos)
			dst = append(dst, part[:k]...)
			part = part[k:]
			f.pos = (f.pos + k) % markerInterval
		}
	}
	if f.pos == 0 {
		dst = f.marker(dst, len(dst)-first) // in front of the CRC, and covered by it
	}
	f.pos = (f.pos + crcLen) % markerInterval
	return f.appendCRC(dst, start)
}

var zeros [4]byte

// pad returns how many octets make length field and ULPDU a multiple of four.
func pad(ulpdu int) int { return -(lengthLen + ulpdu) & 3 }

func (f *Framer) marker(dst []byte, ptr int) []byte {
	f.pos = markerLen
	dst = append(dst, 0, 0) // reserved
	return binary.BigEndian.AppendUint16(dst, uint16(ptr))
}

// appendCRC appends the CRC of dst[start:], least significant octet first.
func (f *Framer) appendCRC(dst []byte, start int) []byte {
	var sum uint32
	if f.CRC {
		sum = crc32.Checksum(dst[start:], castagnoli)
	}
	return binary.LittleEndian.AppendUint32(dst, sum)
}

// A Deframer takes FPDUs out of one direction of a stream. It holds at most one
// FPDU. The zero value takes no markers and does not look at CRCs.
type Deframer struct {
	Markers bool // we asked for markers
	CRC     bool
	// Max bounds a ULPDU in octets. Zero means MaxULPDU.
	Max int

	err   *Error
	buf   []byte // the FPDU so far, without markers
	sum   uint32 // CRC of the FPDU so far, markers included, up to the CRC field
	need  int    // octets of the whole FPDU without markers; 0: not known yet
	pos   int    // as in Framer
	wire  int    // octets since ULPDU_Length, markers included
	mark  [markerLen]byte
	nmark int
}

// Next takes octets from in and returns the rest of in. ok reports whether ulpdu is a complete
// ULPDU. It may be a part of in, and stays valid until the next call. Call Next with the rest until
// ok is false. After an error every call returns that error (RFC 5044 section 8).
func (d *Deframer) Next(in []byte) (ulpdu, rest []byte, ok bool, err *Error) {
	if d.err != nil {
		return nil, nil, false, d.err
	}
	if !d.Markers {
		if ulpdu, n := d.whole(in); n != 0 {
			return ulpdu, in[max(n, 0):], d.err == nil, d.err
		}
	}
	if d.need > 0 && len(d.buf) == d.need {
		d.buf, d.need, d.sum, d.wire = d.buf[:0], 0, 0, 0
	}
	for len(in) > 0 {
		if d.Markers && (d.nmark > 0 || d.pos == 0) {
			if in = d.takeMarker(in); d.err != nil {
				return nil, nil, false, d.err
			}
			continue
		}
		in = d.take(in)
		if d.err != nil {
			return nil, nil, false, d.err
		}
		if d.need > 0 && len(d.buf) == d.need {
			return d.complete(in)
		}
	}
	return nil, nil, false, nil
}

// whole is the fast path for streams without markers. It returns the ULPDU of the FPDU at the start
// of in, if in holds all of that FPDU. n is the length of the FPDU in octets. It is 0 if Next must
// take the slow path, and below 0 after an error.
func (d *Deframer) whole(in []byte) (ulpdu []byte, n int) {
	if len(d.buf) != d.need || len(in) < lengthLen {
		return nil, 0
	}
	size := int(binary.BigEndian.Uint16(in))
	n = lengthLen + size + pad(size) + crcLen
	if len(in) < n || size > d.max() {
		return nil, 0
	}
	if d.CRC {
		d.check(crc32.Checksum(in[:n-crcLen], castagnoli), in[n-crcLen:n])
		if d.err != nil {
			return nil, -1
		}
	}
	return in[lengthLen : lengthLen+size], n
}

func (d *Deframer) max() int {
	if d.Max > 0 {
		return min(d.Max, MaxULPDU)
	}
	return MaxULPDU
}

// takeMarker takes octets of a marker.
func (d *Deframer) takeMarker(in []byte) []byte {
	k := copy(d.mark[d.nmark:], in)
	if d.nmark += k; d.nmark < markerLen {
		return in[k:]
	}
	ptr := int(binary.BigEndian.Uint16(d.mark[2:])) // the reserved half is not looked at
	if len(d.buf) > 0 && ptr != d.wire || len(d.buf) == 0 && ptr != 0 {
		d.err = fault(ReasonMarker, "FPDUPTR %d, the FPDU began %d octets ago", ptr, d.wire)
		return nil
	}
	if d.CRC {
		d.sum = crc32.Update(d.sum, castagnoli, d.mark[:])
	}
	if len(d.buf) > 0 {
		d.wire += markerLen
	}
	d.nmark, d.pos = 0, markerLen
	return in[k:]
}

// take takes octets of the FPDU, at most up to its end or the next marker.
func (d *Deframer) take(in []byte) []byte {
	want := lengthLen - len(d.buf) // the length field first
	if d.need > 0 {
		if want = d.need - crcLen - len(d.buf); want <= 0 {
			want = d.need - len(d.buf) // then all that the CRC covers, then the CRC
		}
	}
	k := min(want, len(in))
	if d.Markers {
		k = min(k, markerInterval-d.pos)
		d.pos = (d.pos + k) % markerInterval
	}
	if d.CRC && (d.need == 0 || len(d.buf) < d.need-crcLen) {
		d.sum = crc32.Update(d.sum, castagnoli, in[:k])
	}
	d.buf = append(d.buf, in[:k]...)
	d.wire += k
	if d.need == 0 && len(d.buf) == lengthLen {
		n := int(binary.BigEndian.Uint16(d.buf))
		if n > d.max() {
			d.err = fault(ReasonULPDULength, "%d octets, at most %d", n, d.max())
		}
		d.need = lengthLen + n + pad(n) + crcLen
	}
	return in[k:]
}

func (d *Deframer) complete(rest []byte) ([]byte, []byte, bool, *Error) {
	if d.CRC {
		d.check(d.sum, d.buf[d.need-crcLen:])
		if d.err != nil {
			return nil, nil, false, d.err
		}
	}
	n := int(binary.BigEndian.Uint16(d.buf))
	return d.buf[lengthLen : lengthLen+n], rest, true, nil
}

func (d *Deframer) check(sum uint32, field []byte) {
	if got := binary.LittleEndian.Uint32(field); got != sum {
		d.err = fault(ReasonCRC, "%08x, the FPDU has %08x", got, sum)
	}
}

// Partial reports whether the stream is in the middle of an FPDU: if TCP ends
// there, something was lost.
func (d *Deframer) Partial() bool { return len(d.buf) != d.need || d.nmark > 0 }
