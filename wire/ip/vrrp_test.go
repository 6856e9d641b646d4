package ip

import (
	"fmt"
	"testing"

	"ipoibcm/internal/expect"
)

// Advertisements as keepalived 2.2.7 sends them.
const (
	vrrp2Sample = "45c0002800010000ff70d0880a090001e000001221076401000170890a0900640000000000000000"
	vrrp3Sample = "6c0c9c5a002870fffe800000000000000000000000000001ff020000000000000000000000000012" +
		"310864020064c409fe80000000000000000000000000abcdfd090000000000000000000000000100"
)

func TestVirtual(t *testing.T) {
	edit := func(s string, i int, v byte) []byte {
		b := unhex(s)
		if i >= 0 {
			b[i] = v
		}
		return b
	}
	for _, tt := range []struct {
		name string
		pkt  []byte
		want string
	}{
		{"version 2", edit(vrrp2Sample, -1, 0), "[10.9.0.100]"},
		{"version 3", edit(vrrp3Sample, -1, 0), "[fe80::abcd fd09::100]"},
		{"the router resigns", edit(vrrp2Sample, 22, 0), "[]"},
		{"more addresses than octets", edit(vrrp2Sample, 23, 4), "[]"},
		{"no advertisement", edit(vrrp2Sample, 20, 0x22), "[]"},
		{"version 4", edit(vrrp2Sample, 20, 0x41), "[]"},
		{"version 2 in IPv6", edit(vrrp3Sample, 40, 0x21), "[]"},
		{"another protocol", edit(vrrp2Sample, 9, ProtoUDP), "[]"},
		{"a fragment", edit(vrrp2Sample, 6, 0x20), "[]"},
		{"nothing", nil, "[]"},
	} {
		if got := fmt.Sprint(AppendVirtual(nil, tt.pkt)); got != tt.want {
			t.Errorf("%s: %s, want %s", tt.name, got, tt.want)
		}
	}
	expect.Equal(t, IsVRRP(edit(vrrp2Sample, -1, 0)), true, "IsVRRP of version 2")
	expect.Equal(t, IsVRRP(edit(vrrp3Sample, -1, 0)), true, "IsVRRP of version 3")
	if IsVRRP(edit(vrrp2Sample, 19, 0x13)) {
		t.Error("a packet to another group is taken for one")
	}
}

func FuzzVirtual(f *testing.F) {
	for _, s := range []string{vrrp2Sample, vrrp3Sample} {
		f.Add(unhex(s))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		for _, a := range AppendVirtual(nil, in) {
			if a.Is4() != (Version(in) == 4) {
				t.Fatalf("address %v of %x", a, in)
			}
		}
	})
}
