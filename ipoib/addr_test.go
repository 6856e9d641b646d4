package ipoib

import (
	"net/netip"
	"slices"
	"testing"
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
