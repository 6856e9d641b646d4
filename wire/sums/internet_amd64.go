//go:build !purego

package sums

import "golang.org/x/sys/cpu"

// canAdd says whether the processor and the system have what addWords needs.
// Tests switch it off.
var canAdd = cpu.X86.HasAVX2

// addWords returns the sum of the little-endian 32-bit words of b, the last one
// padded with zeros. It needs minAdd octets and is exact below 8 GiB.
//
//go:noescape
func addWords(b []byte) uint64
