package mtu

import (
	"errors"
	"math"
	"net/netip"
	"strings"
	"testing"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
)

func TestNegotiate(t *testing.T) {
	for _, tt := range []struct {
		name      string
		own, peer uint32
		ipv6      bool
		want      int // 0: refused
	}{
		{"both as Linux", 65524, 65524, true, 65520},
		{"the peer's is smaller", 65524, 2048, true, 2044},
		{"ours is smaller", 9000, 65524, true, 8996},
		{"the peer's is huge", 65524, 1<<32 - 1, true, 65520},
		{"both above what IB carries", 1<<32 - 1, 1<<32 - 1, true, 1<<31 - 4},
		{"just enough for IPv6", 65524, 1284, true, 1280},
		{"too small for IPv6", 65524, 1283, true, 0},
		{"enough without IPv6", 65524, 1283, false, 1279},
		{"just enough for IPv4", 65524, 580, false, 576},
		{"too small for IPv4", 65524, 579, false, 0},
		{"the header alone", 65524, 4, false, 0},
		{"nothing", 65524, 0, true, 0},
	} {
		// Both roles compute the same. 4755-5.1-5, 4755-5.1-6, 4755-1-3
		for _, v := range [][2]uint32{{tt.own, tt.peer}, {tt.peer, tt.own}} {
			got, err := Negotiate(v[0], v[1], tt.ipv6)
			expect.Equal(t, got, tt.want, "%s: MTU of %d and %d", tt.name, v[0], v[1])
			if tt.want != 0 {
				expect.Equal(t, err, nil, "%s: error", tt.name)
				continue
			}
			// 4755-5-2: what is below a protocol's minimum is refused.
			var refused *RefusedError
			if !errors.As(err, &refused) {
				t.Fatalf("%s: the error is %v, want a refusal", tt.name, err)
			}
			expect.Equal(t, refused.Own, v[0], "%s: Own of the refusal", tt.name)
			expect.Equal(t, refused.Peer, v[1], "%s: Peer of the refusal", tt.name)
			if refused.Got >= refused.Need {
				t.Errorf("%s: an MTU of %d is refused where %d is needed", tt.name, refused.Got, refused.Need)
			}
		}
	}
}

func TestAfterReject(t *testing.T) {
	for _, tt := range []struct {
		name           string
		offered, inREJ uint32
		want           uint32
	}{
		{"the REJ says what it takes", 65524, 9000, 9000},
		{"the REJ says nothing", 65524, 0, 2048},
		{"the REJ says more than we offered", 65524, 70000, 2048},
		{"the REJ says what we offered", 65524, 65524, 2048},
		{"the REJ says only a header", 65524, 4, 2048},
		{"nothing smaller to offer", 2048, 0, 0},
	} {
		if got := AfterReject(tt.offered, tt.inREJ); got != tt.want {
			t.Errorf("%s: AfterReject(%d, %d) = %d, want %d", tt.name, tt.offered, tt.inREJ, got, tt.want)
		}
	}
}

func TestSizes(t *testing.T) {
	// 4391-7-1, 4755-5-3 (default of the UD side and so of every route before a connection)
	expect.Equal(t, DefaultUD, 2044, "DefaultUD")
	expect.Equal(t, DefaultDevice, 65520, "DefaultDevice")
	expect.Equal(t, IPMTU(DefaultReceive), DefaultDevice, "IPMTU(DefaultReceive)")
	expect.Equal(t, IPMTU(3), 0, "IPMTU(3)")
	// An int has 32 bits on some architectures.
	if got := IPMTU(math.MaxUint32); got != 1<<31-4 {
		t.Errorf("IPMTU(%d) = %d, want %d", uint32(math.MaxUint32), got, 1<<31-4)
	}
	expect.Equal(t, AdvMSS(65520, false), 65480, "AdvMSS(65520, false)")
	expect.Equal(t, AdvMSS(65520, true), 65460, "AdvMSS(65520, true)")
	expect.Equal(t, AdvMSS(10, true), 0, "AdvMSS(10, true)")
	// 4755-5.1-1, 4755-6-1: what goes into the private data of an ordinary REQ.
	if DefaultReceive != 0xfff4 {
		t.Errorf("Receive MTU offered is %#x", DefaultReceive)
	}
}

