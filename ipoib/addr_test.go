package ipoib

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"ipoibcm/fib"
	"ipoibcm/rtnl"
	"ipoibcm/wire/ip"
)

// An address that the device has with two lengths is there until both are gone.
func TestAddrs(t *testing.T) {
	long, short := netip.MustParsePrefix("10.0.0.1/24"), netip.MustParsePrefix("10.0.0.1/16")
	s := addrs{prefixes: map[netip.Addr][]netip.Prefix{}}
	if !s.add(long) || !s.add(short) {
		t.Error("a prefix is not new, want both new")
	}
	if s.add(long) {
		t.Error("a prefix is new twice")
	}
	if got, want := s.sorted(), []netip.Prefix{short, long}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	if !s.remove(long) {
		t.Error("a prefix that is there cannot be removed")
	}
	if !s.has(long.Addr()) {
		t.Error("the address is gone with the first of two lengths")
	}
	if s.remove(long) {
		t.Error("a prefix is removed twice")
	}
	if !s.remove(short) {
		t.Error("the last prefix cannot be removed")
	}
	if s.has(long.Addr()) {
		t.Error("the address is there without a length")
	}
}

// The link-local address comes back with IPv6, whether or not the kernel had said that it was there, and that it went.
func TestLinkLocalComesBack(t *testing.T) {
	for _, told := range []bool{true, false} {
		w := newWorld(t, 43)
		a := w.node(1, Options{})
		w.run(time.Second)
		own := netip.PrefixFrom(ip.LinkLocal(a.link().GID), 64)
		if told {
			a.delAddr(own.String())
		} else {
			a.addrs = slices.DeleteFunc(a.addrs, func(p netip.Prefix) bool { return p == own })
			a.f.addrs.remove(own)
		}
		groups := rtnl.Route{Dst: netip.MustParsePrefix("ff00::/8"), Type: rtnl.Multicast, Protocol: rtnl.ProtoKernel,
			Table: rtnl.TableLocal}
		for _, kind := range []rtnl.EventKind{rtnl.RouteGone, rtnl.RouteSet} {
			if slices.Contains(a.addrs, own) {
				t.Fatalf("told %v: %v is there without IPv6", told, own)
			}
			a.step(FIBEvent{fib.Host{Event: rtnl.Event{Kind: kind, Route: groups}}})
		}
		w.run(time.Second)
		if !slices.Contains(a.addrs, own) {
			t.Errorf("told %v: the addresses are %v, want %v among them", told, a.addrs, own)
		}
	}
}
