package softroce

import (
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/internal/ownnet"
)

// The tests run in a network namespace of their own.
func TestMain(m *testing.M) { ownnet.Main(m, prepareLoopback) }

const lo6a, lo6b = "fd00:1b::1", "fd00:1b::2"

func prepareLoopback(lo netlink.Link) error {
	if err := netlink.LinkSetMulticastOn(lo); err != nil {
		return err
	}
	for _, s := range []string{lo6a, lo6b} {
		a, _ := netlink.ParseAddr(s + "/64")
		a.Flags = unix.IFA_F_NODAD
		if err := netlink.AddrAdd(lo, a); err != nil {
			return err
		}
	}
	// Groups need a route; lo has none of its own. IPv6 groups cannot have one
	// there: the kernel makes every IPv6 route through lo a reject route.
	n, _ := netlink.ParseIPNet("224.0.0.0/4")
	return netlink.RouteReplace(&netlink.Route{LinkIndex: lo.Attrs().Index, Dst: n, Table: unix.RT_TABLE_MAIN})
}

// own skips t where the test has no namespace of its own.
func own(t testing.TB) {
	t.Helper()
	if !ownnet.Have() {
		t.Skip("needs root for a network namespace of its own")
	}
}

func gid(s string) ib.GID {
	g, err := ib.ParseGID(s)
	if err != nil {
		panic(err)
	}
	return g
}

// open opens a device and closes it with the test.
func open(t testing.TB, o Options) *Device {
	t.Helper()
	d, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Close() })
	return d
}

// family names the addresses of two devices on the loopback.
type family struct{ name, a, b string }

var families = []family{{"IPv4", "127.0.0.1", "127.0.0.2"}, {"IPv6", lo6a, lo6b}}

// pair opens two devices on the loopback.
func pair(t testing.TB, f family, change func(*Options)) (a, b *Device) {
	t.Helper()
	if f.name == "IPv6" {
		own(t)
	}
	oa, ob := Options{Underlay: "lo", GID: gid(f.a)}, Options{Underlay: "lo", GID: gid(f.b)}
	if change != nil {
		change(&oa)
		change(&ob)
	}
	return open(t, oa), open(t, ob)
}

// vethPair opens two devices on the ends of a veth pair, the second in another
// namespace. They use link-local GIDs, or 10.99.0.1 and 10.99.0.2.
func vethPair(t testing.TB, mtu int, v4 bool, change func(*Options)) (a, b *Device) {
	t.Helper()
	return vethPairDAD(t, mtu, v4, false, change)
}

// vethPairDAD is vethPair, with link-local addresses tentative at first or not.
func vethPairDAD(t testing.TB, mtu int, v4, dad bool, change func(*Options)) (a, b *Device) {
	t.Helper()
	own(t)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	here, err := netns.Get()
	must(t, err)
	defer here.Close()
	there, err := netns.New() // and enters it
	must(t, err)
	t.Cleanup(func() { there.Close() })
	setDAD := func() { // in the namespace of this thread
		must(t, os.WriteFile("/proc/sys/net/ipv6/conf/default/accept_dad", []byte(map[bool]string{true: "1", false: "0"}[dad]), 0))
	}
	setDAD()
	must(t, netns.Set(here))
	setDAD()
	must(t, netns.Set(there))
	hs, err := netlink.NewHandleAt(here, unix.NETLINK_ROUTE)
	must(t, err)
	defer hs.Close()
	must(t, hs.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "va", MTU: mtu}, PeerName: "vb", PeerMTU: uint32(mtu), PeerNamespace: netlink.NsFd(int(there))}))
	up := func(h *netlink.Handle, name, addr string) {
		link, err := h.LinkByName(name)
		must(t, err)
		ip, _ := netlink.ParseAddr(addr)
		must(t, h.AddrAdd(link, ip))
		must(t, h.LinkSetUp(link))
	}
	ht, err := netlink.NewHandleAt(there, unix.NETLINK_ROUTE)
	must(t, err)
	defer ht.Close()
	up(hs, "va", "10.99.0.1/24")
	up(ht, "vb", "10.99.0.2/24")
	o := Options{Underlay: "vb"}
	if v4 {
		o.GID = gid("10.99.0.2")
	}
	if change != nil {
		change(&o)
	}
	b, err = Open(o) // waits for the tentative address
	must(t, netns.Set(here))
	must(t, err)
	t.Cleanup(func() {
		_ = b.Close()
		if l, err := netlink.LinkByName("va"); err == nil {
			_ = netlink.LinkDel(l)
		}
	})
	o = Options{Underlay: "va"}
	if v4 {
		o.GID = gid("10.99.0.1")
	}
	if change != nil {
		change(&o)
	}
	return open(t, o), b
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// patience bounds waits for what takes milliseconds on an idle machine.
const patience = time.Minute

// until waits for cond.
func until(t testing.TB, what string, cond func() bool) {
	t.Helper()
	expect.Eventually(t, what, cond)
}
