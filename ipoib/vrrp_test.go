package ipoib

import (
	"encoding/binary"
	"net/netip"
	"testing"
	"time"

	"ipoibcm/wire/ip"
)

// advertise has n's kernel send a VRRP advertisement of vip.
func (n *node) advertise(vip string) {
	a := netip.MustParseAddr(vip)
	m := append([]byte{0x31, 7, 100, 1, 0, 100, 0, 0}, a.AsSlice()...)
	var pkt []byte
	if a.Is4() {
		pkt = make([]byte, ip.V4HeaderLen)
		pkt[0], pkt[8], pkt[9] = 0x45, 255, ip.ProtoVRRP
		binary.BigEndian.PutUint16(pkt[2:], uint16(ip.V4HeaderLen+len(m)))
		copy(pkt[12:], n.source(netip.MustParseAddr("10.0.0.250")).AsSlice())
		copy(pkt[16:], netip.MustParseAddr("224.0.0.18").AsSlice())
	} else {
		src := ip.LinkLocal(n.opt.Link.GID)
		pkt = ip.AppendV6Header(nil, src, netip.MustParseAddr("ff02::12"), ip.ProtoVRRP, 255, len(m))
	}
	n.output(append(pkt, m...))
}

// A host that advertises an address by VRRP has it within three seconds, whether
// the host that had it gives it up or not, and a third host's packets arrive there.
func TestVRRP(t *testing.T) {
	for _, tt := range []struct {
		name string
		vip  string
		len  string
		stay bool // the old master keeps the address: only its keepalived was killed
	}{
		{"IPv4, the master gives it up", "10.0.0.100", "/24", false},
		{"IPv6, the master gives it up", "fd00::100", "/64", false},
		{"IPv4, the master keeps it", "10.0.0.100", "/24", true},
		{"IPv6, the master keeps it", "fd00::100", "/64", true},
	} {
		w := newWorld(t, 3)
		a, b, c := w.node(1, Options{}), w.node(2, Options{}), w.node(3, Options{})
		w.settle()
		a.addAddr(tt.vip + tt.len)
		for range 30 {
			a.advertise(tt.vip)
			w.run(time.Second)
		}
		p := c.ping(tt.vip, 100, false)
		w.run(time.Second)
		if a.got(p) != 1 {
			t.Errorf("%s: the master does not get packets", tt.name)
		}
		move := func(from, to *node, stay bool) {
			to.addAddr(tt.vip + tt.len)
			to.advertise(tt.vip)
			w.run(100 * time.Millisecond)
			if !stay {
				from.delAddr(tt.vip + tt.len)
			}
			for range 3 {
				w.run(900 * time.Millisecond)
				to.advertise(tt.vip)
			}
			for i := range 20 {
				p := c.ping(tt.vip, 100, false)
				w.run(time.Second)
				to.advertise(tt.vip)
				if to.got(p) != 1 {
					t.Errorf("%s: packet %d after the move did not arrive", tt.name, i)
				}
			}
		}
		move(a, b, tt.stay)
		if tt.stay { // its keepalived is back, and removes what it finds
			a.delAddr(tt.vip + tt.len)
			w.run(time.Second)
		}
		move(b, a, false)
	}
}

// An advertisement that we see before the address is on the device counts as one after it:
// the address is announced at once, and not after a detection.
func TestVRRPBeforeItsAddress(t *testing.T) {
	for _, tt := range []struct {
		name  string
		early time.Duration // before the address
		want  uint64
	}{
		{"at once", 0, 1},
		{"half a second before", 500 * time.Millisecond, 1},
		{"long before", 2 * time.Second, 0},
	} {
		w := newWorld(t, 3)
		a := w.node(1, Options{})
		w.settle()
		a.advertise("10.0.0.100")
		w.run(tt.early)
		before := a.counter("neigh_announces")
		a.addAddr("10.0.0.100/24")
		w.run(100 * time.Millisecond)
		if got := a.counter("neigh_announces") - before; got != tt.want {
			t.Errorf("%s: %d announcements within 0.1 s, want %d", tt.name, got, tt.want)
		}
	}
}
