package softroce

import (
	"encoding/binary"
	"errors"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"ipoibcm/ib"
	"ipoibcm/verbs"
	"ipoibcm/wire/roce"
)

// A counterFD is an eventfd, and a step that reads it.
type counterFD struct {
	fd    int
	sum   atomic.Uint64 // of what was read
	calls atomic.Int64
	wait  atomic.Int64 // what step asks for, in nanoseconds
	then  func()       // called by a step that read something
}

func newCounterFD(t *testing.T) *counterFD {
	fd, err := unix.Eventfd(0, unix.EFD_NONBLOCK|unix.EFD_CLOEXEC)
	must(t, err)
	t.Cleanup(func() { unix.Close(fd) })
	return &counterFD{fd: fd, then: func() {}}
}

func (c *counterFD) add(n uint64) {
	b := binary.NativeEndian.AppendUint64(nil, n)
	unix.Write(c.fd, b)
}

func (c *counterFD) step() (bool, time.Duration) {
	c.calls.Add(1)
	var b [8]byte
	if n, _ := unix.Read(c.fd, b[:]); n == 8 {
		c.sum.Add(binary.NativeEndian.Uint64(b[:]))
		c.then()
		return true, 0
	}
	return false, time.Duration(c.wait.Load())
}

func TestPollFD(t *testing.T) {
	a, b := vethPair(t, 9000, false, nil)
	x, y := newEnd(t, a, ib.RC, 16, 4096), newEnd(t, b, ib.RC, 16, 4096)
	connect(x, y)
	c := newCounterFD(t)
	stop, err := a.PollFD(c.fd, c.step)
	must(t, err)
	if _, err := a.PollFD(c.fd, c.step); !errors.Is(err, verbs.ErrQueueFull) {
		t.Errorf("a second descriptor: %v", err)
	}
	c.add(5)
	until(t, "a step for the descriptor", func() bool { return c.sum.Load() == 5 })
	var idle int64
	until(t, "no step while there is nothing to do", func() bool { // the last one may be late
		idle = c.calls.Load()
		time.Sleep(50 * time.Millisecond) // to wake it for a look would have it step
		return c.calls.Load() == idle
	})

	// Packets are followed by a step.
	_, err = x.qp.PostRecv([]verbs.RecvWR{{ID: 1, SG: x.sge(0, 4096)}})
	must(t, err)
	_, err = y.qp.PostSend([]verbs.SendWR{{ID: 2, Opcode: verbs.Send, Flags: verbs.Signaled, SG: y.sge(0, 100)}})
	must(t, err)
	x.next()
	until(t, "a step after packets", func() bool { return c.calls.Load() > idle })

	stop()
	c.add(1)
	wholeTurn(t, a)
	if got := c.sum.Load(); got != 5 {
		t.Errorf("a step after stop: sum %d", got)
	}
	stop2, err := a.PollFD(c.fd, c.step) // free again
	must(t, err)
	until(t, "a step for what was there before", func() bool { return c.sum.Load() == 6 })
	must(t, a.Close()) // ends it
	stop2()
	if _, err := a.PollFD(c.fd, c.step); !errors.Is(err, verbs.ErrClosed) {
		t.Errorf("PollFD after Close: %v", err)
	}
}

// While a step waits its descriptor is not watched, and the time is kept.
func TestPollFDWaits(t *testing.T) {
	a, _ := vethPair(t, 9000, false, nil)
	c := newCounterFD(t)
	full := atomic.Bool{}
	full.Store(true)
	step := func() (bool, time.Duration) {
		if full.Load() {
			c.calls.Add(1)
			return false, 20 * time.Millisecond
		}
		return c.step()
	}
	begin := time.Now()
	stop, err := a.PollFD(c.fd, step)
	must(t, err)
	defer stop()
	c.add(7)
	until(t, "steps that come again", func() bool { return c.calls.Load() >= 8 })
	n, took := c.calls.Load(), time.Since(begin)
	// One at once, one for the descriptor, and one for each packet that the kernel sends
	// by itself on a new link; without the wait there would be thousands.
	if most := 2*int64(took/(20*time.Millisecond)) + 8; n > most {
		t.Errorf("%d steps in %v, each of which asks for 20 ms: want at most %d", n, took, most)
	}
	if c.sum.Load() != 0 {
		t.Error("read too early")
	}
	full.Store(false)
	until(t, "the step after the wait", func() bool { return c.sum.Load() == 7 })
}

