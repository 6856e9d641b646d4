package datapath

import (
	"errors"
	"fmt"
	"time"

	"ipoibcm/verbs"
	"ipoibcm/wire/encap"
)

const headerLen = encap.HeaderLen

// batchLen is how many packets are taken from the TUN at once. Full-sized ones
// make 2 MiB of it.
const batchLen = 32

// How long the TUN reader waits for a full send queue. Waiting keeps the excess
// in the kernel's queue, where TCP sees delay instead of loss; but all peers
// share that queue.
const (
	// aloneWait bounds the wait for the only queue in use, per batch. It covers
	// one retransmission of RC after its ACK timeout of 67 ms.
	aloneWait = 80 * time.Millisecond
	// sharedWait is the bound when others send too.
	sharedWait = time.Millisecond
	// aloneStall and sharedStall are how long a full queue may go without any
	// completion. Then it drops at once until it makes progress.
	aloneStall  = aloneWait
	sharedStall = 5 * time.Millisecond
	// activeFor is how long a queue counts as in use after a packet.
	activeFor = 50 * time.Millisecond
)

// A sender is the state of the TUN reader.
type sender struct {
	l       *Loop
	slots   []int32
	bufs    [][]byte
	sizes   []int
	qs      []*sendQ // touched by this batch
	held    []*sendQ // full, with packets of this batch still to be posted
	work    work
	timer   *time.Timer
	drained bool                                          // the last batch was not full: nothing more was there
	read    func(bufs [][]byte, sizes []int) (int, error) // blocks or not

	// The two queues used last, to know whether one is alone.
	recent [2]struct {
		q  *sendQ
		at int64
	}
}

func newSender(l *Loop, read func([][]byte, []int) (int, error)) *sender {
	s := &sender{
		l: l, read: read, slots: make([]int32, 0, batchLen), bufs: make([][]byte, batchLen), sizes: make([]int, batchLen),
		qs: make([]*sendQ, 0, batchLen), held: make([]*sendQ, 0, batchLen), timer: time.NewTimer(time.Hour),
	}
	s.timer.Stop()
	return s
}

// run reads until the TUN fails.
func (s *sender) run() error {
	for {
		_, wait, err := s.step()
		if err != nil {
			s.giveUp()
			return err
		}
		if wait > 0 {
			s.wait(wait)
		}
	}
}

// step moves one batch that is read, or goes on with what the last one left
// over. A positive wait says that nothing more can be done for so long, unless
// requests complete. While packets are left over s holds Loop.hand.
func (s *sender) step() (n int, wait time.Duration, err error) {
	l := s.l
	if len(s.held) > 0 {
		if wait = s.retry(time.Now().UnixNano()); wait > 0 {
			return 0, wait, nil
		}
		l.hand.RUnlock()
	}
	if have := len(s.slots); have < batchLen {
		s.slots = l.pool.take(s.slots, batchLen-have)
		for i := have; i < len(s.slots); i++ {
			s.bufs[i] = l.pool.packet(s.slots[i])
		}
	}
	if len(s.slots) == 0 {
		if l.done() {
			return 0, 0, ErrClosed
		}
		l.c.TxWaits.Add(1)
		return 0, sharedStall, nil
	}
	if n, err = s.read(s.bufs[:len(s.slots)], s.sizes); err != nil {
		return 0, 0, fmt.Errorf("read %s: %w", l.tun.Name(), err)
	}
	if s.drained = n < len(s.slots); n == 0 {
		return 0, 0, nil
	}
	l.hand.RLock()
	if wait = s.batch(n, time.Now().UnixNano()); wait == 0 {
		l.hand.RUnlock()
	}
	return n, wait, nil
}

