package verbstest

import (
	"ipoibcm/ib"
	"ipoibcm/verbs"
)

const rcPSN = 0xffff00 // the PSNs wrap soon

var rc = options{transport: ib.RC, psn: rcPSN}

// sizes returns the message lengths worth trying with the path MTU of the two ports, up to limit
// and to what both can send.
func (e *env) sizes(limit int) (l []int) {
	mtu := min(e.A.Port().MTU, e.B.Port().MTU).Octets()
	for _, n := range []int{0, 1, 3, mtu - 1, mtu, mtu + 1, 2 * mtu, 9000, 65524, 65536, 1 << 20} {
		if n <= min(limit, e.A.Caps().MaxMessage, e.B.Caps().MaxMessage) {
			l = append(l, n)
		}
	}
	return l
}

func signaled(op verbs.Opcode, id uint64, sg []verbs.SGE) verbs.SendWR {
	return verbs.SendWR{ID: id, Opcode: op, Flags: verbs.Signaled, SG: sg}
}

func testRCSizes(e *env) {
	a, b := e.connected(rc)
	for i, n := range e.sizes(1 << 20) {
		a.transfers(b, n, i)
		b.transfers(a, n, i)
	}
}

// testRCGather uses lists of three entries, cut at odd places, on both sides.
func testRCGather(e *env) {
	a, b := e.connected(rc)
	for i, n := range []int{3, 5000, 65524} {
		src, dst := a.filled(n, i)[0], b.buf(n)[0]
		cut := func(s verbs.SGE, x, y int) []verbs.SGE {
			return []verbs.SGE{{Region: s.Region, Buf: s.Buf[:x]}, {Region: s.Region, Buf: s.Buf[x:y]},
				{Region: s.Region, Buf: s.Buf[y:]}}
		}
		b.postRecv(1, cut(dst, n/2, n/2+1))
		a.postSend(signaled(verbs.Send, 1, cut(src, 1, n/3+1)))
		if wc := b.received(); wc.ByteLen != n {
			e.Fatalf("got %+v, want %d octets", wc, n)
		}
		e.same("message", dst.Buf, pattern(n, i))
		a.sent()
	}
}

// testRCOrder keeps many messages of many sizes in flight, both ways at once.
func testRCOrder(e *env) {
	a, b := e.connected(rc)
	const messages, depth = 400, 32
	size := func(i int) int { return i * 7919 % 20000 }
	type side struct {
		*end
		bufs             [depth][]verbs.SGE
		out              [depth][]verbs.SGE
		sentN, done, got int
	}
	sides := [2]*side{{end: a}, {end: b}}
	for _, s := range sides {
		for i := range depth {
			s.bufs[i], s.out[i] = s.buf(20000), s.buf(20000)
			s.postRecv(uint64(i), s.bufs[i])
		}
	}
	e.until("all messages", func() bool {
		for _, s := range sides {
			for s.sentN < messages && s.sentN-s.done < depth {
				sg := s.out[s.sentN%depth][0]
				sg.Buf = sg.Buf[:size(s.sentN)]
				copy(sg.Buf, pattern(len(sg.Buf), s.sentN))
				s.postSend(signaled(verbs.Send, uint64(s.sentN), []verbs.SGE{sg}))
				s.sentN++
			}
			s.poll()
			for _, wc := range s.send {
				s.equal("send", wc, verbs.WC{ID: uint64(s.done), Opcode: verbs.Send})
				s.done++
			}
			for _, wc := range s.recv {
				k := s.got % depth
				s.equal("receive", wc, verbs.WC{ID: uint64(k), Opcode: verbs.Recv, ByteLen: size(s.got)})
				e.same("message", s.bufs[k][0].Buf[:wc.ByteLen], pattern(wc.ByteLen, s.got))
				s.postRecv(uint64(k), s.bufs[k])
				s.got++
			}
			s.send, s.recv = s.send[:0], s.recv[:0]
		}
		return a.opt == b.opt && sides[0].got == messages && sides[1].got == messages && sides[0].done == messages &&
			sides[1].done == messages
	})
}

