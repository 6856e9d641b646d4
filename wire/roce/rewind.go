package roce

import "hash/crc32"

// rewindTables[k] undoes 2^k zero octets: the state before is the XOR of one
// entry per octet of the state after. UDP payloads need 17 powers.
var rewindTables = func() (t [17][4][256]uint32) {
	// One octet back. A step is after = IEEETable[low octet of before] ^ before>>8. The
	// shift leaves the top octet zero, so that the top octet of after names the entry.
	var byTop [256]uint32
	for v, e := range crc32.IEEETable {
		byTop[e>>24] = uint32(v)
	}
	var basis [32]uint32
	for i := range basis {
		s := uint32(1) << i
		v := byTop[s>>24]
		basis[i] = (s^crc32.IEEETable[v])<<8 | v
	}
	for k := range t {
		for i := range t[k] {
			for v := 1; v < 256; v++ {
				var s uint32
				for bit := range 8 {
					if v>>bit&1 != 0 {
						s ^= basis[8*i+bit]
					}
				}
				t[k][i][v] = s
			}
		}
		for i, s := range basis { // twice as far for the next power
			basis[i] = rewindBy(&t[k], s)
		}
	}
	return t
}()

// rewind returns the state that n zero octets turn into s; 0 <= n < 2^17.
func rewind(s uint32, n int) uint32 {
	for k := range rewindTables {
		if n>>k&1 != 0 {
			s = rewindBy(&rewindTables[k], s)
		}
	}
	return s
}

func rewindBy(t *[4][256]uint32, s uint32) uint32 {
	return t[0][byte(s)] ^ t[1][byte(s>>8)] ^ t[2][byte(s>>16)] ^ t[3][s>>24]
}
