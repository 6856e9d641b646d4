package node

import (
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"

	"github.com/vishvananda/netns"
)

// here is the network namespace of the calling thread, as a path.
const here = "/proc/thread-self/ns/net"

// newPod puts the test into a pod's network namespace: eth0 with the pod's default routes, and net1 with an
// address of each family. The thread is not given back, so it ends with the test.
func newPod(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root to make a network namespace")
	}
	runtime.LockOSThread()
	ns, err := netns.New()
	if err != nil {
		t.Skipf("cannot make a network namespace: %v", err)
	}
	t.Cleanup(func() { ns.Close() })
	ip(t, "link add eth0 type veth peer name eth0-far")
	ip(t, "link add net1 type veth peer name net1-far")
	for _, dev := range []string{"eth0", "eth0-far", "net1", "net1-far"} {
		ip(t, "link set "+dev+" up")
	}
	ip(t, "address add 10.1.0.2/24 dev eth0")
	ip(t, "address add fd01::2/64 dev eth0 nodad")
	ip(t, "route add default via 10.1.0.1")
	ip(t, "route add default via fd01::1")
	ip(t, "address add 10.77.0.5/24 dev net1")
	ip(t, "address add fd77::5/64 dev net1 nodad")
}

// ip returns what iproute2 prints, in the namespace of the calling thread.
func ip(t *testing.T, line string) string {
	t.Helper()
	out, err := exec.Command("ip", strings.Fields(line)...).CombinedOutput()
	if err != nil {
		t.Fatalf("ip %s: %v\n%s", line, err, out)
	}
	return string(out)
}

func route(dst, gw string) (r Route) {
	r.Dst = netip.MustParsePrefix(dst)
	if gw != "" {
		r.GW = netip.MustParseAddr(gw)
	}
	return r
}

// A route has what the configuration says of it, and leaves those of the pod's other interfaces alone.
func TestRoutes(t *testing.T) {
	for _, tt := range []struct {
		name  string
		route Route
		set   func(*Route)
		show  string // what to ask the kernel for
		want  string // in the answer
		err   string // in the error; empty: there is none
	}{
		{"a default route in a table of its own", route("0.0.0.0/0", "10.77.0.1"), func(r *Route) { r.Table = 100 },
			"-4 route show table 100", "default via 10.77.0.1 dev net1", ""},
		{"a table above 255", route("0.0.0.0/0", "10.77.0.1"), func(r *Route) { r.Table = 1000 },
			"-4 route show table 1000", "default via 10.77.0.1 dev net1", ""},
		{"a priority beside the pod's default route", route("0.0.0.0/0", "10.77.0.1"), func(r *Route) { r.Priority = 50 },
			"-4 route show default", "default via 10.77.0.1 dev net1 metric 50", ""},
		{"the same of IPv6", route("::/0", "fd77::1"), func(r *Route) { r.Priority = 50 },
			"-6 route show default", "default via fd77::1 dev net1 metric 50", ""},
		{"MTU and MSS", route("10.88.0.0/16", "10.77.0.1"), func(r *Route) { r.MTU, r.AdvMSS = 9000, 1400 },
			"route show 10.88.0.0/16", "mtu 9000 advmss 1400", ""},
		{"a scope", route("10.88.0.0/16", ""), func(r *Route) { r.Scope = new(0) },
			"route show 10.88.0.0/16 scope global", "dev net1", ""},
		{"to the link", route("10.88.0.0/16", ""), nil, "route show 10.88.0.0/16 scope link", "dev net1", ""},
		{"in the place of the address's own", route("10.77.0.0/24", ""), func(r *Route) { r.MTU = 9000 },
			"route show 10.77.0.0/24", "dev net1 scope link mtu 9000", ""},
		{"in the place of the pod's default route", route("0.0.0.0/0", "10.77.0.1"), nil, "-4 route show", "", "one of eth0"},
		{"the same of IPv6", route("::/0", "fd77::1"), nil, "-6 route show", "", "one of eth0"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			newPod(t)
			if tt.set != nil {
				tt.set(&tt.route)
			}
			for _, time := range []string{"first", "again"} { // as after the death of an agent
				err := addRoutes(here, "net1", []Route{tt.route})
				if tt.err == "" && err != nil {
					t.Fatalf("%s: %v", time, err)
				}
				if tt.err != "" && (err == nil || !strings.Contains(err.Error(), tt.err)) {
					t.Errorf("%s: got %v, want an error with %q", time, err, tt.err)
				}
			}
			if got := ip(t, tt.show); !strings.Contains(got, tt.want) {
				t.Errorf("ip %s: got %q, want %q in it", tt.show, got, tt.want)
			}
			for _, family := range []string{"-4", "-6"} {
				if got := ip(t, family+" route show default dev eth0"); !strings.HasPrefix(got, "default via ") {
					t.Errorf("default routes of eth0 with %s: got %q, want the one that it had", family, got)
				}
			}
		})
	}
}

// CHECK finds what an interface has lost of what it was given.
func TestLacks(t *testing.T) {
	for _, tt := range []struct {
		name string
		undo []string // lines of iproute2
		want string   // in the error; empty: there is none
	}{
		{"nothing", nil, ""},
		{"up", []string{"link set net1 down"}, "is down"},
		{"an address", []string{"address del 10.77.0.5/24 dev net1"}, "its address 10.77.0.5/24"},
		{"an address's prefix length", []string{"address del 10.77.0.5/24 dev net1", "address add 10.77.0.5/32 dev net1"},
			"its address 10.77.0.5/24"},
		{"a route", []string{"route del 10.88.0.0/16"}, "its route to 10.88.0.0/16"},
		{"a route of IPv6", []string{"route del fd88::/64"}, "its route to fd88::/64"},
		{"a route of another table", []string{"route del default table 100"}, "its route to 0.0.0.0/0"},
		{"the gateway of a route", []string{"route replace 10.88.0.0/16 via 10.77.0.2"}, "its route to 10.88.0.0/16"},
		{"a route to another interface", []string{"route replace 10.88.0.0/16 via 10.1.0.1"}, "its route to 10.88.0.0/16"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			newPod(t)
			a := Attachment{Key: Key{IfName: "net1"}, Netns: here,
				Addresses: []netip.Prefix{netip.MustParsePrefix("10.77.0.5/24"), netip.MustParsePrefix("fd77::5/64")},
				Routes: []Route{route("10.88.0.0/16", "10.77.0.1"), route("10.77.0.0/24", ""), route("fd88::/64", "fd77::1"),
					{Dst: netip.MustParsePrefix("0.0.0.0/0"), GW: netip.MustParseAddr("10.77.0.1"), Table: 100}}}
			if err := addRoutes(here, "net1", a.Routes); err != nil {
				t.Fatal(err)
			}
			for _, line := range tt.undo {
				ip(t, line)
			}
			err := lacks(&a)
			if tt.want == "" && err != nil {
				t.Errorf("got %v, want nothing wrong", err)
			}
			if tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
				t.Errorf("got %v, want an error with %q", err, tt.want)
			}
		})
	}
}
