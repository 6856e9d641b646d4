package ib_test

import (
	"net/netip"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
)

func TestPSN(t *testing.T) {
	for _, tt := range []struct {
		name string
		p, q ib.PSN
		sub  int // p - q
	}{
		{"equal", 5, 5, 0},
		{"one behind", 7, 8, -1},
		{"one ahead", 8, 7, 1},
		{"behind across the wrap", 0xffffff, 0, -1},
		{"ahead across the wrap", 0, 0xffffff, 1},
		{"the farthest ahead", 0x7fffff, 0, 0x7fffff},
		{"half the space is behind", 0x800000, 0, -0x800000},
		{"and so it is the other way", 0, 0x800000, -0x800000},
	} {
		if got := tt.p.Sub(tt.q); got != tt.sub {
			t.Errorf("%s: %v - %v = %d, want %d", tt.name, tt.p, tt.q, got, tt.sub)
		}
		if got := tt.p.Before(tt.q); got != (tt.sub < 0) {
			t.Errorf("%s: %v before %v = %v", tt.name, tt.p, tt.q, got)
		}
		if got := tt.q.Add(tt.sub); got != tt.p {
			t.Errorf("%s: %v + %d = %v, want %v", tt.name, tt.q, tt.sub, got, tt.p)
		}
	}
	if got := ib.PSN(3).Add(-5); got != 0xfffffe {
		t.Errorf("3 - 5 = %v", got)
	}
}

func FuzzPSN(f *testing.F) {
	f.Add(uint32(0xffffff), 2)
	f.Add(uint32(0), -1)
	f.Fuzz(func(t *testing.T, v uint32, n int) {
		p, d := ib.PSN(v)&ib.PSNMask, n%(1<<23)
		q := p.Add(d)
		switch {
		case q > ib.PSNMask:
			t.Fatalf("q is %v, want at most %v", q, ib.PSNMask)
		case q.Sub(p) != d:
			t.Fatalf("Sub(p) is %v, want %v", q.Sub(p), d)
		case q.Before(p) != (d < 0):
			t.Fatalf("Before(p) is %v, want %v", q.Before(p), d < 0)
		}
	})
}

func TestGID(t *testing.T) {
	for _, tt := range []struct {
		in        string
		is4, mc   bool
		addr, out string
	}{
		{"192.0.2.1", true, false, "192.0.2.1", "::ffff:192.0.2.1"},
		{"::ffff:192.0.2.1", true, false, "192.0.2.1", "::ffff:192.0.2.1"},
		{"239.192.255.255", true, true, "239.192.255.255", "::ffff:239.192.255.255"},
		{"fe80::1", false, false, "fe80::1", "fe80::1"},
		{"fe80::1%eth0", false, false, "fe80::1", "fe80::1"},
		{"ff12:401b:ffff::ffff:ffff", false, true, "ff12:401b:ffff::ffff:ffff", "ff12:401b:ffff::ffff:ffff"},
		{"::", false, false, "::", "::"},
	} {
		g, err := ib.ParseGID(tt.in)
		if err != nil {
			t.Errorf("%s: err is %v, want nil", tt.in, err)
		}
		expect.Equal(t, g.Is4(), tt.is4, "%s: Is4", tt.in)
		expect.Equal(t, g.IsMulticast(), tt.mc, "%s: IsMulticast", tt.in)
		expect.Equal(t, g.Addr(), netip.MustParseAddr(tt.addr), "%s: Addr", tt.in)
		expect.Equal(t, g.String(), tt.out, "%s: String", tt.in)
		text, _ := g.MarshalText()
		var back ib.GID
		switch err := back.UnmarshalText(text); {
		case err != nil:
			t.Errorf("%s: err is %v, want nil", tt.in, err)
		case back != g:
			t.Errorf("%s: back is %v, want %v", tt.in, back, g)
		case ib.GIDFromAddr(g.Addr()) != g:
			t.Errorf("%s: GIDFromAddr(g.Addr()) is %v, want %v", tt.in, ib.GIDFromAddr(g.Addr()), g)
		}
	}
	if _, err := ib.ParseGID("eth0"); err == nil {
		t.Error("eth0 is a GID")
	}
	if g := ib.GIDFromAddr(netip.Addr{}); !g.IsZero() {
		t.Errorf("no address gives %v", g)
	}
}

