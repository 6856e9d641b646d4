package hostnet

import (
	"net/netip"
	"slices"
	"testing"
)

func TestProxies(t *testing.T) {
	inNetns(t)
	tun := newTUN(t, "ibcm0")
	newVeth(t, "v0", "v1")
	d := openUp(t, tun)
	ip(t, `
neigh add proxy 10.9.0.7 dev ibcm0
neigh add proxy fd09::7 dev ibcm0
neigh add proxy 10.9.0.8 dev v0
neigh add 10.9.0.9 lladdr 02:00:00:00:00:09 dev v0
`)
	got, err := d.Proxies()
	if err != nil {
		t.Fatal(err)
	}
	slices.SortFunc(got, netip.Addr.Compare)
	want := []netip.Addr{netip.MustParseAddr("10.9.0.7"), netip.MustParseAddr("fd09::7")}
	if !slices.Equal(got, want) {
		t.Errorf("proxies %v, want %v", got, want)
	}
}

func FuzzProxy(f *testing.F) {
	f.Add([]byte{2, 0, 0, 0, 3, 0, 0, 0, 0, 0, 8, 0, 8, 0, 1, 0, 10, 9, 0, 7})
	f.Fuzz(func(t *testing.T, b []byte) {
		if a, index, err := parseProxy(b); err == nil && len(b) < 12 {
			t.Fatalf("%d octets gave %v %d", len(b), a, index)
		}
	})
}
