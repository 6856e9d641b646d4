package datapath

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"testing"

	"ipoibcm/ib"
	"ipoibcm/tun"
	"ipoibcm/tun/tuntest"
)

// queues gives a host n data threads, and returns the queues of its TUN from the second on.
func queues(n int) (fakes []*tuntest.Fake, tune func(*Config, *fabric)) {
	for range n - 1 {
		fakes = append(fakes, tuntest.New("ibcm0", 1024))
	}
	return fakes, func(c *Config, f *fabric) {
		f.threads = n
		c.Provider = threader{f}
		for _, q := range fakes {
			c.Queues = append(c.Queues, q)
		}
	}
}

// idleHost returns a host that nobody runs, with two threads.
func idleHost(t *testing.T, w *world, last byte, buffers int) (h *host, second *tuntest.Fake) {
	t.Helper()
	h = &host{tun: tuntest.New("ibcm0", 1024), fab: &fabric{w: w, srq: true, gid: ib.GID{0: 0xfe, 1: 0x80, 15: last}}}
	fakes, tune := queues(2)
	cfg := Config{TUN: h.tun, SendBuffers: buffers, SRQDepth: 64}
	tune(&cfg, h.fab)
	l, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	h.Loop = l
	t.Cleanup(func() { l.Close() })
	return h, fakes[0]
}

// Connections go where there are the fewest.
func TestConnectionsAreSpread(t *testing.T) {
	_, tune := queues(3)
	a := start(t, newWorld(), 1, tune)
	var conns []*Conn
	open := func(want int) {
		t.Helper()
		c, err := a.NewConn(ib.RC, 65524)
		if err != nil {
			t.Fatal(err)
		}
		if got := c.Thread(); got != want {
			t.Errorf("connection %d is of thread %d, want %d", len(conns), got, want)
		}
		conns = append(conns, c)
	}
	for _, want := range []int{0, 1, 2, 0, 1, 2, 0} {
		open(want)
	}
	conns[1].Close()
	conns[1].Close() // counts once
	open(1)
	open(1)
}

// A loop needs a thread of the provider's for each queue.
func TestMoreQueuesThanThreads(t *testing.T) {
	fab := &fabric{w: newWorld(), srq: true}
	cfg := Config{Provider: fab, TUN: tuntest.New("a", 8), Queues: []tun.Device{tuntest.New("b", 8)}}
	if _, err := New(cfg); err == nil {
		t.Error("two queues and a provider with one thread: no error")
	}
	if fab.live != 0 {
		t.Errorf("%d regions left, want none", fab.live)
	}
	fab.threads = 2
	cfg.Provider, cfg.Queues = threader{fab}, append(cfg.Queues, tuntest.New("c", 8))
	if _, err := New(cfg); err == nil {
		t.Error("three queues and a provider with two threads: no error")
	}
	if fab.live != 0 {
		t.Errorf("%d regions left, want none", fab.live)
	}
}

// What one thread reads for a connection of another is posted from that one's buffers, in order,
// and costs no memory.
func TestReadByAnotherThread(t *testing.T) {
	w := newWorld()
	a, second := idleHost(t, w, 1, 128)
	b, _ := idleHost(t, w, 2, 128)
	near, _ := connect(t, a, b, ib.RC)
	far, peer := connect(t, a, b, ib.RC)
	got, want := []int{near.Thread(), far.Thread(), peer.Thread()}, []int{0, 1, 1}
	if !slices.Equal(got, want) {
		t.Fatalf("the threads are %v, want %v", got, want)
	}
	a.route("10.9.0.1", NewPath(1, Target{Kind: ToConn, MTU: 65520, Conn: near}))
	a.route("10.9.0.2", NewPath(2, Target{Kind: ToConn, MTU: 65520, Conn: far}))
	s, s2 := newSender(a.threads[0], a.threads[0].tun.Read), newSender(a.threads[1], a.threads[1].tun.Read)
	sizes := []int{100, 2048, 65520, 9000}
	var pkts [][]byte
	for i, n := range sizes {
		p := ip4("10.9.0.2", n, 6)
		binary.BigEndian.PutUint16(p[4:], uint16(i)) // identification
		pkts = append(pkts, p)
	}
	other := ip4("10.9.0.1", 500, 6)
	step := func() {
		for _, p := range pkts {
			a.tun.Send(p)
			a.tun.Send(other)
		}
		second.Send(pkts[0])
		for _, s := range []*sender{s, s2} {
			if _, err := s.step(); err != nil {
				t.Fatal(err)
			}
		}
		for i := range 2 {
			b.threads[i].conn.drain()
			a.threads[i].sendWC.drain()
		}
	}
	step()
	from := b.threads[1].tun.(*tuntest.Fake)
	for i, want := range append(pkts, pkts[0]) {
		if got := from.Receive(patience); !bytes.Equal(got, want) {
			t.Fatalf("packet %d: %d octets, want %d", i, len(got), len(want))
		}
	}
	if got := a.Counters().TxOtherThread; got != uint64(len(pkts)) {
		t.Errorf("TxOtherThread %d, want %d", got, len(pkts))
	}
	if got := near.Counters().TxPackets; got != uint64(len(pkts)) {
		t.Errorf("%d packets to the connection of the same thread, want %d", got, len(pkts))
	}
	b.tun.Discard()
	from.Discard()
	for range 20 {
		step()
	}
	if n := testing.AllocsPerRun(100, step); n > 0 {
		t.Errorf("%v allocations for 9 packets, want 0", n)
	}
	for i, s := range []*sender{s, s2} {
		pool := a.threads[i].pool
		large, small := pool.freeSlots()
		if large += len(s.slots); large != int(pool.large) || small != pool.slots()-int(pool.large) {
			t.Errorf("thread %d: %d large and %d small buffers came back, want %d and %d", i, large, small, pool.large,
				pool.slots()-int(pool.large))
		}
	}
}

