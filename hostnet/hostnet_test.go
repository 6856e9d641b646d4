package hostnet

import (
	"encoding/binary"
	"errors"
	"fmt"
	"ipoibcm/internal/expect"
	"ipoibcm/rtnl"
	"net"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

func TestHostRouteShowsMTU(t *testing.T) {
	inNetns(t)
	d := openUp(t, newTUN(t, "ibcm0"))
	add(t, d, "10.9.0.1/24", "fd09::1/64")
	for _, dst := range []string{"10.9.0.2/32", "fd09::2/128"} {
		for _, mtu := range []int{8996, 65520, 2044} { // raising works as lowering does
			r := rtnl.Route{Dst: netip.MustParsePrefix(dst), MTU: mtu}
			if err := d.SetRoute(r); err != nil {
				t.Fatal(err)
			}
			got := find(snapshot(t, d), to(dst))
			// 4755-7.2-1
			expect.MustEqual(t, len(got), 1, "%s mtu %d: length of got", dst, mtu)
			expect.MustEqual(t, got[0].MTU, mtu, "%s mtu %d: MTU", dst, mtu)
			expect.MustEqual(t, got[0].Protocol, rtnl.Protocol, "%s mtu %d: Protocol", dst, mtu)
			expect.MustEqual(t, got[0].Type, rtnl.Unicast, "%s mtu %d: Type", dst, mtu)
			if k := kernelMTU(t, netip.MustParsePrefix(dst).Addr()); k != mtu {
				t.Errorf("kernel uses MTU %d for %s, want %d", k, dst, mtu)
			}
		}
		if err := d.DelRoute(rtnl.Route{Dst: netip.MustParsePrefix(dst)}); err != nil {
			t.Fatal(err)
		}
		if err := d.DelRoute(rtnl.Route{Dst: netip.MustParsePrefix(dst)}); !errors.Is(err, ErrNotFound) {
			t.Errorf("second removal of %s: %v, want ErrNotFound", dst, err)
		}
	}
}

// kernelMTU asks the kernel which MTU it would use, 0 for the device's.
func kernelMTU(t *testing.T, a netip.Addr) int {
	t.Helper()
	rs, err := netlink.RouteGet(a.AsSlice())
	if err != nil || len(rs) == 0 {
		t.Fatalf("route to %v: %v %v", a, rs, err)
	}
	return rs[0].MTU
}

func TestRepairOfKernelRoutes(t *testing.T) {
	inNetns(t)
	d := openUp(t, newTUN(t, "ibcm0"))
	// Another interface whose routes have the same destinations and metrics.
	settledVeth(t, "eth0", "eth1")
	add(t, d, "10.9.0.1/24", "fe80::1/64")
	eth, _ := netlink.LinkByName("eth0")
	other, err := Open(eth.Attrs().Index)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	add(t, other, "10.9.0.7/24", "fe80::7/64")
	awaitIPv6(t, 4, 3) // the kernel adds no more routes then
	before := snapshot(t, other).Routes

	want := map[rtnl.Key]rtnl.Route{}
	for _, r := range snapshot(t, d).Routes {
		switch {
		case r.Type == rtnl.Unicast && r.Protocol == rtnl.ProtoKernel:
			r.MTU, r.AdvMSS = 2044, 65480
		case r.Type == rtnl.Broadcast || r.Type == rtnl.Multicast:
			r.MTU = 2044
		default:
			continue
		}
		if err := d.SetRoute(r); err != nil {
			t.Fatal(err)
		}
		want[r.Key()] = r
	}
	g := rtnl.Route{Dst: netip.MustParsePrefix("224.0.0.0/4"), Type: rtnl.Multicast, MTU: 2044}
	if err := d.SetRoute(g); err != nil {
		t.Fatal(err)
	}
	if len(want) != 4 { // subnet, broadcast, fe80::/64, ff00::/8
		t.Errorf("repaired %d routes, want 4: %v", len(want), want)
	}
	snap := snapshot(t, d)
	for _, r := range snap.Routes {
		if w, ok := want[r.Key()]; ok && r != w {
			t.Errorf("have %#v\nwant %#v", r, w)
		}
		delete(want, r.Key())
	}
	if len(want) != 0 {
		t.Errorf("lost: %v", want)
	}
	// 4755-5-3
	switch got := find(snap, to("224.0.0.0/4")); {
	case len(got) != 1:
		t.Errorf("224.0.0.0/4: got has %v elements, want 1", len(got))
	case got[0].MTU != 2044:
		t.Errorf("224.0.0.0/4: MTU is %v, want 2044", got[0].MTU)
	case got[0].Protocol != rtnl.Protocol:
		t.Errorf("224.0.0.0/4: Protocol is %v, want %v", got[0].Protocol, rtnl.Protocol)
	}
	if after := snapshot(t, other).Routes; !slices.Equal(before, after) {
		t.Errorf("routes of the other interface changed:\n%v\n%v", before, after)
	}
	// The kernel still finds its connected route when the address goes.
	if err := d.DelAddr(netip.MustParsePrefix("10.9.0.1/24")); err != nil {
		t.Fatal(err)
	}
	if got := find(snapshot(t, d), to("10.9.0.0/24")); len(got) != 0 {
		t.Errorf("connected route outlives its address: %v", got)
	}
}

func TestLeftoversAreRemoved(t *testing.T) {
	inNetns(t)
	d := openUp(t, newTUN(t, "ibcm0"))
	add(t, d, "10.9.0.1/24", "fd09::1/64")
	for _, r := range []rtnl.Route{
		{Dst: netip.MustParsePrefix("10.9.0.2/32"), MTU: 8996},
		{Dst: netip.MustParsePrefix("fd09::2/128"), MTU: 8996},
		{Dst: netip.MustParsePrefix("224.0.0.0/4"), Type: rtnl.Multicast, MTU: 2044},
		{Dst: netip.MustParsePrefix("10.9.0.3/32"), MTU: 8996, Metric: tempMetric}, // of a crash within SetRoute
		{Dst: netip.MustParsePrefix("10.77.0.0/16"), Via: netip.MustParseAddr("10.9.0.254"), Protocol: rtnl.ProtoStatic},
	} {
		if err := d.SetRoute(r); err != nil {
			t.Fatal(err)
		}
	}
	if n, err := d.RemoveOurs(); n != 4 || err != nil {
		t.Errorf("removed %d (%v), want 4", n, err)
	}
	if got := find(snapshot(t, d), func(r rtnl.Route) bool { return r.Protocol == rtnl.Protocol }); got != nil {
		t.Errorf("left: %v", got)
	}
	if got := every(t, d, unix.AF_INET, "10.77.0.0/16"); len(got) != 1 {
		t.Errorf("the user's route: have %v, want one", got)
	}
}

func TestEventsFollowTheKernel(t *testing.T) {
	inNetns(t)
	d := openUp(t, newTUN(t, "ibcm0"))
	newVeth(t, "eth0", "eth1")
	eth, _ := netlink.LinkByName("eth0")
	var s state
	s.until(t, d, "first snapshot and link up", func() bool { return s.resync == 1 && s.link.Up && s.link.MTU == 65520 })

	add(t, d, "10.9.0.1/24", "fd09::1/64")
	s.until(t, d, "address and connected route", func() bool {
		_, ok := s.addrs[netip.MustParsePrefix("10.9.0.1/24")]
		return ok && s.has("10.9.0.0/24")
	})
	s.same(t, d, "addresses added")

	via := rtnl.Route{Dst: netip.MustParsePrefix("10.77.0.0/16"), Via: netip.MustParseAddr("10.9.0.254")}
	via6 := rtnl.Route{Dst: netip.MustParsePrefix("fd77::/32"), Via: netip.MustParseAddr("fd09::fe")}
	mixed := rtnl.Route{Dst: netip.MustParsePrefix("10.78.0.0/16"), Via: netip.MustParseAddr("fd09::fe")}
	for _, r := range []rtnl.Route{via, via6, mixed} {
		if err := d.SetRoute(r); err != nil {
			t.Fatal(err)
		}
	}
	s.until(t, d, "gateway routes", func() bool {
		return s.has("10.77.0.0/16") && s.has("fd77::/32") &&
			s.has("10.78.0.0/16")
	})
	if r := find(snapshot(t, d), to("10.78.0.0/16")); len(r) != 1 || r[0].Via != mixed.Via {
		t.Errorf("IPv4 route via IPv6: %v", r)
	}
	s.same(t, d, "gateways")

	// Taken over by another device with the kernel's own replace.
	if err := netlink.RouteReplace(&netlink.Route{LinkIndex: eth.Attrs().Index, Scope: netlink.SCOPE_LINK,
		Dst: ipnet("10.77.0.0/16")}); err != nil {
		t.Fatal(err)
	}
	s.until(t, d, "route taken over", func() bool { return !s.has("10.77.0.0/16") })

	if err := d.DelAddr(netip.MustParsePrefix("10.9.0.1/24")); err != nil {
		t.Fatal(err)
	}
	s.same(t, d, "address removed")
	add(t, d, "10.9.0.1/24")
	s.same(t, d, "address back")
	if err := d.SetUp(false); err != nil {
		t.Fatal(err)
	}
	s.until(t, d, "link down, IPv4 routes gone", func() bool { return !s.link.Up && !s.has("10.9.0.0/24") })
	s.same(t, d, "down")
	if err := d.SetUp(true); err != nil {
		t.Fatal(err)
	}
	s.until(t, d, "link up, connected route back", func() bool { return s.link.Up && s.has("10.9.0.0/24") })
	s.same(t, d, "up")
	if s.resync != 1 {
		t.Errorf("%d resyncs, want only the first", s.resync)
	}
}

func (s *state) has(dst string) bool {
	for k := range s.routes {
		if k.Dst == netip.MustParsePrefix(dst) && k.Table == rtnl.TableMain {
			return true
		}
	}
	return false
}

// A reader that repairs what it hears of must come to rest: what the repair
// itself removes for a moment is not told.
func TestRepairComesToRest(t *testing.T) {
	inNetns(t)
	d := openUp(t, newTUN(t, "ibcm0"))
	add(t, d, "10.9.0.1/24", "fd09::1/64")
	for _, dst := range []string{"10.9.0.2/32", "fd09::2/128"} {
		want := rtnl.Route{Dst: netip.MustParsePrefix(dst), MTU: 65520}
		if err := d.SetRoute(want); err != nil {
			t.Fatal(err)
		}
		foreign := netlink.Route{LinkIndex: d.Index(), Dst: ipnet(dst), Protocol: rtnl.Protocol, MTU: 1400}
		if want.Dst.Addr().Is4() {
			foreign.Scope = netlink.SCOPE_LINK
		} else {
			foreign.Priority = 1024
		}
		for _, edit := range []struct {
			what string
			do   func(*netlink.Route) error
		}{{"changed", netlink.RouteReplace}, {"deleted", netlink.RouteDel}} {
			if edit.what == "deleted" {
				foreign.MTU = 0 // any
			}
			if err := edit.do(&foreign); err != nil {
				t.Fatalf("%s %s: %v", dst, edit.what, err)
			}
			repairs := 0
			for quiet := false; !quiet && repairs < 10; {
				wait := 200 * time.Millisecond
				if repairs == 0 {
					wait = patience
				}
				select {
				case ev := <-d.Events():
					if ev.Route.Dst != want.Dst || ev.Kind == rtnl.RouteSet && ev.Route.MTU == want.MTU {
						continue
					}
					repairs++
					if err := d.SetRoute(want); err != nil {
						t.Fatal(err)
					}
				case <-time.After(wait): // nothing tells that no event will come
					quiet = true
				}
			}
			got := find(snapshot(t, d), to(dst))
			expect.Equal(t, repairs, 1, "%s %s: repairs", dst, edit.what)
			expect.MustEqual(t, len(got), 1, "%s %s: length of got", dst, edit.what)
			expect.Equal(t, got[0].MTU, want.MTU, "%s %s: MTU", dst, edit.what)
		}
	}
}

func TestLaggingReaderGetsResync(t *testing.T) {
	inNetns(t)
	d := openUp(t, newTUN(t, "ibcm0"))
	add(t, d, "10.9.0.1/16")
	for i := range 2 * EventBound {
		r := rtnl.Route{Dst: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 9, byte(1 + i>>8), byte(i)}), 32), MTU: 8996}
		if err := d.SetRoute(r); err != nil {
			t.Fatal(err)
		}
	}
	for end := time.Now().Add(patience); d.Counters().Lagged == 0 && time.Now().Before(end); {
		time.Sleep(time.Millisecond) // nobody reads
	}
	var s state
	s.until(t, d, "second resync", func() bool { return s.resync == 2 })
	s.same(t, d, "after lag")
	if c := d.Counters(); c.Lagged == 0 {
		t.Errorf("counters %+v", c)
	}
}