// batch sends the first n packets read. Slots whose packet went nowhere stay.
// What it returns is that of retry.
func (s *sender) batch(n int, now int64) (wait time.Duration) {
	l := s.l
	cache := l.dests.Load()
	kept := 0
	for i := range n {
		if s.route(cache, i, now) {
			continue
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

	for _, q := range s.qs {
		s.note(q, now)
	}
	for _, q := range s.qs {
		left := s.post(q, q.batch, now)
		if q.batch = append(q.batch[:0], left...); len(left) > 0 {
			s.hold(q, now)
		}
	}
	s.qs = s.qs[:0]
	if len(s.held) == 0 {
		return 0
	}
	return s.retry(now)
}

// route puts packet i into the batch of its queue and reports whether it did;
// else the packet was dropped or went up.
func (s *sender) route(cache *dests, i int, now int64) bool {
	l := s.l
	pkt := s.bufs[i][:s.sizes[i]]
	t := ipType(pkt)
	if t == 0 {
		l.c.TxMalformed.Add(1)
		return false
	}
	if isControl(pkt, t) {
		l.sendUp(TXControl, t, pkt, nil, 0)
		return false
	}
	p, at := cache.lookup(t, pkt)
	if p == nil {
		l.sendUp(TXNoRoute, t, pkt, nil, 0)
		return false
	}
	if m, gen := mark(at.Load()), cache.gen.Load(); m.stale(now, gen) {
		l.askAgain(at, m, t, pkt, p, now, gen)
	}
	p.c.used.Store(now)
	target := p.target.Load()
	var q *sendQ
	switch target.Kind {
	case Miss:
		l.sendUp(TXMiss, t, pkt, p, 0)
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
		l.sendUp(TXTooBig, t, pkt, p, target.MTU)
		return false
	}
	encap.Put(l.pool.message(s.slots[i], 0), t)
	if len(q.batch) == 0 {
		s.qs = append(s.qs, q)
	}
	q.batch = append(q.batch, sendItem{slot: s.slots[i], n: int32(len(pkt) + headerLen), path: p, ud: target.UD})
	return true
}

// note remembers that q is in use.
func (s *sender) note(q *sendQ, now int64) {
	if s.recent[0].q != q {
		s.recent[1] = s.recent[0]
		s.recent[0].q = q
	}
	s.recent[0].at = now
}

func (s *sender) alone(q *sendQ, now int64) bool {
	for _, r := range s.recent {
		if r.q != nil && r.q != q && now-r.at < int64(activeFor) {
			return false
		}
	}
	return true
}

// hold begins the wait for room in q.
func (s *sender) hold(q *sendQ, now int64) {
	limit, stall := sharedWait, sharedStall
	if s.alone(q, now) {
		limit, stall = aloneWait, aloneStall
	}
	q.seen, q.giveUpAt, q.stall = q.head.Load(), now+int64(limit), int64(stall)
	s.held = append(s.held, q)
}

// retry posts what the full queues have room for now, and drops the rest of
// those that had their time. It returns how long to wait for the others at most;
// zero means that no packet is left.
func (s *sender) retry(now int64) (wait time.Duration) {
	l := s.l
	kept := s.held[:0]
	for _, q := range s.held {
		q.seen = q.head.Load()
		left := s.post(q, q.batch, now)
		if len(left) > 0 && now >= q.giveUpAt && now-q.progress.Load() >= q.stall {
			s.markStalled(q)
		}
		if len(left) == 0 || now >= q.giveUpAt || q.stalled.Load() || l.done() {
			s.dropLeft(q, left)
			continue
		}
		q.batch = append(q.batch[:0], left...)
		kept = append(kept, q)
		if d := time.Duration(q.giveUpAt - now); wait == 0 || d < wait {
			wait = d
		}
	}
	s.held = kept
	if wait > 0 {
		l.c.TxWaits.Add(1)
	}
	return wait
}

// markStalled makes q drop at once until it completes something.
func (s *sender) markStalled(q *sendQ) {
	if q.stalled.Swap(true) {
		return
	}
	if q.head.Load() != q.seen { // it moved just now; complete cleared the mark before we set it
		q.stalled.Store(false)
		return
	}
	q.stalls.Add(1)
	s.l.c.TxStalls.Add(1)
}

// dropLeft drops what is left of q's batch.
func (s *sender) dropLeft(q *sendQ, left []sendItem) {
	for i := range left {
		s.l.dropFull(q, &left[i])
	}
	q.batch = q.batch[:0]
}

// giveUp drops what is left when the reader ends.
func (s *sender) giveUp() {
	if len(s.held) == 0 {
		return
	}
	for _, q := range s.held {
		s.dropLeft(q, q.batch)
	}
	s.held = s.held[:0]
	s.l.hand.RUnlock()
}

// post posts what fits and drops what can never be; it returns what is left.
func (s *sender) post(q *sendQ, items []sendItem, now int64) []sendItem {
	for len(items) > 0 {
		taken, gone, err := q.post(items, &s.work, now)
		s.l.sent(q, items[:taken])
		items = items[taken:]
		switch {
		case gone:
			for i := range items {
				s.l.dropItem(&items[i])
				s.l.c.TxGone.Add(1)
			}
			return nil
		case err != nil && len(items) > 0:
			s.l.dropItem(&items[0])
			s.l.c.TxPostError.Add(1)
			items = items[1:]
		case taken == 0:
			return items
		}
	}
	return nil
}

// wait sleeps until something completes, at most d.
func (s *sender) wait(d time.Duration) {
	l := s.l
	l.waiting.Store(true)
	if !s.moved() && !l.done() {
		s.timer.Reset(d)
		select {
		case <-l.wake:
		case <-s.timer.C:
		case <-l.stop:
		}
		s.timer.Stop()
	}
	l.waiting.Store(false)
}

// moved reports whether something has completed that the sender waits for.
func (s *sender) moved() bool {
	for _, q := range s.held {
		if q.head.Load() != q.seen {
			return true
		}
	}
	return len(s.held) == 0 && s.l.pool.available() > 0
}

// wakeSender ends the TUN reader's wait, if there is one.
func (l *Loop) wakeSender() {
	if l.waiting.Load() {
		select {
		case l.wake <- struct{}{}:
		default:
		}
	}
}

func (l *Loop) sent(q *sendQ, items []sendItem) {
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

func (l *Loop) dropItem(it *sendItem) {
	if it.path != nil {
		it.path.c.dropped.Add(1)
	}
	l.pool.giveOne(it.slot)
}

func (l *Loop) dropFull(q *sendQ, it *sendItem) {
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

// Send sends one IP packet on p as the TUN reader would, from any goroutine:
// packets that waited for p, or fragments. It does not look at the
// destination cache or the path's MTU, and never waits: ErrFull if the send queue or the buffers are
// used up. A Miss or Drop is ErrClosed.
func (l *Loop) Send(p *Path, packet []byte) error {
	t := ipType(packet)
	if t == 0 {
		l.c.TxMalformed.Add(1)
		return verbs.ErrInvalid
	}
	l.hand.RLock()
	defer l.hand.RUnlock()
	target := p.target.Load()
	switch target.Kind {
	case ToUD:
		return l.sendOne(l.udq, p, target.UD, t, packet)
	case ToConn:
		if toMulticast(t, packet) {
			l.c.TxMulticastConn.Add(1)
			p.c.dropped.Add(1)
			return verbs.ErrInvalid
		}
		return l.sendOne(target.Conn.q, p, UDDest{}, t, packet)
	}
	l.c.TxUnreachable.Add(1)
	p.c.dropped.Add(1)
	return ErrClosed
}

// SendUD sends payload behind a header of type t on the UD QP.
func (l *Loop) SendUD(dst UDDest, t encap.EtherType, payload []byte) error {
	l.hand.RLock()
	defer l.hand.RUnlock()
	return l.sendOne(l.udq, nil, dst, t, payload)
}

func (l *Loop) sendOne(q *sendQ, p *Path, dst UDDest, t encap.EtherType, payload []byte) error {
	if len(payload) > maxPacket {
		return ErrTooBig
	}
	if l.done() {
		return ErrClosed
	}
	var one [1]int32
	if len(l.pool.take(one[:0], 1)) == 0 {
		l.c.TxNoBuffer.Add(1)
		return ErrFull
	}
	items := [1]sendItem{{slot: one[0], n: int32(len(payload) + headerLen), path: p, ud: dst}}
	copy(l.pool.packet(one[0]), payload)
	encap.Put(l.pool.message(one[0], 0), t)
	now := time.Now().UnixNano()
	if p != nil {
		p.c.used.Store(now)
	}
	l.one.Lock()
	taken, gone, err := q.post(items[:], &l.oneWork, now)
	l.one.Unlock()
	switch {
	case taken == 1:
		l.sent(q, items[:])
		return nil
	case gone:
		l.dropItem(&items[0])
		l.c.TxGone.Add(1)
		return ErrClosed
	case err != nil:
		l.dropItem(&items[0])
		l.c.TxPostError.Add(1)
		return fmt.Errorf("post to QP %v: %w", q.qp.QPN(), err)
	}
	l.dropFull(q, &items[0])
	return ErrFull
}

func isFull(err error) bool { return errors.Is(err, verbs.ErrQueueFull) }
