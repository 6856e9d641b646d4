package verbstest

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"ipoibcm/ib"
	"ipoibcm/verbs"
	"ipoibcm/wire/roce/rocetest"
)

func testPort(e *env) {
	a, b := e.A.Port(), e.B.Port()
	for _, p := range []verbs.Port{a, b} {
		switch {
		case !p.Active:
			e.Errorf("port is not active: %+v", p)
		case len(p.GIDs) == 0 || p.GIDs[0].IsZero() || p.GIDs[0].IsMulticast():
			e.Errorf("no GID to use: %+v", p)
		case len(p.PKeys) == 0:
			e.Errorf("no P_Key: %+v", p)
		case p.MTU.Octets() == 0:
			e.Errorf("no path MTU: %+v", p)
		case p.GUID == 0:
			e.Errorf("no GUID: %+v", p)
		}
	}
	if a.GUID == b.GUID || a.GIDs[0] == b.GIDs[0] {
		e.Errorf("both ports have GUID %v and GID %v", a.GUID, a.GIDs[0])
	}
	c := e.A.Caps()
	if c.Name == "" || c.MaxSGE < 1 || c.MaxQPDepth < 1 || (c.UD && c.MaxUDPayload < 256) ||
		(c.RC && c.MaxMessage < 65536) {
		e.Errorf("capabilities make no sense: %+v", c)
	}
	if c != e.A.Caps() {
		e.Error("capabilities change")
	}
	if (e.A.MADPort() != nil) != c.MAD {
		e.Errorf("MADPort is %v, Caps.MAD %v", e.A.MADPort(), c.MAD)
	}
	if !c.SRQ {
		_, err := e.A.CreateSRQ(verbs.SRQInit{Depth: 1, MaxSGE: 1})
		e.refuses("CreateSRQ without SRQs", err, verbs.ErrNotSupported)
	}
	if _, err := e.A.CreateQP(verbs.QPInit{Transport: ib.RD}); err == nil {
		e.Error("a QP for reliable datagrams: no error")
	}
}

func testMemory(e *env) {
	for _, n := range []int{1, 4096, 100000} {
		r, err := e.A.Alloc(n)
		e.must(err)
		if len(r.Buf) != n {
			e.Fatalf("Alloc(%d) gave %d octets", n, len(r.Buf))
		}
		e.same("fresh memory", r.Buf, make([]byte, n))
		if r.Addr%4096 != 0 {
			e.Errorf("Alloc(%d) is at %#x, not on a page", n, r.Addr)
		}
		e.must(e.A.Deregister(r))
	}
	r1, err := e.A.Register(make([]byte, 5000), verbs.RemoteRead)
	e.must(err)
	r2, err := e.A.Register(make([]byte, 5000), verbs.RemoteRead)
	e.must(err)
	if r1.RKey == r2.RKey || r1.Addr < r2.Addr+5000 && r2.Addr < r1.Addr+5000 {
		e.Errorf("two regions look the same to peers: %#x+%d key %#x, %#x key %#x", r1.Addr, len(r1.Buf), r1.RKey,
			r2.Addr, r2.RKey)
	}
	e.must(e.A.Deregister(r1))
	e.must(e.A.Deregister(r2))
}

func testCounters(e *env) {
	var names []string
	e.A.Counters(func(name string, _ uint64) {
		if name == "" || slices.Contains(names, name) {
			e.Errorf("counter %q is there twice or has no name", name)
		}
		names = append(names, name)
	})
	i := 0
	e.A.Counters(func(name string, _ uint64) {
		if i >= len(names) || names[i] != name {
			e.Errorf("counter %d is %q the second time", i, name)
		}
		i++
	})
	if len(names) == 0 {
		e.Error("no counters")
	}
}

// testWait waits on a CQ in one goroutine while the other side sends.
func testWait(e *env) {
	if e.Pair.Pass != nil {
		e.Skip("virtual time: nothing can block")
	}
	a, b := e.connected(rc)
	var got atomic.Int32
	var wg sync.WaitGroup
	ended := make(chan error, 1)
	const messages = 200
	wg.Go(func() {
		err := b.recvCQ.Wait()
		for ; err == nil; err = b.recvCQ.Wait() {
			got.Add(int32(len(appendAll(nil, b.recvCQ))))
		}
		ended <- err
	})
	defer wg.Wait()
	bufs := b.buf(100)
	for i := range messages {
		b.postRecv(uint64(i), bufs)
		a.postSend(signaled(verbs.Send, uint64(i), a.filled(100, i)))
		if i%5 != 0 { // every fifth message does not wait for the receiver, so that the two race
			e.until("a message", func() bool { return int(got.Load()) == i+1 })
		}
		a.sent()
	}
	e.until("all messages", func() bool { return got.Load() == messages })
	e.must(a.qp.Destroy())
	e.must(b.qp.Destroy())
	e.must(b.recvCQ.Destroy())
	select {
	case err := <-ended:
		e.refuses("Wait", err, verbs.ErrClosed)
	case <-time.After(e.Timeout):
		e.Fatal("Wait did not end when the CQ was destroyed")
	}
	e.refuses("Wait on a destroyed CQ", b.recvCQ.Wait(), verbs.ErrClosed)
}

