package softroce

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/verbs"
)

// Where waits are short the bound grows to the most there may be, and one long
// wait after another brings it to nothing; what follows one kind of turn says
// nothing about another.
func TestSpinnerLearns(t *testing.T) {
	s := spinner{most: 100 * time.Microsecond}
	now := time.Unix(1, 0)
	want := func(what string, d time.Duration) {
		t.Helper()
		if got := s.bound(now); got != d {
			t.Errorf("%s: polls for %v, want %v", what, got, d)
		}
	}
	s.turn(true, false)
	want("nothing known", 0)
	for _, d := range []time.Duration{10, 20, 40, 80, 100, 100} {
		s.waited(100 * time.Microsecond)
		want("a short wait", d*time.Microsecond)
	}
	s.turn(false, true)
	want("another kind of turn", 0)
	s.turn(false, false) // a look at nothing, as after a time-out
	want("no turn", 0)
	s.turn(true, true)
	want("a third", 0)
	s.turn(true, false)
	want("the first again", 100*time.Microsecond)
	for _, d := range []time.Duration{25, 0, 0} {
		s.waited(101 * time.Microsecond)
		want("a long wait", d*time.Microsecond)
	}
}

// Whoever wants the processor gets it: polling stops for longer and longer, and
// begins as before when it was right often enough.
func TestSpinnerPauses(t *testing.T) {
	s := spinner{most: 100 * time.Microsecond, after: [4]time.Duration{1: 50 * time.Microsecond}}
	s.turn(false, true)
	now := time.Unix(1, 0)
	for _, d := range []time.Duration{10, 20, 40, 80, 160, 320, 640, 1000, 1000} {
		d *= time.Millisecond
		s.late(now)
		if s.bound(now.Add(d-1)) != 0 || s.bound(now.Add(d)) != 50*time.Microsecond {
			t.Errorf("no pause of %v", d)
		}
		now = now.Add(d)
	}
	for range 100 {
		s.hit()
	}
	if s.late(now); s.bound(now.Add(spinPause)) == 0 {
		t.Error("the pause after a hundred hits is as long as before")
	}
}

// What is there is found, what is not there is not waited for beyond the bound,
// and a yield that takes long ends it.
func TestSpin(t *testing.T) { synctest.Test(t, testSpin) }

func testSpin(t *testing.T) {
	fd, err := unix.Eventfd(0, unix.EFD_NONBLOCK)
	must(t, err)
	defer unix.Close(fd)
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	r := &receiver{dev: &Device{}, th: &thread{}}
	r.most, r.after[0] = time.Second, 300*time.Microsecond
	c := &r.th.count
	defer func(was func()) { yield = was }(yield)
	look := func() { time.Sleep(time.Microsecond) } // by the bubble's clock, which nobody else moves
	yield = look
	check := func(what string, got, want bool, hits, misses, late uint64) {
		t.Helper()
		expect.Equal(t, got, want, "%s: what spin returns", what)
		expect.Equal(t, c.rxSpinHits.Load(), hits, "%s: hits", what)
		expect.Equal(t, c.rxSpinMisses.Load(), misses, "%s: misses", what)
		expect.Equal(t, c.rxSpinLate.Load(), late, "%s: late ones", what)
	}
	begun := time.Now()
	check("nothing there", r.spin(fds), false, 0, 1, 0)
	if d := time.Since(begun); d != r.after[0] {
		t.Errorf("nothing there: looked for %v, want %v", d, r.after[0])
	}
	looks := 0
	yield = func() {
		look()
		if looks++; looks == 3 {
			_, err := unix.Write(fd, []byte{1, 0, 0, 0, 0, 0, 0, 0})
			must(t, err)
		}
	}
	check("what comes while polling", r.spin(fds), true, 1, 1, 0)
	yield = func() { time.Sleep(2 * spinLate) }
	check("somebody takes the processor", r.spin(fds), true, 1, 1, 1)
	if got, want := time.Until(r.pauseEnds), spinPause; got != want {
		t.Errorf("somebody takes the processor: a pause of %v, want %v", got, want)
	}
	check("in the pause", r.spin(fds), false, 1, 1, 1)
}

// It needs the P; status says what is off and why.
func TestBusyPollOff(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(*Options)
		why    string
	}{
		{"on", func(o *Options) { o.HoldP, o.BusyPoll = true, DefaultBusyPoll }, ""},
		{"zero", func(o *Options) { o.HoldP = true }, "switched off"},
		{"without its P", func(o *Options) { o.BusyPoll = DefaultBusyPoll }, "waits give their P back"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			a, _ := pair(t, families[0], tt.change)
			if a.maxHolding < 2 {
				t.Skip("GOMAXPROCS is 1")
			}
			checkOffload(t, a.Offloads()[busyPoll], "busy_poll", tt.why)
		})
	}
}

// The one thread sees to the timers itself while it is awake or holds its P: an
// RC request that is lost is repeated, whoever sleeps meanwhile.
func TestKeptTimers(t *testing.T) {
	for _, held := range []bool{true, false} {
		t.Run(fmt.Sprintf("held %v", held), func(t *testing.T) {
			a, b := vethPair(t, 9000, false, func(o *Options) { o.HoldP = held })
			x, y := newEnd(t, a, ib.RC, 16, 4096), newEnd(t, b, ib.RC, 16, 4096)
			connect(x, y)
			c := newCounterFD(t)
			c.then = func() { // on the one thread, which keeps the timers then
				_, err := x.qp.PostSend([]verbs.SendWR{{ID: 2, Opcode: verbs.Send, Flags: verbs.Signaled, SG: x.sge(0, 100)}})
				must(t, err)
			}
			stop, err := a.PollFD(c.fd, c.step)
			must(t, err)
			const requests = 9
			for i := range requests {
				switch i {
				case requests / 2:
					untilNotHeld(t, a) // the timers' own goroutine takes over
				case requests - 1:
					stop() // nobody polls any more
				}
				n := 0
				drop := func([]byte) bool { n++; return n == 1 }
				b.dropHook.Store(&drop)
				_, err := y.qp.PostRecv([]verbs.RecvWR{{ID: 1, SG: y.sge(0, 4096)}})
				must(t, err)
				if i == requests-1 {
					c.then()
				} else {
					c.add(1)
				}
				if wc := x.next(); wc.Status != verbs.Success {
					t.Fatalf("request %d: %v", i, wc.Status)
				}
				y.next()
			}
			if n := counter(a, "rc_retransmits"); n < requests {
				t.Errorf("%d packets sent again, want one for each of %d requests", n, requests)
			}
		})
	}
}
