package ip

import (
	"net/netip"
	"testing"

	"ipoibcm/internal/expect"
)

func TestSetCE(t *testing.T) {
	a, b := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.255.2")
	for tos := range 256 {
		pkt := AppendV4Header(nil, a, b, 6, 64, uint16(tos*259), true, 20)
		pkt[1] = byte(tos)
		pkt[10], pkt[11] = 0, 0
		sum := Checksum(pkt)
		pkt[10], pkt[11] = byte(sum>>8), byte(sum)
		if got, want := ECNCapable(pkt), tos&3 != 0; got != want {
			t.Errorf("IPv4, TOS %#x: capable %v, want %v", tos, got, want)
		}
		if got := TrafficClass(pkt); got != byte(tos) {
			t.Errorf("IPv4, TOS %#x: traffic class %#x", tos, got)
		}
		SetCE(pkt)
		if want := byte(tos) | 3; pkt[1] != want {
			t.Errorf("IPv4: TOS %#x became %#x, want %#x", tos, pkt[1], want)
		}
		if sum := Checksum(pkt); sum != 0 {
			t.Errorf("IPv4, TOS %#x: the checksum is wrong by %#x", tos, sum)
		}
		v6 := make([]byte, 40)
		v6[0], v6[1] = 0x60|byte(tos>>4), byte(tos<<4)|5
		if got, want := ECNCapable(v6), tos&3 != 0; got != want {
			t.Errorf("IPv6, class %#x: capable %v, want %v", tos, got, want)
		}
		if got := TrafficClass(v6); got != byte(tos) {
			t.Errorf("IPv6, class %#x: traffic class %#x", tos, got)
		}
		SetCE(v6)
		if got, want := v6[0]<<4|v6[1]>>4, byte(tos)|3; got != want {
			t.Errorf("IPv6: class %#x became %#x, want %#x", tos, got, want)
		}
		expect.Equal(t, v6[0]>>4, 6, "IPv6: version")
		expect.Equal(t, v6[1]&15, 5, "IPv6: first bits of the flow label")
	}
}
