package hostnet

import (
	"net/netip"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"ipoibcm/rtnl"
)

// inNetns puts the test, beside others, on a thread in a network namespace of its own.
func inNetns(t *testing.T) {
	t.Helper()
	t.Parallel()
	newNetns(t)
}

// newNetns puts the test into a network namespace of its own. The thread is not given
// back, so it ends with the test.
func newNetns(t *testing.T) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root to make a network namespace")
	}
	runtime.LockOSThread()
	ns, err := netns.New()
	if err != nil {
		t.Skipf("cannot make a network namespace: %v", err)
	}
	t.Cleanup(func() { ns.Close() })
}

// newTUN makes a persistent TUN, as the agent's is but without anyone behind it.
func newTUN(t *testing.T, name string) int {
	t.Helper()
	l := &netlink.Tuntap{LinkAttrs: netlink.LinkAttrs{Name: name}, Mode: netlink.TUNTAP_MODE_TUN,
		Flags: netlink.TUNTAP_NO_PI, Queues: 1}
	if err := netlink.LinkAdd(l); err != nil {
		t.Skipf("cannot make a TUN: %v", err)
	}
	tunFiles.Store(t.Name(), l.Fds[0])
	t.Cleanup(func() { l.Fds[0].Close() })
	got, err := netlink.LinkByName(name)
	if err != nil {
		t.Fatal(err)
	}
	return got.Attrs().Index
}

// tunFiles holds, by test, the file behind its TUN.
var tunFiles sync.Map

// tunSide is the other side of the test's TUN.
func tunSide(t *testing.T) *os.File {
	f, _ := tunFiles.Load(t.Name())
	return f.(*os.File)
}

func newVeth(t *testing.T, name, peer string) int {
	t.Helper()
	if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: peer}); err != nil {
		t.Fatal(err)
	}
	for _, n := range []string{name, peer} {
		l, err := netlink.LinkByName(n)
		if err != nil {
			t.Fatal(err)
		}
		netlink.LinkSetUp(l)
	}
	l, _ := netlink.LinkByName(name)
	return l.Attrs().Index
}

// settledVeth is newVeth, and the kernel has begun with IPv6 on both. There is no duplicate address detection
// from now on: its end would be a change that nobody made.
func settledVeth(t *testing.T, name, peer string) {
	t.Helper()
	for _, which := range []string{"all", "default"} {
		if err := os.WriteFile("/proc/sys/net/ipv6/conf/"+which+"/accept_dad", []byte("0"), 0); err != nil {
			t.Fatal(err)
		}
	}
	newVeth(t, name, peer)
	awaitIPv6(t, 2, 2)
}

// awaitIPv6 waits until so many addresses of IPv6 count, and so many devices have it: the kernel begins with that
// some time after a device came up.
func awaitIPv6(t *testing.T, addrs, devices int) {
	t.Helper()
	for end := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		routes := ipOut(t, "-6", "route", "show", "table", "local")
		if strings.Count(routes, "local ") >= addrs && strings.Count(routes, "multicast ") >= devices {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%d addresses and %d devices are to have IPv6:\n%s", addrs, devices, routes)
		}
	}
}

func openUp(t *testing.T, index int) *Device {
	t.Helper()
	d, err := Open(index)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	for _, err := range []error{d.SetMTU(65520), d.DisableAddrGen(), d.IgnoreRAMTU(), d.SetUp(true)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	return d
}

func add(t *testing.T, d *Device, prefixes ...string) {
	t.Helper()
	for _, p := range prefixes {
		if err := d.AddAddr(netip.MustParsePrefix(p)); err != nil {
			t.Fatal(err)
		}
	}
}

func snapshot(t *testing.T, d *Device) rtnl.Snapshot {
	t.Helper()
	s, err := d.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// find returns the routes of s that ok likes.
func find(s rtnl.Snapshot, ok func(rtnl.Route) bool) (rs []rtnl.Route) {
	for _, r := range s.Routes {
		if ok(r) {
			rs = append(rs, r)
		}
	}
	return rs
}

// every returns the routes to dst through the device, whoever made them.
func every(t *testing.T, d *Device, family byte, dst string) []rtnl.Route {
	t.Helper()
	routes, err := d.dumpRoutes(family, 0, 0)
	if err != nil {
		t.Fatal(err)
	}
	return find(rtnl.Snapshot{Routes: routes}, to(dst))
}

func to(dst string) func(rtnl.Route) bool {
	p := netip.MustParsePrefix(dst)
	return func(r rtnl.Route) bool { return r.Dst == p }
}

// state follows Events as a user of the package does.
type state struct {
	link   rtnl.Link
	addrs  map[netip.Prefix]rtnl.Addr
	routes map[rtnl.Key]rtnl.Route
	resync int
}

func (s *state) apply(ev rtnl.Event) {
	switch ev.Kind {
	case rtnl.Resync:
		s.resync++
		s.link, s.addrs, s.routes = ev.Snapshot.Link, map[netip.Prefix]rtnl.Addr{}, map[rtnl.Key]rtnl.Route{}
		for _, a := range ev.Snapshot.Addrs {
			s.addrs[a.Prefix] = a
		}
		for _, r := range ev.Snapshot.Routes {
			s.routes[r.Key()] = r
		}
	case rtnl.AddrSet:
		s.addrs[ev.Addr.Prefix] = ev.Addr
	case rtnl.AddrGone:
		delete(s.addrs, ev.Addr.Prefix)
	case rtnl.RouteSet:
		s.routes[ev.Route.Key()] = ev.Route
	case rtnl.RouteGone:
		delete(s.routes, ev.Route.Key())
	case rtnl.LinkChange:
		s.link = ev.Link
	}
}

// patience bounds waits for what takes milliseconds on an idle machine.
const patience = time.Minute

func (s *state) until(t *testing.T, d *Device, what string, ok func() bool) {
	t.Helper()
	timeout := time.After(patience)
	for !ok() {
		select {
		case ev := <-d.Events():
			s.apply(ev)
		case <-timeout:
			t.Fatalf("never saw: %s\nlink %+v\naddrs %v\nroutes %v", what, s.link, s.addrs, s.routes)
		}
	}
}

// drain applies the events that wait.
func (s *state) drain(d *Device) {
	for {
		select {
		case ev := <-d.Events():
			s.apply(ev)
		default:
			return
		}
	}
}

// same checks that following the events has led to what a fresh look shows.
func (s *state) same(t *testing.T, d *Device, what string) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for {
		s.drain(d)
		snap := snapshot(t, d)
		want := state{}
		want.apply(rtnl.Event{Kind: rtnl.Resync, Snapshot: &snap})
		diff := ""
		for k, r := range want.routes {
			if s.routes[k] != r {
				diff += "\nmissing " + r.String()
			}
		}
		for k, r := range s.routes {
			if _, ok := want.routes[k]; !ok {
				diff += "\nleft over " + r.String()
			}
		}
		if len(s.addrs) != len(want.addrs) {
			diff += "\naddresses"
		}
		if s.link != want.link {
			diff += "\nlink"
		}
		if diff == "" {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: events and snapshot differ:%s", what, diff)
		}
		select {
		case ev := <-d.Events():
			s.apply(ev)
		case <-time.After(50 * time.Millisecond):
		}
	}
}