func TestSocketOverrunGetsResync(t *testing.T) {
	inNetns(t)
	d := openUp(t, newTUN(t, "ibcm0"))
	add(t, d, "10.9.0.1/16")
	var s state
	s.until(t, d, "first", func() bool { return s.resync == 1 })
	d.sub.setBuffer(2304)
	done := make(chan struct{})
	go func() { // keep the watch busy
		defer close(done)
		for i := range 3000 {
			d.SetRoute(rtnl.Route{Dst: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 9, byte(1 + i>>8), byte(i)}), 32),
				MTU: 8996})
		}
	}()
	deadline := time.Now().Add(5 * time.Second)
	for d.Counters().Overflows == 0 {
		if time.Now().After(deadline) {
			t.Skip("this kernel did not overrun the socket")
		}
		select {
		case ev := <-d.Events():
			s.apply(ev)
		default:
		}
	}
	s.until(t, d, "resync after ENOBUFS", func() bool { return s.resync > 1 })
	<-done
	s.same(t, d, "after overrun")
}

func TestGroups(t *testing.T) {
	inNetns(t)
	d := openUp(t, newTUN(t, "ibcm0"))
	add(t, d, "10.9.0.1/24", "fd09::1/64")
	groups, err := d.Groups()
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"224.0.0.1", "ff02::1"} {
		if !slices.Contains(groups, netip.MustParseAddr(want)) {
			t.Errorf("groups %v lack %s", groups, want)
		}
	}
}

