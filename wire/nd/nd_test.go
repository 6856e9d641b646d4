package nd

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"testing"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/internal/vector"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/ip"
)

var unhex = vector.Hex

var (
	addr   = netip.MustParseAddr
	a1, a2 = addr("fe80::1"), addr("fe80::12:3456")
	link   = encap.LinkAddr{Flags: encap.FlagRC | encap.FlagUC, QPN: 0x123456, GID: ib.GIDFromAddr(addr("fe80::aa"))}
)

// option is link as an option of type t, but for the type's octet.
const option = "030000" + "c0123456" + "fe8000000000000000000000000000aa"

// packet makes an IPv6 packet of an ICMPv6 message and gets the checksum right.
func packet(src, dst netip.Addr, m string) []byte {
	b := unhex(m)
	binary.BigEndian.PutUint16(b[2:], ip.Checksum6(src, dst, ip.ProtoICMPv6, b))
	return append(ip.AppendV6Header(nil, src, dst, ip.ProtoICMPv6, HopLimit, len(b)), b...)
}

func TestSolicitations(t *testing.T) {
	target := "fe800000000000000000000000123456"
	for _, tt := range []struct {
		name string
		m    NS
		dst  string
		body string
	}{
		// 4755-3.1-1, 4391-9.3-1: the option carries flags, QPN, GID behind two zero octets
		{"resolution", NewNS(a1, a2, link), "ff02::1:ff12:3456", "8700000000000000" + target + "01" + option},
		{"probe", NewProbe(a1, a2, link), "fe80::12:3456", "8700000000000000" + target + "01" + option},
		{"duplicate address", NewDAD(a2), "ff02::1:ff12:3456", "8700000000000000" + target},
	} {
		want := packet(tt.m.Src, addr(tt.dst), tt.body)
		b, err := tt.m.AppendBinary(nil)
		if err != nil || !bytes.Equal(b, want) {
			t.Errorf("%s: %v\n got %x\nwant %x", tt.name, err, b, want)
		}
		var got NS
		if err := got.UnmarshalBinary(b); err != nil || got != tt.m {
			t.Errorf("%s: read as %v, %v", tt.name, got, err)
		}
		if KindOf(b) != NeighborSolicitation {
			t.Errorf("%s: kind %s", tt.name, KindOf(b))
		}
	}
}

func TestAdvertisements(t *testing.T) {
	target := "fe800000000000000000000000123456"
	for _, tt := range []struct {
		name string
		m    NA
		src  string
		dst  string
		body string
	}{
		// 4755-3.1-13: flags, UD QPN and GID of the owner
		{"answer", NewNS(a1, a2, encap.LinkAddr{}).Answer(link, false), "fe80::12:3456", "fe80::1",
			"8800000060000000" + target + "02" + option},
		{"answer of a router", NewNS(a1, a2, encap.LinkAddr{}).Answer(link, true), "fe80::12:3456", "fe80::1",
			"88000000e0000000" + target + "02" + option},
		{"answer to a duplicate", NewDAD(a2).Answer(link, false), "fe80::12:3456", "ff02::1",
			"8800000020000000" + target + "02" + option},
		{"announcement", NewAnnouncement(a2, link, false), "fe80::12:3456", "ff02::1",
			"8800000020000000" + target + "02" + option},
		{"without option", NA{Src: a2, Dst: a1, Target: a2, Solicited: true}, "fe80::12:3456", "fe80::1",
			"8800000040000000" + target},
	} {
		want := packet(addr(tt.src), addr(tt.dst), tt.body)
		b, err := tt.m.AppendBinary(nil)
		if err != nil || !bytes.Equal(b, want) {
			t.Errorf("%s: %v\n got %x\nwant %x", tt.name, err, b, want)
		}
		var got NA
		if err := got.UnmarshalBinary(b); err != nil || got != tt.m {
			t.Errorf("%s: read as %v, %v", tt.name, got, err)
		}
	}
}

