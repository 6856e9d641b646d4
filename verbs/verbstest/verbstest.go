// Package verbstest is the suite that every [verbs.Provider] passes. It knows nothing of what
// carries the packets: it takes two ports that reach each other and checks only what the contract
// promises. It skips parts for which a provider lacks a capability in its Caps, and logs that.
package verbstest

import (
	"bytes"
	"cmp"
	"errors"
	"slices"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/verbs"
)

// A Pair is two ports of one network. The test that made it closes them (with t.Cleanup); the suite
// may close either of them before.
type Pair struct {
	A, B verbs.Provider
	// Pass waits until d has passed. Nil means time.Sleep. A simulation moves its clock.
	Pass func(d time.Duration)
	// Timeout bounds the wait for something that must happen. Zero means a minute.
	Timeout time.Duration
	// Quiet is how long the suite waits to see that nothing happens. Zero means 50 ms.
	Quiet time.Duration
	// MGID is a group to which both ports can attach. Zero means ff12:401b:ffff::ffff:ffff, or
	// ::ffff:239.192.255.255 if the first GID of A is an IPv4 address.
	MGID ib.GID
	// Instead maps a status that the contract expects of a failed request to other statuses that A
	// and B may report, because devices differ there. The request must fail, and the queue pair
	// with it, in any case.
	Instead map[verbs.Status][]verbs.Status
}

// Run runs the suite. mk makes a fresh pair for each part of it.
func Run(t *testing.T, mk func(t *testing.T) Pair) {
	parts := []struct {
		name string
		f    func(*env)
		need func(verbs.Caps) bool // nil: every provider
	}{
		{"Port", testPort, nil},
		{"Memory", testMemory, nil},
		{"Counters", testCounters, nil},
		{"Wait", testWait, hasRC},
		{"OnReady", testOnReady, hasRC},
		{"Tap", testTap, isRoCE},
		{"MAD", testMAD, func(c verbs.Caps) bool { return c.MAD }},
		{"Close", testClose, nil},

		{"States", testStates, hasRC},
		{"StatesUD", testStatesUD, hasUD},
		{"QueueFull", testQueueFull, hasRC},
		{"CQOverflow", testCQOverflow, hasRC},

		{"UD", testUD, hasUD},
		{"UDQKey", testUDQKey, hasUD},
		{"UDTooLong", testUDTooLong, hasUD},
		{"UDNoReceive", testUDNoReceive, hasUD},
		{"UDShared", testUDShared, func(c verbs.Caps) bool { return c.UD && c.SRQ }},
		{"Multicast", testMulticast, func(c verbs.Caps) bool { return c.UD && c.Multicast }},

		{"RCSizes", testRCSizes, hasRC},
		{"RCGather", testRCGather, func(c verbs.Caps) bool { return c.RC && c.MaxSGE >= 3 }},
		{"RCOrder", testRCOrder, hasRC},
		{"RCManyQPs", testRCManyQPs, hasRC},
		{"RCShared", testRCShared, func(c verbs.Caps) bool { return c.RC && c.SRQ }},
		{"RCImmediate", testRCImmediate, isRoCE},
		{"RCInvalidate", testRCInvalidate, func(c verbs.Caps) bool { return c.RC && c.Inv }},
		{"RCUnsignaled", testRCUnsignaled, hasRC},
		{"RCNotReady", testRCNotReady, hasRC},
		{"RCNotReadyExceeded", testRCNotReadyExceeded, isRoCE},
		{"RCTooLong", testRCTooLong, hasRC},
		{"RCRetryExceeded", testRCRetryExceeded, isRoCE},
		{"RCFlush", testRCFlush, hasRC},
		{"RCDestroy", testRCDestroy, hasRC},
		{"RCReset", testRCReset, hasRC},
		{"RCCommEst", testRCCommEst, hasRC},
		{"RCCommEstInRTS", testRCCommEstInRTS, isRoCE},

		{"RDMAWrite", testWrite, hasRDMA},
		{"RDMARead", testRead, hasRDMA},
		{"RDMAReadMany", testReadMany, hasRDMA},
		{"RDMAFence", testFence, hasRDMA},
		{"RDMAAccess", testAccess, hasRDMA},

		{"UC", testUC, hasUC},
		{"UCDrops", testUCDrops, hasUC},
		{"UCShared", testUCShared, func(c verbs.Caps) bool { return c.UC && c.SRQForUC }},
		{"UCWrite", testUCWrite, func(c verbs.Caps) bool { return c.UC && c.RDMA }},
	}
	for _, part := range parts {
		t.Run(part.name, func(t *testing.T) {
			e := &env{T: t, Pair: mk(t)}
			e.Timeout = cmp.Or(e.Timeout, time.Minute)
			e.Quiet = cmp.Or(e.Quiet, 50*time.Millisecond)
			for _, p := range []verbs.Provider{e.A, e.B} {
				if part.need != nil && !part.need(p.Caps()) {
					t.Skipf("provider %s does not offer this", p.Caps().Name)
				}
			}
			part.f(e)
		})
	}
}

