package datapath

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"testing"
	"time"

	"ipoibcm/fqcodel"
	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/tun/tuntest"
	"ipoibcm/verbs"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/ip"
)

// still makes two hosts whose loops do not run: a test moves every packet itself.
func still(t testing.TB, buffers int) (a, b *host) {
	t.Helper()
	w := newWorld()
	hosts := [2]*host{}
	for i := range hosts {
		h := &host{tun: tuntest.New("ibcm0", 4096), fab: &fabric{w: w, srq: true}}
		h.fab.gid = ib.GID{0: 0xfe, 1: 0x80, 15: byte(1 + i)}
		l, err := New(Config{Provider: h.fab, TUN: h.tun, SendBuffers: buffers, SRQDepth: 512})
		if err != nil {
			t.Fatal(err)
		}
		h.Loop, hosts[i] = l, h
		t.Cleanup(func() {
			l.Close()
			if large, small := l.threads[0].pool.freeSlots(); small != l.threads[0].pool.slots()-int(l.threads[0].pool.large) ||
				large < int(l.threads[0].pool.large)-batchLen-1 {
				t.Errorf("%d large and %d small buffers came back, want %d and %d", large, small, l.threads[0].pool.large,
					l.threads[0].pool.slots()-int(l.threads[0].pool.large))
			}
		})
	}
	return hosts[0], hosts[1]
}

// tryRead is Read of the TUN, which does not block.
func (h *host) tryRead(bufs [][]byte, sizes []int) (int, error) {
	if h.tun.Waiting() == 0 {
		return 0, nil
	}
	return h.tun.Read(bufs, sizes)
}

// slowed connects a to b by an RC connection that completes what release says.
func slowed(t testing.TB, a, b *host, dst string) (c *Conn, qp *fakeQP, p *Path) {
	t.Helper()
	c, _ = connect(t, a, b, ib.RC)
	qp = c.QP().(*fakeQP)
	qp.hold = true
	p = NewPath(1, Target{Kind: ToConn, Conn: c})
	a.route(dst, p)
	return c, qp, p
}

// numbered is a UDP packet of a flow with a number in it.
func numbered(dst string, flow byte, n, size int) []byte {
	b := ip4(dst, size, 17)
	b[20], b[21], b[22], b[23] = 0, flow, 0, 9
	binary.BigEndian.PutUint32(b[28:], uint32(n))
	return b
}

// readAll reads the TUN until it is empty.
func readAll(t *testing.T, s *sender) {
	t.Helper()
	for n := 1; n > 0; {
		var err error
		if n, err = s.step(); err != nil {
			t.Fatal(err)
		}
	}
}

// A slow peer's packets wait by themselves: the TUN is read on, what others are sent
// passes at once, and what waited leaves in order as the peer takes it.
func TestSlowPeerWaitsByItself(t *testing.T) {
	a, b := still(t, 256)
	slow, qp, p := slowed(t, a, b, "10.9.0.2")
	other, _ := connect(t, a, b, ib.RC)
	a.route("10.9.0.3", NewPath(2, Target{Kind: ToConn, Conn: other}))
	s := newSender(a.threads[0], a.tryRead)
	step := func() {
		t.Helper()
		readAll(t, s)
		b.threads[0].conn.drain()
		a.threads[0].sendWC.drain()
	}
	const sent = 600
	began := time.Now()
	for i := range sent {
		a.tun.Send(numbered("10.9.0.2", 1, i, 1000))
	}
	step()
	if n := a.tun.Waiting(); n != 0 {
		t.Errorf("%d packets are left in the TUN, want none", n)
	}
	c := slow.Counters()
	if c.Backlog == 0 || c.Backlog+c.Queued != sent {
		t.Errorf("%d wait and %d are posted, want %d together", c.Backlog, c.Queued, sent)
	}
	a.tun.Send(ip4("10.9.0.3", 100, 17))
	step()
	if got := b.tun.Receive(patience); len(got) != 100 {
		t.Fatalf("got %d octets for the other host, want 100", len(got))
	}
	arrived, next, dropped := 0, 0, func() int { c := p.Counters(); return int(c.Dropped + c.QueueFull) }
	for i := 0; arrived+dropped() < sent && i < 10*sent; i++ {
		qp.mu.Lock()
		n := min(7, len(qp.held))
		qp.mu.Unlock()
		qp.release(n)
		step()
		for ; b.tun.Written()-1 > arrived; arrived++ {
			n := int(binary.BigEndian.Uint32(b.tun.Receive(patience)[28:]))
			if n < next || n > next+dropped() {
				t.Fatalf("packet %d came, want %d to %d", n, next, next+dropped())
			}
			next = n + 1
		}
	}
	lost, took := dropped(), time.Since(began)
	expect.Equal(t, arrived+lost, sent, "number of packets that arrived or were dropped")
	// What waits for longer than CoDel's interval may be dropped.
	if lost > 0 && took < fqcodel.DefaultInterval {
		t.Errorf("%d packets were dropped in %v, want none", lost, took)
	}
}

