package nexthop_test

import (
	"net/netip"
	"strings"
	"testing"

	"ipoibcm/fib/fibtest"
	"ipoibcm/nexthop"
	"ipoibcm/rtnl"
)

// A recorder is a kernel that notes what it is asked.
type recorder struct {
	*fibtest.Kernel
	asked []rtnl.Query
}

func (r *recorder) Lookup(q rtnl.Query) (rtnl.Answer, error) {
	r.asked = append(r.asked, q)
	return r.Kernel.Lookup(q)
}

// askedKernel has 10.0.0.1/24 and fd00::1/64 on the device, and what a host with
// another device, 3, has.
func askedKernel() *recorder {
	k := fibtest.New()
	k.Up(true)
	k.AddAddr(netip.MustParsePrefix("10.0.0.1/24"))
	k.AddAddr(netip.MustParsePrefix("fd00::1/64"))
	add := func(dst, via string, oif, table int, metric uint32) {
		r := fibtest.Route{Route: rtnl.Route{Dst: netip.MustParsePrefix(dst), Type: rtnl.Unicast, Protocol: rtnl.ProtoBoot,
			Table: table, Metric: metric}, OIF: oif}
		if via != "" {
			r.Via = netip.MustParseAddr(via)
		}
		k.AddRoute(r)
	}
	add("0.0.0.0/0", "172.16.0.1", 3, 0, 10)
	add("0.0.0.0/0", "10.0.0.254", fibtest.Index, 0, 100)
	add("172.16.0.0/24", "", 3, 0, 0)
	add("192.0.2.0/24", "10.0.0.2", fibtest.Index, 0, 0)
	add("192.0.2.0/24", "10.0.0.3", fibtest.Index, 100, 0)
	add("fe80::/64", "", 3, 0, 0)
	add("fe80::/64", "", fibtest.Index, 0, 256)
	return &recorder{Kernel: k}
}

// An askCase is a flow, and the next hop that the kernel has for it.
type askCase struct {
	name     string
	dst, src string
	hop      string
	bound    bool
}

// ask asks k for the flow of c and compares; ok says whether there was an answer.
func (c askCase) ask(t *testing.T, k *recorder) (flow rtnl.Flow, ok bool) {
	t.Helper()
	flow.Dst = netip.MustParseAddr(c.dst)
	if c.src != "" {
		flow.Src = netip.MustParseAddr(c.src)
	}
	got, err := nexthop.Ask(k, k.Link, flow)
	if err != nil {
		t.Errorf("%s: %v", c.name, err)
		return flow, false
	}
	if want := netip.MustParseAddr(c.hop); got.Addr != want {
		t.Errorf("%s: next hop %v, want %v", c.name, got.Addr, want)
	}
	if got.Bound != c.bound {
		t.Errorf("%s: bound %v, want %v", c.name, got.Bound, c.bound)
	}
	return flow, true
}

// TestAsk: the next hop is the gateway of the kernel's route; of another device's,
// what a sender gets that is bound to ours.
func TestAsk(t *testing.T) {
	for _, tt := range []struct {
		askCase
		rule string // packets from there use table 100
		iif  int    // of the first question about dst
	}{
		{askCase: askCase{name: "on the link", dst: "10.0.0.2", hop: "10.0.0.2"}},
		{askCase: askCase{name: "by a gateway", dst: "192.0.2.9", hop: "10.0.0.2"}},
		{askCase: askCase{name: "another device has the better route", dst: "198.51.100.1", hop: "10.0.0.254", bound: true}},
		{askCase: askCase{name: "an own source", dst: "192.0.2.9", src: "10.0.0.1", hop: "10.0.0.2"}},
		{askCase: askCase{name: "a rule for an own source", dst: "192.0.2.9", src: "10.0.0.1", hop: "10.0.0.3"},
			rule: "10.0.0.1/32"},
		{askCase: askCase{name: "forwarded", dst: "192.0.2.9", src: "172.16.0.7", hop: "10.0.0.2"}, iif: 3},
		{askCase: askCase{name: "forwarded, with a rule", dst: "192.0.2.9", src: "172.16.0.7", hop: "10.0.0.3"},
			rule: "172.16.0.0/24", iif: 3},
		{askCase: askCase{name: "forwarded from nowhere", dst: "fd00::9", src: "2001:db8::1", hop: "fd00::9"}, iif: 1},
	} {
		k := askedKernel()
		if tt.rule != "" {
			k.SetRules(fibtest.Rule{From: netip.MustParsePrefix(tt.rule), Table: 100})
		}
		flow, ok := tt.ask(t, k)
		if !ok {
			continue
		}
		for _, q := range k.asked {
			if q.Dst != flow.Dst {
				continue
			}
			if q.IIF != tt.iif {
				t.Errorf("%s: first asked with incoming device %d, want %d", tt.name, q.IIF, tt.iif)
			}
			break
		}
	}
}