func testRCManyQPs(e *env) {
	const qps = 24
	var as, bs [qps]*end
	for i := range qps {
		as[i], bs[i] = e.connected(rc)
		for _, o := range as[:i] {
			if o.qp.QPN() == as[i].qp.QPN() {
				e.Fatalf("QPN %v given out twice", o.qp.QPN())
			}
		}
		bs[i].postRecv(uint64(i), bs[i].buf(3000))
	}
	for i, a := range as {
		a.postSend(signaled(verbs.Send, uint64(i), a.filled(3000, i)))
	}
	for i, b := range bs {
		b.equal("receive", b.received(), verbs.WC{ID: uint64(i), Opcode: verbs.Recv, ByteLen: 3000})
		as[i].sent()
	}
}

// testRCShared makes two QPs receive from one shared receive queue.
func testRCShared(e *env) {
	a1, b1 := e.connected(options{transport: ib.RC, psn: rcPSN, shared: true})
	a2 := e.newEnd(e.A, rc)
	b2 := e.newEnd(e.B, rc)
	qp, err := e.B.CreateQP(verbs.QPInit{Transport: ib.RC, SendCQ: b2.sendCQ, RecvCQ: b2.recvCQ, SRQ: b1.srq,
		SendDepth: 8, MaxSendSGE: 1})
	e.must(err)
	e.must(b2.qp.Destroy())
	b2.qp = qp
	connect(a2, b2)
	bufs := map[uint64][]verbs.SGE{}
	for i := range uint64(20) {
		bufs[i] = b1.buf(2000)
		b1.postRecv(i, bufs[i])
	}
	for i := range 10 {
		for k, pair := range [][2]*end{{a1, b1}, {a2, b2}} {
			from, to := pair[0], pair[1]
			from.postSend(signaled(verbs.Send, 1, from.filled(2000-i, 2*i+k)))
			wc := to.received()
			if wc.Status != verbs.Success || wc.ByteLen != 2000-i || wc.QPN != to.qp.QPN() || bufs[wc.ID] == nil {
				e.Fatalf("message %d of QP %d: %+v", i, k, wc)
			}
			e.same("message", bufs[wc.ID][0].Buf[:2000-i], pattern(2000-i, 2*i+k))
			delete(bufs, wc.ID) // no receive completes twice
			from.sent()
		}
	}
	// The queue is empty: the sender waits until a receive is posted.
	a1.postSend(signaled(verbs.Send, 3, a1.filled(10, 0)))
	b1.silent("shared queue was empty")
	b1.postRecv(99, b1.buf(10))
	b1.equal("receive", b1.received(), verbs.WC{ID: 99, Opcode: verbs.Recv, ByteLen: 10})
}

func testRCImmediate(e *env) {
	a, b := e.connected(rc)
	for i, n := range e.sizes(65536) {
		b.postRecv(5, b.buf(n))
		wr := signaled(verbs.SendImm, 6, a.filled(n, i))
		wr.Imm = 0xa1b2c3d4
		a.postSend(wr)
		b.equal("receive", b.received(), verbs.WC{ID: 5, Opcode: verbs.Recv, Flags: verbs.WithImm,
			Imm: 0xa1b2c3d4, ByteLen: n})
		a.equal("send", a.sent(), verbs.WC{ID: 6, Opcode: verbs.SendImm})
	}
}

func testRCInvalidate(e *env) {
	a, b := e.connected(options{transport: ib.RC, psn: rcPSN, access: verbs.RemoteWrite})
	target := b.region(make([]byte, 100), verbs.RemoteWrite)
	write := signaled(verbs.Write, 1, a.filled(100, 1))
	write.RemoteAddr, write.RKey = target.Addr, target.RKey
	if e.A.Caps().RDMA {
		a.succeeds("write", write)
	}
	b.postRecv(5, b.buf(5000))
	inv := signaled(verbs.SendInv, 6, a.filled(5000, 2))
	inv.InvKey = target.RKey
	a.postSend(inv)
	b.equal("receive", b.received(), verbs.WC{ID: 5, Opcode: verbs.Recv, Flags: verbs.WithInv, Imm: target.RKey,
		ByteLen: 5000})
	a.equal("send", a.sent(), verbs.WC{ID: 6, Opcode: verbs.SendInv})
	if e.A.Caps().RDMA {
		a.postSend(write)
		a.refused("write after the key was invalidated", 1, verbs.RemoteAccess)
	}
}

