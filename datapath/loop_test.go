package datapath

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"testing"
	"time"
	"unsafe"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/tun/tuntest"
	"ipoibcm/verbs"
	"ipoibcm/wire/encap"
)

func TestPacketsOfEverySizeOverEveryMode(t *testing.T) {
	for _, tt := range []struct {
		name     string
		kind     Kind
		tr       ib.Transport
		srq, cb  bool
		min, max int
	}{
		{"RC with SRQ", ToConn, ib.RC, true, false, 20, 65520},
		{"RC with SRQ and callbacks", ToConn, ib.RC, true, true, 20, 65520},
		{"RC with a ring", ToConn, ib.RC, false, false, 20, 65520},
		{"UC", ToConn, ib.UC, true, false, 20, 65520},
		{"UD", ToUD, ib.UD, true, false, 20, 2044},
	} {
		bubble(t, tt.name, func(t *testing.T) {
			w := newWorld()
			tune := func(_ *Config, f *fabric) { f.srq, f.callback = tt.srq, tt.cb }
			a, b := start(t, w, 1, tune), start(t, w, 2, tune)
			p := NewPath(1, Target{Kind: ToUD, MTU: tt.max, UD: a.udTo(b)})
			if tt.kind == ToConn {
				ca, _ := connect(t, a, b, tt.tr)
				p.Set(Target{Kind: ToConn, MTU: tt.max, Conn: ca})
			}
			a.route("10.9.0.2", p)
			sent := 0
			for n := tt.min; n <= tt.max; n += max(n/9, 1) {
				want := ip4("10.9.0.2", min(n, tt.max), 6)
				a.tun.Send(want)
				sent++
				// 4755-5.1-3 4755-4-1
				if got := b.tun.Receive(patience); !bytes.Equal(got, want) {
					t.Fatalf("%d octets: got %d\nsender %+v\nreceiver %+v", len(want), len(got), a.Counters(), b.Counters())
				}
			}
			// The receiver may be faster than the sender's own bookkeeping.
			eventually(t, "sender has counted", func() bool { return p.Counters().Packets >= uint64(sent) })
			c := p.Counters()
			expect.Equal(t, c.Packets, uint64(sent), "c.Packets")
			expect.Equal(t, c.Dropped, 0, "c.Dropped")
			if time.Since(c.Used) > time.Minute {
				t.Errorf("time.Since(c.Used) is %v, want at most %v", time.Since(c.Used), time.Minute)
			}
		})
	}
}

// TestEveryModeIsTaken: whatever we send to a peer by, what it sends by another
// mode arrives (4755-7-2).
func TestEveryModeIsTaken(t *testing.T) {
	w := newWorld()
	a, b := start(t, w, 1, nil), start(t, w, 2, nil)
	rc, rcOfB := connect(t, a, b, ib.RC)
	uc, ucOfB := connect(t, a, b, ib.UC)
	modes := []struct {
		name     string
		ofA, ofB Target
	}{
		{"RC", Target{Kind: ToConn, MTU: 2044, Conn: rc}, Target{Kind: ToConn, MTU: 2044, Conn: rcOfB}},
		{"UC", Target{Kind: ToConn, MTU: 2044, Conn: uc}, Target{Kind: ToConn, MTU: 2044, Conn: ucOfB}},
		{"UD", Target{Kind: ToUD, MTU: 2044, UD: a.udTo(b)}, Target{Kind: ToUD, MTU: 2044, UD: b.udTo(a)}},
	}
	there, back := NewPath(1, modes[0].ofA), NewPath(1, modes[0].ofB)
	a.route("10.9.0.2", there)
	b.route("10.9.0.1", back)
	n := 100
	for _, ours := range modes {
		for _, theirs := range modes {
			there.Set(ours.ofA)
			back.Set(theirs.ofB)
			n++ // tells the packets apart
			a.tun.Send(ip4("10.9.0.2", n, 6))
			if got, want := b.tun.Receive(patience), ip4("10.9.0.2", n, 6); !bytes.Equal(got, want) {
				t.Fatalf("by %s: got %d octets, want %d", ours.name, len(got), len(want))
			}
			b.tun.Send(ip4("10.9.0.1", n, 6))
			if got, want := a.tun.Receive(patience), ip4("10.9.0.1", n, 6); !bytes.Equal(got, want) {
				t.Fatalf("by %s while we send by %s: got %d octets, want %d", theirs.name, ours.name, len(got), len(want))
			}
		}
	}
}

