package softroce

import (
	"net"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/verbs"
)

// routeTo gives the route from va to a GID an MTU, 0 for none.
func routeTo(t *testing.T, dst ib.GID, mtu int) {
	t.Helper()
	link, err := netlink.LinkByName("va")
	must(t, err)
	ip := dst.Addr().AsSlice()
	host := &net.IPNet{IP: ip, Mask: net.CIDRMask(len(ip)*8, len(ip)*8)}
	r := &netlink.Route{LinkIndex: link.Attrs().Index, Dst: host, MTU: mtu, Scope: unix.RT_SCOPE_LINK}
	if !dst.Is4() {
		r.Scope = unix.RT_SCOPE_UNIVERSE
	}
	must(t, netlink.RouteReplace(r))
}

// The MTU that the user has given a route is that of the path, when the path is
// made and when the route changes; what is too long for it is not sent whole.
func TestRouteMTU(t *testing.T) {
	for _, v4 := range []bool{false, true} {
		t.Run(map[bool]string{false: "IPv6", true: "IPv4"}[v4], func(t *testing.T) {
			a, b := vethPair(t, 9000, v4, nil)
			dst := b.Port().GIDs[0]
			if got := a.PathMTU(dst); got != ib.MTU4096 {
				t.Fatalf("path MTU %v on an underlay of 9000, want 4096", got)
			}
			routeTo(t, dst, 1400)
			until(t, "the route's MTU counts", func() bool { return a.PathMTU(dst) == ib.MTU1024 })
			x, y := newEnd(t, a, ib.UD, 16, 4096).datagram(), newEnd(t, b, ib.UD, 16, 4096).datagram()
			arrives := func(n int) {
				t.Helper()
				_, err := y.qp.PostRecv([]verbs.RecvWR{{ID: 1, SG: y.sge(0, 4096)}})
				must(t, err)
				x.sendTo(dst, y.qp.QPN(), n)
				wc := y.next()
				expect.MustEqual(t, wc.Status, verbs.Success, "Status of a datagram of %d octets", n)
				expect.MustEqual(t, wc.ByteLen, n+verbs.GRHLen, "ByteLen of a datagram of %d octets", n)
			}
			arrives(1000)
			fragmented, refused := counter(a, "tx_fragmented"), counter(a, "tx_drop_too_big")
			if v4 {
				x.sendTo(dst, y.qp.QPN(), 2000)
				if got := counter(a, "tx_drop_too_big") - refused; got != 1 {
					t.Errorf("%d packets of 2000 octets were refused on a route of 1400, want 1", got)
				}
			} else {
				arrives(2000)
				if got := counter(a, "tx_fragmented") - fragmented; got != 1 {
					t.Errorf("%d packets of 2000 octets were fragmented on a route of 1400, want 1", got)
				}
				if got := a.sender6UD.fragMTU; got != 1400 {
					t.Errorf("the kernel fragments for %d octets, want 1400", got)
				}
			}
			routeTo(t, dst, 0)
			until(t, "the link's MTU counts", func() bool { return a.PathMTU(dst) == ib.MTU4096 })
			fragmented = counter(a, "tx_fragmented")
			arrives(2000)
			if got := counter(a, "tx_fragmented") - fragmented; got != 0 {
				t.Errorf("%d packets of 2000 octets were fragmented on a link of 9000, want 0", got)
			}
		})
	}
}

// A connection that is up when the MTU of its route is lowered sends nothing that
// is too long for the route.
func TestRouteMTUOfConnection(t *testing.T) {
	a, b := vethPair(t, 9000, false, nil)
	x, y := newEnd(t, a, ib.RC, 16, 4096), newEnd(t, b, ib.RC, 16, 4096)
	connect(x, y)
	dst := b.Port().GIDs[0]
	routeTo(t, dst, 1400)
	until(t, "the route's MTU counts", func() bool { return a.PathMTU(dst) == ib.MTU1024 })
	packets := counter(b, "rx_packets")
	_, err := x.qp.PostSend([]verbs.SendWR{{Flags: verbs.Signaled, SG: x.sge(0, 4096)}})
	must(t, err)
	until(t, "a packet is refused", func() bool { return counter(a, "tx_drop_too_big") > 0 })
	if got := counter(b, "rx_packets") - packets; got != 0 {
		t.Errorf("%d packets arrived, want 0", got)
	}
}

// Only what changes routes of the underlay has the routes read again.
func TestConcernsDevice(t *testing.T) {
	message := func(attrs ...byte) []byte {
		b := make([]byte, unix.SizeofNlMsghdr+unix.SizeofRtMsg, 64)
		b = append(b, attrs...)
		native.PutUint32(b, uint32(len(b)))
		return b
	}
	oif := func(n byte) []byte {
		b := []byte{8, 0, unix.RTA_OIF, 0, 0, 0, 0, 0}
		native.PutUint16(b, 8)
		native.PutUint16(b[2:], unix.RTA_OIF)
		native.PutUint32(b[4:], uint32(n))
		return b
	}
	for _, tt := range []struct {
		name string
		b    []byte
		want bool
	}{
		{"nothing", nil, false},
		{"of the device", message(oif(7)...), true},
		{"of another", message(oif(8)...), false},
		{"of no device, such as one with several", message(), true},
		{"of another, then of the device", append(message(oif(8)...), message(oif(7)...)...), true},
		{"cut off", message(oif(7)...)[:20], false},
	} {
		if got := concernsDevice(tt.b, 7); got != tt.want {
			t.Errorf("%s: %v, want %v", tt.name, got, tt.want)
		}
	}
}
