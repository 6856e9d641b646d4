package interop

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"ipoibcm/control"
	"ipoibcm/test/interop/vm"
)

var securedRounds = flag.Int("secured.rounds", 1,
	"how often TestSecuredUnderlay measures TCP, with us and without in turn; if more than once, at both MTUs")

// A securedUnderlay is one way to protect what two hosts send each other. Its commands
// run on each of them, with N for its number, O for the other's and M for the MTU of eth0.
// The hosts have fd78::N on eth0.
type securedUnderlay struct {
	name    string
	device  string // given to the agents
	setup   string
	gid     string // fd77::N where it is not the link-local address
	less    int    // octets of the MTU that the device takes
	alone   string // address of the other host as TCP reaches it without us
	segment string // the first series of Linux that takes UDP_SEGMENT for it; empty: none does
	plain   bool   // nothing is protected
	mtus    []int  // of eth0
}

var securedUnderlays = []securedUnderlay{
	{name: "plain", device: "eth0", setup: "true", alone: "fd78::O", segment: "5.10", plain: true, mtus: []int{1500}},
	{name: "WireGuard", device: "wg0", less: 80, gid: "fd77::N", alone: "fd77::O", segment: "5.10", mtus: []int{1500},
		setup: "ip link add wg0 type wireguard; traffic wireguard wg0 N; ip link set wg0 mtu $((M - 80)) up; " +
			"ip addr add fd77::N/64 dev wg0"},
	{name: "IPsec", device: "eth0", gid: "fd77::N", alone: "fd77::O", mtus: []int{1500, 9000},
		setup: "ip addr add fd77::N/64 dev eth0 nodad; " + esp("N", "O", "out") + esp("O", "N", "in")},
	// It has no checksum offload, which UDP_SEGMENT needed before.
	{name: "MACsec", device: "macsec0", less: 32, alone: "fd79::O", segment: "6.11", mtus: []int{1500},
		setup: "ip link add link eth0 macsec0 type macsec encrypt on; " +
			"ip macsec add macsec0 tx sa 0 pn 1 on key 0N " + macsecKey + "; " +
			"ip macsec add macsec0 rx port 1 address 52:54:00:78:00:0O; " +
			"ip macsec add macsec0 rx port 1 address 52:54:00:78:00:0O sa 0 pn 1 on key 0O " + macsecKey + "; " +
			"ip link set macsec0 up; ip addr add fd79::N/64 dev macsec0 nodad"},
}

// olderThan reports whether the guests' kernel is of an earlier series of Linux than series.
func olderThan(series string) bool {
	var guest, want [2]int
	fmt.Sscanf(cmp.Or(os.Getenv(kernelVariable), "6.1"), "%d.%d", &guest[0], &guest[1]) // 6.1 is Debian 12's
	fmt.Sscanf(series, "%d.%d", &want[0], &want[1])
	return slices.Compare(guest[:], want[:]) < 0
}

const macsecKey = "000102030405060708090a0b0c0d0e0f"

// esp returns the commands for one direction of ESP in transport mode, for UDP and TCP.
func esp(from, to, dir string) string {
	s := fmt.Sprintf("ip xfrm state add src fd77::%s dst fd77::%s proto esp spi 0x100%s mode transport "+
		"aead 'rfc4106(gcm(aes))' 0x%s01020304 128 sel src fd77::%s dst fd77::%s; ", from, to, from, macsecKey, from, to)
	for _, proto := range []string{"17", "6"} {
		s += fmt.Sprintf("ip xfrm policy add dir %s src fd77::%s dst fd77::%s proto %s ", dir, from, to, proto) +
			fmt.Sprintf("tmpl src fd77::%s dst fd77::%s proto esp mode transport; ", from, to)
	}
	return s
}

// on returns s as host n of two has it.
func on(s string, n, mtu int) string {
	return strings.NewReplacer("N", fmt.Sprint(n), "O", fmt.Sprint(3-n), "M", fmt.Sprint(mtu)).Replace(s)
}

// A pairOfHosts are two network namespaces of one guest, joined by eth0 of each.
type pairOfHosts struct {
	g   *vm.VM
	mtu int
}

func newPairOfHosts(t *testing.T, g *vm.VM, mtu int) *pairOfHosts {
	t.Helper()
	s := "set -e; ip() { /usr/bin/ip \"$@\"; }; ip netns add h1; ip netns add h2\n" +
		"ip link add v1 mtu M address 52:54:00:78:00:01 type veth peer name v2 mtu M address 52:54:00:78:00:02\n"
	for n := 1; n <= 2; n++ {
		s += on("ip link set vN netns hN name eth0; cd /proc/sys/net/ipv6/conf\n"+
			"ip netns exec hN sh -c 'echo 0 >default/accept_dad; echo 0 >eth0/accept_dad'\n"+
			"ip -n hN link set lo up; ip -n hN link set eth0 up; ip -n hN addr add fd78::N/64 dev eth0 nodad\n", n, mtu)
	}
	t.Cleanup(func() { _, _ = g.Sh(patience, "/usr/bin/ip netns del h1; /usr/bin/ip netns del h2") })
	sh(t, g, strings.ReplaceAll(s, "mtu M", fmt.Sprint("mtu ", mtu)))
	return &pairOfHosts{g, mtu}
}

