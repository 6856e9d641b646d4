package ip

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"testing"

	"ipoibcm/internal/expect"
	"ipoibcm/rtnl"
)

// v4Packet makes an IPv4 packet with options and flags as given.
func v4Packet(dst string, proto uint8, tos byte, frag uint16, options int, payload ...byte) []byte {
	b := make([]byte, V4HeaderLen+options, V4HeaderLen+options+len(payload))
	b[0], b[1], b[8], b[9] = 0x45+byte(options/4), tos, 64, proto
	binary.BigEndian.PutUint16(b[2:], uint16(cap(b)))
	binary.BigEndian.PutUint16(b[6:], frag)
	copy(b[12:], []byte{192, 0, 2, 1})
	copy(b[16:], netip.MustParseAddr(dst).AsSlice())
	return append(b, payload...)
}

func v6Packet(dst string, next uint8, class byte, payload ...byte) []byte {
	b := AppendV6Header(nil, netip.MustParseAddr("2001:db8::1"), netip.MustParseAddr(dst), next, 64, len(payload))
	b[0], b[1] = b[0]|class>>4, b[1]|class<<4
	return append(b, payload...)
}

func join(parts ...[]byte) []byte { return bytes.Join(parts, nil) }

// ext is an extension header of 8 octets and more that next follows.
func ext(next uint8, more int) []byte {
	b := make([]byte, 8+8*more)
	b[0], b[1] = next, byte(more)
	return b
}

// fragment is a fragment header.
func fragment(next uint8, offset uint16) []byte {
	b := ext(next, 0)
	b[1], b[2], b[3] = 0xff, byte(offset>>8), byte(offset) // the second octet is reserved
	return b
}