func TestReservedBits(t *testing.T) {
	// Reserved flags, padding of the option and an unknown option are ignored.
	b := packet(a2, a1, "880000007fffffff"+"fe800000000000000000000000123456"+"c801000000000000"+"0203ffff"+
		"ff123456"+"fe8000000000000000000000000000aa")
	var m NA
	// 4755-3.1-5
	switch err := m.UnmarshalBinary(b); {
	case err != nil:
		t.Errorf("%v", err)
	case m.Link != link:
		t.Errorf("Link is %v, want %v", m.Link, link)
	case !m.Solicited:
		t.Error("Solicited is false, want true")
	case !m.Override:
		t.Error("Override is false, want true")
	case m.Router:
		t.Error("Router is true, want false")
	}
}

func TestNotBelieved(t *testing.T) {
	const target = "fe800000000000000000000000123456"
	change := func(b []byte, off int, v byte) []byte { b = bytes.Clone(b); b[off] = v; return b }
	good, _ := NewNS(a1, a2, link).AppendBinary(nil)
	for _, tt := range []struct {
		name string
		pkt  []byte
	}{
		{"crossed a router", change(good, 7, 254)},
		{"checksum", change(good, 42, good[42]^1)},
		{"code", packet(a1, a2, "8701000000000000"+target)},
		{"short", packet(a1, a2, "8700000000000000"+target[:30])},
		{"target is a group", packet(a1, a2, "8700000000000000"+"ff020000000000000000000000123456")},
		{"source is a group", packet(ip.AllNodes, a2, "8700000000000000"+target)},
		{"option of length 0", packet(a1, a2, "8700000000000000"+target+"0100000000000000")},
		{"option beyond the end", packet(a1, a2, "8700000000000000"+target+"0103000000000000")},
		{"option of Ethernet", packet(a1, a2, "8700000000000000"+target+"0101525400770001")},
		{"link-layer option of 32 octets", packet(a1, a2, "8700000000000000"+target+"0104000080123456"+
			"fe8000000000000000000000000000aa"+"0000000000000000")},
		{"half an option", packet(a1, a2, "8700000000000000"+target+"01030000")},
		{"multicast QPN", packet(a1, a2, "8700000000000000"+target+"0103000080ffffff"+"fe8000000000000000000000000000aa")},
		{"multicast GID", packet(a1, a2, "8700000000000000"+target+"0103000080123456"+"ff1200000000000000000000000000aa")},
		{"unspecified source with option", packet(netip.IPv6Unspecified(), ip.SolicitedNode(a2),
			"8700000000000000"+target+"01"+option)},
		{"unspecified source to one host", packet(netip.IPv6Unspecified(), a2, "8700000000000000"+target)},
		{"an advertisement", packet(a2, a1, "8800000060000000"+target+"02"+option)},
		{"65 options", packet(a1, a2, "8700000000000000"+target+string(bytes.Repeat([]byte("c801000000000000"), 65)))},
	} {
		m := NS{Src: a1}
		if err := m.UnmarshalBinary(tt.pkt); err == nil || m != (NS{Src: a1}) {
			t.Errorf("NS, %s: %v, %v", tt.name, m, err)
		}
	}
	for _, tt := range []struct {
		name string
		pkt  []byte
	}{
		{"solicited, but to all", packet(a2, ip.AllNodes, "8800000060000000"+target+"02"+option)},
		{"a solicitation", good},
	} {
		if err := new(NA).UnmarshalBinary(tt.pkt); err == nil {
			t.Errorf("NA, %s: no error", tt.name)
		}
	}
	bad := NewDAD(a2)
	bad.HasLink = true
	if _, err := bad.AppendBinary(nil); err == nil {
		t.Error("unspecified source with option: no error when sent")
	}
	if _, err := NewNS(a1, addr("10.0.0.1"), link).AppendBinary(nil); err == nil {
		t.Error("IPv4 target: no error")
	}
}

// rs is a router solicitation that Linux sent on Ethernet.
var rs = unhex("6000000000103afffe80000000000000505400fffe770001ff020000000000000000000000000002" +
	"8500d995000000000101525400770001")

// strip takes the link-layer address out of a packet, which must be link if there is one.
func strip(t *testing.T, what string, pkt []byte) (back []byte, has bool) {
	t.Helper()
	back, got, has, err := StripLink(nil, pkt)
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
	if has {
		expect.Equal(t, got, link, "%s: the link-layer address", what)
	}
	return back, has
}