// A thread without buffers drops what another reads for it, and takes nothing of that one's.
func TestNoBufferOfAnotherThread(t *testing.T) {
	w := newWorld()
	a, _ := idleHost(t, w, 1, 64)
	b, _ := idleHost(t, w, 2, 64)
	near, _ := connect(t, a, b, ib.RC)
	far, _ := connect(t, a, b, ib.RC)
	a.route("10.9.0.1", NewPath(1, Target{Kind: ToConn, MTU: 65520, Conn: near}))
	a.route("10.9.0.2", NewPath(2, Target{Kind: ToConn, MTU: 65520, Conn: far}))
	pool := a.threads[1].pool
	taken := pool.take(nil, int(pool.large))
	s := newSender(a.threads[0], a.threads[0].tun.Read)
	for range batchLen {
		a.tun.Send(ip4("10.9.0.2", 9000, 6))
		a.tun.Send(ip4("10.9.0.1", 9000, 6))
	}
	for range 2 {
		if _, err := s.step(); err != nil {
			t.Fatal(err)
		}
		a.threads[0].sendWC.drain()
	}
	if got := a.Counters().TxNoBuffer; got != batchLen {
		t.Errorf("TxNoBuffer %d, want %d", got, batchLen)
	}
	if got := near.Counters().TxPackets; got != batchLen {
		t.Errorf("%d packets to the connection of the same thread, want %d", got, batchLen)
	}
	pool.give(taken)
	if large, _ := pool.freeSlots(); large != int(pool.large) {
		t.Errorf("%d buffers, want %d", large, pool.large)
	}
}

// Packets that wait for the UD queue pair go on to a connection of another thread.
func TestMovedToAnotherThread(t *testing.T) {
	w := newWorld()
	a, _ := idleHost(t, w, 1, 128)
	b, _ := idleHost(t, w, 2, 128)
	connect(t, a, b, ib.RC)
	far, _ := connect(t, a, b, ib.RC)
	p := NewPath(1, Target{Kind: ToUD, MTU: 2044, UD: a.udTo(b)})
	a.route("10.9.0.2", p)
	ud := a.UDQP().(*fakeQP)
	ud.hold = true
	s := newSender(a.threads[0], a.threads[0].tun.Read)
	const n = 100 // more than the UD queue pair takes, by fewer than there are receives
	for i := range n {
		pkt := ip4("10.9.0.2", 1000, 6)
		binary.BigEndian.PutUint16(pkt[4:], uint16(i))
		a.tun.Send(pkt)
		if _, err := s.step(); err != nil {
			t.Fatal(err)
		}
	}
	waited := a.udq.waiting.Load()
	if waited == 0 {
		t.Fatal("nothing waits")
	}
	p.Set(Target{Kind: ToConn, MTU: 65520, Conn: far})
	for range 4 {
		ud.release(n)
		a.threads[0].sendWC.drain()
		b.threads[1].conn.drain()
		a.threads[1].sendWC.drain()
	}
	if got := far.Counters().TxPackets; got != uint64(waited) {
		t.Errorf("%d packets of %d went on", got, waited)
	}
	from, last := b.threads[1].tun.(*tuntest.Fake), -1
	for range waited {
		pkt := from.Receive(patience)
		if pkt == nil {
			t.Fatalf("a packet is missing behind %d of %d: %+v", last, waited, b.Counters())
		}
		if i := int(binary.BigEndian.Uint16(pkt[4:])); i <= last {
			t.Fatalf("packet %d behind %d", i, last)
		} else {
			last = i
		}
	}
}

// All threads send to all connections while some go and come, and the buffers come back.
func TestThreadsTogether(t *testing.T) { inBubble(t, testThreadsTogether) }

func testThreadsTogether(t *testing.T) {
	const n = 3
	w := newWorld()
	fa, tuneA := queues(n)
	_, tuneB := queues(n)
	a := start(t, w, 1, func(c *Config, f *fabric) { tuneA(c, f); f.callback = true })
	b := start(t, w, 2, func(c *Config, f *fabric) { tuneB(c, f); f.callback = true })
	var paths []*Path
	var conns []*Conn
	for i := range 2 * n {
		c, _ := connect(t, a, b, ib.RC)
		p := NewPath(uint64(i), Target{Kind: ToConn, MTU: 65520, Conn: c})
		a.route(fmt.Sprintf("10.9.0.%d", i+1), p)
		paths, conns = append(paths, p), append(conns, c)
	}
	qs := append([]*tuntest.Fake{a.tun}, fa...)
	for round := range 20 {
		for i := range paths {
			for k, q := range qs {
				q.Send(ip4(fmt.Sprintf("10.9.0.%d", i+1), 100+1000*k, 6))
			}
		}
		i := round % len(paths)
		c, _ := connect(t, a, b, ib.RC)
		paths[i].Set(Target{Kind: ToConn, MTU: 65520, Conn: c})
		a.Barrier()
		conns[i].Close()
		conns[i] = c
	}
	want := uint64(20 * len(paths) * n)
	eventually(t, "all packets are sent or dropped", func() bool {
		c := a.Counters()
		lost := 0
		for _, q := range qs {
			lost += q.Lost()
		}
		return c.TxPackets+c.TxGone+c.TxNoBuffer+c.TxQueueFull+c.TxLate+uint64(lost) >= want
	})
	if a.Counters().TxOtherThread == 0 {
		t.Error("nothing was read by another thread than the connection's")
	}
}
