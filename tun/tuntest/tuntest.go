// Package tuntest is a TUN device in memory, for tests.
package tuntest

import (
	"bytes"
	"os"
	"sync"
	"time"

	"ipoibcm/tun"
)

// A Fake is a [tun.Device] whose kernel side is the test.
//
// Packets given to Send come out of Read; packets given to Write come out of Receive. Each way
// holds at most depth packets; further ones are dropped, as a TUN does with its transmit queue.
type Fake struct {
	mu     sync.Mutex
	cond   sync.Cond
	name   string
	down   [][]byte // packets from Send to Read
	up     [][]byte // packets from Write to Receive
	free   [][]byte
	depth  int
	closed bool
	sink   bool
	lost   int
	count  int
}

var _ tun.Device = (*Fake)(nil)

// New returns a fake that holds up to depth packets each way.
func New(name string, depth int) *Fake {
	f := &Fake{name: name, depth: depth}
	f.cond.L = &f.mu
	return f
}

// Name implements [tun.Device].
func (f *Fake) Name() string { return f.name }

// Index implements [tun.Device]; it is always 1.
func (f *Fake) Index() int { return 1 }

// Send sends pkt to the device, as the kernel does. It copies pkt. It returns false if the device
// is full or closed.
func (f *Fake) Send(pkt []byte) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed || len(f.down) == f.depth {
		f.lost++
		return false
	}
	f.down = append(f.down, f.clone(pkt))
	f.cond.Broadcast()
	return true
}

// Receive returns the next packet written to the device, or nil after timeout or Close.
func (f *Fake) Receive(timeout time.Duration) []byte {
	f.mu.Lock()
	defer f.mu.Unlock()
	late := false
	t := time.AfterFunc(timeout, func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		late = true
		f.cond.Broadcast()
	})
	defer t.Stop()
	for len(f.up) == 0 {
		if f.closed || late {
			return nil
		}
		f.cond.Wait()
	}
	p := f.up[0]
	f.up = append(f.up[:0], f.up[1:]...)
	return bytes.Clone(p)
}

// Discard makes Write count packets and keep none, for benchmarks.
func (f *Fake) Discard() { f.mu.Lock(); f.sink = true; f.mu.Unlock() }

// Written returns how many packets were written to the device.
func (f *Fake) Written() int { f.mu.Lock(); defer f.mu.Unlock(); return f.count }

// Lost returns how many packets were dropped because their direction was full, or by Send after
// Close.
func (f *Fake) Lost() int { f.mu.Lock(); defer f.mu.Unlock(); return f.lost }

// Waiting returns how many packets wait to be read.
func (f *Fake) Waiting() int { f.mu.Lock(); defer f.mu.Unlock(); return len(f.down) }

// Read implements [tun.Device].
func (f *Fake) Read(bufs [][]byte, sizes []int) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for len(f.down) == 0 && !f.closed {
		f.cond.Wait()
	}
	if f.closed {
		return 0, os.ErrClosed
	}
	n := min(len(bufs), len(f.down))
	for i := range n {
		sizes[i] = copy(bufs[i], f.down[i])
		f.free = append(f.free, f.down[i][:0])
	}
	f.down = append(f.down[:0], f.down[n:]...)
	return n, nil
}

// Write implements [tun.Device].
func (f *Fake) Write(bufs [][]byte) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return 0, os.ErrClosed
	}
	for _, b := range bufs {
		f.count++
		switch {
		case f.sink:
		case len(f.up) == f.depth:
			f.lost++
		default:
			f.up = append(f.up, f.clone(b))
		}
	}
	f.cond.Broadcast()
	return len(bufs), nil
}

// Close implements [tun.Device].
func (f *Fake) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.closed = true
	f.cond.Broadcast()
	return nil
}

// clone copies b into the buffer of a packet that was read before, if there is one, so that a warm
// fake does not allocate.
func (f *Fake) clone(b []byte) []byte {
	if n := len(f.free); n > 0 {
		p := f.free[n-1]
		f.free = f.free[:n-1]
		return append(p, b...)
	}
	return bytes.Clone(b)
}