// TestAskVRF: in a VRF its table counts and no other, with routes by all its devices.
func TestAskVRF(t *testing.T) {
	const vrf, member = 9, 4
	for _, tt := range []askCase{
		{name: "on the link", dst: "10.0.0.2", hop: "10.0.0.2"},
		{name: "by a gateway of the VRF", dst: "192.0.2.9", hop: "10.0.0.5"},
		{name: "an own source", dst: "192.0.2.9", src: "10.0.0.1", hop: "10.0.0.5"},
		{name: "forwarded from another device of the VRF", dst: "192.0.2.9", src: "172.17.0.7", hop: "10.0.0.5"},
		{name: "by another device of the VRF", dst: "10.0.0.130", hop: "10.0.0.130", bound: true},
	} {
		k := askedKernel()
		k.VRF(vrf, 10)
		k.Members = []int{member}
		add := func(dst, via string, oif int) {
			r := fibtest.Route{Route: rtnl.Route{Dst: netip.MustParsePrefix(dst), Type: rtnl.Unicast,
				Protocol: rtnl.ProtoBoot, Table: 10}, OIF: oif}
			if via != "" {
				r.Via = netip.MustParseAddr(via)
			}
			k.AddRoute(r)
		}
		add("192.0.2.0/24", "10.0.0.5", fibtest.Index)
		add("10.0.0.128/25", "", member)
		add("172.17.0.0/24", "", member)
		flow, ok := tt.ask(t, k)
		if !ok {
			continue
		}
		host, err := nexthop.AskHost(k, k.Link, flow.Dst, false)
		if err != nil {
			t.Errorf("%s: %v", tt.name, err)
			continue
		}
		wantGuest := tt.dst == "10.0.0.2"
		if why := host.NotGuest(k.Link); (why == "") != wantGuest {
			t.Errorf("%s: a host route of ours may not be there because %q, want %v that it may", tt.name, why, wantGuest)
		}
	}
}

// TestAskHost: every device has an fe80::/64; a route for packets of some DSCP is
// found if there can be any.
func TestAskHost(t *testing.T) {
	for _, tt := range []struct {
		name   string
		addr   string
		tos    uint8  // packets with it use table 200, whose routes lead elsewhere
		src    string // set: these lead there too, from that source
		look   bool
		oif    int
		byDSCP bool
	}{
		{name: "IPv4", addr: "10.0.0.2", oif: fibtest.Index},
		{name: "IPv6", addr: "fd00::2", oif: fibtest.Index},
		{name: "link-local", addr: "fe80::2", oif: fibtest.Index},
		{name: "the same for each DSCP", addr: "10.0.0.2", look: true, oif: fibtest.Index},
		{name: "another for one DSCP", addr: "10.0.0.2", tos: 0xb8, look: true, oif: fibtest.Index, byDSCP: true},
		{name: "from another source for one DSCP", addr: "10.0.0.2", tos: 0xb8, src: "10.0.0.9", look: true, oif: fibtest.Index, byDSCP: true},
		{name: "nobody looks at DSCP", addr: "10.0.0.2", tos: 0xb8, oif: fibtest.Index},
	} {
		k := askedKernel()
		if tt.tos != 0 {
			k.SetRules(fibtest.Rule{TOS: tt.tos, Table: 200})
			r := fibtest.Route{Route: rtnl.Route{Dst: netip.MustParsePrefix("10.0.0.0/24"), Type: rtnl.Unicast,
				Protocol: rtnl.ProtoBoot, Table: 200}, OIF: 3}
			if tt.src != "" {
				r.OIF, r.Src = fibtest.Index, netip.MustParseAddr(tt.src)
			}
			k.AddRoute(r)
		}
		got, err := nexthop.AskHost(k, k.Link, netip.MustParseAddr(tt.addr), tt.look)
		if err != nil {
			t.Errorf("%s: %v", tt.name, err)
			continue
		}
		if got.Answer.OIF != tt.oif {
			t.Errorf("%s: by device %d, want %d", tt.name, got.Answer.OIF, tt.oif)
		}
		if got.ByDSCP != tt.byDSCP {
			t.Errorf("%s: by DSCP %v, want %v", tt.name, got.ByDSCP, tt.byDSCP)
		}
	}
}

