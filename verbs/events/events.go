// Package events holds two things with which a provider notifies its user: a queue of asynchronous
// events, and the tap, which sees all packets.
package events

import (
	"sync"
	"sync/atomic"

	"ipoibcm/verbs"
)

// Depth is how many events a Queue holds at most.
const Depth = 256

// A Queue holds events until they are read. Any goroutine may call any method.
type Queue struct {
	dropped *atomic.Uint64

	mu     sync.Mutex
	ch     chan verbs.Event
	closed bool
}

// NewQueue returns a queue. It drops events for which it has no room and counts them in dropped. After the last
// one that it holds it then says so, by [verbs.EventsLost].
func NewQueue(dropped *atomic.Uint64) *Queue {
	return &Queue{dropped: dropped, ch: make(chan verbs.Event, Depth+1)}
}

// Events returns the channel of the events. Close closes it.
func (q *Queue) Events() <-chan verbs.Event { return q.ch }

// Tell adds ev without blocking, or drops it if the queue is full. [verbs.DeviceFatal], after which nothing else
// matters, takes the place of older events instead. After Close it does nothing.
func (q *Queue) Tell(ev verbs.Event) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return
	}
	if len(q.ch) < Depth {
		q.ch <- ev // nobody else writes
		return
	}
	q.dropped.Add(1)
	last := verbs.Event{Kind: verbs.EventsLost}
	if ev.Kind == verbs.DeviceFatal {
		last = ev
	}
	for {
		select {
		case q.ch <- last:
			return
		default: // EventsLost is there already
		}
		if last.Kind == verbs.EventsLost {
			return
		}
		select {
		case <-q.ch:
		default: // somebody has read it
		}
	}
}

// Close closes the channel. Further calls do nothing.
func (q *Queue) Close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if !q.closed {
		q.closed = true
		close(q.ch)
	}
}

// A Tap holds the user's tap. The zero value holds none.
type Tap struct{ p atomic.Pointer[verbs.Tap] }

// Set makes t the tap; nil removes it.
func (s *Tap) Set(t verbs.Tap) {
	if t == nil {
		s.p.Store(nil)
		return
	}
	s.p.Store(&t)
}

// Get returns the tap, or nil if there is none.
func (s *Tap) Get() verbs.Tap {
	if p := s.p.Load(); p != nil {
		return *p
	}
	return nil
}
