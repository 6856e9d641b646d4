package neigh

import (
	"container/heap"
	"time"
)

// A timer belongs to one entry or one own address, which has only this one.
type timer struct {
	at    time.Time
	seq   uint64 // ties fire in the order they were set
	pos   int    // in the heap, plus 1; 0 means not set
	entry *entry
	own   *ownAddr
}

// timers is a heap of all timers that are set.
type timers struct {
	h   timerHeap
	seq uint64
}

func (ts *timers) set(tm *timer, at time.Time) {
	ts.seq++
	tm.at, tm.seq = at, ts.seq
	if tm.pos == 0 {
		heap.Push(&ts.h, tm)
	} else {
		heap.Fix(&ts.h, tm.pos-1)
	}
}

func (ts *timers) stop(tm *timer) {
	if tm.pos != 0 {
		heap.Remove(&ts.h, tm.pos-1)
	}
}

// due returns the first timer if its time has come.
func (ts *timers) due(now time.Time) *timer {
	if len(ts.h) == 0 || now.Before(ts.h[0].at) {
		return nil
	}
	return ts.h[0]
}

func (ts *timers) first() time.Time {
	if len(ts.h) == 0 {
		return time.Time{}
	}
	return ts.h[0].at
}

type timerHeap []*timer

func (h timerHeap) Len() int { return len(h) }

func (h timerHeap) Less(i, j int) bool {
	if c := h[i].at.Compare(h[j].at); c != 0 {
		return c < 0
	}
	return h[i].seq < h[j].seq
}

func (h timerHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].pos, h[j].pos = i+1, j+1
}

func (h *timerHeap) Push(x any) {
	tm := x.(*timer)
	*h = append(*h, tm)
	tm.pos = len(*h)
}

func (h *timerHeap) Pop() any {
	old := *h
	tm := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	tm.pos = 0
	return tm
}
