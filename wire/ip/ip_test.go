package ip

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"net/netip"
	"testing"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/internal/vector"
)

var unhex = vector.Hex

var addr = netip.MustParseAddr

// echo4 is the ICMP echo inside vector V9: 28 octets, TTL 64, ID 1.
var echo4 = unhex("4500001c00010000400166de0a0000010a0000020800f7ff00000000")

func id(p V4) uint16 { return binary.BigEndian.Uint16(p[4:]) }
func ttl(p V4) uint8 { return p[8] }

func TestView4(t *testing.T) {
	p, err := AsV4(append(bytes.Clone(echo4), 1, 2, 3)) // trailing octets are none of it
	if err != nil {
		t.Fatal(err)
	}
	expect.Equal(t, len(p), 28, "length of p")
	expect.Equal(t, p.HeaderLen(), 20, "HeaderLen")
	expect.Equal(t, id(p), 1, "ID")
	expect.Equal(t, p.DF(), false, "DF")
	expect.Equal(t, p.MF(), false, "MF")
	expect.Equal(t, p.FragOffset(), 0, "FragOffset")
	expect.Equal(t, ttl(p), 64, "TTL")
	expect.Equal(t, p.Protocol(), ProtoICMP, "Protocol")
	expect.Equal(t, p.Src(), addr("10.0.0.1"), "Src")
	expect.Equal(t, p.Dst(), addr("10.0.0.2"), "Dst")
	expect.Equal(t, len(p.Options()), 0, "length of Options")
	expect.Equal(t, len(p.Payload()), 8, "length of Payload")
	if Checksum(p[:20]) != 0 {
		t.Errorf("checksum of a right header = %#x, want 0", Checksum(p[:20]))
	}
	for _, tt := range []struct {
		name string
		off  int
		v    byte
	}{{"version", 0, 0x65}, {"header length", 0, 0x44}, {"header longer than the packet", 0, 0x4f},
		{"total below header", 3, 19}, {"total beyond the end", 3, 29}} {
		b := bytes.Clone(echo4)
		b[tt.off] = tt.v
		if _, err := AsV4(b); err == nil {
			t.Errorf("%s: no error", tt.name)
		}
	}
}

func TestView6(t *testing.T) {
	b := AppendV6Header(nil, addr("2001:db8::1"), addr("ff02::1"), ProtoUDP, 7, 3)
	p, err := AsV6(append(b, 1, 2, 3, 4))
	if err != nil {
		t.Fatal(err)
	}
	expect.Equal(t, len(p), 43, "length of p")
	expect.Equal(t, p.NextHeader(), ProtoUDP, "NextHeader")
	expect.Equal(t, p.HopLimit(), 7, "HopLimit")
	expect.Equal(t, p.Src(), addr("2001:db8::1"), "Src")
	expect.Equal(t, p.Dst(), addr("ff02::1"), "Dst")
	if !bytes.Equal(p[V6HeaderLen:], []byte{1, 2, 3}) {
		t.Errorf("payload is %x, want %x", p[V6HeaderLen:], []byte{1, 2, 3})
	}
	if _, err := AsV6(b); err == nil {
		t.Error("payload missing: no error")
	}
}

func TestAddressesOfAnyPacket(t *testing.T) {
	v6 := AppendV6Header(nil, addr("fe80::1"), addr("fe80::2"), ProtoNone, 1, 0)
	for _, tt := range []struct {
		b        []byte
		src, dst netip.Addr
		ok       bool
	}{
		{echo4, addr("10.0.0.1"), addr("10.0.0.2"), true},
		{v6, addr("fe80::1"), addr("fe80::2"), true},
		{v6[:39], netip.Addr{}, netip.Addr{}, false},
		{echo4[:19], netip.Addr{}, netip.Addr{}, false},
		{nil, netip.Addr{}, netip.Addr{}, false},
		{make([]byte, 60), netip.Addr{}, netip.Addr{}, false},
	} {
		src, ok := Src(tt.b)
		dst, ok2 := Dst(tt.b)
		expect.Equal(t, src, tt.src, "%x: src", tt.b)
		expect.Equal(t, dst, tt.dst, "%x: dst", tt.b)
		expect.Equal(t, ok, tt.ok, "%x: ok", tt.b)
		expect.Equal(t, ok2, tt.ok, "%x: ok2", tt.b)
	}
	if n := testing.AllocsPerRun(100, func() { Dst(v6); Dst(echo4) }); n != 0 {
		t.Errorf("Dst allocates %v times", n)
	}
}