func TestRewrite(t *testing.T) {
	var (
		kernelRS = addr("fe80::5054:ff:fe77:1")
		routers  = addr("ff02::2")
		mtuOpt   = "05010000000007fc"
		ra       = "86000000400000000000000000000000"
		redirect = "8900000000000000" + "fe800000000000000000000000123456" + "20010db8000000000000000000000001"
	)
	for _, tt := range []struct {
		name string
		tun  []byte // as the kernel sent it
		wire []byte // as it goes out
		back []byte // as it comes in again
		link bool
	}{
		{"RS gains the source's", packet(a1, routers, "8500000000000000"),
			packet(a1, routers, "8500000000000000"+"01"+option), packet(a1, routers, "8500000000000000"), true},
		{"RS of nobody gains nothing", packet(netip.IPv6Unspecified(), routers, "8500000000000000"),
			packet(netip.IPv6Unspecified(), routers, "8500000000000000"),
			packet(netip.IPv6Unspecified(), routers, "8500000000000000"), false},
		{"an Ethernet option is replaced", rs, packet(kernelRS, routers, "8500000000000000"+"01"+option),
			packet(kernelRS, routers, "8500000000000000"), true},
		{"RA keeps its other options", packet(a1, ip.AllNodes, ra+mtuOpt),
			packet(a1, ip.AllNodes, ra+mtuOpt+"01"+option), packet(a1, ip.AllNodes, ra+mtuOpt), true},
		{"redirect gains the target's", packet(a1, a2, redirect), packet(a1, a2, redirect+"02"+option),
			packet(a1, a2, redirect), true},
	} {
		out, err := AddLink([]byte("head"), tt.tun, link)
		if err != nil {
			t.Errorf("%s: %v", tt.name, err)
			continue
		}
		if !bytes.Equal(out[4:], tt.wire) {
			t.Errorf("%s:\n got %x\nwant %x", tt.name, out[4:], tt.wire)
			continue
		}
		back, has := strip(t, tt.name+", back", tt.wire)
		if !bytes.Equal(back, tt.back) {
			t.Errorf("%s, back:\n got %x\nwant %x", tt.name, back, tt.back)
		}
		expect.Equal(t, has, tt.link, "%s, back: a link-layer address", tt.name)
	}
	if a, ok := RedirectTarget(packet(a1, a2, redirect)); !ok || a != a2 {
		t.Errorf("redirect target %v %v", a, ok)
	}
	if _, ok := RedirectTarget(rs); ok {
		t.Error("an RS has a redirect target")
	}
	ns, _ := NewNS(a1, a2, link).AppendBinary(nil)
	broken := bytes.Clone(rs)
	broken[47] ^= 1
	for name, pkt := range map[string][]byte{"NS": ns, "a broken RS": broken, "nothing": nil,
		"an RA cut short": packet(a1, ip.AllNodes, ra[:24])} {
		if out, err := AddLink([]byte("head"), pkt, link); err == nil || string(out) != "head" {
			t.Errorf("%s was rewritten: %x", name, out)
		}
	}
	// An option nobody can use is removed, and not passed on.
	out, _, has, err := StripLink(nil, packet(a1, routers, "8500000000000000"+"0103000080ffffff"+
		"fe8000000000000000000000000000aa"))
	if err != nil {
		t.Errorf("RS with a useless option: err is %v, want nil", err)
	}
	expect.Equal(t, has, false, "RS with a useless option: has")
	expect.Equal(t, len(out), 48, "RS with a useless option: length of out")
}

// optionHeaders are hop-by-hop options and destination options, of padding only.
const optionHeaders = "3c00010400000000" + "3a01010c0000000000000000" + "00000000"

// behind puts extension headers before the ICMPv6 message of pkt.
func behind(headers string, pkt []byte) []byte {
	ext := unhex(headers)
	out := append(bytes.Clone(pkt[:ip.V6HeaderLen]), ext...)
	out = append(out, pkt[ip.V6HeaderLen:]...)
	out[6] = ip.ProtoHopByHop
	binary.BigEndian.PutUint16(out[4:], uint16(len(out)-ip.V6HeaderLen))
	return out
}

