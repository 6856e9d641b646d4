// Package wire holds what all codecs share: errors, names of codes, 24-bit numbers. The codecs
// themselves are the packages below it, one per family of headers; each is pure and
// keeps the order sizes, type, append, unmarshal, String.
//
// Every codec sends reserved bits as zero and ignores them on receipt.
package wire

import "fmt"

// A ShortError says that octets end before a field does.
type ShortError struct {
	What       string // header or message that was being read
	Need, Have int    // octets
}

func (e *ShortError) Error() string {
	return fmt.Sprintf("%s: %d octets needed, %d there", e.What, e.Need, e.Have)
}

// A FieldError says that a field holds a value that its message cannot have.
type FieldError struct {
	What  string // header or message
	Field string
	Value uint64
}

func (e *FieldError) Error() string {
	return fmt.Sprintf("%s: %s cannot be %#x", e.What, e.Field, e.Value)
}
