package encap_test

import (
	"bytes"
	"encoding/hex"
	"errors"
	"testing"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/internal/vector"
	"ipoibcm/wire"
	"ipoibcm/wire/encap"
)

var unhex = vector.Hex

func gid(s string) ib.GID {
	g, err := ib.ParseGID(s)
	if err != nil {
		panic(err)
	}
	return g
}

func TestHeader(t *testing.T) {
	for _, tt := range []struct {
		typ  encap.EtherType
		want string
		name string
	}{
		// 4755-4-1, 4391-6-1: type, then 16 reserved bits; 4755-4-3: they are zero. 4391-6-2: the types.
		{encap.IPv4, "08000000", "IPv4"}, // 4755-4-2
		{encap.IPv6, "86dd0000", "IPv6"}, // 4755-4-2
		{encap.ARP, "08060000", "ARP"},
		{encap.RARP, "80350000", "RARP"},
		{encap.InbandCM, "88b50000", "CM in-band"},
		{encap.PathProbe, "88b60000", "path MTU probe"},
		{0x88b7, "88b70000", "0x88b7"},
	} {
		b, _ := encap.Header{Type: tt.typ}.AppendBinary(nil)
		if got := hex.EncodeToString(b); got != tt.want || tt.typ.String() != tt.name {
			t.Errorf("%v: %s, want %s %s", tt.typ, got, tt.name, tt.want)
		}
		put := unhex("ffffffffee")
		encap.Put(put, tt.typ)
		if got := hex.EncodeToString(put); got != tt.want+"ee" {
			t.Errorf("%v: Put wrote %s", tt.typ, got)
		}
		b[2], b[3] = 0xff, 0xff // 4755-4-3: ignored when received
		var h encap.Header
		if err := h.UnmarshalBinary(b); err != nil || h.Type != tt.typ {
			t.Errorf("%v: reads as %v (%v)", tt.typ, h.Type, err)
		}
	}
}

func TestLinkAddr(t *testing.T) {
	for _, tt := range []struct {
		name  string
		wire  string
		want  encap.LinkAddr
		modes string
	}{
		// 4755-3.1-1, 4391-9.1.1-1: flags, 24-bit QPN, GID.
		// 4755-3.1-2
		{"RC", "80000123" + "00000000000000000000ffffc0000201",
			encap.LinkAddr{Flags: encap.FlagRC, QPN: 0x123, GID: gid("192.0.2.1")}, "rc"},
		// 4755-3.1-3
		{"UC", "40ffffff" + "fe800000000000000000000000000001",
			encap.LinkAddr{Flags: encap.FlagUC, QPN: 0xffffff, GID: gid("fe80::1")}, "uc"},
		// 4755-3.1-6
		{"both", "c0000001" + "fe800000000000000000000000000001",
			encap.LinkAddr{Flags: 0xc0, QPN: 1, GID: gid("fe80::1")}, "rc+uc"},
		// 4755-3.1-7, 4755-3.1-9
		{"UD only", "00000001" + "fe800000000000000000000000000001", encap.LinkAddr{QPN: 1, GID: gid("fe80::1")}, "ud"},
		{"RFC 4391 broadcast", "00ffffff" + "ff12401bffff000000000000ffffffff",
			encap.LinkAddr{QPN: 0xffffff, GID: gid("ff12:401b:ffff::ffff:ffff")}, "ud"},
	} {
		b, _ := tt.want.AppendBinary(nil)
		if got := hex.EncodeToString(b); got != tt.wire {
			t.Errorf("%s: %s, want %s", tt.name, got, tt.wire)
		}
		for _, reserved := range []byte{0, 0x01, 0x20, 0x3f} { // 4755-3.1-5: ignored when received
			b := unhex(tt.wire)
			b[0] |= reserved
			var got encap.LinkAddr
			err := got.UnmarshalBinary(b)
			if err != nil {
				t.Errorf("%s with reserved bits %#x: err is %v, want nil", tt.name, reserved, err)
			}
			expect.Equal(t, got, tt.want, "%s with reserved bits %#x: got", tt.name, reserved)
			expect.Equal(t, got.Flags.String(), tt.modes, "%s with reserved bits %#x: Flags.String", tt.name, reserved)
		}
		rude := tt.want
		rude.Flags |= 0x3f
		if b, _ := rude.AppendBinary(nil); hex.EncodeToString(b) != tt.wire { // 4755-3.1-4, 4755-9-1: zero when sent
			t.Errorf("%s: reserved flags sent: %x", tt.name, b)
		}
	}
	if s := (encap.LinkAddr{Flags: encap.FlagRC, QPN: 0x123, GID: gid("fe80::1")}).String(); s != "80 000123 fe80::1" {
		t.Error(s)
	}
	expect.Equal(t, (encap.LinkAddr{}).IsZero(), true, "IsZero of nothing")
	expect.Equal(t, (encap.LinkAddr{QPN: 1}).IsZero(), false, "IsZero of QPN 1")
}

