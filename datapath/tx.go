package datapath

import (
	"fmt"

	"ipoibcm/verbs"
	"ipoibcm/wire/encap"
)

const headerLen = encap.HeaderLen

// batchLen is how many packets are taken from the TUN at once. A batch of full-sized packets has 2
// MiB.
const batchLen = 32

// A sender is the state of a TUN reader. It never waits for a queue pair: a packet that cannot be
// posted waits in the backlog, or is dropped there.
type sender struct {
	l       *thread
	slots   []int32
	bufs    [][]byte
	sizes   []int
	to      []*sendQ   // the queues of items; nil once an item is in group
	items   []sendItem // the packets of this batch that are to be posted
	group   []sendItem // those of items that go to one queue
	work    *work
	drained bool                                          // the last batch was not full: the TUN had no more
	read    func(bufs [][]byte, sizes []int) (int, error) // may block
}

func newSender(l *thread, read func([][]byte, []int) (int, error)) *sender {
	return &sender{
		l: l, read: read, slots: make([]int32, 0, batchLen+1), bufs: make([][]byte, batchLen+1),
		sizes: make([]int, batchLen+1), to: make([]*sendQ, 0, batchLen), items: make([]sendItem, 0, batchLen),
		group: make([]sendItem, 0, batchLen), work: newWork(l.pool.slots()),
	}
}

// run reads until the TUN fails.
func (s *sender) run() error {
	for {
		if _, err := s.step(); err != nil {
			return err
		}
	}
}

// step reads one batch and sends it. It returns the number of packets read.
func (s *sender) step() (n int, err error) {
	l := s.l
	if have := len(s.slots); have <= batchLen {
		s.slots = l.pool.take(s.slots, batchLen+1-have)
		for i := have; i < len(s.slots); i++ {
			s.bufs[i] = l.pool.packet(s.slots[i])
		}
	}
	most := max(1, len(s.slots)-1) // one slot is kept for the next packet
	if n, err = s.read(s.bufs[:most], s.sizes); err != nil {
		return 0, fmt.Errorf("read %s: %w", l.tun.Name(), err)
	}
	if s.drained = n < most; n == 0 {
		return 0, nil
	}
	l.hand.RLock()
	s.batch(n, nanotime())
	l.hand.RUnlock()
	return n, nil
}

// batch sends the first n packets read. The slots of packets that were dropped or went up stay with
// s. At least one slot always stays, so that the next packet can be read.
func (s *sender) batch(n int, now int64) {
	l := s.l
	cache := l.dests.Load()
	kept, extra := 0, len(s.slots)-n
	scarce := l.pool.available() < batchLen
	for i := range n {
		if s.route(cache, i, now) && !s.carried() && !(scarce && s.small()) {
			if extra+kept+n-1-i > 0 {
				continue
			}
			s.unroute()
		}
		// Not taken: the slot stays, moved to the front.
		s.slots[kept], s.slots[i] = s.slots[i], s.slots[kept]
		s.bufs[kept], s.bufs[i] = s.bufs[i], s.bufs[kept]
		kept++
	}
	// Between kept and n lie the slots given away; close the gap.
	rest := copy(s.slots[kept:], s.slots[n:])
	copy(s.bufs[kept:], s.bufs[n:len(s.slots)])
	s.slots = s.slots[:kept+rest]

	for i, q := range s.to {
		if q == nil {
			continue
		}
		s.group = s.group[:0]
		for k := i; k < len(s.to); k++ {
			if s.to[k] == q {
				s.group, s.to[k] = append(s.group, s.items[k]), nil
			}
		}
		q.th.transmit(q, s.group, s.work, now)
	}
	s.items, s.to = s.items[:0], s.to[:0]
}

// unroute takes the last item out of the batch and drops it, because there is no buffer for it.
func (s *sender) unroute() {
	last := len(s.items) - 1
	s.items[last].path.c.dropped.Add(1)
	s.l.c.TxNoBuffer.Add(1)
	s.items, s.to = s.items[:last], s.to[:last]
}

