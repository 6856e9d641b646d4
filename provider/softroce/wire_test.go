package softroce

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/verbs"
	"ipoibcm/wire/mad"
	"ipoibcm/wire/roce"
	"ipoibcm/wire/roce/rocetest"
)

// datagram brings e, a UD end, to RTS.
func (e *end) datagram() *end {
	for _, s := range []verbs.QPState{verbs.StateInit, verbs.StateRTR, verbs.StateRTS} {
		must(e, e.qp.Modify(verbs.QPAttr{State: s, PKey: ib.DefaultPKey, QKey: 0x1b}))
	}
	return e
}

// sendTo posts one datagram of n octets to a GID and QPN.
func (e *end) sendTo(g ib.GID, qpn ib.QPN, n int) []byte {
	e.Helper()
	h, err := e.d.CreateAH(verbs.AHAttr{DGID: g, TrafficClass: 0x20, HopLimit: 7})
	must(e, err)
	buf := e.region.Buf[:n]
	for i := range buf {
		buf[i] = byte(i)
	}
	_, err = e.qp.PostSend([]verbs.SendWR{{ID: 1, Flags: verbs.Signaled, SG: []verbs.SGE{{Region: e.region, Buf: buf}},
		AH: h, RemoteQPN: qpn, RemoteQKey: 0x1b}})
	must(e, err)
	if wc := e.next(); wc.Status != verbs.Success {
		e.Fatalf("send: %+v", wc)
	}
	return buf
}

// On an underlay of 1500 a datagram of 2048 goes out whole and the kernel
// fragments it; groups are joined on the wire. The addresses are tentative
// when the devices are opened.
func TestDatagramsOnVeth(t *testing.T) {
	da, db := vethPairDAD(t, 1500, false, true, nil)
	a, b := newEnd(t, da, ib.UD, 16, 4096).datagram(), newEnd(t, db, ib.UD, 16, 4096).datagram()
	src, dst := da.Port().GIDs[0], db.Port().GIDs[0]
	if !src.Addr().IsLinkLocalUnicast() {
		t.Fatalf("default GID %v is not link-local", src)
	}
	group := gid("ff12:401b:ffff::ffff:ffff")
	must(t, a.qp.AttachMulticast(group)) // to see that our own echo is not taken
	must(t, b.qp.AttachMulticast(group))
	for i, tt := range []struct {
		to  ib.GID
		qpn ib.QPN
		n   int
	}{{dst, b.qp.QPN(), 0}, {dst, b.qp.QPN(), 1}, {dst, b.qp.QPN(), 2048}, {group, ib.QPNMulticast, 100}, {group, ib.QPNMulticast, 2048}} {
		_, err := b.qp.PostRecv([]verbs.RecvWR{{ID: uint64(i), SG: b.sge(0, 4096)}})
		must(t, err)
		sent := a.sendTo(tt.to, tt.qpn, tt.n)
		wc := b.next()
		expect.MustEqual(t, wc.Status, verbs.Success, "datagram %d: Status", i)
		expect.MustEqual(t, wc.ByteLen, tt.n+verbs.GRHLen, "datagram %d: ByteLen", i)
		expect.MustEqual(t, wc.SrcQPN, a.qp.QPN(), "datagram %d: SrcQPN", i)
		expect.MustEqual(t, wc.Flags&verbs.WithGRH, verbs.WithGRH, "datagram %d: flag for the GRH", i)
		got := b.region.Buf[:wc.ByteLen]
		// 4391-6-3
		s, d := verbs.GRHAddrs(got, false)
		expect.Equal(t, s, src, "datagram %d: source in the GRH", i)
		expect.Equal(t, d, tt.to, "datagram %d: destination in the GRH", i)
		expect.Equal(t, got[7], 7, "datagram %d: hop limit", i)
		if v := binary.BigEndian.Uint16(got) >> 4; v != 0x620 {
			t.Errorf("datagram %d: version and traffic class are %#x, want 0x620", i, v)
		}
		if !bytes.Equal(got[verbs.GRHLen:], sent) {
			t.Errorf("datagram %d: payload differs", i)
		}
	}
	must(t, b.qp.DetachMulticast(group))
	a.sendTo(group, ib.QPNMulticast, 10)
	if n := a.cq.Poll(a.wcs[:]); n != 0 {
		t.Errorf("%d completions from nowhere: %+v", n, a.wcs[0])
	}
	for _, name := range []string{"rx_drop_icrc", "tx_drop_errors", "tx_drop_too_big"} {
		if counter(da, name)+counter(db, name) != 0 {
			t.Errorf("%s is not 0", name)
		}
	}
}