func TestPathMTU(t *testing.T) {
	// IBA annex A17: the packet around a payload, on each underlay.
	for _, tt := range []struct {
		underlay int
		path     ib.MTU
		ud4, ud6 int
	}{
		{1500, ib.MTU1024, 1444, 1424},
		{2100, ib.MTU1024, 2044, 2024},
		{2120, ib.MTU1024, 2064, 2044},
		{2128, ib.MTU2048, 2072, 2052},
		{2144, ib.MTU2048, 2088, 2068},
		{4192, ib.MTU4096, 4092, 4092},
		{9000, ib.MTU4096, 4092, 4092},
		{68, 0, 12, 0},
		{0, 0, 0, 0},
	} {
		if got := PathMTU(tt.underlay); got != tt.path {
			t.Errorf("path MTU on %d is %v, want %v", tt.underlay, got, tt.path)
		}
		if a, b := LargestUD(tt.underlay, true), LargestUD(tt.underlay, false); a != tt.ud4 || b != tt.ud6 {
			t.Errorf("largest UD MTU on %d is %d and %d, want %d and %d", tt.underlay, a, b, tt.ud4, tt.ud6)
		}
	}
}

// udPlans are the cases of TestPlanUD.
var udPlans = []struct {
	name  string
	want  int
	link  Link
	plan  UDPlan // without Notes
	notes int
	err   string // a part of it
}{
	{name: "auto, IPv6 1500", link: Link{Underlay: 1500},
		plan: UDPlan{MTU: 1424, Path: ib.MTU1024, IPv6: true, BeyondPath: true}, notes: 1},
	{name: "auto, IPv4 1500", link: Link{Underlay: 1500, IPv4: true},
		plan: UDPlan{MTU: 1444, Path: ib.MTU1024, IPv6: true, BeyondPath: true}, notes: 1},
	{name: "auto, IPv6 2108", link: Link{Underlay: 2108},
		plan: UDPlan{MTU: 2032, Path: ib.MTU1024, IPv6: true, BeyondPath: true}, notes: 1},
	{name: "auto leaves IPv6 its minimum", link: Link{Underlay: 1280},
		plan: UDPlan{MTU: 1280, Path: ib.MTU1024, IPv6: true, BeyondPath: true, Fragmented: true}, notes: 2},
	{name: "auto, IPv4 1280", link: Link{Underlay: 1280, IPv4: true},
		plan: UDPlan{MTU: 1224, Path: ib.MTU1024, BeyondPath: true}, notes: 2},
	{name: "auto, IPv4 600", link: Link{Underlay: 600, IPv4: true}, err: "raise its MTU"},
	{name: "auto, kernel rxe on 1500", link: Link{Underlay: 1500, Path: ib.MTU1024},
		plan: UDPlan{MTU: 1020, Path: ib.MTU1024}, notes: 1},
	{name: "auto, an HCA of 4096", link: Link{Path: ib.MTU4096}, plan: UDPlan{MTU: 2044, Path: ib.MTU4096, IPv6: true}},
	{name: "2044, IPv6 1500", want: 2044, link: Link{Underlay: 1500},
		plan: UDPlan{MTU: 2044, Path: ib.MTU1024, IPv6: true, BeyondPath: true, Fragmented: true}, notes: 2},
	{name: "auto, IPv6 9000", link: Link{Underlay: 9000}, plan: UDPlan{MTU: 2044, Path: ib.MTU4096, IPv6: true}},
	{name: "auto, IPv4 9000", link: Link{Underlay: 9000, IPv4: true},
		plan: UDPlan{MTU: 2044, Path: ib.MTU4096, IPv6: true}},
	{name: "2044, IPv4 1500", want: 2044, link: Link{Underlay: 1500, IPv4: true}, err: "--ud-mtu 1444"},
	{name: "and the other remedy", want: 2044, link: Link{Underlay: 1500, IPv4: true},
		err: "at least 2100 (jumbo frames)"},
	{name: "1444, IPv4 1500", want: 1444, link: Link{Underlay: 1500, IPv4: true},
		plan: UDPlan{MTU: 1444, Path: ib.MTU1024, IPv6: true, BeyondPath: true}, notes: 1},
	{name: "1445, IPv4 1500", want: 1445, link: Link{Underlay: 1500, IPv4: true}, err: "1444"},
	{name: "2044, IPv4 2100", link: Link{Underlay: 2100, IPv4: true},
		plan: UDPlan{MTU: 2044, Path: ib.MTU1024, IPv6: true, BeyondPath: true}, notes: 1},
	{name: "1020 has no IPv6", want: 1020, link: Link{Underlay: 1500},
		plan: UDPlan{MTU: 1020, Path: ib.MTU1024}, notes: 1},
	{name: "an HCA", link: Link{Path: ib.MTU2048}, plan: UDPlan{MTU: 2044, Path: ib.MTU2048, IPv6: true}},
	{name: "2044, kernel rxe on 1500", want: 2044, link: Link{Underlay: 1500, Path: ib.MTU1024},
		err: "use --ud-mtu 1020"},
	{name: "2044, kernel rxe on 1500, IPv4", want: 2044, link: Link{Underlay: 1500, Path: ib.MTU1024, IPv4: true},
		err: "use --ud-mtu 1020 on all hosts of the link, or raise the underlay MTU to at least 2128"},
	{name: "kernel rxe on 5000", link: Link{Underlay: 5000, Path: ib.MTU4096, IPv4: true},
		plan: UDPlan{MTU: 2044, Path: ib.MTU4096, IPv6: true}},
	{name: "4092", want: 4092, link: Link{Underlay: 9000}, plan: UDPlan{MTU: 4092, Path: ib.MTU4096, IPv6: true}},
	{name: "above any UD payload", want: 4093, link: Link{Underlay: 9000}, err: "not in 576 to 4092"}, // 4755-1-3
	{name: "below IPv4", want: 500, link: Link{Underlay: 9000}, err: "not in 576"},                    // 4755-5-2
	{name: "nothing known", want: 2044, link: Link{}, err: "takes 0"},
	{name: "auto, nothing known", link: Link{}, err: "raise its MTU"},
}

