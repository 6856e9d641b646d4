package softroce

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"ipoibcm/counters"
	"ipoibcm/hostnet"
	"ipoibcm/verbs"
)

// A thread is the state of one data thread, which its queue pairs and completion queues use
// for each packet. A packet for a queue pair of another thread is delivered too, under the
// lock of that queue pair. As long as packets arrive on the thread of their queue pair,
// threads do not wait for each other's locks.
type thread struct {
	dev   *Device
	index int // in Device.threads

	// writable is an epoll descriptor: it is readable when a send buffer that was full takes packets again.
	writable int
	// full says that a send buffer may be full. The event loop watches writable only then, because an epoll
	// descriptor takes the kernel longer to poll than any other.
	full    atomic.Bool
	scratch scratches
	timers  timers
	count   threadCounts[atomic.Uint64]

	polling  atomic.Bool // its receiver polls a descriptor of the user's
	stepping atomic.Bool // it is calling the user's step
	deferred atomic.Bool // completions may wait for the step to end

	mu  sync.Mutex
	cqs []*cq
}

// threadCounts are counted with each packet, or call; C is uint64 or atomic.
type threadCounts[C any] struct {
	txPackets    C `name:"tx_packets"`
	txCalls      C `name:"tx_calls"`
	txBatches    C `name:"tx_batches"`
	txConnected  C `name:"tx_connected"`
	rxPackets    C `name:"rx_packets"`
	rxCalls      C `name:"rx_calls"`
	rxChains     C `name:"rx_chains"`
	rxHeld       C `name:"rx_held_waits"`
	rxSpinHits   C `name:"rx_poll_hits"`
	rxSpinMisses C `name:"rx_poll_misses"`
	rxSpinLate   C `name:"rx_poll_late"`
	rxElsewhere  C `name:"rx_other_thread"` // came to another thread than that of their queue pair
}

func newThread(d *Device, index int) *thread {
	th := &thread{dev: d, index: index, writable: -1}
	th.timers.wake, th.timers.stop = newBell(), make(chan struct{})
	return th
}

// close closes the descriptor of th.
func (th *thread) close() {
	if th.writable >= 0 {
		unix.Close(th.writable)
	}
}

// run runs r. With several data threads the receiver of each has a system thread of its own, which is
// named so that "top -H" and control groups find it. With one data thread that is not worth it.
func (th *thread) run(r *receiver) {
	if len(th.dev.threads) == 1 || th.eventLoop() != r {
		r.run()
		return
	}
	_ = hostnet.OwnThread(func() error {
		name := append([]byte(threadName(th.index)), 0)
		_, _, _ = unix.RawSyscall(unix.SYS_PRCTL, unix.PR_SET_NAME, uintptr(unsafe.Pointer(&name[0])), 0)
		r.run()
		return nil
	})
}

// threadName is the system's name of data thread i, where there are several.
func threadName(i int) string { return fmt.Sprintf("data %d", i) }

// createCQ makes a completion queue whose queue pairs belong to th.
func (th *thread) createCQ(depth int) (verbs.CQ, error) {
	if th.dev.closing.Load() {
		return nil, verbs.ErrClosed
	}
	c := newCQ(th, min(max(1, depth), maxDepth*4))
	th.mu.Lock()
	th.cqs = append(th.cqs, c)
	th.mu.Unlock()
	return c, nil
}

// forget removes c, which is destroyed.
func (th *thread) forget(c *cq) {
	th.mu.Lock()
	th.cqs = slices.DeleteFunc(th.cqs, func(other *cq) bool { return other == c })
	th.mu.Unlock()
}

// queues returns the completion queues of th.
func (th *thread) queues() []*cq {
	th.mu.Lock()
	defer th.mu.Unlock()
	return slices.Clone(th.cqs)
}

// step calls the user's step. The handlers of completions that it causes on th wait
// until it has ended, so that they need not run beside it. due is memory for the list
// of their queues.
func (th *thread) step(a *polledFD, due []*cq) (more bool, wait time.Duration, _ []*cq) {
	th.stepping.Store(true)
	more, wait = a.step()
	th.stepping.Store(false)
	if !th.deferred.Swap(false) {
		return more, wait, due
	}
	due = due[:0]
	th.mu.Lock()
	for _, c := range th.cqs {
		if c.pending.Load() {
			due = append(due, c)
		}
	}
	th.mu.Unlock()
	for i, c := range due {
		c.notify(true)
		due[i] = nil
	}
	return more, wait, due
}

// ofThreads adds up what the threads have counted.
func (d *Device) ofThreads() (sum threadCounts[uint64]) {
	for _, th := range d.threads {
		counters.Add(&sum, &th.count)
	}
	return sum
}