// carried reports whether another thread posts the last item of the batch. If so, it copies the
// packet into a buffer of that thread, or drops the item if none is free.
func (s *sender) carried() bool {
	last := len(s.items) - 1
	it, th := &s.items[last], s.to[last].th
	if th == s.l {
		return false
	}
	slot, ok := th.pool.carry(s.l.pool, it)
	if !ok {
		s.unroute()
		return true
	}
	it.slot = slot
	s.l.c.TxOtherThread.Add(1)
	return true
}

// small copies the packet of the last item into a small buffer, and reports whether it could.
func (s *sender) small() bool {
	it := &s.items[len(s.items)-1]
	to, ok := s.l.pool.copySmall(it.slot, int(it.n)-headerLen)
	if ok {
		it.slot = to
	}
	return ok
}

// route puts packet i into the batch and reports whether it did. If not, the packet was dropped or
// went up.
func (s *sender) route(cache *dests, i int, now int64) bool {
	l := s.l
	pkt := s.bufs[i][:s.sizes[i]]
	t := ipType(pkt)
	if t == 0 {
		l.c.TxMalformed.Add(1)
		return false
	}
	if isControl(pkt, t) {
		l.handUp(Frame{Kind: TXControl, Type: t, Data: pkt})
		return false
	}
	dest := cache.lookup(t, pkt)
	if dest == nil {
		if !l.held(t, pkt) {
			l.handUp(Frame{Kind: TXNoRoute, Type: t, Data: pkt})
		}
		return false
	}
	p := dest.path.Load()
	if m, gen := mark(dest.mark.Load()), cache.gen.Load(); m.stale(now, gen) {
		if cache.isOutdated(m, now, gen) && !l.isHeld(t, pkt) && l.offerUp(Frame{Kind: TXNoRoute, Type: t, Data: pkt}) {
			return false
		}
		l.askAgain(&dest.mark, m, t, pkt, p, now, gen)
	}
	p.c.used.Store(now)
	target := p.target.Load()
	var q *sendQ
	switch target.Kind {
	case Miss:
		if !l.held(t, pkt) {
			l.handUp(Frame{Kind: TXMiss, Type: t, Data: pkt, Path: p})
		}
		return false
	case Drop:
		l.c.TxUnreachable.Add(1)
		p.c.dropped.Add(1)
		return false
	case ToUD:
		q = l.udq
	case ToConn:
		if toMulticast(t, pkt) { // RFC 4755 section 2.1
			l.c.TxMulticastConn.Add(1)
			p.c.dropped.Add(1)
			return false
		}
		q = target.Conn.q
	}
	if target.MTU != 0 && len(pkt) > target.MTU {
		l.handUp(Frame{Kind: TXTooBig, Type: t, Data: pkt, Path: p, MTU: target.MTU})
		return false
	}
	encap.Put(l.pool.message(s.slots[i], 0), t)
	s.to = append(s.to, q)
	s.items = append(s.items, sendItem{slot: s.slots[i], n: int32(len(pkt) + headerLen), path: p, ud: target.UD})
	return true
}

// held reports whether HoldGroups drops a packet that would go up, and counts it.
func (l *thread) held(t encap.EtherType, pkt []byte) bool {
	if !l.isHeld(t, pkt) {
		return false
	}
	l.c.TxGroupHeld.Add(1)
	return true
}

func (l *thread) isHeld(t encap.EtherType, pkt []byte) bool {
	return l.hold.Load() && l.isGroup(t, pkt)
}

func (l *thread) sent(q *sendQ, items []sendItem) {
	if len(items) == 0 {
		return
	}
	var octets uint64
	for i := range items {
		n := uint64(items[i].n) - headerLen
		octets += n
		if p := items[i].path; p != nil {
			p.c.packets.Add(1)
			p.c.octets.Add(n)
		}
	}
	l.c.TxPackets.Add(uint64(len(items)))
	l.c.TxOctets.Add(octets)
	if q.ud {
		l.c.TxUD.Add(uint64(len(items)))
	} else {
		l.c.TxConn.Add(uint64(len(items)))
	}
}

