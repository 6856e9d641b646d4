package datapath

import (
	"fmt"
	"sync"
	"sync/atomic"

	"ipoibcm/verbs"
	"ipoibcm/wire/encap"
)

// Layout of a send buffer in octets: the packet starts on a cache line, and the
// header stands directly in front of it.
const (
	headRoom    = 64
	maxPacket   = 65536
	slotStride  = headRoom + maxPacket
	smallPacket = 2048 + 64 // holds a packet of the default UD MTU, and most of an Ethernet's
	smallStride = headRoom + smallPacket
	// smallSlots is how many small buffers there are for each large one.
	smallSlots = 8
)

// A sendPool holds the send buffers for all QPs of a thread. A slot is free, in the hands of one
// goroutine, waiting for a sendQ, or posted on one. A packet from the TUN may be long, so it is
// read into a large slot. If it has to wait and is short, it moves to a small slot, of which there
// are many.
type sendPool struct {
	region *verbs.Region
	large  int32    // number of large slots, which come first
	posted []posted // by slot
	// flows has, by set of flows, how many requests are posted and not completed of flows whose packets had waited.
	flows [1 + flowSets]atomic.Int32

	mu    sync.Mutex
	free  []int32 // large slots; last in, first out: the slot used last is in the processor's cache
	small []int32
}

// A posted is the message posted in a slot.
type posted struct {
	octets int32
	set    uint16 // sendItem.set
}

func newSendPool(p verbs.Provider, n int) (*sendPool, error) {
	small := n * smallSlots
	r, err := p.Alloc(n*slotStride + small*smallStride)
	if err != nil {
		return nil, fmt.Errorf("allocate %d send buffers: %w", n, err)
	}
	sp := &sendPool{region: r, large: int32(n), posted: make([]posted, n+small), free: make([]int32, n),
		small: make([]int32, small)}
	for i := range sp.free {
		sp.free[i] = int32(n - 1 - i)
	}
	for i := range sp.small {
		sp.small[i] = int32(n + small - 1 - i)
	}
	return sp, nil
}

// slots returns how many slots there are.
func (p *sendPool) slots() int { return len(p.posted) }

// take appends up to n free large slots to dst.
func (p *sendPool) take(dst []int32, n int) []int32 {
	p.mu.Lock()
	n = min(n, len(p.free))
	dst = append(dst, p.free[len(p.free)-n:]...)
	p.free = p.free[:len(p.free)-n]
	p.mu.Unlock()
	return dst
}

// shrink moves the packet of n octets in a large slot to a small one, if it fits and one is free.
// It returns the slot of the packet.
func (p *sendPool) shrink(slot int32, n int) int32 {
	to, ok := p.copySmall(slot, n)
	if !ok {
		return slot
	}
	p.giveOne(slot)
	return to
}

// copySmall copies the packet of n octets in a large slot to a small one; ok says whether it
// could.
func (p *sendPool) copySmall(slot int32, n int) (to int32, ok bool) {
	if slot >= p.large {
		return 0, false
	}
	if to, ok = p.takeSmall(n); ok {
		copy(p.message(to, n), p.message(slot, n))
	}
	return to, ok
}

// takeSmall takes a free small slot, if a packet of n octets fits and one is free.
func (p *sendPool) takeSmall(n int) (slot int32, ok bool) {
	if n > smallPacket {
		return 0, false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	last := len(p.small) - 1
	if last < 0 {
		return 0, false
	}
	slot = p.small[last]
	p.small = p.small[:last]
	return slot, true
}

func (p *sendPool) give(slots []int32) {
	if len(slots) == 0 {
		return
	}
	p.mu.Lock()
	for _, slot := range slots {
		p.put(slot)
	}
	p.mu.Unlock()
}

func (p *sendPool) giveOne(slot int32) {
	p.mu.Lock()
	p.put(slot)
	p.mu.Unlock()
}

func (p *sendPool) put(slot int32) {
	if slot < p.large {
		p.free = append(p.free, slot)
	} else {
		p.small = append(p.small, slot)
	}
}

// available returns how many large slots are free.
func (p *sendPool) available() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.free)
}

// freeSlots returns how many slots of both kinds are free.
func (p *sendPool) freeSlots() (large, small int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.free), len(p.small)
}

// start returns where in the region the packet of slot begins, and how long it may be, in octets.
func (p *sendPool) start(slot int32) (o, size int) {
	if slot < p.large {
		return int(slot)*slotStride + headRoom, maxPacket
	}
	return int(p.large)*slotStride + int(slot-p.large)*smallStride + headRoom, smallPacket
}

// packet returns the buffer for the packet of slot.
func (p *sendPool) packet(slot int32) []byte {
	o, size := p.start(slot)
	return p.region.Buf[o : o+size : o+size]
}

// message returns the message in slot: the header and the packet of n octets behind it.
func (p *sendPool) message(slot int32, n int) []byte {
	o, _ := p.start(slot)
	return p.region.Buf[o-encap.HeaderLen : o+n : o+n]
}

// A recvPool is a block of receive buffers of one size, and the work requests that post them, which
// are made only once.
type recvPool struct {
	region *verbs.Region
	stride int
	wrs    []verbs.RecvWR
}

// newRecvPool makes n buffers of at least size octets. Slot i has the work
// request ID base|i.
func newRecvPool(p verbs.Provider, n, size int, base uint64) (*recvPool, error) {
	rp := &recvPool{stride: (size + 63) &^ 63, wrs: make([]verbs.RecvWR, n)}
	r, err := p.Alloc(n * rp.stride)
	if err != nil {
		return nil, fmt.Errorf("allocate %d receive buffers of %d octets: %w", n, rp.stride, err)
	}
	rp.region = r
	sges := make([]verbs.SGE, n)
	for i := range rp.wrs {
		sges[i] = verbs.SGE{Region: r, Buf: r.Buf[i*rp.stride : (i+1)*rp.stride : (i+1)*rp.stride]}
		rp.wrs[i] = verbs.RecvWR{ID: base | uint64(i), SG: sges[i : i+1 : i+1]}
	}
	return rp, nil
}

// buf returns the first n octets of slot, fewer if it is smaller.
func (p *recvPool) buf(slot uint32, n int) []byte {
	b := p.wrs[slot].SG[0].Buf
	return b[:min(max(n, 0), len(b))]
}

// A poster is a receive queue: a QP or an SRQ.
type poster interface {
	PostRecv(wrs []verbs.RecvWR) (int, error)
}

// A reposter gives receive buffers back to their queue in batches. It is used
// by one goroutine at a time.
type reposter struct {
	to  poster
	wrs []verbs.RecvWR // waiting to be posted, at most as many as the queue is deep
}

// flush posts what waits, and keeps what the queue does not take.
func (r *reposter) flush() error {
	if len(r.wrs) == 0 {
		return nil
	}
	n, err := r.to.PostRecv(r.wrs)
	r.wrs = append(r.wrs[:0], r.wrs[n:]...)
	return err
}
