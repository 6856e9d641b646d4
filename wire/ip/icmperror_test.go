package ip

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net/netip"
	"testing"
)

// udp4 is a UDP packet of 3028 octets from 10.0.0.1 to 10.0.0.2, as f changes it.
func udp4(f func(b []byte)) []byte {
	return changed(AppendV4Header(nil, addr("10.0.0.1"), addr("10.0.0.2"), ProtoUDP, 64, 0, true, 3000), f)
}

// udp6 is one of 3040 octets from 2001:db8::1 to 2001:db8::2.
func udp6(f func(b []byte)) []byte {
	return changed(AppendV6Header(nil, addr("2001:db8::1"), addr("2001:db8::2"), ProtoUDP, 64, 3000), f)
}

func changed(header []byte, f func(b []byte)) []byte {
	b := append(header, bytes.Repeat([]byte{7}, 3000)...)
	if f != nil {
		f(b)
	}
	return b
}

// silent reports whether there is no error message for a packet, as an empty src wants.
func silent(t *testing.T, name string, b []byte, err error, src string) bool {
	t.Helper()
	if src != "" {
		return false
	}
	if !errors.Is(err, ErrSilent) {
		t.Errorf("%s: error %v, want silence", name, err)
	}
	if string(b) != "head" {
		t.Errorf("%s: appended %x, want nothing", name, b)
	}
	return true
}

// checkError4 checks the ICMP error for orig behind "head" in b: from src to the sender, whole, and with as
// much of orig as 576 octets have room for. It returns the message, nil if there is none.
func checkError4(t *testing.T, name string, b []byte, err error, src string, orig []byte) []byte {
	t.Helper()
	if silent(t, name, b, err, src) {
		return nil
	}
	p, err2 := AsV4(b[min(4, len(b)):])
	if err != nil || err2 != nil {
		t.Fatalf("%s: %v, %v: %x", name, err, err2, b)
	}
	m := p.Payload()
	if len(p) != 576 {
		t.Errorf("%s: %d octets, want 576", name, len(p))
	}
	if got := Checksum(p[:20]); got != 0 {
		t.Errorf("%s: checksum of the header is wrong: %x", name, b)
	}
	if got := Checksum(m); got != 0 {
		t.Errorf("%s: checksum of the message is wrong: %x", name, b)
	}
	if p.Protocol() != ProtoICMP {
		t.Errorf("%s: protocol %d, want ICMP", name, p.Protocol())
	}
	checkEnds(t, name, p.Src(), p.Dst(), src, "10.0.0.1")
	if !bytes.Equal(m[8:], orig[:548]) {
		t.Errorf("%s: quotes %x", name, m[8:])
	}
	return m
}

// checkError6 does so for ICMPv6, and 1280 octets.
func checkError6(t *testing.T, name string, b []byte, err error, src string, orig []byte) []byte {
	t.Helper()
	if silent(t, name, b, err, src) {
		return nil
	}
	p, err2 := AsV6(b[min(4, len(b)):])
	if err != nil || err2 != nil {
		t.Fatalf("%s: %v, %v: %x", name, err, err2, b)
	}
	m := p[V6HeaderLen:]
	if len(p) != 1280 {
		t.Errorf("%s: %d octets, want 1280", name, len(p))
	}
	if got := Checksum6(p.Src(), p.Dst(), ProtoICMPv6, m); got != 0 {
		t.Errorf("%s: wrong checksum: %x", name, b)
	}
	checkEnds(t, name, p.Src(), p.Dst(), src, "2001:db8::1")
	if !bytes.Equal(m[8:], orig[:1232]) {
		t.Errorf("%s: quotes %x", name, m[8:])
	}
	return m
}

func checkEnds(t *testing.T, name string, src, dst netip.Addr, wantSrc, wantDst string) {
	t.Helper()
	if src != addr(wantSrc) {
		t.Errorf("%s: from %v, want %v", name, src, wantSrc)
	}
	if dst != addr(wantDst) {
		t.Errorf("%s: to %v, want the sender, %v", name, dst, wantDst)
	}
}

