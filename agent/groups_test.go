package agent

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"ipoibcm/fib"
	"ipoibcm/ipoib"
	"ipoibcm/rtnl"
)

// address is an event of the kernel's.
func address(kind rtnl.EventKind, p string) ipoib.Event {
	addr := rtnl.Addr{Prefix: netip.MustParsePrefix(p)}
	return ipoib.FIBEvent{Event: fib.Host{Event: rtnl.Event{Kind: kind, Addr: addr}}}
}

// The data path hears of the broadcasts of our subnets as addresses come and go:
// it drops what a connection brings for them. 4755-2.1-2, 4755-7-3
func TestBroadcastsReachTheDataPath(t *testing.T) {
	a, _ := newAgent(t)
	for _, tt := range []struct {
		name string
		ev   ipoib.Event
		want []netip.Addr
	}{
		{"another subnet", address(rtnl.AddrSet, "10.16.0.1/12"),
			[]netip.Addr{netip.MustParseAddr("10.0.0.255"), netip.MustParseAddr("10.31.255.255")}},
		{"a link of two hosts, which has no broadcast (RFC 3021)", address(rtnl.AddrSet, "192.0.2.0/31"),
			[]netip.Addr{netip.MustParseAddr("10.0.0.255"), netip.MustParseAddr("10.31.255.255")}},
		{"the first address goes", address(rtnl.AddrGone, "10.0.0.1/24"),
			[]netip.Addr{netip.MustParseAddr("10.31.255.255")}},
	} {
		for _, act := range a.m.Step(nil, time.Now(), tt.ev) {
			if p, ok := act.(ipoib.PublishGroups); ok {
				a.publishGroups(p.Table)
			}
		}
		if got := a.loop.Broadcasts(); !slices.Equal(got, tt.want) {
			t.Errorf("%s: the data path knows broadcasts %v, want %v", tt.name, got, tt.want)
		}
	}
}