// A step's own completions reach their handler when it has ended, on no other
// goroutine.
func TestPollFDCompletions(t *testing.T) {
	a, b := vethPair(t, 9000, false, nil)
	y := newEnd(t, b, ib.UD, 16, 4096)
	got, err := a.CreateCQ(16)
	must(t, err)
	var stepping, inside atomic.Bool
	var done atomic.Int64
	var wcs [16]verbs.WC
	got.(*cq).OnReady(func() {
		for n := got.Poll(wcs[:]); n > 0; n = got.Poll(wcs[:]) {
			done.Add(int64(n))
			if stepping.Load() {
				inside.Store(true)
			}
		}
	})
	q, err := a.CreateQP(verbs.QPInit{Transport: ib.UD, SendCQ: got, RecvCQ: got, SendDepth: 16, RecvDepth: 1, MaxSendSGE: 1, MaxRecvSGE: 1})
	must(t, err)
	for _, s := range []verbs.QPState{verbs.StateInit, verbs.StateRTR, verbs.StateRTS} {
		must(t, q.Modify(verbs.QPAttr{State: s, PKey: ib.DefaultPKey, QKey: 0x1b}))
	}
	to, err := a.CreateAH(verbs.AHAttr{SGID: a.Port().GIDs[0], DGID: b.Port().GIDs[0]})
	must(t, err)
	region, err := a.Alloc(100)
	must(t, err)
	wr := verbs.SendWR{Opcode: verbs.Send, Flags: verbs.Signaled, SG: []verbs.SGE{{Region: region, Buf: region.Buf}}, AH: to, RemoteQPN: y.qp.QPN(), RemoteQKey: 0x1b}
	c := newCounterFD(t)
	c.then = func() {
		stepping.Store(true)
		for range 4 {
			q.PostSend([]verbs.SendWR{wr})
		}
		time.Sleep(5 * time.Millisecond) // a handler that ran on another goroutine would do it now, and none does
		stepping.Store(false)
	}
	stop, err := a.PollFD(c.fd, c.step)
	must(t, err)
	defer stop()
	const rounds = 20
	for i := range rounds {
		c.add(1)
		until(t, "completions of a step", func() bool { return done.Load() == int64(4*(i+1)) })
	}
	if inside.Load() {
		t.Error("a handler ran while the step did")
	}
}

func TestPollFDBadInput(t *testing.T) {
	a, _ := vethPair(t, 9000, false, nil)
	if _, err := a.PollFD(-1, func() (bool, time.Duration) { return false, 0 }); !errors.Is(err, verbs.ErrInvalid) {
		t.Errorf("no descriptor: %v", err)
	}
	if _, err := a.PollFD(int(os.Stdin.Fd()), nil); !errors.Is(err, verbs.ErrInvalid) {
		t.Errorf("no step: %v", err)
	}
}

// What the user answers to a message while it is handled takes the ACK along, in
// one call; without an answer the ACK goes by itself.
func TestAckRides(t *testing.T) {
	a, b := vethPair(t, 9000, false, nil)
	x, y := newEnd(t, a, ib.RC, 16, 4096), newEnd(t, b, ib.RC, 16, 4096)
	connect(x, y)
	c := newCounterFD(t)
	answer := make(chan error, 8)
	c.then = func() {
		_, err := y.qp.PostSend([]verbs.SendWR{{ID: 3, Opcode: verbs.Send, SG: y.sge(0, 100), Flags: verbs.Signaled}})
		answer <- err
	}
	stop, err := b.PollFD(c.fd, c.step)
	must(t, err)
	defer stop()
	send := func() {
		t.Helper()
		_, err := y.qp.PostRecv([]verbs.RecvWR{{ID: 1, SG: y.sge(1, 200)}})
		must(t, err)
		_, err = x.qp.PostRecv([]verbs.RecvWR{{ID: 1, SG: x.sge(1, 200)}})
		must(t, err)
		_, err = x.qp.PostSend([]verbs.SendWR{{ID: 2, Opcode: verbs.Send, Flags: verbs.Signaled, SG: x.sge(0, 100)}})
		must(t, err)
	}
	send()
	until(t, "the ACK of a message without an answer", func() bool { return counter(a, "rc_acks_in") == 1 })

	// The message and what the step is to read are there in one turn.
	var first atomic.Bool
	arrives := func(pkt []byte) bool {
		if roce.Opcode(pkt[0]) != roce.RCAck && first.CompareAndSwap(true, false) { // it may come again
			c.add(1)
		}
		return false
	}
	b.dropHook.Store(&arrives)
	// Where an end had to wait for the processor for longer than the ACK timeout, its
	// peer has sent a packet again, which is acknowledged in a call of its own: nothing
	// can be told from such a round, nor from the next.
	again := func() uint64 { return counter(a, "rc_retransmits") + counter(b, "rc_retransmits") }
	earlier := uint64(0)
	until(t, "a round in which nothing is sent again", func() bool {
		begin := again()
		calls, packets, acks := counter(b, "tx_calls"), counter(b, "tx_packets"), counter(a, "rc_acks_in")
		first.Store(true)
		send()
		must(t, <-answer)
		until(t, "both packets", func() bool { return counter(b, "tx_packets") >= packets+2 })
		until(t, "the ACK at the peer", func() bool { return counter(a, "rc_acks_in") > acks })
		n := counter(b, "tx_calls") - calls
		undisturbed := again() == earlier
		earlier = begin
		if undisturbed && n != 1 {
			t.Errorf("answer and ACK left in %d calls, want 1", n)
		}
		return undisturbed
	})
	until(t, "the answer at the peer", func() bool { return counter(a, "rc_packets_in") >= 3 })
}