// testOnReady receives through a handler that the provider calls.
func testOnReady(e *env) {
	a, b := e.newEnd(e.A, rc), e.newEnd(e.B, rc)
	cq, ok := b.recvCQ.(verbs.CallbackCQ)
	if !ok {
		e.Skipf("the CQs of provider %s have no callback", e.B.Caps().Name)
	}
	var got, calls, inside atomic.Int32
	cq.OnReady(func() {
		if inside.Add(1) != 1 {
			e.Error("called twice at once")
		}
		calls.Add(1)
		var wcs [4]verbs.WC
		for n := cq.Poll(wcs[:]); n > 0; n = cq.Poll(wcs[:]) {
			// A handler may call every method.
			for _, wc := range wcs[:n] {
				if _, err := b.qp.PostSend([]verbs.SendWR{{ID: wc.ID, Opcode: verbs.Send}}); err != nil {
					e.Error(err)
				}
			}
			got.Add(int32(n)) // with the last of them the QP may be destroyed
		}
		inside.Add(-1)
	})
	connect(a, b)
	for i := range uint64(50) {
		b.postRecv(i, b.buf(100))
		a.postRecv(i, a.buf(0))
		a.postSend(signaled(verbs.Send, i, a.filled(100, 1)))
		if i%7 == 0 {
			a.received()
			a.sent()
		}
	}
	e.until("all messages", func() bool { return got.Load() == 50 })
	e.must(a.qp.Destroy())
	e.must(b.qp.Destroy())
	e.must(cq.Destroy())
	n := calls.Load()
	e.pass(e.Quiet)
	if calls.Load() != n {
		e.Error("called after Destroy")
	}
}

func testTap(e *env) {
	var mu sync.Mutex
	seen := map[bool][][]byte{}
	e.B.SetTap(func(out bool, ip []byte) {
		mu.Lock()
		defer mu.Unlock()
		seen[out] = append(seen[out], append([]byte(nil), ip...))
	})
	a, b := e.connected(rc)
	a.transfers(b, 9000, 1)
	e.until("the tap sees packets in and the answer out", func() bool { // the tap call may come after the packet
		mu.Lock()
		defer mu.Unlock()
		return len(seen[false]) >= 2 && len(seen[true]) >= 1
	})
	mu.Lock()
	for _, out := range []bool{false, true} {
		for _, ip := range seen[out] {
			h, _, err := rocetest.ParseIP(ip)
			if err != nil {
				e.Fatalf("tap: %v\n%x", err, ip)
			}
			if ok, err := rocetest.CheckIP(ip); !ok || err != nil {
				e.Errorf("tap: wrong ICRC (%v)\n%x", err, ip)
			}
			src, dst := e.A.Port().GIDs[0], e.B.Port().GIDs[0]
			if out {
				src, dst = dst, src
			}
			if ib.GIDFromAddr(h.Src) != src || ib.GIDFromAddr(h.Dst) != dst {
				e.Errorf("tap: packet from %v to %v, want %v to %v", h.Src, h.Dst, src, dst)
			}
		}
	}
	n := len(seen[true]) + len(seen[false])
	mu.Unlock()
	e.B.SetTap(nil)
	a.transfers(b, 10, 1)
	mu.Lock()
	defer mu.Unlock()
	if len(seen[true])+len(seen[false]) != n {
		e.Error("the tap still sees packets after it was taken off")
	}
}

// testMAD sends a MAD of CM to B, which sends it back.
func testMAD(e *env) {
	for i := range 5 {
		out := &verbs.MAD{Remote: e.B.Port().GIDs[0], QPN: ib.QPNGSI}
		copy(out.Data[:], pattern(verbs.MADLen, i))
		copy(out.Data[:], cmHeader)
		e.must(e.A.MADPort().SendMAD(out))
		in, _ := next(e, "a MAD", e.B.MADPort().MADs())
		clear(in.Data[8:12]) // a provider may write this part of the transaction ID
		want := verbs.MAD{Remote: e.A.Port().GIDs[0], Local: e.B.Port().GIDs[0], QPN: ib.QPNGSI, PKey: in.PKey,
			Data: out.Data}
		if *in != want || !in.PKey.Match(ib.DefaultPKey) {
			e.Fatalf("MAD\n got %+v\nwant %+v", *in, want)
		}
		in.Local = ib.GID{}
		e.must(e.B.MADPort().SendMAD(in))
		back, _ := next(e, "a MAD", e.A.MADPort().MADs())
		clear(back.Data[8:12])
		if back.Data != out.Data || back.Remote != e.B.Port().GIDs[0] {
			e.Fatalf("MAD came back as %+v", *back)
		}
	}
	// Nobody reads: the sender sees no error, and the channel stays bounded.
	m := &verbs.MAD{Remote: e.B.Port().GIDs[0], QPN: ib.QPNGSI}
	copy(m.Data[:], cmHeader)
	for range 20000 {
		e.must(e.A.MADPort().SendMAD(m))
	}
	e.pass(e.Quiet)
	if n := len(e.B.MADPort().MADs()); n > 10000 {
		e.Errorf("%d MADs wait for a reader that never comes", n)
	}
}

// cmHeader is the beginning of a MAD of class CM, version 2, method Send. The upper half of its
// transaction ID is zero, and its attribute is REJ.
var cmHeader = []byte{1, 7, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 0, 0x12, 0, 0, 0, 0, 0, 0}

func testClose(e *env) {
	var a *end
	if e.A.Caps().RC {
		a, _ = e.connected(rc)
		a.postRecv(1, a.buf(10))
	}
	mads, events := e.A.MADPort(), e.A.Events()
	e.must(e.A.Close())
	closes(e, "Events closed", events)
	if mads != nil {
		closes(e, "MADs closed", mads.MADs())
	}
	_, err := e.A.CreateCQ(1)
	e.refuses("CreateCQ after Close", err, verbs.ErrClosed)
	if a != nil {
		if _, err := a.qp.PostSend([]verbs.SendWR{{Opcode: verbs.Send}}); err == nil {
			e.Error("PostSend after Close: no error")
		}
		e.refuses("Wait after Close", a.recvCQ.Wait(), verbs.ErrClosed)
	}
}