func TestUpper(t *testing.T) {
	ext := func(first byte, rest string) V6 {
		b := unhex(rest)
		return V6(append(AppendV6Header(nil, addr("fe80::1"), addr("fe80::2"), first, 1, len(b)), b...))
	}
	for _, tt := range []struct {
		name  string
		p     V6
		proto uint8
		off   int
		first bool
		ok    bool
	}{
		{"none", ext(ProtoUDP, ""), ProtoUDP, 40, true, true},
		{"hop-by-hop", ext(ProtoHopByHop, "3a00050200000100ff"), ProtoICMPv6, 48, true, true},
		{"first fragment", ext(ProtoFragment, "1100000100000001"), ProtoUDP, 48, true, true},
		{"later fragment", ext(ProtoFragment, "1100000900000001"), ProtoUDP, 48, false, true},
		{"authentication, 4-octet units", ext(ProtoAH, "3a01000000000000000000003a"), ProtoICMPv6, 52, true, true},
		{"cut short", ext(ProtoHopByHop, "3a000502"), ProtoHopByHop, 40, true, false},
		{"longer than the packet", ext(ProtoHopByHop, "3a01050200000100"), ProtoHopByHop, 40, true, false},
		{"nine headers", ext(ProtoDestOpts, "3c000000000000003c000000000000003c000000000000003c00000000000000"+
			"3c000000000000003c000000000000003c000000000000003c000000000000003c00000000000000"),
			ProtoDestOpts, 104, true, false},
	} {
		proto, off, first, ok := tt.p.Upper()
		expect.Equal(t, proto, tt.proto, "%s: proto", tt.name)
		expect.Equal(t, off, tt.off, "%s: off", tt.name)
		expect.Equal(t, first, tt.first, "%s: first", tt.name)
		expect.Equal(t, ok, tt.ok, "%s: ok", tt.name)
	}
}

func TestChecksum(t *testing.T) {
	for _, tt := range []struct {
		in   string
		want uint16
	}{
		{"0001f203f4f5f6f7", 0x220d}, // RFC 1071 section 3
		{"", 0xffff},
		{"ff", 0x00ff},
		{"ffff", 0},
		{"ffffffffffffffff01", 0xfeff},
	} {
		if got := Checksum(unhex(tt.in)); got != tt.want {
			t.Errorf("checksum of %s = %#04x, want %#04x", tt.in, got, tt.want)
		}
	}
	// A router solicitation that a Linux kernel sent.
	rs := unhex("6000000000103afffe80000000000000505400fffe770001ff020000000000000000000000000002" +
		"8500d995000000000101525400770001")
	if got := Checksum6(V6(rs).Src(), V6(rs).Dst(), ProtoICMPv6, rs[40:]); got != 0 {
		t.Errorf("checksum of a kernel's RS = %#04x, want 0", got)
	}
}

func TestGIDAddresses(t *testing.T) {
	g := func(s string) ib.GID { return ib.GIDFromAddr(addr(s)) }
	for _, tt := range []struct {
		name string
		gid  ib.GID
		want string
	}{
		// 4391-8-1
		{"u bit set already: it is not toggled", g("fe80::2c9:300:0:1111"), "fe80::2c9:300:0:1111"},
		{"u bit clear", g("fe80::5054:ff:fe77:1"), "fe80::5254:ff:fe77:1"},
		{"IPv4-mapped", g("192.0.2.1"), "fe80::200:ffff:c000:201"},
		{"only the low half counts", g("2001:db8::1"), "fe80::200:0:0:1"},
	} {
		if got := LinkLocal(tt.gid); got != addr(tt.want) {
			t.Errorf("%s: %s gives %s, want %s", tt.name, tt.gid, got, tt.want)
		}
	}
	if got := SolicitedNode(addr("2001:db8::1234:5678")); got != addr("ff02::1:ff34:5678") {
		t.Errorf("solicited-node group %s", got)
	}
}

