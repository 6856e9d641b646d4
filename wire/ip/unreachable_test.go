package ip

import (
	"bytes"
	"errors"
	"net/netip"
	"testing"
)

func TestUnreachable4(t *testing.T) {
	pkt := func(f func(b []byte)) []byte {
		b := appendV4Header(nil, addr("10.0.0.1"), addr("10.0.0.2"), ProtoUDP, 64, 0, false, 3000)
		b = append(b, bytes.Repeat([]byte{7}, 3000)...)
		if f != nil {
			f(b)
		}
		return b
	}
	for _, tt := range []struct {
		name    string
		orig    []byte
		nextHop netip.Addr
		src     string // empty means silence
	}{
		{"on the link: from the destination", pkt(nil), netip.Addr{}, "10.0.0.2"},
		{"behind a gateway: from the gateway", pkt(nil), addr("10.0.0.254"), "10.0.0.254"},
		{"gateway of the other family", pkt(nil), addr("fe80::1"), "10.0.0.2"},
		{"to a group", pkt(func(b []byte) { b[16] = 224 }), netip.Addr{}, ""},
		{"to everybody", pkt(func(b []byte) { copy(b[16:], "\xff\xff\xff\xff") }), netip.Addr{}, ""},
		{"from nobody", pkt(func(b []byte) { copy(b[12:], "\x00\x00\x00\x00") }), netip.Addr{}, ""},
		{"first fragment", pkt(func(b []byte) { b[6] = 0x20 }), netip.Addr{}, "10.0.0.2"},
		{"later fragment", pkt(func(b []byte) { b[7] = 1 }), netip.Addr{}, ""},
		{"echo request", pkt(func(b []byte) { b[9], b[20] = ProtoICMP, 8 }), netip.Addr{}, "10.0.0.2"},
		{"ICMP error", pkt(func(b []byte) { b[9], b[20] = ProtoICMP, 11 }), netip.Addr{}, ""},
	} {
		b, err := AppendUnreachable([]byte("head"), tt.orig, tt.nextHop)
		if tt.src == "" {
			if !errors.Is(err, ErrSilent) {
				t.Errorf("%s: error %v, want silence", tt.name, err)
			}
			if string(b) != "head" {
				t.Errorf("%s: appended %x, want nothing", tt.name, b)
			}
			continue
		}
		p, err2 := AsV4(b[4:])
		if err != nil || err2 != nil {
			t.Fatalf("%s: %v, %v: %x", tt.name, err, err2, b)
		}
		m := p.Payload()
		if len(p) != 576 {
			t.Errorf("%s: %d octets, want 576", tt.name, len(p))
		}
		if Checksum(p[:20]) != 0 || Checksum(m) != 0 {
			t.Errorf("%s: wrong checksum: %x", tt.name, b)
		}
		if p.Src() != addr(tt.src) {
			t.Errorf("%s: from %v, want %v", tt.name, p.Src(), tt.src)
		}
		if p.Dst() != addr("10.0.0.1") {
			t.Errorf("%s: to %v, want the sender", tt.name, p.Dst())
		}
		if want := []byte{3, 1}; !bytes.Equal(m[:2], want) {
			t.Errorf("%s: type and code %d, want %d", tt.name, m[:2], want)
		}
		if !bytes.Equal(m[4:8], make([]byte, 4)) {
			t.Errorf("%s: unused octets %x, want zero", tt.name, m[4:8])
		}
		if !bytes.Equal(m[8:], tt.orig[:548]) {
			t.Errorf("%s: quotes %x", tt.name, m[8:])
		}
	}
	if _, err := AppendUnreachable(nil, nil, netip.Addr{}); err == nil {
		t.Error("no packet at all: no error")
	}
}

func TestUnreachable6(t *testing.T) {
	pkt := func(f func(b []byte)) []byte {
		b := AppendV6Header(nil, addr("2001:db8::1"), addr("2001:db8::2"), ProtoUDP, 64, 3000)
		b = append(b, bytes.Repeat([]byte{7}, 3000)...)
		if f != nil {
			f(b)
		}
		return b
	}
	for _, tt := range []struct {
		name    string
		orig    []byte
		nextHop netip.Addr
		src     string
	}{
		{"on the link", pkt(nil), netip.Addr{}, "2001:db8::2"},
		{"link-local gateway", pkt(nil), addr("fe80::9%ibcm0"), "fe80::9"},
		{"to a group, though the gateway is a host", pkt(func(b []byte) { b[24] = 0xff }), addr("fe80::9"), ""},
		{"from nobody", pkt(func(b []byte) { clear(b[8:24]) }), netip.Addr{}, ""},
		{"later fragment", pkt(func(b []byte) { b[6], b[40], b[43] = ProtoFragment, ProtoUDP, 8 }), netip.Addr{}, ""},
		{"echo request", pkt(func(b []byte) { b[6], b[40] = ProtoICMPv6, 128 }), netip.Addr{}, "2001:db8::2"},
		{"ICMPv6 error", pkt(func(b []byte) { b[6], b[40] = ProtoICMPv6, 1 }), netip.Addr{}, ""},
	} {
		b, err := AppendUnreachable(nil, tt.orig, tt.nextHop)
		if tt.src == "" {
			if !errors.Is(err, ErrSilent) || len(b) != 0 {
				t.Errorf("%s: %x, error %v, want silence", tt.name, b, err)
			}
			continue
		}
		p, err2 := AsV6(b)
		if err != nil || err2 != nil {
			t.Fatalf("%s: %v, %v: %x", tt.name, err, err2, b)
		}
		m := p.Payload()
		if len(p) != 1280 {
			t.Errorf("%s: %d octets, want 1280", tt.name, len(p))
		}
		if Checksum6(p.Src(), p.Dst(), ProtoICMPv6, m) != 0 {
			t.Errorf("%s: wrong checksum: %x", tt.name, b)
		}
		if p.Src() != addr(tt.src) {
			t.Errorf("%s: from %v, want %v", tt.name, p.Src(), tt.src)
		}
		if p.Dst() != addr("2001:db8::1") {
			t.Errorf("%s: to %v, want the sender", tt.name, p.Dst())
		}
		if want := []byte{1, 3}; !bytes.Equal(m[:2], want) {
			t.Errorf("%s: type and code %d, want %d", tt.name, m[:2], want)
		}
		if !bytes.Equal(m[8:], tt.orig[:1232]) {
			t.Errorf("%s: quotes %x", tt.name, m[8:])
		}
	}
}
