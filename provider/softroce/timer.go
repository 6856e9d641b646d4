package softroce

import (
	"sync"
	"time"

	"ipoibcm/timerheap"
)

// A timers wakes the queue pairs of one data thread at their deadlines. The entry of a
// queue pair may be earlier than its deadline: on the hot path a deadline that becomes later
// leaves the entry alone. Once the entry is due, another for the deadline replaces it.
type timers struct {
	mu     sync.Mutex
	heap   timerheap.Heap[timerEntry, *timerEntry]
	kept   bool // a receiver will look at the heap before it sleeps
	missed bool // the first entry changed, and run was not woken
	wake   bell // the first entry changed
	stop   chan struct{}
}

// A timerEntry is the entry of a queue pair, under the lock of the timers.
type timerEntry struct {
	timerheap.Slot
	at time.Time
	q  *qp
}

// Before is for the heap.
func (e *timerEntry) Before(o *timerEntry) bool { return e.at.Before(o.at) }

// arm makes sure that q is woken at its deadline. The caller holds q.mu.
func (t *timers) arm(q *qp) {
	d := q.eng.Deadline()
	if d.IsZero() || (!q.timerAt.IsZero() && !d.Before(q.timerAt)) {
		return
	}
	t.add(q, d)
}

// add sets the entry of q to d; there was none, or a later one. The caller holds q.mu.
func (t *timers) add(q *qp, d time.Time) {
	q.timerAt = d
	t.mu.Lock()
	q.timer.at, q.timer.q = d, q
	t.heap.Set(&q.timer)
	first := t.heap.First() == &q.timer
	if first && t.kept {
		first, t.missed = false, true
	}
	t.mu.Unlock()
	if first {
		t.wake.ring()
	}
}

// keep promises that the caller will call rest before it sleeps, and service from time to
// time. Until rest, nobody needs to wake run for a new first entry. One receiver of a
// thread calls keep.
func (t *timers) keep() {
	t.mu.Lock()
	t.kept = true
	t.mu.Unlock()
}

// rest ends keep, and returns how long the caller may sleep; zero sets no limit. wakes says
// whether the caller will wake by then and call service. If it will not, rest wakes run, if
// run does not know the first entry yet.
func (t *timers) rest(wakes bool) (limit time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.kept = false
	if !wakes {
		if t.missed {
			t.missed = false
			t.wake.ring()
		}
		return 0
	}
	first := t.heap.First()
	if !t.missed || first == nil {
		return 0 // run knows
	}
	return max(time.Until(first.at), time.Microsecond)
}

// service wakes queue pairs whose time has come, and returns how long it is until the next
// entry is due, an hour if there is none.
func (t *timers) service(now time.Time) (wait time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for e := t.heap.First(); e != nil; e = t.heap.First() {
		at, q := e.at, e.q
		if wait := at.Sub(now); wait > 0 {
			return wait
		}
		t.heap.Stop(e)
		t.mu.Unlock()
		q.expire(at, now)
		t.mu.Lock()
	}
	return time.Hour
}

// run wakes queue pairs until stop is closed.
func (t *timers) run() {
	clock := time.NewTimer(time.Hour)
	defer clock.Stop()
	for {
		wait := t.service(time.Now())
		clock.Reset(wait)
		select {
		case <-clock.C:
		case <-t.wake:
		case <-t.stop:
			return
		}
	}
}