func TestPlanUD(t *testing.T) {
	for _, tt := range udPlans {
		got, err := PlanUD(tt.want, tt.link)
		if tt.err != "" {
			var ue *UDError
			switch {
			case err == nil:
				t.Errorf("%s: no error, want one", tt.name)
			case !strings.Contains(err.Error(), tt.err):
				t.Errorf("%s: %q does not say %q", tt.name, err.Error(), tt.err)
			case !errors.As(err, &ue):
				t.Errorf("%s: error %v, want one with %q", tt.name, err, tt.err)
			}
			continue
		}
		notes := len(got.Notes)
		got.Notes = nil
		if err != nil {
			t.Errorf("%s: err is %v, want nil", tt.name, err)
		}
		expect.Equal(t, notes, tt.notes, "%s: notes", tt.name)
		expect.Equal(t, got.MTU, tt.plan.MTU, "%s: MTU", tt.name)
		expect.Equal(t, got.Path, tt.plan.Path, "%s: Path", tt.name)
		expect.Equal(t, got.IPv6, tt.plan.IPv6, "%s: IPv6", tt.name)
		expect.Equal(t, got.BeyondPath, tt.plan.BeyondPath, "%s: BeyondPath", tt.name)
		expect.Equal(t, got.Fragmented, tt.plan.Fragmented, "%s: Fragmented", tt.name)
	}
}

