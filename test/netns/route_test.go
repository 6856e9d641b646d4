package netns

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ipoibcm/internal/lab"
	"ipoibcm/rtnl"
)

// A network behind a gateway uses the gateway's connection; its MTU is the
// gateway's, also when that rises.
func TestGatewayRoute(t *testing.T) {
	parallel(t)
	s := newSegment(t, topology{})
	a, gw := s.hosts[0], s.hosts[1]
	behind := []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}
	s.must(gw.AddAddr("lo", "192.0.2.1/32"))
	s.must(gw.AddAddr("lo", "2001:db8::1/128"))
	a.run()
	gw.run("--receive-mtu", "9000")
	s.must(a.AddRoute(ifName, "192.0.2.0/24", gw.v4.String()))
	s.must(a.AddRoute(ifName, "2001:db8::/64", gw.v6.String()))
	for _, dst := range behind {
		a.reach(dst)
	}
	if c, _ := a.paired(gw, "RC"); c.MTU != 8996 {
		t.Fatalf("the connection's MTU is %d", c.MTU)
	}
	for i, dst := range behind {
		// The first packet too large learns the MTU from ICMP, later ones from the kernel.
		s.eventually(patience, fmt.Sprintf("the MTU to %s is learnt", dst), func() error {
			if _, err := a.Ping(lab.Ping{Dst: dst, Size: maxMTU, DF: true, Timeout: pingWithin}); err == nil {
				t.Errorf("%d octets passed a connection of 8996", maxMTU)
			}
			mtu, text, err := a.RouteTo(dst)
			if err == nil && mtu != 8996 {
				err = fmt.Errorf("ip route says %q", text)
			}
			return err
		})
		_, err := a.Ping(lab.Ping{Dst: dst, Size: 8997, DF: true})
		wantTooBig(t, err)
		a.ping(dst, 8996, true)
		a.ping(dst, 30000, false)
		if got := a.send(gw, dst, 8<<20).MSS; got > 8996-[]int{40, 60}[i] {
			t.Errorf("MSS %d to %s", got, dst)
		}
		var e struct {
			NextHop string `json:"next_hop"`
			Mode    string `json:"mode"`
			MTU     int    `json:"mtu"`
		}
		s.must(a.agent.Get(s.ctx, "/v1/explain?ip="+dst.String(), &e))
		if want := []netip.Addr{gw.v4, gw.v6}[i].String(); e.NextHop != want || e.MTU != 8996 {
			t.Errorf("explain %s: next hop %s, MTU %d", dst, e.NextHop, e.MTU)
		}
	}
	gw.stop()
	gw.run() // it takes 65524 now
	a.reach(behind[0])
	if c, _ := a.paired(gw, "RC"); c.MTU != maxMTU {
		t.Fatalf("the connection's MTU is %d", c.MTU)
	}
	for _, dst := range behind {
		a.reach(dst)
		s.within(time.Second, "a larger MTU reaches "+dst.String(), func() error {
			_, err := a.Ping(lab.Ping{Dst: dst, Size: maxMTU, DF: true, Timeout: 300 * time.Millisecond})
			return err
		})
	}
	for _, r := range a.hostRoutes() {
		if strings.HasPrefix(r, "192.0.2.1 ") || strings.HasPrefix(r, "2001:db8::1 ") {
			t.Errorf("a host route behind the gateway: %q", r)
		}
	}
}

// A user who lowers the device MTU lowers the routes, and raising it brings
// them back.
func TestDeviceMTULowered(t *testing.T) {
	parallel(t)
	s, a, b := connectedPair(t)
	a.reachRouted(b, maxMTU)
	for _, tt := range []struct{ device, host, ud int }{
		{5000, 5000, udMTU},
		{1500, 1500, 1500},
		{maxMTU, maxMTU, udMTU},
	} {
		s.must(a.SetMTU(ifName, tt.device))
		both(b, func(dst netip.Addr) {
			a.waitRoute(patience, dst, tt.host)
			a.waitRoute(patience, neighbour(dst), tt.ud)
			a.ping(dst, tt.host, true)
			if tt.device < maxMTU {
				_, err := a.Ping(lab.Ping{Dst: dst, Size: tt.host + 1, DF: true})
				wantTooBig(t, err)
			}
			a.ping(dst, 20000, false)
		})
		both(a, func(dst netip.Addr) {
			b.waitRoute(patience, dst, maxMTU) // the peer's limit is what we accept, not what we send
			b.reach(dst)
		})
	}
	a.paired(b, "RC")
}