func TestTooBig4(t *testing.T) {
	for _, tt := range []struct {
		name    string
		orig    []byte
		nextHop netip.Addr
		mtu     int
		src     string // empty means silence
	}{
		{"on the link: from the destination", udp4(nil), netip.Addr{}, 2044, "10.0.0.2"},
		{"behind a gateway: from the gateway", udp4(nil), addr("10.0.0.254"), 2044, "10.0.0.254"},
		{"next hop of the other family", udp4(nil), addr("fe80::1"), 2044, "10.0.0.2"},
		{"next hop that is no host", udp4(nil), addr("0.0.0.0"), 2044, "10.0.0.2"},
		{"to a group", udp4(func(b []byte) { b[16] = 224 }), netip.Addr{}, 2044, ""},
		{"to everybody", udp4(func(b []byte) { copy(b[16:], "\xff\xff\xff\xff") }), addr("10.0.0.254"), 2044, ""},
		{"from nobody", udp4(func(b []byte) { copy(b[12:], "\x00\x00\x00\x00") }), netip.Addr{}, 2044, ""},
		{"from a group", udp4(func(b []byte) { b[12] = 230 }), netip.Addr{}, 2044, ""},
		{"from loopback", udp4(func(b []byte) { b[12] = 127 }), netip.Addr{}, 2044, ""},
		{"first fragment", udp4(func(b []byte) { b[6] = 0x20 }), netip.Addr{}, 2044, "10.0.0.2"},
		{"later fragment", udp4(func(b []byte) { b[7] = 1 }), netip.Addr{}, 2044, ""},
		{"echo request", udp4(func(b []byte) { b[9], b[20] = ProtoICMP, 8 }), netip.Addr{}, 2044, "10.0.0.2"},
		{"ICMP error", udp4(func(b []byte) { b[9], b[20] = ProtoICMP, 3 }), netip.Addr{}, 2044, ""},
		{"absurd MTU", udp4(nil), netip.Addr{}, 67, ""},
	} {
		b, err := AppendTooBig([]byte("head"), tt.orig, tt.nextHop, tt.mtu)
		m := checkError4(t, tt.name, b, err, tt.src, tt.orig)
		if m == nil {
			continue
		}
		if want := []byte{3, 4}; !bytes.Equal(m[:2], want) {
			t.Errorf("%s: type and code %d, want %d", tt.name, m[:2], want)
		}
		if got := binary.BigEndian.Uint16(m[6:]); got != 2044 {
			t.Errorf("%s: MTU %d, want 2044", tt.name, got)
		}
	}
	if _, err := AppendTooBig(nil, nil, netip.Addr{}, 2044); err == nil {
		t.Error("no packet at all: no error")
	}
}

func TestTooBig6(t *testing.T) {
	for _, tt := range []struct {
		name    string
		orig    []byte
		nextHop netip.Addr
		mtu     int
		src     string
	}{
		{"on the link", udp6(nil), netip.Addr{}, 2044, "2001:db8::2"},
		{"link-local gateway", udp6(nil), addr("fe80::9%ibcm0"), 2044, "fe80::9"},
		{"to a group through nobody", udp6(func(b []byte) { b[24] = 0xff }), netip.Addr{}, 2044, ""},
		{"from a group", udp6(func(b []byte) { b[8] = 0xff }), netip.Addr{}, 2044, ""},
		{"from nobody", udp6(func(b []byte) { clear(b[8:24]) }), netip.Addr{}, 2044, ""},
		{"later fragment", udp6(func(b []byte) { b[6], b[40], b[43] = ProtoFragment, ProtoUDP, 8 }), netip.Addr{}, 2044, ""},
		{"echo request", udp6(func(b []byte) { b[6], b[40] = ProtoICMPv6, 128 }), netip.Addr{}, 2044, "2001:db8::2"},
		{"ICMPv6 error", udp6(func(b []byte) { b[6], b[40] = ProtoICMPv6, 1 }), netip.Addr{}, 2044, ""},
		{"redirect", udp6(func(b []byte) { b[6], b[40] = ProtoICMPv6, 137 }), netip.Addr{}, 2044, ""},
		{"MTU below 1280, which the kernel ignores", udp6(nil), netip.Addr{}, 1279, ""},
	} {
		b, err := AppendTooBig([]byte("head"), tt.orig, tt.nextHop, tt.mtu)
		m := checkError6(t, tt.name, b, err, tt.src, tt.orig)
		if m == nil {
			continue
		}
		if want := []byte{2, 0}; !bytes.Equal(m[:2], want) {
			t.Errorf("%s: type and code %d, want %d", tt.name, m[:2], want)
		}
		if got := binary.BigEndian.Uint32(m[4:]); got != 2044 {
			t.Errorf("%s: MTU %d, want 2044", tt.name, got)
		}
	}
}

