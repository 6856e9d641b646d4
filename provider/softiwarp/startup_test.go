package softiwarp

import (
	"context"
	"errors"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"ipoibcm/internal/expect"
	"ipoibcm/mpa"
)

// settle runs both ends over TCP.
func settle(t *testing.T, i Startup, r mpa.Options, decide func(context.Context, mpa.Request) mpa.Event) (a,
	b *Stream, ares, bres mpa.Result, aerr, berr error) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for { // a fallback comes again
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			b, bres, berr = (&Startup{Options: r}).Accept(context.Background(), conn, decide)
		}
	}()
	a, ares, aerr = i.Connect(context.Background(), func(ctx context.Context) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "tcp", ln.Addr().String())
	})
	_ = ln.Close()
	<-done
	for _, s := range []*Stream{a, b} {
		if s != nil {
			t.Cleanup(func() { _ = s.conn.Close() })
		}
	}
	return a, b, ares, bres, aerr, berr
}

func yes(context.Context, mpa.Request) mpa.Event { return mpa.Accept{Private: []byte("yes")} }

func TestStartup(t *testing.T) {
	var trace []string
	s := Startup{Options: p2pOptions, Private: []byte("hello"), Trace: func(out bool, b []byte) {
		dir := "<"
		if out {
			dir = ">"
		}
		trace = append(trace, dir+string(b[7:10]))
	}}
	a, b, ares, bres, aerr, berr := settle(t, s, mpa.Options{Depths: mpa.Depths{IRD: 8, ORD: 2}}, yes)
	if aerr != nil || berr != nil {
		t.Fatal(aerr, berr)
	}
	expect.Equal(t, string(ares.Private), "yes", "Private")
	expect.Equal(t, string(bres.Private), "hello", "Private")
	expect.Equal(t, ares.ORD, 4, "ORD")
	expect.Equal(t, bres.IRD, 8, "IRD")
	expect.Equal(t, bres.ORD, 2, "ORD")
	expect.Equal(t, strings.Join(trace, " "), ">Req <Rep", "trace")
	expect.Equal(t, b.Fenced(), true, "Fenced of b")
	expect.Equal(t, a.Fenced(), false, "Fenced of a")
	if err := b.Write(&mpa.Segment{Opcode: mpa.OpSend, Last: true, MSN: 1}); !errors.Is(err, ErrFenced) {
		t.Errorf("sent through the fence: %v", err)
	}
	switch seg, rtr, err := b.Read(); {
	case err != nil:
		t.Errorf("err is %v, want nil", err)
	case !rtr:
		t.Errorf("rtr is false")
	case seg.RTR() == 0:
		t.Errorf("the first segment is no RTR message, want one")
	case b.Fenced():
		t.Errorf("Fenced is true, want false")
	case b.Result.RTR != ares.RTR:
		t.Errorf("Result.RTR is %v, want %v", b.Result.RTR, ares.RTR)
	}
	if err := b.Write(&mpa.Segment{Opcode: mpa.OpSend, Last: true, MSN: 1, Payload: []byte("x")}); err != nil {
		t.Error(err)
	}
	switch seg, rtr, err := a.Read(); {
	case err != nil:
		t.Errorf("err is %v, want nil", err)
	case rtr:
		t.Errorf("rtr is true")
	case string(seg.Payload) != "x":
		t.Errorf("Payload is %q, want \"x\"", string(seg.Payload))
	}
}