// TestCompare is the comparison of RFC 4755 section 3.3.
func TestCompare(t *testing.T) {
	for _, tt := range []struct {
		name string
		a, b encap.LinkAddr
		want int
	}{
		// 4755-3.3-8
		{"QPN decides", encap.LinkAddr{QPN: 1, GID: gid("ffff::")}, encap.LinkAddr{QPN: 2, GID: gid("::1")}, -1},
		// 4755-3.3-8
		{"QPN as a number, not octet by octet from the end", encap.LinkAddr{QPN: 0x0100ff},
			encap.LinkAddr{QPN: 0x020000}, -1},
		// 4755-3.3-8
		{"QPN is unsigned", encap.LinkAddr{QPN: 0x7fffff}, encap.LinkAddr{QPN: 0x800000}, -1},
		// 4755-3.3-5
		{"the GID's last octet decides", encap.LinkAddr{QPN: 1, GID: gid("fe80::1")},
			encap.LinkAddr{QPN: 1, GID: gid("fe80::2")}, -1},
		{"the GID is unsigned", encap.LinkAddr{GID: gid("7fff::")}, encap.LinkAddr{GID: gid("8000::")}, -1},
		// 4755-3.3-7
		{"flags would invert the order", encap.LinkAddr{Flags: 0xc0, QPN: 1}, encap.LinkAddr{QPN: 2}, -1},
		// 4755-3.3-7
		{"flags alone make no difference", encap.LinkAddr{Flags: 0x80, QPN: 1}, encap.LinkAddr{Flags: 0x40, QPN: 1}, 0},
		// 4755-3.1-5
		{"reserved flags neither", encap.LinkAddr{Flags: 0x3f, QPN: 1}, encap.LinkAddr{QPN: 1}, 0},
		// 4755-3.3-11
		{"an address is not smaller than itself", encap.LinkAddr{QPN: 9, GID: gid("fe80::1")},
			encap.LinkAddr{QPN: 9, GID: gid("fe80::1")}, 0},
	} {
		if got := tt.a.Compare(tt.b); got != tt.want {
			t.Errorf("%s: %v against %v is %d, want %d", tt.name, tt.a, tt.b, got, tt.want)
		}
		if got := tt.b.Compare(tt.a); got != -tt.want {
			t.Errorf("%s, turned round: %d", tt.name, got)
		}
		if same := tt.a.Key() == tt.b.Key(); same != (tt.want == 0) {
			t.Errorf("%s: keys equal = %v", tt.name, same)
		}
	}
}

