package hostnet

import (
	"errors"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"ipoibcm/internal/expect"
	"ipoibcm/rtnl"
)

// ip runs ip commands, one a line, in the test's namespace. Those that begin with -6
// come last.
func ip(t testing.TB, commands string) {
	t.Helper()
	if _, err := exec.LookPath("ip"); err != nil {
		t.Skip("needs iproute2")
	}
	var batch [2]string
	for line := range strings.Lines(commands) {
		if rest, ok := strings.CutPrefix(line, "-6 "); ok {
			batch[1] += rest
		} else {
			batch[0] += line
		}
	}
	for i, option := range []string{"-N", "-6"} {
		cmd := exec.Command("ip", option, "-batch", "-")
		cmd.Stdin = strings.NewReader(batch[i])
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("ip: %v\n%s", err, out)
		}
	}
}

// ipOut returns what one ip command prints.
func ipOut(t testing.TB, args ...string) string {
	t.Helper()
	out, err := exec.Command("ip", args...).CombinedOutput()
	if err != nil {
		t.Fatalf("ip %v: %v\n%s", args, err, out)
	}
	return string(out)
}

// answer is what a test expects of an Answer: the rest depends on the namespace.
type answer struct {
	typ   rtnl.RouteType
	oif   int
	via   string // "" on link
	src   string // "" any
	table int    // 0 any
	mtu   int
}

func (want answer) check(t *testing.T, name string, got rtnl.Answer, err error) {
	t.Helper()
	if err != nil {
		t.Errorf("%s: %v", name, err)
		return
	}
	if got.Type != want.typ {
		t.Errorf("%s: type %v, want %v", name, got.Type, want.typ)
	}
	if got.OIF != want.oif {
		t.Errorf("%s: device %d, want %d", name, got.OIF, want.oif)
	}
	via, _ := netip.ParseAddr(want.via)
	if got.Via != via {
		t.Errorf("%s: via %v, want %v", name, got.Via, via)
	}
	if want.src != "" && got.Src != netip.MustParseAddr(want.src) {
		t.Errorf("%s: source %v, want %v", name, got.Src, want.src)
	}
	if want.table != 0 && got.Table != want.table {
		t.Errorf("%s: table %d, want %d", name, got.Table, want.table)
	}
	if got.MTU != want.mtu {
		t.Errorf("%s: MTU %d, want %d", name, got.MTU, want.mtu)
	}
}

// lookupRoutes are the routes that TestLookup asks for. v0 is another device.
const lookupRoutes = `
link set lo up
address add 10.0.0.1/24 dev ibcm0
address add fd00::1/64 dev ibcm0 nodad
address add 10.20.0.1/24 dev v0
address add fd20::1/64 dev v0 nodad
route add blackhole 10.1.0.0/16
route add unreachable 10.2.0.0/16
route add prohibit 10.3.0.0/16
route add throw 10.4.0.0/16
route add blackhole fd01::/16
route add unreachable fd02::/16
route add prohibit fd03::/16
route add throw fd04::/16
route add 10.5.0.0/16 via 10.0.0.2 dev ibcm0 metric 5
route add 10.5.0.0/16 via 10.0.0.9 dev ibcm0 metric 9
route add fd05::/16 via fd00::2 dev ibcm0 metric 5
route add fd05::/16 via fd00::9 dev ibcm0 metric 9
route add 10.8.0.0/16 via inet6 fd00::9 dev ibcm0
route add 10.10.0.0/16 via 172.16.0.1 dev ibcm0 onlink
route add 10.11.0.0/16 via 10.20.0.9 dev v0 table 77
route add fd11::/16 via fd20::9 dev v0 table 77
rule add to 10.11.0.0/16 lookup 77
-6 rule add to fd11::/16 lookup 77
route add 10.12.0.0/16 via 10.20.0.9 table 78
rule add to 10.12.0.0/16 from 10.20.0.1 lookup 78
rule add to 10.12.0.0/16 ipproto udp dport 4789 lookup 77
route add 10.12.0.0/16 via 10.20.0.8 table 77
route add 10.13.0.0/16 tos 0x10 via 10.0.0.5 dev ibcm0
route add 10.13.0.0/16 via 10.0.0.6 dev ibcm0
nexthop add id 1 via 10.0.0.3 dev ibcm0
nexthop add id 2 blackhole
route add 10.6.0.0/16 nhid 1
route add 10.7.0.0/16 nhid 2
route add 10.0.0.77/32 dev ibcm0 proto 75 mtu 1400
route add fd00::77/128 dev ibcm0 proto 75 mtu 1400
`