// However many peers take nothing, the TUN is read, and whoever does take something
// is served. Everything is counted.
func TestDeadPeersLeaveBuffers(t *testing.T) {
	a, b := still(t, 64)
	const peers = 30
	var dead []*Conn
	for i := range peers {
		c, _, _ := slowed(t, a, b, fmt.Sprintf("10.9.1.%d", i))
		dead = append(dead, c)
	}
	other, _ := connect(t, a, b, ib.RC)
	a.route("10.9.0.3", NewPath(2, Target{Kind: ToConn, Conn: other}))
	s := newSender(a.threads[0], a.tryRead)
	for round := range 40 {
		for i := range peers {
			for _, size := range []int{60000, 500} {
				a.tun.Send(ip4(fmt.Sprintf("10.9.1.%d", i), size, 17))
			}
		}
		a.tun.Send(ip4("10.9.0.3", 1000, 17))
		readAll(t, s)
		b.threads[0].conn.drain()
		a.threads[0].sendWC.drain()
		if got := b.tun.Written(); got < round {
			t.Fatalf("%d packets to the live peer arrived of %d: %+v", got, round+1, a.Counters())
		}
	}
	c := a.Counters()
	var queued uint64
	for _, d := range dead {
		queued += uint64(d.Counters().Backlog)
	}
	if got := c.TxPackets + c.TxQueueFull + c.TxNoBuffer + queued; got != 40*(2*peers+1) {
		t.Errorf("%d packets are counted, want %d: %+v", got, 40*(2*peers+1), c)
	}
}

// CoDel marks packets that may be marked, in the header, and drops others; both are
// counted (RFC 8289, RFC 3168 section 5).
func TestLatePackets(t *testing.T) {
	for _, ect := range []byte{0, 2} {
		a, b := still(t, 256)
		c, qp, p := slowed(t, a, b, "10.9.0.2")
		var items []sendItem
		for i := range 240 {
			pkt := numbered("10.9.0.2", 1, i, 1000)
			pkt[1] = ect
			sum := ip.Checksum(pkt[:20])
			binary.BigEndian.PutUint16(pkt[10:], sum)
			slot := a.threads[0].pool.take(nil, 1)[0]
			copy(a.threads[0].pool.packet(slot), pkt)
			items = append(items, sendItem{slot: slot, n: int32(len(pkt) + headerLen), path: p})
		}
		w := newWork(a.threads[0].pool.slots())
		now := int64(time.Hour)
		a.threads[0].transmit(c.q, items, w, now)
		marked := 0
		var wcs [batchLen]verbs.WC
		for range 300 {
			now += int64(2 * time.Millisecond)
			qp.mu.Lock()
			if len(qp.held) > 0 {
				buf := qp.held[0].SG[0].Buf[headerLen:]
				if buf[1]&3 == 3 {
					marked++
				}
				if sum := ip.Checksum(buf[:20]); sum != 0 {
					t.Fatalf("the checksum of an IPv4 header is wrong by %#x", sum)
				}
			}
			qp.mu.Unlock()
			qp.release(1)
			b.threads[0].conn.drain()
			a.threads[0].sendWC.batch(wcs[:a.threads[0].sendWC.cq.Poll(wcs[:])], now)
		}
		n := a.Counters()
		if ect == 0 {
			if n.TxLate == 0 {
				t.Error("no packet was dropped")
			}
			if n.TxMarked != 0 || marked != 0 {
				t.Errorf("%d packets of a sender without ECN count as marked, %d are, want none", n.TxMarked, marked)
			}
			continue
		}
		if n.TxMarked == 0 || int(n.TxMarked) != marked {
			t.Errorf("%d packets count as marked, %d are, want the same and some", n.TxMarked, marked)
		}
		if n.TxLate != 0 {
			t.Errorf("%d packets that could be marked were dropped, want none", n.TxLate)
		}
	}
}

