package softroce

import (
	"fmt"
	"sync"
	"time"

	"ipoibcm/ib"
	"ipoibcm/provider/softroce/engine"
	"ipoibcm/verbs"
)

const (
	// udOutput is how many packets of a UD queue pair leave per round.
	udOutput = 32
	// waitsLook is how long the timer of a queue pair is put off while the queue pair waits
	// for room in a socket.
	waitsLook = 10 * time.Millisecond
)

// A qp is a queue pair: an engine machine, its lock, and the path its packets
// take.
type qp struct {
	dev            *Device
	th             *thread
	qpn            ib.QPN
	transport      ib.Transport
	sendCQ, recvCQ *cq

	mu      sync.Mutex
	eng     *engine.QP
	path    *path           // RC and UC, from RTR on
	udPkts  []engine.Packet // UD: room for Output
	timerAt time.Time       // when timer is due; zero: it is in no heap
	timer   timerEntry      // under the lock of th.timers
	waits   bool            // it waits for room in a socket
	gone    bool
}

var (
	_ verbs.QP    = (*qp)(nil)
	_ engine.Sink = (*qp)(nil)
)

// SendDone implements [engine.Sink].
func (q *qp) SendDone(wc verbs.WC) { q.sendCQ.add(wc) }

// RecvDone implements [engine.Sink].
func (q *qp) RecvDone(wc verbs.WC) { q.recvCQ.add(wc) }

// Event implements [engine.Sink].
func (q *qp) Event(ev verbs.Event) { q.dev.events.Tell(ev) }

// QPN implements [verbs.QP].
func (q *qp) QPN() ib.QPN { return q.qpn }

// Transport implements [verbs.QP].
func (q *qp) Transport() ib.Transport { return q.transport }

// State implements [verbs.QP].
func (q *qp) State() verbs.QPState {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.eng.State()
}

// Health implements [verbs.Monitored].
func (q *qp) Health() (verbs.Health, bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.eng.Health()
}

var _ verbs.Monitored = (*qp)(nil)

// Modify implements [verbs.QP].
func (q *qp) Modify(attr verbs.QPAttr) error {
	q.mu.Lock()
	err := q.modify(attr)
	q.mu.Unlock()
	q.notify()
	return err
}

func (q *qp) modify(attr verbs.QPAttr) error {
	if q.gone {
		return verbs.ErrClosed
	}
	switch {
	case attr.State == verbs.StateInit && !q.dev.matchPKey(attr.PKey):
		return fmt.Errorf("%w: P_Key %v is not in the table", verbs.ErrInvalid, attr.PKey)
	case attr.State == verbs.StateRTR && q.transport != ib.UD:
		p, err := q.th.newPath(attr.Path, false, q.qpn, attr.DestQPN)
		if err != nil {
			return err
		}
		p.overRoute()
		attr.Path = p.attr
		if err := q.eng.Modify(&attr, time.Now()); err != nil {
			return err
		}
		q.path = p
		return nil
	}
	now := time.Now()
	err := q.eng.Modify(&attr, now)
	q.flush(now)
	return err
}

// PostSend implements [verbs.QP]. What the window allows leaves on the caller's
// goroutine.
func (q *qp) PostSend(wrs []verbs.SendWR) (int, error) {
	now := time.Now()
	q.mu.Lock()
	if q.gone {
		q.mu.Unlock()
		return 0, verbs.ErrClosed
	}
	n, err := q.eng.PostSend(wrs, now)
	q.flush(now)
	q.mu.Unlock()
	q.notify()
	return n, err
}

// PostRecv implements [verbs.QP].
func (q *qp) PostRecv(wrs []verbs.RecvWR) (int, error) {
	q.mu.Lock()
	if q.gone {
		q.mu.Unlock()
		return 0, verbs.ErrClosed
	}
	n, err := q.eng.PostRecv(wrs)
	q.mu.Unlock()
	q.notify() // in ERR they are flushed
	return n, err
}

// AttachMulticast implements [verbs.QP].
func (q *qp) AttachMulticast(mgid ib.GID) error {
	if q.transport != ib.UD {
		return verbs.ErrInvalid
	}
	return q.dev.groups.attach(mgid, q)
}

// DetachMulticast implements [verbs.QP].
func (q *qp) DetachMulticast(mgid ib.GID) error {
	if q.transport != ib.UD {
		return verbs.ErrInvalid
	}
	return q.dev.groups.detach(mgid, q)
}

// Destroy implements [verbs.QP]. While it holds the lock no packet of q is being sent or
// taken in, and once the machine is closed none will be.
func (q *qp) Destroy() error {
	q.mu.Lock()
	if q.gone {
		q.mu.Unlock()
		return verbs.ErrClosed
	}
	q.gone = true
	q.dev.retire(q)
	q.eng.Close()
	q.mu.Unlock()
	if q.transport == ib.UD {
		q.dev.groups.detachAll(q)
	}
	q.dev.qps.remove(q)
	return nil
}

// flush sends what the engine has to send and arms the timer of q. The caller holds
// q.mu.
func (q *qp) flush(now time.Time) {
	switch {
	case q.transport == ib.UD:
		q.flushUD(now)
	case q.path != nil:
		q.flushPath(now)
	}
	q.th.timers.arm(q)
}

// flushPath sends until the engine has nothing more, or the socket has no room. In the
// second case q waits for room, and the engine keeps the rest.
func (q *qp) flushPath(now time.Time) {
	s, sc := q.path.sender, q.th.scratch.get()
	s.mu.Lock()
	q.path.setCapable(q.eng.SendsECT())
	for {
		if b := s.backlogOf(q.path); b.full {
			b.wait(q)
			break
		}
		group := s.batches(q.path) && q.eng.MayGroup()
		n := q.eng.Output(sc.pkts[:], now)
		if n == 0 {
			break
		}
		if group {
			engine.Group(sc.pkts[:n], sc.last[:])
		}
		s.send(sc, q.path, sc.pkts[:n])
	}
	s.mu.Unlock()
	q.th.scratch.put(sc)
}

// flushUD sends the datagrams, in runs of those with the same address handle.
func (q *qp) flushUD(now time.Time) {
	for {
		n := q.eng.Output(q.udPkts, now)
		if n == 0 {
			return
		}
		for pkts := q.udPkts[:n]; len(pkts) > 0; {
			a, ok := pkts[0].AH.(*ah)
			run := 1
			for run < len(pkts) && pkts[run].AH == pkts[0].AH {
				run++
			}
			if ok {
				a.path.sendUD(pkts[:run])
			} else {
				q.dev.count.txErrors.Add(uint64(run)) // another provider's handle
			}
			pkts = pkts[run:]
		}
	}
}

// expire is called by the timers when an entry of q, for the time at, is due. It does
// nothing if a newer entry has replaced that one.
func (q *qp) expire(at, now time.Time) {
	q.mu.Lock()
	if q.gone || !at.Equal(q.timerAt) {
		q.mu.Unlock()
		return
	}
	q.timerAt = time.Time{}
	if d := q.eng.Deadline(); q.waits && !d.IsZero() {
		q.th.timers.add(q, now.Add(waitsLook)) // what cannot leave cannot be answered
	} else if !d.IsZero() && !now.Before(d) {
		q.eng.Wake(now)
		q.flush(now)
	} else {
		q.th.timers.arm(q)
	}
	q.mu.Unlock()
	q.notify()
}

// notify notifies the users of the completion queues. The caller holds no lock.
func (q *qp) notify() {
	q.sendCQ.notify(false)
	if q.recvCQ != q.sendCQ {
		q.recvCQ.notify(false)
	}
}