func TestWireForm(t *testing.T) { inBubble(t, testWireForm) }

func testWireForm(t *testing.T) {
	w := newWorld()
	a := start(t, w, 1, nil)
	c, err := a.NewConn(ib.RC, 65524)
	if err != nil {
		t.Fatal(err)
	}
	qp := c.QP().(*fakeQP)
	qp.hold = true
	a.route("10.9.0.2", NewPath(1, Target{Kind: ToConn, Conn: c}))
	a.route("fd00::2", NewPath(2, Target{Kind: ToConn, Conn: c}))
	for _, tt := range []struct {
		name string
		pkt  []byte
		want string
	}{
		{"IPv4", ip4("10.9.0.2", 40, 6), "\x08\x00\x00\x00"},     // 4755-4-2 4755-4-3
		{"IPv6", ip6("fd00::2", 6, 1, 2, 3), "\x86\xdd\x00\x00"}, // 4755-5-1
	} {
		a.tun.Send(tt.pkt)
		eventually(t, tt.name, func() bool { qp.mu.Lock(); defer qp.mu.Unlock(); return len(qp.held) > 0 })
		qp.mu.Lock()
		got := qp.held[0].SG[0].Buf
		qp.held = nil
		qp.mu.Unlock()
		if string(got[:4]) != tt.want || !bytes.Equal(got[4:], tt.pkt) {
			t.Errorf("%s: % x", tt.name, got[:24])
		}
	}
}

func TestWhatGoesUp(t *testing.T) { inBubble(t, testWhatGoesUp) }

func testWhatGoesUp(t *testing.T) {
	w := newWorld()
	a := start(t, w, 1, nil)
	onlink := NewPath(7, Target{Kind: Miss})
	small := NewPath(8, Target{Kind: ToUD, MTU: 2044, UD: a.udTo(a)})
	a.route("10.9.0.2", onlink)
	a.route("10.9.0.3", small)
	rs := ip6("ff02::2", 58, 133, 0, 0, 0, 0, 0, 0, 0)
	mld := ip6("ff02::16", 0, 58, 0, 5, 2, 0, 0, 1, 0, 143, 0)
	for _, tt := range []struct {
		name string
		pkt  []byte
		kind FrameKind
		path *Path
		mtu  int
	}{
		{"unresolved", ip4("10.9.0.2", 100, 6), TXMiss, onlink, 0},
		{"no entry", ip4("192.0.2.1", 100, 6), TXNoRoute, nil, 0},
		{"too big", ip4("10.9.0.3", 2045, 6), TXTooBig, small, 2044},
		{"IGMP", ip4("224.0.0.22", 40, 2), TXControl, nil, 0},
		{"router solicitation", rs, TXControl, nil, 0},
		{"MLD behind hop-by-hop", mld, TXControl, nil, 0},
	} {
		a.tun.Send(tt.pkt)
		f := up(t, a)
		expect.Equal(t, f.Kind, tt.kind, "%s: f.Kind", tt.name)
		expect.Equal(t, f.Path, tt.path, "%s: f.Path", tt.name)
		expect.Equal(t, f.MTU, tt.mtu, "%s: f.MTU", tt.name)
		if !bytes.Equal(f.Data, tt.pkt) {
			t.Errorf("%s: f.Data is %x, want %x", tt.name, f.Data, tt.pkt)
		}
		f.Release()
	}
	// The ring is bounded, and data leaves room for control.
	for range 400 {
		a.tun.Send(ip4("10.9.0.2", 100, 6))
	}
	eventually(t, "ring full", func() bool { return a.Counters().UpFull == 400-192 })
	a.tun.Send(rs)
	eventually(t, "control still goes up", func() bool { return len(a.Up()) == 193 })
}

