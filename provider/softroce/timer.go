package softroce

import (
	"container/heap"
	"sync"
	"time"
)

// A timers wakes the queue pairs of one data thread at their deadlines. The entry of a
// queue pair may be earlier than its deadline: on the hot path a deadline that becomes later
// leaves the entry alone. Once the entry is due, another for the deadline replaces it.
type timers struct {
	mu     sync.Mutex
	heap   timerHeap
	kept   bool          // a receiver will look at the heap before it sleeps
	missed bool          // the first entry changed, and run was not woken
	wake   chan struct{} // holds at most one: the first entry changed
	stop   chan struct{}
}

type timerEntry struct {
	at time.Time
	q  *qp
}

type timerHeap []timerEntry

func (h timerHeap) Len() int           { return len(h) }
func (h timerHeap) Less(i, j int) bool { return h[i].at.Before(h[j].at) }
func (h timerHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *timerHeap) Push(x any)        { *h = append(*h, x.(timerEntry)) }
func (h *timerHeap) Pop() any {
	last := len(*h) - 1
	e := (*h)[last]
	(*h)[last] = timerEntry{}
	*h = (*h)[:last]
	return e
}

// arm makes sure that q is woken at its deadline. The caller holds q.mu.
func (t *timers) arm(q *qp) {
	d := q.eng.Deadline()
	if d.IsZero() || (!q.timerAt.IsZero() && !d.Before(q.timerAt)) {
		return
	}
	t.add(q, d)
}

// add makes an entry for q, which has no earlier one. The caller holds q.mu.
func (t *timers) add(q *qp, d time.Time) {
	q.timerAt = d
	t.mu.Lock()
	heap.Push(&t.heap, timerEntry{d, q}) // a former, later entry of q is ignored when it is due
	first := t.heap[0].q == q
	if first && t.kept {
		first, t.missed = false, true
	}
	t.mu.Unlock()
	if first {
		t.wakeUp()
	}
}

// wakeUp makes run look at the heap again.
func (t *timers) wakeUp() {
	select {
	case t.wake <- struct{}{}:
	default:
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
			t.wakeUp()
		}
		return 0
	}
	if !t.missed || len(t.heap) == 0 {
		return 0 // run knows
	}
	return max(time.Until(t.heap[0].at), time.Microsecond)
}

// service wakes queue pairs whose time has come, and returns how long it is until the next
// entry is due, an hour if there is none.
func (t *timers) service(now time.Time) (wait time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for len(t.heap) > 0 {
		e := t.heap[0]
		if wait := e.at.Sub(now); wait > 0 {
			return wait
		}
		heap.Pop(&t.heap)
		t.mu.Unlock()
		e.q.expire(e.at, now)
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