// A message of the best size is one call, and one packet more is another.
func TestBestMessage(t *testing.T) {
	for _, tt := range []struct {
		underlay int
		v4       bool
		mtu      ib.MTU
	}{{9000, false, ib.MTU4096}, {9000, true, ib.MTU4096}, {2200, false, ib.MTU2048}, {1500, false, ib.MTU1024}, {1500, true, ib.MTU1024}} {
		t.Run(fmt.Sprintf("path MTU %v, IPv4 %v", tt.mtu, tt.v4), func(t *testing.T) {
			a, b := vethPair(t, tt.underlay, tt.v4, nil)
			best := a.Caps().BestMessage
			const size = 1 << 17
			x, y := newEnd(t, a, ib.UC, 4, size), newEnd(t, b, ib.UC, 4, size)
			connect(x, y)
			if got := a.Port().MTU; got != tt.mtu {
				t.Fatalf("path MTU %v", got)
			}
			for i, n := range []int{best, best + 4096} {
				_, err := y.qp.PostRecv([]verbs.RecvWR{{SG: y.sge(0, size)}})
				must(t, err)
				calls := counter(a, "tx_calls")
				_, err = x.qp.PostSend([]verbs.SendWR{{Flags: verbs.Signaled, SG: x.sge(0, n)}})
				must(t, err)
				if wc := x.next(); wc.Status != verbs.Success {
					t.Fatalf("%+v", wc)
				}
				wc := y.next()
				expect.MustEqual(t, wc.Status, verbs.Success, "%d octets: Status", n)
				expect.MustEqual(t, wc.ByteLen, n, "ByteLen")
				if got := counter(a, "tx_calls") - calls; got != uint64(1+i) {
					t.Errorf("%d octets: %d calls", n, got)
				}
			}
		})
	}
}

func TestMAD(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			da, db := pair(t, f, nil)
			m := &verbs.MAD{Remote: gid(f.b), QPN: ib.QPNGSI}
			for i := range m.Data {
				m.Data[i] = byte(i)
			}
			must(t, da.MADPort().SendMAD(m))
			got := <-db.MADPort().MADs()
			if want := (verbs.MAD{Remote: gid(f.a), Local: gid(f.b), QPN: ib.QPNGSI, PKey: ib.DefaultPKey, Data: m.Data}); *got != want {
				t.Errorf("got %+v\nwant %+v", *got, want)
			}
			until(t, "MADs refused", func() bool {
				for range 200 { // more than one source may ask, unless they take seconds
					must(t, da.MADPort().SendMAD(m))
				}
				return counter(db, "mads_drop_flood") > 0
			})
			copy(m.Data[16:], []byte{0, byte(mad.AttrREP)})
			for range madQueue { // nobody reads
				must(t, da.MADPort().SendMAD(m))
			}
			until(t, "MADs dropped", func() bool { return counter(db, "mads_dropped") > 0 })
		})
	}
}

// A device that plays many hosts takes more from one source than a host would.
func TestNoLimits(t *testing.T) {
	da, db := pair(t, families[0], func(o *Options) { o.NoLimits = true })
	m := &verbs.MAD{Remote: gid(families[0].b), QPN: ib.QPNGSI}
	for i := range m.Data {
		m.Data[i] = byte(i)
	}
	const n = 200 // TestMAD shows that some of so many are refused
	for range n {
		must(t, da.MADPort().SendMAD(m))
	}
	until(t, "MADs in", func() bool { return counter(db, "mads_in") == n })
	if refused := counter(db, "mads_drop_flood"); refused != 0 {
		t.Errorf("%d MADs were refused", refused)
	}
}

// foreign sends UDP payloads from a socket of its own.
func foreign(t *testing.T, from string) (send func(b []byte, to string), port uint16) {
	c, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.ParseIP(from)})
	must(t, err)
	t.Cleanup(func() { c.Close() })
	return func(b []byte, to string) {
		_, err := c.WriteTo(b, &net.UDPAddr{IP: net.ParseIP(to), Port: roce.Port})
		must(t, err)
	}, c.LocalAddr().(*net.UDPAddr).AddrPort().Port()
}