type dropReason struct {
	name  string
	q     verbs.QP
	frame []byte
	count func(Counters) uint64
}

// dropReasons are the cases of TestDropsHaveReasons: rc and uc are connections, ud is the UD queue pair.
func dropReasons(rc, uc, ud verbs.QP) []dropReason {
	frame := func(typ uint16, pkt []byte) []byte {
		return append([]byte{byte(typ >> 8), byte(typ), 0xff, 0xff}, pkt...) // reserved octets are ignored: 4755-4-3
	}
	return []dropReason{
		// 4755-4-4
		{"unknown type on a connection", rc, frame(0x88ca, ip4("10.9.0.2", 40, 6)),
			func(c Counters) uint64 { return c.RxUnknownType }},
		// 4755-4-5
		{"ARP on a connection", rc, frame(0x0806, make([]byte, 56)), func(c Counters) uint64 { return c.RxARPConn }},
		{"short on a connection", rc, []byte{8, 0, 0}, func(c Counters) uint64 { return c.RxShort }},
		{"header only", rc, frame(0x0800, nil), func(c Counters) uint64 { return c.RxShort - 1 }},
		{"IPv6 header typed IPv4", rc, frame(0x0800, ip6("fd00::1", 6, 1)),
			func(c Counters) uint64 { return c.RxMalformed }},
		{"short on UD", ud, []byte{8}, func(c Counters) uint64 { return c.RxShort - 2 }},
		{"group not joined", ud, frame(0x0800, ip4("224.9.9.9", 40, 17)),
			func(c Counters) uint64 { return c.RxNotWanted }},
		{"larger than our UD MTU", ud, frame(0x0800, ip4("10.9.0.2", 3000, 17)),
			func(c Counters) uint64 { return c.RxUDOversize }},
		{"group joined", ud, frame(0x0800, ip4("224.0.0.251", 40, 17)), func(c Counters) uint64 { return c.RxUD - 1 }},
		{"reserved octets set", rc, frame(0x0800, ip4("10.9.0.2", 40, 17)), func(c Counters) uint64 { return c.RxConn }},
		// Multicast and broadcast are received on the UD QP alone: 4755-2.1-2 4755-7-3
		{"multicast over RC", rc, frame(0x0800, ip4("224.9.9.9", 40, 17)),
			func(c Counters) uint64 { return c.RxMulticastConn }},
		{"broadcast over RC", rc, frame(0x0800, ip4("255.255.255.255", 40, 17)),
			func(c Counters) uint64 { return c.RxMulticastConn - 1 }},
		{"all nodes over RC", rc, frame(0x86dd, ip6("ff02::1", 17, 1)),
			func(c Counters) uint64 { return c.RxMulticastConn - 2 }},
		{"multicast over UC", uc, frame(0x0800, ip4("224.9.9.9", 40, 17)),
			func(c Counters) uint64 { return c.RxMulticastConn - 3 }},
		{"broadcast over UC", uc, frame(0x0800, ip4("255.255.255.255", 40, 17)),
			func(c Counters) uint64 { return c.RxMulticastConn - 4 }},
		{"all nodes over UC", uc, frame(0x86dd, ip6("ff02::1", 17, 1)),
			func(c Counters) uint64 { return c.RxMulticastConn - 5 }},
	}
}

func TestDropsHaveReasons(t *testing.T) { inBubble(t, testDropsHaveReasons) }

