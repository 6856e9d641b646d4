package netns

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"ipoibcm/control"
	"ipoibcm/internal/lab"
)

// hasRoute reports whether there is a host route of ours to dst.
func (h *host) hasRoute(dst netip.Addr) bool {
	h.seg.Helper()
	for _, r := range h.hostRoutes() {
		if strings.HasPrefix(r, dst.String()+" ") {
			return true
		}
	}
	return false
}

// leavesBy waits until the kernel sends to dst by that device.
func (h *host) leavesBy(dst netip.Addr, dev string) {
	h.seg.Helper()
	h.seg.eventually(patience, fmt.Sprintf("%s leaves by %s", dst, dev), func() error {
		_, text, err := h.RouteTo(dst)
		if err == nil && !strings.Contains(text+" ", " dev "+dev+" ") {
			err = fmt.Errorf("ip route get: %s", text)
		}
		return err
	})
}

func (h *host) explain(dst netip.Addr) (e control.Explanation) {
	h.seg.Helper()
	h.seg.must(h.agent.Get(h.seg.ctx, control.PathExplain+"?ip="+dst.String(), &e))
	return e
}

// A peer that talks to us gets no host route of ours where the kernel sends to it
// by another device, whenever that came to be.
func TestHostRouteNotInTheWay(t *testing.T) {
	parallel(t)
	needIP(t)
	s, a, b := newPair(t)
	s.other(a, "172.16.1.1/24", "fd16:1::1/64")
	foreign := map[netip.Addr]string{b.v4: "10.0.0.0/28", b.v6: "fd00::/120"}
	a.run()
	b.run()
	for _, p := range foreign {
		a.ip("route add " + p + " dev eth1")
	}
	for range 5 { // its requests tell a of both addresses; the answers go astray
		both(a, func(dst netip.Addr) { b.Ping(lab.Ping{Dst: dst, Timeout: 100 * time.Millisecond}) })
	}
	a.paired(b, "RC")
	time.Sleep(300 * time.Millisecond)
	both(b, func(dst netip.Addr) {
		a.leavesBy(dst, "eth1")
		if a.hasRoute(dst) {
			t.Errorf("a host route of ours to %s", dst)
		}
		if why := strings.Join(a.explain(dst).Why, "\n"); !strings.Contains(why, "another device") {
			t.Errorf("explain %s does not speak of another device:\n%s", dst, why)
		}
	})

	for _, p := range foreign {
		a.ip("route del " + p + " dev eth1")
	}
	a.reachRouted(b, maxMTU)
	for _, p := range foreign { // now ours was there first
		a.ip("route add " + p + " dev eth1")
	}
	both(b, func(dst netip.Addr) {
		a.leavesBy(dst, "eth1")
		if a.hasRoute(dst) {
			t.Errorf("still a host route of ours to %s", dst)
		}
	})
}

// A host route of the user's own stays as he made it, with his MTU, and outlives
// the connection.
func TestHostRouteOfTheUser(t *testing.T) {
	parallel(t)
	needIP(t)
	s, a, b := startedPair(t)
	before := map[netip.Addr]string{}
	show := func(dst netip.Addr) string {
		got, err := a.exactly(dst.String())
		s.must(err)
		return got
	}
	both(b, func(dst netip.Addr) {
		a.ip(fmt.Sprintf("route add %s/%d dev %s mtu lock 1400 initcwnd 50", dst, dst.BitLen(), ifName))
		if before[dst] = show(dst); !strings.Contains(before[dst], "mtu lock 1400") {
			t.Fatalf("the route to %s is %q", dst, before[dst])
		}
	})
	a.connect(b, "RC")
	both(b, a.reach)
	time.Sleep(300 * time.Millisecond)
	unchanged := func(when string) {
		t.Helper()
		both(b, func(dst netip.Addr) {
			if got := show(dst); got != before[dst] {
				t.Errorf("%s: the route to %s is\n%q, want\n%q", when, dst, got, before[dst])
			}
		})
	}
	unchanged("with a connection")
	both(b, func(dst netip.Addr) {
		if why := strings.Join(a.explain(dst).Why, "\n"); !strings.Contains(why, "whose MTU counts") {
			t.Errorf("explain %s does not say whose MTU counts:\n%s", dst, why)
		}
		a.ping(dst, 1400, true)
		_, err := a.Ping(lab.Ping{Dst: dst, Size: 1401, DF: true})
		wantTooBig(t, err)
	})
	b.stop()
	a.noConns()
	unchanged("without a connection")
	b.run()
	a.connect(b, "RC")
	both(b, a.reach)
	unchanged("with the next connection")

	both(b, func(dst netip.Addr) { a.ip(fmt.Sprintf("route del %s/%d", dst, dst.BitLen())) })
	both(b, func(dst netip.Addr) { a.waitRoute(patience, dst, maxMTU) }) // ours comes as soon as there is room
	both(b, func(dst netip.Addr) {                                       // in the place of ours
		a.ip(fmt.Sprintf("route replace %s/%d dev %s mtu lock 1400 initcwnd 50", dst, dst.BitLen(), ifName))
	})
	time.Sleep(300 * time.Millisecond)
	unchanged("in the place of ours")
	b.stop()
	a.noConns()
	unchanged("after that without a connection")
}

// Multicast of programs that name no interface goes where it would without us, and
// that of those that name ours has the MTU of datagrams.
func TestMulticastWithoutInterface(t *testing.T) {
	parallel(t)
	needIP(t)
	s := newSegment(t, topology{})
	a := s.hosts[0]
	s.other(a, "172.16.1.1/24")
	a.ip("route add default via 172.16.1.2 dev eth1")
	s.start()
	group := netip.MustParseAddr("239.9.9.9")
	s.eventually(patience, "the route for groups is there", func() error {
		mtu, err := a.mtuByInterface(group)
		if err == nil && mtu != udMTU {
			err = fmt.Errorf("with IP_MULTICAST_IF the MTU is %d, want %d", mtu, udMTU)
		}
		return err
	})
	a.leavesBy(group, "eth1")
	if main := a.ip("route show table main"); strings.Contains(main, "224.0.0.0") || strings.Contains(main, "multicast") {
		t.Errorf("table main has a route for groups:\n%s", main)
	}
	if err := a.Multicast(ifName, s.hosts[1].Host, ifName, group, 3000, patience); err != nil {
		t.Error(err)
	}
	a.stop()
	if rules := a.ip("rule show"); strings.Contains(rules, "224.0.0.0") {
		t.Errorf("a rule is left:\n%s", rules)
	}
}

// mtuByInterface returns the path MTU of a socket that names the interface and is
// connected to the group.
func (h *host) mtuByInterface(group netip.Addr) (mtu int, err error) {
	err = h.Do(func() error {
		ifi, err := net.InterfaceByName(ifName)
		if err != nil {
			return err
		}
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		if err := unix.SetsockoptIPMreqn(fd, unix.IPPROTO_IP, unix.IP_MULTICAST_IF,
			&unix.IPMreqn{Ifindex: int32(ifi.Index)}); err != nil {
			return err
		}
		if err := unix.Connect(fd, &unix.SockaddrInet4{Port: 9, Addr: group.As4()}); err != nil {
			return err
		}
		mtu, err = unix.GetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_MTU)
		return err
	})
	return mtu, err
}
