package ib

import (
	"math/rand/v2"
	"net/netip"
	"testing"
)

func TestGIDSet(t *testing.T) {
	prefixes := func(texts ...string) (ps []netip.Prefix) {
		for _, s := range texts {
			ps = append(ps, netip.MustParsePrefix(s))
		}
		return ps
	}
	for _, tt := range []struct {
		prefixes []netip.Prefix
		gid      string
		want     bool
	}{
		{nil, "fe80::1", false},
		{prefixes("fe80::/10"), "fe80::1", true},
		{prefixes("fe80::/10"), "fec0::1", false},
		{prefixes("fe80::/10"), "192.0.2.1", false},
		{prefixes("192.0.2.0/24"), "192.0.2.1", true},
		{prefixes("192.0.2.0/24"), "::ffff:192.0.2.1", true},
		{prefixes("192.0.2.0/24"), "192.0.3.1", false},
		{prefixes("0.0.0.0/0"), "::", false},
		{prefixes("::/0"), "192.0.2.1", false},
		{prefixes("fe80::1/128", "fe80::/16", "fe80::8:0/112"), "fe80::9:1", true}, // nested, in any order
		{prefixes("fe80::1/128", "fe80::3/128"), "fe80::2", false},
		{prefixes("fe80::1/128", "fe80::3/128"), "fe80::3", true},
		{prefixes("fe80::1/128", "fe80::3/128"), "fe80::", false},
	} {
		if got := NewGIDSet(tt.prefixes).Contains(GIDFromAddr(netip.MustParseAddr(tt.gid))); got != tt.want {
			t.Errorf("%v has %s: %v, want %v", tt.prefixes, tt.gid, got, tt.want)
		}
	}
	if !NewGIDSet(nil).IsEmpty() || NewGIDSet(prefixes("fe80::/10")).IsEmpty() {
		t.Error("the set without prefixes, and no other, is empty")
	}
}

// Random sets agree with looking at each prefix.
func TestGIDSetRandom(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	addr := func() netip.Addr { return netip.AddrFrom4([4]byte{10, 0, byte(r.IntN(4)), byte(r.IntN(256))}) }
	for range 300 {
		var ps []netip.Prefix
		for range r.IntN(20) {
			ps = append(ps, netip.PrefixFrom(addr(), 20+r.IntN(13)))
		}
		s := NewGIDSet(ps)
		for range 100 {
			a, want := addr(), false
			for _, p := range ps {
				want = want || p.Contains(a)
			}
			if got := s.Contains(GIDFromAddr(a)); got != want {
				t.Fatalf("%v has %v: %v, want %v", ps, a, got, want)
			}
		}
	}
}

func TestGIDSetAllocates(t *testing.T) {
	s, g := NewGIDSet([]netip.Prefix{netip.MustParsePrefix("fe80::/10")}), GID{0xfe, 0x80, 15: 1}
	if n := testing.AllocsPerRun(100, func() { s.Contains(g) }); n != 0 {
		t.Errorf("%v allocations, want none", n)
	}
}
