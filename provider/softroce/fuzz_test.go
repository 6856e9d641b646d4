package softroce

import (
	"encoding/hex"
	"net/netip"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"ipoibcm/ib"
	"ipoibcm/verbs"
	"ipoibcm/wire/roce"
)

// TestMappedSource: an IPv6 packet from an IPv4-mapped address, which only old
// kernels pass on, is dropped.
func TestMappedSource(t *testing.T) {
	_, d := pair(t, families[1], nil)
	r := &receiver{dev: d, th: d.threads[0], v6: true}
	r.init()
	dst, src := gid(families[1].b), gid("::ffff:10.0.0.1")
	copy((*[unix.SizeofSockaddrInet6]byte)(unsafe.Pointer(&r.names[0]))[8:24], src[:])
	h := (*unix.Cmsghdr)(unsafe.Pointer(&r.ctls[0][0]))
	h.Level, h.Type = unix.IPPROTO_IPV6, unix.IPV6_PKTINFO
	h.SetLen(unix.CmsgLen(unix.SizeofInet6Pktinfo))
	copy(r.ctls[0][unix.SizeofCmsghdr:], dst[:])
	r.msgs[0].hdr.SetControllen(recvCtlLen)
	before := counter(d, "rx_drop_other_gid")
	r.datagram(0, make([]byte, 16), time.Now())
	if n := counter(d, "rx_drop_other_gid") - before; n != 1 || r.src == src {
		t.Errorf("counted %d", n)
	}
}

// FuzzReceive gives a device packets whose ICRC is right and all else is not.
func FuzzReceive(f *testing.F) {
	for _, s := range []string{
		"6400ffff00000000000000070000001b0000004d0102030405060708",
		"6400ffff000000010000000180010000000000010107020300000000",
		"0400ffff00000000000000f001020304",
		"0000ffff00000000000000f001020304",
		"0c00ffff00000000000000f00000000000001000000000ff00000100",
		"1100ffff00000000000000f01f000001",
		"1100ffff00000000000000f060000001",
		"2400ffff00000000000000f001020304",
		"8100ffff4000011800000000",
	} {
		b, _ := hex.DecodeString(s)
		f.Add(b, uint8(0), uint16(0))
	}
	da, db := pair(f, families[0], func(o *Options) { o.UDPPort = 4793 })
	a, b := newEnd(f, da, ib.RC, 8, 5000), newEnd(f, db, ib.RC, 8, 5000)
	connect(a, b)
	u, v := newEnd(f, db, ib.UC, 8, 5000), newEnd(f, da, ib.UC, 8, 5000)
	connect(u, v)
	d := newEnd(f, db, ib.UD, 8, 5000).datagram()
	ends := []*end{b, u, d}
	r := &receiver{dev: db, th: db.threads[0], src: gid("127.0.0.1"), dst: gid("127.0.0.2")}
	from, to := netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("127.0.0.2")
	r.flow, r.head = roce.NewFlow(from, to), roce.IPHeader{Src: from, Dst: to}
	r.from.Src, r.from.Dst = r.src, r.dst
	f.Fuzz(func(t *testing.T, in []byte, which uint8, id uint16) {
		pkt := append([]byte(nil), in...)
		for len(pkt)%4 != 0 {
			pkt = append(pkt, 0)
		}
		if len(pkt) < roce.BTHLen || len(pkt) > 9000 {
			return
		}
		if n := int(which) % (len(ends) + 1); n < len(ends) {
			e := ends[n]
			_, _ = e.qp.PostRecv([]verbs.RecvWR{{SG: e.sge(0, 5000)}})
			q := e.qp.QPN()
			pkt[5], pkt[6], pkt[7] = byte(q>>16), byte(q>>8), byte(q)
			for e.cq.Poll(e.wcs[:]) > 0 {
			}
		}
		sum := r.flow.Sum(0xc000, pkt, id)
		pkt = append(pkt, 0, 0, 0, 0)
		sum.Put(pkt[len(pkt)-roce.ICRCLen:])
		before := counter(db, "rx_drop_icrc")
		r.packet(pkt, 0, 0xc000, time.Now())
		r.release(time.Now())
		r.touched = r.touched[:0]
		if counter(db, "rx_drop_icrc") != before {
			t.Errorf("a right ICRC was refused: %x", pkt)
		}
	})
}