func TestFlowOf(t *testing.T) {
	p := []byte{0x12, 0x34, 0x00, 0x50, 9, 9, 9, 9}
	v4 := rtnl.Flow{Dst: netip.MustParseAddr("10.0.0.2"), Src: netip.MustParseAddr("192.0.2.1")}
	v6 := rtnl.Flow{Dst: netip.MustParseAddr("fd00::2"), Src: netip.MustParseAddr("2001:db8::1")}
	with := func(f rtnl.Flow, tos, proto uint8, src, dst uint16) rtnl.Flow {
		f.TOS, f.Proto, f.SrcPort, f.DstPort = tos, proto, src, dst
		return f
	}
	routing := ext(ProtoUDP, 2)
	for _, tt := range []struct {
		name string
		pkt  []byte
		want rtnl.Flow // with all fields
	}{
		{"TCP", v4Packet("10.0.0.2", ProtoTCP, 0, 0, 0, p...), with(v4, 0, ProtoTCP, 0x1234, 80)},
		{"DSCP without ECN", v4Packet("10.0.0.2", ProtoUDP, 0xb9, 0x4000, 0, p...), with(v4, 0xb8, ProtoUDP, 0x1234, 80)},
		{"SCTP behind options", v4Packet("10.0.0.2", ProtoSCTP, 0, 0, 40, p...), with(v4, 0, ProtoSCTP, 0x1234, 80)},
		{"DCCP", v4Packet("10.0.0.2", ProtoDCCP, 0, 0, 0, p...), with(v4, 0, ProtoDCCP, 0x1234, 80)},
		{"ICMP has no ports", v4Packet("10.0.0.2", ProtoICMP, 0, 0, 0, p...), with(v4, 0, ProtoICMP, 0, 0)},
		{"first fragment", v4Packet("10.0.0.2", ProtoUDP, 0, 0x2000, 0, p...), with(v4, 0, ProtoUDP, 0x1234, 80)},
		{"second fragment", v4Packet("10.0.0.2", ProtoUDP, 0, 1, 0, p...), with(v4, 0, ProtoUDP, 0, 0)},
		{"cut before the ports", v4Packet("10.0.0.2", ProtoUDP, 0, 0, 0, 1, 2, 3), with(v4, 0, ProtoUDP, 0, 0)},
		{"header length of none", append([]byte{0x41}, v4Packet("10.0.0.2", ProtoUDP, 0, 0, 0, p...)[1:]...),
			with(v4, 0, ProtoUDP, 0, 0)},
		{"UDP over IPv6", v6Packet("fd00::2", ProtoUDP, 0xb9, p...), with(v6, 0xb8, ProtoUDP, 0x1234, 80)},
		{"behind options", v6Packet("fd00::2", ProtoHopByHop, 0, join(ext(ProtoRouting, 1), routing, p)...),
			with(v6, 0, ProtoUDP, 0x1234, 80)},
		{"IPv6 first fragment", v6Packet("fd00::2", ProtoFragment, 0, join(fragment(ProtoTCP, 1), p)...),
			with(v6, 0, ProtoTCP, 0x1234, 80)},
		{"IPv6 second fragment", v6Packet("fd00::2", ProtoFragment, 0, join(fragment(ProtoTCP, 8), p)...),
			with(v6, 0, ProtoTCP, 0, 0)},
		{"ESP", v6Packet("fd00::2", 50, 0, p...), with(v6, 0, 50, 0, 0)},
		{"header beyond the end", v6Packet("fd00::2", ProtoDestOpts, 0, ext(ProtoUDP, 1)[:8]...),
			with(v6, 0, ProtoDestOpts, 0, 0)},
		{"group", v4Packet("224.0.0.9", ProtoUDP, 0xb8, 0, 0, p...), rtnl.Flow{Dst: netip.MustParseAddr("224.0.0.9")}},
		{"limited broadcast", v4Packet("255.255.255.255", ProtoUDP, 0, 0, 0, p...), rtnl.Flow{Dst: LimitedBroadcast}},
		{"IPv6 group", v6Packet("ff05::1", ProtoUDP, 0, p...), rtnl.Flow{Dst: netip.MustParseAddr("ff05::1")}},
		{"mapped group is none", v6Packet("::ffff:224.0.0.9", ProtoUDP, 0, p...),
			with(rtnl.Flow{Dst: netip.MustParseAddr("::ffff:224.0.0.9"), Src: v6.Src}, 0, ProtoUDP, 0x1234, 80)},
	} {
		for _, f := range []rtnl.Fields{rtnl.DstOnly, rtnl.WithSource, rtnl.WithPorts} {
			got, ok := FlowOf(tt.pkt, f)
			if !ok {
				t.Errorf("%s, %v: no flow", tt.name, f)
			}
			if want := f.Of(tt.want); got != want {
				t.Errorf("%s, %v: got %+v, want %+v", tt.name, f, got, want)
			}
		}
	}
	for name, pkt := range map[string][]byte{"nothing": nil, "short IPv4": make([]byte, 19),
		"short IPv6": append([]byte{0x60}, make([]byte, 38)...), "version 5": append([]byte{0x50}, make([]byte, 60)...)} {
		if flow, ok := FlowOf(pkt, rtnl.WithPorts); ok {
			t.Errorf("%s: got %+v, want none", name, flow)
		}
	}
}

func TestFlowLen(t *testing.T) {
	long := make([]byte, 1400)
	for _, tt := range []struct {
		name string
		pkt  []byte
		want int
	}{
		{"IPv4", v4Packet("10.0.0.2", ProtoTCP, 0, 0, 40, long...), 64},
		{"IPv6", v6Packet("fd00::2", ProtoTCP, 0, long...), 64},
		{"short", v6Packet("fd00::2", ProtoTCP, 0, 1, 2, 3, 4), 44},
		{"behind options", v6Packet("fd00::2", ProtoDestOpts, 0, join(ext(ProtoTCP, 20), long)...), 40 + 168 + 8},
	} {
		if got := FlowLen(tt.pkt); got != tt.want {
			t.Errorf("%s: got %d, want %d", tt.name, got, tt.want)
		}
	}
}

