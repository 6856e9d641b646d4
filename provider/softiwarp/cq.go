package softiwarp

import (
	"sync"

	"ipoibcm/verbs"
)

// A cq is a completion queue.
type cq struct {
	dev *Device

	mu    sync.Mutex
	depth int
	wcs   []verbs.WC
	head  int
	gone  bool

	wake chan struct{} // holds at most one
	end  chan struct{} // closed by Destroy
}

var _ verbs.CQ = (*cq)(nil)

func newCQ(d *Device, depth int) *cq {
	return &cq{dev: d, depth: depth, wake: make(chan struct{}, 1), end: make(chan struct{})}
}

// add appends wc, even beyond the depth: without the completion its user would never get the buffer
// back. The number of work requests that can be posted bounds the queue.
func (c *cq) add(wc verbs.WC) {
	c.mu.Lock()
	if c.head > 0 && len(c.wcs) == cap(c.wcs) {
		n := copy(c.wcs, c.wcs[c.head:])
		c.wcs, c.head = c.wcs[:n], 0
	}
	if len(c.wcs)-c.head == c.depth {
		c.dev.count.cqOver.Add(1)
	}
	c.wcs = append(c.wcs, wc)
	c.mu.Unlock()
	nudge(c.wake)
}

// Poll implements [verbs.CQ].
func (c *cq) Poll(wcs []verbs.WC) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := copy(wcs, c.wcs[c.head:])
	if c.head += n; c.head == len(c.wcs) {
		c.wcs, c.head = c.wcs[:0], 0
	}
	return n
}

// Wait implements [verbs.CQ].
func (c *cq) Wait() error {
	select {
	case <-c.end:
		return verbs.ErrClosed
	default:
	}
	select {
	case <-c.wake:
		return nil
	case <-c.end:
		return verbs.ErrClosed
	}
}

// Destroy implements [verbs.CQ].
func (c *cq) Destroy() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.gone {
		return verbs.ErrClosed
	}
	c.gone = true
	close(c.end)
	c.dev.forgetCQ(c)
	return nil
}
