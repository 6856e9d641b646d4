package datapath

import (
	"encoding/binary"
	"errors"
	"math/bits"
	"sync"
	"sync/atomic"

	"ipoibcm/fqcodel"
	"ipoibcm/verbs"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/ip"
)

// signalEvery is how many requests apart signaled requests are at most. A queue is at least as
// deep, so it never fills up with requests that report no completion.
const signalEvery = 16

// minShare is how many buffers a queue may hold, however few are free.
const minShare = 8

// A sendItem is a packet on its way into a sendQ. Its header is written. Whoever holds the item
// owns the slot.
type sendItem struct {
	slot int32
	n    int32  // octets of the message, header included
	set  uint16 // flowSet of its flow if it has waited, else zero
	path *Path  // nil if it has none (SendUD, SendCopies, SendConn)
	ud   UDDest
}

// A sendQ is the send queue of one QP, with the buffers posted on it and the packets that wait in
// front of it.
//
// Requests complete in order, so the posted ones are a ring: posting advances tail under mu,
// completion advances head under done. Completing never takes mu: the completing goroutine may be
// the provider's receiving one and must not wait for a PostSend that is busy sending.
type sendQ struct {
	qp   verbs.QP
	th   *thread // whose buffers it uses, and where its requests complete
	pool *sendPool
	ud   bool
	// copies has the bits of the traffic class that a datagram takes over from its IP packet.
	copies atomic.Uint32
	depth  int
	ring   []int32 // slots; a power of two
	base   uint64  // first work request ID; no two queues share any ID

	mu     sync.Mutex // guards tail, closed
	closed bool
	tail   atomic.Uint64

	done     sync.Mutex // guards head, the ring between head and tail, limit
	head     atomic.Uint64
	limit    sendLimit
	inOctets atomic.Int64 // octets posted and not completed
	mayHave  atomic.Int64 // limit.limit()
	rate     atomic.Int64 // limit.rate()

	// Packets that wait, see backlog.go.
	wait     fqcodel.Queue // under backlog.mu
	sparseAt int64         // bounds sparse flows, see mayPass; under backlog.mu
	large    int32         // packets in wait that lie in large slots; under backlog.mu
	gone     bool          // nothing may wait any more; under backlog.mu
	waiting  atomic.Int32  // wait.Len()
	turns    atomic.Int32  // zero if no goroutine posts; else 1 plus the number that wanted to meanwhile

	packets, octets, errs, flushed, full, late, marks atomic.Uint64
	lastTx                                            atomic.Int64
	lastErr                                           atomic.Uint32
	direct                                            atomic.Int32 // requests posted without having waited and not completed, of whatever flow
}

func newSendQ(th *thread, depth int, ud bool, base uint64) *sendQ {
	q := &sendQ{
		th: th, pool: th.pool, ud: ud, depth: depth, ring: make([]int32, 1<<bits.Len(uint(depth-1))), base: base,
	}
	q.head.Store(base)
	q.tail.Store(base)
	q.mayHave.Store(q.limit.limit())
	return q
}

// work is scratch space for one post. Each goroutine that posts has its own, so there are as many
// as goroutines that may post at the same time, not as many as connections.
type work struct {
	wrs     [batchLen]verbs.SendWR
	sges    [batchLen]verbs.SGE
	items   [batchLen]sendItem
	dropped []int32    // slots of packets that CoDel dropped
	moved   []sendItem // packets whose paths do not lead to the UD QP any more
}

// newWork returns a work for a pool of n slots.
func newWork(n int) *work { return &work{dropped: make([]int32, 0, n)} }

// inflight returns how many requests are posted and not completed.
func (q *sendQ) inflight() int { return int(q.tail.Load() - q.head.Load()) }

// room returns how many requests may be posted now. A queue may hold as many buffers as are left
// free, or minShare if fewer are free, so that dead peers, however many, never take the last one
// (the dynamic threshold of shared-memory switches).
func (q *sendQ) room() int {
	used := q.inflight()
	return min(q.depth-used, max(q.pool.available(), minShare)-used)
}

// hasRoom reports whether another request may be posted. If not, it calls limit.full. The limit in
// octets alone never stops an empty queue.
func (q *sendQ) hasRoom() bool {
	if q.room() > 0 && q.inOctets.Load() < q.mayHave.Load() {
		return true
	}
	q.done.Lock()
	q.limit.full()
	q.done.Unlock()
	return false
}

