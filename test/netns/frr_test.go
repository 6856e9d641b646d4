package netns

import (
	"fmt"
	"net/netip"
	"os"
	"os/user"
	"strconv"
	"strings"
	"testing"
	"time"
)

// frr runs zebra and bgpd of FRR on a host, with this configuration of BGP.
func (h *host) frr(t *testing.T, zebraConf, bgpConf string) []*daemon {
	h.seg.Helper()
	zebra := needProgram(t, "frr", "/usr/lib/frr/zebra")
	bgpd := needProgram(t, "frr", "/usr/lib/frr/bgpd")
	dir := h.dir()
	daemonUser, err := user.Lookup("frr") // they give root up
	h.seg.must(err)
	uid, _ := strconv.Atoi(daemonUser.Uid)
	gid, _ := strconv.Atoi(daemonUser.Gid)
	h.seg.must(os.Chown(dir, uid, gid))
	args := func(name, conf string) []string {
		return []string{"--log", "stdout", "-f", h.file(name+".conf", conf), "-i", dir + "/" + name + ".pid", "-z",
			dir + "/zserv", "--vty_socket", dir,
			"-A", "127.0.0.1", "-P", "0"}
	}
	out := []*daemon{h.daemon(zebra, args("zebra", zebraConf)...)}
	h.seg.eventually(patience, "zebra of "+h.Name+" listens", func() error {
		_, err := os.Stat(dir + "/zserv")
		return err
	})
	return append(out, h.daemon(bgpd, append(args("bgpd", bgpConf), "-p", "179")...))
}

// BGP of FRR among three hosts: routes by gateways carry traffic, a gateway that
// fails is replaced, and our host routes are not exported.
func TestFRR(t *testing.T) {
	parallel(t)
	needIP(t)
	needProgram(t, "frr", "/usr/lib/frr/bgpd")
	dsts := []netip.Addr{netip.MustParseAddr("203.0.113.1"), netip.MustParseAddr("2001:db8:2::1")}
	r := newRouted(t, "203.0.113.1/32", "2001:db8:2::1/128")
	r.a.ip("route add 192.0.2.0/25 via 10.0.0.77 dev " + ifName + " proto static")
	r.a.ip("-6 route add 2001:db8:3::/64 via fd00::77 dev " + ifName + " proto static")
	daemons := map[*host][]*daemon{}
	for i, h := range r.hosts {
		var b strings.Builder
		fmt.Fprintf(&b,
			"%srouter bgp %d\n bgp router-id %s\n no bgp ebgp-requires-policy\n no bgp network import-check\n timers "+
				"bgp 2 6\n", documented(t, "frr"), 65001+i, h.v4)
		families := [2]string{}
		for j, p := range r.hosts {
			if h == p || h != r.a && p != r.a {
				continue
			}
			for f, addr := range []netip.Addr{p.v4, p.v6} {
				fmt.Fprintf(&b,
					" neighbor %s remote-as %d\n neighbor %s timers connect 2\n neighbor %s advertisement-interval 0\n neighbor "+
						"%s disable-connected-check\n",
					addr, 65001+j, addr, addr, addr)
				families[f] += fmt.Sprintf("  neighbor %s activate\n  neighbor %s weight %d\n", addr, addr, 200-10*j)
				if f == 1 {
					families[0] += fmt.Sprintf("  no neighbor %s activate\n", addr)
				}
			}
		}
		redistribute := [2]string{"  redistribute kernel route-map no-neighbours\n",
			"  redistribute kernel route-map no-neighbours-6\n"}
		if h != r.a {
			redistribute = [2]string{"  network 203.0.113.1/32\n", "  network 2001:db8:2::1/128\n"}
		}
		for f, name := range []string{"ipv4", "ipv6"} {
			fmt.Fprintf(&b, " address-family %s unicast\n%s%s exit-address-family\n", name, families[f], redistribute[f])
		}
		daemons[h] = h.frr(t, "", b.String())
	}
	for _, dst := range dsts {
		r.carriedBy(30*time.Second, dst, r.atB)
	}
	for _, h := range []*host{r.b, r.c} {
		h.hears("192.0.2.0/25", "2001:db8:3::/64")
	}
	r.notExported()

	for _, d := range daemons[r.b] {
		d.kill()
	}
	r.b.kill()
	for _, dst := range dsts {
		r.carriedBy(failoverWithin, dst, r.atC)
	}
}

// BGP unnumbered finds its neighbour by router advertisements, and gives IPv4
// prefixes IPv6 gateways.
func TestFRRUnnumbered(t *testing.T) {
	parallel(t)
	needIP(t)
	needProgram(t, "frr", "/usr/lib/frr/bgpd")
	s := newSegment(t, topology{})
	for _, h := range s.hosts {
		s.must(h.Sysctl("net/ipv6/conf/all/forwarding", "1"))
	}
	s.start()
	a, b := s.hosts[0], s.hosts[1]
	b.ip("addr add 203.0.113.1/32 dev lo")
	b.ip("addr add 2001:db8:2::1/128 dev lo")
	for i, h := range s.hosts {
		networks := [2]string{}
		if h == b {
			networks = [2]string{"  network 203.0.113.1/32\n", "  network 2001:db8:2::1/128\n"}
		}
		h.frr(t, "",
			fmt.Sprintf(
				"router bgp %d\n bgp router-id %s\n no bgp ebgp-requires-policy\n no bgp network import-check\n timers bgp 2 6\n"+
					" neighbor %s interface remote-as external\n neighbor %s timers connect 2\n neighbor %s capability "+
					"extended-nexthop\n"+
					" address-family ipv4 unicast\n%s exit-address-family\n"+
					" address-family ipv6 unicast\n  neighbor %s activate\n%s exit-address-family\n", 65001+i, h.v4, ifName, ifName,
				ifName, networks[0], ifName, networks[1]))
	}
	m, atB := a.speak(), b.listen()
	r := &routed{segment: s, a: a, b: b, mouth: m}
	for _, dst := range []string{"203.0.113.1", "2001:db8:2::1"} {
		r.carriedBy(40*time.Second, netip.MustParseAddr(dst), atB)
	}
	if got, err := a.exactly("203.0.113.1"); err != nil || !strings.Contains(got, "via inet6 fe80:") {
		t.Errorf("the IPv4 prefix has no IPv6 gateway: %s", got)
	}
}
