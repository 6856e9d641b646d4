package datapath

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/tun/tuntest"
	"ipoibcm/verbs"
	"ipoibcm/wire/encap"
)

// A busyConn is a connection for which packets wait, all of them such as have waited, and whose rate is known.
type busyConn struct {
	t    *testing.T
	a, b *host
	c    *Conn
	qp   *fakeQP
	tun  *tuntest.Fake // of the thread of c
	s    *sender
	to   []*tuntest.Fake // where packets arrive
	read [2]int          // how many arrived has returned of each
}

// newBusyConn has flow 1 send more packets than may be posted. Flows 2 to 6 are counted in other sets.
func newBusyConn(t *testing.T) *busyConn {
	return newBusyConnOf(t, seedOf(func(sets []uint16) bool { return !slices.Contains(sets[1:], sets[0]) }))
}

func newBusyConnOf(t *testing.T, s seed) *busyConn {
	a, b := still(t, 256)
	k := &busyConn{t: t, a: a, b: b, tun: a.tun, to: []*tuntest.Fake{b.tun}}
	k.start(s)
	return k
}

// seedOf returns a seed for which the sets in which flows 1 to 6 are counted are as ok wants them.
func seedOf(ok func(sets []uint16) bool) seed {
	for i := uint64(0); ; i++ {
		r := rand.New(rand.NewPCG(i, 0))
		var b backlog
		for j := range b.seed {
			b.seed[j] = r.Uint64()
		}
		var sets []uint16
		for flow := range byte(6) {
			sets = append(sets, flowSet(b.hash(numbered("10.9.0.2", 1+flow, 0, 100))))
		}
		if ok(sets) {
			return b.seed
		}
	}
}

// start begins with s as the seed of the hashes.
func (k *busyConn) start(s seed) {
	t := k.t
	for _, th := range k.a.threads {
		th.backlog.seed = s
	}
	var p *Path
	k.c, k.qp, p = slowed(t, k.a, k.b, "10.9.0.2")
	p.Set(Target{Kind: ToConn, Conn: k.c, UD: k.a.udTo(k.b), UDMTU: 1400})
	k.s = newSender(k.c.th, (&host{tun: k.tun}).tryRead)
	c := k.c
	for i := range 400 {
		k.tun.Send(numbered("10.9.0.2", 1, i, 1000))
	}
	readAll(t, k.s)
	k.release(c.Counters().Queued) // the first were posted without waiting
	k.arrived()
	if d := c.q.direct.Load(); d != 0 || c.Counters().Backlog == 0 {
		t.Fatalf("%d were posted without waiting, %d wait", d, c.Counters().Backlog)
	}
}

// release completes n requests, and has the loop post others. The rate is that of 1 Gb/s.
func (k *busyConn) release(n int) {
	k.qp.release(n)
	for _, th := range k.b.threads {
		th.conn.drain()
	}
	k.c.th.sendWC.drain()
	k.c.q.rate.Store(1e9 / 8)
}

// send has the host send packet n of a flow.
func (k *busyConn) send(flow byte, n, size int) {
	k.tun.Send(numbered("10.9.0.2", flow, n, size))
	readAll(k.t, k.s)
	k.b.ud.drain()
}

// arrived returns the flows and numbers of the packets that have arrived since it was called last.
func (k *busyConn) arrived() (got []string) {
	for i, tun := range k.to {
		for ; k.read[i] < tun.Written(); k.read[i]++ {
			p := tun.Receive(patience)
			got = append(got, fmt.Sprintf("%d/%d", p[21], binary.BigEndian.Uint32(p[28:])))
		}
	}
	return got
}

// While packets wait for a connection, those of a sparse flow go by UD at once. Others do not: of a flow that has
// something waiting, or posted, and larger ones.
func TestSparseFlowsPassBy(t *testing.T) {
	k := newBusyConn(t)
	k.send(2, 0, 100)
	k.send(2, 1, 1400)
	expect.Equal(t, fmt.Sprint(k.arrived()), "[2/0 2/1]", "what arrives of a sparse flow")
	expect.Equal(t, k.a.Counters().TxSparse, uint64(2), "TxSparse")
	expect.Equal(t, k.a.Counters().TxUD, uint64(2), "TxUD")

	k.send(1, 1000, 100)
	k.send(3, 0, 1401)
	k.send(3, 1, 100) // behind the large one
	expect.Equal(t, fmt.Sprint(k.arrived()), "[]", "what arrives of other flows")

	for i := 0; k.a.backlogHas(k.c, 3); i++ {
		if i == 200 {
			t.Fatal("flow 3 has no turn")
		}
		k.release(1)
	}
	k.arrived()
	k.send(3, 2, 100) // the two before are posted
	expect.Equal(t, fmt.Sprint(k.arrived()), "[]", "what arrives behind a posted packet")
	expect.Equal(t, k.a.Counters().TxSparse, uint64(2), "TxSparse at the end")
}

