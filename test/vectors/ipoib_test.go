package vectors

import (
	"encoding/binary"
	"net/netip"

	"ipoibcm/group"
	"ipoibcm/ib"
	"ipoibcm/serviceid"
	"ipoibcm/wire/arp"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/nd"
)

// The two hosts of all vectors.
var (
	linkA = encap.LinkAddr{Flags: encap.FlagRC, QPN: 0x000123, GID: gid("fe80::2")}
	linkB = encap.LinkAddr{Flags: encap.FlagRC | encap.FlagUC, QPN: 0x000456, GID: gid("fe80::7")}
	ipA   = netip.MustParseAddr("10.0.0.1")
	ipB   = netip.MustParseAddr("10.0.0.2")
	ip6A  = netip.MustParseAddr("fd00::1")
	ip6B  = netip.MustParseAddr("fd00::2")
)

func gid(s string) ib.GID {
	g, err := ib.ParseGID(s)
	if err != nil {
		panic(err)
	}
	return g
}

func ipoibFile() file {
	f := file{Title: "RFC 4391 and RFC 4755: encapsulation header, link-layer address, private data, ARP, ND, multicast"}
	f.samples = append(f.samples, headers()...)
	f.samples = append(f.samples, links()...)
	f.samples = append(f.samples, privates()...)
	f.samples = append(f.samples, arps()...)
	f.samples = append(f.samples, solicitation(), advertisement())
	f.samples = append(f.samples, groups()...)
	return f
}

// header appends the encapsulation header.
func (s *sample) header(typ encap.EtherType, reserved uint64) {
	s.word("type", 16, uint64(typ), "RFC 4391 section 6")
	s.word("reserved", 16, reserved, "RFC 4391 section 6")
}

func headers() (all []sample) {
	for _, tt := range []struct {
		name     string
		typ      encap.EtherType
		reserved uint64
	}{
		{"encapsulation header, IPv4", encap.IPv4, 0},
		{"encapsulation header, IPv6", encap.IPv6, 0},
		{"encapsulation header, ARP", encap.ARP, 0},
		{"encapsulation header, reserved bits set", encap.IPv4, 0xbeef},
	} {
		h := encap.Header{Type: tt.typ}
		s := sample{name: tt.name, want: h}
		s.header(tt.typ, tt.reserved)
		s.decode = func(b []byte) (any, error) { var h encap.Header; err := h.UnmarshalBinary(b); return h, err }
		if tt.reserved == 0 {
			s.encode = func() ([]byte, error) { return h.AppendBinary(nil) }
		}
		all = append(all, s)
	}
	return all
}

// link appends a link-layer address.
func (s *sample) link(what string, a encap.LinkAddr, reserved uint64) {
	const clause = "RFC 4755 section 3.1"
	s.word(what+"RC", 1, uint64(a.Flags>>7), clause)
	s.word(what+"UC", 1, uint64(a.Flags>>6&1), clause)
	s.word(what+"reserved flags", 6, reserved, clause)
	s.word(what+"UD QPN", 24, uint64(a.QPN), clause)
	s.raw(what+"GID", a.GID[:], clause)
}

func links() (all []sample) {
	for _, tt := range []struct {
		name     string
		flags    encap.Flags
		reserved uint64
	}{
		{"link-layer address, RC", encap.FlagRC, 0},
		{"link-layer address, UC", encap.FlagUC, 0},
		{"link-layer address, RC and UC", encap.FlagRC | encap.FlagUC, 0},
		{"link-layer address, UD only", 0, 0},
		{"link-layer address, reserved flags set", encap.FlagRC, 0x3f},
	} {
		a := linkA
		a.Flags = tt.flags
		s := sample{name: tt.name, want: a}
		s.link("", a, tt.reserved)
		s.decode = func(b []byte) (any, error) { var a encap.LinkAddr; err := a.UnmarshalBinary(b); return a, err }
		if tt.reserved == 0 {
			s.encode = func() ([]byte, error) { return a.AppendBinary(nil) }
		}
		all = append(all, s)
	}
	return all
}

// private appends IPoIB's private data and the zeros behind it.
func (s *sample) private(p encap.PrivateData, reserved uint64, room int) {
	const clause = "RFC 4755 section 6"
	s.word("private data: reserved", 8, reserved, clause)
	s.word("private data: UD QPN", 24, uint64(p.QPN), clause)
	s.word("private data: Receive MTU", 32, uint64(p.ReceiveMTU), clause)
	s.raw("private data: not used", make([]byte, room-encap.PrivateDataLen), clause)
}

func privates() (all []sample) {
	for _, tt := range []struct {
		name     string
		p        encap.PrivateData
		reserved uint64
	}{
		{"private data", encap.PrivateData{QPN: 0x123, ReceiveMTU: 65524}, 0},
		{"private data, reserved octet set", encap.PrivateData{QPN: 0x123, ReceiveMTU: 65524}, 0xff},
	} {
		s := sample{name: tt.name, want: tt.p}
		s.private(tt.p, tt.reserved, encap.PrivateDataLen)
		s.decode = func(b []byte) (any, error) { var p encap.PrivateData; err := p.UnmarshalBinary(b); return p, err }
		if tt.reserved == 0 {
			s.encode = func() ([]byte, error) { return tt.p.AppendBinary(nil) }
		}
		all = append(all, s)
	}
	return all
}

