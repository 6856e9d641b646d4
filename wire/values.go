package wire

import "fmt"

// Uint24 returns the number in the first three octets of b.
func Uint24(b []byte) uint32 { _ = b[2]; return uint32(b[0])<<16 | uint32(b[1])<<8 | uint32(b[2]) }

// PutUint24 writes the low 24 bits of v into the first three octets of b.
func PutUint24(b []byte, v uint32) {
	_ = b[2]
	b[0], b[1], b[2] = byte(v>>16), byte(v>>8), byte(v)
}

// Bit returns v if set, else 0.
func Bit(set bool, v byte) byte {
	if set {
		return v
	}
	return 0
}

// Names maps the values of a code to their names.
type Names[C ~uint8 | ~uint16 | ~uint32] map[C]string

// Of returns the name of c, and prints the number with format if it has none.
func (n Names[C]) Of(c C, format string) string {
	if name, ok := n[c]; ok {
		return name
	}
	return fmt.Sprintf(format, uint64(c))
}