// Routes that someone else edits are put right again.
func TestForeignEditRepaired(t *testing.T) {
	parallel(t)
	s, a, b := connectedPair(t)
	a.reachRouted(b, maxMTU)
	want := a.hostRoutes()
	l, err := a.Link(ifName)
	s.must(err)
	look := func(dst string) (netlink.Route, error) {
		t.Helper()
		p := netip.MustParsePrefix(dst)
		family := netlink.FAMILY_V4
		if p.Addr().Is6() {
			family = netlink.FAMILY_V6
		}
		routes, err := a.Netlink().RouteList(l, family)
		s.must(err)
		for _, r := range routes {
			if r.Dst != nil && r.Dst.String() == dst {
				return r, nil
			}
		}
		return netlink.Route{}, fmt.Errorf("no route to %s", dst)
	}
	find := func(dst string) (r netlink.Route) { // one of ours may just be made anew
		t.Helper()
		s.eventually(patience, "there is a route to "+dst, func() (err error) {
			r, err = look(dst)
			return err
		})
		return r
	}
	repaired := func(what string) {
		t.Helper()
		s.eventually(patience, what, func() error {
			if got := a.hostRoutes(); !slices.Equal(got, want) {
				return fmt.Errorf("host routes are %q, want %q", got, want)
			}
			// TCP is asked for less than the MTU (ADR 0018), by connected
			// routes and by those to neighbours.
			for p, mss := range map[string]int{"10.0.0.0/24": tcpMTU - 40, "fd00::/64": tcpMTU - 60} {
				if r, err := look(p); err != nil || r.MTU != udMTU || r.AdvMSS != mss {
					return fmt.Errorf("%s has MTU %d, advmss %d (%v)", p, r.MTU, r.AdvMSS, err)
				}
			}
			for p, mss := range map[string]int{"10.0.0.2/32": tcpMTU - 40, "fd00::2/128": tcpMTU - 60} {
				if r, err := look(p); err != nil || r.MTU != maxMTU || r.AdvMSS != mss {
					return fmt.Errorf("%s has MTU %d, advmss %d (%v)", p, r.MTU, r.AdvMSS, err)
				}
			}
			return nil
		})
	}
	repaired("before any edit")
	for _, dst := range []string{"10.0.0.2/32", "fd00::2/128"} {
		r := find(dst)
		r.MTU = 1400
		s.must(a.Netlink().RouteReplace(&r))
		repaired(dst + " changed")
		r = find(dst)
		s.must(a.Netlink().RouteDel(&r))
		repaired(dst + " deleted")
	}
	for _, dst := range []string{"10.0.0.0/24", "fd00::/64"} {
		r := find(dst)
		r.MTU, r.AdvMSS = 0, 0
		s.must(a.Netlink().RouteReplace(&r))
		repaired(dst + " without metrics")
	}
}

// Host routes that a crash left on a device that outlived the agent are removed
// at the next start.
func TestLeftoverRoutesRemoved(t *testing.T) {
	parallel(t)
	s, a, b := newPair(t)
	s.must(a.Do(func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = ifName
		return netlink.LinkAdd(&netlink.Tuntap{LinkAttrs: attrs, Mode: netlink.TUNTAP_MODE_TUN,
			Flags: netlink.TUNTAP_NO_PI | netlink.TUNTAP_ONE_QUEUE})
	}))
	s.must(a.Up(ifName))
	l, err := a.Link(ifName)
	s.must(err)
	for _, dst := range []string{"10.0.0.77/32", "fd00::77/128"} {
		_, n, _ := net.ParseCIDR(dst)
		s.must(a.Netlink().RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: n, Protocol: rtnl.Protocol, MTU: 65520,
			Scope: scopeOf(n)}))
	}
	if n := len(a.hostRoutes()); n != 2 {
		t.Fatalf("%d routes made", n)
	}
	a.run()
	b.run()
	a.noHostRoutes() // the leftover ones are removed
	a.connect(b, "RC")
	a.waitRoute(patience, b.v4, maxMTU)
}