// What parts of the suite need of a provider.
func hasRC(c verbs.Caps) bool   { return c.RC }
func hasUC(c verbs.Caps) bool   { return c.UC }
func hasUD(c verbs.Caps) bool   { return c.UD }
func hasRDMA(c verbs.Caps) bool { return c.RC && c.RDMA }
func isRoCE(c verbs.Caps) bool  { return c.RC && !c.IWARP }

// env is what one part of the suite runs with.
type env struct {
	*testing.T
	Pair
}

func (e *env) pass(d time.Duration) {
	if e.Pair.Pass != nil {
		e.Pair.Pass(d)
		return
	}
	time.Sleep(d)
}

// until passes time until cond holds. It fails the test after Timeout.
func (e *env) until(what string, cond func() bool) {
	e.Helper()
	const step = 500 * time.Microsecond
	end := time.Now().Add(e.Timeout)
	for n := time.Duration(0); !cond(); n += step {
		if e.Pair.Pass == nil && time.Now().After(end) || e.Pair.Pass != nil && n > e.Timeout {
			e.Fatalf("%s: has not happened after %v", what, e.Timeout)
		}
		e.pass(step)
	}
}

func (e *env) must(err error) {
	e.Helper()
	if err != nil {
		e.Fatal(err)
	}
}

// refuses checks that what failed with want.
func (e *env) refuses(what string, err, want error) {
	e.Helper()
	if !errors.Is(err, want) {
		e.Errorf("%s: %v, want %v", what, err, want)
	}
}

// refusesSend checks that PostSend does not take wr, and fails with want.
func (n *end) refusesSend(what string, wr verbs.SendWR, want error) {
	n.Helper()
	if k, err := n.qp.PostSend([]verbs.SendWR{wr}); k != 0 || !errors.Is(err, want) {
		n.Errorf("%s: took %d, %v; want %v", what, k, err, want)
	}
}

// inState checks the state of ends.
func (e *env) inState(want verbs.QPState, ends ...*end) {
	e.Helper()
	for _, n := range ends {
		if got := n.qp.State(); got != want {
			e.Errorf("state is %v, want %v", got, want)
		}
	}
}

// options are those of an end. Zero values mean the defaults of [env.newEnd].
type options struct {
	transport            ib.Transport
	sendDepth, recvDepth int
	cqDepth              int
	shared               bool
	access               verbs.Access
	timeout              ib.Timeout
	retry, rnrRetry      int // negative means none
	psn                  ib.PSN
	again                ib.PSN // added to the PSN when the QP is used again
	qkey                 ib.QKey
}

// An end is one QP with its queues.
type end struct {
	*env
	p              verbs.Provider
	qp             verbs.QP
	sendCQ, recvCQ verbs.CQ
	srq            verbs.SRQ
	opt            options
	send, recv     []verbs.WC // what has been polled
}

