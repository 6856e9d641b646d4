package netns

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"

	"ipoibcm/internal/lab"
)

// routeGet returns what follows the words dev, via and mtu in the answer of ip route
// get, or why there is none.
func (h *host) routeGet(dst string) (dev, via string, mtu int, refused string) {
	h.seg.Helper()
	out, err := h.tryIP("route get " + dst)
	if err != nil {
		return "", "", 0, err.Error()
	}
	w := strings.Fields(out)
	if slices.Contains([]string{"unreachable", "prohibit", "blackhole"}, w[0]) {
		return "", "", 0, out // IPv6 with some kernels
	}
	for i := 1; i+1 < len(w); i++ {
		switch w[i] {
		case "dev":
			dev = w[i+1]
		case "via":
			if via = w[i+1]; via == "inet6" || via == "inet" {
				via = w[i+2]
			}
		case "mtu":
			mtu, _ = strconv.Atoi(strings.TrimPrefix(w[i+1], "lock"))
			if w[i+1] == "lock" {
				mtu, _ = strconv.Atoi(w[i+2])
			}
		}
	}
	return dev, via, mtu, ""
}

// agrees says what of explain's is not what ip route get has, or that it does not say
// what it should.
func (h *host) agrees(dst netip.Addr, says string) error {
	h.seg.Helper()
	dev, hop, mtu, refused := h.routeGet(dst.String())
	e := h.explain(dst)
	why := strings.Join(e.Why, "\n")
	if hop == "" {
		hop = dst.String()
	}
	if mtu == 0 {
		mtu = maxMTU // of the connection
	}
	switch {
	case refused != "" && e.Outcome != "dropped":
		return fmt.Errorf("explain %s: outcome %s, and ip says %s", dst, e.Outcome, refused)
	case refused == "" && dev != ifName && dev != "lo" && e.Outcome != "elsewhere":
		return fmt.Errorf("explain %s: outcome %s, and ip says device %s", dst, e.Outcome, dev)
	case refused == "" && dev == ifName && e.Outcome != "sent" && e.Outcome != "unknown":
		return fmt.Errorf("explain %s: outcome %s, and ip says it goes by %s", dst, e.Outcome, dev)
	case !strings.Contains(why, says):
		return fmt.Errorf("explain %s does not say %q:\n%s", dst, says, why)
	case refused != "" && dst.Is6() && e.NextHop != "":
		return fmt.Errorf("explain %s has next hop %s, and ip says %s", dst, e.NextHop, refused)
	case refused != "":
		return nil
	case dev != ifName && e.NextHop != "" && !strings.Contains(why, "only what names "+ifName):
		return fmt.Errorf("ip says of %s device %s, explain\n%s", dst, dev, why)
	case dev != ifName:
		return nil
	case e.NextHop != hop:
		return fmt.Errorf("explain %s: next hop %q, want %s as ip route get says", dst, e.NextHop, hop)
	case e.MTU != mtu:
		return fmt.Errorf("explain %s: MTU %d, want %d as ip route get says\n%s", dst, e.MTU, mtu, why)
	}
	return nil
}

// explain says of a destination what ip route get says: device, gateway, MTU, or why
// nothing is sent there.
func TestExplainAgreesWithTheKernel(t *testing.T) {
	parallel(t)
	needIP(t)
	s, a, b := startedPair(t)
	s.other(a, "172.16.1.1/24", "fd16:1::1/64")
	a.connect(b, "RC")
	a.reachRouted(b, maxMTU)
	for _, tt := range []struct {
		name string
		do   string // X is the peer
		dst  string
		says string // empty: no more than the fields
	}{
		{"on the link", "", "X", "on the link itself"},
		{"the user's host route with an MTU", "route replace X dev ibcm0 mtu lock 1400 initcwnd 50", "X",
			"has MTU 1400, which counts"},
		{"a gateway", "route add 192.0.2.0/24 via X", "192.0.2.9", "by the gateway X"},
		{"a gateway, IPv6", "route add 2001:db8::/64 via X6", "2001:db8::9", "by the gateway X6"},
		{"a gateway with an MTU", "route add 192.0.3.0/24 via X mtu 3000", "192.0.3.9", "has MTU 3000, which counts"},
		{"a gateway of IPv6 for IPv4", "route add 192.0.4.0/24 via inet6 X6", "192.0.4.9", "by the gateway X6"},
		{"a next-hop object", "nexthop add id 7 via X dev ibcm0;route add 192.0.5.0/24 nhid 7", "192.0.5.9",
			"by the gateway X"},
		{"a next-hop object, IPv6", "nexthop add id 8 via X6 dev ibcm0;route add 2001:db8:5::/64 nhid 8", "2001:db8:5::9",
			"by the gateway X6"},
		{"the better of two metrics", "route add 192.0.6.0/24 via 10.0.0.77 metric 9;route add 192.0.6.0/24 via X metric 8",
			"192.0.6.9", "by the gateway X"},
		{"another device", "route add 192.0.7.0/24 dev eth1", "192.0.7.9", "by another device"},
		{"another device, IPv6", "route add 2001:db8:7::/64 dev eth1", "2001:db8:7::9", "by another device"},
		{"blackhole", "route add blackhole 192.0.8.0/24", "192.0.8.9", "drops what is sent there (blackhole)"},
		{"unreachable", "route add unreachable 192.0.9.0/24", "192.0.9.9", "no route to it (unreachable)"},
		{"prohibit", "route add prohibit 192.0.10.0/24", "192.0.10.9", "forbids to send there (prohibit)"},
		{"blackhole, IPv6", "route add blackhole 2001:db8:8::/64", "2001:db8:8::9", "drops what is sent there (blackhole)"},
		{"unreachable, IPv6", "route add unreachable 2001:db8:9::/64", "2001:db8:9::9", "no route to it (unreachable)"},
		{"prohibit, IPv6", "route add prohibit 2001:db8:a::/64", "2001:db8:a::9", "forbids to send there (prohibit)"},
		{"no route", "", "203.0.113.9", "no route to it (unreachable)"},
	} {
		fill := strings.NewReplacer("X6", b.v6.String(), "X", b.v4.String()).Replace
		dst := netip.MustParseAddr(fill(tt.dst))
		for line := range strings.SplitSeq(fill(tt.do), ";") {
			if line != "" {
				a.ip(line)
			}
		}
		s.eventually(patience/10, tt.name, func() error { return a.agrees(dst, fill(tt.says)) })
	}
	// A neighbour that does not answer.
	dead := netip.MustParseAddr("10.0.0.99")
	a.Ping(lab.Ping{Dst: dead, Timeout: patience / 10})
	s.eventually(patience, "explain says since when nobody answers", func() error {
		if why := strings.Join(a.explain(dead).Why, "\n"); !strings.Contains(why, "nobody answered for 10.0.0.99 since") ||
			!strings.Contains(why, "ago") {
			return fmt.Errorf("it says\n%s", why)
		}
		return nil
	})
}
