//go:build ibverbs && cgo

package ibverbs

// #include "shim.h"
import "C"

import (
	"fmt"
	"os"
	"sync"
	"syscall"

	"ipoibcm/ib"
	"ipoibcm/verbs"
)

// batchLen is how many work requests or completions one C call takes.
const batchLen = C.SHIM_BATCH

// A cq is a completion queue with a completion channel of its own.
type cq struct {
	dev  *Device
	ch   *C.struct_ibv_comp_channel
	file *os.File // a copy of the channel's descriptor, for Go's poller
	gone chan struct{}
	once sync.Once

	mu    sync.Mutex
	h     *C.struct_ibv_cq // nil after free
	raw   []C.struct_shim_wc
	stash []verbs.WC // taken from the device by Wait, for the next Poll
}

var _ verbs.CQ = (*cq)(nil)

// CreateCQ implements [verbs.Provider].
func (d *Device) CreateCQ(depth int) (verbs.CQ, error) {
	if err := d.use(); err != nil {
		return nil, err
	}
	defer d.life.RUnlock()
	c := &cq{dev: d, gone: make(chan struct{}), raw: make([]C.struct_shim_wc, batchLen),
		stash: make([]verbs.WC, 0, batchLen)}
	var err error
	if c.ch, err = C.ibv_create_comp_channel(d.ctx); c.ch == nil {
		return nil, wrapErrno("completion channel", err)
	}
	if c.file, err = pollable(int(c.ch.fd), "completion channel"); err != nil {
		C.ibv_destroy_comp_channel(c.ch)
		return nil, err
	}
	if c.h, err = C.ibv_create_cq(d.ctx, C.int(min(max(1, depth), 4*maxDepth)), nil, c.ch, 0); c.h == nil {
		c.file.Close()
		C.ibv_destroy_comp_channel(c.ch)
		return nil, wrapErrno("completion queue", err)
	}
	remember(d, d.cqs, c, struct{}{})
	return c, nil
}

// Poll implements [verbs.CQ].
func (c *cq) Poll(wcs []verbs.WC) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := copy(wcs, c.stash)
	c.stash = c.stash[:copy(c.stash, c.stash[n:])]
	return n + c.poll(wcs[n:])
}

// poll takes completions from the device; c.mu is held.
func (c *cq) poll(wcs []verbs.WC) (n int) {
	for n < len(wcs) && c.h != nil {
		ask := min(len(wcs)-n, batchLen)
		k := int(C.shim_poll(c.h, C.int(ask), &c.raw[0]))
		for i := range max(0, k) {
			if c.dev.complete(&c.raw[i], &wcs[n]) {
				n++
			}
		}
		if k < ask {
			break
		}
	}
	return n
}

// fill takes completions from the device into the stash, for Poll. It reports whether the stash has
// any.
func (c *cq) fill() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.stash) == 0 {
		c.stash = c.stash[:c.poll(c.stash[:cap(c.stash)])]
	}
	return len(c.stash) > 0
}

// arm asks for an event at the next completion. It reports whether that succeeded.
func (c *cq) arm() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.h != nil && C.shim_arm(c.h) == 0
}

// is reports whether h is the libibverbs handle of the queue.
func (c *cq) is(h *C.struct_ibv_cq) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.h == h
}

// Wait implements [verbs.CQ]. The second fill finds what completed before arm; later completions
// cause an event.
func (c *cq) Wait() error {
	for {
		if c.fill() {
			return nil
		}
		if !c.arm() || c.fill() {
			if c.ended() {
				return verbs.ErrClosed
			}
			if c.fill() {
				return nil
			}
		}
		if !c.block() {
			// The device is gone and nothing will complete, but Wait ends only when the queue does.
			<-c.gone
			return verbs.ErrClosed
		}
	}
}

func (c *cq) ended() bool {
	select {
	case <-c.gone:
		return true
	default:
		return false
	}
}