// newEnd returns an end whose QP is in RESET.
func (e *env) newEnd(p verbs.Provider, opt options) *end {
	e.Helper()
	opt.sendDepth = cmp.Or(opt.sendDepth, 64)
	opt.recvDepth = cmp.Or(opt.recvDepth, 64)
	opt.cqDepth = cmp.Or(opt.cqDepth, 2*max(opt.sendDepth, opt.recvDepth))
	opt.timeout = cmp.Or(opt.timeout, 16)
	opt.retry = cmp.Or(opt.retry, 7)
	opt.rnrRetry = cmp.Or(opt.rnrRetry, 7)
	opt.qkey = cmp.Or(opt.qkey, ib.QKeyIPoIB)
	n := &end{env: e, p: p, opt: opt}
	var err error
	n.sendCQ, err = p.CreateCQ(opt.cqDepth)
	e.must(err)
	n.recvCQ, err = p.CreateCQ(opt.cqDepth)
	e.must(err)
	sge := min(4, p.Caps().MaxSGE)
	if opt.shared {
		n.srq, err = p.CreateSRQ(verbs.SRQInit{Depth: opt.recvDepth, MaxSGE: sge})
		e.must(err)
	}
	n.qp, err = p.CreateQP(verbs.QPInit{Transport: opt.transport, SendCQ: n.sendCQ, RecvCQ: n.recvCQ, SRQ: n.srq,
		SendDepth: opt.sendDepth, RecvDepth: opt.recvDepth, MaxSendSGE: sge, MaxRecvSGE: sge})
	e.must(err)
	if got := n.qp.Transport(); got != opt.transport {
		e.Fatalf("transport is %v, want %v", got, opt.transport)
	}
	if q := n.qp.QPN(); !q.Valid() || q <= ib.QPNGSI || q == ib.QPNMulticast {
		e.Fatalf("QPN %v is not for use", q)
	}
	if s := n.qp.State(); s != verbs.StateReset {
		e.Fatalf("a new QP is in %v", s)
	}
	return n
}

// connected returns two ends in RTS.
func (e *env) connected(opt options) (a, b *end) {
	e.Helper()
	a, b = e.newEnd(e.A, opt), e.newEnd(e.B, opt)
	connect(a, b)
	return a, b
}

// connect moves two ends from RESET to RTS.
func connect(a, b *end) {
	a.Helper()
	a.to(b, verbs.StateInit, verbs.StateRTR, verbs.StateRTS)
	b.to(a, verbs.StateInit, verbs.StateRTR, verbs.StateRTS)
}

func (n *end) psn() ib.PSN { return ((n.opt.psn | ib.PSN(n.qp.QPN())) + n.opt.again) & ib.PSNMask }

// attr returns the attributes for the transition to s of a connection to peer, or of a UD QP if
// peer is nil.
func (n *end) attr(peer *end, s verbs.QPState) verbs.QPAttr {
	attr := verbs.QPAttr{State: s, PKey: n.p.Port().PKeys[0], QKey: n.opt.qkey, Access: n.opt.access,
		MaxDestRDAtomic: 4, MinRNRTimer: 12, SQPSN: n.psn(), Timeout: n.opt.timeout,
		RetryCount: uint8(max(0, n.opt.retry)), RNRRetry: uint8(max(0, n.opt.rnrRetry)), MaxRDAtomic: 4}
	if peer != nil {
		attr.Path = verbs.AHAttr{SGID: n.p.Port().GIDs[0], DGID: peer.p.Port().GIDs[0]}
		attr.PathMTU = min(n.p.Port().MTU, peer.p.Port().MTU)
		attr.DestQPN, attr.RQPSN = peer.qp.QPN(), peer.psn()
	}
	return attr
}