// reassemble puts fragments together by their offsets, as a receiver would.
func reassemble(t *testing.T, frags [][]byte, mtu int) (payload []byte, more bool) {
	t.Helper()
	more = true
	base := V4(frags[0]).FragOffset()
	for i, b := range frags {
		p, err := AsV4(b)
		if err != nil {
			t.Fatalf("fragment %d: err is %v, want nil", i, err)
		}
		expect.MustEqual(t, len(p), len(b), "fragment %d: length of p", i)
		expect.MustEqual(t, Checksum(p[:p.HeaderLen()]), 0, "fragment %d: Checksum(p[:p.HeaderLen()])", i)
		if len(b) > mtu {
			t.Fatalf("fragment %d: %d octets, MTU %d", i, len(b), mtu)
		}
		if p.FragOffset() != base+len(payload) {
			t.Fatalf("fragment %d: offset %d, want %d", i, p.FragOffset(), base+len(payload))
		}
		if i < len(frags)-1 {
			expect.MustEqual(t, p.MF(), true, "fragment %d of %d: MF", i, len(frags))
			expect.MustEqual(t, len(p.Payload())%8, 0, "fragment %d: %d octets modulo 8", i, len(p.Payload()))
		}
		payload, more = append(payload, p.Payload()...), p.MF()
	}
	return payload, more
}

func fragments(pkt []byte, mtu int) (out [][]byte, err error) {
	f, err := NewFragmenter(pkt, mtu)
	for err == nil && f.More() {
		out = append(out, f.Append(nil))
	}
	return out, err
}

// fragmentable returns a packet with n octets behind its options.
func fragmentable(n int, opts string, flags byte, off int) []byte {
	o := unhex(opts)
	b := AppendV4Header(nil, addr("10.0.0.1"), addr("10.0.0.2"), ProtoUDP, 64, 0, false, len(o)+n)
	b[0] += byte(len(o) / 4)
	b[4], b[5] = 0xab, 0xcd
	binary.BigEndian.PutUint16(b[6:], uint16(flags)<<8|uint16(off/8))
	b = append(b, o...)
	for i := range n {
		b = append(b, byte(rand.IntN(256)+i))
	}
	b[10], b[11] = 0, 0
	binary.BigEndian.PutUint16(b[10:], Checksum(b[:20+len(o)]))
	return b
}

// Options, as octets.
const (
	rr       = "0707040000000000" // record route: only in the first
	alertRR  = "940400000707040000000000"
	badOpt   = "94050000"
	oneOctet = "00000094"
)

// fragmentCases are the cases of TestFragments.
var fragmentCases = []struct {
	name  string
	pkt   []byte
	mtu   int
	count int
	hlens []int
}{
	{"fits exactly", fragmentable(2024, "", 0, 0), 2044, 1, []int{20}},
	{"one octet over", fragmentable(2025, "", 0, 0), 2044, 2, []int{20, 20}},
	{"largest packet, default MTU", fragmentable(65500, "", 0, 0), 2044, 33, []int{20, 20}},
	{"smallest MTU", fragmentable(200, "", 0, 0), 68, 5, []int{20, 20}},
	{"payload room not a multiple of 8", fragmentable(3000, "", 0, 0), 1499, 3, []int{20, 20, 20}},
	{"option without the copied bit", fragmentable(3000, rr, 0, 0), 1500, 3, []int{28, 20, 20}},
	{"option with the copied bit", fragmentable(3000, alertRR, 0, 0), 1500, 3, []int{32, 24, 24}},
	{"what follows the end of options is none", fragmentable(3000, oneOctet, 0, 0), 1500, 3, []int{24, 20, 20}},
	{"a middle fragment", fragmentable(1600, "", 0x20, 4000), 1000, 2, []int{20, 20}},
	{"a last fragment", fragmentable(1601, "", 0, 4000), 1000, 2, []int{20, 20}},
}

