package verbstest

import (
	"errors"

	"ipoibcm/verbs"
)

// testStates tries every transition that is out of order, and posts to the queues in every state.
func testStates(e *env) {
	allowed := map[[2]verbs.QPState]bool{
		{verbs.StateReset, verbs.StateInit}: true, {verbs.StateInit, verbs.StateRTR}: true,
		{verbs.StateRTR, verbs.StateRTS}: true,
	}
	order := []verbs.QPState{verbs.StateInit, verbs.StateRTR, verbs.StateRTS}
	for _, from := range []verbs.QPState{verbs.StateReset, verbs.StateInit, verbs.StateRTR, verbs.StateRTS,
		verbs.StateError} {
		for _, to := range order {
			if allowed[[2]verbs.QPState{from, to}] || from == to {
				continue
			}
			a, b := e.newEnd(e.A, rc), e.newEnd(e.B, rc)
			for _, s := range order {
				if s <= from && from != verbs.StateError {
					a.to(b, s)
				}
			}
			if from == verbs.StateError {
				a.to(b, from)
			}
			if err := a.qp.Modify(a.attr(b, to)); !errors.Is(err, verbs.ErrState) {
				e.Errorf("%v to %v: %v, want ErrState", from, to, err)
			}
			if s := a.qp.State(); s != from {
				e.Errorf("%v to %v was refused, and the state is %v", from, to, s)
			}
			e.must(a.qp.Destroy())
			e.must(b.qp.Destroy())
		}
	}

	a, b := e.newEnd(e.A, rc), e.newEnd(e.B, rc)
	for _, s := range []verbs.QPState{verbs.StateReset, verbs.StateInit, verbs.StateRTR} {
		if s != verbs.StateReset {
			a.to(b, s)
			a.postRecv(uint64(s), a.buf(10))
		}
		if n, err := a.qp.PostSend([]verbs.SendWR{signaled(verbs.Send, 1, a.filled(1, 1))}); n != 0 ||
			!errors.Is(err, verbs.ErrState) {
			e.Errorf("PostSend in %v: took %d, %v; want ErrState", s, n, err)
		}
	}
	a.to(b, verbs.StateRTS)
	for _, bad := range []struct {
		name string
		wr   verbs.SendWR
	}{
		{"opcode", signaled(verbs.Recv, 1, nil)},
		{"SG list", signaled(verbs.Send, 1, make([]verbs.SGE, 1000))},
	} {
		if n, err := a.qp.PostSend([]verbs.SendWR{bad.wr}); n != 0 || !errors.Is(err, verbs.ErrInvalid) {
			e.Errorf("bad %s: took %d, %v; want ErrInvalid", bad.name, n, err)
		}
	}
	bad := a.attr(b, 17)
	if err := a.qp.Modify(bad); err == nil {
		e.Error("Modify to a state that does not exist: no error")
	}
}

// testStatesUD checks that a UD QP needs every step of the state machine too.
func testStatesUD(e *env) {
	a := e.newEnd(e.A, options{transport: 0xff})
	if err := a.qp.Modify(a.attr(nil, verbs.StateRTS)); !errors.Is(err, verbs.ErrState) {
		e.Errorf("RESET to RTS: %v, want ErrState", err)
	}
	a.to(nil, verbs.StateInit, verbs.StateRTR)
	if _, err := a.qp.PostSend([]verbs.SendWR{a.datagramTo(a, a.filled(1, 1))}); !errors.Is(err, verbs.ErrState) {
		e.Errorf("PostSend in RTR: %v, want ErrState", err)
	}
	a.to(nil, verbs.StateRTS)
	if _, err := a.qp.PostSend([]verbs.SendWR{signaled(verbs.Send, 1, a.filled(1, 1))}); !errors.Is(err,
		verbs.ErrInvalid) {
		e.Errorf("UD send without an address handle: %v, want ErrInvalid", err)
	}
	a.postRecv(1, a.buf(100))
	a.to(nil, verbs.StateError)
	a.equal("receive", a.received(), verbs.WC{ID: 1, Status: verbs.WRFlushError})
}

func testQueueFull(e *env) {
	opt := rc
	opt.sendDepth, opt.recvDepth = 4, 4
	a, b := e.connected(opt)
	one := signaled(verbs.Send, 1, a.filled(1, 1))
	many := make([]verbs.SendWR, 100000)
	for i := range many {
		many[i] = one
	}
	n, err := a.qp.PostSend(many) // b has no receive: nothing completes
	if n < 4 || n == len(many) || !errors.Is(err, verbs.ErrQueueFull) {
		e.Errorf("send queue of 4 took %d: %v, want ErrQueueFull", n, err)
	}
	recvs := make([]verbs.RecvWR, 100000)
	n, err = b.qp.PostRecv(recvs)
	if n < 4 || n == len(recvs) || !errors.Is(err, verbs.ErrQueueFull) {
		e.Errorf("receive queue of 4 took %d: %v, want ErrQueueFull", n, err)
	}
}

// testCQOverflow causes more completions than the CQ was made for. None may be lost silently:
// either all completions are there, or the QP is in ERR.
func testCQOverflow(e *env) {
	opt := rc
	opt.cqDepth = 4
	a, b := e.connected(opt)
	const messages = 60
	for i := range messages {
		b.postRecv(uint64(i), b.buf(10))
	}
	for i := range messages {
		a.postSend(signaled(verbs.Send, uint64(i), a.filled(10, i)))
	}
	e.pass(e.Quiet)
	e.until("all completions, or ERR", func() bool {
		a.poll()
		b.poll()
		return len(a.send) >= messages && len(b.recv) >= messages || a.qp.State() == verbs.StateError ||
			b.qp.State() == verbs.StateError
	})
	for _, wcs := range [][]verbs.WC{a.send, b.recv} {
		if len(wcs) < 4 {
			e.Errorf("a CQ for 4 completions kept %d", len(wcs))
		}
		for i, wc := range wcs {
			if wc.ID != uint64(i) {
				e.Fatalf("completion %d is %+v", i, wc)
			}
		}
	}
}