// RFC 4861 has no word against options before a message, and Linux takes such.
func TestBehindExtensionHeaders(t *testing.T) {
	ns, _ := NewNS(a1, a2, link).AppendBinary(nil)
	var got NS
	if err := got.UnmarshalBinary(behind(optionHeaders, ns)); err != nil || got != NewNS(a1, a2, link) {
		t.Errorf("NS: got %v, %v, want %v", got, err, NewNS(a1, a2, link))
	}
	adv, _ := NewAnnouncement(a2, link, true).AppendBinary(nil)
	var na NA
	if err := na.UnmarshalBinary(behind(optionHeaders, adv)); err != nil || na != NewAnnouncement(a2, link, true) {
		t.Errorf("NA: got %v, %v, want %v", na, err, NewAnnouncement(a2, link, true))
	}
	routers := addr("ff02::2")
	plain, linked := packet(a1, routers, "8500000000000000"), packet(a1, routers, "8500000000000000"+"01"+option)
	if out, err := AddLink(nil, behind(optionHeaders, plain), link); err != nil ||
		!bytes.Equal(out, behind(optionHeaders, linked)) {
		t.Errorf("RS out: got %x, %v, want %x", out, err, behind(optionHeaders, linked))
	}
	out, l, _, err := StripLink(nil, behind(optionHeaders, linked))
	if err != nil || !bytes.Equal(out, behind(optionHeaders, plain)) {
		t.Errorf("RS in: got %x, %v, want %x", out, err, behind(optionHeaders, plain))
	}
	if l != link {
		t.Errorf("RS in: got link %v, want %v", l, link)
	}
	redirect := packet(a1, a2, "8900000000000000"+"fe800000000000000000000000123456"+"20010db8000000000000000000000001")
	if a, ok := RedirectTarget(behind(optionHeaders, redirect)); !ok || a != a2 {
		t.Errorf("redirect target: got %v, %v, want %v", a, ok, a2)
	}
	atomic := behind("3a00000000000000", ns)
	atomic[6] = ip.ProtoFragment
	if k := KindOf(atomic); k != None { // RFC 6980 section 5
		t.Errorf("in a fragment: got %v, want none", k)
	}
}

func FuzzND(f *testing.F) {
	ns, _ := NewNS(a1, a2, link).AppendBinary(nil)
	na, _ := NewAnnouncement(a2, link, true).AppendBinary(nil)
	for _, b := range [][]byte{ns, na, rs, behind(optionHeaders, ns), behind(optionHeaders, rs),
		packet(a1, ip.AllNodes, "86000000400000000000000000000000"+"05010000000007fc"+"01"+option)} {
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		// A fuzzer does not find checksums; give it them.
		if p, err := ip.AsV6(in); err == nil {
			if k, off := find(p); k != None && len(p) >= off+4 {
				in = bytes.Clone(p)
				m := in[off:]
				m[2], m[3] = 0, 0
				binary.BigEndian.PutUint16(m[2:], ip.Checksum6(p.Src(), p.Dst(), ip.ProtoICMPv6, m))
			}
		}
		var s, s2 NS
		if s.UnmarshalBinary(in) == nil {
			out, err := s.AppendBinary(nil)
			switch {
			case err != nil:
				t.Fatalf("NS: %v", err)
			case s2.UnmarshalBinary(out) != nil:
				t.Fatalf("NS: %v, then %v (%v)\n in %x\nout %x", s, s2, err, in, out)
			case s != s2:
				t.Fatalf("NS: s is %v, want %v", s, s2)
			}
		}
		var a, b NA
		if a.UnmarshalBinary(in) == nil {
			out, err := a.AppendBinary(nil)
			switch {
			case err != nil:
				t.Fatalf("NA: %v", err)
			case b.UnmarshalBinary(out) != nil:
				t.Fatalf("NA: %v, then %v (%v)\n in %x\nout %x", a, b, err, in, out)
			case a != b:
				t.Fatalf("NA: a is %v, want %v", a, b)
			}
		}
		if out, err := AddLink(nil, in, link); err == nil {
			back, _ := strip(t, "there and back", out)
			stripped, _, _, _ := StripLink(nil, in)
			if !bytes.Equal(back, stripped) {
				t.Fatalf("there and back\n got %x\nwant %x", back, stripped)
			}
		}
	})
}
