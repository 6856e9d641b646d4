package sa_test

import (
	"bytes"
	"testing"

	"ipoibcm/wire/mad"
	"ipoibcm/wire/sa"
)

// FuzzMessage: what is read can be written, and read again the same. What is
// refused changes nothing.
func FuzzMessage(f *testing.F) {
	for _, b := range vectors(f) {
		f.Add(b)
		f.Add(b[:len(b)-1])
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		var a, b, zero sa.Message
		if err := a.UnmarshalBinary(in); err != nil {
			if a != zero {
				t.Fatalf("refused (%v), and yet %+v\n in %x", err, a, in)
			}
			return
		}
		out, _ := a.AppendBinary([]byte("before"))
		out, ok := bytes.CutPrefix(out, []byte("before"))
		if !ok || len(out) != mad.Len {
			t.Fatalf("%d octets written\n in %x\nout %x", len(out), in, out)
		}
		if err := b.UnmarshalBinary(out); err != nil || a != b {
			t.Fatalf("round trip: %+v, then %+v (%v)\n in %x\nout %x", a, b, err, in, out)
		}
		if n, ok := a.Record.(sa.Notice); ok {
			_, aboutGID := n.GID()
			_, aboutLID := n.LID()
			_, hasMask := n.CapabilityMask()
			switch {
			case aboutGID && aboutLID:
				t.Fatalf("aboutGID and aboutLID are true, want one of them")
			case hasMask && !aboutLID:
				t.Fatalf("hasMask is true, want it for a LID only")
			}
		}
	})
}
