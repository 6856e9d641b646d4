package softroce

import (
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	// holdFor is how long after the last packet a receiver's waits hold their P.
	// It covers what comes once a second, such as ping.
	holdFor = 1500 * time.Millisecond
	// holdMax bounds one wait that holds the P. The runtime ends the wait by a signal
	// when it needs the P, but the process may have switched these signals off.
	holdMax = 20 * time.Millisecond
	// waitMax bounds all other waits: ADR 0013 says what a longer one can do to the process.
	waitMax = time.Second
)

// holding counts the threads of this process that hold a P while they wait.
var holding atomic.Int32

// poll waits until one of fds is ready, for at most limit if that is positive. It may return
// earlier: after a signal, after holdMax or waitMax, or when a timer of the thread is due.
//
// A wait that Go's runtime knows of gives the P (the right to run Go code) back after a
// while. To get one again takes longer than the wake-up itself, because the runtime's
// monitor is woken first. So the thread that polls a descriptor holds its P for a time
// after each packet. At least one P is left for the other threads of the process.
func (r *receiver) poll(fds []unix.PollFd, limit time.Duration) error {
	hold, spins := r.mayHold() && holdOne(r.dev.maxHolding), limit <= 0
	if hold {
		defer holding.Add(-1)
		r.th.count.rxHeld.Add(1)
		if limit <= 0 || limit > holdMax {
			limit = holdMax
		}
	}
	if spins = spins && hold && !r.dev.isOff(busyPoll); spins && r.spin(fds) {
		return nil
	}
	if r.keeps {
		if next := r.th.timers.rest(hold); next > 0 && (limit <= 0 || next < limit) {
			limit = next
		}
	}
	if limit <= 0 {
		limit = waitMax
	}
	ts := unix.NsecToTimespec(int64(limit))
	if !hold {
		_, err := unix.Ppoll(fds, &ts, nil)
		return err
	}
	begun := time.Now()
	n, _, errno := unix.RawSyscall6(unix.SYS_PPOLL, uintptr(unsafe.Pointer(unsafe.SliceData(fds))), uintptr(len(fds)), uintptr(unsafe.Pointer(&ts)), 0, 0, 0)
	if errno != 0 {
		return errno
	}
	if took := time.Since(begun); spins && (n > 0 || took > r.most) {
		r.waited(took)
	}
	return nil
}

// holdOne reports whether one thread more may hold a P, and counts it in holding then. The total must
// stay below most. A thread that may not hold its P is not counted while it waits.
func holdOne(most int) bool {
	for {
		n := holding.Load()
		if int(n)+1 >= most {
			return false
		}
		if holding.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// mayHold reports whether r polls a descriptor of the user and was active within holdFor.
// It is false while holding is switched off.
func (r *receiver) mayHold() bool {
	if r.dev.isOff(hold) || r.polled.Load() == nil {
		return false
	}
	now := time.Now()
	if r.active {
		r.active, r.activeAt = false, now
	}
	return now.Sub(r.activeAt) < holdFor
}

// tryHold switches holding off if the user does not want it, or if there is only one P.
func (d *Device) tryHold() {
	d.maxHolding = runtime.GOMAXPROCS(0)
	switch {
	case !d.opts.HoldP:
		d.offloadOff(hold, switchedOff)
	case d.maxHolding < 2:
		d.offloadOff(hold, "GOMAXPROCS is 1: nothing else could run meanwhile")
	}
}