// post posts as many of items as q has depth and buffers for, and returns how many the provider
// took. gone reports that q is closed. err is the provider's refusal of items[taken]; a full queue
// is no error.
func (q *sendQ) post(items []sendItem, w *work, now int64) (taken int, gone bool, err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return 0, true, nil
	}
	n := min(len(items), q.room(), len(w.wrs))
	if n <= 0 {
		return 0, false, nil
	}
	tail := q.tail.Load()
	signal := q.mayHave.Load() / 8 // so that completions come in small steps
	var all, unsignaled int64
	var direct int32
	for i := range n {
		it := &items[i]
		id := tail + uint64(i)
		q.ring[id&uint64(len(q.ring)-1)] = it.slot
		q.pool.posted[it.slot] = posted{it.n, it.set}
		q.pool.count(it.set, 1, &direct)
		w.sges[i] = verbs.SGE{Region: q.pool.region, Buf: q.pool.message(it.slot, int(it.n)-headerLen)}
		wr := &w.wrs[i]
		wr.ID, wr.Opcode, wr.Flags, wr.SG = id, verbs.Send, 0, w.sges[i:i+1:i+1]
		all += int64(it.n)
		unsignaled += int64(it.n)
		if i == n-1 || id%signalEvery == signalEvery-1 || unsignaled >= signal {
			wr.Flags, unsignaled = verbs.Signaled, 0
		}
		if q.ud {
			wr.AH, wr.RemoteQPN, wr.RemoteQKey = q.classed(it), it.ud.QPN, it.ud.QKey
		}
	}
	// A completion may come before PostSend returns, so tail moves first.
	q.inOctets.Add(all)
	q.direct.Add(direct)
	q.done.Lock()
	q.limit.posted(tail+uint64(n)-1, int64(items[n-1].n), q.inOctets.Load(), now)
	q.done.Unlock()
	q.tail.Store(tail + uint64(n))
	taken, err = q.qp.PostSend(w.wrs[:n])
	if taken < n {
		q.tail.Store(tail + uint64(taken))
		direct = 0
		for _, it := range items[taken:n] {
			q.inOctets.Add(-int64(it.n))
			q.pool.count(it.set, -1, &direct)
			all -= int64(it.n)
		}
		q.direct.Add(direct)
		if errors.Is(err, verbs.ErrQueueFull) {
			err = nil
		}
	}
	q.packets.Add(uint64(taken))
	q.octets.Add(uint64(all) - uint64(taken)*headerLen)
	q.lastTx.Store(now)
	return taken, false, err
}

// classed returns the address handle for a datagram. If the datagram carries an IP packet and the
// provider has handles by traffic class ([verbs.ClassAH]), the handle takes over the bits of the
// packet's traffic class that are copied. Other messages, such as ARP and CM, keep their handle.
func (q *sendQ) classed(it *sendItem) verbs.AH {
	copies := uint8(q.copies.Load())
	if copies == 0 {
		return it.ud.AH
	}
	ah, ok := it.ud.AH.(verbs.ClassAH)
	t := encap.EtherType(binary.BigEndian.Uint16(q.pool.message(it.slot, 0)))
	if !ok || t != encap.IPv4 && t != encap.IPv6 {
		return it.ud.AH
	}
	return ah.WithClass(ip.TrafficClass(q.pool.packet(it.slot))&copies | ah.Attr().TrafficClass&^copies)
}

// complete takes back the slots of all requests up to and including id and appends them to dst.
func (q *sendQ) complete(dst []int32, id uint64, now int64) []int32 {
	q.done.Lock()
	defer q.done.Unlock()
	head := q.head.Load()
	if id < head || id-head >= uint64(len(q.ring)) || id < q.base {
		return dst // of a QP that had this number before, or taken back already
	}
	var octets int64
	var direct int32
	for ; head <= id; head++ {
		slot := q.ring[head&uint64(len(q.ring)-1)]
		was := q.pool.posted[slot]
		octets += int64(was.octets)
		q.pool.count(was.set, -1, &direct)
		dst = append(dst, slot)
	}
	q.head.Store(head)
	q.inOctets.Add(-octets)
	q.direct.Add(direct)
	q.limit.completed(id, octets, now)
	q.mayHave.Store(q.limit.limit())
	q.rate.Store(q.limit.rate())
	return dst
}

// takeBack gives the slots of all posted requests back to the pool. The provider must not use them
// any more.
func (q *sendQ) takeBack() {
	q.done.Lock()
	defer q.done.Unlock()
	var direct int32
	for head := q.head.Load(); head < q.tail.Load(); head++ {
		slot := q.ring[head&uint64(len(q.ring)-1)]
		q.pool.count(q.pool.posted[slot].set, -1, &direct)
		q.pool.giveOne(slot)
	}
	q.direct.Add(direct)
	q.head.Store(q.tail.Load())
	q.inOctets.Store(0)
	q.limit.reset()
	q.mayHave.Store(q.limit.limit())
}

// close destroys the QP and takes back all buffers that are posted.
func (q *sendQ) close() error {
	q.mu.Lock()
	if q.closed {
		q.mu.Unlock()
		return nil
	}
	q.closed = true
	q.mu.Unlock()
	err := q.qp.Destroy() // the provider touches the buffers no more
	q.takeBack()
	return err
}