// Send posts one IP packet on p: one that waited until p had a target, or a fragment. Any goroutine
// may call it. It does not look at the destination cache or at the path's MTU, and it never waits.
// The error is ErrFull if the send queue is full or the buffers are used up. It is ErrClosed if p
// leads to a Miss or a Drop, or if the connection or the loop is closed. It is [verbs.ErrInvalid]
// if the packet is not IP, or is multicast and p leads to a connection.
func (l *Loop) Send(p *Path, packet []byte) error {
	t := ipType(packet)
	if t == 0 {
		l.c.TxMalformed.Add(1)
		return verbs.ErrInvalid
	}
	hand := &l.threads[0].hand
	hand.RLock()
	defer hand.RUnlock()
	target := p.target.Load()
	switch target.Kind {
	case ToUD:
		return l.udq.th.sendOne(l.udq, p, target.UD, t, packet)
	case ToConn:
		if toMulticast(t, packet) {
			l.c.TxMulticastConn.Add(1)
			p.c.dropped.Add(1)
			return verbs.ErrInvalid
		}
		return target.Conn.th.sendOne(target.Conn.q, p, UDDest{}, t, packet)
	}
	l.c.TxUnreachable.Add(1)
	p.c.dropped.Add(1)
	return ErrClosed
}

// SendUD sends payload behind a header of type t on the UD QP.
func (l *Loop) SendUD(dst UDDest, t encap.EtherType, payload []byte) error {
	_, err := l.SendCopies([]UDDest{dst}, t, payload)
	return err
}

// SendCopies sends payload behind a header of type t to each of dst on the UD QP. It never waits.
// It returns the number of copies posted.
func (l *Loop) SendCopies(dst []UDDest, t encap.EtherType, payload []byte) (sent int, err error) {
	hand := &l.udq.th.hand
	hand.RLock()
	defer hand.RUnlock()
	for err == nil && sent < len(dst) {
		var n int
		n, err = l.udq.th.sendBatch(l.udq, nil, dst[sent:min(sent+batchLen, len(dst))], t, payload)
		sent += n
	}
	return sent, err
}

// SendConn sends payload, which is no IP packet, behind a header of type t on a connection.
func (l *Loop) SendConn(c *Conn, t encap.EtherType, payload []byte) error {
	hand := &c.th.hand
	hand.RLock()
	defer hand.RUnlock()
	return c.th.sendOne(c.q, nil, UDDest{}, t, payload)
}

// sendOne is sendBatch to one destination.
func (l *thread) sendOne(q *sendQ, p *Path, dst UDDest, t encap.EtherType, payload []byte) error {
	_, err := l.sendBatch(q, p, []UDDest{dst}, t, payload)
	return err
}

// sendBatch sends payload, which takes p if that is not nil, to at most batchLen destinations. It
// returns how many messages were posted. That may be fewer than dst without an error if buffers are
// short; an error says why messages that had buffers were not posted.
func (l *thread) sendBatch(q *sendQ, p *Path, dst []UDDest, t encap.EtherType, payload []byte) (int, error) {
	if len(payload) > maxPacket {
		return 0, ErrTooBig
	}
	if l.done() {
		return 0, ErrClosed
	}
	var slots [batchLen]int32
	n := len(l.pool.take(slots[:0], len(dst)))
	if n == 0 {
		l.c.TxNoBuffer.Add(1)
		return 0, ErrFull
	}
	now := nanotime()
	if p != nil {
		p.c.used.Store(now)
	}
	l.one.Lock()
	defer l.one.Unlock()
	items := l.oneWork.items[:n]
	for i := range items {
		items[i] = sendItem{slot: slots[i], n: int32(len(payload) + headerLen), path: p, ud: dst[i]}
		copy(l.pool.packet(slots[i]), payload)
		encap.Put(l.pool.message(slots[i], 0), t)
	}
	taken, gone, err := q.post(items, l.oneWork, now)
	l.sent(q, items[:taken])
	switch left := items[taken:]; {
	case len(left) == 0:
		return taken, nil
	case gone:
		l.dropItems(left, &l.c.TxGone)
		return taken, ErrClosed
	case err != nil:
		l.dropItems(left, &l.c.TxPostError)
		return taken, fmt.Errorf("post to QP %v: %w", q.qp.QPN(), err)
	default:
		for i := range left {
			l.dropFull(q, &left[i])
		}
		return taken, ErrFull
	}
}
