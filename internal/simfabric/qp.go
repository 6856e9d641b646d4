package simfabric

import (
	"maps"
	"slices"
	"time"

	"ipoibcm/counters"
	"ipoibcm/ib"
	"ipoibcm/provider/softroce/engine"
	"ipoibcm/verbs"
	"ipoibcm/wire/roce"
)

// A qp drives one engine.
type qp struct {
	p              *Port
	eng            *engine.QP
	sendCQ, recvCQ *cq
	groups         map[ib.GID]bool
	gone           bool
	scheduled      bool      // run is due at the current time
	due            time.Time // when wake is due; zero means never
	timer          Timer
	pkts           []engine.Packet
}

// CreateQP implements [verbs.Provider].
func (p *Port) CreateQP(init verbs.QPInit) (verbs.QP, error) {
	if p.closed {
		return nil, verbs.ErrClosed
	}
	scq, ok1 := init.SendCQ.(*cq)
	rcq, ok2 := init.RecvCQ.(*cq)
	switch t := init.Transport; {
	case t != ib.RC && t != ib.UC && t != ib.UD, !ok1 || !ok2, max(init.SendDepth, init.RecvDepth) > maxDepth,
		max(init.MaxSendSGE, init.MaxRecvSGE) > engine.MaxSGE:
		return nil, verbs.ErrInvalid
	}
	q := &qp{p: p, sendCQ: scq, recvCQ: rcq, groups: make(map[ib.GID]bool), pkts: make([]engine.Packet, 8)}
	qpn := ib.QPN(0)
	for qpn <= ib.QPNGSI || qpn == ib.QPNMulticast || p.qps[qpn] != nil {
		qpn = ib.QPN(p.f.rnd.Uint32()) & ib.QPNMask
	}
	cfg := engine.Config{QPN: qpn, Transport: init.Transport, SendDepth: init.SendDepth, RecvDepth: init.RecvDepth,
		MaxSendSGE: init.MaxSendSGE, MaxRecvSGE: init.MaxRecvSGE, Memory: (*memory)(p), Sink: q,
		Window: p.opts.Window, MaxUDPayload: p.opts.MaxUDPayload}
	if s, ok := init.SRQ.(*srq); ok {
		cfg.Shared = s
	}
	q.eng = engine.New(cfg)
	p.qps[qpn] = q
	p.order = append(p.order, q)
	return q, nil
}

func (q *qp) QPN() ib.QPN             { return q.eng.QPN() }
func (q *qp) Transport() ib.Transport { return q.eng.Transport() }
func (q *qp) State() verbs.QPState    { return q.eng.State() }

func (q *qp) Modify(attr verbs.QPAttr) error {
	if q.gone {
		return verbs.ErrClosed
	}
	if attr.State == verbs.StateRTR {
		attr.Path = q.p.complete(attr.Path)
	}
	defer q.schedule()
	return q.eng.Modify(&attr, q.p.f.now)
}

func (q *qp) PostSend(wrs []verbs.SendWR) (int, error) {
	if q.gone {
		return 0, verbs.ErrClosed
	}
	defer q.schedule()
	return q.eng.PostSend(wrs, q.p.f.now)
}

func (q *qp) PostRecv(wrs []verbs.RecvWR) (int, error) {
	if q.gone {
		return 0, verbs.ErrClosed
	}
	return q.eng.PostRecv(wrs)
}

func (q *qp) AttachMulticast(mgid ib.GID) error {
	if q.gone {
		return verbs.ErrClosed
	}
	if !mgid.IsMulticast() || q.Transport() != ib.UD {
		return verbs.ErrInvalid
	}
	q.groups[mgid] = true
	return nil
}

func (q *qp) DetachMulticast(mgid ib.GID) error {
	if !q.groups[mgid] {
		return verbs.ErrInvalid
	}
	delete(q.groups, mgid)
	return nil
}

func (q *qp) Destroy() error {
	if q.gone {
		return verbs.ErrClosed
	}
	q.gone = true
	q.timer.Stop()
	q.eng.Close()
	counters.Add(&q.p.count.gone, q.eng.Counters())
	delete(q.p.qps, q.eng.QPN())
	q.p.order = slices.DeleteFunc(q.p.order, func(o *qp) bool { return o == q })
	return nil
}

