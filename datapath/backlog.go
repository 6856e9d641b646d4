package datapath

import (
	"math"
	"sync"
	"sync/atomic"

	"ipoibcm/fqcodel"
	"ipoibcm/rtnl"
	"ipoibcm/wire/ip"
)

const (
	// leastBacklog is how many octets may always wait for a QP, however slow the QP is.
	leastBacklog = 256 << 10
	// unknownBacklog is the bound in octets while the rate of the QP is not known.
	unknownBacklog = 4 << 20
	// backlogPart bounds the backlog of a QP to what the QP drains in a tenth of a second. CoDel's
	// interval is as long, so CoDel can act before the bound does.
	backlogPart = 10
	// dropAtOnce is how many octets one search drops from the flow that has most waiting, when too
	// much waits. A flood then costs one search for several packets, and TCP loses them in one
	// place.
	dropAtOnce = 8 << 10
)

// A backlog holds the packets that wait in front of a thread's QPs. [sendLimit] bounds what may be
// posted to a QP; the rest waits here, by flow. A destination that takes nothing then costs the
// others only buffers, and of these it gets no more than its share.
//
// A goroutine holds mu only while it moves packets into or out of the backlog, never while it
// posts.
type backlog struct {
	seed seed

	mu    sync.Mutex
	s     *fqcodel.Scheduler
	items []sendItem // by slot: the packets that wait
	drops []int32    // scratch space of enqueue
	large int32      // sendPool.large: slots below it are large
}

func newBacklog(p *sendPool) backlog {
	n := p.slots()
	return backlog{seed: newSeed(), s: fqcodel.New(fqcodel.Options{}, n), items: make([]sendItem, n),
		drops: make([]int32, 0, n), large: p.large}
}

// hash returns the hash of an IP packet's flow (RFC 8290 section 4.1.1): addresses, protocol and
// ports.
func (b *backlog) hash(pkt []byte) uint32 {
	f, ok := ip.FlowOf(pkt, rtnl.WithPorts)
	switch {
	case !ok:
		return 0
	case pkt[0]>>4 == 4:
		return b.seed.flow4(flow4{key4Of(pkt[16:20]), key4Of(pkt[12:16]), restOf(f)})
	}
	return b.seed.flow6(flow6{key6Of(pkt[24:40]), key6Of(pkt[8:24]), restOf(f)})
}

// bound returns how many octets may wait for q: what q drains in 100 ms, but at least
// leastBacklog, and unknownBacklog while its rate is not known.
func (q *sendQ) bound() int {
	rate := q.rate.Load()
	if rate == 0 {
		return unknownBacklog
	}
	return int(min(max(leastBacklog, rate/backlogPart), math.MaxInt32))
}

// transmit posts items on q. Items that q cannot take now wait in the backlog. So do all of them
// while earlier packets wait there, or while another goroutine posts on q.
func (l *thread) transmit(q *sendQ, items []sendItem, w *work, now int64) {
	again := false
	if q.waiting.Load() == 0 && q.turns.CompareAndSwap(0, 1) {
		items = l.postNow(q, items, w, now)
		again = q.turns.Swap(0) > 1
	}
	if len(items) > 0 {
		passed := l.enqueue(q, items, true, now)
		l.passBy(q, items[:passed], w, now)
		again = true
	}
	if again {
		l.pump(q, w, now)
	}
}

// postNow posts items as long as q takes more, and returns the rest. It drops an item that the
// provider refuses. If q is closed, it drops all that are left.
func (l *thread) postNow(q *sendQ, items []sendItem, w *work, now int64) []sendItem {
	for len(items) > 0 && q.hasRoom() {
		n := q.fitting(items)
		taken, gone, err := q.post(items[:n], w, now)
		l.sent(q, items[:taken])
		items = items[taken:]
		switch {
		case gone:
			l.dropItems(items, &l.c.TxGone)
			return nil
		case err != nil && len(items) > 0:
			l.dropItems(items[:1], &l.c.TxPostError)
			items = items[1:]
		case taken < n:
			return items
		}
	}
	return items
}

