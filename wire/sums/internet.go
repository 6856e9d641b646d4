package sums

import (
	"encoding/binary"
	"math/bits"
)

// minAdd is the length in octets of the shortest input that addWords takes. From
// there on addWords is faster than addWordsGo.
const minAdd = 32

// Internet adds the 16-bit words of b in network order, an odd last octet padded
// with zero, to the running one's complement sum of RFC 1071. The result has
// 16 bits, and is 0 only if sum and all octets of b are.
func Internet(sum uint32, b []byte) uint32 {
	// The words are added in the other order of octets, which gives the sum in the
	// other order of octets (RFC 1071 section 2(B)).
	s := uint64(bits.ReverseBytes32(sum))
	if canAdd && len(b) >= minAdd {
		s += addWords(b)
	} else {
		s = addWordsGo(s, b)
	}
	return fold(s)
}

// fold returns the 16-bit one's complement sum of the little-endian words of s.
func fold(s uint64) uint32 {
	// A number plus itself with its halves exchanged: the upper half is the sum of
	// both, and the carry out of the lower half, the same sum, is its end-around carry.
	h := uint32((s + bits.RotateLeft64(s, 32)) >> 32)
	return uint32(bits.ReverseBytes16(uint16((h + bits.RotateLeft32(h, 16)) >> 16)))
}

// addWordsGo adds the little-endian 64-bit words of b, the last one padded with
// zeros, to the one's complement sum s.
func addWordsGo(s uint64, b []byte) uint64 {
	var c uint64
	left := b
	for len(left) >= 64 {
		s, c = bits.Add64(s, binary.LittleEndian.Uint64(left), c)
		s, c = bits.Add64(s, binary.LittleEndian.Uint64(left[8:]), c)
		s, c = bits.Add64(s, binary.LittleEndian.Uint64(left[16:]), c)
		s, c = bits.Add64(s, binary.LittleEndian.Uint64(left[24:]), c)
		s, c = bits.Add64(s, binary.LittleEndian.Uint64(left[32:]), c)
		s, c = bits.Add64(s, binary.LittleEndian.Uint64(left[40:]), c)
		s, c = bits.Add64(s, binary.LittleEndian.Uint64(left[48:]), c)
		s, c = bits.Add64(s, binary.LittleEndian.Uint64(left[56:]), c)
		left = left[64:]
	}
	for len(left) >= 8 {
		s, c = bits.Add64(s, binary.LittleEndian.Uint64(left), c)
		left = left[8:]
	}
	var last uint64
	if len(b) >= 8 {
		last = binary.LittleEndian.Uint64(b[len(b)-8:]) >> (64 - 8*len(left))
	} else {
		for i, v := range left {
			last |= uint64(v) << (8 * i)
		}
	}
	s, c = bits.Add64(s, last, c)
	s, c = bits.Add64(s, 0, c)
	return s + c
}