// SendDone implements [engine.Sink].
func (q *qp) SendDone(wc verbs.WC) { q.sendCQ.add(wc) }

// RecvDone implements [engine.Sink].
func (q *qp) RecvDone(wc verbs.WC) { q.recvCQ.add(wc) }

// Event implements [engine.Sink].
func (q *qp) Event(ev verbs.Event) { q.p.event(ev) }

func (q *qp) input(pkt *roce.Packet, src *engine.Source) {
	q.eng.Receive(pkt, src, q.p.f.now)
	q.schedule()
}

// schedule makes the fabric call run once for all events at the current time. So
// acknowledgements coalesce, as in a provider that receives batches.
func (q *qp) schedule() {
	if !q.scheduled && !q.gone {
		q.scheduled = true
		q.p.f.At(q.p.f.now, func() { q.scheduled = false; q.run() })
	}
}

// run sends the packets that the engine has and sets the timer.
func (q *qp) run() {
	if q.gone {
		return
	}
	for n := q.eng.Output(q.pkts, q.p.f.now); n > 0; n = q.eng.Output(q.pkts, q.p.f.now) {
		for i := range q.pkts[:n] {
			pkt := &q.pkts[i]
			path := q.eng.Path()
			if pkt.AH != nil {
				path = &pkt.AH.(*ah).attr
			}
			b := pkt.Append(nil)
			q.p.send(header(path, q.eng.QPN(), roce.BTH(b).DestQPN()), b)
		}
	}
	if d := q.eng.Deadline(); !d.IsZero() && (q.due.IsZero() || d.Before(q.due)) {
		q.timer.Stop()
		q.due = d
		q.timer = q.p.f.At(d, q.wake)
	}
}

func (q *qp) wake() {
	q.due = time.Time{}
	q.eng.Wake(q.p.f.now)
	q.run()
}

// A cq is a completion queue without a bound.
type cq struct {
	f      *Fabric
	wcs    []verbs.WC
	ready  func()
	told   bool
	closed bool
}

var _ verbs.CallbackCQ = (*cq)(nil)

func (c *cq) add(wc verbs.WC) {
	c.wcs = append(c.wcs, wc)
	if c.ready != nil && !c.told {
		c.told = true
		c.f.At(c.f.now, func() {
			if c.told = false; !c.closed {
				c.ready()
			}
		})
	}
}

func (c *cq) Poll(wcs []verbs.WC) int {
	n := copy(wcs, c.wcs)
	c.wcs = slices.Delete(c.wcs, 0, n)
	return n
}

// Wait does not block, because virtual time would stand still.
func (c *cq) Wait() error {
	if c.closed {
		return verbs.ErrClosed
	}
	return nil
}

func (c *cq) OnReady(f func()) { c.ready = f }

func (c *cq) Destroy() error {
	if c.closed {
		return verbs.ErrClosed
	}
	c.closed = true
	return nil
}

type srq struct {
	*engine.RecvRing
	gone bool
}

func (s *srq) PostRecv(wrs []verbs.RecvWR) (int, error) {
	if s.gone {
		return 0, verbs.ErrClosed
	}
	for i := range wrs {
		if err := s.Post(&wrs[i]); err != nil {
			return i, err
		}
	}
	return len(wrs), nil
}

func (s *srq) Destroy() error {
	s.gone = true
	return nil
}

type ah struct{ attr verbs.AHAttr }

func (a *ah) Attr() verbs.AHAttr { return a.attr }
func (a *ah) Destroy() error     { return nil }

// Groups lists the MGIDs to which QPs of p are attached, in ascending order.
func (p *Port) Groups() []ib.GID {
	set := make(map[ib.GID]bool)
	for _, q := range p.order {
		maps.Copy(set, q.groups)
	}
	return slices.SortedFunc(maps.Keys(set), func(a, b ib.GID) int { return slices.Compare(a[:], b[:]) })
}

// QPs lists the QPNs of the queue pairs that p has, oldest first.
func (p *Port) QPs() []ib.QPN {
	out := make([]ib.QPN, 0, len(p.order))
	for _, q := range p.order {
		out = append(out, q.QPN())
	}
	return out
}
