package softiwarp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync/atomic"
	"time"

	"ipoibcm/mpa"
)

// writeTimeout bounds one write of a startup frame or Terminate: a peer that
// does not read does not hold us.
const writeTimeout = 5 * time.Second

// A Startup settles MPA connections: it drives the machines of package mpa over
// a net.Conn. The zero value is ready to use.
type Startup struct {
	// Options are the options of the machines.
	Options mpa.Options
	// Private is the private data of an initiator's ULP.
	Private []byte
	// Trace gets the octets of the startup frames, out true for those that are sent. The last
	// octets received may end with FPDUs. Nil discards them.
	Trace func(out bool, b []byte)
	// Count gets the machine's counters when the startup frames are done. At a responder it also
	// gets what the machine counts after that, when the fence has ended. Nil discards them.
	Count func(*mpa.Counters)

	terms *atomic.Uint64 // counts the Terminates that streams send by themselves; nil discards them
}

// A RejectError is the error of a request that the peer rejected.
type RejectError struct {
	Result mpa.Result // the peer's IRD, ORD and private data
}

func (e *RejectError) Error() string {
	s := "mpa: the peer rejected"
	if e.Result.Enhanced {
		s += fmt.Sprintf(" (%v)", e.Result.Peer)
	}
	return s
}

// settling is one machine at work.
type settling struct {
	s      *Startup
	ctx    context.Context
	conn   net.Conn
	stop   func() bool // ends the watch on ctx
	step   func([]mpa.Action, time.Time, mpa.Event) []mpa.Action
	when   func() time.Time
	result func() mpa.Result

	dial   func(context.Context) (net.Conn, error)
	decide func(context.Context, mpa.Request) mpa.Event
	r      *mpa.Responder

	stream *Stream
	err    error
	buf    [4096]byte
}

// Connect asks the peer that dial reaches for a connection and returns it once it is
// settled; dial is called again for a fallback. The result is what is known of the peer,
// after a failure too. Errors are [*mpa.Error], [*RejectError], dial's, the cause of ctx,
// or that of sending the RTR indication.
func (s *Startup) Connect(ctx context.Context, dial func(context.Context) (net.Conn, error)) (*Stream,
	mpa.Result, error) {
	m, err := mpa.NewInitiator(s.Options, s.Private)
	if err != nil {
		return nil, mpa.Result{}, err
	}
	defer func() { s.counted(m.Counters()) }()
	n := &settling{s: s, ctx: ctx, step: m.Step, when: m.Deadline, result: m.Result, dial: dial}
	if err := n.redial(); err != nil {
		return nil, mpa.Result{}, err
	}
	return n.run()
}

// Accept answers the request that arrives on conn. decide returns a [mpa.Accept], [mpa.Reject] or
// [mpa.Fail]. It may take its time. Its context ends if the peer closes, or sends octets too early,
// meanwhile. The stream is fenced: see [Stream.Fenced].
func (s *Startup) Accept(ctx context.Context, conn net.Conn,
	decide func(context.Context, mpa.Request) mpa.Event) (*Stream, mpa.Result, error) {
	m, err := mpa.NewResponder(s.Options)
	if err != nil {
		_ = conn.Close()
		return nil, mpa.Result{}, err
	}
	n := &settling{s: s, ctx: ctx, step: m.Step, when: m.Deadline, result: m.Result, decide: decide, r: m}
	n.take(conn)
	st, res, err := n.run()
	s.counted(m.Counters())
	*m.Counters() = mpa.Counters{}
	return st, res, err
}

func (s *Startup) counted(c *mpa.Counters) {
	if s.Count != nil {
		s.Count(c)
	}
}

func (n *settling) redial() error {
	conn, err := n.dial(n.ctx)
	if err != nil {
		return err
	}
	n.take(conn)
	return nil
}

func (n *settling) take(conn net.Conn) {
	n.conn = conn
	n.stop = context.AfterFunc(n.ctx, func() { _ = conn.Close() })
}

// run passes what happens on the connection to the machine, until the machine is done.
func (n *settling) run() (*Stream, mpa.Result, error) {
	n.do(mpa.Start{})
	for n.stream == nil && n.err == nil {
		_ = n.conn.SetReadDeadline(n.when())
		k, err := n.conn.Read(n.buf[:])
		if k > 0 {
			n.trace(false, n.buf[:k])
			n.do(mpa.Recv{Data: n.buf[:k]})
		}
		if n.stream == nil && n.err == nil && err != nil {
			n.lost(err)
		}
	}
	if n.stop != nil {
		n.stop()
	}
	if n.stream != nil {
		_ = n.conn.SetDeadline(time.Time{})
	}
	return n.stream, n.result(), n.err
}

