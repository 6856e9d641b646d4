package interop

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/test/interop/vm"
	"ipoibcm/verbs"
)

// An end is one of our queue pairs with a registered buffer.
type end struct {
	t              *testing.T
	dev            verbs.Provider
	qp             verbs.QP
	sendCQ, recvCQ verbs.CQ
	srq            verbs.SRQ
	mem            *verbs.Region
}

// An endConfig says what an end is made of.
type endConfig struct {
	transport ib.Transport
	srq       verbs.SRQ // nil: a receive queue of its own
	recvCQ    verbs.CQ  // nil: one of its own
	buf       int       // octets; remote writes and reads are allowed
	qkey      ib.QKey   // UD
}

// startPSN is where our queue pairs begin to send: the wrap comes soon.
const startPSN ib.PSN = 0xfffff0

func newEnd(t *testing.T, dev verbs.Provider, c endConfig) *end {
	t.Helper()
	e := &end{t: t, dev: dev, recvCQ: c.recvCQ, srq: c.srq}
	var err error
	must := func() {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	e.mem, err = dev.Register(make([]byte, c.buf), verbs.RemoteWrite|verbs.RemoteRead)
	must()
	e.sendCQ, err = dev.CreateCQ(512)
	must()
	if e.recvCQ == nil {
		e.recvCQ, err = dev.CreateCQ(512)
		must()
	}
	e.qp, err = dev.CreateQP(verbs.QPInit{
		Transport: c.transport, SendCQ: e.sendCQ, RecvCQ: e.recvCQ, SRQ: c.srq, SendDepth: 128, RecvDepth: 256,
		MaxSendSGE: 1, MaxRecvSGE: 1,
	})
	must()
	t.Cleanup(func() { e.qp.Destroy() })
	err = e.qp.Modify(verbs.QPAttr{State: verbs.StateInit, PKey: ib.DefaultPKey, QKey: c.qkey,
		Access: verbs.RemoteRead | verbs.RemoteWrite})
	must()
	return e
}

// connect brings the end to RTS. The timers are long enough for an emulated peer.
func (e *end) connect(path verbs.AHAttr, mtu ib.MTU, dest ib.QPN, recvPSN ib.PSN) {
	e.t.Helper()
	for _, a := range []verbs.QPAttr{
		{State: verbs.StateRTR, Path: path, PathMTU: mtu, DestQPN: dest, RQPSN: recvPSN, MaxDestRDAtomic: 16,
			MinRNRTimer: 12},
		{State: verbs.StateRTS, SQPSN: startPSN, Timeout: 16, RetryCount: 7, RNRRetry: 7, MaxRDAtomic: 16},
	} {
		if err := e.qp.Modify(a); err != nil {
			e.t.Fatal(err)
		}
	}
}

// sg returns n octets of the buffer from off on.
func (e *end) sg(off, n int) []verbs.SGE {
	return []verbs.SGE{{Region: e.mem, Buf: e.mem.Buf[off : off+n]}}
}

func (e *end) postRecv(id uint64, off, n int) {
	e.t.Helper()
	wrs := []verbs.RecvWR{{ID: id, SG: e.sg(off, n)}}
	var err error
	if e.srq != nil {
		_, err = e.srq.PostRecv(wrs)
	} else {
		_, err = e.qp.PostRecv(wrs)
	}
	if err != nil {
		e.t.Fatal(err)
	}
}

func (e *end) postSend(wrs ...verbs.SendWR) {
	e.t.Helper()
	for i := range wrs {
		wrs[i].Flags |= verbs.Signaled
	}
	if _, err := e.qp.PostSend(wrs); err != nil {
		e.t.Fatal(err)
	}
}

func (e *end) send(id uint64, off, n int) {
	e.t.Helper()
	e.postSend(verbs.SendWR{ID: id, Opcode: verbs.Send, SG: e.sg(off, n)})
}

// next waits for a completion on cq, whatever its status.
func (e *end) next(cq verbs.CQ, what string) verbs.WC {
	e.t.Helper()
	var wcs [1]verbs.WC
	for limit := time.Now().Add(patience); time.Now().Before(limit); time.Sleep(100 * time.Microsecond) {
		if cq.Poll(wcs[:]) == 1 {
			return wcs[0]
		}
	}
	e.t.Fatalf("%s: nothing completed in %v", what, patience)
	return verbs.WC{}
}

// sent waits for a send that succeeds.
func (e *end) sent() verbs.WC {
	e.t.Helper()
	return e.succeeds(e.sendCQ, "send")
}

// received waits for a receive that succeeds.
func (e *end) received() verbs.WC {
	e.t.Helper()
	return e.succeeds(e.recvCQ, "receive")
}

func (e *end) succeeds(cq verbs.CQ, what string) verbs.WC {
	e.t.Helper()
	wc := e.next(cq, what)
	if wc.Status != verbs.Success {
		e.t.Fatalf("%s: %v: %+v", what, wc.Status, wc)
	}
	return wc
}

// pattern is what message number seed holds; guest/src/peer.c has the same.
func pattern(n int, seed uint32) []byte {
	b := make([]byte, n)
	for i := range b {
		x := seed*2654435761 + uint32(i)*40503
		b[i] = byte(x>>13 ^ x>>5)
	}
	return b
}

// same compares data.
func same(t *testing.T, what string, got, want []byte) {
	t.Helper()
	if bytes.Equal(got, want) {
		return
	}
	i := 0
	for i < len(got) && i < len(want) && got[i] == want[i] {
		i++
	}
	t.Fatalf("%s: %d octets, want %d; they differ from octet %d on: %x, want %x", what, len(got), len(want), i,
		got[i:min(i+8, len(got))], want[i:min(i+8, len(want))])
}

// A peer is a queue pair of the guest: the program guest/src/peer.c at work.
type peer struct {
	t    *testing.T
	p    *vm.Proc
	qpn  ib.QPN
	rkey uint32
	addr uint64
}

// newPeer starts the program and has it make a queue pair.
func newPeer(t *testing.T, w *world, fam family, transport string, srq bool, buf int) *peer {
	t.Helper()
	p, err := w.vm.Start("peer")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.Kill()
		_, _ = p.Wait(patience) // it was killed
	})
	e := &peer{t: t, p: p}
	s := 0
	if srq {
		s = 1
	}
	a := e.do("qp %s %d %d %d %d", transport, fam.index, pathMTU(w.mtu).Octets(), s, buf)
	var g string
	if _, err := fmt.Sscanf(a, "qpn=0x%x rkey=0x%x addr=0x%x gid=%s", &e.qpn, &e.rkey, &e.addr, &g); err != nil {
		t.Fatalf("peer says %q: %v", a, err)
	}
	if fmt.Sprintf("%x", fam.guest[:]) != g {
		t.Fatalf("peer has GID %s, want %x", g, fam.guest[:])
	}
	return e
}