func TestParseGroupFiles(t *testing.T) {
	igmp := "Idx\tDevice    : Count Querier\tGroup    Users Timer\tReporter\n" +
		"1\tlo        :     1      V3\n\t\t\t\t010000E0     1 0:00000000\t\t0\n" +
		"12\tibcm0     :     2      V3\n\t\t\t\tFB0000E0     1 0:00000000\t\t0\n\t\t\t\t010000E0     1 0:00000000\t\t0\n"
	got := parseIGMP(igmp, 12)
	want := []netip.Addr{netip.MustParseAddr("224.0.0.251"), netip.MustParseAddr("224.0.0.1")}
	if u32([]byte{1, 0, 0, 0}) == 1 && !slices.Equal(got, want) {
		t.Errorf("igmp: %v, want %v", got, want)
	}
	igmp6 := "1    lo              ff020000000000000000000000000001     1 0000000C 0\n" +
		"12   ibcm0           ff0200000000000000000001ff000001     1 00000004 0\n12   ibcm0           zz\n"
	if got := parseIGMP6(igmp6, 12); len(got) != 1 || got[0] != netip.MustParseAddr("ff02::1:ff00:1") {
		t.Errorf("igmp6: %v", got)
	}
}

func TestFlushExceptions(t *testing.T) {
	inNetns(t)
	d := openUp(t, newTUN(t, "ibcm0"))
	add(t, d, "10.9.0.1/24", "fd09::1/64")
	for _, r := range []rtnl.Route{
		{Dst: netip.MustParsePrefix("10.77.0.0/16"), Via: netip.MustParseAddr("10.9.0.254"), Protocol: rtnl.ProtoStatic},
		{Dst: netip.MustParsePrefix("fd77::/32"), Via: netip.MustParseAddr("fd09::fe"), Protocol: rtnl.ProtoStatic},
	} {
		if err := d.SetRoute(r); err != nil {
			t.Fatal(err)
		}
	}
	far4, far6 := netip.MustParseAddr("10.77.0.5"), netip.MustParseAddr("fd77::5")
	ours4, ours6 := netip.MustParseAddr("10.9.0.1"), netip.MustParseAddr("fd09::1")
	learn(t, tunSide(t), far4, ours4, far6, ours6)
	if got := find(snapshot(t, d), to("fd77::5/128")); got != nil {
		t.Errorf("an exception shows as a route: %v", got)
	}
	if err := d.FlushExceptions(); err != nil {
		t.Fatal(err)
	}
	for _, a := range []netip.Addr{far4, far6} {
		if got := kernelMTU(t, a); got != 0 && got != 65520 {
			t.Errorf("path MTU for %v after the flush: %d", a, got)
		}
	}
}