func ip(s string) netip.Addr { return netip.MustParseAddr(s) }

func TestDecide(t *testing.T) {
	v4, v6, g4, g6 := ip("10.0.0.2"), ip("fd00::2"), ip("239.1.1.1"), ip("ff02::1:3")
	for _, tt := range []struct {
		name string
		p    Packet
		h    NextHop
		want Decision
	}{
		// 4755-7.2-1: the same packet passes whole to one and is too big for another.
		{"fits", Packet{Len: 9000, Dst: v4, DF: true}, NextHop{MTU: 65520}, Decision{Verdict: Send}},
		{"just fits", Packet{Len: 2044, Dst: v6}, NextHop{MTU: 2044}, Decision{Verdict: Send}},
		{"too big, DF", Packet{Len: 9000, Dst: v4, DF: true}, NextHop{MTU: 8996}, Decision{Verdict: TooBig, MTU: 8996}},
		{"too big, no DF", Packet{Len: 9000, Dst: v4}, NextHop{MTU: 8996}, Decision{Verdict: Fragment, MTU: 8996}},
		{"too big, IPv6", Packet{Len: 9000, Dst: v6}, NextHop{MTU: 8996}, Decision{Verdict: TooBig, MTU: 8996}},
		{"fits UD while connecting", Packet{Len: 2000, Dst: v4}, NextHop{MTU: 2044, Pending: 65520}, Decision{Verdict: Send}},
		{"waits for the connection", Packet{Len: 9000, Dst: v4}, NextHop{MTU: 2044, Pending: 65520}, Decision{Verdict: Wait}},
		{"too big even for that, but can be cut for it", Packet{Len: 65520, Dst: v4},
			NextHop{MTU: 2044, Pending: 8996}, Decision{Verdict: Wait}},
		{"too big even for that, and DF", Packet{Len: 65520, Dst: v4, DF: true}, NextHop{MTU: 2044, Pending: 8996},
			Decision{Verdict: TooBig, MTU: 8996}},
		{"cut for UD, which carries more", Packet{Len: 9000, Dst: v4}, NextHop{MTU: 2044, Pending: 1496},
			Decision{Verdict: Fragment, MTU: 2044}},
		{"too big even for that", Packet{Len: 65520, Dst: v6}, NextHop{MTU: 2044, Pending: 8996},
			Decision{Verdict: TooBig, MTU: 8996}},
		{"limited broadcast", Packet{Len: 3000, Dst: ip("255.255.255.255")}, NextHop{MTU: 2044},
			Decision{Verdict: Discard, Reason: ReasonBroadcast}},
		{"subnet broadcast", Packet{Len: 3000, Dst: ip("10.0.0.255"), Broadcast: true}, NextHop{MTU: 2044},
			Decision{Verdict: Fragment, MTU: 2044}},
		{"subnet broadcast, DF", Packet{Len: 3000, Dst: ip("10.0.0.255"), Broadcast: true, DF: true},
			NextHop{MTU: 2044}, Decision{Verdict: Discard, Reason: ReasonGroupDF}},
		{"group", Packet{Len: 3000, Dst: g4}, NextHop{MTU: 2044}, Decision{Verdict: Fragment, MTU: 2044}},
		{"group, DF", Packet{Len: 3000, Dst: g4, DF: true}, NextHop{MTU: 2044},
			Decision{Verdict: Discard, Reason: ReasonGroupDF}},
		{"group, IPv6", Packet{Len: 3000, Dst: g6}, NextHop{MTU: 2044}, Decision{Verdict: TooBig, MTU: 2044}},
		{"IPv6 on too small a link", Packet{Len: 1280, Dst: v6}, NextHop{MTU: 1020},
			Decision{Verdict: Discard, Reason: ReasonMinimum}},
		{"no link at all", Packet{Len: 100, Dst: v4}, NextHop{}, Decision{Verdict: Discard, Reason: ReasonMinimum}},
	} {
		if got := Decide(tt.p, tt.h); got != tt.want {
			t.Errorf("%s: Decide(%+v, %+v) = %+v, want %+v", tt.name, tt.p, tt.h, got, tt.want)
		}
	}
}

