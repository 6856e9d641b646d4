// Package timerheap has a heap of values in the order in which they are due. Each value has its place in
// the heap stored, so that it is moved and removed without a search.
//
// It has no clock: the owner of a heap says what time it is.
package timerheap

import "container/heap"

// A Slot is embedded in each value of a Heap. A value is in one heap at a time.
type Slot struct{ pos int } // place in the heap plus one; 0: in no heap

func (s *Slot) slot() *Slot { return s }

// Armed reports whether the value is in a heap.
func (s *Slot) Armed() bool { return s.pos != 0 }

// A value is a pointer to a type with an embedded Slot.
type value[T any] interface {
	*T
	slot() *Slot
	// Before reports whether the value is due before o. It should also decide between values that are due
	// at the same time: else their order in the heap is not fixed.
	Before(o *T) bool
}

// A Heap holds values and returns the one that is due first. The zero value is empty.
type Heap[T any, P value[T]] struct{ h ordered[T, P] }

// Len returns the number of values.
func (h *Heap[T, P]) Len() int { return len(h.h) }

// First returns the value that is due first, nil if there is none.
func (h *Heap[T, P]) First() *T {
	if len(h.h) == 0 {
		return nil
	}
	return h.h[0]
}

// All returns the values in no order. No value may be put in or taken out while the slice is used.
func (h *Heap[T, P]) All() []*T { return h.h }

// Set puts v in its place after its time has changed, or adds v if it is new.
func (h *Heap[T, P]) Set(v *T) {
	if s := P(v).slot(); s.Armed() {
		heap.Fix(&h.h, s.pos-1)
	} else {
		heap.Push(&h.h, v)
	}
}

// Stop takes v out of the heap, if it is in.
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

// Pop takes the last value off.
func (o *ordered[T, P]) Pop() any {
	last := len(*o) - 1
	v := (*o)[last]
	(*o)[last] = nil
	*o = (*o)[:last]
	P(v).slot().pos = 0
	return v
}