// learn makes the kernel learn path MTU 1400 to far4 and far6 from what comes out of
// tun.
func learn(t *testing.T, tun *os.File, far4, ours4, far6, ours6 netip.Addr) {
	t.Helper()
	learned := func() bool { return kernelMTU(t, far4) == 1400 && kernelMTU(t, far6) == 1400 }
	for deadline := time.Now().Add(patience); !learned(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("the kernel did not learn: %d, %d", kernelMTU(t, far4), kernelMTU(t, far6))
		}
		tun.Write(tooBig4(far4, ours4, 1400))
		tun.Write(tooBig6(far6, ours6, 1400)) // not heard while ours is tentative
	}
}

// tooBig4 is an ICMP fragmentation needed from far about an echo reply of ours:
// for a request the kernel leaves it to the socket.
func tooBig4(far, ours netip.Addr, mtu uint16) []byte {
	quote := ipv4(1, ours, far, []byte{0, 0, 0, 0, 0, 1, 0, 1})
	icmp := append([]byte{3, 4, 0, 0, 0, 0, byte(mtu >> 8), byte(mtu)}, quote...)
	binary.BigEndian.PutUint16(icmp[2:], checksum(icmp))
	return ipv4(1, far, ours, icmp)
}

func ipv4(proto byte, src, dst netip.Addr, payload []byte) []byte {
	n := 20 + len(payload)
	b := []byte{0x45, 0, byte(n >> 8), byte(n), 0, 1, 0, 0, 64, proto, 0, 0}
	b = append(append(b, src.AsSlice()...), dst.AsSlice()...)
	binary.BigEndian.PutUint16(b[10:], checksum(b))
	return append(b, payload...)
}

