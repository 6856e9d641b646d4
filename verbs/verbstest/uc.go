package verbstest

import (
	"time"

	"ipoibcm/ib"
	"ipoibcm/verbs"
)

var uc = options{transport: ib.UC, psn: 0xfffff0}

// arrives posts wr on the end from, and returns the completion of the receive on n. It tries five
// times at most, because UC may lose messages.
func (n *end) arrives(from *end, wr verbs.SendWR) verbs.WC {
	n.Helper()
	for range 5 {
		from.succeeds("send", wr)
		for range 100 {
			if n.poll(); len(n.recv) > 0 {
				return n.received()
			}
			n.pass(2 * time.Millisecond)
		}
	}
	n.Fatal("nothing arrived in five attempts")
	panic("unreachable")
}

func testUC(e *env) {
	a, b := e.connected(uc)
	for i, n := range e.sizes(65536) {
		for _, imm := range []bool{false, true} {
			sg := b.buf(n + 10)
			b.postRecv(5, sg)
			wr, want := signaled(verbs.Send, 6, a.filled(n, i)), verbs.WC{ID: 5, Opcode: verbs.Recv, ByteLen: n}
			if imm {
				wr.Opcode, wr.Imm = verbs.SendImm, 0x10203040
				want.Flags, want.Imm = verbs.WithImm, 0x10203040
			}
			b.equal("receive", b.arrives(a, wr), want)
			e.same("message", sg[0].Buf[:n], pattern(n, i))
			e.same("octets behind", sg[0].Buf[n:], make([]byte, 10))
		}
	}
	a.refusesSend("READ on UC", signaled(verbs.Read, 1, a.buf(10)), verbs.ErrInvalid)
}

// testUCDrops checks that a message without a receive is lost, and that nothing else is.
func testUCDrops(e *env) {
	a, b := e.connected(uc)
	c, d := e.connected(uc)
	a.sends(signaled(verbs.Send, 1, a.filled(9000, 1)))
	d.postRecv(1, d.buf(10))
	d.arrives(c, signaled(verbs.Send, 1, c.filled(10, 3))) // so a's message has come, too
	e.pass(e.Quiet)
	b.postRecv(2, b.buf(9000))
	b.silent("a message waited for a receive")
	if wc := b.arrives(a, signaled(verbs.Send, 3, a.filled(9000, 2))); wc.ID != 2 || wc.ByteLen != 9000 {
		e.Errorf("after a loss: %+v", wc)
	}
	e.inState(verbs.StateRTS, a, b)
	// ERR flushes on UC too.
	b.postRecv(4, b.buf(10))
	b.to(a, verbs.StateError)
	b.equal("receive", b.received(), verbs.WC{ID: 4, Status: verbs.WRFlushError})
}

func testUCShared(e *env) {
	a, b := e.connected(options{transport: ib.UC, psn: uc.psn, shared: true})
	for i := range uint64(10) {
		b.postRecv(i, b.buf(5000))
	}
	for range 5 {
		if wc := b.arrives(a, signaled(verbs.Send, 1, a.filled(5000, 1))); wc.Status != verbs.Success || wc.ByteLen != 5000 {
			e.Fatalf("got %+v", wc)
		}
	}
}

func testUCWrite(e *env) {
	a, b := e.connected(options{transport: ib.UC, psn: uc.psn, access: verbs.RemoteWrite})
	mem := b.region(make([]byte, 20000), verbs.RemoteWrite)
	b.postRecv(5, b.buf(0))
	wr := remote(verbs.WriteImm, 1, a.filled(9000, 1), mem, 100)
	wr.Imm = 7
	b.equal("receive", b.arrives(a, wr), verbs.WC{ID: 5, Opcode: verbs.RecvWriteImm, Flags: verbs.WithImm, Imm: 7,
		ByteLen: 9000})
	e.same("memory", mem.Buf[100:9100], pattern(9000, 1))

	// A write that is not allowed is lost, without an answer.
	before := append([]byte(nil), mem.Buf...)
	a.sends(remote(verbs.Write, 2, a.filled(9000, 2), mem, 11001))
	e.pass(e.Quiet)
	e.same("memory", mem.Buf, before)
	e.inState(verbs.StateRTS, b)
}
