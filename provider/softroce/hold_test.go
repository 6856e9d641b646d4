package softroce

import (
	"fmt"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/verbs"
)

// A wait that holds its P ends when a packet, the descriptor or the runtime calls,
// and is not begun where nothing came for long, where no descriptor is polled, or where
// no P would be left.
func TestHoldP(t *testing.T) {
	procs := runtime.GOMAXPROCS(0)
	defer runtime.GOMAXPROCS(procs)
	runtime.GOMAXPROCS(2)
	a, b := vethPair(t, 9000, false, func(o *Options) { o.HoldP = true })
	x, y := newEnd(t, a, ib.RC, 16, 4096), newEnd(t, b, ib.RC, 16, 4096)
	connect(x, y)
	send := func() {
		t.Helper()
		_, err := x.qp.PostRecv([]verbs.RecvWR{{ID: 1, SG: x.sge(0, 4096)}})
		must(t, err)
		_, err = y.qp.PostSend([]verbs.SendWR{{ID: 2, Opcode: verbs.Send, Flags: verbs.Signaled, SG: y.sge(0, 100)}})
		must(t, err)
		x.next()
	}
	send()
	if n := counter(a, "rx_held_waits"); n != 0 {
		t.Errorf("%d waits held the P though no descriptor is polled", n)
	}
	c, d := newCounterFD(t), newCounterFD(t)
	stop, err := a.PollFD(c.fd, c.step)
	must(t, err)
	defer stop()
	stopB, err := b.PollFD(d.fd, d.step)
	must(t, err)
	defer stopB()
	until(t, "a wait that holds its P", func() bool { // the next packet may come too late for it
		send()
		return counter(a, "rx_held_waits")+counter(b, "rx_held_waits") > 0
	})
	for range 50 { // with GOMAXPROCS at 2 one of the two is left for all of this
		if n := holding.Load(); n > 1 {
			t.Fatalf("%d threads hold a P", n)
		}
		send()
		c.add(1)
		runtime.GC() // stops the world
	}
	until(t, "steps for the descriptor", func() bool { return c.sum.Load() == 50 })

	// After a while of silence the waits are the runtime's again.
	untilNotHeld(t, a)
	untilNotHeld(t, b)
}

// untilNotHeld waits until a wait of d's receivers does not hold its P. To look has them wait anew, and
// is no packet, after which they would hold it for longer.
func untilNotHeld(t *testing.T, d *Device) {
	t.Helper()
	until(t, "a wait that does not hold its P", func() bool {
		held := counter(d, "rx_held_waits")
		wholeTurn(t, d)
		return counter(d, "rx_held_waits") == held
	})
}

// wholeTurn wakes d's receivers, and returns when each has done all that it does in a turn, the wait at
// its end included.
func wholeTurn(t *testing.T, d *Device) {
	t.Helper()
	must(t, d.Alive(patience)) // a turn has begun
	must(t, d.Alive(patience)) // and another
}

// A thread that may not hold its P keeps no other from it while it waits.
func TestHoldOne(t *testing.T) {
	before := holding.Swap(0)
	defer holding.Store(before)
	for i := range 2 {
		if !holdOne(3) {
			t.Errorf("P %d of three was not held", i+1)
		}
	}
	for range 3 {
		if holdOne(3) {
			t.Error("the third of three Ps was held")
		}
	}
	holding.Add(-1)
	if !holdOne(3) {
		t.Error("a P that was given back was not held, because of threads that wait without one")
	}
	if holdOne(1) {
		t.Error("the only P was held")
	}
}

func TestHoldPOff(t *testing.T) {
	procs := runtime.GOMAXPROCS(0)
	defer runtime.GOMAXPROCS(procs)
	for _, tt := range []struct {
		procs int
		on    bool
		why   string
	}{{1, true, "GOMAXPROCS is 1: nothing else could run meanwhile"}, {2, false, "switched off"}, {2, true, ""}} {
		t.Run(fmt.Sprint(tt), func(t *testing.T) {
			runtime.GOMAXPROCS(tt.procs)
			a, _ := pair(t, families[0], func(o *Options) { o.HoldP = tt.on })
			checkOffload(t, a.Offloads()[hold], "hold_p", tt.why)
		})
	}
}

// checkOffload checks what status says of the offload name: it is on, unless why says why not.
func checkOffload(t *testing.T, o verbs.Offload, name, why string) {
	t.Helper()
	expect.Equal(t, o.Name, name, "Name of an offload")
	expect.Equal(t, o.On, why == "", "%s: On where the reason against it is %q", name, why)
	if o.Why != why {
		t.Errorf("%s: Why is %q, want %q", name, o.Why, why)
	}
}

// A wait ends although nothing comes: waitMax says why.
func TestWaitsEnd(t *testing.T) {
	fd, err := unix.Eventfd(0, unix.EFD_NONBLOCK)
	must(t, err)
	defer unix.Close(fd)
	r := &receiver{dev: &Device{}, th: &thread{}}
	ended := make(chan error, 1)
	go func() {
		err := unix.EINTR // by the runtime
		for err == unix.EINTR {
			if e := r.poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0); e == nil {
				err = 0
			} else {
				err = e.(unix.Errno)
			}
		}
		ended <- err
	}()
	select {
	case err := <-ended:
		if err != unix.Errno(0) {
			t.Error(err)
		}
	case <-time.After(20 * waitMax):
		_, err := unix.Write(fd, []byte{1, 0, 0, 0, 0, 0, 0, 0})
		must(t, err)
		t.Errorf("a wait for nothing took more than %v, want about %v", 20*waitMax, waitMax)
	}
}