func arps() (all []sample) {
	request := arp.NewRequest(linkA, ipA, ipB)
	for _, tt := range []struct {
		name, note string
		p          arp.Packet
	}{
		{"ARP request", "a UD packet to the broadcast GID; A asks for B", request},
		{"ARP reply", "a UD packet to the UD QPN of A", request.ReplyFrom(linkB)},
		{"ARP probe", "RFC 5227 section 2.1.1", arp.NewProbe(linkA, ipA)},
		{"ARP announcement", "RFC 5227 section 2.3", arp.NewAnnouncement(linkA, ipA)},
	} {
		s := sample{name: tt.name, note: tt.note, want: tt.p}
		s.header(encap.ARP, 0)
		s.word("hardware type", 16, 32, "RFC 4391 section 9.2")
		s.word("protocol type", 16, 0x0800, "RFC 826")
		s.word("hardware length", 8, 20, "RFC 4391 section 9.2")
		s.word("protocol length", 8, 4, "RFC 826")
		s.word("operation", 16, uint64(tt.p.Op), "RFC 826")
		s.link("sender: ", tt.p.Sender, 0)
		s.raw("sender: IPv4 address", tt.p.SenderIP.AsSlice(), "RFC 826")
		s.link("target: ", tt.p.Target, 0)
		s.raw("target: IPv4 address", tt.p.TargetIP.AsSlice(), "RFC 826")
		s.encode = func() ([]byte, error) { return tt.p.AppendBinary(headerOf(encap.ARP)) }
		s.decode = func(b []byte) (any, error) {
			var p arp.Packet
			err := p.UnmarshalBinary(b[encap.HeaderLen:])
			return p, err
		}
		all = append(all, s)
	}
	return all
}

func headerOf(t encap.EtherType) []byte {
	b := make([]byte, encap.HeaderLen)
	encap.Put(b, t)
	return b
}

// ipv6 appends the header of an ICMPv6 packet with n octets behind it.
func (s *sample) ipv6(src, dst netip.Addr, n int) {
	const clause = "RFC 8200 section 3"
	s.word("version", 4, 6, clause)
	s.word("traffic class", 8, 0, clause)
	s.word("flow label", 20, 0, clause)
	s.word("payload length", 16, uint64(n), clause)
	s.word("next header", 8, 58, clause)
	s.word("hop limit", 8, 255, "RFC 4861 section 7.1.1")
	s.raw("source", src.AsSlice(), clause)
	s.raw("destination", dst.AsSlice(), clause)
}

// icmpv6 makes s an ICMPv6 message of size octets. It has rest appended twice: the
// checksum counts all fields.
func (s *sample) icmpv6(src, dst netip.Addr, size int, typ uint64, clause string, rest func()) {
	build := func(sum uint64) {
		s.bits, s.fields = nil, nil
		s.header(encap.IPv6, 0)
		s.ipv6(src, dst, size)
		s.word("ICMPv6 type", 8, typ, clause)
		s.word("code", 8, 0, clause)
		s.word("checksum", 16, sum, "RFC 4443 section 2.3")
		rest()
	}
	build(0)
	build(checksum(s.octets()[encap.HeaderLen:]))
}

// option appends a link-layer option.
func (s *sample) option(typ uint64, a encap.LinkAddr) {
	s.word("option: type", 8, typ, "RFC 4861 section 4.6.1")
	s.word("option: length, in 8 octets", 8, 3, "RFC 4391 section 9.3")
	s.word("option: padding", 16, 0, "RFC 4391 section 9.3")
	s.link("option: ", a, 0)
}

func solicitation() sample {
	m := nd.NewNS(ip6A, ip6B, linkA)
	s := sample{name: "Neighbor Solicitation", note: "A asks for B, with a source link-layer option", want: m}
	s.icmpv6(m.Src, m.Dst, 48, 135, "RFC 4861 section 4.3", func() {
		s.word("reserved", 32, 0, "RFC 4861 section 4.3")
		s.raw("target", m.Target.AsSlice(), "RFC 4861 section 4.3")
		s.option(1, m.Link)
	})
	s.encode = func() ([]byte, error) { return m.AppendBinary(headerOf(encap.IPv6)) }
	s.decode = func(b []byte) (any, error) { var m nd.NS; err := m.UnmarshalBinary(b[encap.HeaderLen:]); return m, err }
	return s
}