// to moves n's QP through states in turn.
func (n *end) to(peer *end, states ...verbs.QPState) {
	n.Helper()
	for _, s := range states {
		if err := n.qp.Modify(n.attr(peer, s)); err != nil {
			n.Fatalf("to %v: %v", s, err)
		}
		if got := n.qp.State(); got != s {
			n.Fatalf("state is %v after Modify to %v", got, s)
		}
	}
}

// region registers b with n's provider.
func (n *end) region(b []byte, access verbs.Access) *verbs.Region {
	n.Helper()
	r, err := n.p.Register(b, access)
	if err != nil {
		n.Fatalf("register %d octets: %v", len(b), err)
	}
	if &r.Buf[0] != &b[0] || len(r.Buf) != len(b) {
		n.Fatal("the region is not the buffer that was registered")
	}
	return r
}

// buf returns an SG list of fresh registered memory of size octets.
func (n *end) buf(size int) []verbs.SGE {
	n.Helper()
	r := n.region(make([]byte, max(1, size)), 0)
	return []verbs.SGE{{Region: r, Buf: r.Buf[:size]}}
}

// filled returns an SG list as buf does, with octets from [pattern].
func (n *end) filled(size, seed int) []verbs.SGE {
	n.Helper()
	sg := n.buf(size)
	copy(sg[0].Buf, pattern(size, seed))
	return sg
}

// pattern returns n octets that depend on seed and on their position.
func pattern(n, seed int) []byte {
	b := make([]byte, n)
	x := uint32(seed)*2654435761 + 12345
	for i := range b {
		x = x*1664525 + 1013904223
		b[i] = byte(x >> 24)
	}
	return b
}

func (n *end) postSend(wrs ...verbs.SendWR) {
	n.Helper()
	if k, err := n.qp.PostSend(wrs); err != nil || k != len(wrs) {
		n.Fatalf("PostSend took %d of %d: %v", k, len(wrs), err)
	}
}

// postRecv posts to the QP, or to its shared queue.
func (n *end) postRecv(id uint64, sg []verbs.SGE) {
	n.Helper()
	wrs := []verbs.RecvWR{{ID: id, SG: sg}}
	post := n.qp.PostRecv
	if n.srq != nil {
		post = n.srq.PostRecv
	}
	if k, err := post(wrs); err != nil || k != 1 {
		n.Fatalf("PostRecv took %d: %v", k, err)
	}
}

// poll appends the completions of both CQs to n.send and n.recv.
func (n *end) poll() {
	n.send, n.recv = appendAll(n.send, n.sendCQ), appendAll(n.recv, n.recvCQ)
}

// appendAll appends all completions of cq to dst.
func appendAll(dst []verbs.WC, cq verbs.CQ) []verbs.WC {
	var wcs [16]verbs.WC
	for k := cq.Poll(wcs[:]); k > 0; k = cq.Poll(wcs[:]) {
		dst = append(dst, wcs[:k]...)
	}
	return dst
}

// sent waits for the next send completion and returns it; received does so for the next receive.
func (n *end) sent() verbs.WC     { n.Helper(); return n.first("send completion", &n.send) }
func (n *end) received() verbs.WC { n.Helper(); return n.first("receive completion", &n.recv) }

// first waits until list, which is n.send or n.recv, has a completion, and takes out the first.
func (n *end) first(what string, list *[]verbs.WC) verbs.WC {
	n.Helper()
	n.until(what, func() bool { n.poll(); return len(*list) > 0 })
	wc := (*list)[0]
	*list = (*list)[1:]
	return wc
}

// sends posts wr and returns its completion.
func (n *end) sends(wr verbs.SendWR) verbs.WC {
	n.Helper()
	n.postSend(wr)
	return n.sent()
}

// succeeds posts wr, and checks that it completes with success.
func (n *end) succeeds(what string, wr verbs.SendWR) {
	n.Helper()
	n.equal(what, n.sends(wr), verbs.WC{ID: wr.ID, Opcode: wr.Opcode})
}