func (n *settling) trace(out bool, b []byte) {
	if n.s.Trace != nil {
		n.s.Trace(out, b)
	}
}

// lost is failed for an error that ends the use of the connection. A machine that has ended already
// ignores the error, as a responder's does that has rejected the request.
func (n *settling) lost(err error) {
	conn := n.conn
	n.failed(err)
	if n.stream == nil && n.err == nil && n.conn == conn && !errors.Is(err, os.ErrDeadlineExceeded) {
		n.err = err
		_ = conn.Close()
	}
}

// failed passes an error of TCP to the machine.
func (n *settling) failed(err error) {
	switch {
	case n.ctx.Err() != nil:
		n.do(mpa.Fail{Detail: "stopped"})
		n.err = context.Cause(n.ctx)
	case errors.Is(err, os.ErrDeadlineExceeded):
		n.do(mpa.Wake{})
	case errors.Is(err, io.EOF):
		n.do(mpa.PeerClosed{Err: errors.New("the peer closed")})
	default:
		n.do(mpa.PeerClosed{Err: err})
	}
}

// do passes ev to the machine and carries out its actions.
func (n *settling) do(ev mpa.Event) {
	for _, act := range n.step(nil, time.Now(), ev) {
		switch act := act.(type) {
		case mpa.Write:
			n.trace(true, act.Data)
			_ = n.conn.SetWriteDeadline(time.Now().Add(writeTimeout))
			if _, err := n.conn.Write(act.Data); err != nil {
				n.lost(fmt.Errorf("send startup frame: %v", err)) // its deadline is not the machine's
				return
			}
		case mpa.Request:
			n.ask(act)
			return // ask has passed the decision to the machine
		case mpa.SendRTR:
			n.open(n.result())
			n.stream.rtr = act.Type
		case mpa.SendTerminate:
			n.open(n.result())
			n.stream.Terminate(mpa.Code(act.Code).Cause())
		case mpa.Accepted:
			n.open(act.Result)
			n.stream.responder, n.stream.s = n.r, n.s
		case mpa.Established:
			if n.stream == nil {
				n.open(act.Result)
			}
			n.stream.Result = act.Result
			if t := n.stream.rtr; t != 0 {
				if err := n.stream.sendRTR(t); err != nil {
					n.stream = nil
					n.err = fmt.Errorf("send RTR indication: %w", err)
					_ = n.conn.Close()
				}
			}
		case mpa.Stream:
			if n.stream != nil {
				n.stream.early = append(n.stream.early, act.Data...)
			}
		case mpa.Rejected:
			n.err = &RejectError{act.Result}
			n.stop()
			_ = n.conn.Close()
		case mpa.Failed:
			if n.err == nil {
				n.err = act.Err
			}
			if n.stream == nil { // a responder that rejected: MPA left TCP open, and nobody needs it
				n.stop()
				linger(n.conn)
			}
			n.stream = nil
		case mpa.Close:
			if n.stream == nil {
				n.stop()
				_ = n.conn.Close()
			}
		case mpa.Redial:
			if err := n.redial(); err != nil {
				n.err = err
				return
			}
			n.do(mpa.Start{})
		}
	}
}

// open makes the stream.
func (n *settling) open(res mpa.Result) {
	n.stream = newStream(n.conn, res)
	n.stream.terms = n.s.terms
}

// ask lets the user decide, and reads from the peer meanwhile. If the peer sends octets before the
// reply, or TCP ends, the decision no longer matters.
func (n *settling) ask(req mpa.Request) {
	ctx, cancel := context.WithCancel(n.ctx)
	defer cancel()
	answer := make(chan mpa.Event, 1)
	_ = n.conn.SetReadDeadline(time.Time{})
	go func() {
		ev := n.decide(ctx, req)
		_ = n.conn.SetReadDeadline(time.Unix(1, 0)) // interrupts Read
		answer <- ev
	}()
	k, err := n.conn.Read(n.buf[:])
	if k > 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
		cancel() // the answer is of no interest any more
	}
	ev := <-answer
	switch {
	case k > 0:
		n.do(mpa.Recv{Data: n.buf[:k]})
	case errors.Is(err, os.ErrDeadlineExceeded):
		n.do(ev)
	default:
		n.failed(err)
	}
}