// fitting returns how many of items the limit in octets allows to post: at least one, at most
// batchLen.
func (q *sendQ) fitting(items []sendItem) int {
	room := q.mayHave.Load() - q.inOctets.Load()
	n := 0
	for n < min(len(items), batchLen) && (n == 0 || room > 0) {
		room -= int64(items[n].n)
		n++
	}
	return n
}

// enqueue puts items into the backlog of q, or drops them if q is closed. If too much waits for q
// then, it drops packets of the flow that has most waiting. With pass, it moves those that may go by UD to the front
// of items instead, and returns their number.
func (l *thread) enqueue(q *sendQ, items []sendItem, pass bool, now int64) (passed int) {
	b := &l.backlog
	b.mu.Lock()
	if q.gone {
		b.mu.Unlock()
		l.dropItems(items, &l.c.TxGone)
		return 0
	}
	for i := range items {
		it := &items[i]
		pkt := l.pool.packet(it.slot)[:it.n-headerLen]
		hash, ecn := b.hash(pkt), ip.ECNCapable(pkt)
		if pass && b.mayPass(q, it, hash, now) {
			items[passed] = *it
			passed++
			continue
		}
		it.set = flowSet(hash)
		it.slot = l.pool.shrink(it.slot, int(it.n)-headerLen)
		if it.slot < l.pool.large {
			q.large++
		}
		b.items[it.slot] = *it
		b.s.Enqueue(&q.wait, it.slot, int(it.n), hash, ecn, now)
	}
	for bound := q.bound(); q.wait.Len() > 0 && (q.wait.Octets() > bound || q.tooMany(l.pool)); {
		b.drops = b.s.DropFattest(&q.wait, dropAtOnce, b.drops[:0])
		for _, slot := range b.drops {
			it := b.items[slot]
			b.left(q, slot)
			l.dropFull(q, &it)
		}
	}
	q.waiting.Store(int32(q.wait.Len()))
	b.mu.Unlock()
	l.c.TxWaited.Add(uint64(len(items) - passed))
	return passed
}

// tooMany reports whether q holds more buffers of one kind, large or small, than are free for all
// others. While large buffers wait, the buffers posted on q count with them. Dead peers, however
// many, then never take the last buffer (the dynamic threshold of shared-memory switches; Choudhury
// and Hahne, 1998).
func (q *sendQ) tooMany(p *sendPool) bool {
	large, small := p.freeSlots()
	mine := int(q.large)
	return mine > 0 && q.inflight()+mine > large || q.wait.Len()-mine > small
}

// left notes that slot does not wait for q any more. b.mu is held.
func (b *backlog) left(q *sendQ, slot int32) {
	if slot < b.large {
		q.large--
	}
	b.items[slot].path = nil
}

// pump posts the packets that wait for q, as many as q takes. If another goroutine posts on q
// already, pump returns at once, and that goroutine looks once more. The caller holds some thread's
// hand for reading.
func (l *thread) pump(q *sendQ, w *work, now int64) {
	if q.waiting.Load() == 0 || q.turns.Add(1) != 1 {
		return
	}
	for {
		n := q.turns.Load()
		for l.pumpBatch(q, w, now) {
		}
		if q.turns.CompareAndSwap(n, 0) {
			return
		}
	}
}

// pumpBatch posts one batch of waiting packets and reports whether another may follow.
func (l *thread) pumpBatch(q *sendQ, w *work, now int64) (more bool) {
	if q.waiting.Load() == 0 || !q.hasRoom() {
		return false
	}
	n := l.dequeue(q, w, now)
	if n == 0 && len(w.moved) == 0 {
		return false
	}
	left := l.postNow(q, w.items[:n], w, now)
	for i := range left { // the provider has less room than it said
		l.dropFull(q, &left[i])
	}
	if len(w.moved) > 0 {
		l.reroute(q, w.moved, w, now)
	}
	return len(left) == 0
}

