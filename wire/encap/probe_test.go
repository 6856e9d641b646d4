package encap_test

import (
	"bytes"
	"testing"

	"ipoibcm/wire/encap"
)

func TestProbe(t *testing.T) {
	for _, tt := range []struct {
		name string
		p    encap.Probe
		want string
	}{
		{"a probe is as long as it says", encap.Probe{Octets: 20, ID: 0x0102030405060708},
			"0100000000000014010203040506070800000000"},
		{"an answer is short, whatever it says", encap.Probe{Answer: true, Octets: 2044, ID: 7},
			"02000000000007fc0000000000000007"},
	} {
		b, _ := tt.p.AppendBinary(nil)
		if !bytes.Equal(b, unhex(tt.want)) {
			t.Errorf("%s: %x, want %s", tt.name, b, tt.want)
		}
		var got encap.Probe
		if err := got.UnmarshalBinary(b); err != nil {
			t.Errorf("%s: %v", tt.name, err)
		}
		if got != tt.p {
			t.Errorf("%s: %+v, want %+v", tt.name, got, tt.p)
		}
	}
}

// What is no probe, or was cut short on its way, is none.
func TestProbeRefused(t *testing.T) {
	for _, tt := range []struct{ name, octets string }{
		{"nothing", ""},
		{"shorter than the fixed part", "010000000000000f01020304050607"},
		{"another kind", "03000000000000100000000000000007"},
		{"it says less than the fixed part", "020000000000000f0000000000000007"},
		{"it says more than any frame has", "02000000000100010000000000000007"},
		{"cut short", "01000000000000140000000000000007"},
		{"longer than it says", "0100000000000010000000000000000700000000"},
	} {
		var p encap.Probe
		if err := p.UnmarshalBinary(unhex(tt.octets)); err == nil {
			t.Errorf("%s: read as %+v, want an error", tt.name, p)
		}
	}
}

func FuzzProbe(f *testing.F) {
	f.Add(unhex("0100000000000014010203040506070800000000"))
	f.Add(unhex("02000000000007fc0000000000000007"))
	f.Fuzz(func(t *testing.T, in []byte) {
		var a, b encap.Probe
		if a.UnmarshalBinary(in) != nil {
			return
		}
		out, _ := a.AppendBinary(nil)
		if err := b.UnmarshalBinary(out); err != nil || a != b {
			t.Fatalf("round trip: %+v, then %+v (%v)\n in %x\nout %x", a, b, err, in, out)
		}
	})
}
