package datapath

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"ipoibcm/ib"
	"ipoibcm/verbs"
	"ipoibcm/wire/encap"
)

// A Conn is a connected QP with the buffers of its queues.
type Conn struct {
	loop      *Loop
	th        *thread // the thread that it belongs to for life
	transport ib.Transport
	q         *sendQ

	// recv is its own receive ring, nil if it uses the shared one.
	recv *recvPool
	back reposter // under th.conn.mu

	closeOnce sync.Once
	closeErr  error

	rxPackets, rxOctets, rxErrors atomic.Uint64
	lastRx                        atomic.Int64
}

// Health returns the health of the connection. ok is false if the provider monitors no connections,
// if this one is not RC, and before RTS.
func (c *Conn) Health() (h verbs.Health, ok bool) {
	if m, monitored := c.q.qp.(verbs.Monitored); monitored {
		return m.Health()
	}
	return h, false
}

// NewConn creates a connected QP in RESET. recvMTU is the largest message in octets, header
// included, that the connection receives. If it uses the shared receive queue, recvMTU must not
// exceed Config.ReceiveMTU. The caller moves the QP through its states, and calls PostRecvs once
// after INIT.
func (l *Loop) NewConn(t ib.Transport, recvMTU int) (*Conn, error) {
	if t != ib.RC && t != ib.UC || recvMTU <= encap.HeaderLen || recvMTU > maxPacket {
		return nil, fmt.Errorf("new connection: %v with receive MTU %d: %w", t, recvMTU, verbs.ErrInvalid)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil, ErrClosed
	}
	l.gen++
	base := l.gen << 32
	th := l.calmest()
	c := &Conn{loop: l, th: th, transport: t, q: newSendQ(th, l.cfg.sendDepth(), false, base)}
	init := verbs.QPInit{
		Transport: t, SendCQ: th.sendWC.cq, RecvCQ: th.conn.cq,
		SendDepth: l.cfg.sendDepth(), MaxSendSGE: 1, MaxRecvSGE: 1,
	}
	if th.srq != nil && (t == ib.RC || l.caps.SRQForUC) {
		if recvMTU > l.cfg.receiveMTU() {
			return nil, fmt.Errorf("new connection: receive MTU %d above the shared %d: %w", recvMTU, l.cfg.receiveMTU(),
				verbs.ErrInvalid)
		}
		init.SRQ = th.srq
	} else {
		init.RecvDepth = l.cfg.ucRecvDepth()
		var err error
		if c.recv, err = newRecvPool(l.p, init.RecvDepth, recvMTU, base); err != nil {
			return nil, err
		}
		c.back.wrs = make([]verbs.RecvWR, 0, init.RecvDepth)
		l.recvMemory.Add(int64(len(c.recv.region.Buf)))
	}
	qp, err := l.p.CreateQP(init)
	if err != nil {
		c.freeRing()
		return nil, fmt.Errorf("create %v QP: %w", t, err)
	}
	c.q.qp, c.back.to = qp, qp
	l.conns.set(qp.QPN(), c)
	th.live++
	return c, nil
}

// QP returns the queue pair, for its QPN and Modify.
func (c *Conn) QP() verbs.QP { return c.q.qp }

// Thread returns the index of the data thread that c belongs to, from 0 on.
func (c *Conn) Thread() int { return c.th.index }

// Transport returns RC or UC.
func (c *Conn) Transport() ib.Transport { return c.transport }

// PostRecvs fills the receive ring; with a shared receive queue it does nothing.
// Call it in INIT or RTR, before the peer may send.
func (c *Conn) PostRecvs() error {
	if c.recv == nil {
		return nil
	}
	if _, err := c.q.qp.PostRecv(c.recv.wrs); err != nil {
		return fmt.Errorf("fill receive ring of QP %v: %w", c.q.qp.QPN(), err)
	}
	return nil
}

// Close destroys the QP and takes its buffers back. The caller has led all paths elsewhere before.
// Packets that wait for c follow their paths; a packet that still takes c is dropped and counted. A
// second call does nothing and returns the first result.
func (c *Conn) Close() error {
	c.closeOnce.Do(func() {
		l := c.loop
		l.mu.Lock()
		l.conns.set(c.q.qp.QPN(), nil)
		c.th.live--
		l.mu.Unlock()
		c.closeErr = c.q.close()
		c.th.abandon(c.q)
		// Handlers hold conn.mu while they use the ring. Those that run later do not find c.
		c.th.conn.mu.Lock()
		c.freeRing()
		c.th.conn.mu.Unlock()
	})
	return c.closeErr
}

func (c *Conn) freeRing() {
	if c.recv == nil {
		return
	}
	c.loop.recvMemory.Add(-int64(len(c.recv.region.Buf)))
	c.loop.p.Deregister(c.recv.region)
}

// ConnCounters are the counts of one connection.
type ConnCounters struct {
	TxPackets, TxOctets uint64 // messages posted, and their octets without header
	TxErrors            uint64 // requests completed with an error, flushes not included
	TxFlushed           uint64
	QueueFull           uint64 // packets dropped because too much waited
	Late                uint64 // packets dropped by CoDel
	Marked              uint64 // packets marked by CoDel
	Queued              int    // messages posted and not completed
	QueuedOctets        int    // octets of those messages, headers included
	QueuedLimit         int    // octets that may be posted at the moment
	Backlog             int    // packets that wait to be posted
	RxPackets, RxOctets uint64
	RxErrors            uint64
	LastTx, LastRx      time.Time // exact to a batch; the zero Time means never
	LastError           verbs.Status
}

// Counters returns c's counts.
func (c *Conn) Counters() ConnCounters {
	q := c.q
	return ConnCounters{
		TxPackets: q.packets.Load(), TxOctets: q.octets.Load(),
		TxErrors: q.errs.Load(), TxFlushed: q.flushed.Load(),
		QueueFull: q.full.Load(), Late: q.late.Load(), Marked: q.marks.Load(),
		Queued: q.inflight(), QueuedOctets: int(q.inOctets.Load()), QueuedLimit: int(q.mayHave.Load()),
		Backlog:   int(q.waiting.Load()),
		RxPackets: c.rxPackets.Load(), RxOctets: c.rxOctets.Load(), RxErrors: c.rxErrors.Load(),
		LastTx: timeOf(q.lastTx.Load()), LastRx: timeOf(c.lastRx.Load()),
		LastError: verbs.Status(q.lastErr.Load()),
	}
}

// RecvMemory returns the octets of the receive rings that belong to single connections. The shared
// receive buffers are not counted.
func (l *Loop) RecvMemory() int { return int(l.recvMemory.Load()) }

func timeOf(ns int64) time.Time {
	if ns == 0 {
		return time.Time{}
	}
	return wallTime(ns)
}