func TestICMPv6Offset(t *testing.T) {
	na := []byte{136, 0, 0, 0, 0, 0, 0, 0}
	left := ext(ProtoICMPv6, 0)
	left[3] = 1
	eight := join(ext(ProtoDestOpts, 0), ext(ProtoDestOpts, 0), ext(ProtoDestOpts, 0), ext(ProtoDestOpts, 0),
		ext(ProtoDestOpts, 0), ext(ProtoDestOpts, 0), ext(ProtoDestOpts, 0), ext(ProtoICMPv6, 0))
	for _, tt := range []struct {
		name string
		pkt  []byte
		want int
	}{
		{"plain", v6Packet("fd00::2", ProtoICMPv6, 0, na...), 40},
		{"hop-by-hop options", v6Packet("fd00::2", ProtoHopByHop, 0, join(ext(ProtoICMPv6, 1), na)...), 56},
		{"hop-by-hop and destination options", v6Packet("fd00::2", ProtoHopByHop, 0,
			join(ext(ProtoDestOpts, 0), ext(ProtoICMPv6, 0), na)...), 56},
		{"routing header that is done", v6Packet("fd00::2", ProtoRouting, 0, join(ext(ProtoICMPv6, 2), na)...), 64},
		{"eight headers", v6Packet("fd00::2", ProtoDestOpts, 0, join(eight, na)...), 104},
		{"nine headers", v6Packet("fd00::2", ProtoDestOpts, 0, join(ext(ProtoDestOpts, 0), eight, na)...), -1},
		{"routing header with a segment left", v6Packet("fd00::2", ProtoRouting, 0, join(left, na)...), -1},
		{"hop-by-hop options in second place", v6Packet("fd00::2", ProtoDestOpts, 0,
			join(ext(ProtoHopByHop, 0), ext(ProtoICMPv6, 0), na)...), -1},
		// RFC 6980 section 5
		{"atomic fragment", v6Packet("fd00::2", ProtoFragment, 0, join(fragment(ProtoICMPv6, 0), na)...), -1},
		{"authentication header", v6Packet("fd00::2", ProtoAH, 0, join(ext(ProtoICMPv6, 0), na)...), -1},
		{"TCP", v6Packet("fd00::2", ProtoTCP, 0, na...), -1},
		{"nothing behind the header", v6Packet("fd00::2", ProtoICMPv6, 0), -1},
		{"option beyond the end", v6Packet("fd00::2", ProtoDestOpts, 0, ext(ProtoICMPv6, 1)[:8]...), -1},
		{"header cut", v6Packet("fd00::2", ProtoDestOpts, 0, ProtoICMPv6, 0), -1},
		{"IPv4", v4Packet("10.0.0.2", ProtoICMPv6, 0, 0, 40, na...), -1},
	} {
		if got := ICMPv6Offset(tt.pkt); got != tt.want {
			t.Errorf("%s: got %d, want %d", tt.name, got, tt.want)
		}
	}
}

// The first octets of a packet, as many as FlowLen says, have the same flow.
func FuzzFlowOf(f *testing.F) {
	p := []byte{0x12, 0x34, 0x00, 0x50, 9, 9, 9, 9}
	for _, b := range [][]byte{
		v4Packet("10.0.0.2", ProtoTCP, 0xb9, 0, 40, p...),
		v4Packet("10.0.0.2", ProtoUDP, 0, 1, 0, p...),
		v6Packet("fd00::2", ProtoHopByHop, 0xb9, join(ext(ProtoRouting, 1), ext(ProtoUDP, 20), p, p)...),
		v6Packet("fd00::2", ProtoFragment, 0, join(fragment(ProtoTCP, 8), p, make([]byte, 40))...),
		v6Packet("ff02::16", ProtoHopByHop, 0, join(ext(ProtoICMPv6, 0), []byte{143, 0, 0, 0, 0, 0, 0, 0})...),
		v6Packet("fd00::2", ProtoDestOpts, 0, join(ext(ProtoDestOpts, 255), p)...),
	} {
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, pkt []byte) {
		n := FlowLen(pkt)
		for _, fields := range []rtnl.Fields{rtnl.DstOnly, rtnl.WithSource, rtnl.WithPorts} {
			flow, ok := FlowOf(pkt, fields)
			if head, has := FlowOf(pkt[:n], fields); head != flow || has != ok {
				t.Fatalf("%v: got %+v, %v of %d octets, want %+v, %v", fields, head, has, n, flow, ok)
			}
			if again := fields.Of(flow); again != flow {
				t.Fatalf("%v: got %+v, which has more fields than %+v", fields, flow, again)
			}
		}
		off := ICMPv6Offset(pkt)
		if off < 0 {
			return
		}
		if proto, at, first, ok := V6(pkt).Upper(); ok {
			expect.MustEqual(t, proto, ProtoICMPv6, "protocol of ICMPv6")
			expect.MustEqual(t, at, off, "offset of ICMPv6")
			expect.MustEqual(t, first, true, "ICMPv6 in the first fragment")
		}
	})
}
