package sums

import "hash/crc32"

// foldLen is the length in octets of the shortest input that foldCRC takes. From
// there on foldCRC is faster than hash/crc32.
const foldLen = 64

// CRC32 continues the CRC-32 crc of IEEE 802.3 over p. It is crc32.Update with
// crc32.IEEETable, complements included, and so crc starts as 0.
func CRC32(crc uint32, p []byte) uint32 {
	if canFold && len(p) >= foldLen {
		return ^foldCRC(^crc, p)
	}
	return crc32.Update(crc, crc32.IEEETable, p)
}