// TestRejectedThenAgain: the initiator learns what is missing and tries again with
// that. 6581-9.1-10, 6581-9.1-16
func TestRejectedThenAgain(t *testing.T) {
	r := mpa.Options{Depths: mpa.Depths{MinORD: 16}}
	_, _, _, _, err, berr := settle(t, Startup{Options: p2pOptions}, r, yes)
	var rej *RejectError
	var fault *mpa.Error
	expect.MustEqual(t, errors.As(err, &rej), true, "As(err, &rej)")
	expect.MustEqual(t, rej.Result.Peer.ORD, 16, "Result.Peer.ORD")
	expect.MustEqual(t, errors.As(berr, &fault), true, "As(berr, &fault)")
	expect.MustEqual(t, fault.Reason, mpa.ReasonNeedORD, "Reason")
	again := p2pOptions
	again.IRD = rej.Result.Peer.ORD
	switch _, _, res, _, err, berr := settle(t, Startup{Options: again}, r, yes); {
	case err != nil:
		t.Errorf("err is %v, want nil", err)
	case berr != nil:
		t.Errorf("berr is %v, want nil", berr)
	case res.IRD != 16:
		t.Errorf("IRD is %v, want 16", res.IRD)
	}
	_, _, _, _, err, berr = settle(t, Startup{Options: p2pOptions}, mpa.Options{},
		func(context.Context, mpa.Request) mpa.Event { return mpa.Reject{Private: []byte("no")} })
	switch {
	case !errors.As(err, &rej):
		t.Errorf("As(err, &rej) is false, want true")
	case string(rej.Result.Private) != "no":
		t.Errorf("Result.Private is %q, want \"no\"", string(rej.Result.Private))
	case berr == nil:
		t.Errorf("berr is nil")
	}
}

// TestFallback: a responder of revision 1 closes; the initiator tries again
// without, if it may. 6581-10-8, 6581-10-9
func TestFallback(t *testing.T) {
	old := mpa.Options{Revision: 1}
	if _, _, _, _, err, berr := settle(t, Startup{Options: p2pOptions}, old, yes); err == nil || berr == nil {
		t.Errorf("connected without Fallback: %v, %v", err, berr)
	}
	o := p2pOptions
	o.Fallback = true
	switch _, b, res, _, err, berr := settle(t, Startup{Options: o}, old, yes); {
	case err != nil:
		t.Errorf("%+v: err is %v, want nil", res, err)
	case berr != nil:
		t.Errorf("%+v: berr is %v, want nil", res, berr)
	case !res.Fallback:
		t.Errorf("%+v: Fallback is false, want true", res)
	case res.Enhanced:
		t.Errorf("%+v: Enhanced is true, want false", res)
	case b == nil:
		t.Errorf("%+v: b is nil", res)
	}
}

// TestEarlyOctets: what comes before the reply ends the matter, even while the
// user thinks; so does the peer's end.
func TestEarlyOctets(t *testing.T) {
	for _, ends := range []bool{false, true} {
		a, b := tcpPair(t)
		asked, left := make(chan struct{}), make(chan struct{})
		go func() {
			p := &peer{t: t, conn: b}
			p.say(p2pRequest)
			<-asked
			if ends {
				_ = b.Close()
			} else {
				p.write([]byte{0})
			}
		}()
		_, _, err := (&Startup{}).Accept(context.Background(), a, func(ctx context.Context, _ mpa.Request) mpa.Event {
			close(asked)
			<-ctx.Done()
			close(left)
			return mpa.Accept{}
		})
		<-left
		want := mpa.ReasonEarlyData
		if ends {
			want = mpa.ReasonClosed
		}
		var e *mpa.Error
		if !errors.As(err, &e) || e.Reason != want {
			t.Errorf("%v, want %v", err, want)
		}
	}
}

// TestSlowPeers: a peer that drips, or says nothing, is waited for no longer than
// Timeout; a context ends the wait too.
func TestSlowPeers(t *testing.T) {
	a, b := tcpPair(t)
	stop := make(chan struct{})
	defer close(stop)
	go func() {
		for _, c := range []byte("MPA ID Req Frame") {
			select {
			case <-stop:
				return
			case <-time.After(30 * time.Millisecond): // over a real socket: Timeout passes by the real clock
			}
			if _, err := b.Write([]byte{c}); err != nil {
				return
			}
		}
	}()
	counted := mpa.Counters{}
	s := Startup{Options: mpa.Options{Timeout: 150 * time.Millisecond}, Count: func(c *mpa.Counters) { counted = *c }}
	var e *mpa.Error
	switch _, _, err := s.Accept(context.Background(), a, yes); {
	case !errors.As(err, &e):
		t.Errorf("As(err, &e) is false, want true")
	case e.Reason != mpa.ReasonTimeout:
		t.Errorf("Reason is %v, want %v", e.Reason, mpa.ReasonTimeout)
	case counted[mpa.ReasonTimeout] != 1:
		t.Errorf("counted[mpa.ReasonTimeout] is %v, want 1", counted[mpa.ReasonTimeout])
	}
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	a, _ = tcpPair(t)
	if _, _, err := (&Startup{}).Connect(ctx, func(context.Context) (net.Conn, error) {
		return a,
			nil
	}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v", err)
	}
	// Refused by TCP.
	broken := errors.New("no way")
	if _, _, err := (&Startup{}).Connect(context.Background(),
		func(context.Context) (net.Conn, error) { return nil, broken }); !errors.Is(err, broken) {
		t.Errorf("%v", err)
	}
}

