package neigh

import "container/heap"

// A timer belongs to one entry or one own address, which has only this one.
type timer struct {
	at    instant
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

func (ts *timers) set(tm *timer, at instant) {
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
func (ts *timers) due(now instant) *timer {
	if len(ts.h) == 0 || now < ts.h[0].at {
		return nil
	}
	return ts.h[0]
}

// first returns when the first timer is due; never if none is set.
func (ts *timers) first() instant {
	if len(ts.h) == 0 {
		return 0
	}
	return ts.h[0].at
}

type timerHeap []*timer

func (h timerHeap) Len() int { return len(h) }

func (h timerHeap) Less(i, j int) bool {
	if h[i].at != h[j].at {
		return h[i].at < h[j].at
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
