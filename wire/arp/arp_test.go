package arp

import (
	"encoding/hex"
	"net/netip"
	"testing"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/internal/vector"
	"ipoibcm/wire/encap"
)

var unhex = vector.Hex

var (
	// v8 is the ARP request of vector V8, behind its encapsulation header.
	v8 = unhex("00200800140400018000012300000000000000000000ffffc00002010a0000010000000000000000" +
		"0000000000000000000000000a000002")

	ip1, ip2 = netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")
	link1    = encap.LinkAddr{Flags: encap.FlagRC, QPN: 0x123, GID: gid("192.0.2.1")}
	link2    = encap.LinkAddr{Flags: encap.FlagRC | encap.FlagUC, QPN: 0x456, GID: gid("192.0.2.2")}
)

func gid(s string) ib.GID { return ib.GIDFromAddr(netip.MustParseAddr(s)) }

func TestPackets(t *testing.T) {
	for _, tt := range []struct {
		name string
		p    Packet
		want string
	}{
		// 4391-9.2-1: hardware type 32, 20 octets. 4755-3.1-1, 4755-3.1-2, 4755-3.1-10: flags, UD QPN and GID of the asker
		{"request, vector V8", NewRequest(link1, ip1, ip2), hex.EncodeToString(v8)},
		// 4755-3.1-13: the answer carries the owner's UD QPN, GID and flags
		// 4755-3.1-6: RC and UC both set
		{"reply", NewRequest(link1, ip1, ip2).ReplyFrom(link2),
			"002008001404" + "0002" + "c000045600000000000000000000ffffc0000202" + "0a000002" +
				"8000012300000000000000000000ffffc0000201" + "0a000001"},
		// 4755-3.1-9, 4755-3.1-7: UD only is flags 0
		{"probe, UD only", NewProbe(link1.Key(), ip2),
			"002008001404" + "0001" + "0000012300000000000000000000ffffc0000201" + "00000000" +
				"0000000000000000000000000000000000000000" + "0a000002"},
		{"announcement", NewAnnouncement(link1, ip1),
			"002008001404" + "0001" + "8000012300000000000000000000ffffc0000201" + "0a000001" +
				"0000000000000000000000000000000000000000" + "0a000001"},
	} {
		b, err := tt.p.AppendBinary(nil)
		switch {
		case err != nil:
			t.Errorf("%s: %v", tt.name, err)
		case hex.EncodeToString(b) != tt.want:
			t.Errorf("%s: %v\n got %x\nwant %s", tt.name, err, b, tt.want)
		case len(b) != Len:
			t.Errorf("%s: b has %v elements, want %v", tt.name, len(b), Len)
		}
		var got Packet
		if err := got.UnmarshalBinary(append(b, 0xff)); err != nil || got != tt.p {
			t.Errorf("%s: read as %v, %v; want %v", tt.name, got, err, tt.p)
		}
		expect.Equal(t, got.IsProbe(), tt.name[:5] == "probe", "%s: IsProbe", tt.name)
		expect.Equal(t, got.IsAnnouncement(), tt.name[:3] == "ann", "%s: IsAnnouncement", tt.name)
	}
	if _, err := NewRequest(link1, ip1, netip.MustParseAddr("fe80::1")).AppendBinary(nil); err == nil {
		t.Error("IPv6 in ARP: no error")
	}
}

func TestReservedFlags(t *testing.T) {
	b := append([]byte(nil), v8...)
	b[8] = 0xbf // RC and all reserved bits
	var p Packet
	if err := p.UnmarshalBinary(b); err != nil || p.Sender != link1 {
		t.Errorf("sender %v, %v; want %v", p.Sender, err, link1) // 4755-3.1-5
	}
	p.Sender.Flags = 0xff
	if b, _ = p.AppendBinary(nil); b[8] != 0xc0 {
		t.Errorf("flags octet %#x, want 0xc0", b[8]) // 4755-3.1-4
	}
}

func TestRefused(t *testing.T) {
	for _, tt := range []struct {
		name string
		off  int
		v    string
	}{
		{"Ethernet hardware", 0, "0001"},
		{"another protocol", 2, "86dd"},
		{"6-octet addresses", 4, "06"},
		{"16-octet protocol addresses", 5, "10"},
		{"reverse request", 6, "0003"},
		{"zero GID", 12, "00000000000000000000000000000000"},
		{"multicast GID", 12, "ff12401bffff000000000000ffffffff"},
		{"multicast QPN", 9, "ffffff"},
		{"QP 1", 9, "000001"},
	} {
		b := append([]byte(nil), v8...)
		copy(b[tt.off:], unhex(tt.v))
		p := Packet{Op: 77}
		if err := p.UnmarshalBinary(b); err == nil || p != (Packet{Op: 77}) {
			t.Errorf("%s: %v, %v", tt.name, p, err)
		}
	}
	if new(Packet).UnmarshalBinary(v8[:55]) == nil {
		t.Error("short: no error")
	}
}

func FuzzPacket(f *testing.F) {
	f.Add(v8)
	f.Fuzz(func(t *testing.T, in []byte) {
		var a, b Packet
		if a.UnmarshalBinary(in) != nil {
			return
		}
		out, err := a.AppendBinary(nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := b.UnmarshalBinary(out); err != nil || a != b {
			t.Fatalf("round trip: %v, then %v (%v)\n in %x\nout %x", a, b, err, in, out)
		}
		_ = a.String()
	})
}
