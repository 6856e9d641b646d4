package neigh

import "ipoibcm/timerheap"

// A timer belongs to one entry or one own address. Each of those has one timer.
type timer struct {
	at    instant
	seq   uint64 // ties fire in the order they were set
	entry *entry
	own   *ownAddr
	timerheap.Slot
}

// Before orders timers by when they fire, then by when they were set.
func (tm *timer) Before(o *timer) bool {
	if tm.at != o.at {
		return tm.at < o.at
	}
	return tm.seq < o.seq
}

// timers are all timers that are set.
type timers struct {
	timerheap.Heap[timer, *timer]
	seq uint64
}

func (ts *timers) set(tm *timer, at instant) {
	ts.seq++
	tm.at, tm.seq = at, ts.seq
	ts.Set(tm)
}

// first returns when the first timer is due; never if none is set.
func (ts *timers) first() instant {
	if tm := ts.First(); tm != nil {
		return tm.at
	}
	return 0
}