// node is host n, whose agent has that underlay.
func (p *pairOfHosts) node(t *testing.T, n int, u securedUnderlay) *node {
	t.Helper()
	ns := fmt.Sprintf("h%d", n)
	setup := "ip() { /usr/bin/ip \"$@\"; }; " + on(u.setup, n, p.mtu)
	if _, err := p.g.Run(patience, "/usr/bin/ip", "netns", "exec", ns, "/bin/sh", "-ec", setup); err != nil {
		t.Fatal(err)
	}
	provider := []string{"--provider=softroce", "--underlay=" + u.device}
	if u.gid != "" {
		sh(t, p.g, fmt.Sprintf("echo 'peers: [\"%s\"]' >/run/%s.yaml", on(u.gid, 3-n, p.mtu), ns))
		provider = append(provider, "--gid="+on(u.gid, n, p.mtu), "--config=/run/"+ns+".yaml")
	}
	return &node{t: t, name: ns, number: n, socket: "/run/" + ns + ".sock", provider: provider,
		start: func(argv ...string) (proc, error) {
			return p.g.Start(append([]string{"/usr/bin/ip", "netns", "exec", ns}, argv...)...)
		}}
}

// TestSecuredUnderlay has two agents of ours meet over WireGuard, ESP and MACsec of a
// kernel, as docs/secured-underlay.md has them: MTUs that nobody tells, UDP_SEGMENT only
// where it goes through, nothing of ours in the clear, and how fast that is beside
// TCP over the same underlay without us.
func TestSecuredUnderlay(t *testing.T) {
	t.Parallel()
	img, _ := productImage(t)
	seg := vm.NewSegment()
	t.Cleanup(seg.Close)
	g, err := vm.Boot(context.Background(), img, vm.Config{Name: "secured", Segment: seg, MAC: mac(1), MTU: 1500,
		IPv4: guestIPv4 + "/24", NoRXE: true, Memory: 768,
		Modules: []string{"tun", "veth", "wireguard", "xfrm_user", "esp6", "macsec"}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(g.Kill)
	for _, u := range securedUnderlays {
		mtus := u.mtus
		if *securedRounds > 1 {
			mtus = []int{1500, 9000}
		}
		for _, mtu := range mtus {
			t.Run(fmt.Sprint(u.name, "/", mtu), func(t *testing.T) {
				p := newPairOfHosts(t, g, mtu)
				p.meet(t, u)
			})
		}
	}
}

func (p *pairOfHosts) meet(t *testing.T, u securedUnderlay) {
	a, b := p.node(t, 1, u), p.node(t, 2, u)
	count := p.outside(t, b)
	both := &pairing{a: a, b: b, path: "gsi", ud: 2044}
	a.up(both.args(a, "rc")...)
	b.up(both.args(b, "rc")...)
	pathMTU := 1024
	if p.mtu > 4300 {
		pathMTU = 4096
	}
	st := b.status().Underlay
	if st.MTU != p.mtu-u.less {
		t.Errorf("the underlay has MTU %d, want %d", st.MTU, p.mtu-u.less)
	}
	if st.PathMTU != pathMTU {
		t.Errorf("the IB path MTU is %d, want %d", st.PathMTU, pathMTU)
	}
	a.reach(b.v4(), 2044) // in fragments over UD, or the connection by now
	a.connected("RC", "gsi")
	a.routeMTU(b.v4(), maxMTU)
	a.reach(b.v4(), maxMTU)
	b.reach(a.v4(), maxMTU)
	const octets = 1 << 19
	a.transfer(b, b.v4(), octets/4)
	var ours, alone []float64
	for range *securedRounds {
		ours = append(ours, octets*8/1e6/b.transfer(a, a.v4(), octets).Seconds())
		alone = append(alone, octets*8/1e6/b.transfer(a, on(u.alone, 2, p.mtu), octets).Seconds())
	}
	t.Logf("TCP, Mb/s: %.1f with us, %.1f without", ours, alone)
	c := b.counters()
	if n := c["softroce tx_drop_too_big"]; n != 0 {
		t.Errorf("%d packets were larger than the underlay takes", n)
	}
	segment := u.segment != "" && !olderThan(u.segment)
	if refused := c["softroce tx_gso_refused"]; (refused == 0) != segment {
		t.Errorf("UDP_SEGMENT was refused %d times, want that %v", refused, !segment)
	}
	t.Logf("UDP_SEGMENT: %d calls, refused %d times", c["softroce tx_batches"], c["softroce tx_gso_refused"])
	if roce := count(); (roce == 0) == u.plain {
		t.Errorf("%d packets of RoCEv2 were seen in the clear", roce)
	}
	for _, n := range []*node{a, b} {
		n.end("TERM")
	}
}

// counters are those of n's agent, by part and name.
func (n *node) counters() map[string]uint64 {
	n.t.Helper()
	var st control.Stats
	if err := n.ask(&st); err != nil {
		n.t.Fatal(err)
	}
	m := map[string]uint64{}
	for _, c := range st.Counters {
		m[c.Part+" "+c.Name] = c.Value
	}
	return m
}

// outside counts packets of RoCEv2 that arrive at n in the clear.
func (p *pairOfHosts) outside(t *testing.T, n *node) func() int {
	t.Helper()
	c, err := p.g.Start("/usr/bin/ip", "netns", "exec", n.name, trafficProgram, "outside", "eth0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Kill)
	if line, err := c.Line(patience); err != nil || line != "ready" {
		t.Fatalf("outside: %q, %v", line, err)
	}
	return func() (roce int) {
		t.Helper()
		if err := c.CloseInput(); err != nil {
			t.Fatal(err)
		}
		line, err := c.Line(patience)
		seen := 0
		switch _, bad := fmt.Sscan(line, &roce, &seen); {
		case err != nil:
			t.Errorf("outside: %v", err)
		case bad != nil:
			t.Errorf("outside: bad is %v, want nil", bad)
		case seen == 0:
			t.Error("outside: seen is 0, want more")
		}
		return roce
	}
}
