package softiwarp

import (
	"context"
	"fmt"
	"net"
	"sync"

	"ipoibcm/ib"
	"ipoibcm/mpa"
	"ipoibcm/verbs"
)

// A qp is a queue pair: states, an engine, and a session while it is connected.
type qp struct {
	dev            *Device
	qpn            ib.QPN
	sendCQ, recvCQ *cq
	srq            *srq
	maxSGE         int

	mu      sync.Mutex
	state   verbs.QPState
	eng     engine
	recvQ   recvQueue
	sess    *session
	settle  *attempt // the attempt to connect, while it runs
	commEst bool
	gone    bool

	// Of the attributes of the step to RTR.
	local, remote ib.GID
	remoteQPN     ib.QPN
	ird           uint8
	maxORD        int // of the step to RTS: bounds the negotiated ORD
}

// An attempt is one try to get a session.
type attempt struct{ cancel context.CancelCauseFunc }

var _ verbs.QP = (*qp)(nil)

// QPN implements [verbs.QP].
func (q *qp) QPN() ib.QPN { return q.qpn }

// Transport implements [verbs.QP].
func (q *qp) Transport() ib.Transport { return ib.RC }

// State implements [verbs.QP].
func (q *qp) State() verbs.QPState {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.state
}

// Modify implements [verbs.QP]. The step to RTR begins to connect to the queue pair DestQPN of the
// Device at DGID, which may be the same Device. Work requests that are posted meanwhile wait. For a
// foreign peer use [Device.Connect] or [Device.Accept] in INIT instead.
func (q *qp) Modify(attr verbs.QPAttr) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	switch {
	case q.gone:
		return verbs.ErrClosed
	case attr.State == verbs.StateReset:
		q.disconnect(nil)
		q.eng.forget()
		q.recvQ.wqes = nil
		q.commEst, q.maxORD = false, maxReads
	case attr.State == verbs.StateError:
		if q.state != verbs.StateError {
			q.state = attr.State
			q.disconnect(nil)
			q.flush(verbs.WRFlushError)
		}
	case attr.State > verbs.StateError:
		return verbs.ErrInvalid
	case attr.State != q.state+1:
		return verbs.ErrState
	case attr.State == verbs.StateInit:
		if !ib.DefaultPKey.Match(attr.PKey) {
			return fmt.Errorf("%w: P_Key %v is not in the table", verbs.ErrInvalid, attr.PKey)
		}
		q.eng.access = attr.Access
	case attr.State == verbs.StateRTR:
		if err := q.rendezvous(&attr); err != nil {
			return err
		}
	case attr.State == verbs.StateRTS:
		q.maxORD = int(attr.MaxRDAtomic)
		q.eng.ord = min(q.eng.ord, q.maxORD)
	}
	q.state = attr.State
	return nil
}

// disconnect ends the session, or the attempt to get one. The lock is held.
func (q *qp) disconnect(why *mpa.TermError) {
	if q.settle != nil {
		q.settle.cancel(verbs.ErrState)
		q.settle = nil
	}
	if q.sess != nil {
		q.sess.end(why)
	}
}

// fail moves q to ERR. The oldest send completes with status, all other requests as flushed. If why
// is not nil the peer gets a Terminate, except from a fenced session, which may not send yet. The
// lock is held.
func (q *qp) fail(status verbs.Status, text string, why *mpa.TermError) {
	if q.state == verbs.StateError {
		return
	}
	q.state = verbs.StateError
	q.disconnect(why)
	q.flush(status)
	q.dev.log.Debug("queue pair failed", "qpn", q.qpn, "status", status, "why", text)
	q.dev.events.Tell(verbs.Event{Kind: verbs.QPFatal, QPN: q.qpn, Status: status, Text: text})
}

// flush completes everything that is outstanding. The lock is held.
func (q *qp) flush(status verbs.Status) {
	q.eng.flush(status)
	for w, ok := q.recvQ.pop(); ok; w, ok = q.recvQ.pop() {
		q.recvCQ.add(verbs.WC{ID: w.id, Status: verbs.WRFlushError, Opcode: verbs.Recv, QPN: q.qpn})
	}
}

func (q *qp) sendDone(wc verbs.WC) {
	wc.QPN = q.qpn
	q.sendCQ.add(wc)
}

func (q *qp) recvDone(wc verbs.WC) {
	wc.QPN = q.qpn
	q.recvCQ.add(wc)
}

