package softroce

import (
	"container/heap"
	"sync"
	"time"
)

// A timers is the one clock of all queue pairs. A queue pair has at most one
// entry, which may be earlier than its deadline: on the hot path a deadline that
// moves away costs nothing, and the entry is put back when it comes up.
type timers struct {
	mu   sync.Mutex
	heap timerHeap
	wake chan struct{} // holds at most one: the first entry changed
	stop chan struct{}
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
	q.timerAt = d
	t.mu.Lock()
	heap.Push(&t.heap, timerEntry{d, q}) // a later entry of q is ignored when it comes up
	first := t.heap[0].q == q
	t.mu.Unlock()
	if first {
		select {
		case t.wake <- struct{}{}:
		default:
		}
	}
}

// run wakes queue pairs until stop is closed.
func (t *timers) run() {
	clock := time.NewTimer(time.Hour)
	defer clock.Stop()
	for {
		now := time.Now()
		wait := time.Hour
		t.mu.Lock()
		for len(t.heap) > 0 {
			e := t.heap[0]
			if wait = e.at.Sub(now); wait > 0 {
				break
			}
			heap.Pop(&t.heap)
			t.mu.Unlock()
			e.q.expire(e.at, now)
			t.mu.Lock()
			wait = time.Hour
		}
		t.mu.Unlock()
		clock.Reset(wait)
		select {
		case <-clock.C:
		case <-t.wake:
		case <-t.stop:
			return
		}
	}
}