func scopeOf(n *net.IPNet) netlink.Scope {
	if n.IP.To4() != nil {
		return netlink.SCOPE_LINK
	}
	return netlink.SCOPE_UNIVERSE
}

// A router advertisement with an MTU option configures addresses, but no route
// of ours.
func TestRouterAdvertisementMTU(t *testing.T) {
	parallel(t)
	s, a, b := connectedPair(t)
	a.reachRouted(b, maxMTU)
	before := a.hostRoutes()

	const prefix = "2001:db8:5::"
	s.eventually(patience, "a takes an address from b's advertisement", func() error { // 4755-2-3
		if err := b.Do(func() error { return advertise(prefix, 2044) }); err != nil {
			return err
		}
		time.Sleep(50 * time.Millisecond)
		l, err := a.Link(ifName)
		if err != nil {
			return err
		}
		addrs, err := a.Netlink().AddrList(l, netlink.FAMILY_V6)
		if err != nil {
			return err
		}
		ll, err := a.LinkLocal(ifName)
		if err != nil {
			return err
		}
		for _, x := range addrs {
			if ip, _ := netip.AddrFromSlice(x.IP); strings.HasPrefix(ip.String(), "2001:db8:5:") {
				if id, want := ip.As16(), ll.As16(); string(id[8:]) != string(want[8:]) {
					t.Errorf("SLAAC made %s, the link-local address is %s", ip, ll)
				}
				return nil
			}
		}
		return fmt.Errorf("a has %v", addrs)
	})
	if after := a.hostRoutes(); !slices.Equal(before, after) {
		t.Errorf("host routes went from %q to %q", before, after)
	}
	both(b, func(dst netip.Addr) {
		if mtu := a.routeMTU(dst); mtu != maxMTU {
			t.Errorf("the route to %s has MTU %d", dst, mtu)
		}
		a.ping(dst, maxMTU, true)
	})
	s.must(a.Do(func() error {
		got, err := os.ReadFile("/proc/sys/net/ipv6/conf/" + ifName + "/mtu")
		if v := strings.TrimSpace(string(got)); err == nil && v != fmt.Sprint(maxMTU) {
			t.Errorf("the device's IPv6 MTU became %s", v)
		}
		return err
	}))
}

// advertise sends a router advertisement with a prefix and an MTU to all nodes.
func advertise(prefix string, mtu uint32) error {
	fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_ICMPV6)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	ifi, err := net.InterfaceByName(ifName)
	if err != nil {
		return err
	}
	for _, o := range []struct{ opt, v int }{{unix.IPV6_MULTICAST_HOPS, 255}, {unix.IPV6_MULTICAST_IF, ifi.Index}} {
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, o.opt, o.v); err != nil {
			return err
		}
	}
	m := make([]byte, 16, 56)
	// RFC 4861 section 4.2; lifetime 0: no default router
	m[0], m[4] = 134, 64
	m = append(m, 5, 1, 0, 0, byte(mtu>>24), byte(mtu>>16), byte(mtu>>8), byte(mtu)) // MTU option
	// prefix option, autonomous, not on-link
	m = append(m, 3, 4, 64, 0x40, 0, 0, 14, 16, 0, 0, 14, 16, 0, 0, 0, 0)
	p := netip.MustParseAddr(prefix).As16()
	m = append(m, p[:]...)
	return unix.Sendto(fd, m, 0, &unix.SockaddrInet6{Addr: netip.MustParseAddr("ff02::1").As16(),
		ZoneId: uint32(ifi.Index)})
}