func testDropsHaveReasons(t *testing.T) {
	w := newWorld()
	a, b := start(t, w, 1, nil), start(t, w, 2, nil)
	ca, cb := connect(t, a, b, ib.RC)
	uc, _ := connect(t, a, b, ib.UC)
	gone, _ := connect(t, a, b, ib.RC)
	gone.Close()
	a.route("10.1.0.1", NewPath(1, Target{Kind: Drop}))
	a.route("10.2.0.1", NewPath(2, Target{Kind: ToConn, Conn: gone}))
	a.route("224.1.1.1", NewPath(3, Target{Kind: ToConn, Conn: ca}))
	a.tun.Send(ip4("10.1.0.1", 40, 6))
	a.tun.Send(ip4("10.2.0.1", 40, 6))
	a.tun.Send(ip4("224.1.1.1", 40, 17)) // 4755-2.1-1 4755-7-3
	a.tun.Send([]byte{1, 2, 3})
	eventually(t, "four drops", func() bool {
		c := a.Counters()
		return c.TxUnreachable == 1 && c.TxGone == 1 && c.TxMulticastConn == 1 && c.TxMalformed == 1
	})

	b.SetGroups([]netip.Addr{netip.MustParseAddr("224.0.0.251")})
	raw := func(q verbs.QP, dst UDDest, frame []byte) {
		f := q.(*fakeQP)
		f.mu.Lock()
		defer f.mu.Unlock()
		f.deliver(&verbs.SendWR{AH: dst.AH, RemoteQPN: dst.QPN, SG: []verbs.SGE{{Buf: frame}}})
	}
	ud := a.udTo(b)
	for _, tt := range dropReasons(ca.QP(), uc.QP(), a.UDQP()) {
		raw(tt.q, ud, tt.frame)
		eventually(t, tt.name, func() bool { return tt.count(b.Counters()) == 1 })
	}
	// Our own multicast comes back.
	g := ib.GID{0: 0xff, 15: 1}
	a.UDQP().AttachMulticast(g)
	b.UDQP().AttachMulticast(g)
	a.SendUD(UDDest{AH: fakeAH{DGID: g}, QPN: ib.QPNMulticast}, encap.IPv4, ip4("224.0.0.251", 40, 17))
	eventually(t, "own echo dropped, other delivered", func() bool {
		return a.Counters().RxOwnEcho == 1 && b.Counters().RxUD == 3
	})
	_ = cb
}

// Probes of a path's MTU go up, from the UD QP with who has sent them, from a connection with that.
func TestProbesGoUp(t *testing.T) {
	w := newWorld()
	a, b := start(t, w, 1, nil), start(t, w, 2, nil)
	ca, cb := connect(t, a, b, ib.UC)
	probe, _ := encap.Probe{Octets: 1000, ID: 7}.AppendBinary(nil)
	for _, tt := range []struct {
		name string
		send func() error
		qpn  ib.QPN
		conn *Conn
	}{
		{"UD", func() error { return a.SendUD(a.udTo(b), encap.PathProbe, probe) }, a.UDQP().QPN(), nil},
		{"a connection", func() error { return a.SendConn(ca, encap.PathProbe, probe) }, 0, cb},
	} {
		if err := tt.send(); err != nil {
			t.Fatalf("%s: %v", tt.name, err)
		}
		f := up(t, b)
		if f.Kind != RXProbe {
			t.Errorf("%s: a frame of kind %v, want %v", tt.name, f.Kind, RXProbe)
		}
		if !bytes.Equal(f.Data, probe) {
			t.Errorf("%s: %d octets, want the %d that were sent", tt.name, len(f.Data), len(probe))
		}
		if f.SrcQPN != tt.qpn {
			t.Errorf("%s: from QP %v, want %v", tt.name, f.SrcQPN, tt.qpn)
		}
		if f.Conn != tt.conn {
			t.Errorf("%s: connection %p, want %p", tt.name, f.Conn, tt.conn)
		}
		f.Release()
	}
}

