package datapath

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"ipoibcm/tun"
	"ipoibcm/verbs"
)

// A thread is what one data thread has of a Loop: the queue of the TUN that it reads and writes,
// and its own connections with their buffers, completions and waiting packets. The UD queue pair
// belongs to the first thread. A packet read for a queue pair of another thread is copied into a
// buffer of that thread, and posted there at once or put into its backlog, under the locks of that
// send queue. Otherwise threads meet only where the control plane changes something.
type thread struct {
	*Loop
	index int
	p     verbs.Provider
	tun   tun.Device
	c     Counts[atomic.Uint64]
	pool  *sendPool

	polling atomic.Pointer[verbs.Offload] // whether the provider's thread reads the TUN
	turns   atomic.Uint64                 // turns in which the provider's thread read packets

	sendWC *sendDone
	conn   *rxSide
	srq    verbs.SRQ
	live   int // number of connections; under Loop.mu

	// hand is held for reading while targets are in use. Barrier waits for the hands of all
	// threads.
	hand sync.RWMutex

	backlog backlog

	one     sync.Mutex // guards oneWork, which serves what the control plane sends
	oneWork *work
}

// addThread makes the thread for this queue of the TUN.
func (l *Loop) addThread(dev tun.Device) error {
	th := &thread{Loop: l, index: len(l.threads), p: l.p, tun: dev}
	if many, ok := l.p.(verbs.Threader); ok {
		if th.index >= many.Threads() {
			return fmt.Errorf("%d TUN queues, and the provider has %d threads", 1+len(l.cfg.Queues), many.Threads())
		}
		th.p = many.Thread(th.index)
	} else if th.index > 0 {
		return fmt.Errorf("%d TUN queues, and the provider has one thread", 1+len(l.cfg.Queues))
	}
	l.threads = append(l.threads, th)
	var err error
	if th.pool, err = newSendPool(th.p, l.cfg.sendBuffers()); err != nil {
		return err
	}
	th.backlog, th.oneWork = newBacklog(th.pool), newWork(th.pool.slots())
	return th.makeQueues()
}

func (l *thread) makeQueues() error {
	if l.index == 0 { // the UD QP belongs to the first thread
		udSize := verbs.GRHLen + max(l.cfg.udMTU()+headerLen, maxForeignUD)
		udPool, err := newRecvPool(l.p, l.cfg.udRecvDepth(), udSize, 0)
		if err != nil {
			return err
		}
		l.ud = newRXSide(l, udPool)
	}
	var shared *recvPool
	if l.caps.SRQ {
		var err error
		if shared, err = newRecvPool(l.p, l.cfg.srqDepth(), l.cfg.receiveMTU(), 0); err != nil {
			return err
		}
	}
	l.conn = newRXSide(l, shared)
	l.sendWC = &sendDone{drainer: drainer{l: l}, slots: make([]int32, 0, l.pool.slots()), work: newWork(l.pool.slots())}
	l.sendWC.take = l.sendWC.batch
	for _, q := range l.queues() {
		cq, err := l.p.CreateCQ(cqDepth)
		if err != nil {
			return fmt.Errorf("create CQ: %w", err)
		}
		q.cq = cq
		if cb, ok := cq.(verbs.CallbackCQ); ok {
			cb.OnReady(q.drain)
		}
	}
	if shared == nil {
		return nil
	}
	var err error
	if l.srq, err = l.p.CreateSRQ(verbs.SRQInit{Depth: len(shared.wrs), MaxSGE: 1}); err != nil {
		return fmt.Errorf("create SRQ: %w", err)
	}
	l.conn.shared.to = l.srq
	if _, err := l.srq.PostRecv(shared.wrs); err != nil {
		return fmt.Errorf("fill SRQ: %w", err)
	}
	return nil
}

// queues returns what takes the completions of l. A cq is nil until makeQueues has made it.
func (l *thread) queues() (qs []*drainer) {
	if l.sendWC != nil {
		qs = append(qs, &l.sendWC.drainer)
	}
	if l.index == 0 && l.ud != nil {
		qs = append(qs, &l.ud.drainer)
	}
	if l.conn != nil {
		qs = append(qs, &l.conn.drainer)
	}
	return qs
}

// destroyQueues destroys the completion queues and the SRQ, after their queue pairs.
func (l *thread) destroyQueues() {
	for _, q := range l.queues() {
		if q.cq != nil {
			q.cq.Destroy()
		}
	}
	if l.srq != nil {
		l.srq.Destroy()
	}
}

func (l *thread) freeMemory() {
	if l.pool != nil {
		l.p.Deregister(l.pool.region)
	}
	sides := []*rxSide{l.conn}
	if l.index == 0 {
		sides = append(sides, l.ud)
	}
	for _, s := range sides {
		if s != nil && s.pool != nil {
			l.p.Deregister(s.pool.region)
		}
	}
}

// calmest returns the thread with the fewest connections. l.mu is held.
func (l *Loop) calmest() *thread {
	return slices.MinFunc(l.threads, func(a, b *thread) int { return a.live - b.live })
}

// carry copies a packet from its slot in another pool (from) into a buffer of p. It returns the
// slot in p; ok is false if no buffer is free.
func (p *sendPool) carry(from *sendPool, it *sendItem) (slot int32, ok bool) {
	var one [1]int32
	n := int(it.n) - headerLen
	if slot, ok = p.takeSmall(n); !ok {
		if len(p.take(one[:0], 1)) == 0 {
			return 0, false
		}
		slot = one[0]
	}
	copy(p.message(slot, n), from.message(it.slot, n))
	return slot, true
}