// tooBig6 is an ICMPv6 packet too big from far about an echo of ours.
func tooBig6(far, ours netip.Addr, mtu uint32) []byte {
	quote := ipv6(ours, far, []byte{128, 0, 0, 0, 0, 1, 0, 1})
	icmp := append([]byte{2, 0, 0, 0, 0, 0, byte(mtu >> 8), byte(mtu)}, quote...)
	pseudo := append(append(far.AsSlice(), ours.AsSlice()...), 0, 0, byte(len(icmp)>>8), byte(len(icmp)), 0, 0, 0, 58)
	binary.BigEndian.PutUint16(icmp[2:], checksum(append(pseudo, icmp...)))
	return ipv6(far, ours, icmp)
}

func ipv6(src, dst netip.Addr, payload []byte) []byte {
	b := []byte{0x60, 0, 0, 0, byte(len(payload) >> 8), byte(len(payload)), 58, 64}
	return append(append(append(b, src.AsSlice()...), dst.AsSlice()...), payload...)
}

func checksum(b []byte) uint16 {
	var sum uint32
	for i := 0; i < len(b)-1; i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

func TestSysctls(t *testing.T) {
	inNetns(t)
	index := newTUN(t, "ibcm0")
	d := openUp(t, index)
	// From a thread in another namespace too.
	done := make(chan error)
	go func() { done <- d.SetSysctl("ipv6", "accept_ra_mtu", "0") }()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		"accept_ra_mtu": "0\n", "addr_gen_mode": "1\n",
	} {
		b, err := os.ReadFile("/proc/sys/net/ipv6/conf/ibcm0/" + path)
		if err != nil || string(b) != want {
			t.Errorf("%s = %q (%v), want %q", path, b, err, want)
		}
	}
	if err := d.SetSysctl("ipv6", "no_such_thing", "0"); err == nil {
		t.Error("an unknown sysctl was accepted")
	}
	for _, a := range snapshot(t, d).Addrs {
		t.Errorf("kernel made address %v", a)
	}
}