// A guestCase is what NotGuest looks at.
type guestCase struct {
	rtnl.Answer
	hop  nexthop.Hop
	link rtnl.Link
}

// TestGuest: a host route of ours is made only where the kernel sends to the
// neighbour on the link by the device, and nobody else has said with which MTU.
func TestGuest(t *testing.T) {
	subnet, host := netip.MustParsePrefix("10.0.0.0/24"), netip.MustParsePrefix("10.0.0.2/32")
	everything, gateway := netip.MustParsePrefix("0.0.0.0/0"), netip.MustParseAddr("10.0.0.3")
	for _, tt := range []struct {
		name   string
		change func(g *guestCase)
		why    string // empty: it may be made
	}{
		{"the kernel's own", func(*guestCase) {}, ""},
		{"the kernel's own, with an MTU", func(g *guestCase) { g.MTU = 2044 }, ""},
		{"the user's, without an MTU", func(g *guestCase) { g.Protocol = rtnl.ProtoBoot }, ""},
		{"the user's, with an MTU", func(g *guestCase) { g.Protocol, g.MTU = rtnl.ProtoBoot, 1400 }, "has an MTU"},
		{"no route", func(g *guestCase) { g.Answer = rtnl.Answer{Type: rtnl.Unreachable} }, "no route"},
		{"another device", func(g *guestCase) { g.OIF = 3 }, "another device"},
		{"an own address", func(g *guestCase) { g.Type = rtnl.Local }, "takes it for"},
		{"a gateway", func(g *guestCase) { g.Via = gateway }, "by gateway 10.0.0.3"},
		{"in the VRF", func(g *guestCase) { g.link.VRFTable, g.Table = 10, 10 }, ""},
		{"out of the VRF", func(g *guestCase) { g.link.VRFTable = 10 }, "not in that of the VRF"},
		{"a default route", func(g *guestCase) { g.Prefix = everything }, "only a default route"},
		{"by DSCP", func(g *guestCase) { g.hop.ByDSCP = true }, "DSCP"},
		{"ours is there", func(g *guestCase) { g.Prefix, g.Protocol = host, rtnl.Protocol }, ""},
		{"a peer address", func(g *guestCase) { g.Prefix = host }, "connected route"},
		{"the user's host route", func(g *guestCase) { g.Prefix, g.Protocol = host, rtnl.ProtoBoot }, "somebody else's"},
	} {
		g := guestCase{link: rtnl.Link{Index: fibtest.Index, Name: "ibcm0"}, hop: nexthop.Hop{Addr: host.Addr()}}
		g.Answer = rtnl.Answer{Type: rtnl.Unicast, OIF: fibtest.Index, Table: rtnl.TableMain, Prefix: subnet}
		g.Protocol = rtnl.ProtoKernel
		tt.change(&g)
		g.hop.Answer = g.Answer
		why := g.hop.NotGuest(g.link)
		if (why == "") != (tt.why == "") {
			t.Errorf("%s: because %q, want %q", tt.name, why, tt.why)
		}
		if !strings.Contains(why, tt.why) {
			t.Errorf("%s: because %q, want %q in it", tt.name, why, tt.why)
		}
	}
}