func lookupDevices(t *testing.T) (d *Device, v0 int) {
	t.Helper()
	t.Parallel()
	return lookupDevicesAlone(t)
}

// lookupDevicesAlone is lookupDevices for a test that others must not run beside.
func lookupDevicesAlone(t *testing.T) (d *Device, v0 int) {
	t.Helper()
	newNetns(t)
	tun := newTUN(t, "ibcm0")
	v0 = newVeth(t, "v0", "v1")
	d = openUp(t, tun)
	ip(t, lookupRoutes)
	if !d.WaitAddr(netip.MustParseAddr("fd00::1"), 3*time.Second) {
		t.Fatal("the kernel has not made fd00::1 usable")
	}
	return d, v0
}

func flow(dst, src string) rtnl.Flow {
	f := rtnl.Flow{Dst: netip.MustParseAddr(dst)}
	if src != "" {
		f.Src = netip.MustParseAddr(src)
	}
	return f
}

type lookup struct {
	name string
	q    rtnl.Query
	want answer
}

// lookups are the cases of TestLookup; us is the interface of the TUN, v0 the first of the others.
func lookups(us, v0 int) []lookup {
	const lo = 1
	dscp, ports := flow("10.13.0.1", "10.0.0.1"), flow("10.12.0.1", "10.0.0.1")
	dscp.TOS = 0x10
	ports.Proto, ports.SrcPort, ports.DstPort = unix.IPPROTO_UDP, 4000, 4789
	gre := ports
	gre.Proto = unix.IPPROTO_GRE
	return []lookup{
		{"on link", rtnl.Query{Flow: flow("10.0.0.5", "")},
			answer{typ: rtnl.Unicast, oif: us, src: "10.0.0.1", table: rtnl.TableMain}},
		{"on link, IPv6", rtnl.Query{Flow: flow("fd00::5", "")},
			answer{typ: rtnl.Unicast, oif: us, src: "fd00::1", table: rtnl.TableMain}},
		{"our host route", rtnl.Query{Flow: flow("10.0.0.77", "")}, answer{typ: rtnl.Unicast, oif: us, mtu: 1400}},
		{"our host route, IPv6", rtnl.Query{Flow: flow("fd00::77", "")}, answer{typ: rtnl.Unicast, oif: us, mtu: 1400}},
		{"our address", rtnl.Query{Flow: flow("10.0.0.1", "")}, answer{typ: rtnl.Local, oif: lo, table: rtnl.TableLocal}},
		{"our address, IPv6", rtnl.Query{Flow: flow("fd00::1", "")},
			answer{typ: rtnl.Local, oif: lo, table: rtnl.TableLocal}},
		{"broadcast", rtnl.Query{Flow: flow("10.0.0.255", "")}, answer{typ: rtnl.Broadcast, oif: us, table: rtnl.TableLocal}},
		{"multicast, by us", rtnl.Query{Flow: flow("224.1.1.1", ""), OIF: us}, answer{typ: rtnl.Multicast, oif: us}},
		{"multicast, IPv6, by us", rtnl.Query{Flow: flow("ff05::1", ""), OIF: us}, answer{typ: rtnl.Multicast, oif: us}},
		{"multicast, no route", rtnl.Query{Flow: flow("224.1.1.1", "")}, answer{typ: rtnl.Unreachable}},
		{"the better metric", rtnl.Query{Flow: flow("10.5.0.1", "")}, answer{typ: rtnl.Unicast, oif: us, via: "10.0.0.2"}},
		{"the better metric, IPv6", rtnl.Query{Flow: flow("fd05::1", "")},
			answer{typ: rtnl.Unicast, oif: us, via: "fd00::2"}},
		{"gateway of the other family", rtnl.Query{Flow: flow("10.8.0.1", "")},
			answer{typ: rtnl.Unicast, oif: us, via: "fd00::9"}},
		{"gateway that no route leads to", rtnl.Query{Flow: flow("10.10.0.1", "")},
			answer{typ: rtnl.Unicast, oif: us, via: "172.16.0.1"}},
		{"another table", rtnl.Query{Flow: flow("10.11.0.1", "")},
			answer{typ: rtnl.Unicast, oif: v0, via: "10.20.0.9", table: 77}},
		{"another table, IPv6", rtnl.Query{Flow: flow("fd11::1", "")},
			answer{typ: rtnl.Unicast, oif: v0, via: "fd20::9", table: 77}},
		{"by source", rtnl.Query{Flow: flow("10.12.0.1", "10.20.0.1")},
			answer{typ: rtnl.Unicast, oif: v0, via: "10.20.0.9", table: 78}},
		{"not that source", rtnl.Query{Flow: flow("10.12.0.1", "10.0.0.1")}, answer{typ: rtnl.Unreachable}},
		{"by port", rtnl.Query{Flow: ports}, answer{typ: rtnl.Unicast, oif: v0, via: "10.20.0.8", table: 77}},
		{"a protocol that cannot be asked with", rtnl.Query{Flow: gre}, answer{typ: rtnl.Unreachable}},
		{"by DSCP", rtnl.Query{Flow: dscp}, answer{typ: rtnl.Unicast, oif: us, via: "10.0.0.5"}},
		{"not that DSCP", rtnl.Query{Flow: flow("10.13.0.1", "10.0.0.1")},
			answer{typ: rtnl.Unicast, oif: us, via: "10.0.0.6"}},
		{"next-hop object", rtnl.Query{Flow: flow("10.6.0.1", "")}, answer{typ: rtnl.Unicast, oif: us, via: "10.0.0.3"}},
		{"next-hop object, blackhole", rtnl.Query{Flow: flow("10.7.0.1", "")}, answer{typ: rtnl.Blackhole}},
		{"none", rtnl.Query{Flow: flow("10.99.0.1", "")}, answer{typ: rtnl.Unreachable}},
		{"none, IPv6", rtnl.Query{Flow: flow("fd99::1", "")}, answer{typ: rtnl.Unreachable}},
		{"none, by us: taken for on-link", rtnl.Query{Flow: flow("10.99.0.1", ""), OIF: us},
			answer{typ: rtnl.Unicast, oif: us}},
		{"none, IPv6, by us", rtnl.Query{Flow: flow("fd99::1", ""), OIF: us}, answer{typ: rtnl.Unreachable}},
		{"blackhole", rtnl.Query{Flow: flow("10.1.0.1", "")}, answer{typ: rtnl.Blackhole}},
		{"blackhole with source", rtnl.Query{Flow: flow("10.1.0.1", "10.0.0.1")}, answer{typ: rtnl.Blackhole}},
		{"blackhole, by us: taken for on-link", rtnl.Query{Flow: flow("10.1.0.1", ""), OIF: us},
			answer{typ: rtnl.Unicast, oif: us}},
		{"blackhole, IPv6", rtnl.Query{Flow: flow("fd01::1", "")}, answer{typ: rtnl.Blackhole}},
		{"unreachable", rtnl.Query{Flow: flow("10.2.0.1", "")}, answer{typ: rtnl.Unreachable}},
		{"unreachable, IPv6", rtnl.Query{Flow: flow("fd02::1", "")}, answer{typ: rtnl.Unreachable}},
		{"prohibit", rtnl.Query{Flow: flow("10.3.0.1", "")}, answer{typ: rtnl.Prohibit}},
		{"prohibit, IPv6", rtnl.Query{Flow: flow("fd03::1", "")}, answer{typ: rtnl.Prohibit}},
		{"throw", rtnl.Query{Flow: flow("10.4.0.1", "")}, answer{typ: rtnl.Unreachable}},
		{"throw, IPv6", rtnl.Query{Flow: flow("fd04::1", "")}, answer{typ: rtnl.Unreachable}},
		{"foreign source, IPv6", rtnl.Query{Flow: flow("fd05::1", "2001:db8::1")},
			answer{typ: rtnl.Unicast, oif: us, via: "fd00::2"}},
		{"foreign source from lo, forwarding off", rtnl.Query{Flow: flow("10.5.0.1", "192.0.2.1"), IIF: lo},
			answer{typ: rtnl.Unreachable}},
	}
}