func TestARPAndNDGoUp(t *testing.T) {
	w := newWorld()
	a, b := start(t, w, 1, nil), start(t, w, 2, nil)
	ca, cb := connect(t, a, b, ib.RC)
	arp := bytes.Repeat([]byte{7}, 56)
	if err := a.SendUD(a.udTo(b), encap.ARP, arp); err != nil {
		t.Fatal(err)
	}
	// 4755-2.2-2 4755-3-2
	f := up(t, b)
	wantUp(t, f, a, b, RXARP, encap.ARP, arp)
	f.Release()
	mad := bytes.Repeat([]byte{1}, verbs.MADLen)
	if err := a.SendUD(a.udTo(b), encap.InbandCM, mad); err != nil {
		t.Fatal(err)
	}
	f = up(t, b)
	wantUp(t, f, a, b, RXCM, encap.InbandCM, mad)
	f.Release()
	na := ip6("fe80::2", 58, 136, 0, 0, 0)
	p := NewPath(1, Target{Kind: ToUD, UD: a.udTo(b)})
	for _, on := range []Target{p.Target(), {Kind: ToConn, Conn: ca}} {
		p.Set(on)
		if err := a.Send(p, na); err != nil {
			t.Fatal(err)
		}
		f := up(t, b)
		switch {
		case f.Kind != RXND:
			t.Errorf("ND over %v: f.Kind is %v, want %v", on.Kind, f.Kind, RXND)
		case !bytes.Equal(f.Data, na):
			t.Errorf("ND over %v: f.Data is %x, want %x", on.Kind, f.Data, na)
		case (f.Conn == cb) != (on.Kind == ToConn):
			t.Errorf("ND over %v: f.Conn == cb is %v, want %v", on.Kind, f.Conn == cb, on.Kind == ToConn)
		}
		f.Release()
	}
	if b.tun.Written() != 0 {
		t.Error("ND reached the TUN")
	}
	if err := b.InjectTUN(na); err != nil || !bytes.Equal(b.tun.Receive(patience), na) {
		t.Errorf("inject: %v", err)
	}
}

func TestDeadPeerDoesNotHoldOthers(t *testing.T) { inBubble(t, testDeadPeerDoesNotHoldOthers) }

func testDeadPeerDoesNotHoldOthers(t *testing.T) {
	w := newWorld()
	a, b := start(t, w, 1, nil), start(t, w, 2, nil)
	dead, _ := connect(t, a, b, ib.RC)
	alive, _ := connect(t, a, b, ib.RC)
	a.route("10.9.0.3", NewPath(2, Target{Kind: ToConn, Conn: alive}))
	for range 300 {
		a.tun.Send(ip4("10.9.0.3", 1000, 6))
		if b.tun.Receive(patience) == nil {
			t.Fatalf("a packet to the live peer is lost: %+v", a.Counters())
		}
	}
	dead.QP().(*fakeQP).hold = true
	pd := NewPath(1, Target{Kind: ToConn, Conn: dead})
	a.route("10.9.0.2", pd)
	begin, got := time.Now(), 0
	for i := range 600 {
		a.tun.Send(ip4("10.9.0.2", 1000, 6))
		if i%2 == 0 {
			a.tun.Send(ip4("10.9.0.3", 1000, 6))
			if b.tun.Receive(patience) == nil {
				t.Fatalf("packet %d to the live peer is lost: %+v", i, a.Counters())
			}
			got++
		}
	}
	took := time.Since(begin)
	eventually(t, "all are posted, wait or are dropped", func() bool {
		c := dead.Counters()
		return int(c.QueueFull+c.Late)+c.Backlog+c.Queued == 600
	})
	c := dead.Counters()
	if c.Queued > 128 {
		t.Errorf("%d are posted to the dead peer, want 128 at most", c.Queued)
	}
	if n := pd.Counters().QueueFull; n != c.QueueFull {
		t.Errorf("the path counts %d drops, the connection %d", n, c.QueueFull)
	}
	if took != 0 { // by the bubble's clock, which stands still unless something waits for time to pass
		t.Errorf("%d packets to the live peer waited %v beside the dead one, want 0", got, took)
	}
	// It comes to life: what was queued arrives, and drops end.
	dead.QP().(*fakeQP).mu.Lock()
	dead.QP().(*fakeQP).hold = false
	dead.QP().(*fakeQP).mu.Unlock()
	dead.QP().(*fakeQP).release(1000)
	eventually(t, "queue empty", func() bool { return dead.Counters().Queued == 0 })
	for b.tun.Receive(20*time.Millisecond) != nil {
	}
	a.tun.Send(ip4("10.9.0.2", 1000, 6))
	if b.tun.Receive(patience) == nil {
		t.Error("still dropping")
	}
}