func advertisement() sample {
	m := nd.NewNS(ip6A, ip6B, linkA).Answer(linkB, false)
	s := sample{name: "Neighbor Advertisement", note: "B answers A, with a target link-layer option, by UD", want: m}
	s.icmpv6(m.Src, m.Dst, 48, 136, "RFC 4861 section 4.4", func() {
		s.word("router", 1, 0, "RFC 4861 section 4.4")
		s.word("solicited", 1, 1, "RFC 4861 section 4.4")
		s.word("override", 1, 1, "RFC 4861 section 4.4")
		s.word("reserved", 29, 0, "RFC 4861 section 4.4")
		s.raw("target", m.Target.AsSlice(), "RFC 4861 section 4.4")
		s.option(2, m.Link)
	})
	s.encode = func() ([]byte, error) { return m.AppendBinary(headerOf(encap.IPv6)) }
	s.decode = func(b []byte) (any, error) { var m nd.NA; err := m.UnmarshalBinary(b[encap.HeaderLen:]); return m, err }
	return s
}

// checksum is that of the ICMPv6 packet b, whose checksum field is zero.
func checksum(b []byte) uint64 {
	pseudo := append([]byte(nil), b[8:40]...) // addresses
	pseudo = append(pseudo, 0, 0, b[4], b[5], 0, 0, 0, 58)
	pseudo = append(pseudo, b[40:]...)
	var sum uint64
	for i := 0; i < len(pseudo); i += 2 {
		sum += uint64(binary.BigEndian.Uint16(pseudo[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^sum & 0xffff
}

// groups are MGIDs. The last field of an IPv4 group is 28 bits of the address.
func groups() (all []sample) {
	for _, tt := range []struct {
		name  string
		a     string
		pkey  ib.PKey
		scope uint8
	}{
		{"broadcast", "255.255.255.255", 0xffff, 2},
		{"all routers", "224.0.0.2", 0x8000, 2},
		{"all nodes", "ff02::1", 0xffff, 2},
		{"IPv4 group", "239.1.2.3", 0x8123, 5},
		{"IPv6 group", "ff05::1:3", 0x8123, 5},
		{"P_Key of a limited member", "ff02::1", 0x7fff, 2},
	} {
		a := netip.MustParseAddr(tt.a)
		s := sample{name: "MGID of " + tt.a + ", " + tt.name, want: a.String()}
		s.word("0xff", 8, 0xff, "RFC 4391 section 4")
		s.word("flags: transient", 4, 1, "RFC 4391 section 4")
		s.word("scope", 4, uint64(tt.scope), "RFC 4391 section 4")
		if a.Is4() {
			s.word("signature", 16, 0x401b, "RFC 4391 section 4")
		} else {
			s.word("signature", 16, 0x601b, "RFC 4391 section 4")
		}
		s.word("P_Key with the full membership bit", 16, uint64(tt.pkey)|0x8000, "RFC 4391 section 4.1")
		switch low := a.AsSlice(); {
		case tt.name == "broadcast":
			s.raw("zero", make([]byte, 6), "RFC 4391 section 4")
			s.raw("all ones", low, "RFC 4391 section 4")
		case a.Is4():
			s.raw("zero", make([]byte, 6), "RFC 4391 section 4")
			s.word("zero", 4, 0, "RFC 4391 section 4")
			s.word("low 28 bits of the group", 28, uint64(binary.BigEndian.Uint32(low)&0x0fffffff), "RFC 4391 section 4")
		default:
			s.raw("low 80 bits of the group", low[6:], "RFC 4391 section 4")
		}
		s.encode = func() ([]byte, error) {
			g, _ := group.MGID(a, tt.pkey, tt.scope)
			return g[:], nil
		}
		s.decode = func([]byte) (any, error) { return a.String(), nil } // an MGID is never taken apart
		all = append(all, s)
	}
	return all
}

func serviceIDFile() file {
	f := file{Title: "service IDs of IPoIB connected mode"}
	for _, tt := range []struct {
		name, note, clause string
		form               serviceid.Form
		first              uint64
	}{
		{"RFC 4755", "", "RFC 4755 section 3.5", serviceid.RFC, 0x01},
		{"Linux", "what Linux, FreeBSD and WinOFED listen on",
			"IPOIB_CM_IETF_ID of drivers/infiniband/ulp/ipoib/ipoib.h", serviceid.Legacy, 0x10},
	} {
		s := sample{name: "service ID, " + tt.name, note: tt.note, want: [2]any{tt.form, ib.QPN(0x456)}}
		s.word("first octet", 8, tt.first, tt.clause)
		s.word("type", 8, 0, tt.clause)
		s.word("reserved", 24, 0, tt.clause)
		s.word("UD QPN of the interface that is called", 24, 0x456, tt.clause)
		s.encode = func() ([]byte, error) {
			return binary.BigEndian.AppendUint64(nil, uint64(serviceid.New(tt.form, 0x456))), nil
		}
		s.decode = func(b []byte) (any, error) {
			form, qpn := serviceid.Parse(serviceid.ID(binary.BigEndian.Uint64(b)))
			return [2]any{form, qpn}, nil
		}
		f.samples = append(f.samples, s)
	}
	return f
}
