package softroce

import (
	"math/bits"
	"sync"
	"sync/atomic"

	"ipoibcm/verbs"
)

// A bell wakes the goroutine that receives from it. It rings for the next receive if there is none now.
type bell chan struct{}

func newBell() bell { return make(bell, 1) }

func (b bell) ring() {
	select {
	case b <- struct{}{}:
	default: // a wake-up is pending already
	}
}

// A cq is a completion queue. A goroutine adds completions while it holds the lock of a QP,
// and calls notify after it has released the lock.
type cq struct {
	dev *Device
	th  *thread

	mu         sync.Mutex
	ring       []verbs.WC // length is a power of two
	made       int        // the length that the user asked for, rounded up
	head, tail uint32     // count up for ever

	pending atomic.Bool // something was added since the user was last notified
	wake    bell
	gone    chan struct{} // closed by Destroy

	ready  func()
	active atomic.Int32 // calls of run since the handler was last idle; 0: it is idle
	closed atomic.Bool
	idle   chan struct{} // closed by run when it sees that closed is set
}

var _ verbs.CallbackCQ = (*cq)(nil)

// firstRing is how many completions the ring of a queue has room for at first, at most. It is gone through in
// turn, so a longer one is never in the processor's cache.
const firstRing = 64

func newCQ(th *thread, depth int) *cq {
	made := max(16, 1<<bits.Len(uint(depth-1)))
	return &cq{dev: th.dev, th: th, ring: make([]verbs.WC, min(made, firstRing)), made: made, wake: newBell(), gone: make(chan struct{}), idle: make(chan struct{})}
}

// add appends wc. The ring grows when it is full, beyond what the user asked for too: a completion that is lost would leave a
// buffer lost for ever. The work requests that can be posted bound its size.
func (c *cq) add(wc verbs.WC) {
	c.mu.Lock()
	if int(c.tail-c.head) == len(c.ring) {
		c.grow()
	}
	c.ring[c.tail&uint32(len(c.ring)-1)] = wc
	c.tail++
	c.mu.Unlock()
	c.pending.Store(true)
}

func (c *cq) grow() {
	if len(c.ring) >= c.made {
		c.dev.count.cqGrown.Add(1)
	}
	ring := make([]verbs.WC, 2*len(c.ring))
	for i := c.head; i != c.tail; i++ {
		ring[i&uint32(len(ring)-1)] = c.ring[i&uint32(len(c.ring)-1)]
	}
	c.ring = ring
}

// Poll implements [verbs.CQ].
func (c *cq) Poll(wcs []verbs.WC) int {
	c.mu.Lock()
	n := 0
	for n < len(wcs) && c.head != c.tail {
		wcs[n] = c.ring[c.head&uint32(len(c.ring)-1)]
		c.head++
		n++
	}
	c.mu.Unlock()
	return n
}

// Wait implements [verbs.CQ].
func (c *cq) Wait() error {
	select {
	case <-c.gone:
		return verbs.ErrClosed
	default:
	}
	select {
	case <-c.wake:
		return nil
	case <-c.gone:
		return verbs.ErrClosed
	}
}

// OnReady implements [verbs.CallbackCQ].
func (c *cq) OnReady(f func()) { c.ready = f }

// notify notifies the user if completions were added. The caller holds no lock. direct says
// that the caller is a goroutine of ours that may run the user's handler. Otherwise, if the
// thread is calling the user's step, the handler runs only when the step has ended.
func (c *cq) notify(direct bool) {
	if !c.pending.Load() {
		return
	}
	if !direct && c.ready != nil {
		c.th.deferred.Store(true) // set before stepping is read: the step may end now
		if c.th.stepping.Load() {
			return
		}
	}
	if !c.pending.Swap(false) {
		return
	}
	switch {
	case c.ready == nil:
		c.wake.ring()
	case direct:
		c.run()
	default:
		c.dev.notify(c)
	}
}

// run calls the handler until nobody has called run meanwhile.
func (c *cq) run() {
	if c.active.Add(1) != 1 {
		return // the call that runs the handler sees it
	}
	for {
		n := c.active.Load()
		if c.closed.Load() {
			close(c.idle)
			return // active stays above 0: nobody runs it again
		}
		c.ready()
		if c.active.CompareAndSwap(n, 0) {
			return
		}
	}
}

// Destroy implements [verbs.CQ]. It must not be called from the handler.
func (c *cq) Destroy() error {
	if c.closed.Swap(true) {
		return verbs.ErrClosed
	}
	close(c.gone)
	if c.active.Add(1) != 1 {
		<-c.idle
	}
	c.th.forget(c)
	return nil
}