func TestUnreachable4(t *testing.T) {
	for _, tt := range []struct {
		name    string
		orig    []byte
		nextHop netip.Addr
		src     string // empty means silence
	}{
		{"on the link: from the destination", udp4(nil), netip.Addr{}, "10.0.0.2"},
		{"behind a gateway: from the gateway", udp4(nil), addr("10.0.0.254"), "10.0.0.254"},
		{"gateway of the other family", udp4(nil), addr("fe80::1"), "10.0.0.2"},
		{"to a group", udp4(func(b []byte) { b[16] = 224 }), netip.Addr{}, ""},
		{"to everybody", udp4(func(b []byte) { copy(b[16:], "\xff\xff\xff\xff") }), netip.Addr{}, ""},
		{"from nobody", udp4(func(b []byte) { copy(b[12:], "\x00\x00\x00\x00") }), netip.Addr{}, ""},
		{"first fragment", udp4(func(b []byte) { b[6] = 0x20 }), netip.Addr{}, "10.0.0.2"},
		{"later fragment", udp4(func(b []byte) { b[7] = 1 }), netip.Addr{}, ""},
		{"echo request", udp4(func(b []byte) { b[9], b[20] = ProtoICMP, 8 }), netip.Addr{}, "10.0.0.2"},
		{"ICMP error", udp4(func(b []byte) { b[9], b[20] = ProtoICMP, 11 }), netip.Addr{}, ""},
	} {
		b, err := AppendUnreachable([]byte("head"), tt.orig, tt.nextHop)
		m := checkError4(t, tt.name, b, err, tt.src, tt.orig)
		if m == nil {
			continue
		}
		if want := []byte{3, 1, m[2], m[3], 0, 0, 0, 0}; !bytes.Equal(m[:8], want) {
			t.Errorf("%s: type, code, checksum and unused %d, want %d", tt.name, m[:8], want)
		}
	}
	if _, err := AppendUnreachable(nil, nil, netip.Addr{}); err == nil {
		t.Error("no packet at all: no error")
	}
}

func TestUnreachable6(t *testing.T) {
	for _, tt := range []struct {
		name    string
		orig    []byte
		nextHop netip.Addr
		src     string
	}{
		{"on the link", udp6(nil), netip.Addr{}, "2001:db8::2"},
		{"link-local gateway", udp6(nil), addr("fe80::9%ibcm0"), "fe80::9"},
		{"to a group, though the gateway is a host", udp6(func(b []byte) { b[24] = 0xff }), addr("fe80::9"), ""},
		{"from nobody", udp6(func(b []byte) { clear(b[8:24]) }), netip.Addr{}, ""},
		{"later fragment", udp6(func(b []byte) { b[6], b[40], b[43] = ProtoFragment, ProtoUDP, 8 }), netip.Addr{}, ""},
		{"echo request", udp6(func(b []byte) { b[6], b[40] = ProtoICMPv6, 128 }), netip.Addr{}, "2001:db8::2"},
		{"ICMPv6 error", udp6(func(b []byte) { b[6], b[40] = ProtoICMPv6, 1 }), netip.Addr{}, ""},
	} {
		b, err := AppendUnreachable([]byte("head"), tt.orig, tt.nextHop)
		m := checkError6(t, tt.name, b, err, tt.src, tt.orig)
		if m == nil {
			continue
		}
		if want := []byte{1, 3}; !bytes.Equal(m[:2], want) {
			t.Errorf("%s: type and code %d, want %d", tt.name, m[:2], want)
		}
	}
}
