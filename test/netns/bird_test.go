package netns

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"
)

// failoverWithin is how long a routing daemon of these tests may take to see that
// a neighbour has gone (4 s of OSPF, 6 s of BGP), on a busy machine.
const failoverWithin = 20 * time.Second

// routed is a network of three hosts whose routing daemons tell a of the same
// destinations behind b and behind c.
type routed struct {
	*segment
	a, b, c  *host
	mouth    *mouth
	atB, atC *ear
}

func newRouted(t *testing.T, dsts ...string) *routed {
	s := newSegment(t, topology{hosts: 3})
	for _, h := range s.hosts {
		s.must(h.Sysctl("net/ipv4/ip_forward", "1"))
		s.must(h.Sysctl("net/ipv6/conf/all/forwarding", "1"))
	}
	s.start()
	r := &routed{segment: s, a: s.hosts[0], b: s.hosts[1], c: s.hosts[2]}
	for _, h := range []*host{r.b, r.c} {
		for _, d := range dsts {
			h.ip("addr add " + d + " dev lo")
		}
	}
	r.mouth, r.atB, r.atC = r.a.speak(), r.b.listen(), r.c.listen()
	for _, h := range []*host{r.b, r.c} { // with connections there are host routes
		r.a.connect(h, "RC")
		both(h, r.a.reach)
		both(h, func(dst netip.Addr) { r.a.waitRoute(patience, dst, maxMTU) })
	}
	return r
}

// carriedBy waits until what a sends to dst arrives at one host.
func (r *routed) carriedBy(within time.Duration, dst netip.Addr, want *ear) {
	r.Helper()
	r.within(within, fmt.Sprintf("%s carries %s", want.host.Name, dst), func() error {
		id, err := r.mouth.say(dst)
		if err != nil {
			time.Sleep(50 * time.Millisecond)
			return err
		}
		for end := time.Now().Add(100 * time.Millisecond); time.Now().Before(end); time.Sleep(pollEvery) {
			if want.heard(id) {
				return nil
			}
		}
		return fmt.Errorf("datagram %d was not heard there", id)
	})
}

// notExported checks that no other host has a host route to a neighbour from a
// routing daemon: its own have protocol 75, or lead to itself.
func (r *routed) notExported() {
	r.Helper()
	for _, h := range []*host{r.b, r.c} {
		for _, flag := range []string{"-4", "-6"} {
			for line := range strings.Lines(h.ip(flag + " route show table main")) {
				dst, _, _ := strings.Cut(line, " ")
				a, err := netip.ParseAddr(dst)
				link := netip.MustParsePrefix("10.0.0.0/24").Contains(a) || netip.MustParsePrefix("fd00::/64").Contains(a)
				if err != nil || !link {
					continue
				}
				if !strings.Contains(line, "proto 75") {
					r.Errorf("%s has a route to a neighbour that somebody exported: %s", h.Name, line)
				}
			}
		}
	}
}

// hears waits until a routing daemon has given the host routes to these prefixes.
func (h *host) hears(prefixes ...string) {
	h.seg.Helper()
	for _, dst := range prefixes {
		h.seg.within(30*time.Second, h.Name+" hears of "+dst, func() error {
			if got, err := h.exactly(dst); err != nil || !strings.Contains(got, "via") {
				return fmt.Errorf("ip route: %q (%v)", got, err)
			}
			return nil
		})
	}
}

// OSPF on a broadcast link, and BGP, of BIRD: routes by gateways carry traffic, a
// gateway that fails is replaced, and our host routes are not exported.
func TestBIRD(t *testing.T) {
	parallel(t)
	needIP(t)
	bird := needProgram(t, "bird2", "bird", "/usr/sbin/bird")
	common := documented(t, "bird")
	ospf := []netip.Addr{netip.MustParseAddr("198.51.100.1"), netip.MustParseAddr("2001:db8:1::1")}
	bgp := []netip.Addr{netip.MustParseAddr("203.0.113.1"), netip.MustParseAddr("2001:db8:2::1")}
	nets := map[string]string{"ipv4": "203.0.113.0/24", "ipv6": "2001:db8:2::/64"}
	r := newRouted(t, "198.51.100.1/32", "2001:db8:1::1/128")
	daemons := map[*host]*daemon{}
	for i, h := range r.hosts {
		text := strings.ReplaceAll(common, "METRIC", fmt.Sprint(100*(i+1))) // b is nearer than c
		// what BGP tells of; any address there is this host's
		if h != r.a {
			for f, net := range nets {
				text += fmt.Sprintf("protocol static { %s; route %s unreachable; }\n", f, net)
				h.ip(fmt.Sprintf("-%c route add local %s dev lo", f[3], net))
			}
		}
		text = fmt.Sprintf("router id %s;\nlog stderr all;\n%s", h.v4, text)
		for j, p := range r.hosts {
			if h == p || h != r.a && p != r.a {
				continue
			}
			for f, addr := range map[string][2]netip.Addr{"ipv4": {h.v4, p.v4}, "ipv6": {h.v6, p.v6}} {
				text += fmt.Sprintf(
					"protocol bgp bgp_%s_%d {\n local %s as %d;\n neighbor %s as %d;\n hold time 6; connect delay time 1; "+
						"connect retry time 2; error wait time 1, 2;\n"+
						" %s { import filter { bgp_local_pref = %d; accept; }; export where source = RTS_INHERIT || source = "+
						"RTS_STATIC; };\n}\n",
					f, j, addr[0], 65001+i, addr[1], 65001+j, f, 200-10*j)
			}
		}
		conf := h.file("bird.conf", text)
		daemons[h] = h.daemon(bird, "-f", "-c", conf, "-s", h.dir()+"/bird.ctl", "-P", h.dir()+"/bird.pid")
	}
	// What the user has added is exported, our host routes are not.
	r.a.ip("route add 192.0.2.0/25 via 10.0.0.77 dev " + ifName + " proto static")
	r.a.ip("-6 route add 2001:db8:3::/64 via fd00::77 dev " + ifName + " proto static")
	for _, dst := range append(ospf, bgp...) {
		r.carriedBy(30*time.Second, dst, r.atB)
	}
	for _, h := range []*host{r.b, r.c} {
		h.hears("192.0.2.0/25", "2001:db8:3::/64")
	}
	r.notExported()

	daemons[r.b].kill()
	r.b.kill()
	for _, dst := range append(ospf, bgp...) {
		r.carriedBy(failoverWithin, dst, r.atC)
	}
}