func TestErrorFlushesEveryBuffer(t *testing.T) { inBubble(t, testErrorFlushesEveryBuffer) }

func testErrorFlushesEveryBuffer(t *testing.T) {
	w := newWorld()
	a, b := start(t, w, 1, nil), start(t, w, 2, nil)
	for _, tr := range []ib.Transport{ib.RC, ib.UC} {
		c, _ := connect(t, a, b, tr)
		qp := c.QP().(*fakeQP)
		qp.hold = true
		p := NewPath(1, Target{Kind: ToConn, Conn: c})
		for range 40 {
			if err := a.Send(p, ip4("10.9.0.2", 100, 6)); err != nil {
				t.Fatal(err)
			}
		}
		qp.Modify(verbs.QPAttr{State: verbs.StateError})
		eventually(t, "flushed", func() bool { return c.Counters().TxFlushed == 40 && c.Counters().Queued == 0 })
		if n := a.RecvMemory(); (n != 0) != (tr == ib.UC) {
			t.Errorf("%v: %d octets of rings", tr, n)
		}
		for range 3 {
			if err := c.Close(); err != nil {
				t.Fatal(err)
			}
		}
		if err := a.Send(p, ip4("10.9.0.2", 100, 6)); !errors.Is(err, ErrClosed) {
			t.Errorf("send on a closed connection: %v", err)
		}
	}
	if n := a.RecvMemory(); n != 0 {
		t.Errorf("%d octets of rings left", n)
	}
}

func TestBarrierAndDests(t *testing.T) { inBubble(t, testBarrierAndDests) }

func testBarrierAndDests(t *testing.T) {
	w := newWorld()
	a := start(t, w, 1, nil)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for range 200 {
			a.tun.Send(ip4("10.9.0.2", 100, 6))
		}
	}()
	for i := range 50 {
		a.route("10.9.0.2", NewPath(uint64(i), Target{Kind: Drop}))
		a.Barrier()
	}
	<-done
	eventually(t, "all counted", func() bool {
		c := a.Counters()
		return c.TxUnreachable+c.Up+c.UpFull == 200
	})
}

func TestNoAllocsPerPacket(t *testing.T) {
	w := newWorld()
	a := &host{tun: tuntest.New("a", 1024), fab: &fabric{w: w, srq: true}}
	b := &host{tun: tuntest.New("b", 1024), fab: &fabric{w: w, srq: true}}
	for _, h := range []*host{a, b} {
		l, err := New(Config{Provider: h.fab, TUN: h.tun, SendBuffers: 128, SRQDepth: 64})
		if err != nil {
			t.Fatal(err)
		}
		h.Loop = l
		defer l.Close()
	}
	b.tun.Discard()
	ca, _ := connect(t, a, b, ib.RC)
	a.route("10.9.0.2", NewPath(1, Target{Kind: ToConn, MTU: 65520, Conn: ca}))
	a.route("10.8.0.2", NewPath(2, Target{Kind: ToUD, MTU: 2044, UD: a.udTo(b)}))
	big, ack, ud, miss := ip4("10.9.0.2", 65520, 6), ip4("10.9.0.2", 52, 6), ip4("10.8.0.2", 1500, 17),
		ip4("10.9.1.2", 100, 6)
	s := newSender(a.threads[0], a.threads[0].tun.Read)
	step := func() {
		for range 4 {
			a.tun.Send(big)
			a.tun.Send(ack)
			a.tun.Send(ud)
			a.tun.Send(miss)
		}
		if _, err := s.step(); err != nil {
			t.Fatal(err)
		}
		for range 4 {
			(<-a.Up()).Release()
		}
		b.threads[0].conn.drain()
		b.ud.drain()
		a.threads[0].sendWC.drain()
	}
	for range 100 {
		step()
	}
	if n := testing.AllocsPerRun(200, step); n > 0 {
		t.Errorf("%v allocations for 16 packets, want 0", n)
	}
	c := b.Counters()
	if c.RxConn == 0 {
		t.Error("RxConn is 0")
	}
	if c.RxUD == 0 {
		t.Error("RxUD is 0")
	}
}

