// Package timerheap has a heap of values by when each is due. The place in it is in the
// values, so that a value is moved and taken out without looking for it.
//
// It has no clock: who keeps a heap says what time it is.
package timerheap

import "container/heap"

// A Slot is embedded in what stands in a Heap: in one at a time.
type Slot struct{ pos int } // plus one; 0: in none

func (s *Slot) slot() *Slot { return s }

// Armed reports whether the value stands in a heap.
func (s *Slot) Armed() bool { return s.pos != 0 }

// A value is a pointer to what a Slot is embedded in.
type value[T any] interface {
	*T
	slot() *Slot
	// Before reports whether the value is due before o. Between values that are due at
	// the same time it must decide, too: else their order is none.
	Before(o *T) bool
}

// A Heap is values of which the one that is due first is at hand. The zero value is
// empty.
type Heap[T any, P value[T]] struct{ h ordered[T, P] }

// Len returns how many there are.
func (h *Heap[T, P]) Len() int { return len(h.h) }

// First returns the value that is due first, nil if there is none.
func (h *Heap[T, P]) First() *T {
	if len(h.h) == 0 {
		return nil
	}
	return h.h[0]
}

// All returns the values in no order. They must not be changed in number while it is used.
func (h *Heap[T, P]) All() []*T { return h.h }

// Set puts v where its time says: it is new, or its time has changed.
func (h *Heap[T, P]) Set(v *T) {
	if s := P(v).slot(); s.Armed() {
		heap.Fix(&h.h, s.pos-1)
	} else {
		heap.Push(&h.h, v)
	}
}

// Stop takes v out, if it is in.
func (h *Heap[T, P]) Stop(v *T) {
	if s := P(v).slot(); s.Armed() {
		heap.Remove(&h.h, s.pos-1)
	}
}

// ordered serves container/heap.
type ordered[T any, P value[T]] []*T

func (o ordered[T, P]) Len() int           { return len(o) }
func (o ordered[T, P]) Less(i, j int) bool { return P(o[i]).Before(o[j]) }

func (o ordered[T, P]) Swap(i, j int) {
	o[i], o[j] = o[j], o[i]
	P(o[i]).slot().pos, P(o[j]).slot().pos = i+1, j+1
}

// Push appends x, a *T.
func (o *ordered[T, P]) Push(x any) {
	v := x.(*T)
	*o = append(*o, v)
	P(v).slot().pos = len(*o)
}

// Pop takes the last one off.
func (o *ordered[T, P]) Pop() any {
	last := len(*o) - 1
	v := (*o)[last]
	(*o)[last] = nil
	*o = (*o)[:last]
	P(v).slot().pos = 0
	return v
}