// A flow that is counted in one set with another waits while anything of that one is posted.
func TestFlowsThatShareASet(t *testing.T) {
	k := newBusyConnOf(t, seedOf(func(sets []uint16) bool { return sets[1] == sets[0] && sets[2] != sets[0] }))
	waits := k.c.Counters().Backlog
	k.send(2, 0, 100)
	k.send(3, 0, 100)
	expect.Equal(t, fmt.Sprint(k.arrived()), "[3/0]", "what arrives")
	expect.Equal(t, k.c.Counters().Backlog, waits+1, "packets that wait for the connection")
}

// backlogHas reports whether a packet of the flow waits for c.
func (h *host) backlogHas(c *Conn, flow byte) bool {
	b := &h.threads[0].backlog
	b.mu.Lock()
	defer b.mu.Unlock()
	for slot := range b.items {
		if b.items[slot].path != nil && h.threads[0].pool.packet(int32(slot))[21] == flow {
			return true
		}
	}
	return false
}

// Whatever flows do, and whenever requests complete, the packets of a flow arrive in order.
func TestSparseFlowsKeepOrder(t *testing.T) {
	for seed := range uint64(20) {
		k := newBusyConn(t)
		r := rand.New(rand.NewPCG(seed, 1))
		sent, last, passed := map[byte]int{}, map[string]int{}, uint64(0)
		check := func() {
			for _, p := range k.arrived() {
				var flow, n int
				fmt.Sscanf(p, "%d/%d", &flow, &n)
				if key := fmt.Sprint(flow); n < last[key] {
					t.Fatalf("seed %d: packet %d of flow %s came after packet %d", seed, n, key, last[key]-1)
				} else {
					last[key] = n + 1
				}
			}
		}
		sent[1] = 400
		for range 300 {
			if flow := byte(1 + r.IntN(6)); r.IntN(3) > 0 {
				k.send(flow, sent[flow], []int{64, 1000, 1400, 3000}[r.IntN(4)])
				sent[flow]++
			} else {
				k.release(1 + r.IntN(12))
			}
			k.a.threads[0].backlog.mu.Lock()
			k.c.q.sparseAt = 0
			k.a.threads[0].backlog.mu.Unlock()
			check()
		}
		if passed = k.a.Counters().TxSparse; passed == 0 {
			t.Errorf("seed %d: nothing went by UD", seed)
		}
	}
}

// Of many sparse flows only some pass by: one packet in a millisecond, after a burst, and an eighth of the rate.
func TestSparseFlowsAreBounded(t *testing.T) {
	for _, tt := range []struct {
		rate int64 // octets per second
		size int
		want uint64
	}{
		{1e9 / 8, 100, 31},
		{2.5e6, 1000, 10}, // 3.2 ms each
		{0, 100, 0},       // not known yet
	} {
		k := newBusyConn(t)
		k.c.q.rate.Store(tt.rate)
		w := k.a.threads[0]
		var items []sendItem
		for i := range 100 {
			slot := w.pool.take(nil, 1)[0]
			pkt := numbered("10.9.0.2", byte(10+i), 0, tt.size)
			copy(w.pool.packet(slot), pkt)
			items = append(items, sendItem{slot: slot, n: int32(tt.size + headerLen), path: k.a.dests.Load().lookup(encap.IPv4, pkt).path.Load()})
		}
		passed := w.enqueue(k.c.q, items, true, nanotime())
		expect.Equal(t, uint64(passed), tt.want, "packets of %d octets that pass by at %d octets per second", tt.size, tt.rate)
		w.passBy(k.c.q, items[:passed], k.s.work, nanotime())
		expect.Equal(t, k.a.Counters().TxSparse, tt.want, "TxSparse")
	}
}