// What a foreign or rude sender sends is taken or counted, each under its name.
func TestReceiveChecks(t *testing.T) {
	_, d := pair(t, families[0], nil)
	e := newEnd(t, d, ib.UD, 16, 4096).datagram()
	send, port := foreign(t, "127.0.0.1")
	flow := roce.NewFlow(netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("127.0.0.2"))
	build := func(qpn ib.QPN, k ib.PKey, q ib.QKey, id uint16) []byte {
		b := make([]byte, roce.BTHLen+roce.DETHLen+8, 64)
		roce.PutBTH(b, roce.BTHFields{Opcode: roce.UDSendOnly, PKey: k, DestQPN: qpn})
		roce.PutDETH(b[roce.BTHLen:], q, 77)
		icrc := flow.Sum(port, b, id)
		b = b[:len(b)+roce.ICRCLen]
		icrc.Put(b[len(b)-roce.ICRCLen:])
		return b
	}
	flipped := build(e.qp.QPN(), ib.DefaultPKey, 0x1b, 0)
	flipped[25] ^= 4
	wrongSum := build(e.qp.QPN(), ib.DefaultPKey, 0x1b, 0)
	wrongSum[len(wrongSum)-1] ^= 1
	unknown := e.qp.QPN() ^ 1
	for _, tt := range []struct {
		name, counter string
		packet        []byte
		taken         bool
	}{
		{"as it should be", "rx_packets", build(e.qp.QPN(), ib.DefaultPKey, 0x1b, 0), true},
		{"identification of another sender", "rx_foreign_id", build(e.qp.QPN(), ib.DefaultPKey, 0x1b, 0xbeef), true},
		{"payload bit flipped", "rx_drop_icrc", flipped, false},
		{"ICRC bit flipped", "rx_drop_icrc", wrongSum, false},
		{"short", "rx_drop_malformed", []byte{0x64, 0, 0, 0}, false},
		{"opcode unknown", "rx_drop_malformed", bytes.Repeat([]byte{0xff}, 32), false},
		{"other QPN", "rx_drop_unknown_qpn", build(unknown, ib.DefaultPKey, 0x1b, 0), false},
		{"other P_Key", "rx_drop_pkey", build(e.qp.QPN(), 0x8001, 0x1b, 0), false},
		{"other Q_Key", "rx_drop_qkey", build(e.qp.QPN(), ib.DefaultPKey, 0x1c, 0), false},
		{"a MAD too short", "rx_drop_malformed", build(ib.QPNGSI, ib.DefaultPKey, ib.QKeyGSI, 0), false},
		{"group without member", "rx_drop_no_member", build(ib.QPNMulticast, ib.DefaultPKey, 0x1b, 0), false},
	} {
		before := counter(d, tt.counter)
		_, err := e.qp.PostRecv([]verbs.RecvWR{{SG: e.sge(0, 4096)}})
		must(t, err)
		send(tt.packet, "127.0.0.2")
		until(t, tt.name+": "+tt.counter, func() bool { return counter(d, tt.counter) > before })
		if !tt.taken {
			if n := e.cq.Poll(e.wcs[:]); n != 0 {
				t.Errorf("%s: delivered", tt.name)
			}
			continue
		}
		wc := e.next()
		expect.Equal(t, wc.Status, verbs.Success, "%s: Status", tt.name)
		expect.Equal(t, wc.SrcQPN, 77, "%s: SrcQPN", tt.name)
	}
}

// RC packets must come from the address of the connection.
func TestForeignSourceOnRC(t *testing.T) {
	da, db := pair(t, families[0], nil)
	a, b := newEnd(t, da, ib.RC, 4, 100), newEnd(t, db, ib.RC, 4, 100)
	connect(a, b)
	send, port := foreign(t, "127.0.0.3")
	p := make([]byte, roce.BTHLen, roce.BTHLen+roce.ICRCLen)
	roce.PutBTH(p, roce.BTHFields{Opcode: roce.RCSendOnly, PKey: ib.DefaultPKey, DestQPN: b.qp.QPN(), PSN: 0xfffff0})
	sum := roce.NewFlow(netip.MustParseAddr("127.0.0.3"), netip.MustParseAddr("127.0.0.2")).Sum(port, p, 0)
	p = p[:cap(p)]
	sum.Put(p[roce.BTHLen:])
	send(p, "127.0.0.2")
	until(t, "source refused", func() bool { return counter(db, "rx_drop_source") == 1 })
}

