// Package vector reads the test vectors of codecs.
//
// It is for tests.
package vector

import (
	"encoding/hex"
	"os"
	"strings"
	"testing"
)

// Hex decodes s from hexadecimal. It panics if s is not hexadecimal.
func Hex(s string) []byte {
	b, err := hex.DecodeString(s)
	if err != nil {
		panic(err)
	}
	return b
}

// File reads a file with a vector on each line, a name and octets in hexadecimal, and
// returns the octets by name. Empty lines, and lines that begin with "# ", are comments.
func File(t testing.TB, path string) map[string][]byte {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	m := make(map[string][]byte)
	for line := range strings.Lines(string(text)) {
		if name, octets, ok := strings.Cut(strings.TrimSpace(line), " "); ok && name != "#" {
			m[name] = Hex(octets)
		}
	}
	return m
}
