package iptest

import (
	"encoding/hex"
	"net/netip"
	"testing"
)

// The sums were added up by hand: the one of ICMPv6 is over two addresses, length 8, next header 0x3a
// and type 0x80.
func TestEcho(t *testing.T) {
	for _, tt := range []struct {
		src, dst string
		seq      uint16
		want     string
	}{
		{"10.0.0.1", "10.0.0.2", 1, "4500001c00010000400166de0a0000010a0000020800f7fe00000001"},
		{"fe80::1", "fe80::2", 0, "6000000000083a40fe800000000000000000000000000001fe800000000000000000000000000002" +
			"800082b800000000"},
	} {
		b, err := Echo{Src: netip.MustParseAddr(tt.src), Dst: netip.MustParseAddr(tt.dst), Seq: tt.seq}.AppendBinary(nil)
		if got := hex.EncodeToString(b); err != nil || got != tt.want {
			t.Errorf("%s: %s, %v; want %s", tt.src, got, err, tt.want)
		}
	}
	if _, err := (Echo{Src: netip.MustParseAddr("10.0.0.1"), Dst: netip.MustParseAddr("fe80::1")}).AppendBinary(nil); err == nil {
		t.Error("mixed families: no error")
	}
}