// testRCUnsignaled checks that only signaled sends complete.
func testRCUnsignaled(e *env) {
	a, b := e.connected(rc)
	for i := range 30 {
		b.postRecv(uint64(i), b.buf(100))
		wr := signaled(verbs.Send, uint64(i), a.filled(100, i))
		if i%10 != 9 {
			wr.Flags = 0
		}
		a.postSend(wr)
	}
	for i := range 30 {
		b.equal("receive", b.received(), verbs.WC{ID: uint64(i), Opcode: verbs.Recv, ByteLen: 100})
	}
	for i := 9; i < 30; i += 10 {
		a.equal("send", a.sent(), verbs.WC{ID: uint64(i), Opcode: verbs.Send})
	}
	a.silent("sends without Signaled")
}

// testRCNotReady sends before a receive is posted.
func testRCNotReady(e *env) {
	a, b := e.connected(rc)
	for i := range 3 {
		a.postSend(signaled(verbs.Send, uint64(i), a.filled(9000, i)))
	}
	if !e.A.Caps().IWARP { // over iWARP TCP has taken the messages already
		a.silent("no receive was posted")
	}
	b.silent("no receive was posted")
	for i := range 3 {
		sg := b.buf(9000)
		b.postRecv(uint64(i), sg)
		b.equal("receive", b.received(), verbs.WC{ID: uint64(i), Opcode: verbs.Recv, ByteLen: 9000})
		e.same("message", sg[0].Buf, pattern(9000, i))
		a.equal("send", a.sent(), verbs.WC{ID: uint64(i), Opcode: verbs.Send})
	}
}

func testRCNotReadyExceeded(e *env) {
	a, b := e.connected(options{transport: ib.RC, psn: rcPSN, rnrRetry: 1})
	a.postSend(signaled(verbs.Send, 1, a.filled(10, 1)), signaled(verbs.Send, 2, a.filled(10, 1)))
	a.equal("send", a.sent(), verbs.WC{ID: 1, Status: verbs.RNRExceeded})
	a.equal("send behind it", a.sent(), verbs.WC{ID: 2, Status: verbs.WRFlushError})
	e.inState(verbs.StateError, a)
	e.inState(verbs.StateRTS, b)
}

// testRCTooLong sends a message that is longer than the receive.
func testRCTooLong(e *env) {
	a, b := e.connected(rc)
	b.postRecv(1, b.buf(4999))
	b.postRecv(2, b.buf(5000))
	a.postSend(signaled(verbs.Send, 1, a.filled(5000, 1)))
	a.refused("send", 1, verbs.RemoteInvReq)
	b.equal("receive", b.received(), verbs.WC{ID: 1, Status: verbs.LocalLengthError})
	b.equal("receive behind it", b.received(), verbs.WC{ID: 2, Status: verbs.WRFlushError})
	e.inState(verbs.StateError, a, b)
}

// testRCRetryExceeded sends to a peer that is gone.
func testRCRetryExceeded(e *env) {
	a, b := e.connected(options{transport: ib.RC, psn: rcPSN, timeout: 8, retry: 2})
	e.must(b.qp.Destroy())
	a.postRecv(9, a.buf(10))
	a.postSend(signaled(verbs.Send, 1, a.filled(5000, 1)), verbs.SendWR{ID: 2, Opcode: verbs.Send, SG: a.filled(10, 1)})
	a.equal("send", a.sent(), verbs.WC{ID: 1, Status: verbs.RetryExceeded})
	a.equal("unsignaled send behind it", a.sent(), verbs.WC{ID: 2, Status: verbs.WRFlushError})
	a.equal("receive", a.received(), verbs.WC{ID: 9, Status: verbs.WRFlushError})
	if ev := e.event(e.A, verbs.QPFatal, a.qp.QPN()); ev.Status != verbs.RetryExceeded {
		e.Errorf("event %+v, want status %v", ev, verbs.RetryExceeded)
	}
	e.inState(verbs.StateError, a)
}