// block waits for an event in Go's poller. It reports false when the channel is
// closed or broken.
func (c *cq) block() bool {
	conn, err := c.file.SyscallConn()
	if err != nil {
		return false
	}
	var rc C.int
	err = conn.Read(func(uintptr) bool {
		rc = C.shim_cq_event(c.ch)
		return rc != C.int(syscall.EAGAIN)
	})
	return err == nil && rc == 0
}

// Destroy implements [verbs.CQ].
func (c *cq) Destroy() error {
	c.dev.mu.Lock()
	if _, ok := c.dev.cqs[c]; !ok {
		c.dev.mu.Unlock()
		return verbs.ErrClosed
	}
	if q := c.dev.userOf(func(q *qp) bool { return q.sendCQ == c || q.recvCQ == c }); q != nil {
		c.dev.mu.Unlock()
		return fmt.Errorf("%w: QP %v uses the completion queue", verbs.ErrInvalid, q.qpn)
	}
	delete(c.dev.cqs, c)
	c.dev.mu.Unlock()
	c.end()
	return nil
}

// end frees the queue and ends Wait.
func (c *cq) end() {
	c.once.Do(func() { close(c.gone) })
	c.free()
}

// free gives the queue back to the device. Once file is closed, Wait is not in a C call.
func (c *cq) free() {
	c.file.Close()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.h == nil {
		return
	}
	c.stash = c.stash[:0]
	C.ibv_destroy_cq(c.h)
	C.ibv_destroy_comp_channel(c.ch)
	c.h, c.ch = nil, nil
}

// complete fills wc from a completion of the device. It returns false if the work request is not
// known any more.
func (d *Device) complete(raw *C.struct_shim_wc, wc *verbs.WC) bool {
	kind, owner, place := splitID(uint64(raw.id))
	qpn := ib.QPN(raw.qpn)
	d.mu.RLock()
	q := d.qps[qpn]
	var s *srq
	if kind == idShared {
		s = d.srqs[owner]
	}
	d.mu.RUnlock()
	if kind != idShared && (q == nil || q.gen != owner) {
		d.count.stale.Add(1) // the QP has been destroyed
		return false
	}
	var e entry
	var ok bool
	switch kind {
	case idSend:
		q.sendMu.Lock()
		e, ok = q.send.take(place)
		q.sendMu.Unlock()
	case idRecv:
		q.recvMu.Lock()
		e, ok = q.recv.take(place)
		q.recvMu.Unlock()
	case idShared:
		// The receive is reported even if its QP is gone, or its buffer would be lost.
		if s != nil {
			s.mu.Lock()
			e, ok = s.slots.take(place)
			s.mu.Unlock()
		}
	}
	if !ok {
		d.count.stale.Add(1)
		return false
	}
	*wc = verbs.WC{ID: e.id, QPN: qpn, Opcode: e.op}
	if kind == idSend {
		wc.Status = sendStatus(uint32(raw.status))
		if e.op == verbs.Read {
			wc.ByteLen = e.len
		}
	} else {
		wc.Status = recvStatus(uint32(raw.status))
	}
	if wc.Status != verbs.Success {
		wc.ByteLen = 0
		if q != nil {
			q.failed(kind == idSend, wc.Status)
		}
		return true
	}
	if kind != idSend {
		d.received(q, raw, wc, e.sg)
	}
	return true
}

// received fills in wc for a receive that succeeded.
func (d *Device) received(q *qp, raw *C.struct_shim_wc, wc *verbs.WC, sg []verbs.SGE) {
	ud := q != nil && q.transport == ib.UD
	wc.Opcode, wc.ByteLen = recvOpcode(uint32(raw.opcode)), int(raw.len)
	wc.Flags = recvFlags(uint32(raw.flags), ud)
	if wc.Flags&(verbs.WithImm|verbs.WithInv) != 0 {
		wc.Imm = uint32(raw.imm)
	}
	if q == nil {
		return
	}
	if ud {
		wc.SrcQPN, wc.PKey = ib.QPN(raw.src_qpn), q.pkey
	}
	q.commEst()
	q.tapReceived(d.tap.Get(), wc, sg)
}
