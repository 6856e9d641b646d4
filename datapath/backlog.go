package datapath

import (
	"sync"
	"sync/atomic"

	"ipoibcm/fqcodel"
	"ipoibcm/rtnl"
	"ipoibcm/wire/ip"
)

const (
	// leastBacklog are the octets that may wait for a QP however slow it is.
	leastBacklog = 256 << 10
	// unknownBacklog is the bound while the rate of the QP is not known.
	unknownBacklog = 4 << 20
	// backlogPart is the part of a second's octets that may wait, 100 ms: CoDel's
	// interval, so that it can act before the bound does.
	backlogPart = 10
	// dropAtOnce is how many octets of the fattest flow go together when too much
	// waits: a flood costs one search for several packets, and TCP loses one.
	dropAtOnce = 8 << 10
)

// A backlog is what waits in front of all QPs. What may be posted to a QP is bounded
// ([sendLimit]); the rest waits here, by flow, so that a destination that takes
// nothing costs the others nothing but buffers, of which it gets a share.
//
// Its lock is held for no longer than it takes to move a packet within it, and
// never while anything is posted.
type backlog struct {
	seed seed

	mu    sync.Mutex
	s     *fqcodel.Scheduler
	items []sendItem // by slot: those that wait
	drops []int32    // for the moment
	large int32      // that of the pool
}

func newBacklog(p *sendPool) backlog {
	n := p.slots()
	return backlog{seed: newSeed(), s: fqcodel.New(fqcodel.Options{}, n), items: make([]sendItem, n),
		drops: make([]int32, 0, n), large: p.large}
}

// hash is of the flow of an IP packet (RFC 8290 section 4.1.1): addresses, protocol
// and ports.
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

// bound returns how many octets may wait for q: what it drains in 100 ms.
func (q *sendQ) bound() int {
	rate := int(q.rate.Load())
	if rate == 0 {
		return unknownBacklog
	}
	return max(leastBacklog, rate/backlogPart)
}

// transmit posts items on q, and has wait what there is no room for.
func (l *thread) transmit(q *sendQ, items []sendItem, w *work, now int64) {
	again := false
	if q.waiting.Load() == 0 && q.turns.CompareAndSwap(0, 1) {
		items = l.postNow(q, items, w, now)
		again = q.turns.Swap(0) > 1
	}
	if len(items) > 0 {
		l.enqueue(q, items, now)
		again = true
	}
	if again {
		l.pump(q, w, now)
	}
}

// postNow posts what there is room for and drops what can never be posted; it
// returns what is left.
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

// fitting returns how many of items the limit in octets allows, one at least.
func (q *sendQ) fitting(items []sendItem) int {
	room := q.mayHave.Load() - q.inOctets.Load()
	n := 0
	for n < min(len(items), batchLen) && (n == 0 || room > 0) {
		room -= int64(items[n].n)
		n++
	}
	return n
}

// enqueue has items wait for q. What is too much is dropped, of the flow that has
// most waiting.
func (l *thread) enqueue(q *sendQ, items []sendItem, now int64) {
	b := &l.backlog
	b.mu.Lock()
	if q.gone {
		b.mu.Unlock()
		l.dropItems(items, &l.c.TxGone)
		return
	}
	for i := range items {
		it := &items[i]
		it.slot = l.pool.shrink(it.slot, int(it.n)-headerLen)
		if it.slot < l.pool.large {
			q.large++
		}
		pkt := l.pool.packet(it.slot)[:it.n-headerLen]
		b.items[it.slot] = *it
		b.s.Enqueue(&q.wait, it.slot, int(it.n), b.hash(pkt), ip.ECNCapable(pkt), now)
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
	l.c.TxWaited.Add(uint64(len(items)))
}

// tooMany reports whether q holds more buffers of a kind than are left for all others:
// then dead peers, however many, never take the last one (the dynamic threshold of
// shared-memory switches; Choudhury and Hahne, 1998).
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

// pump posts what waits for q as far as there is room. If somebody else is at it, he
// looks again. l.hand is held.
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

// pumpBatch posts one batch and reports whether another may follow.
func (l *thread) pumpBatch(q *sendQ, w *work, now int64) (more bool) {
	if q.waiting.Load() == 0 || !q.hasRoom() {
		return false
	}
	n := l.dequeue(q, w, now)
	if n == 0 && len(w.moved) == 0 {
		return false
	}
	if left := l.postNow(q, w.items[:n], w, now); len(left) > 0 {
		for i := range left { // the provider has less room than it said
			l.dropFull(q, &left[i])
		}
		return false
	}
	if len(w.moved) > 0 {
		l.reroute(q, w.moved, w, now)
	}
	return true
}

// dequeue fills w.items with packets whose turn it is, as many as may be posted, and
// w.moved with those that do not go by UD any more.
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

// abandon sends what waits for q, which was closed, where its paths lead now.
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

// reroute has packets that waited for q wait for where their paths lead. Those that
// cannot go there are dropped. l.hand is held.
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
		to.th.enqueue(to, items[i:i+1], now)
		to.th.pump(to, w, now)
	}
}

// dropItems drops items for a reason.
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