func TestLookup(t *testing.T) {
	d, v0 := lookupDevices(t)
	us := d.Index()
	for _, tt := range lookups(us, v0) {
		got, err := d.Lookup(tt.q)
		tt.want.check(t, tt.name, got, err)
		if ok := tt.want.oif != 0; err == nil && got.OK() != ok {
			t.Errorf("%s: OK = %v, want %v", tt.name, got.OK(), ok)
		}
	}
	for _, dst := range []string{"10.5.0.1", "10.1.0.1", "10.99.0.1"} {
		for _, src := range []string{"192.0.2.1", "10.0.0.200"} {
			if a, err := d.Lookup(rtnl.Query{Flow: flow(dst, src)}); !errors.Is(err, rtnl.ErrForeignSource) {
				t.Errorf("%s from %s: %+v, %v, want ErrForeignSource", dst, src, a, err)
			}
		}
	}
	if a, err := d.Lookup(rtnl.Query{Flow: flow("10.5.0.1", ""), OIF: 9999}); !errors.Is(err, unix.ENODEV) {
		t.Errorf("by a device that is not there: %+v, %v, want ENODEV", a, err)
	}
}

// A packet that is forwarded is asked for with the device that it came in by.
func TestLookupForwarded(t *testing.T) {
	d, v0 := lookupDevices(t)
	if err := d.writeSysctl("ipv4/ip_forward", "1"); err != nil {
		t.Skip(err)
	}
	if err := d.writeSysctl("ipv6/conf/all/forwarding", "1"); err != nil {
		t.Skip(err)
	}
	for _, tt := range []struct {
		name string
		q    rtnl.Query
		want answer
	}{
		{"IPv4", rtnl.Query{Flow: flow("10.5.0.1", "10.20.0.7"), IIF: v0},
			answer{typ: rtnl.Unicast, oif: d.Index(), via: "10.0.0.2"}},
		{"IPv6", rtnl.Query{Flow: flow("fd05::1", "fd20::7"), IIF: v0},
			answer{typ: rtnl.Unicast, oif: d.Index(), via: "fd00::2"}},
		{"blackhole", rtnl.Query{Flow: flow("10.1.0.1", "10.20.0.7"), IIF: v0}, answer{typ: rtnl.Blackhole}},
		{"prohibit", rtnl.Query{Flow: flow("10.3.0.1", "10.20.0.7"), IIF: v0}, answer{typ: rtnl.Prohibit}},
		{"none", rtnl.Query{Flow: flow("10.99.0.1", "10.20.0.7"), IIF: v0}, answer{typ: rtnl.Unreachable}},
	} {
		got, err := d.Lookup(tt.q)
		tt.want.check(t, tt.name, got, err)
	}
}

