package datapath

import (
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"ipoibcm/ib"
	"ipoibcm/verbs"
)

// A fabric is a provider whose QPs hand messages straight to each other. Every
// loop of a test has one, and they share a world.
type fabric struct {
	w        *world
	gid      ib.GID
	srq      bool
	callback bool
	live     int // regions
	threads  int // data threads; 0: one, and it does not say so
}

// A threader is a fabric that has several data threads.
type threader struct{ *fabric }

func (f threader) Threads() int              { return f.threads }
func (f threader) Thread(int) verbs.Provider { return f.fabric }
func (f threader) Steering() verbs.Offload   { return verbs.Offload{On: true} }

type world struct {
	mu  sync.Mutex
	qps map[ib.QPN]*fakeQP
	mc  map[ib.GID][]*fakeQP
}

func (w *world) qp(n ib.QPN) *fakeQP {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.qps[n]
}

func newWorld() *world { return &world{qps: map[ib.QPN]*fakeQP{}, mc: map[ib.GID][]*fakeQP{}} }

func (f *fabric) Caps() verbs.Caps {
	return verbs.Caps{Name: "fake", RC: true, UC: true, UD: true, SRQ: f.srq, MaxMessage: 1 << 20,
		MaxUDPayload: 4096, MaxSGE: 1}
}
func (f *fabric) Port() verbs.Port { return verbs.Port{Active: true, GIDs: []ib.GID{f.gid}} }
func (f *fabric) Alloc(n int) (*verbs.Region, error) {
	f.live++
	return &verbs.Region{Buf: make([]byte, n)}, nil
}
func (f *fabric) Register([]byte, verbs.Access) (*verbs.Region, error) {
	return nil, errors.ErrUnsupported
}
func (f *fabric) Deregister(*verbs.Region) error { f.live--; return nil }
func (f *fabric) CreateCQ(int) (verbs.CQ, error) {
	q := &fakeCQ{wake: make(chan struct{}, 1), dead: make(chan struct{})}
	if f.callback {
		return &callbackCQ{fakeCQ: q}, nil
	}
	return q, nil
}
func (f *fabric) CreateSRQ(verbs.SRQInit) (verbs.SRQ, error) { return &fakeSRQ{}, nil }
func (f *fabric) CreateAH(a verbs.AHAttr) (verbs.AH, error)  { return fakeAH(a), nil }
func (f *fabric) MADPort() verbs.MADPort                     { return nil }
func (f *fabric) Events() <-chan verbs.Event                 { return nil }
func (f *fabric) SetTap(verbs.Tap)                           {}
func (f *fabric) Counters(func(string, uint64))              {}
func (f *fabric) Close() error                               { return nil }
func (f *fabric) CreateQP(init verbs.QPInit) (verbs.QP, error) {
	q := &fakeQP{f: f, init: init, qpn: ib.QPN(rand.Uint32N(1<<24-16) + 8), rq: &fakeSRQ{}}
	if init.SRQ != nil {
		q.rq = init.SRQ.(*fakeSRQ)
	}
	f.w.mu.Lock()
	f.w.qps[q.qpn] = q
	f.w.mu.Unlock()
	return q, nil
}

type fakeAH verbs.AHAttr

func (a fakeAH) Attr() verbs.AHAttr { return verbs.AHAttr(a) }
func (fakeAH) Destroy() error       { return nil }

type fakeSRQ struct {
	mu   sync.Mutex
	ring [1024]verbs.RecvWR
	h, t int
}

func (q *fakeSRQ) PostRecv(wrs []verbs.RecvWR) (int, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for i, wr := range wrs {
		if q.t-q.h == len(q.ring) {
			return i, verbs.ErrQueueFull
		}
		q.ring[q.t%len(q.ring)] = wr
		q.t++
	}
	return len(wrs), nil
}
func (q *fakeSRQ) take() (wr verbs.RecvWR, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.h == q.t {
		return wr, false
	}
	wr = q.ring[q.h%len(q.ring)]
	q.h++
	return wr, true
}
func (q *fakeSRQ) Destroy() error { return nil }

type fakeCQ struct {
	mu   sync.Mutex
	wcs  []verbs.WC
	wake chan struct{}
	dead chan struct{}
	once sync.Once
}

