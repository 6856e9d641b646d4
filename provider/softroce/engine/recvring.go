package engine

import "ipoibcm/verbs"

// ringStart is how many work requests a ring holds before it grows, so that an
// idle queue pair costs little.
const ringStart = 4

// A RecvRing is a bounded queue of receive work requests. It has no lock. Its memory grows
// with use.
type RecvRing struct {
	depth, maxSGE int
	slots         []recvSlot
	sg            [][]byte // maxSGE per slot
	head, tail    uint32   // count up for ever; the slot is the low bits
}

type recvSlot struct {
	id  uint64
	nsg int
}

// NewRecvRing returns a queue of depth work requests with at most maxSGE
// entries each.
func NewRecvRing(depth, maxSGE int) *RecvRing {
	return &RecvRing{depth: max(1, depth), maxSGE: min(max(1, maxSGE), MaxSGE)}
}

// Len returns how many work requests are posted.
func (r *RecvRing) Len() int { return int(r.tail - r.head) }

// Post appends wr. The error is verbs.ErrQueueFull, or verbs.ErrInvalid for a
// list that is too long.
func (r *RecvRing) Post(wr *verbs.RecvWR) error {
	switch {
	case len(wr.SG) > r.maxSGE:
		return verbs.ErrInvalid
	case r.Len() >= r.depth:
		return verbs.ErrQueueFull
	}
	sg := r.add(wr.ID, len(wr.SG))
	for k := range wr.SG {
		sg[k] = wr.SG[k].Buf
	}
	return nil
}

// Return implements [RecvQueue]. It always has room.
func (r *RecvRing) Return(w *RecvWQE) { copy(r.add(w.ID, len(w.SG)), w.SG) }

// add appends a work request, and returns where its n buffers go.
func (r *RecvRing) add(id uint64, n int) [][]byte {
	if r.Len() == len(r.slots) {
		r.grow()
	}
	i := int(r.tail) & (len(r.slots) - 1)
	r.slots[i] = recvSlot{id: id, nsg: n}
	r.tail++
	return r.sg[i*r.maxSGE : i*r.maxSGE+n]
}

func (r *RecvRing) grow() {
	n := max(ringStart, 2*len(r.slots)) // a power of two
	slots, sg := make([]recvSlot, n), make([][]byte, n*r.maxSGE)
	for j := r.head; j != r.tail; j++ {
		from, to := int(j)&(len(r.slots)-1), int(j)&(n-1)
		slots[to] = r.slots[from]
		copy(sg[to*r.maxSGE:(to+1)*r.maxSGE], r.sg[from*r.maxSGE:])
	}
	r.slots, r.sg = slots, sg
}

// Pop implements [RecvQueue]: first in, first out, as a receive queue is.
func (r *RecvRing) Pop(w *RecvWQE) bool {
	if r.head == r.tail {
		return false
	}
	r.read(r.head, w)
	r.head++
	return true
}

// PopLast is Pop, but takes what was posted last: nobody can tell the buffers of
// a shared receive queue apart, and this one may still be in the cache.
func (r *RecvRing) PopLast(w *RecvWQE) bool {
	if r.head == r.tail {
		return false
	}
	r.tail--
	r.read(r.tail, w)
	return true
}

// read moves the work request at position at into w.
func (r *RecvRing) read(at uint32, w *RecvWQE) {
	i := int(at) & (len(r.slots) - 1)
	s := r.slots[i]
	w.ID = s.id
	w.SG = append(w.SG[:0], r.sg[i*r.maxSGE:i*r.maxSGE+s.nsg]...)
	clear(r.sg[i*r.maxSGE : i*r.maxSGE+s.nsg])
}