func TestBudget(t *testing.T) {
	var b Budget
	full := 0
	for b.Take() == DefaultReceive {
		full++
	}
	// 64 MiB in rings of 16 buffers of 65524 octets.
	if want := (64 << 20) / (16 * 65524); full != want {
		t.Errorf("%d connections got the full size, want %d", full, want)
	}
	if got := b.Take(); got != 16388 {
		t.Errorf("past the limit %d is offered, want 16388", got)
	}
	b.Release(DefaultReceive)
	if got := b.Take(); got != 16388 { // two small rings are booked above the limit
		t.Errorf("one full ring back: %d offered, want 16388", got)
	}
	for range 3 {
		b.Release(16388)
	}
	if got := b.Take(); got != DefaultReceive {
		t.Errorf("room again: %d offered, want 65524", got)
	}
	b.Release(1 << 30)
	if b.Used() != 0 {
		t.Errorf("used is %d", b.Used())
	}
	small := Budget{Limit: 1, Ring: 2, Full: 9000, Small: 65524}
	if got := small.Take(); got != 9000 { // never more than the configured size
		t.Errorf("got %d, want 9000", got)
	}
}

// FuzzDecide checks what holds for every packet.
func FuzzDecide(f *testing.F) {
	f.Add(9000, 2044, 65520, []byte{10, 0, 0, 2}, true, false)
	f.Add(1281, 1280, 0, make([]byte, 16), false, false)
	f.Fuzz(func(t *testing.T, n, m, pending int, dst []byte, df, bcast bool) {
		a, ok := netip.AddrFromSlice(dst)
		if !ok {
			return
		}
		d := Decide(Packet{Len: n, Dst: a, DF: df, Broadcast: bcast}, NextHop{MTU: m, Pending: pending})
		expect.Equal(t, d.Verdict == Send, n <= m, "%d octets by an MTU of %d: that they are sent", n, m)
		expect.Equal(t, d.Reason != 0, d.Verdict == Discard, "%v: that there is a reason to discard", d.Verdict)
		mayCut := a.Is4() && !df
		switch d.Verdict {
		case Wait:
			if n > pending { // then it is fragmented there
				expect.Equal(t, mayCut, true, "waits for %d: that it may be fragmented", pending)
				if pending <= m {
					t.Errorf("waits for an MTU of %d, which is not above %d", pending, m)
				}
			}
		case Fragment:
			expect.Equal(t, mayCut, true, "fragment: that it may be")
			if d.MTU < 68 || d.MTU >= n {
				t.Errorf("fragments of %d octets, want 68 to %d", d.MTU, n-1)
			}
		case TooBig:
			if d.MTU >= n {
				t.Errorf("%d octets are too big for an MTU of %d", n, d.MTU)
			}
			if a.Is6() && d.MTU < 1280 {
				t.Errorf("too big for IPv6 with an MTU of %d, want at least 1280", d.MTU)
			}
		}
	})
}

func TestNames(t *testing.T) {
	for v := Send; v <= Discard; v++ {
		if v.String() == "none" {
			t.Errorf("verdict %d has no name", v)
		}
	}
	for r := ReasonBroadcast; r <= ReasonMinimum; r++ {
		if r.String() == "none" {
			t.Errorf("reason %d has no name", r)
		}
	}
	_, err := Negotiate(65524, 1000, true)
	if got := err.Error(); got != "Receive MTU 1000 against our 65524 gives an IP MTU of 996, below 1280" {
		t.Errorf("refusal reads %q", got)
	}
}
