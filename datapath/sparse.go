package datapath

import "time"

const (
	// sparseShare bounds the octets that pass by a connection's waiting packets: to an eighth of its rate.
	sparseShare = 8
	// sparseEvery bounds their number: to one packet in a millisecond. Receivers take more than that by UD, from each
	// source and in all.
	sparseEvery = time.Millisecond
	// sparseBurst is how far ahead of these bounds they may be.
	sparseBurst = 30 * time.Millisecond
	// flowSets is how many sets of flows the requests posted from a pool are counted by.
	flowSets = 1 << 10
)

// flowSet returns which element of sendPool.flows counts the requests of a flow; it is not zero.
func flowSet(hash uint32) uint16 { return uint16(1 + hash>>22) }

// count adds n to the number of requests posted and not completed of a flow whose packets had waited. If set is zero,
// the flow is not known, and it adds n to direct, for the caller to add to q.direct.
func (p *sendPool) count(set uint16, n int32, direct *int32) {
	if set == 0 {
		*direct += n
	} else {
		p.flows[set].Add(n)
	}
}

// mayPass reports whether a packet, of a flow with that hash, for which q has no room goes by UD instead of waiting
// for q, a connection. On the connection the packet of a sparse flow goes first of those that wait, but behind all that
// is posted. A flow is sparse if nothing of it waits and it has no turn to come (as in fqcodel), and nothing of it is
// posted, so that its packets do not overtake each other. b.mu is held.
//
// RFC 4755 section 7 has every interface accept unicast over UD.
func (b *backlog) mayPass(q *sendQ, it *sendItem, hash uint32, now int64) bool {
	rate := q.rate.Load()
	if rate == 0 || q.turns.Load() != 0 || it.path == nil || int(it.n)-headerLen > it.path.target.Load().UDMTU {
		return false
	}
	if q.direct.Load() > 0 || q.pool.flows[flowSet(hash)].Load() > 0 || !b.s.Sparse(&q.wait, hash) {
		return false
	}
	at := max(q.sparseAt, now)
	if at-now > int64(sparseBurst) {
		return false
	}
	q.sparseAt = at + max(int64(sparseEvery), int64(it.n)*sparseShare*int64(time.Second)/rate)
	return true
}

// passBy posts items, which mayPass has let pass, on the UD QP. It puts those that cannot be posted at once into the
// backlog of q after all.
func (l *thread) passBy(q *sendQ, items []sendItem, w *work, now int64) {
	for i := range items {
		if l.passOne(items[i], w, now) {
			l.c.TxSparse.Add(1)
		} else {
			l.enqueue(q, items[i:i+1], false, now)
		}
	}
}

// passOne posts it on the UD QP, and reports whether it could.
func (l *thread) passOne(it sendItem, w *work, now int64) bool {
	q, t, slot := l.udq, it.path.target.Load(), it.slot
	if t.UDMTU == 0 || !q.hasRoom() {
		return false
	}
	if q.th != l {
		var ok bool
		if it.slot, ok = q.th.pool.carry(l.pool, &it); !ok {
			return false
		}
	}
	it.ud = t.UD
	w.items[0] = it
	taken, _, _ := q.post(w.items[:1], w, now)
	if taken == 0 {
		if q.th != l {
			q.th.pool.giveOne(it.slot)
		}
		return false
	}
	if q.th != l {
		l.pool.giveOne(slot)
	}
	l.sent(q, w.items[:1])
	return true
}