func TestMTU(t *testing.T) {
	for _, tt := range []struct {
		octets int
		want   ib.MTU
	}{
		{255, 0}, {256, ib.MTU256}, {511, ib.MTU256}, {1024, ib.MTU1024}, {1420, ib.MTU1024}, {2048, ib.MTU2048},
		{4095, ib.MTU2048}, {4096, ib.MTU4096}, {65536, ib.MTU4096}, {-1, 0},
	} {
		if got := ib.MTUFromOctets(tt.octets); got != tt.want {
			t.Errorf("MTU for %d octets is %d, want %d", tt.octets, uint8(got), uint8(tt.want))
		}
	}
	// 4755-1-3: UD payload
	for m, want := range map[ib.MTU]int{0: 0, 1: 256, 2: 512, 3: 1024, 4: 2048, 5: 4096, 6: 0, 255: 0} {
		if m.Octets() != want {
			t.Errorf("MTU code %d is %d octets, want %d", uint8(m), m.Octets(), want)
		}
	}
}

func TestPKeyIndex(t *testing.T) {
	for _, tt := range []struct {
		p     ib.PKey
		table []ib.PKey
		want  int
	}{
		{0xffff, []ib.PKey{0xffff}, 0},
		{0xffff, []ib.PKey{0x8001, 0x7fff}, 1},
		{0xffff, []ib.PKey{0x7fff, 0xffff}, 1},
		{0x7fff, []ib.PKey{0xffff, 0x7fff}, 1},
		{0x8001, []ib.PKey{0xffff, 0x8002}, -1},
		{0x8001, nil, -1},
	} {
		if got := tt.p.Index(tt.table); got != tt.want {
			t.Errorf("%v in %v: got %d, want %d", tt.p, tt.table, got, tt.want)
		}
	}
}

func TestPKeyMatch(t *testing.T) {
	for _, tt := range []struct {
		name string
		p, q ib.PKey
		want bool
	}{
		{"both full", 0xffff, 0xffff, true},
		{"one limited", 0x7fff, 0xffff, true},
		{"the other limited", 0xffff, 0x7fff, true},
		{"both limited", 0x7fff, 0x7fff, false},
		{"other partition", 0x8001, 0x8002, false},
	} {
		if got := tt.p.Match(tt.q); got != tt.want {
			t.Errorf("%s: %v matches %v = %v", tt.name, tt.p, tt.q, got)
		}
	}
}

func TestTimeout(t *testing.T) {
	for _, tt := range []struct {
		d    time.Duration
		want ib.Timeout
	}{
		{0, 0}, {4096, 0}, {4097, 1}, {16 * time.Millisecond, 12}, {67 * time.Millisecond, 14}, {time.Second, 18},
		{5 * time.Hour, 31},
	} {
		if got := ib.TimeoutFor(tt.d); got != tt.want {
			t.Errorf("code for %v is %d, want %d", tt.d, got, tt.want)
		}
	}
	if d := ib.Timeout(20).Duration(); d != 4294967296*time.Nanosecond {
		t.Errorf("code 20 is %v", d)
	}
	if d := ib.Timeout(14).Duration(); d > 68*time.Millisecond { // an ACK timeout of 14 is 67 ms
		t.Errorf("code 14 is %v", d)
	}
}

// TestRNRTimer holds the RNR NAK timers of IBA volume 1 section 9.7.5.2.8, in milliseconds.
func TestRNRTimer(t *testing.T) {
	for code, ms := range []float64{655.36, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.16, 0.24, 0.32, 0.48, 0.64,
		0.96, 1.28, 1.92,
		2.56, 3.84, 5.12, 7.68, 10.24, 15.36, 20.48, 30.72, 40.96, 61.44, 81.92, 122.88, 163.84, 245.76, 327.68, 491.52} {
		if got := ib.RNRTimer(code).Duration(); got != time.Duration(ms*100+0.5)*10*time.Microsecond {
			t.Errorf("code %d is %v, want %v ms", code, got, ms)
		}
	}
}

func TestStrings(t *testing.T) {
	for _, tt := range []struct{ got, want string }{
		{ib.QPN(0x123).String(), "0x000123"},
		{ib.PSN(0x64).String(), "000064"},
		{ib.PKey(0xffff).String(), "0xffff"},
		{ib.QKeyIPoIB.String(), "0x00000b1b"},
		{ib.GUID(0x0002c90300001111).String(), "0x0002c90300001111"},
		{ib.MTU1024.String(), "1024"},
		{ib.RC.String() + ib.UC.String() + ib.RD.String() + ib.UD.String(), "RCUCRDUD"},
		{ib.Transport(3).String(), "Transport(3)"},
	} {
		if tt.got != tt.want {
			t.Errorf("%q, want %q", tt.got, tt.want)
		}
	}
	if !ib.QPN(0xffffff).Valid() || ib.QPN(0x1000000).Valid() {
		t.Error("QPNs have 24 bits")
	}
}