func (q *qp) pop() (recvWQE, bool) {
	if q.srq != nil {
		return q.srq.pop()
	}
	return q.recvQ.pop()
}

// PostSend implements [verbs.QP].
func (q *qp) PostSend(wrs []verbs.SendWR) (n int, err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	switch {
	case q.gone:
		return 0, verbs.ErrClosed
	case q.state != verbs.StateRTS && q.state != verbs.StateError:
		return 0, verbs.ErrState
	}
	n, err = postEach(wrs, func(wr *verbs.SendWR) error { return q.eng.post(wr, q.maxSGE) })
	switch {
	case q.state == verbs.StateError:
		q.eng.flush(verbs.WRFlushError)
	case n > 0 && q.sess != nil:
		q.sess.notify()
	}
	return n, err
}

// PostRecv implements [verbs.QP].
func (q *qp) PostRecv(wrs []verbs.RecvWR) (n int, err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	switch {
	case q.gone:
		return 0, verbs.ErrClosed
	case q.srq != nil:
		return 0, verbs.ErrInvalid
	case q.state == verbs.StateReset:
		return 0, verbs.ErrState
	}
	n, err = postEach(wrs, q.recvQ.post)
	switch {
	case q.state == verbs.StateError:
		q.flush(verbs.WRFlushError)
	case q.sess != nil:
		q.sess.posted()
	}
	return n, err
}

// AttachMulticast implements [verbs.QP].
func (q *qp) AttachMulticast(ib.GID) error { return verbs.ErrInvalid }

// DetachMulticast implements [verbs.QP].
func (q *qp) DetachMulticast(ib.GID) error { return verbs.ErrInvalid }

// Destroy implements [verbs.QP]. What TCP has taken still arrives.
func (q *qp) Destroy() error {
	q.mu.Lock()
	if q.gone {
		q.mu.Unlock()
		return verbs.ErrClosed
	}
	q.gone = true
	q.disconnect(nil)
	q.eng.forget()
	q.recvQ.wqes = nil
	q.mu.Unlock()
	q.dev.forgetQP(q)
	return nil
}

// Connect settles a connection with a foreign peer for a queue pair of d in INIT, and moves it to
// RTS. See [Startup.Connect].
func (d *Device) Connect(ctx context.Context, v verbs.QP, s Startup,
	dial func(context.Context) (net.Conn, error)) (mpa.Result, error) {
	return d.meet(ctx, v, &s, func(ctx context.Context) (*Stream, mpa.Result, error) { return s.Connect(ctx, dial) }, true)
}

// Accept answers a foreign peer for a queue pair of d in INIT, and moves it to RTS. It closes conn if
// it fails. See [Startup.Accept].
func (d *Device) Accept(ctx context.Context, v verbs.QP, s Startup, conn net.Conn,
	decide func(context.Context, mpa.Request) mpa.Event) (mpa.Result, error) {
	taken := false // s closes conn
	res, err := d.meet(ctx, v, &s, func(ctx context.Context) (*Stream, mpa.Result, error) {
		taken = true
		return s.Accept(ctx, conn, decide)
	}, false)
	if !taken {
		_ = conn.Close()
	}
	return res, err
}

func (d *Device) meet(ctx context.Context, v verbs.QP, s *Startup,
	f func(context.Context) (*Stream, mpa.Result, error), initiator bool) (mpa.Result, error) {
	q, ok := v.(*qp)
	if !ok || q.dev != d {
		return mpa.Result{}, fmt.Errorf("%w: the queue pair is not of this device", verbs.ErrInvalid)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	q.mu.Lock()
	if q.gone || q.state != verbs.StateInit || q.settle != nil {
		q.mu.Unlock()
		return mpa.Result{}, verbs.ErrState
	}
	try := &attempt{cancel}
	q.settle = try
	q.mu.Unlock()
	s.Count, s.terms = d.counted(s.Count), &d.count.termsOut
	st, res, err := f(ctx)
	q.mu.Lock()
	defer q.mu.Unlock()
	mine := q.endAttempt(try)
	switch {
	case err != nil:
		return res, err
	case !mine: // Modify or Destroy came first
		d.wg.Go(st.Close)
		return res, verbs.ErrState
	}
	q.state = verbs.StateRTS
	q.attach(st, initiator)
	return res, nil
}
