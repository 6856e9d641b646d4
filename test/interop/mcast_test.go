package interop

import (
	"bytes"
	"encoding/hex"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/provider/softroce"
	"ipoibcm/test/interop/judge"
	"ipoibcm/test/interop/vm"
	"ipoibcm/verbs"
)

// eventually waits until cond holds.
func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	for limit := time.Now().Add(patience); !cond(); time.Sleep(time.Millisecond) {
		if time.Now().After(limit) {
			t.Fatalf("%s: has not happened after %v", what, patience)
		}
	}
}

// probe is the immediate of datagrams that only ask whether the guest is a member.
const probe = 0

// awaitMembership sends probes until the guest, which has joined the group, gets
// one of so many octets, and returns how many it sent. From Linux 6.12 on virtio_net
// puts the group's MAC address into the filter of the device when it gets round to it
// (drivers/net/virtio_net.c, virtnet_set_rx_mode).
func awaitMembership(t *testing.T, b *peer, octets int, send func()) (probes int) {
	t.Helper()
	const every = 200 * time.Millisecond
	b.do("recv 99 0 %d", octets)
	for answer := "none"; answer == "none"; answer = b.do("poll %d", every.Milliseconds()) {
		if probes >= int(patience/every) {
			t.Fatalf("none of %d datagrams to the group reached the guest", probes)
		}
		send()
		probes++
	}
	return probes
}

// TestMulticast sends UD datagrams to the group that carries IPoIB's broadcasts,
// and to the IPv4 group that stands for it on IPv4, both ways.
func TestMulticast(t *testing.T) {
	for _, tt := range []struct{ name, mgid, mac string }{
		{"IPv6", "ff12:401b:ffff::ffff:ffff", "3333ffffffff"},
		{"IPv4", "239.192.255.255", "01005e40ffff"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := open(t, 1500)
			fam := w.families(t)[0]
			if tt.name == "IPv4" {
				fam = w.families(t)[1]
			}
			mgid := gid(tt.mgid)
			d := w.device(t, softroce.Options{MaxUDPayload: 1024})
			c := w.watch(t)
			const n = 1000
			a := newEnd(t, d, endConfig{transport: ib.UD, buf: 8192, qkey: ib.QKeyIPoIB})
			for _, attr := range []verbs.QPAttr{{State: verbs.StateRTR}, {State: verbs.StateRTS, SQPSN: startPSN}} {
				if err := a.qp.Modify(attr); err != nil {
					t.Fatal(err)
				}
			}
			if err := a.qp.AttachMulticast(mgid); err != nil {
				t.Fatal(err)
			}
			ah, err := d.CreateAH(verbs.AHAttr{SGID: fam.host, DGID: mgid})
			if err != nil {
				t.Fatal(err)
			}
			b := newPeer(t, w, fam, "ud", false, 8192)
			b.do("connect")
			b.do("attach %x", mgid[:])

			send := func(imm uint32) {
				copy(a.mem.Buf[4096:], pattern(n, imm))
				a.postSend(verbs.SendWR{ID: 1, Opcode: verbs.SendImm, Imm: imm, SG: a.sg(4096, n), AH: ah,
					RemoteQPN: ib.QPNMulticast, RemoteQKey: ib.QKeyIPoIB})
				a.sent()
			}
			probes := awaitMembership(t, b, n+verbs.GRHLen, func() { send(probe) })
			for i := range 5 {
				seed := uint32(i + 1)
				b.do("recv %d 0 %d", i, n+verbs.GRHLen)
				send(seed)
				wc := b.expect(wcRecv)
				for late := 0; wc.imm == probe && late < probes; late++ {
					b.do("recv %d 0 %d", i, n+verbs.GRHLen)
					wc = b.expect(wcRecv)
				}
				switch {
				case wc.id != uint64(i):
					t.Fatalf("datagram in the guest: id is %v, want %v", wc.id, uint64(i))
				case wc.byteLen != n+verbs.GRHLen:
					t.Fatalf("datagram in the guest: byteLen is %v, want %v", wc.byteLen, n+verbs.GRHLen)
				case wc.srcQP != a.qp.QPN():
					t.Fatalf("datagram in the guest: srcQP is %v, want %v", wc.srcQP, a.qp.QPN())
				case wc.flags&wcImm == 0:
					t.Fatal("datagram in the guest: flags lacks wcImm")
				case wc.imm != seed:
					t.Fatalf("datagram in the guest: imm is %v, want %v", wc.imm, seed)
				}
				b.do("check %d %d %d", verbs.GRHLen, n, seed)
			}
			b.do("ah %x", mgid[:])
			receiveGroup(t, a, b, fam, mgid, n)
			multicastOnWire(t, w, c, tt.mac, probes)
		})
	}
}

// receiveGroup: the guest's datagrams to the group arrive.
func receiveGroup(t *testing.T, a *end, b *peer, fam family, mgid ib.GID, n int) {
	t.Helper()
	for i := range 5 {
		seed := uint32(i + 1)
		a.postRecv(uint64(i), 0, n+verbs.GRHLen)
		b.do("fill 4096 %d %d", n, seed)
		b.do("udsend 9 4096 %d 0xffffff 0x%x", n, uint32(ib.QKeyIPoIB))
		b.expect(wcSend)
		wc := a.received()
		src, dst := verbs.GRHAddrs(a.mem.Buf, mgid.Is4())
		expect.MustEqual(t, wc.ID, uint64(i), "datagram from %v to %v: ID", src, dst)
		expect.MustEqual(t, wc.ByteLen, n+verbs.GRHLen, "datagram from %v to %v: ByteLen", src, dst)
		expect.MustEqual(t, wc.SrcQPN, b.qpn, "datagram from %v to %v: SrcQPN", src, dst)
		expect.MustEqual(t, src, fam.guest, "datagram from %v to %v: src", src, dst)
		expect.MustEqual(t, dst, mgid, "datagram from %v to %v: dst", src, dst)
		same(t, "data", a.mem.Buf[verbs.GRHLen:][:n], pattern(n, seed))
	}
}

// multicastOnWire: each datagram was on the wire as Ethernet and RoCE have it.
func multicastOnWire(t *testing.T, w *world, c *vm.Capture, mac string, probes int) {
	t.Helper()
	want, _ := hex.DecodeString(mac)
	seen := map[string]int{}
	for _, p := range c.Packets() {
		if h, ok := judge.Base(p.Frame); ok && h.QPN == uint32(ib.QPNMulticast) {
			seen[p.From]++
			if !bytes.Equal(p.Frame[:6], want) {
				t.Errorf("multicast of %s went to %x, want %x", p.From, p.Frame[:6], want)
			}
		}
	}
	if seen[w.vm.Name] != 5 || seen[w.host.Name] != 5+probes {
		t.Errorf("datagrams on the wire: %v, want 5 of the guest and %d of the host", seen, 5+probes)
	}
}