// An address can be bound as soon as it is there, and receives soon after.
func TestAddedAddressIsUsable(t *testing.T) {
	inNetns(t)
	d := openUp(t, newTUN(t, "ibcm0"))
	if err := d.h.LinkSetUp(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: 1}}); err != nil {
		t.Fatal(err) // packets to oneself travel by the loopback device
	}
	for i := range 50 {
		p := netip.MustParsePrefix(fmt.Sprintf("fd00::%x/64", i+1))
		if err := d.AddAddr(p); err != nil {
			t.Fatal(err)
		}
		self := net.UDPAddrFromAddrPort(netip.AddrPortFrom(p.Addr(), 4000))
		c, err := net.ListenUDP("udp", self)
		if err != nil {
			t.Fatalf("bind %s: %v", p.Addr(), err)
		}
		if !d.WaitAddr(p.Addr(), patience) {
			t.Fatalf("%s does not receive", p.Addr())
		}
		c.SetDeadline(time.Now().Add(patience))
		if _, err := c.WriteTo([]byte("x"), self); err != nil {
			t.Fatal(err)
		}
		if _, _, err := c.ReadFrom(make([]byte, 1)); err != nil {
			t.Fatalf("%s is said to receive: %v", p.Addr(), err)
		}
		c.Close()
	}
	if d.WaitAddr(netip.MustParseAddr("fd00::99"), 10*time.Millisecond) {
		t.Error("an address that nobody has is said to receive")
	}
}

func TestDevices(t *testing.T) {
	inNetns(t)
	newVeth(t, "eth0", "eth1")
	infos, err := Devices()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, i := range infos {
		names = append(names, i.Link.Name)
	}
	if !slices.IsSorted(names[1:]) || len(names) != 3 {
		t.Logf("names %v", names)
	}
	i, err := Underlay("eth0")
	if err != nil {
		t.Fatal(err)
	}
	expect.Equal(t, i.Driver, "veth", "eth0: Driver")
	expect.Equal(t, i.Link.Type, "veth", "eth0: Link.Type")
	expect.Equal(t, i.Link.MTU, 1500, "eth0: Link.MTU")
	expect.Equal(t, i.Link.Up, true, "eth0: Link.Up")
	if i.Speed != 10000 {
		t.Errorf("speed %d, want 10000", i.Speed)
	}
	if len(i.Features) == 0 {
		t.Errorf("no features")
	}
	t.Logf("features %v rdma %q", i.Features, i.RDMA)
	tentative := false
	for _, a := range i.Addrs {
		tentative = tentative || a.Tentative
	}
	if !tentative { // the link-local address of a veth is, for a second
		t.Errorf("no tentative address: %v", i.Addrs)
	}
	if _, err := Underlay("nope"); !errors.Is(err, ErrNotFound) {
		t.Errorf("unknown device: %v", err)
	}
}

func TestDeviceRemoved(t *testing.T) {
	inNetns(t)
	index := newVeth(t, "eth0", "eth1")
	d, err := Open(index)
	if err != nil {
		t.Fatal(err)
	}
	l, _ := netlink.LinkByIndex(index)
	netlink.LinkDel(l)
	var s state
	s.until(t, d, "device gone", func() bool { return s.link.Gone })
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	for range d.Events() {
	}
	if _, err := Open(index); err == nil {
		t.Error("opened a device that is gone")
	}
}

func FuzzParse(f *testing.F) {
	f.Add(appendRoute(nil, rtnl.Route{Dst: netip.MustParsePrefix("10.9.0.2/32"), MTU: 8996, AdvMSS: 8956,
		Table: 254, Protocol: 75}, 7, false))
	f.Add(appendRoute(nil, rtnl.Route{Dst: netip.MustParsePrefix("10.9.0.0/24"),
		Via: netip.MustParseAddr("fe80::1"), OnLink: true}, 7, false))
	f.Fuzz(func(t *testing.T, b []byte) {
		parseAddr(b)
		m, err := parseRoute(b)
		if err != nil {
			return
		}
		r := m.Route
		m2, err := parseRoute(appendRoute(nil, r, m.oif, false))
		if err != nil {
			t.Fatalf("%+v: %v", r, err)
		}
		m2.Expires, m2.Other = r.Expires, r.Other
		if r.Table != 0 && r.Type != 0 && r.Dst == r.Dst.Masked() && r.MTU == 0 {
			expect.MustEqual(t, m2.Key(), r.Key(), "what is read of a route that was written")
		}
	})
}

func ipnet(s string) *net.IPNet { n, _ := netlink.ParseIPNet(s); return n }
