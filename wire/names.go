package wire

import "fmt"

// Names maps the values of a code to their names.
type Names[C ~uint8 | ~uint16 | ~uint32] map[C]string

// Of returns the name of c, and prints the number with format if it has none.
func (n Names[C]) Of(c C, format string) string {
	if name, ok := n[c]; ok {
		return name
	}
	return fmt.Sprintf(format, uint64(c))
}
