package netns

import (
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"
)

// The next hop is the kernel's choice by metric, by table and rule, and by
// whether there is a gateway.
func TestNextHopByMetricAndTable(t *testing.T) {
	parallel(t)
	needIP(t)
	s, a, b, c := newTrio(t)
	s.start()
	// Else c would answer ARP for all that it takes for its own, as Linux does.
	s.must(c.Sysctl("net/ipv4/conf/all/arp_ignore", "1"))
	m, atB, atC := a.speak(), b.listen(), c.listen()
	for _, f := range []struct {
		flag   string
		b, c   netip.Addr
		prefix [3]string
		dst    [3]string
	}{
		{"-4", b.v4, c.v4, [3]string{"192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24"},
			[3]string{"192.0.2.1", "198.51.100.1", "203.0.113.1"}},
		{"-6", b.v6, c.v6, [3]string{"2001:db8:1::/64", "2001:db8:2::/64", "2001:db8:3::/64"},
			[3]string{"2001:db8:1::1", "2001:db8:2::1", "2001:db8:3::1"}},
	} {
		for _, h := range []*host{b, c} { // any address of these is theirs
			for _, p := range f.prefix {
				h.ip(f.flag + " route add local " + p + " dev lo")
			}
		}
		route := func(verb, p, rest string) { a.ip(fmt.Sprintf("%s route %s %s %s", f.flag, verb, p, rest)) }
		dst := netip.MustParseAddr(f.dst[0])
		route("add", f.prefix[0], fmt.Sprintf("via %s dev %s metric 100", f.b, ifName))
		route("add", f.prefix[0], fmt.Sprintf("via %s dev %s metric 200", f.c, ifName))
		m.wantCarrier("the smaller metric wins", dst, atB, atC)
		route("del", f.prefix[0], "metric 100")
		m.wantCarrier("the only one left wins", dst, atC, atB)
		route("add", f.prefix[0], fmt.Sprintf("via %s dev %s metric 300", f.b, ifName))
		m.wantCarrier("the smaller metric still wins", dst, atC, atB)

		dst = netip.MustParseAddr(f.dst[1])
		s.must(b.AddAddr(ifName, fmt.Sprintf("%s/%d", dst, dst.BitLen())))
		route("add", f.prefix[1], fmt.Sprintf("via %s dev %s metric 20", f.c, ifName))
		m.wantCarrier("the gateway is the only way", dst, atC, atB)
		route("add", f.prefix[1], fmt.Sprintf("dev %s metric 10", ifName))
		m.wantCarrier("on the link with the smaller metric", dst, atB, atC)

		dst = netip.MustParseAddr(f.dst[2])
		route("add", f.prefix[2], fmt.Sprintf("via %s dev %s", f.b, ifName))
		route("add", f.prefix[2], fmt.Sprintf("via %s dev %s table 77", f.c, ifName))
		m.wantCarrier("a table that no rule names does not count", dst, atB, atC)
		a.ip(f.flag + " rule add to " + f.prefix[2] + " lookup 77")
		m.wantCarrier("a rule names the table", dst, atC, atB)
		a.ip(f.flag + " rule del to " + f.prefix[2] + " lookup 77")
		m.wantCarrier("the rule has gone", dst, atB, atC)
	}
}

// The first packet after a pause in which the route has changed goes the new way: by the old one it might be lost.
func TestFirstPacketAfterAChange(t *testing.T) {
	parallel(t)
	needIP(t)
	s, a, b, c := newTrio(t)
	s.start()
	a.connect(b, "RC")
	a.connect(c, "RC")
	m, ears := a.speak(), []*ear{b.listen(), c.listen()}
	prefixes := []string{"192.0.2.0/24", "2001:db8:1::/64"}
	hops := [][2]netip.Addr{{b.v4, c.v4}, {b.v6, c.v6}}
	for _, p := range prefixes {
		for _, h := range []*host{b, c} { // any address of these is theirs
			h.ip("route add local " + p + " dev lo")
		}
	}
	for turn, verb := range []string{"add", "replace", "replace", "replace"} {
		for i, p := range prefixes {
			a.ip(fmt.Sprintf("route %s %s via %s dev %s", verb, p, hops[i][turn%2], ifName))
		}
		time.Sleep(3 * time.Second) // the pause
		for _, p := range prefixes {
			dst := netip.MustParsePrefix(p).Addr().Next()
			id, err := m.say(dst)
			s.must(err)
			s.eventually(patience, fmt.Sprintf("turn %d: the datagram to %s is heard", turn, dst), func() error {
				if ears[turn%2].heard(id) {
					return nil
				}
				return fmt.Errorf("the host that the route has left heard it: %v", ears[1-turn%2].heard(id))
			})
		}
	}
}

