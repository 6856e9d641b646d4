// Package events is what a provider tells its user by: asynchronous events, and the
// tap that is shown packets.
package events

import (
	"sync"
	"sync/atomic"

	"ipoibcm/verbs"
)

// Depth is how many events wait for the reader at most.
const Depth = 256

// A Queue holds events until they are read. Any goroutine may call any method.
type Queue struct {
	dropped *atomic.Uint64

	mu     sync.Mutex
	ch     chan verbs.Event
	closed bool
}

// NewQueue returns a queue that counts in dropped what there is no room for.
func NewQueue(dropped *atomic.Uint64) *Queue {
	return &Queue{dropped: dropped, ch: make(chan verbs.Event, Depth)}
}

// Events is where the events come out. It is closed by Close.
func (q *Queue) Events() <-chan verbs.Event { return q.ch }

// Tell adds ev, and does not wait. After Close it does nothing.
func (q *Queue) Tell(ev verbs.Event) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return
	}
	select {
	case q.ch <- ev:
	default:
		q.dropped.Add(1)
	}
}

// Close says that there will be no more. The first call counts.
func (q *Queue) Close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if !q.closed {
		q.closed = true
		close(q.ch)
	}
}

// A Tap is where the user's tap is kept. The zero value has none.
type Tap struct{ p atomic.Pointer[verbs.Tap] }

// Set makes t what is shown packets, nil nothing.
func (s *Tap) Set(t verbs.Tap) {
	if t == nil {
		s.p.Store(nil)
		return
	}
	s.p.Store(&t)
}

// Get returns what is shown packets, or nil.
func (s *Tap) Get() verbs.Tap {
	if p := s.p.Load(); p != nil {
		return *p
	}
	return nil
}
