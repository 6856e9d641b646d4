package datapath

import (
	"bytes"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/verbs"
	"ipoibcm/wire/encap"
)

// arrive makes frame come out of the connection that c is the other end of.
func arrive(c *Conn, t encap.EtherType, pkt []byte) {
	q := c.QP().(*fakeQP)
	q.mu.Lock()
	defer q.mu.Unlock()
	frame := append([]byte{byte(t >> 8), byte(t), 0, 0}, pkt...)
	q.deliver(&verbs.SendWR{SG: []verbs.SGE{{Buf: frame}}})
}

// A connection brings no multicast and no broadcast to the TUN, joined or not;
// its unicast neighbours do arrive. 4755-2.1-1, 4755-2.1-2, 4755-7-3
func TestConnectionIsUnicastOnly(t *testing.T) { inBubble(t, testConnectionIsUnicastOnly) }

func testConnectionIsUnicastOnly(t *testing.T) {
	for _, tr := range []ib.Transport{ib.RC, ib.UC} {
		w := newWorld()
		a, b := start(t, w, 1, nil), start(t, w, 2, nil)
		ca, cb := connect(t, a, b, tr)
		b.SetGroups([]netip.Addr{netip.MustParseAddr("224.0.0.251"), netip.MustParseAddr("ff02::fb")})
		b.SetBroadcasts([]netip.Addr{netip.MustParseAddr("172.16.255.255"), netip.MustParseAddr("10.9.0.255")})
		drops, packets := uint64(0), uint64(0)
		for _, tt := range []struct {
			dst  string
			drop bool
		}{
			{"10.9.0.2", false},
			{"223.255.255.255", false},
			{"224.0.0.0", true},
			{"224.0.0.251", true}, // joined
			{"224.9.9.9", true},   // not joined
			{"239.255.255.255", true},
			{"240.0.0.1", false}, // class E is no group
			{"255.255.255.254", false},
			{"255.255.255.255", true},
			{"10.9.0.255", true},     // the broadcast of a subnet of ours
			{"172.16.255.255", true}, // and of the other
			{"10.9.1.255", false},    // of a subnet that we know nothing of
			{"10.9.0.254", false},
			{"fe80::2", false},
			{"fd00::2", false},
			{"feff::1", false},
			{"ff01::1", true},
			{"ff02::1", true},
			{"ff02::fb", true}, // joined
			{"ff0e::1", true},
		} {
			typ, pkt := encap.IPv6, ip6(tt.dst, 17, 1, 2, 3, 4)
			if netip.MustParseAddr(tt.dst).Is4() {
				typ, pkt = encap.IPv4, ip4(tt.dst, 40, 17)
			}
			arrive(ca, typ, pkt)
			if tt.drop {
				drops++
				eventually(t, fmt.Sprintf("%v: %s is dropped", tr, tt.dst), func() bool {
					return b.Counters().RxMulticastConn == drops
				})
				continue
			}
			packets++
			if got := b.tun.Receive(2 * time.Second); !bytes.Equal(got, pkt) {
				t.Errorf("%v: %s: the TUN got % x, want % x", tr, tt.dst, got, pkt)
			}
		}
		if got := b.Counters().RxConn; got != packets {
			t.Errorf("%v: %d packets taken, want %d", tr, got, packets)
		}
		if got := cb.Counters().RxPackets; got != packets {
			t.Errorf("%v: %d packets of the connection, want %d", tr, got, packets)
		}
		if got := uint64(b.tun.Written()); got != packets {
			t.Errorf("%v: the TUN got %d packets, want %d", tr, got, packets)
		}
	}
}

// Linux sends unicast NS and NA on its connections: they go up. A solicitation to
// a solicited-node group belongs on the UD QP, as every multicast. 4755-7-2
func TestNDOnConnection(t *testing.T) { inBubble(t, testNDOnConnection) }

func testNDOnConnection(t *testing.T) {
	for _, tr := range []ib.Transport{ib.RC, ib.UC} {
		w := newWorld()
		a, b := start(t, w, 1, nil), start(t, w, 2, nil)
		ca, cb := connect(t, a, b, tr)
		for _, typ := range []byte{135, 136} { // NS, NA
			nd := ip6("fe80::2", 58, typ, 0, 0, 0)
			arrive(ca, encap.IPv6, nd)
			f := up(t, b)
			if f.Kind != RXND {
				t.Errorf("%v: ICMPv6 type %d went up as %v, want %v", tr, typ, f.Kind, RXND)
			}
			if f.Conn != cb {
				t.Errorf("%v: ICMPv6 type %d went up without its connection", tr, typ)
			}
			if !bytes.Equal(f.Data, nd) {
				t.Errorf("%v: ICMPv6 type %d went up as % x, want % x", tr, typ, f.Data, nd)
			}
			f.Release()
		}
		arrive(ca, encap.IPv6, ip6("ff02::1:ff00:2", 58, 135, 0, 0, 0))
		eventually(t, "the multicast NS is dropped", func() bool { return b.Counters().RxMulticastConn == 1 })
		if got := b.Counters().Up; got != 2 {
			t.Errorf("%v: %d frames went up, want 2", tr, got)
		}
	}
}