func TestTapShowsWholePackets(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			da, db := pair(t, f, nil)
			a, b := newEnd(t, da, ib.RC, 8, 30000), newEnd(t, db, ib.RC, 8, 30000)
			connect(a, b)
			var mu sync.Mutex
			var out, in [][]byte
			check := func(p []byte) []byte {
				h, payload, err := rocetest.ParseIP(p)
				if err != nil {
					t.Errorf("tap: %v in %x", err, p[:40])
					return nil
				}
				var pkt roce.Packet
				must(t, pkt.Parse(payload))
				if sum := roce.NewFlow(h.Src, h.Dst).Sum(h.SrcPort, pkt.Covered, h.ID); sum != pkt.ICRC {
					t.Errorf("tap: ICRC %08x, computed %08x, id %d", pkt.ICRC, sum, h.ID)
				}
				return append([]byte(nil), payload...)
			}
			da.SetTap(func(o bool, p []byte) {
				mu.Lock()
				defer mu.Unlock()
				if o {
					out = append(out, check(p))
				}
			})
			db.SetTap(func(o bool, p []byte) {
				mu.Lock()
				defer mu.Unlock()
				if !o {
					in = append(in, check(p))
				}
			})
			_, err := b.qp.PostRecv([]verbs.RecvWR{{SG: b.sge(0, 30000)}})
			must(t, err)
			_, err = a.qp.PostSend([]verbs.SendWR{{Flags: verbs.Signaled, SG: a.sge(0, 29999)}})
			must(t, err)
			a.next()
			until(t, "as many packets in as out", func() bool { // one may come again, and be on its way
				mu.Lock()
				defer mu.Unlock()
				return len(in) == len(out)
			})
			mu.Lock()
			defer mu.Unlock()
			// More than 8 where a busy machine let the retry timer run out.
			if len(out) < 8 || len(in) != len(out) {
				t.Fatalf("%d packets out, %d in", len(out), len(in))
			}
			for i := range out {
				if !bytes.Equal(out[i], in[i]) {
					t.Errorf("packet %d differs between the ends", i)
				}
			}
		})
	}
}

func TestCloseLeavesNothing(t *testing.T) {
	count := func() (goroutines, fds int) {
		list, _ := os.ReadDir("/proc/self/fd")
		return runtime.NumGoroutine(), len(list)
	}
	cycle := func() {
		d, err := Open(Options{Underlay: "lo", GID: gid("127.0.0.1")})
		must(t, err)
		a, b := newEnd(t, d, ib.RC, 8, 100), newEnd(t, d, ib.RC, 8, 100)
		connect(a, b)
		_, err = a.qp.PostSend([]verbs.SendWR{{SG: a.sge(0, 100)}}) // nobody will take it
		must(t, err)
		must(t, d.Close())
		if err := a.cq.Wait(); err != verbs.ErrClosed {
			t.Errorf("Wait after Close: %v", err)
		}
		for ev := range d.Events() { // until it is closed
			expect.Equal(t, ev.Kind, verbs.CommEst, "Kind of an event")
		}
		if _, ok := <-d.MADPort().MADs(); ok {
			t.Error("MADs is not closed")
		}
	}
	cycle()
	g0, f0 := count()
	for range 5 {
		cycle()
	}
	until(t, "goroutines and descriptors given back", func() bool {
		g, f := count()
		return g <= g0 && f <= f0
	})
	if _, err := Open(Options{Underlay: "nowhere0"}); err == nil || !strings.Contains(err.Error(), "nowhere0") {
		t.Errorf("device that is not there: %v", err)
	}
	if _, f := count(); f > f0 {
		t.Errorf("a failed Open leaves descriptors: %d, were %d", f, f0)
	}
}

// The second agent on one device is told why it cannot have it.
func TestPortTaken(t *testing.T) {
	own(t)
	open(t, Options{Underlay: "lo"})
	if _, err := Open(Options{Underlay: "lo"}); err == nil || !strings.Contains(err.Error(), "taken") {
		t.Errorf("got %v", err)
	}
}

