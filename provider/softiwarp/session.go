package softiwarp

import (
	"errors"
	"fmt"
	"io"
	"time"

	"ipoibcm/mpa"
	"ipoibcm/verbs"
)

// batchLen is about how many octets of FPDUs go to TCP at a time.
const batchLen = 1 << 17

// A session is a queue pair's stream with the two goroutines that serve it. Once end has detached
// it from the queue pair, it lasts only until write has sent the Terminate, if any, and closed the
// stream.
type session struct {
	q  *qp
	st *Stream

	wake chan struct{} // there may be something to send; holds at most one
	recv chan struct{} // a receive was posted; holds at most one
	done chan struct{} // closed under q.mu when end detaches the session

	// Under q.mu.
	fenced  bool
	over    bool           // done is closed
	goodbye *mpa.TermError // for the Terminate that write sends last; nil for none
}

// attach gives a settled stream to q, whose lock is held.
func (q *qp) attach(st *Stream, initiator bool) {
	s := &session{q: q, st: st, wake: make(chan struct{}, 1), recv: make(chan struct{}, 1),
		done: make(chan struct{}), fenced: st.Fenced()}
	q.sess = s
	q.eng.begin(&st.Result, st.MULPDU(), initiator)
	q.eng.ord = min(q.eng.ord, q.maxORD)
	q.dev.rememberStream(st)
	q.dev.wg.Go(s.read)
	q.dev.wg.Go(s.write)
}

// posted notifies the reader that a receive was posted.
func (s *session) posted() {
	nudge(s.recv)
}

// notify wakes the writer.
func (s *session) notify() {
	nudge(s.wake)
}