// An answer that comes late belongs to a request that was given up.
func TestLookupSkipsLateAnswers(t *testing.T) {
	d, _ := lookupDevices(t)
	for i := range 3 {
		late := appendQuery(nil, rtnl.Query{Flow: flow("10.5.0.1", "")}, 0, 1000+uint32(i))
		if _, err := unix.Write(d.look.fd, late); err != nil {
			t.Fatal(err)
		}
	}
	got, err := d.Lookup(rtnl.Query{Flow: flow("10.0.0.5", "")})
	answer{typ: rtnl.Unicast, oif: d.Index(), src: "10.0.0.1"}.check(t, "after three late answers", got, err)
	if d.look.strays != 3 {
		t.Errorf("%d answers skipped, want 3", d.look.strays)
	}
}

func TestLookupAfterClose(t *testing.T) {
	d, _ := lookupDevices(t)
	d.Close()
	if a, err := d.Lookup(rtnl.Query{Flow: flow("10.0.0.5", "")}); !errors.Is(err, errClosed) {
		t.Errorf("have %+v, %v, want %v", a, err, errClosed)
	}
}

func TestLookupDoesNotAllocate(t *testing.T) {
	d, _ := lookupDevicesAlone(t)
	q := rtnl.Query{Flow: flow("10.5.0.1", "10.0.0.1")}
	if n := testing.AllocsPerRun(100, func() { d.Lookup(q) }); n != 0 {
		t.Errorf("%v allocations, want none", n)
	}
}

func FuzzAnswer(f *testing.F) {
	f.Add(appendQuery(nil, rtnl.Query{Flow: flow("10.5.0.1", "10.0.0.1"), OIF: 3}, 0, 7), uint32(7))
	f.Add(appendQuery(nil, rtnl.Query{Flow: flow("fd05::1", ""), IIF: 3}, 0, 7), uint32(8))
	f.Fuzz(func(t *testing.T, b []byte, seq uint32) {
		a, mine, err := parseAnswer(b, seq, rtnl.Query{Through: 1})
		if !mine {
			expect.MustEqual(t, err, nil, "error of another's answer")
			expect.MustEqual(t, a, rtnl.Answer{}, "what is read of another's answer")
		}
	})
}