// The default GID is the link-local address also where another one can be used sooner.
func TestDefaultGIDIsLinkLocal(t *testing.T) {
	a, b := vethPairDAD(t, 1500, false, true, func(o *Options) {
		link, err := netlink.LinkByName(o.Underlay)
		must(t, err)
		ip, err := netlink.ParseAddr("2001:db8::1/64")
		must(t, err)
		ip.Flags = unix.IFA_F_NODAD
		must(t, netlink.AddrAdd(link, ip))
	})
	for _, d := range []*Device{a, b} {
		if g := d.Port().GIDs; !g[0].Addr().IsLinkLocalUnicast() || !slices.Contains(g, gid("2001:db8::1")) {
			t.Errorf("GIDs %v, want a link-local one first, and the other", g)
		}
	}
}

// An agent with a GID of its own is told that another has it, and takes none of its packets.
func TestGIDTaken(t *testing.T) {
	own(t)
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			open(t, Options{Underlay: "lo", GID: gid(f.a)})
			switch d, err := Open(Options{Underlay: "lo", GID: gid(f.a)}); {
			case err == nil:
				d.Close()
				t.Error("opened a second time")
			case !errors.Is(err, unix.EADDRINUSE) || !strings.Contains(err.Error(), f.a):
				t.Errorf("got %v, want EADDRINUSE for %s", err, f.a)
			}
			open(t, Options{Underlay: "lo", GID: gid(f.b)})
		})
	}
}

func TestPortEvents(t *testing.T) {
	_, d := vethPair(t, 9000, false, nil)
	_ = d
	link, err := netlink.LinkByName("va")
	must(t, err)
	a := open2(t)
	wait := func(kind verbs.EventKind) {
		t.Helper()
		timeout := time.After(patience)
		for {
			select {
			case ev := <-a.Events():
				if ev.Kind == kind {
					return
				}
			case <-timeout:
				t.Fatalf("no event %v", kind)
			}
		}
	}
	must(t, netlink.LinkSetMTU(link, 4000))
	wait(verbs.MTUChange)
	p := a.Port()
	expect.Equal(t, p.UnderMTU, 4000, "UnderMTU after the MTU changed")
	expect.Equal(t, p.MTU, ib.MTU2048, "MTU after the MTU changed")
	must(t, netlink.LinkSetDown(link))
	wait(verbs.PortError)
	if a.Port().Active {
		t.Error("active while down")
	}
	must(t, netlink.LinkSetUp(link))
	wait(verbs.PortActive)
	if !a.Port().Active {
		t.Error("not active after up")
	}
}

// An underlay that is removed and made anew is followed: sockets, groups and
// connections work again.
func TestUnderlayReplaced(t *testing.T) {
	own(t)
	for _, threads := range []int{1, 3} {
		t.Run(fmt.Sprintf("threads %d", threads), func(t *testing.T) { underlayReplaced(t, threads) })
	}
}

func underlayReplaced(t *testing.T, threads int) {
	make := func() {
		l := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "dum0", MTU: 4000}, PeerName: "dum1"}
		must(t, netlink.LinkAdd(l))
		peer, err := netlink.LinkByName("dum1")
		must(t, err)
		must(t, netlink.LinkSetUp(peer))
		addr, _ := netlink.ParseAddr("10.98.0.1/24")
		must(t, netlink.AddrAdd(l, addr))
		must(t, netlink.LinkSetUp(l))
	}
	make()
	var refuse atomic.Bool // whatever it is that keeps sockets from being opened again
	d := open(t, Options{Underlay: "dum0", PreferIPv4: true, Threads: threads, testReopen: func() error {
		if refuse.Load() {
			return unix.EADDRINUSE
		}
		return nil
	}})
	a, b := newEndOn(t, d, threads-1, ib.RC, 8, 10000), newEndOn(t, d, threads/2, ib.RC, 8, 10000)
	connect(a, b)
	must(t, newEnd(t, d, ib.UD, 8, 100).datagram().qp.AttachMulticast(gid("239.192.0.1")))
	transfer := func() {
		t.Helper()
		_, err := b.qp.PostRecv([]verbs.RecvWR{{SG: b.sge(0, 10000)}})
		must(t, err)
		_, err = a.qp.PostSend([]verbs.SendWR{{Flags: verbs.Signaled, SG: a.sge(0, 10000)}})
		must(t, err)
		if wc := a.next(); wc.Status != verbs.Success {
			t.Fatalf("send: %+v", wc)
		}
		b.next()
	}
	until(t, "port up at first", func() bool { return d.Port().Active }) // the carrier may come late
	transfer()
	l, err := netlink.LinkByName("dum0")
	must(t, err)
	must(t, netlink.LinkDel(l))
	until(t, "port down", func() bool { return !d.Port().Active })
	lost := counter(d, "multicast_join_errors") // by a port that came up just when the device was removed
	refuse.Store(true)
	make()
	until(t, "attempts to open the sockets", func() bool { return counter(d, "reopen_failed") >= 2 })
	if d.Port().Active {
		t.Error("the port is active without sockets")
	}
	refuse.Store(false)
	t.Cleanup(func() {
		l, _ := netlink.LinkByName("dum0")
		_ = netlink.LinkDel(l)
	})
	until(t, "port up", func() bool { return d.Port().Active })
	transfer()
	l, err = netlink.LinkByName("dum0")
	must(t, err)
	until(t, "the group on the new device", func() bool { return joined(t, l.Attrs().Index, "239.192.0.1") })
	if n := counter(d, "multicast_join_errors") - lost; n != 0 {
		t.Errorf("%d groups lost", n)
	}
	if n := counter(d, "rx_other_thread"); n != 0 {
		t.Errorf("%d packets came to another thread than that of their queue pair", n)
	}
}

