package sums

import "hash/crc32"

// FoldLen is the length in octets of the shortest input of CRC32 that it takes by vector instructions, where
// the processor has them. They are faster than hash/crc32 from there on.
const FoldLen = 64

// CRC32 continues the CRC-32 crc of IEEE 802.3 over p. It is crc32.Update with
// crc32.IEEETable, complements included, and so crc starts as 0.
func CRC32(crc uint32, p []byte) uint32 {
	if canFold && len(p) >= FoldLen {
		return ^foldCRC(^crc, p)
	}
	return crc32.Update(crc, crc32.IEEETable, p)
}
