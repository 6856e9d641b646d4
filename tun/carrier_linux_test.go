package tun

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// The carrier goes and comes back; addresses and routes of both families, the
// user's and the kernel's, are what they were, and packets come out again.
func TestCarrier(t *testing.T) {
	f := open(t, Options{})
	l, err := netlink.LinkByIndex(f.Index())
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range []string{"fd09::1/64", "fe80::1/64"} {
		a, _ := netlink.ParseAddr(s)
		a.Flags = unix.IFA_F_NODAD
		if err := netlink.AddrAdd(l, a); err != nil {
			t.Fatal(err)
		}
	}
	for _, r := range []netlink.Route{
		{Dst: prefix("192.0.2.0/24"), Gw: net.ParseIP("10.9.0.9")},
		{Dst: prefix("10.9.0.7/32"), MTU: 4000, Scope: netlink.SCOPE_LINK, Protocol: 75},
		{Dst: prefix("2001:db8::/32"), Gw: net.ParseIP("fd09::9")},
		{Dst: prefix("fd09::7/128"), MTU: 4000, Protocol: 75},
	} {
		r.LinkIndex = f.Index()
		if err := netlink.RouteAdd(&r); err != nil {
			t.Fatalf("%v: %v", r, err)
		}
	}
	var before []string
	within(t, "IPv6 has got round to its addresses", func() bool { // a worker of the kernel adds the local routes
		before = state(t, l)
		local := func(ip string) bool {
			return slices.ContainsFunc(before, func(s string) bool { return strings.HasPrefix(s, ip+"/128 via <nil> table 255 ") })
		}
		return local("fd09::1") && local("fe80::1")
	})
	if !running(t, f) {
		t.Fatal("a new interface has no carrier")
	}
	for round := range 3 {
		if err := f.SetCarrier(false); err != nil {
			t.Fatal(err)
		}
		within(t, "no carrier", func() bool { return !running(t, f) })
		if got := state(t, l); !slices.Equal(got, before) {
			t.Errorf("round %d: without carrier there are\n%q, want\n%q", round, got, before)
		}
		if err := f.SetCarrier(true); err != nil {
			t.Fatal(err)
		}
		within(t, "carrier", func() bool { return running(t, f) })
		if got := state(t, l); !slices.Equal(got, before) {
			t.Errorf("round %d: with carrier again there are\n%q, want\n%q", round, got, before)
		}
	}
	c := dial(t)
	within(t, "a packet comes out again", func() bool {
		c.Write([]byte("hello"))
		bufs, sizes := [][]byte{make([]byte, 2000)}, make([]int, 1)
		for n, err := f.TryRead(bufs, sizes); err == nil && n > 0; n, err = f.TryRead(bufs, sizes) {
			if b := bufs[0][:sizes[0]]; b[0]>>4 == 4 && netip.AddrFrom4([4]byte(b[16:20])) == netip.MustParseAddr("10.9.0.2") {
				return true
			}
		}
		return false
	})
	f.Close()
	if err := f.SetCarrier(false); !errors.Is(err, os.ErrClosed) {
		t.Errorf("after Close: %v, want %v", err, os.ErrClosed)
	}
}

func prefix(s string) *net.IPNet {
	_, p, _ := net.ParseCIDR(s)
	return p
}

// running reports whether the interface has a carrier, as the kernel says.
func running(t *testing.T, f *File) bool {
	l, err := netlink.LinkByIndex(f.Index())
	if err != nil {
		t.Fatal(err)
	}
	return l.Attrs().RawFlags&unix.IFF_LOWER_UP != 0
}

// state lists the addresses and routes of l.
func state(t *testing.T, l netlink.Link) (out []string) {
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		addrs, err := netlink.AddrList(l, family)
		if err != nil {
			t.Fatal(err)
		}
		for _, a := range addrs {
			out = append(out, fmt.Sprintf("%v flags %#x", a.IPNet, a.Flags))
		}
		filter := &netlink.Route{LinkIndex: l.Attrs().Index, Table: unix.RT_TABLE_UNSPEC}
		routes, err := netlink.RouteListFiltered(family, filter, netlink.RT_FILTER_OIF|netlink.RT_FILTER_TABLE)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range routes {
			out = append(out, fmt.Sprintf("%v via %v table %d proto %d mtu %d", r.Dst, r.Gw, r.Table, r.Protocol, r.MTU))
		}
	}
	slices.Sort(out)
	return out
}