// testRCFlush moves a QP with outstanding work to ERR by Modify.
func testRCFlush(e *env) {
	a, b := e.connected(rc)
	for i := range uint64(5) {
		a.postRecv(i, a.buf(10))
		a.postSend(signaled(verbs.Send, i, a.filled(100, 1))) // b posts no receive
	}
	a.to(b, verbs.StateError)
	for i := range uint64(5) {
		if wc := a.sent(); !e.A.Caps().IWARP || wc.Status != verbs.Success || wc.ID != i {
			a.equal("send", wc, verbs.WC{ID: i, Status: verbs.WRFlushError})
		}
		a.equal("receive", a.received(), verbs.WC{ID: i, Status: verbs.WRFlushError})
	}
	// Requests that are posted in ERR are taken and flushed.
	a.postSend(signaled(verbs.Send, 11, a.filled(10, 1)))
	a.postRecv(12, a.buf(10))
	a.equal("send", a.sent(), verbs.WC{ID: 11, Status: verbs.WRFlushError})
	a.equal("receive", a.received(), verbs.WC{ID: 12, Status: verbs.WRFlushError})
	a.silent("everything was flushed")
	a.to(b, verbs.StateError) // from any state
}

// testRCDestroy checks that nothing changes or completes after Destroy: the buffers are the
// caller's again.
func testRCDestroy(e *env) {
	a, b := e.connected(rc)
	sg := b.buf(1000)
	b.postRecv(1, sg)
	for i := range uint64(3) {
		b.postSend(signaled(verbs.Send, i, b.filled(100, 1))) // a posts no receive
	}
	e.must(b.qp.Destroy())
	b.poll()
	for _, wc := range b.send { // over iWARP a SEND completes once TCP has it, so it may have completed before
		if !e.A.Caps().IWARP || wc.Status != verbs.Success {
			e.Errorf("before the QP was destroyed: completed %+v", wc)
		}
	}
	b.send = nil
	copy(sg[0].Buf, pattern(1000, 7))
	a.postSend(signaled(verbs.Send, 1, a.filled(1000, 1)))
	b.silent("the QP was destroyed")
	e.same("buffer of a destroyed QP", sg[0].Buf, pattern(1000, 7))
	if _, err := b.qp.PostSend([]verbs.SendWR{signaled(verbs.Send, 1, b.filled(1, 1))}); err == nil {
		e.Error("PostSend to a destroyed QP: no error")
	}
	if _, err := b.qp.PostRecv([]verbs.RecvWR{{SG: sg}}); err == nil {
		e.Error("PostRecv to a destroyed QP: no error")
	}
	e.must(a.qp.Destroy())
	a.poll()
	e.must(b.sendCQ.Destroy())
	e.must(b.recvCQ.Destroy())
}

// testRCReset takes a QP back to RESET and uses it again.
func testRCReset(e *env) {
	a, b := e.connected(rc)
	if e.A.Caps().IWARP { // a send would complete before the reset discards it
		a.postRecv(1, a.buf(10))
	} else {
		a.postSend(signaled(verbs.Send, 1, a.filled(10, 1)))
	}
	a.to(nil, verbs.StateReset)
	b.to(nil, verbs.StateReset)
	a.silent("RESET forgets what was posted")
	// Messages sent before the reset may still arrive, and must not be taken for new ones. A user
	// that uses a QPN again so soon therefore chooses other PSNs.
	a.opt.again, b.opt.again = 0x400000, 0x400000
	connect(a, b)
	a.transfers(b, 5000, 1)
}

// testRCCommEst sends to a QP that is still in RTR.
func testRCCommEst(e *env) {
	a, b := e.newEnd(e.A, rc), e.newEnd(e.B, rc)
	a.to(b, verbs.StateInit, verbs.StateRTR, verbs.StateRTS)
	b.to(a, verbs.StateInit)
	b.postRecv(5, b.buf(100))
	b.to(a, verbs.StateRTR)
	a.succeeds("send", signaled(verbs.Send, 6, a.filled(100, 1)))
	b.equal("receive in RTR", b.received(), verbs.WC{ID: 5, Opcode: verbs.Recv, ByteLen: 100})
	e.event(e.B, verbs.CommEst, b.qp.QPN())
	b.to(a, verbs.StateRTS)
	b.transfers(a, 100, 2)
}

// testRCCommEstInRTS sends to a QP that is in RTS, as that of a CM's passive side is.
func testRCCommEstInRTS(e *env) {
	a, b := e.connected(rc)
	a.transfers(b, 100, 1)
	e.event(e.B, verbs.CommEst, b.qp.QPN())
}