// TestFenceOutlivesDeadline: a deadline that the user sets ends a Read, and not
// the fence. 6581-3-2
func TestFenceOutlivesDeadline(t *testing.T) {
	a, b, _, _, aerr, berr := settle(t, Startup{}, mpa.Options{}, yes)
	if aerr != nil || berr != nil {
		t.Fatal(aerr, berr)
	}
	defer time.AfterFunc(patience, func() { _ = b.Conn().Close() }).Stop()
	_ = b.Conn().SetReadDeadline(time.Now().Add(20 * time.Millisecond))
	if _, _, err := b.Read(); !errors.Is(err, os.ErrDeadlineExceeded) || !b.Fenced() {
		t.Fatalf("%v, fenced %v", err, b.Fenced())
	}
	seg := &mpa.Segment{Opcode: mpa.OpSend, Last: true, MSN: 1}
	if err := b.Write(seg); !errors.Is(err, ErrFenced) {
		t.Errorf("sent through the fence: %v", err)
	}
	_ = b.Conn().SetReadDeadline(time.Time{})
	if err := a.Write(seg); err != nil {
		t.Fatal(err)
	}
	switch _, rtr, err := b.Read(); {
	case err != nil:
		t.Errorf("err is %v, want nil", err)
	case rtr:
		t.Errorf("rtr is true")
	case b.Fenced():
		t.Errorf("Fenced is true, want false")
	}
}

// TestOverPipe: any net.Conn will do.
func TestOverPipe(t *testing.T) {
	a, b := net.Pipe()
	type end struct {
		s   *Stream
		err error
	}
	done := make(chan end, 1)
	go func() {
		s, _, err := (&Startup{}).Accept(context.Background(), b, yes)
		if err == nil {
			_, _, err = s.Read()
		}
		done <- end{s, err}
	}()
	s, res, err := (&Startup{Options: p2pOptions}).
		Connect(context.Background(), func(context.Context) (net.Conn, error) { return a, nil })
	if err != nil || res.RTR == 0 {
		t.Fatal(res, err)
	}
	got := <-done
	if got.err != nil {
		t.Fatal(got.err)
	}
	go got.s.Close()
	s.Close()
}

// A refusal that cannot be sent ends the attempt: the machine has ended and takes no notice of errors.
func TestRefusalIsNotSent(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	a, b := net.Pipe()
	go func() {
		_, _, _ = (&Startup{Options: p2pOptions}).
			Connect(ctx, func(context.Context) (net.Conn, error) { return a, nil })
	}()
	_, _, err := (&Startup{}).Accept(ctx, mute{b}, func(context.Context, mpa.Request) mpa.Event { return mpa.Reject{} })
	if ctx.Err() != nil || err == nil {
		t.Errorf("after %v: %v", ctx.Err(), err)
	}
}

// A mute connection is reset by the first Write.
type mute struct{ net.Conn }

func (m mute) Write([]byte) (int, error) {
	_ = m.Close()
	return 0, syscall.ECONNRESET
}

// TestCloseIsBounded: a stream ends within a second or so, whatever deadline a reader sets meanwhile, and
// whether the peer closes or not.
func TestCloseIsBounded(t *testing.T) {
	a, b := tcpPair(t)
	defer time.AfterFunc(patience, func() { _ = b.Close() }).Stop()
	newStream(undue{a.(*net.TCPConn)}, mpa.Result{}).Close()
	if _, err := a.Write([]byte{0}); !errors.Is(err, net.ErrClosed) {
		t.Errorf("a write after Close: %v, want %v", err, net.ErrClosed)
	}
	if _, err := b.Write([]byte{0}); err != nil {
		t.Errorf("Close has waited until the peer closed: %v", err)
	}
}

// An undue connection has no read deadline: another goroutine clears it at once.
type undue struct{ *net.TCPConn }

func (undue) SetReadDeadline(time.Time) error { return nil }
