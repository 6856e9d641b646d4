package softiwarp

import (
	"bytes"
	"testing"

	"ipoibcm/ib"
)

// FuzzMeeting reads any private data as the names of two queue pairs.
func FuzzMeeting(f *testing.F) {
	good := meeting{from: 7, to: 1 << 23, fromG: ib.GID{0xfe, 0x80, 15: 1}, toG: ib.GID{15: 2}}.append(nil)
	f.Add(good)
	f.Add(good[:len(good)-1])
	f.Add(append(good, 0))
	f.Fuzz(func(t *testing.T, in []byte) {
		var m meeting
		if !m.unmarshal(in) {
			if m != (meeting{}) {
				t.Fatalf("refused, and yet %+v", m)
			}
			return
		}
		if out := m.append(nil); !bytes.Equal(out, in) {
			t.Fatalf("%x became %x", in, out)
		}
	})
}