// Multipath routes, next-hop objects and a second gateway that IPv6 appends: all
// hops are used, each about as often as its weight says.
func TestMultipath(t *testing.T) {
	parallel(t)
	needIP(t)
	s, a, b, c := newTrio(t)
	s.start()
	a.connect(b, "RC")
	a.connect(c, "RC")
	m, atB, atC := a.speak(), b.listen(), c.listen()
	a.ip(fmt.Sprintf("nexthop add id 1 via %s dev %s", b.v4, ifName))
	a.ip(fmt.Sprintf("nexthop add id 2 via %s dev %s", c.v4, ifName))
	a.ip("nexthop add id 3 group 1,3/2,1")
	a.ip(fmt.Sprintf("nexthop add id 4 via %s dev %s", b.v6, ifName))
	a.ip(fmt.Sprintf("nexthop add id 5 via %s dev %s", c.v6, ifName))
	a.ip("nexthop add id 6 group 4,1/5,3")
	for i, tt := range []struct {
		name   string
		v6     bool
		shares float64 // of b
		routes []string
	}{
		{"IPv4 multipath", false, 0.25, []string{fmt.Sprintf("add PREFIX nexthop via %s weight 1 nexthop via %s weight 3",
			b.v4, c.v4)}},
		{"IPv4 by IPv6 gateways", false, 0.5,
			[]string{fmt.Sprintf("add PREFIX nexthop via inet6 %s dev %s nexthop via inet6 %s dev %s", b.v6, ifName,
				c.v6, ifName)}},
		{"IPv4 next-hop object", false, 1, []string{"add PREFIX nhid 1"}},
		{"IPv4 group of objects", false, 0.75, []string{"add PREFIX nhid 3"}},
		{"IPv6 multipath", true, 0.75, []string{fmt.Sprintf("add PREFIX nexthop via %s weight 3 nexthop via %s weight 1",
			b.v6, c.v6)}},
		{"IPv6 append", true, 0.5, []string{fmt.Sprintf("add PREFIX via %s dev %s", b.v6, ifName),
			fmt.Sprintf("append PREFIX via %s dev %s", c.v6, ifName)}},
		{"IPv6 next-hop object", true, 0, []string{"add PREFIX nhid 5"}},
		{"IPv6 group of objects", true, 0.25, []string{"add PREFIX nhid 6"}},
	} {
		p := netip.MustParsePrefix(fmt.Sprintf("10.%d.0.0/16", 70+i))
		if tt.v6 {
			p = netip.MustParsePrefix(fmt.Sprintf("2001:db8:%x::/64", 0x70+i))
		}
		for _, h := range []*host{b, c} {
			h.ip(fmt.Sprintf("route add local %s dev lo", p))
		}
		for _, r := range tt.routes {
			a.ip("route " + strings.Replace(r, "PREFIX", p.String(), 1))
		}
		byB, byC := m.spread(p, 2000, atB, atC)
		if byB+byC != 2000 {
			t.Errorf("%s: %d of 2000 destinations were heard", tt.name, byB+byC)
		}
		for _, x := range []struct {
			who  string
			got  int
			want float64
		}{{"b", byB, tt.shares}, {"c", byC, 1 - tt.shares}} {
			if want := 2000 * x.want; math.Abs(float64(x.got)-want) > want/5 {
				t.Errorf("%s: %s carries %d destinations, want %.0f give or take a fifth", tt.name, x.who, x.got, want)
			}
		}
	}
}

// spread sends to n destinations inside p until each was heard, and returns by
// which of two ears.
func (m *mouth) spread(p netip.Prefix, n int, x, y *ear) (byX, byY int) {
	m.seg.Helper()
	todo := make([]netip.Addr, 0, n)
	for a := p.Addr(); len(todo) < n; {
		a = a.Next()
		if b := a.AsSlice(); b[len(b)-1] != 255 && b[len(b)-1] != 0 {
			todo = append(todo, a)
		}
	}
	ids := map[netip.Addr][]uint32{} // of all rounds: what a busy host takes late counts, too
	for range 10 {
		for i, a := range todo {
			id, err := m.say(a)
			m.seg.must(err)
			ids[a] = append(ids[a], id)
			if i%50 == 49 {
				time.Sleep(2 * time.Millisecond)
			}
		}
		time.Sleep(200 * time.Millisecond)
		todo = slices.DeleteFunc(todo, func(a netip.Addr) bool {
			switch {
			case slices.ContainsFunc(ids[a], x.heard):
				byX++
			case slices.ContainsFunc(ids[a], y.heard):
				byY++
			default:
				return false
			}
			return true
		})
		if len(todo) == 0 {
			break
		}
	}
	return byX, byY
}