// What waits for a QP follows its path: from UD to the connection that was made
// meanwhile, and from a connection that is closed to the next one.
func TestWaitingPacketsFollowTheirPath(t *testing.T) {
	a, b := still(t, 256)
	ud := a.UDQP().(*fakeQP)
	ud.hold = true
	p := NewPath(1, Target{Kind: ToUD, MTU: 2044, UD: a.udTo(b)})
	a.route("10.9.0.2", p)
	s := newSender(a.threads[0], a.tryRead)
	send := func(from, to int) {
		t.Helper()
		for i := from; i < to; i++ {
			a.tun.Send(numbered("10.9.0.2", 1, i, 1000))
		}
		readAll(t, s)
	}
	send(0, 300)
	if n := a.udq.waiting.Load(); n == 0 {
		t.Fatal("nothing waits for the UD QP")
	}
	first, qp, _ := slowed(t, a, b, "10.9.0.9")
	p.Set(Target{Kind: ToConn, MTU: 65520, Conn: first})
	a.Barrier()
	ud.release(1000)
	b.ud.drain()
	a.threads[0].sendWC.drain()
	if n := a.Counters().TxMoved; n == 0 {
		t.Error("nothing moved from the UD QP to the connection")
	}
	send(300, 400)
	second, _ := connect(t, a, b, ib.RC)
	p.Set(Target{Kind: ToConn, MTU: 65520, Conn: second})
	a.Barrier()
	qp.mu.Lock()
	lost := len(qp.held)
	qp.mu.Unlock()
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	for range 20 {
		b.threads[0].conn.drain()
		a.threads[0].sendWC.drain()
	}
	last, got := -1, 0
	for b.tun.Written() > got {
		n := int(binary.BigEndian.Uint32(b.tun.Receive(patience)[28:]))
		if n <= last {
			t.Errorf("packet %d came after %d", n, last)
		}
		last = n
		got++
	}
	if got+lost != 400 {
		t.Errorf("%d packets arrived and %d were posted on the connection that was closed, want 400 together: %+v",
			got, lost, a.Counters())
	}
	if first.q.waiting.Load() != 0 {
		t.Error("packets wait for a closed connection")
	}
}

// A packet that is longer than what its path leads to now does not move there.
func TestMovedPacketKeepsMTU(t *testing.T) {
	a, b := still(t, 256)
	c, _, p := slowed(t, a, b, "10.9.0.2")
	for range 200 {
		a.tun.Send(ip4("10.9.0.2", 3000, 17))
	}
	s := newSender(a.threads[0], a.tryRead)
	readAll(t, s)
	waited := c.Counters().Backlog
	if waited == 0 {
		t.Fatal("nothing waits")
	}
	p.Set(Target{Kind: ToUD, MTU: 2044, UD: a.udTo(b)})
	c.Close()
	if n := a.Counters(); int(n.TxGone) != waited || n.TxUD != 0 {
		t.Errorf("%d packets were dropped and %d sent, want %d and none", n.TxGone, n.TxUD, waited)
	}
}

// Short packets wait in small buffers, and are what they were.
func TestShortPacketsWaitInSmallBuffers(t *testing.T) {
	a, b := still(t, 64)
	_, qp, _ := slowed(t, a, b, "10.9.0.2")
	want := ip4("10.9.0.2", smallPacket, 17)
	s := newSender(a.threads[0], a.tryRead)
	for range 150 {
		a.tun.Send(want)
	}
	readAll(t, s)
	if _, small := a.threads[0].pool.freeSlots(); small == a.threads[0].pool.slots()-int(a.threads[0].pool.large) {
		t.Error("no small buffer is used")
	}
	for range 40 {
		qp.release(8)
		b.threads[0].conn.drain()
		a.threads[0].sendWC.drain()
	}
	n := b.tun.Written()
	for range n {
		if got := b.tun.Receive(patience); !bytes.Equal(got, want) {
			t.Fatalf("a packet of %d octets came, want that of %d", len(got), len(want))
		}
	}
	if n != 150 {
		t.Errorf("%d packets arrived, want 150: %+v", n, a.Counters())
	}
}