func TestPrivateData(t *testing.T) {
	// 4755-6-2: reserved octet, UD QPN, Receive MTU; 4755-6-3: reserved is zero.
	// 4755-5.1-1: this is how a REQ carries the Receive MTU.
	want := encap.PrivateData{QPN: 0x123, ReceiveMTU: 65524}
	b, _ := want.AppendBinary(nil)
	if got := hex.EncodeToString(b); got != "000001230000fff4" {
		t.Errorf("private data %s", got)
	}
	for _, in := range []string{"000001230000fff4", "ff0001230000fff4"} { // 4755-6-4, 4755-9-1: reserved ignored
		var got encap.PrivateData
		if err := got.UnmarshalBinary(unhex(in + "deadbeef")); err != nil || got != want { // 4755-6-5: so is the rest
			t.Errorf("%s: %+v (%v)", in, got, err)
		}
	}
	// 4755-1-3: messages of 2^31 octets can be announced.
	big := encap.PrivateData{QPN: 0xffffff, ReceiveMTU: 1 << 31}
	if b, _ := big.AppendBinary(nil); hex.EncodeToString(b) != "00ffffff80000000" {
		t.Errorf("private data %x", b)
	}
	expect.Equal(t, want.IsZero(), false, "IsZero of %v", want)
	expect.Equal(t, (encap.PrivateData{}).IsZero(), true, "IsZero of nothing")
}

func TestShort(t *testing.T) {
	var h encap.Header
	var a encap.LinkAddr
	var p encap.PrivateData
	for _, tt := range []struct {
		need int
		f    func([]byte) error
	}{{encap.HeaderLen, h.UnmarshalBinary}, {encap.LinkAddrLen, a.UnmarshalBinary},
		{encap.PrivateDataLen, p.UnmarshalBinary}} {
		var short *wire.ShortError
		err := tt.f(make([]byte, tt.need-1))
		expect.MustEqual(t, errors.As(err, &short), true, "one octet short of %d: As(err, &short)", tt.need)
		expect.Equal(t, short.Need, tt.need, "one octet short of %d: Need", tt.need)
		expect.Equal(t, short.Have, tt.need-1, "one octet short of %d: Have", tt.need)
	}
}

func FuzzHeader(f *testing.F) {
	f.Add(unhex("0806ffff")) // reserved octets set by a rude peer
	f.Fuzz(func(t *testing.T, in []byte) {
		var a, b encap.Header
		if a.UnmarshalBinary(in) != nil {
			return
		}
		out, _ := a.AppendBinary(nil)
		if err := b.UnmarshalBinary(out); err != nil || a != b {
			t.Fatalf("round trip: %+v, then %+v (%v)\n in %x\nout %x", a, b, err, in, out)
		}
	})
}

func FuzzLinkAddr(f *testing.F) {
	f.Add(unhex("8000012300000000000000000000ffffc0000201"), unhex("ff000456fe800000000000000000000000000001"))
	f.Fuzz(func(t *testing.T, x, y []byte) {
		var a, b, c encap.LinkAddr
		if a.UnmarshalBinary(x) != nil || b.UnmarshalBinary(y) != nil {
			return
		}
		out, _ := a.AppendBinary(nil)
		if err := c.UnmarshalBinary(out); err != nil || a != c {
			t.Fatalf("round trip: %+v, then %+v (%v)", a, c, err)
		}
		// The order is that of the octets behind the flags.
		if got, want := a.Compare(b), bytes.Compare(x[1:encap.LinkAddrLen], y[1:encap.LinkAddrLen]); got != want {
			t.Fatalf("%v against %v is %d, want %d", a, b, got, want)
		}
	})
}

func FuzzPrivateData(f *testing.F) {
	f.Add(unhex("ff0001230000fff4"))
	f.Fuzz(func(t *testing.T, in []byte) {
		var a, b encap.PrivateData
		if a.UnmarshalBinary(in) != nil {
			return
		}
		out, _ := a.AppendBinary(nil)
		if err := b.UnmarshalBinary(out); err != nil || a != b {
			t.Fatalf("round trip: %+v, then %+v (%v)", a, b, err)
		}
	})
}

func TestHotPathDoesNotAllocate(t *testing.T) {
	b := make([]byte, 64)
	if n := testing.AllocsPerRun(100, func() {
		encap.Put(b, encap.IPv6)
		var h encap.Header
		if h.UnmarshalBinary(b) != nil || h.Type != encap.IPv6 {
			t.Error("lost")
		}
	}); n != 0 {
		t.Errorf("%v allocations per packet", n)
	}
}
