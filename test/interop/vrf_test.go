package interop

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"ipoibcm/control"
	"ipoibcm/internal/lab"
	"ipoibcm/test/interop/vm"
)

// vrfReach pings dst from the VRF until there is an answer.
func (n *node) vrfReach(dst string) {
	n.t.Helper()
	n.until("ping "+dst+" from the VRF", func() error {
		ping := "ping"
		if strings.Contains(dst, ":") {
			ping = "ping6"
		}
		_, err := n.run("/bin/busybox", ping, "-I", "vrf0", "-c", "1", "-W", "1", "-s", "1000", dst)
		return err
	})
}

// hostRouteIn waits until there is one host route of ours to dst, in that table.
func (n *node) hostRouteIn(dst, table string) {
	n.t.Helper()
	family := "-4"
	if strings.Contains(dst, ":") {
		family = "-6"
	}
	n.until(fmt.Sprintf("a host route of ours to %s in table %s", dst, table), func() error {
		out, err := n.run("/usr/bin/ip", family, "route", "show", "table", "all", "proto", "75")
		if err != nil {
			return err
		}
		found := 0
		for line := range strings.Lines(out) {
			if w := strings.Fields(line); len(w) == 0 || w[0] != dst {
				continue
			}
			found++
			if in := strings.Contains(line, " table "+table+" "); in == (table == "main") { // main is not printed
				return fmt.Errorf("it is %q", line)
			}
			if want := fmt.Sprintf(" mtu %d", maxMTU); !strings.Contains(line, want) {
				return fmt.Errorf("%q has not%s", line, want)
			}
		}
		if found != 1 {
			return fmt.Errorf("there are %d: %s", found, out)
		}
		return nil
	})
}

// TestVRF puts the interface into a VRF of a kernel that has them, and takes it out
// again. Table main says something else about the same destinations meanwhile.
func TestVRF(t *testing.T) {
	t.Parallel()
	img, dir := productImage(t)
	seg := vm.NewSegment()
	t.Cleanup(seg.Close)
	host, err := lab.NewHost(fmt.Sprintf("%s%d-vrf", namePrefix, os.Getpid()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { host.Close() })
	if err := seg.AddHost(host, "eth0", mac(0xfe), 5000); err != nil {
		t.Fatal(err)
	}
	if err := host.AddAddr("lo", "192.0.2.1/32"); err != nil {
		t.Fatal(err)
	}
	g := guestWith(t, seg, img, 1, 5000, "ib_umad", "vrf")
	a, b := hostNode(t, host, dir, 2), guestNode(t, g, 1)
	p := &pairing{a: a, b: b, ipv6: true, path: "gsi", ud: 2044}
	a.up(p.args(a, "rc")...)
	b.up(p.args(b, "rc")...)
	p.meet("rc")
	b.hostRouteIn(a.v4(), "main")

	sh(t, g, "/usr/bin/ip link add vrf0 type vrf table 10 && /usr/bin/ip link set vrf0 up && /usr/bin/ip link set "+
		productIf+" master vrf0")
	sh(t, g,
		"/usr/bin/ip route add 10.9.0.0/28 dev eth0; /usr/bin/ip -6 route add fd09::/112 dev eth0; /usr/bin/ip route "+
			"add 192.0.2.0/24 dev eth0")
	sh(t, g, "/usr/bin/ip route add 192.0.2.0/24 via "+a.v4()+" dev "+productIf+" table 10")
	for _, dst := range p.addrs(a) {
		b.vrfReach(dst)
		b.hostRouteIn(dst, "10")
	}
	b.vrfReach("192.0.2.1")
	for _, dst := range p.addrs(b) {
		a.reach(dst, 60000)
	}
	var e control.Explanation
	if err := b.askAt(&e, control.PathExplain+"?ip=192.0.2.1"); err != nil {
		t.Fatal(err)
	}
	if e.NextHop != a.v4() {
		t.Errorf("explain 192.0.2.1: next hop %s, want %s of the VRF's route", e.NextHop, a.v4())
	}

	betterRoute(t, p, g)
	sh(t, g,
		"/usr/bin/ip route del 10.9.0.0/28 dev eth0; /usr/bin/ip -6 route del fd09::/112 dev eth0; /usr/bin/ip link set "+
			productIf+" nomaster")
	p.meet("rc")
	for _, dst := range p.addrs(a) {
		b.reach(dst, 60000)
		b.hostRouteIn(dst, "main")
	}
}

// betterRoute: where another device of the VRF has the better route there is no host route
// of ours.
func betterRoute(t *testing.T, p *pairing, g *vm.VM) {
	t.Helper()
	a, b := p.a, p.b
	sh(t, g,
		"/usr/bin/ip link add other type veth peer name far && /usr/bin/ip link set other master vrf0 up && /usr/bin/ip "+
			"link set far up && "+
			"/usr/bin/ip route add 10.9.0.0/30 dev other table 10")
	b.until("no host route of ours where another device of the VRF leads", func() error {
		out, err := b.run("/usr/bin/ip", "-4", "route", "show", "table", "10", "proto", "75")
		if err == nil && strings.Contains(out, a.v4()+" ") {
			err = fmt.Errorf("there is %q", out)
		}
		return err
	})
	sh(t, g, "/usr/bin/ip link del other")
	b.vrfReach(a.v4())
	b.hostRouteIn(a.v4(), "10")

}