func (q *fakeCQ) Poll(wcs []verbs.WC) int {
	q.mu.Lock()
	defer q.mu.Unlock()
	n := copy(wcs, q.wcs)
	q.wcs = append(q.wcs[:0], q.wcs[n:]...)
	return n
}
func (q *fakeCQ) Wait() error {
	select {
	case <-q.wake:
		return nil
	case <-q.dead:
		return verbs.ErrClosed
	}
}
func (q *fakeCQ) Destroy() error { q.once.Do(func() { close(q.dead) }); return nil }
func (q *fakeCQ) add(wc verbs.WC) {
	q.mu.Lock()
	q.wcs = append(q.wcs, wc)
	q.mu.Unlock()
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// A callbackCQ runs its handler on a goroutine that a real provider would have.
type callbackCQ struct {
	*fakeCQ
	ended sync.WaitGroup
}

func (q *callbackCQ) OnReady(f func()) {
	q.ended.Go(func() {
		for q.Wait() == nil {
			f()
		}
	})
}

func (q *callbackCQ) Destroy() error {
	q.fakeCQ.Destroy()
	q.ended.Wait()
	return nil
}

func base(q verbs.CQ) *fakeCQ {
	if c, ok := q.(*callbackCQ); ok {
		return c.fakeCQ
	}
	return q.(*fakeCQ)
}

type fakeQP struct {
	f    *fabric
	init verbs.QPInit
	qpn  ib.QPN
	rq   *fakeSRQ

	mu    sync.Mutex
	state verbs.QPState
	dest  ib.QPN
	hold  bool // takes requests and completes none, as with a dead peer
	held  []verbs.SendWR
	posts int
	fail  error
}

func (q *fakeQP) QPN() ib.QPN             { return q.qpn }
func (q *fakeQP) Transport() ib.Transport { return q.init.Transport }
func (q *fakeQP) State() verbs.QPState    { q.mu.Lock(); defer q.mu.Unlock(); return q.state }
func (q *fakeQP) Modify(a verbs.QPAttr) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.state = a.State
	switch a.State {
	case verbs.StateReset:
		q.held = nil
		for ok := q.init.SRQ == nil; ok; {
			_, ok = q.rq.take()
		}
	case verbs.StateRTR:
		q.dest = a.DestQPN
	case verbs.StateError:
		for _, wr := range q.held {
			base(q.init.SendCQ).add(verbs.WC{ID: wr.ID, Status: verbs.WRFlushError, QPN: q.qpn})
		}
		q.held = nil
		if q.init.SRQ == nil {
			for {
				wr, ok := q.rq.take()
				if !ok {
					break
				}
				base(q.init.RecvCQ).add(verbs.WC{ID: wr.ID, Status: verbs.WRFlushError, QPN: q.qpn, Opcode: verbs.Recv})
			}
		}
	}
	return nil
}
func (q *fakeQP) PostRecv(wrs []verbs.RecvWR) (int, error) { return q.rq.PostRecv(wrs) }
func (q *fakeQP) PostSend(wrs []verbs.SendWR) (int, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.posts++
	if q.fail != nil {
		return 0, q.fail
	}
	for i := range wrs {
		if q.hold {
			if len(q.held) == q.init.SendDepth {
				return i, verbs.ErrQueueFull
			}
			wr := wrs[i]
			wr.SG = slices.Clone(wr.SG)
			q.held = append(q.held, wr)
			continue
		}
		q.deliver(&wrs[i])
	}
	return len(wrs), nil
}

// release completes n of the held requests.
func (q *fakeQP) release(n int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for range min(n, len(q.held)) {
		q.deliver(&q.held[0])
		q.held = append(q.held[:0], q.held[1:]...)
	}
}

func (q *fakeQP) deliver(wr *verbs.SendWR) {
	if q.init.Transport == ib.UD {
		dgid := wr.AH.Attr().DGID
		if wr.RemoteQPN == ib.QPNMulticast {
			for _, to := range q.f.w.mc[dgid] {
				to.receive(wr.SG[0].Buf, q, dgid)
			}
		} else if to := q.f.w.qp(wr.RemoteQPN); to != nil {
			to.receive(wr.SG[0].Buf, q, dgid)
		}
	} else if to := q.f.w.qp(q.dest); to != nil {
		to.receive(wr.SG[0].Buf, q, ib.GID{})
	}
	if wr.Flags&verbs.Signaled != 0 {
		base(q.init.SendCQ).add(verbs.WC{ID: wr.ID, QPN: q.qpn})
	}
}

func (q *fakeQP) receive(msg []byte, from *fakeQP, dgid ib.GID) {
	wr, ok := q.rq.take()
	if !ok {
		return
	}
	buf := wr.SG[0].Buf
	wc := verbs.WC{ID: wr.ID, Opcode: verbs.Recv, QPN: q.qpn}
	if q.init.Transport == ib.UD {
		clear(buf[:8])
		copy(buf[8:24], from.f.gid[:])
		copy(buf[24:40], dgid[:])
		buf = buf[verbs.GRHLen:]
		wc.ByteLen, wc.Flags, wc.SrcQPN = verbs.GRHLen, verbs.WithGRH, from.qpn
	}
	wc.ByteLen += copy(buf, msg)
	base(q.init.RecvCQ).add(wc)
}

func (q *fakeQP) AttachMulticast(g ib.GID) error {
	q.f.w.mc[g] = append(q.f.w.mc[g], q)
	return nil
}
func (q *fakeQP) DetachMulticast(ib.GID) error { return nil }
func (q *fakeQP) Destroy() error {
	q.f.w.mu.Lock()
	delete(q.f.w.qps, q.qpn)
	q.f.w.mu.Unlock()
	q.mu.Lock()
	q.held, q.hold, q.fail = nil, false, verbs.ErrClosed
	q.mu.Unlock()
	return nil
}

// patience bounds waits for what takes milliseconds on an idle machine.
const patience = time.Minute

// inBubble runs f with a clock of its own, which moves when every goroutine that f began waits.
func inBubble(t *testing.T, f func(t *testing.T)) {
	synctest.Test(t, func(t *testing.T) {
		was := epoch
		t.Cleanup(func() { epoch = was })
		epoch = time.Now().Add(-time.Hour) // that of the process is another clock's
		f(t)
	})
}

// bubble runs f as a subtest, in a bubble.
func bubble(t *testing.T, name string, f func(t *testing.T)) {
	t.Run(name, func(t *testing.T) { inBubble(t, f) })
}

// eventually waits for something that another goroutine does. It looks when all goroutines of
// the test's bubble wait, and lets time of the bubble pass between two looks.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		if synctest.Wait(); ok() {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}
