package datapath

import (
	"net/netip"
	"testing"

	"ipoibcm/ib"
	"ipoibcm/rtnl"
	"ipoibcm/tun/tuntest"
	"ipoibcm/verbs"
)

// FuzzLoop gives a loop, step by step, packets from the TUN, messages from the
// fabric, completions with errors and connections that go. Nothing panics, every
// packet and every message is counted exactly once, and every buffer comes back.
func FuzzLoop(f *testing.F) {
	rec := func(kind byte, b []byte) []byte { return append([]byte{kind, byte(len(b))}, b...) }
	mad := rec(0, append([]byte{0x88, 0xb5, 0, 0}, make([]byte, 60)...))
	for _, in := range [][]byte{
		append(rec(0, append([]byte{8, 0, 0, 0}, ip4("10.9.0.2", 40, 17)...)),
			rec(1, append([]byte{0x86, 0xdd, 0, 0}, ip6("fe80::1", 58, 135, 0)...))...),
		append(rec(2, ip4("10.9.1.2", 60, 6)), rec(2, ip4("10.9.2.2", 60, 6))...),
		append(rec(3, ip4("10.9.2.2", 60, 6)), rec(2, ip4("10.9.2.2", 60, 6))...),
		append(rec(4, nil), rec(2, ip4("10.9.2.2", 60, 6))...),
		append(mad, rec(5, []byte{9})...),
		append(rec(2, ip4("224.0.0.22", 40, 2)), rec(6, []byte{1, 2})...),
		rec(0, append([]byte{8, 6, 0, 0}, make([]byte, 56)...)),
		append(rec(7, nil), rec(2, ip4("10.9.2.2", 60, 6))...),
		append(rec(2, []byte{1}), rec(1, []byte{0: 0x86, 1: 0xdd, 43: 0})...),
		append(rec(4, nil), append(rec(3, ip4("10.9.3.2", 60, 6)), rec(3, ip4("10.9.2.2", 221, 6))...)...),
	} {
		f.Add(false, in)
		f.Add(true, in)
	}
	f.Fuzz(func(t *testing.T, srq bool, in []byte) {
		u := newLoopUser(t, srq)
		for i := 0; len(in) >= 2 && i < 200; i++ {
			kind, n := in[0], min(int(in[1]), len(in)-2)
			u.do(kind, in[2:2+n])
			in = in[2+n:]
		}
		u.end()
	})
}

// A loopUser drives the parts of a Loop by hand, without Run, and keeps books.
type loopUser struct {
	t       *testing.T
	l       *Loop
	w       *world
	tun     *tuntest.Fake
	fab     *fabric
	send    *sender
	c       *Conn
	next    [][]byte // what the TUN reads
	peer    *fakeQP  // sends UD messages
	conn    *fakeQP  // sends on the connection
	read    int      // packets from the TUN
	arrived int      // messages that found a buffer
	failed  int      // of them, completions with an error
}

// A recycler gives large regions out again: zeroing 4 MiB takes longer than what
// is tested.
type recycler struct {
	*fabric
	free *[][]byte
}

var recycled [][]byte // fuzz workers are processes

func (r recycler) Alloc(n int) (*verbs.Region, error) {
	for i, b := range *r.free {
		if len(b) == n {
			*r.free = append((*r.free)[:i], (*r.free)[i+1:]...)
			r.live++
			return &verbs.Region{Buf: b}, nil
		}
	}
	return r.fabric.Alloc(n)
}

func (r recycler) Deregister(g *verbs.Region) error {
	if len(*r.free) < 8 {
		*r.free = append(*r.free, g.Buf)
	}
	return r.fabric.Deregister(g)
}

func newLoopUser(t *testing.T, srq bool) *loopUser {
	w := newWorld()
	u := &loopUser{t: t, w: w, tun: tuntest.New("ibcm0", 64),
		fab: &fabric{w: w, srq: srq, gid: ib.GID{0: 0xfe, 1: 0x80, 15: 1}}}
	u.tun.Discard()
	l, err := New(Config{Provider: recycler{u.fab, &recycled}, TUN: u.tun, SendBuffers: 2 * batchLen, SRQDepth: 4,
		UDRecvDepth: 4, UCRecvDepth: 4, ReceiveMTU: 2048, UDSendDepth: 4, UpDepth: 16})
	if err != nil {
		t.Fatal(err)
	}
	u.l = l
	if u.c, err = l.NewConn(ib.RC, 2048); err != nil {
		t.Fatal(err)
	}
	if err := u.c.PostRecvs(); err != nil {
		t.Fatal(err)
	}
	other := &fabric{w: w, gid: ib.GID{0: 0xfe, 1: 0x80, 15: 2}}
	cq := &fakeCQ{wake: make(chan struct{}, 1), dead: make(chan struct{})}
	make := func(tr ib.Transport, dest ib.QPN) *fakeQP {
		q, _ := other.CreateQP(verbs.QPInit{Transport: tr, SendCQ: cq, RecvCQ: cq, SendDepth: 1 << 16})
		q.(*fakeQP).dest = dest
		return q.(*fakeQP)
	}
	u.peer, u.conn = make(ib.UD, 0), make(ib.RC, u.c.QP().QPN())
	u.c.QP().(*fakeQP).dest = u.conn.qpn
	u.send = newSender(l.threads[0], func(bufs [][]byte, sizes []int) (n int, err error) {
		for n = range min(len(bufs), len(u.next)) {
			sizes[n] = copy(bufs[n], u.next[n])
		}
		n = min(len(bufs), len(u.next))
		u.next = u.next[n:]
		u.read += n
		return n, nil
	})
	ud := UDDest{AH: fakeAH{DGID: other.gid}, QPN: u.peer.qpn, QKey: 0xb1b}
	onConn := Target{Kind: ToConn, MTU: 220, Conn: u.c}
	for dst, target := range map[string]Target{
		"10.9.0.2": {Kind: Miss}, "10.9.1.2": {Kind: ToUD, MTU: 200, UD: ud}, "10.9.2.2": onConn, "10.9.3.2": onConn,
		"224.1.1.1": onConn, "10.9.4.2": {Kind: Drop}, "fe80::1": {Kind: ToUD, MTU: 100, UD: ud},
		"fd00::2": {Kind: ToConn, Conn: u.c}, "ff02::1": {Kind: ToConn, Conn: u.c},
	} {
		l.SetDest(rtnl.Flow{Dst: netip.MustParseAddr(dst)}, NewPath(1, target))
	}
	l.StaleAll() // the first packet that takes an entry sends a frame up
	return u
}

