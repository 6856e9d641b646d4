//go:build ibverbs && cgo

package ibverbs

// #include "shim.h"
import "C"

import (
	"fmt"
	"sync"
	"syscall"

	"ipoibcm/verbs"
)

// An srq is a shared receive queue.
type srq struct {
	dev    *Device
	number uint32
	maxSGE int

	mu    sync.Mutex
	h     *C.struct_ibv_srq // nil after destroy
	slots slots
	post  recvBatch
}

var _ verbs.SRQ = (*srq)(nil)

// CreateSRQ implements [verbs.Provider].
func (d *Device) CreateSRQ(init verbs.SRQInit) (verbs.SRQ, error) {
	if !d.caps.SRQ {
		return nil, verbs.ErrNotSupported
	}
	if init.Depth <= 0 || init.Depth > d.caps.MaxQPDepth || init.MaxSGE > d.caps.MaxSGE {
		return nil, verbs.ErrInvalid
	}
	if err := d.use(); err != nil {
		return nil, err
	}
	defer d.life.RUnlock()
	s := &srq{dev: d, number: d.gen.Add(1) & 0x3fffffff, maxSGE: max(1, init.MaxSGE)}
	depth := C.uint32_t(init.Depth)
	h, err := C.shim_create_srq(d.pd, &depth, C.uint32_t(s.maxSGE))
	if h == nil {
		return nil, wrapErrno("shared receive queue", err)
	}
	s.h, s.slots, s.post = h, newSlots(init.Depth, s.maxSGE), newRecvBatch(s.maxSGE)
	remember(d, d.srqs, s.number, s)
	return s, nil
}

// PostRecv implements [verbs.SRQ].
func (s *srq) PostRecv(wrs []verbs.RecvWR) (taken int, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.h == nil {
		return 0, verbs.ErrClosed
	}
	return inBatches(wrs, s.slots.room, s.recvSome)
}

// recvSome posts wrs up to the first that is invalid, and returns the error of that one.
func (s *srq) recvSome(wrs []verbs.RecvWR) (taken int, err error) {
	s.post.reset()
	var places [batchLen]uint32
	n, bad := 0, error(nil)
	for ; n < len(wrs); n++ {
		wr := &wrs[n]
		if bad = s.post.check(wr); bad != nil {
			break
		}
		places[n] = s.slots.push(wr.ID, wr.SG)
		s.post.add(makeID(idShared, s.number, places[n]), wr.SG)
	}
	if n > 0 {
		taken, err = s.post.run(nil, s.h)
		for i := n - 1; i >= taken; i-- {
			s.slots.take(places[i])
		}
	}
	if err == nil {
		err = bad
	}
	return taken, err
}

// Destroy implements [verbs.SRQ].
func (s *srq) Destroy() error {
	s.dev.mu.Lock()
	if q := s.dev.userOf(func(q *qp) bool { return q.srq == s }); q != nil {
		s.dev.mu.Unlock()
		return fmt.Errorf("%w: QP %v uses the shared receive queue", verbs.ErrInvalid, q.qpn)
	}
	delete(s.dev.srqs, s.number)
	s.dev.mu.Unlock()
	return s.destroy()
}

func (s *srq) destroy() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.h == nil {
		return verbs.ErrClosed
	}
	rc := C.ibv_destroy_srq(s.h)
	s.h = nil
	return errno("destroy shared receive queue", rc)
}

// A recvBatch gathers receive work requests for one C call.
type recvBatch struct {
	maxSGE int
	wrs    []C.struct_shim_recv
	sges   []C.struct_ibv_sge
}

func newRecvBatch(maxSGE int) recvBatch {
	return recvBatch{maxSGE: maxSGE, wrs: make([]C.struct_shim_recv, 0, batchLen),
		sges: make([]C.struct_ibv_sge, 0, batchLen*maxSGE+1)}
}

func (b *recvBatch) reset() { b.wrs, b.sges = b.wrs[:0], b.sges[:0] }

func (b *recvBatch) check(wr *verbs.RecvWR) error {
	if len(wr.SG) > b.maxSGE {
		return fmt.Errorf("%w: %d scatter entries, %d at most", verbs.ErrInvalid, len(wr.SG), b.maxSGE)
	}
	return checkSG(wr.SG)
}

func (b *recvBatch) add(id uint64, sg []verbs.SGE) {
	var n C.uint32_t
	b.sges, n = appendSG(b.sges, sg)
	b.wrs = append(b.wrs, C.struct_shim_recv{id: C.uint64_t(id), nsge: n})
}

// run posts the requests that were added and returns how many of them were taken.
func (b *recvBatch) run(qp *C.struct_ibv_qp, srq *C.struct_ibv_srq) (int, error) {
	r := C.shim_post_recv(qp, srq, &b.wrs[0], C.int(len(b.wrs)), &b.sges[:1][0])
	return posted(r)
}

// posted splits the result of a C posting function into the number taken and the error.
func posted(r C.int64_t) (int, error) {
	n, e := int(uint32(r)), syscall.Errno(r>>32)
	switch e {
	case 0:
		return n, nil
	case syscall.ENOMEM, syscall.ENOSPC, syscall.EAGAIN:
		return n, verbs.ErrQueueFull
	case syscall.EINVAL:
		return n, verbs.ErrInvalid
	}
	return n, fmt.Errorf("post work requests: %w", e)
}