// An underlay in whose place there is another one at once, with the same address, has the groups too.
func TestUnderlayReplacedAtOnce(t *testing.T) {
	own(t)
	// The link-local addresses of two devices are two GIDs.
	const noIPv6 = "/proc/sys/net/ipv6/conf/default/disable_ipv6"
	must(t, os.WriteFile(noIPv6, []byte("1"), 0o644))
	t.Cleanup(func() { must(t, os.WriteFile(noIPv6, []byte("0"), 0o644)) })
	addr, _ := netlink.ParseAddr("10.98.0.1/24")
	made := func(name, peer string) *netlink.Veth {
		l := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name, MTU: 4000}, PeerName: peer}
		must(t, netlink.LinkAdd(l))
		other, err := netlink.LinkByName(peer)
		must(t, err)
		must(t, netlink.LinkSetUp(other))
		must(t, netlink.AddrAdd(l, addr))
		must(t, netlink.LinkSetUp(l))
		return l
	}
	first, second := made("dum0", "dum1"), made("dum2", "dum3")
	t.Cleanup(func() {
		_ = netlink.LinkDel(first)
		_ = netlink.LinkDel(second)
	})
	d := open(t, Options{Underlay: "dum0", PreferIPv4: true})
	must(t, newEnd(t, d, ib.UD, 8, 100).datagram().qp.AttachMulticast(gid("239.192.0.1")))
	if !joined(t, first.Index, "239.192.0.1") {
		t.Fatal("the group was not joined")
	}
	if err := netlink.LinkSetName(first, "gone"); err != nil {
		t.Skip("this kernel renames no device that is up: ", err)
	}
	must(t, netlink.LinkSetName(second, "dum0"))
	until(t, "the group on the new device", func() bool { return joined(t, second.Index, "239.192.0.1") })
}

// joined reports whether this host is in an IPv4 group on a device.
func joined(t *testing.T, index int, group string) bool {
	t.Helper()
	text, err := os.ReadFile("/proc/thread-self/net/igmp")
	must(t, err)
	a := netip.MustParseAddr(group).As4()
	want, at := fmt.Sprintf("%08X", binary.NativeEndian.Uint32(a[:])), ""
	for line := range strings.Lines(string(text)) {
		f := strings.Fields(line)
		if line[0] != '\t' {
			at = f[0]
		} else if f[0] == want && at == strconv.Itoa(index) {
			return true
		}
	}
	return false
}

// open2 opens a third device beside the pair's first, for 10.99.0.1.
func open2(t *testing.T) *Device {
	l, err := netlink.LinkByName("va")
	must(t, err)
	addr, _ := netlink.ParseAddr("10.99.0.7/24")
	must(t, netlink.AddrAdd(l, addr))
	return open(t, Options{Underlay: "va", GID: gid("10.99.0.7"), UDPPort: 4792})
}