// nudge sends to a channel that holds one, unless that one is pending already.
func nudge(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// end detaches the session from its queue pair. If why is not nil and the session is not fenced,
// write sends the peer a Terminate with that cause. The lock is held.
func (s *session) end(why *mpa.TermError) {
	if s.over {
		return
	}
	s.over, s.q.sess = true, nil
	if !s.fenced {
		s.goodbye = why
	}
	close(s.done)
	_ = s.st.conn.SetReadDeadline(time.Unix(1, 0)) // the reader ends
}

// write sends the output of the engine. When the session is over, it sends the Terminate, if any,
// and closes the stream.
func (s *session) write() {
	q := s.q
	var buf []byte
	for {
		q.mu.Lock()
		if s.over {
			break
		}
		buf = buf[:0]
		if !s.fenced {
			if q.eng.stuck() {
				q.fail(verbs.LocalQPOpError, "RDMA READ, and no Reads were agreed on", nil)
				break
			}
			buf = q.eng.output(&s.st.out, buf, batchLen)
			if e := q.eng.term; e != nil { // found while sending
				q.dev.countTerm(e.Cause)
				q.dev.count.termsOut.Add(1) // it is in buf
				q.fail(verbs.GeneralError, e.Error(), nil)
			}
		}
		q.mu.Unlock()
		if len(buf) == 0 {
			select {
			case <-s.wake:
			case <-s.done:
			}
			continue
		}
		err := s.send(buf)
		q.mu.Lock()
		if err != nil && !s.over {
			q.fail(verbs.RetryExceeded, fmt.Sprintf("send: %v", err), nil)
		}
		if !s.over {
			q.eng.written()
		}
		q.mu.Unlock()
	}
	bye := s.goodbye
	q.mu.Unlock()
	if bye != nil {
		q.dev.count.termsOut.Add(1)
		_ = s.send(s.st.out.Append(buf[:0], mpa.AppendTerminate(nil, bye.Cause), nil))
	}
	s.st.Close()
	q.dev.forgetStream(s.st)
}

func (s *session) send(b []byte) error {
	_ = s.st.conn.SetWriteDeadline(time.Now().Add(s.q.dev.opts.sendTimeout()))
	_, err := s.st.conn.Write(b)
	if err == nil {
		s.q.dev.count.txOctets.Add(uint64(len(b)))
	}
	return err
}

// read passes the segments of the peer to the engine.
func (s *session) read() {
	q := s.q
	for {
		seg, rtr, err := s.st.Read()
		q.mu.Lock()
		if err == nil && !s.over {
			err = s.take(&seg, rtr)
		}
		if err != nil && !s.over {
			s.failed(err)
		}
		ended := err != nil || s.over
		q.mu.Unlock()
		if ended {
			return
		}
	}
}

// take passes one segment to the engine. It holds a Send that finds no receive for RecvTimeout at
// most. Meanwhile nobody reads what follows the Send, so the peer's TCP has to wait. The lock is
// held; take releases it while it waits.
func (s *session) take(seg *mpa.Segment, rtr bool) error {
	q := s.q
	q.dev.count.rxSegments.Add(1)
	if s.fenced {
		s.fenced = false
		s.notify()
	}
	if q.state == verbs.StateRTR && !q.commEst {
		q.commEst = true
		q.dev.events.Tell(verbs.Event{Kind: verbs.CommEst, QPN: q.qpn})
	}
	if rtr {
		q.eng.rtr(seg)
		s.notify()
		return nil
	}
	err := q.eng.receive(seg)
	if errors.Is(err, errNoReceive) {
		err = s.wait(seg)
	}
	if err == nil && q.eng.busy() {
		s.notify() // a response to send, or a Read that made room
	}
	return err
}

// wait holds a Send until a receive is posted, for RecvTimeout at most.
func (s *session) wait(seg *mpa.Segment) error {
	q := s.q
	q.dev.count.recvWaits.Add(1)
	timer := time.NewTimer(q.dev.opts.recvTimeout())
	defer timer.Stop()
	if q.srq != nil {
		q.srq.watch(s, true)
		defer q.srq.watch(s, false)
	}
	for {
		err := q.eng.receive(seg) // a receive may have been posted before we watched
		if !errors.Is(err, errNoReceive) {
			return err
		}
		q.mu.Unlock()
		late := false
		select {
		case <-s.recv:
		case <-s.done:
		case <-timer.C:
			late = true
		}
		q.mu.Lock()
		switch {
		case s.over:
			return nil
		case late:
			q.dev.count.recvTimeouts.Add(1)
			return terminate(mpa.DDPNoBuffer, "no receive in %v", q.dev.opts.recvTimeout())
		}
	}
}

// failed ends the use of the stream after a fault. The lock is held.
func (s *session) failed(err error) {
	q := s.q
	var mpaErr *mpa.Error
	var term *mpa.TermError
	var peer *errTerminated
	switch {
	case errors.As(err, &mpaErr):
		if !s.fenced { // else the stream has counted it
			q.dev.countReason(mpaErr.Reason)
		}
		var t *mpa.TermError
		if mpaErr.Reason.Outcome() == mpa.Terminate && mpaErr.Reason != mpa.ReasonNotRTR { // the stream sent it
			t = terminate(mpaErr.Code().Cause(), "%s", mpaErr.Detail)
		}
		q.fail(verbs.GeneralError, err.Error(), t)
	case errors.As(err, &term):
		q.dev.countTerm(term.Cause)
		s.fenced = false // the fault came in an FPDU: a Terminate may be sent
		q.fail(statusOf(term.Cause, true), err.Error(), term)
	case errors.As(err, &peer):
		q.dev.count.termsIn.Add(1)
		q.fail(statusOf(peer.cause, false), err.Error(), nil)
	case errors.Is(err, io.EOF):
		q.dev.count.closes.Add(1)
		q.fail(verbs.WRFlushError, "the peer closed", nil)
	default:
		q.dev.count.lost.Add(1)
		q.fail(verbs.RetryExceeded, err.Error(), nil)
	}
}

// statusOf returns the status of the oldest send after a Terminate. local means that we sent the
// Terminate. Then no work request of ours is to blame.
func statusOf(c mpa.Cause, local bool) verbs.Status {
	switch {
	case local:
		return verbs.WRFlushError
	case c.Access() || c == mpa.RDMAPInvalidate:
		return verbs.RemoteAccess
	case c == mpa.DDPNoBuffer:
		return verbs.RNRExceeded
	case c == mpa.DDPTooLong:
		return verbs.RemoteInvReq
	}
	return verbs.RemoteOpError
}
