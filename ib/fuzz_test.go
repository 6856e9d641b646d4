package ib_test

import (
	"net/netip"
	"testing"

	"ipoibcm/ib"
)

// FuzzGID: what is read as a GID prints as one, and reads the same again.
func FuzzGID(f *testing.F) {
	for _, s := range []string{"fe80::1", "10.0.0.1", "::ffff:192.0.2.1", "fe80::1%eth0", "::",
		"ff12:401b:ffff::1", "1.2.3", "fe80:0:0:0:0:0:0:1:2"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		var a, b ib.GID
		if a.UnmarshalText(in) != nil {
			if a != b {
				t.Fatalf("%q: refused, and yet %v", in, a)
			}
			return
		}
		out, err := a.MarshalText()
		switch {
		case err != nil:
			t.Fatalf("%q: err is %v, want nil", in, err)
		case b.UnmarshalText(out) != nil:
			t.Fatalf("%q: does not parse: %v", in, b.UnmarshalText(out))
		case a != b:
			t.Fatalf("%q: a is %v, want %v", in, a, b)
		}
		if ib.GIDFromAddr(a.Addr()) != a || a.Is4() != a.Addr().Is4() {
			t.Fatalf("%q: its address is %v", in, a.Addr())
		}
		if addr, err := netip.ParseAddr(string(in)); err != nil || addr.WithZone("").Unmap() != a.Addr() {
			t.Fatalf("%q: read as %v, netip says %v (%v)", in, a, addr, err)
		}
	})
}