// Messages that are posted and received cost no memory.
func TestNoAllocation(t *testing.T) {
	da, db := pair(t, families[0], nil)
	const size = 65524
	a, b := newEnd(t, da, ib.RC, 8, size), newEnd(t, db, ib.RC, 8, size)
	connect(a, b)
	recv := []verbs.RecvWR{{SG: b.sge(0, size)}}
	send := []verbs.SendWR{{Flags: verbs.Signaled, SG: a.sge(0, size)}}
	var wcs [4]verbs.WC
	one := func() {
		_, _ = b.qp.PostRecv(recv)
		_, _ = a.qp.PostSend(send)
		for a.cq.Poll(wcs[:]) == 0 {
			_ = a.cq.Wait()
		}
		for b.cq.Poll(wcs[:]) == 0 {
			_ = b.cq.Wait()
		}
	}
	// What other goroutines allocate meanwhile is counted, too: the least of some counts is ours.
	n := testing.AllocsPerRun(200, one)
	for i := 0; n != 0 && i < 4; i++ {
		n = min(n, testing.AllocsPerRun(200, one))
	}
	if n != 0 {
		t.Errorf("%v allocations per message", n)
	}
}

// Messages of two packets of one length leave in two calls once the peer is known to keep early packets, and
// in as many as there are packets while UDP_SEGMENT is off. The figures are medians of new links: where the sender
// waits for a processor between its calls it is asked for what is missing, and where ACKs are late it sends less at once.
func TestGroupedMessages(t *testing.T) {
	for _, v4 := range []bool{false, true} {
		t.Run(fmt.Sprintf("IPv4 %v", v4), func(t *testing.T) {
			var with, without, ahead []uint64
			for range 5 {
				t.Run("link", func(t *testing.T) {
					l := newGroupedLink(t, v4)
					l.send(t, 1) // its ACK says that b keeps early packets
					with = append(with, l.send(t, groupedMessages))
					came := counter(l.b, "rc_ahead")
					ahead = append(ahead, came)
					l.a.SetOffload("gso", false)
					without = append(without, l.send(t, groupedMessages))
					expect.Equal(t, counter(l.b, "rc_ahead"), came, "packets that came ahead")
				})
			}
			expect.MustEqual(t, len(without), 5, "links")
			for _, all := range [][]uint64{with, without, ahead} {
				slices.Sort(all)
			}
			expect.Equal(t, with[2], 2, "median of calls for messages of two packets, %v,", with)
			expect.Equal(t, ahead[2], groupedMessages-1, "median of packets that came ahead, %v,", ahead)
			expect.Equal(t, without[2], 2*groupedMessages, "median of calls without UDP_SEGMENT, %v,", without)
		})
	}
}

// groupedMessages are so many messages of two packets of one length, groupedSize octets each.
const (
	groupedMessages = 32
	groupedSize     = 1432
)

type groupedLink struct {
	a, b *Device
	x, y *end
}

func newGroupedLink(t *testing.T, v4 bool) *groupedLink {
	a, b := vethPair(t, 1500, v4, nil)
	l := &groupedLink{a, b, newEnd(t, a, ib.RC, groupedMessages, groupedSize), newEnd(t, b, ib.RC, groupedMessages, groupedSize)}
	connect(l.x, l.y)
	for i := range l.x.region.Buf {
		l.x.region.Buf[i] = byte(i / 7)
	}
	return l
}

// send sends so many messages to b, and returns the number of system calls.
func (l *groupedLink) send(t *testing.T, msgs int) (calls uint64) {
	t.Helper()
	var recvs []verbs.RecvWR
	var sends []verbs.SendWR
	for i := range msgs {
		recvs = append(recvs, verbs.RecvWR{ID: uint64(i), SG: l.y.sge(i, groupedSize)})
		sends = append(sends, verbs.SendWR{SG: l.x.sge(i, groupedSize)})
	}
	sends[msgs-1].Flags = verbs.Signaled
	_, err := l.y.qp.PostRecv(recvs)
	must(t, err)
	mine := func() uint64 { return counter(l.a, "tx_calls") - counter(l.a, "rc_probes") } // b may be slow, and asked
	clear(l.y.region.Buf)
	calls = mine()
	_, err = l.x.qp.PostSend(sends)
	must(t, err)
	for i := range msgs {
		wc := l.y.next()
		expect.MustEqual(t, wc.Status, verbs.Success, "Status of receive %d", i)
		expect.MustEqual(t, wc.ID, uint64(i), "ID of receive %d", i)
		expect.MustEqual(t, wc.ByteLen, groupedSize, "ByteLen of receive %d", i)
	}
	if wc := l.x.next(); wc.Status != verbs.Success {
		t.Fatalf("sent %+v", wc)
	}
	if n := msgs * groupedSize; !bytes.Equal(l.x.region.Buf[:n], l.y.region.Buf[:n]) {
		t.Error("what arrived is not what was sent")
	}
	return mine() - calls
}