func TestFragments(t *testing.T) {
	for _, tt := range fragmentCases {
		in, _ := AsV4(tt.pkt)
		out, err := fragments(tt.pkt, tt.mtu)
		if err != nil || len(out) != tt.count {
			t.Errorf("%s: %d fragments, %v; want %d", tt.name, len(out), err, tt.count)
			continue
		}
		payload, more := reassemble(t, out, tt.mtu)
		switch {
		case !bytes.Equal(payload, in.Payload()):
			t.Errorf("%s: payload is %x, want %x", tt.name, payload, in.Payload())
		case more != in.MF():
			t.Errorf("%s: more is %v, want %v", tt.name, more, in.MF())
		case V4(out[0]).FragOffset() != in.FragOffset():
			t.Errorf("%s: V4(out[0]).FragOffset is %v, want %v", tt.name, V4(out[0]).FragOffset(), in.FragOffset())
		}
		for i, hlen := range tt.hlens {
			p := V4(out[i])
			switch {
			case p.HeaderLen() != hlen:
				t.Errorf("%s: HeaderLen is %v, want %v", tt.name, p.HeaderLen(), hlen)
			case id(p) != 0xabcd && tt.count > 1:
				t.Errorf("%s: ID is %#x, want 0xabcd", tt.name, id(p))
			case ttl(p) != 64:
				t.Errorf("%s: TTL is %v, want 64", tt.name, ttl(p))
			case p.Protocol() != ProtoUDP:
				t.Errorf("%s: Protocol is %v, want %v", tt.name, p.Protocol(), ProtoUDP)
			}
		}
	}
	for _, tt := range []struct {
		name string
		pkt  []byte
		mtu  int
		err  error
	}{
		{"DF", fragmentable(3000, "", 0x40, 0), 1500, ErrDontFragment},
		{"MTU below 68", fragmentable(3000, "", 0, 0), 67, nil},
		{"beyond 65535 in all", fragmentable(3000, "", 0, 64000), 1500, nil},
		{"a middle fragment of odd length", fragmentable(3001, "", 0x20, 0), 1500, nil},
		{"an option longer than the options", fragmentable(3000, badOpt, 0, 0), 1500, nil},
	} {
		_, err := NewFragmenter(tt.pkt, tt.mtu)
		switch {
		case err == nil:
			t.Errorf("%s: err is nil", tt.name)
		case tt.err != nil && !errors.Is(err, tt.err):
			t.Errorf("%s: err is %v, want %v", tt.name, err, tt.err)
		case tt.err == nil && errors.Is(err, ErrDontFragment):
			t.Errorf("%s: Is(err, ErrDontFragment) is true, want false", tt.name)
		}
	}
}

func TestFragmentsDoNotAllocate(t *testing.T) {
	pkt := AppendV4Header(nil, addr("10.0.0.1"), addr("10.0.0.2"), ProtoUDP, 64, 0, false, 60000)
	pkt, buf := append(pkt, make([]byte, 60000)...), make([]byte, 4, 4+2044)
	if n := testing.AllocsPerRun(10, func() {
		f, err := NewFragmenter(pkt, 2044)
		for err == nil && f.More() {
			f.Append(buf[:4])
		}
	}); n != 0 {
		t.Errorf("%v allocations, want none", n)
	}
}

func FuzzFragments(f *testing.F) {
	f.Add(echo4, 68)
	f.Add(append(AppendV4Header(nil, addr("10.0.0.1"), addr("10.0.0.2"), ProtoUDP, 64, 0, false, 300),
		make([]byte, 300)...), 100)
	f.Fuzz(func(t *testing.T, in []byte, mtu int) {
		out, err := fragments(in, mtu)
		if err != nil || len(out) == 1 {
			return
		}
		p, _ := AsV4(in)
		payload, more := reassemble(t, out, mtu)
		if !bytes.Equal(payload, p.Payload()) || more != p.MF() {
			t.Fatalf("cut %x at %d into %x", in, mtu, out)
		}
	})
}

func FuzzTooBig(f *testing.F) {
	f.Add(echo4, 1500)
	f.Add(AppendV6Header(nil, addr("fe80::1"), addr("fe80::2"), ProtoNone, 1, 0), 1280)
	f.Fuzz(func(t *testing.T, in []byte, mtu int) {
		b, err := AppendTooBig(nil, in, netip.Addr{}, mtu)
		if err != nil {
			return
		}
		// What we say must itself never be answered.
		if _, err := AppendTooBig(nil, b, netip.Addr{}, mtu); !errors.Is(err, ErrSilent) {
			t.Fatalf("answer to an answer: %x", b)
		}
	})
}