// Nothing is allocated while packets wait, are marked, dropped and sent.
func TestNoAllocsWhileWaiting(t *testing.T) {
	a, b := still(t, 128)
	b.tun.Discard()
	s := newSender(a.threads[0], a.tryRead)
	pkts := [][]byte{ip4("10.9.0.2", 1000, 17), ip4("10.9.0.2", 60000, 6)}
	var items []sendItem
	p := NewPath(1, Target{Kind: ToConn, Conn: func() *Conn { c, _ := connect(t, a, b, ib.RC); return c }()})
	q := p.Target().Conn.q
	q.depth = 0 // nothing can be posted
	now := int64(1)
	step := func() {
		items = items[:0]
		for i := range 32 {
			s.slots = a.threads[0].pool.take(s.slots[:0], 1)
			if len(s.slots) == 0 {
				break
			}
			n := copy(a.threads[0].pool.packet(s.slots[0]), pkts[i%2])
			items = append(items, sendItem{slot: s.slots[0], n: int32(n + headerLen), path: p})
			s.slots = s.slots[:0]
		}
		now += int64(time.Millisecond)
		a.threads[0].transmit(q, items, s.work, now)
		q.depth = 4
		a.threads[0].pump(q, s.work, now+int64(time.Second))
		q.depth = 0
		b.threads[0].conn.drain()
		a.threads[0].sendWC.drain()
	}
	for range 50 {
		step()
	}
	if n := testing.AllocsPerRun(100, step); n > 0 {
		t.Errorf("%v allocations for 32 packets, want 0", n)
	}
	switch c := a.Counters(); {
	case c.TxQueueFull == 0:
		t.Errorf("TxQueueFull 0, want some")
	case c.TxWaited == 0:
		t.Errorf("TxWaited 0, want some")
	case c.TxConn == 0:
		t.Errorf("TxConn 0, want some")
	}
}

// A class is an address handle that knows of traffic classes.
type class struct {
	fakeAH
	others map[uint8]verbs.AH
}

func (c *class) WithClass(n uint8) verbs.AH {
	if c.others[n] == nil {
		c.others[n] = &class{fakeAH: fakeAH{TrafficClass: n}}
	}
	return c.others[n]
}

// Where the DSCP, or the ECN codepoint, is inherited each datagram has that of its IP
// packet; all else, and what is no IP, has the address handle's.
func TestInheritedClass(t *testing.T) {
	a, b := still(t, 256)
	given := &class{others: map[uint8]verbs.AH{}}
	packet := func(tos byte) []byte {
		p := ip4("10.9.0.2", 100, 17)
		p[1] = tos
		return p
	}
	v6 := make([]byte, 60)
	v6[0], v6[1], v6[5] = 0x60|0xb, 0x9<<4, 20 // EF and ECT(1)
	for _, tt := range []struct {
		name   string
		copies uint8
		t      encap.EtherType
		pkt    []byte
		want   uint8
	}{
		{"IPv4", ip.DSCPMask, encap.IPv4, packet(0x48), 0x4b},
		{"IPv4 and ECN", ip.DSCPMask, encap.IPv4, packet(0x4b), 0x4b},
		{"IPv6", ip.DSCPMask, encap.IPv6, v6, 0xbb},
		{"IPv4 without a DSCP", ip.DSCPMask, encap.IPv4, packet(0), 3},
		{"ARP", ip.DSCPMask, encap.ARP, packet(0x48), 0xff},
		{"not inherited", 0, encap.IPv4, packet(0x48), 0xff},
		{"ECN only", ip.ECNMask, encap.IPv4, packet(0x4a), 0xfe},
		{"both", ip.ECNMask | ip.DSCPMask, encap.IPv4, packet(0x4b), 0x4b},
	} {
		given.TrafficClass = 0xff
		a.udq.copies.Store(uint32(tt.copies))
		slot := a.threads[0].pool.take(nil, 1)
		n := copy(a.threads[0].pool.packet(slot[0]), tt.pkt)
		encap.Put(a.threads[0].pool.message(slot[0], 0), tt.t)
		it := sendItem{slot: slot[0], n: int32(n + headerLen), ud: UDDest{AH: given, QPN: b.UDQP().QPN()}}
		if got := a.udq.classed(&it).Attr().TrafficClass; got != tt.want {
			t.Errorf("%s: traffic class %#x, want %#x", tt.name, got, tt.want)
		}
		a.threads[0].pool.give(slot)
	}
}

// A rate, in octets per second, may be above what 32 bits hold.
func TestBoundOfFastPeer(t *testing.T) {
	q := &sendQ{}
	q.rate.Store(3e9)
	if got, want := q.bound(), 300_000_000; got != want {
		t.Errorf("%d octets may wait at 24 Gb/s, want %d", got, want)
	}
}