// dequeue fills w.items with the packets whose turn it is, as many as may be posted, and returns
// their number. It fills w.moved with packets that waited for the UD QP and whose paths no longer
// lead to it. It frees the slots of packets that CoDel drops.
func (l *thread) dequeue(q *sendQ, w *work, now int64) (n int) {
	b := &l.backlog
	w.dropped, w.moved = w.dropped[:0], w.moved[:0]
	room, octets := min(q.room(), batchLen), q.mayHave.Load()-q.inOctets.Load()
	b.mu.Lock()
	for n < room && octets > 0 {
		slot, mark, ok, dropped := b.s.Dequeue(&q.wait, q.rate.Load(), now, w.dropped)
		if w.dropped = dropped; !ok {
			break
		}
		it := b.items[slot]
		if mark {
			ip.SetCE(l.pool.packet(slot)[:it.n-headerLen])
			q.marks.Add(1)
			l.c.TxMarked.Add(1)
		}
		if q.ud {
			t := it.path.target.Load()
			if t.Kind != ToUD {
				w.moved = append(w.moved, it)
				b.left(q, slot)
				continue
			}
			it.ud = t.UD
		}
		b.left(q, slot)
		w.items[n] = it
		octets -= int64(it.n)
		n++
	}
	for _, slot := range w.dropped {
		b.items[slot].path.c.dropped.Add(1)
		b.left(q, slot)
	}
	q.waiting.Store(int32(q.wait.Len()))
	b.mu.Unlock()
	q.late.Add(uint64(len(w.dropped)))
	l.c.TxLate.Add(uint64(len(w.dropped)))
	l.pool.give(w.dropped)
	return n
}

// abandon is called after q was closed. No packet may wait for q any more. abandon moves those that
// wait to the QPs that their paths lead to now.
func (l *thread) abandon(q *sendQ) {
	b := &l.backlog
	b.mu.Lock()
	q.gone = true
	var items []sendItem
	for _, slot := range b.s.Purge(&q.wait, nil) {
		items = append(items, b.items[slot])
		b.left(q, slot)
	}
	q.waiting.Store(0)
	b.mu.Unlock()
	if len(items) == 0 {
		return
	}
	l.hand.RLock()
	l.reroute(q, items, newWork(l.pool.slots()), nanotime())
	l.hand.RUnlock()
}

// reroute moves each of items, which waited for q, to the backlog of the QP that its path leads to
// now. It drops a packet whose path leads to no other QP, that exceeds the path's MTU, or for which
// no buffer is free. The caller holds some thread's hand for reading.
func (l *thread) reroute(q *sendQ, items []sendItem, w *work, now int64) {
	for i := range items {
		it := &items[i]
		t := it.path.target.Load()
		var to *sendQ
		switch t.Kind {
		case ToUD:
			to = l.udq
		case ToConn:
			to = t.Conn.q
		}
		if to == nil || to == q || l.done() || t.MTU != 0 && int(it.n)-headerLen > t.MTU {
			l.dropItems(items[i:i+1], &l.c.TxGone)
			continue
		}
		if to.th != l {
			slot, ok := to.th.pool.carry(l.pool, it)
			if !ok {
				l.dropItems(items[i:i+1], &l.c.TxNoBuffer)
				continue
			}
			l.pool.giveOne(it.slot)
			it.slot = slot
		}
		l.c.TxMoved.Add(1)
		to.th.enqueue(to, items[i:i+1], false, now)
		to.th.pump(to, w, now)
	}
}

// dropItems drops items and counts them in reason.
func (l *thread) dropItems(items []sendItem, reason *atomic.Uint64) {
	for i := range items {
		if p := items[i].path; p != nil {
			p.c.dropped.Add(1)
		}
		l.pool.giveOne(items[i].slot)
		reason.Add(1)
	}
}

// dropFull drops a packet because too much waits for q.
func (l *thread) dropFull(q *sendQ, it *sendItem) {
	q.full.Add(1)
	if q.ud {
		l.c.TxUDQueueFull.Add(1)
	} else {
		l.c.TxQueueFull.Add(1)
	}
	if it.path != nil {
		it.path.c.queueFull.Add(1)
	}
	l.pool.giveOne(it.slot)
}