// What the UD QP does not take at once waits for the connection; nothing is lost.
func TestSparseFlowsBesideFullUD(t *testing.T) {
	k := newBusyConn(t)
	k.a.route("10.8.0.2", NewPath(3, Target{Kind: ToUD, UD: k.a.udTo(k.b)}))
	k.a.UDQP().(*fakeQP).hold = true
	for i := range 60 { // more octets than may be posted at first, and fewer requests than the QP takes
		k.a.tun.Send(numbered("10.8.0.2", 1, i, 3000))
	}
	readAll(t, k.s)
	waits := k.c.Counters().Backlog
	k.send(2, 0, 100)
	expect.Equal(t, k.c.Counters().Backlog, waits+1, "packets that wait for the connection")
	expect.Equal(t, k.a.Counters().TxSparse, uint64(0), "TxSparse")
}

// The connection may belong to another thread than the UD QP.
func TestSparseFlowsOfAnotherThread(t *testing.T) {
	w := newWorld()
	a, second := idleHost(t, w, 1, 256)
	b, other := idleHost(t, w, 2, 256)
	connect(t, a, b, ib.RC) // on the first thread
	k := &busyConn{t: t, a: a, b: b, tun: second, to: []*tuntest.Fake{b.tun, other}}
	k.start(seedOf(func(sets []uint16) bool { return sets[1] != sets[0] && sets[2] != sets[0] }))
	if k.c.th == a.udq.th {
		t.Fatal("the connection is on the thread of the UD QP")
	}
	left := func() string {
		large, small := a.udq.th.pool.freeSlots()
		return fmt.Sprintf("%d large, %d small", large, small)
	}
	free := left()
	k.send(2, 0, 100)
	expect.Equal(t, fmt.Sprint(k.arrived()), "[2/0]", "what arrives")
	expect.Equal(t, k.a.Counters().TxSparse, uint64(1), "TxSparse")
	a.udq.th.sendWC.drain()
	expect.Equal(t, left(), free, "free buffers of the UD QP's thread")

	a.UDQP().(*fakeQP).fail = verbs.ErrInvalid
	waits := k.c.Counters().Backlog
	k.send(3, 0, 100)
	expect.Equal(t, k.c.Counters().Backlog, waits+1, "packets that wait for the connection")
	expect.Equal(t, left(), free, "free buffers after the UD QP has refused one")
}

// A path that ceases to have UD between the two steps.
func TestSparseFlowsWithoutUD(t *testing.T) {
	k := newBusyConn(t)
	th := k.a.threads[0]
	pkt := numbered("10.9.0.2", 2, 0, 100)
	p := k.a.dests.Load().lookup(encap.IPv4, pkt).path.Load()
	slot := th.pool.take(nil, 1)[0]
	copy(th.pool.packet(slot), pkt)
	items := []sendItem{{slot: slot, n: 104, path: p}}
	expect.Equal(t, th.enqueue(k.c.q, items, true, nanotime()), 1, "packets that pass by")
	p.Set(Target{Kind: ToConn, Conn: k.c})
	waits := k.c.Counters().Backlog
	th.passBy(k.c.q, items, k.s.work, nanotime())
	expect.Equal(t, k.c.Counters().Backlog, waits+1, "packets that wait for the connection")
	expect.Equal(t, k.a.Counters().TxSparse, uint64(0), "TxSparse")
}

// While another goroutine posts on the connection, it may have a packet of the flow in hand: nothing passes by.
func TestSparseFlowsBesideAPoster(t *testing.T) {
	k := newBusyConn(t)
	k.c.q.turns.Store(1)
	k.send(2, 0, 100)
	expect.Equal(t, k.a.Counters().TxSparse, uint64(0), "TxSparse")
	k.c.q.turns.Store(0)
	k.send(3, 0, 100)
	expect.Equal(t, k.a.Counters().TxSparse, uint64(1), "TxSparse later")
}

func TestSparseFlowsDoNotAllocate(t *testing.T) {
	k := newBusyConn(t)
	k.b.tun.Discard()
	pkt := numbered("10.9.0.2", 2, 0, 100)
	step := func() {
		k.c.q.sparseAt = 0
		k.tun.Send(pkt)
		if _, err := k.s.step(); err != nil {
			t.Fatal(err)
		}
		k.b.ud.drain()
		k.a.threads[0].sendWC.drain()
		k.c.q.rate.Store(1e9 / 8)
	}
	before := k.a.Counters().TxSparse
	if n := testing.AllocsPerRun(100, step); n > 0 {
		t.Errorf("%v allocations for a packet, want none", n)
	}
	if n := k.a.Counters().TxSparse - before; n < 100 {
		t.Errorf("%d packets went by UD, want all", n)
	}
}
