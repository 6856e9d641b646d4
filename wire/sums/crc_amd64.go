//go:build !purego

package sums

import "golang.org/x/sys/cpu"

// canFold says whether the processor and the system have what foldCRC needs.
// Tests switch it off.
var canFold = cpu.X86.HasAVX512F && cpu.X86.HasAVX512BW && cpu.X86.HasAVX512VBMI &&
	cpu.X86.HasAVX512VPCLMULQDQ && cpu.X86.HasPCLMULQDQ && cpu.X86.HasBMI2

// foldCRC continues the uncomplemented CRC state over p, which has at least
// FoldLen octets.
//
//go:noescape
func foldCRC(state uint32, p []byte) uint32

// The constants of crc_amd64.s, which explains them. P is the polynomial
// x^32 + x^26 + … + 1 of CRC-32; bit i of a number stands for x^(63-i).
var (
	// A quadword pair moves 128 bits n bits up: x^(n+63) and x^(n-1) mod P.
	fold2048 = [2]uint64{0x7cc8e1e700000000, 0x03f9f86300000000}
	fold1536 = [2]uint64{0x67f7947600000000, 0xc56d949600000000}
	fold1024 = [2]uint64{0x7d657a1000000000, 0x7406fa9500000000}
	fold512  = [2]uint64{0x653d982200000000, 0xcad38e8f00000000}
	// The same for 384, 256 and 128 bits, one behind the other; zeros for the last lane.
	foldLanes = [8]uint64{
		0x69ccfc0d00000000, 0x2a28386200000000,
		0x9570d49500000000, 0x01b5fd1d00000000,
		0x65673b4600000000, 0x9ba54c6f00000000,
		0, 0,
	}
	// (x^95 mod P)·x^32, floor(x^95 / P), and P·x^31.
	reduce = [3]uint64{0x00000000ccaa009e, 0xb4e5b025f7011641, 0x00000001db710641}
	// The numbers 0 to 63, one for each octet of a vector.
	counting = [64]uint8{
		0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15,
		16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31,
		32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47,
		48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63,
	}
)