// do has the peer carry a command out and returns the answer behind "ok".
func (e *peer) do(format string, args ...any) string {
	e.t.Helper()
	cmd := fmt.Sprintf(format, args...)
	if _, err := e.p.Write([]byte(cmd + "\n")); err != nil {
		e.t.Fatal(err)
	}
	line, err := e.p.Line(patience)
	if err != nil {
		e.t.Fatal(err)
	}
	rest, ok := strings.CutPrefix(line, "ok")
	if !ok {
		e.t.Fatalf("peer, %q: %s", cmd, line)
	}
	return strings.TrimSpace(rest)
}

// A guestWC is a completion as libibverbs shows it.
type guestWC struct {
	id             uint64
	status, opcode int
	byteLen, flags int
	imm            uint32
	srcQP          ib.QPN
}

// Opcodes and flags of completions in the guest.
const (
	wcSend, wcWrite, wcRead = 0, 1, 2
	wcRecv, wcRecvWriteImm  = 128, 129
	wcImm                   = 2
	wcInv                   = 4 | 8 // rxe sets the kernel's bit, libibverbs has the other
)

// poll waits for the guest's next completion.
func (e *peer) poll() (c guestWC) {
	e.t.Helper()
	a := e.do("poll %d", patience.Milliseconds())
	if _, err := fmt.Sscanf(a, "id=%d status=%d opcode=%d len=%d flags=%d imm=0x%x srcqp=0x%x", &c.id, &c.status,
		&c.opcode, &c.byteLen, &c.flags, &c.imm, &c.srcQP); err != nil {
		e.t.Fatalf("poll in the guest: %q: %v", a, err)
	}
	return c
}

// expect waits for a completion that succeeds and is of that kind.
func (e *peer) expect(opcode int) guestWC {
	e.t.Helper()
	c := e.poll()
	expect.MustEqual(e.t, c.status, 0, "status of the completion of %d in the guest", c.id)
	expect.MustEqual(e.t, c.opcode, opcode, "opcode of the completion of %d in the guest", c.id)
	return c
}

// connected returns both ends of an RC or UC connection.
func connected(t *testing.T, w *world, d verbs.Provider, fam family, transport ib.Transport, buf int) (*end, *peer) {
	t.Helper()
	a := newEnd(t, d, endConfig{transport: transport, buf: buf})
	b := newPeer(t, w, fam, map[ib.Transport]string{ib.RC: "rc", ib.UC: "uc"}[transport], false, buf)
	join(a, b, w, fam)
	return a, b
}

// peerPSN is where the guest's queue pairs begin to send, and ours to receive.
const peerPSN ib.PSN = 0xfffff8

// join connects both ends.
func join(a *end, b *peer, w *world, fam family) {
	a.t.Helper()
	// The guest uses one number for both directions: SQ and RQ PSN.
	b.do("connect %x %d %d 14 7 7 12", fam.host[:], a.qp.QPN(), peerPSN)
	for _, attr := range []verbs.QPAttr{
		{State: verbs.StateRTR, Path: verbs.AHAttr{SGID: fam.host, DGID: fam.guest}, PathMTU: pathMTU(w.mtu),
			DestQPN: b.qpn, RQPSN: peerPSN, MaxDestRDAtomic: 16, MinRNRTimer: 12},
		{State: verbs.StateRTS, SQPSN: peerPSN, Timeout: 16, RetryCount: 7, RNRRetry: 7, MaxRDAtomic: 16},
	} {
		if err := a.qp.Modify(attr); err != nil {
			a.t.Fatal(err)
		}
	}
}