// do is one step of the script.
func (u *loopUser) do(kind byte, b []byte) {
	switch kind % 8 {
	case 0: // a datagram
		u.arrive(u.l.UDQP().(*fakeQP), func() {
			u.peer.deliver(&verbs.SendWR{AH: fakeAH{DGID: u.fab.gid}, RemoteQPN: u.l.UDQP().QPN(), SG: []verbs.SGE{{Buf: b}}})
		})
	case 1: // a message of the connection
		u.arrive(u.c.QP().(*fakeQP), func() { u.conn.deliver(&verbs.SendWR{SG: []verbs.SGE{{Buf: b}}}) })
	case 2, 3: // a packet, once or more often than the queue has room
		for range 1 + int(kind%8-2)*40 {
			u.next = append(u.next, b)
		}
	case 4: // requests stay with the provider, or are done
		q := u.c.QP().(*fakeQP)
		if q.hold = !q.hold; !q.hold {
			q.release(1 << 16)
		}
	case 5: // a receive ends badly
		q := u.c.QP().(*fakeQP)
		u.arrive(q, func() {
			if wr, ok := q.rq.take(); ok {
				base(q.init.RecvCQ).add(verbs.WC{ID: wr.ID, Opcode: verbs.Recv, QPN: q.qpn, Status: verbs.LocalLengthError})
				u.failed++
			}
		})
	case 6: // a completion of nobody
		wc := verbs.WC{Opcode: verbs.Recv, QPN: ib.QPN(len(b)), ID: ^uint64(0)}
		if len(b) > 1 {
			wc.ID = uint64(b[0])<<genShift | uint64(b[1]) | 1<<20
		}
		base(u.l.threads[0].conn.cq).add(wc)
		u.arrived++
		u.failed++
	case 7: // the connection goes
		u.c.Close()
	}
	u.settle()
}

// arrive counts what f makes come in; it did if a buffer was there.
func (u *loopUser) arrive(q *fakeQP, f func()) {
	before := q.rq.h
	q.mu.Lock()
	f()
	q.mu.Unlock()
	u.arrived += q.rq.h - before
}

// settle lets everything run that can.
func (u *loopUser) settle() {
	for i := 0; len(u.next) > 0; i++ {
		if i > 1000 {
			u.t.Fatalf("%d packets are not taken", len(u.next))
		}
		if _, err := u.send.step(); err != nil {
			u.t.Fatal(err)
		}
		u.drain()
	}
	u.drain()
}

func (u *loopUser) drain() {
	for {
		u.l.threads[0].sendWC.drain()
		u.l.ud.drain()
		u.l.threads[0].conn.drain()
		select {
		case f := <-u.l.Up():
			f.Release()
			continue
		default:
		}
		return
	}
}

// end lets go of all that is held, and looks at the books.
func (u *loopUser) end() {
	u.c.Close()
	u.drain()
	c := u.l.Counters()
	in := c.RxUD + c.RxConn + c.RxError + c.RxShort + c.RxUnknownType + c.RxARPConn + c.RxMulticastConn +
		c.RxOwnEcho + c.RxNotWanted + c.RxMalformed + c.RxUnknownQP
	out := c.TxPackets + c.TxUnreachable + c.TxGone + c.TxQueueFull + c.TxUDQueueFull + c.TxPostError +
		c.TxMalformed + c.TxMulticastConn + c.TxGroupHeld
	switch up := c.Up + c.UpFull; {
	case in+out+up != uint64(u.arrived+u.read):
		u.t.Errorf("in+out+up is %v, want %v", in+out+up, uint64(u.arrived+u.read))
	case in > uint64(u.arrived):
		u.t.Errorf("in is %v, want at most %v", in, uint64(u.arrived))
	case out > uint64(u.read):
		u.t.Errorf("out is %v, want at most %v", out, uint64(u.read))
	}
	if n := u.l.threads[0].pool.available() + len(u.send.slots); n != 2*batchLen {
		u.t.Errorf("%d of %d send buffers are left", n, 2*batchLen)
	}
	if c.RepostFailures != 0 {
		u.t.Errorf("%d receive buffers were not taken back", c.RepostFailures)
	}
	u.l.Close()
	if u.fab.live != 0 {
		u.t.Errorf("%d regions left", u.fab.live)
	}
	if u.l.RecvMemory() != 0 {
		u.t.Errorf("%d octets of receive rings left", u.l.RecvMemory())
	}
}
