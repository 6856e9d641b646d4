package rtnl

import (
	"net/netip"
	"strings"
	"testing"
)

func TestFieldsOf(t *testing.T) {
	full := Flow{Dst: netip.MustParseAddr("10.0.0.2"), Src: netip.MustParseAddr("10.0.0.1"), TOS: 0x10, Proto: 6,
		SrcPort: 1, DstPort: 2}
	for _, tt := range []struct {
		f    Fields
		want Flow
	}{
		{DstOnly, Flow{Dst: full.Dst}},
		{WithSource, Flow{Dst: full.Dst, Src: full.Src, TOS: 0x10}},
		{WithPorts, full},
	} {
		if got := tt.f.Of(full); got != tt.want {
			t.Errorf("%v of %+v = %+v, want %+v", tt.f, full, got, tt.want)
		}
	}
}

func TestKey(t *testing.T) {
	four, six := netip.MustParsePrefix("10.0.0.0/24"), netip.MustParsePrefix("fd00::/64")
	via4, via6 := netip.MustParseAddr("10.1.0.1"), netip.MustParseAddr("fd01::1")
	for _, tt := range []struct {
		name string
		a, b Route
		same bool
	}{
		{"zero means main and unicast", Route{Dst: six}, Route{Dst: six, Table: TableMain, Type: Unicast}, true},
		{"another table", Route{Dst: four}, Route{Dst: four, Table: 7}, false},
		{"another metric", Route{Dst: four}, Route{Dst: four, Metric: 7}, false},
		{"another TOS", Route{Dst: four}, Route{Dst: four, TOS: 0x10}, false},
		{"another destination", Route{Dst: four}, Route{Dst: netip.MustParsePrefix("10.0.0.0/25")}, false},
		{"IPv4: a gateway takes the place of another", Route{Dst: four, Via: via4}, Route{Dst: four}, true},
		{"IPv6: gateways side by side", Route{Dst: six, Via: via6}, Route{Dst: six}, false},
		{"IPv4: a type takes the place of another", Route{Dst: four, Type: Blackhole}, Route{Dst: four}, true},
		{"IPv6: types side by side", Route{Dst: six, Type: Blackhole}, Route{Dst: six}, false},
		{"metrics do not count", Route{Dst: four, MTU: 1400, MTULock: true, AdvMSS: 1}, Route{Dst: four}, true},
		{"nor who made it", Route{Dst: four, Protocol: Protocol}, Route{Dst: four, Protocol: ProtoKernel}, true},
	} {
		if got := tt.a.Key() == tt.b.Key(); got != tt.same {
			t.Errorf("%s: %v and %v same = %v, want %v", tt.name, tt.a, tt.b, got, tt.same)
		}
	}
}

func TestRouteString(t *testing.T) {
	for _, tt := range []struct {
		r    Route
		want string
	}{
		{Route{Dst: netip.MustParsePrefix("10.0.0.2/32"), Protocol: Protocol, MTU: 8996, AdvMSS: 8956},
			"10.0.0.2/32 proto 75 mtu 8996 advmss 8956"},
		{Route{Dst: netip.MustParsePrefix("0.0.0.0/0"), Via: netip.MustParseAddr("10.0.0.9"), Table: TableMain,
			Type: Unicast, Protocol: ProtoStatic, Metric: 100},
			"0.0.0.0/0 via 10.0.0.9 proto 4 metric 100"},
		{Route{Dst: netip.MustParsePrefix("224.0.0.0/4"), Type: Multicast, Table: 7, Protocol: Protocol},
			"multicast 224.0.0.0/4 table 7 proto 75"},
	} {
		if got := tt.r.String(); got != tt.want {
			t.Errorf("%#v prints %q, want %q", tt.r, got, tt.want)
		}
	}
}

// Every value prints, those that nobody knows too.
func TestNames(t *testing.T) {
	for n := range 256 {
		if got := RouteType(n).String(); got == "" {
			t.Errorf("route type %d prints nothing", n)
		}
		if got := Fields(n).String(); got == "" {
			t.Errorf("fields %d print nothing", n)
		}
		if got := EventKind(n).String(); got == "" {
			t.Errorf("event kind %d prints nothing", n)
		}
	}
	for _, tt := range []struct{ got, want string }{
		{Prohibit.String(), "prohibit"}, {RouteType(9).String(), "type 9"},
		{WithPorts.String(), "ports"}, {Rules.String(), "RULES"}, {(Rules + 1).String(), "EventKind(8)"},
	} {
		if tt.got != tt.want {
			t.Errorf("prints %q, want %q", tt.got, tt.want)
		}
	}
}

func TestAnswerOK(t *testing.T) {
	for typ := range RouteType(16) {
		want := typ == Unicast || typ == Local || typ == Broadcast || typ == Multicast
		if got := (Answer{Type: typ}).OK(); got != want {
			t.Errorf("%v OK = %v, want %v", typ, got, want)
		}
	}
}

// FuzzFields: what fields leave out does not count, and what they name stays.
func FuzzFields(f *testing.F) {
	f.Add(uint8(1), []byte{10, 0, 0, 1}, []byte{10, 0, 0, 2}, uint8(0x10), uint8(6), uint16(1), uint16(2))
	f.Fuzz(func(t *testing.T, fields uint8, dst, src []byte, tos, proto uint8, sport, dport uint16) {
		flow := Flow{TOS: tos, Proto: proto, SrcPort: sport, DstPort: dport}
		flow.Dst, _ = netip.AddrFromSlice(dst)
		flow.Src, _ = netip.AddrFromSlice(src)
		got := Fields(fields).Of(flow)
		if got.Dst != flow.Dst {
			t.Fatalf("destination %v, want %v", got.Dst, flow.Dst)
		}
		if again := Fields(fields).Of(got); again != got {
			t.Fatalf("%+v, then %+v", got, again)
		}
		r := Route{Dst: netip.PrefixFrom(flow.Dst, int(tos)), Via: flow.Src, Table: int(sport), Metric: uint32(dport),
			Type: RouteType(proto)}
		k := r.Key()
		switch {
		case k.Table == 0:
			t.Fatalf("%v: its key has no table", r)
		case r.Dst.Addr().Is6() && k.Type == 0:
			t.Fatalf("%v: its key has no type", r)
		}
		if !strings.Contains(r.String(), "proto 0") {
			t.Fatalf("%#v prints %q", r, r)
		}
	})
}
