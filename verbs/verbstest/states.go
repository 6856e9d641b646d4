package verbstest

import (
	"errors"
	"fmt"
	"slices"

	"ipoibcm/ib"
	"ipoibcm/verbs"
)

// testStates tries every transition that is out of order, and posts to the queues in every state.
func testStates(e *env) {
	allowed := map[[2]verbs.QPState]bool{
		{verbs.StateReset, verbs.StateInit}: true, {verbs.StateInit, verbs.StateRTR}: true,
		{verbs.StateRTR, verbs.StateRTS}: true,
	}
	order := []verbs.QPState{verbs.StateInit, verbs.StateRTR, verbs.StateRTS}
	for from, states := range map[verbs.QPState][]verbs.QPState{ // how to get there
		verbs.StateReset: nil, verbs.StateInit: order[:1], verbs.StateRTR: order[:2], verbs.StateRTS: order,
		verbs.StateError: {verbs.StateError},
	} {
		for _, to := range order {
			if allowed[[2]verbs.QPState{from, to}] || from == to {
				continue
			}
			a, b := e.newEnd(e.A, rc), e.newEnd(e.B, rc)
			a.to(b, states...)
			e.refuses(fmt.Sprintf("%v to %v", from, to), a.qp.Modify(a.attr(b, to)), verbs.ErrState)
			e.inState(from, a)
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
		a.refusesSend("PostSend in "+s.String(), signaled(verbs.Send, 1, a.filled(1, 1)), verbs.ErrState)
	}
	a.to(b, verbs.StateRTS)
	a.refusesSend("bad opcode", signaled(verbs.Recv, 1, nil), verbs.ErrInvalid)
	a.refusesSend("bad SG list", signaled(verbs.Send, 1, make([]verbs.SGE, 1000)), verbs.ErrInvalid)
	if err := a.qp.Modify(a.attr(b, 17)); err == nil {
		e.Error("Modify to a state that does not exist: no error")
	}
}

// testStatesUD checks that a UD QP needs every step of the state machine too.
func testStatesUD(e *env) {
	a := e.newEnd(e.A, options{transport: 0xff})
	e.refuses("RESET to RTS", a.qp.Modify(a.attr(nil, verbs.StateRTS)), verbs.ErrState)
	a.to(nil, verbs.StateInit, verbs.StateRTR)
	a.refusesSend("PostSend in RTR", a.datagramTo(a, a.filled(1, 1)), verbs.ErrState)
	a.to(nil, verbs.StateRTS)
	a.refusesSend("UD send without an address handle", signaled(verbs.Send, 1, a.filled(1, 1)), verbs.ErrInvalid)
	a.postRecv(1, a.buf(100))
	a.to(nil, verbs.StateError)
	a.equal("receive", a.received(), verbs.WC{ID: 1, Status: verbs.WRFlushError})
}

func testQueueFull(e *env) {
	a, b := e.connected(options{transport: ib.RC, psn: rcPSN, sendDepth: 4, recvDepth: 4})
	many := slices.Repeat([]verbs.SendWR{signaled(verbs.Send, 1, a.filled(1, 1))}, 100000)
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
	a, b := e.connected(options{transport: ib.RC, psn: rcPSN, cqDepth: 4})
	const messages = 60
	for i := range messages {
		b.postRecv(uint64(i), b.buf(10))
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