// What an idle connection keeps for sending is its ring, and no flows.
func TestIdleSendQueue(t *testing.T) { inBubble(t, testIdleSendQueue) }

func testIdleSendQueue(t *testing.T) {
	w := newWorld()
	a, b := start(t, w, 1, nil), start(t, w, 2, nil)
	c, _ := connect(t, a, b, ib.RC)
	a.route("10.9.0.2", NewPath(1, Target{Kind: ToConn, Conn: c}))
	a.tun.Send(ip4("10.9.0.2", 100, 6))
	eventually(t, "sent and completed", func() bool { return c.q.packets.Load() == 1 && c.q.inflight() == 0 })
	n := int(unsafe.Sizeof(*c.q)) + cap(c.q.ring)*4
	if n > 1<<10 {
		t.Errorf("%d octets, want at most 1024", n)
	}
}

// BenchmarkStages shares the loop's cost per packet between both directions,
// without goroutines: from the TUN to the QP, and from the CQ to the TUN. The TUN
// and the fabric are in memory; the fabric copies once, within the post.
func BenchmarkStages(b *testing.B) {
	for _, size := range []int{52, 1500, 65520} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			w := newWorld()
			var hosts [2]*host
			for i := range hosts {
				h := &host{tun: tuntest.New("ibcm0", 1024), fab: &fabric{w: w, srq: true}}
				l, err := New(Config{Provider: h.fab, TUN: h.tun, SendBuffers: 128, SRQDepth: 64})
				if err != nil {
					b.Fatal(err)
				}
				defer l.Close()
				h.Loop, hosts[i] = l, h
			}
			x, y := hosts[0], hosts[1]
			y.tun.Discard()
			c, _ := connect(b, x, y, ib.RC)
			x.route("10.9.0.2", NewPath(1, Target{Kind: ToConn, MTU: 65520, Conn: c}))
			s := newSender(x.threads[0], x.threads[0].tun.Read)
			pkt := ip4("10.9.0.2", size, 6)
			var out, in time.Duration
			b.SetBytes(int64(size))
			b.ReportAllocs()
			sent := 0
			for b.Loop() {
				if x.tun.Send(pkt); x.tun.Waiting() < 16 {
					continue
				}
				start := time.Now()
				n, err := s.step()
				x.threads[0].sendWC.drain()
				mid := time.Now()
				y.threads[0].conn.drain()
				in += time.Since(mid)
				out += mid.Sub(start)
				if sent += n; err != nil {
					b.Fatal(err)
				}
			}
			switch got := y.Counters().RxConn; {
			case sent == 0 && b.N >= 16:
				b.Fatalf("%d runs sent nothing", b.N)
			case got != uint64(sent):
				b.Fatalf("got is %v, want %v", got, uint64(sent))
			}
			b.ReportMetric(float64(out)/float64(max(sent, 1)), "tun-to-qp-ns/op")
			b.ReportMetric(float64(in)/float64(max(sent, 1)), "qp-to-tun-ns/op")
		})
	}
}

// BenchmarkLoop is the loop's own cost per packet: TUN and fabric are in memory
// and copy once each.
func BenchmarkLoop(b *testing.B) {
	for _, size := range []int{52, 1500, 65520} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			w := newWorld()
			x, y := start(b, w, 1, nil), start(b, w, 2, func(c *Config, _ *fabric) { c.SRQDepth = 1024 })
			y.tun.Discard()
			c, _ := connect(b, x, y, ib.RC)
			x.route("10.9.0.2", NewPath(1, Target{Kind: ToConn, Conn: c}))
			pkt := ip4("10.9.0.2", size, 6)
			b.SetBytes(int64(size))
			b.ReportAllocs()
			for b.Loop() {
				for x.tun.Waiting() > 256 {
					runtime.Gosched()
				}
				x.tun.Send(pkt)
			}
		})
	}
}
