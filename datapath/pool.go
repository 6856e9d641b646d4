package datapath

import (
	"fmt"
	"sync"

	"ipoibcm/verbs"
	"ipoibcm/wire/encap"
)

// Layout of a send buffer in octets: the packet starts on a cache line, and the
// header stands directly in front of it.
const (
	headRoom   = 64
	maxPacket  = 65536
	slotStride = headRoom + maxPacket
)

// A sendPool holds the send buffers of all QPs. A slot is free, in the hands of
// one goroutine, or posted on one sendQ.
type sendPool struct {
	region *verbs.Region

	mu   sync.Mutex
	free []int32 // last in, first out: what was used last is in the cache
}

func newSendPool(p verbs.Provider, n int) (*sendPool, error) {
	r, err := p.Alloc(n * slotStride)
	if err != nil {
		return nil, fmt.Errorf("allocate %d send buffers: %w", n, err)
	}
	sp := &sendPool{region: r, free: make([]int32, n)}
	for i := range sp.free {
		sp.free[i] = int32(n - 1 - i)
	}
	return sp, nil
}

// take appends up to n free slots to dst.
func (p *sendPool) take(dst []int32, n int) []int32 {
	p.mu.Lock()
	n = min(n, len(p.free))
	dst = append(dst, p.free[len(p.free)-n:]...)
	p.free = p.free[:len(p.free)-n]
	p.mu.Unlock()
	return dst
}

func (p *sendPool) give(slots []int32) {
	if len(slots) == 0 {
		return
	}
	p.mu.Lock()
	p.free = append(p.free, slots...)
	p.mu.Unlock()
}

func (p *sendPool) giveOne(slot int32) {
	p.mu.Lock()
	p.free = append(p.free, slot)
	p.mu.Unlock()
}

func (p *sendPool) available() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.free)
}

// packet is where the packet of slot goes.
func (p *sendPool) packet(slot int32) []byte {
	o := int(slot)*slotStride + headRoom
	return p.region.Buf[o : o+maxPacket : o+maxPacket]
}

// message is the packet of n octets in slot with the header in front.
func (p *sendPool) message(slot int32, n int) []byte {
	o := int(slot)*slotStride + headRoom
	return p.region.Buf[o-encap.HeaderLen : o+n : o+n]
}

// A recvPool is a block of receive buffers of one size, with the work requests
// that post them made once.
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
	wrs []verbs.RecvWR // waiting, at most as many as the queue is deep
}

// flush posts what waits, and keeps what the queue would not take.
func (r *reposter) flush() error {
	if len(r.wrs) == 0 {
		return nil
	}
	n, err := r.to.PostRecv(r.wrs)
	r.wrs = append(r.wrs[:0], r.wrs[n:]...)
	return err
}