// transfers sends size octets to another end, and checks that they arrive.
func (n *end) transfers(to *end, size, seed int) {
	n.Helper()
	sg := to.buf(size + 10)
	to.postRecv(5, sg)
	n.succeeds("send", signaled(verbs.Send, 6, n.filled(size, seed)))
	to.equal("receive", to.received(), verbs.WC{ID: 5, Opcode: verbs.Recv, ByteLen: size})
	n.same("message", sg[0].Buf[:size], pattern(size, seed))
	n.same("octets behind the message", sg[0].Buf[size:], make([]byte, 10))
}

// silent checks that nothing completes for the time Quiet.
func (n *end) silent(why string) {
	n.Helper()
	n.pass(n.Quiet)
	n.poll()
	if len(n.send)+len(n.recv) > 0 {
		n.Fatalf("%s: completed %+v %+v", why, n.send, n.recv)
	}
}

// equal fails the test unless got is the completion want of n's QP.
func (n *end) equal(what string, got, want verbs.WC) {
	n.Helper()
	want.QPN = n.qp.QPN()
	if got.Status != verbs.Success && want.Status != verbs.Success {
		// Only ID, status and QPN mean something.
		got = verbs.WC{ID: got.ID, Status: got.Status, QPN: got.QPN}
		want = verbs.WC{ID: want.ID, Status: want.Status, QPN: want.QPN}
		if slices.Contains(n.Instead[want.Status], got.Status) {
			want.Status = got.Status
		}
	}
	if want.Opcode < verbs.Read {
		got.ByteLen, want.ByteLen = 0, 0 // ByteLen counts in receives and READs only
	}
	if got != want {
		n.Fatalf("%s:\n got %+v\nwant %+v", what, got, want)
	}
}

// refused waits for the completion of a request that the peer refuses. With iWARP the request may
// have completed with success; then the QPFatal event has the status.
func (n *end) refused(what string, id uint64, status verbs.Status) {
	n.Helper()
	wc := n.sent()
	if !n.p.Caps().IWARP || wc.Status != verbs.Success {
		n.equal(what, wc, verbs.WC{ID: id, Status: status})
		return
	}
	if wc.ID != id {
		n.Fatalf("%s: %+v, want ID %d", what, wc, id)
	}
	if ev := n.event(n.p, verbs.QPFatal, n.qp.QPN()); ev.Status != status {
		n.Errorf("%s: event %+v, want %v", what, ev, status)
	}
}

// settle returns when everything that a has sent is at b. With iWARP a completion does not show
// that.
func (e *env) settle(a, b *end) {
	e.Helper()
	if !e.A.Caps().IWARP {
		return
	}
	b.postRecv(0, b.buf(0))
	a.sends(signaled(verbs.Send, 0, nil))
	b.received()
}

func (e *env) same(what string, got, want []byte) {
	e.Helper()
	if bytes.Equal(got, want) {
		return
	}
	for i := range min(len(got), len(want)) {
		if got[i] != want[i] {
			e.Fatalf("%s: octet %d of %d is %#x, want %#x", what, i, len(want), got[i], want[i])
		}
	}
	e.Fatalf("%s: %d octets, want %d", what, len(got), len(want))
}

// event waits for an event of that kind and QPN, and drops others.
func (e *env) event(p verbs.Provider, kind verbs.EventKind, qpn ib.QPN) (ev verbs.Event) {
	e.Helper()
	for {
		if ev, _ = next(e, kind.String(), p.Events()); ev.Kind == kind && ev.QPN == qpn {
			return ev
		}
	}
}

// next waits for the next element of c. open is false if c is closed.
func next[T any](e *env, what string, c <-chan T) (v T, open bool) {
	e.Helper()
	e.until(what, func() (came bool) {
		select {
		case v, open = <-c:
			came = true
		default:
		}
		return came
	})
	return v, open
}

// closes waits until c is closed, and drops what comes before.
func closes[T any](e *env, what string, c <-chan T) {
	e.Helper()
	for open := true; open; {
		_, open = next(e, what, c)
	}
}
