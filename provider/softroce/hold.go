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
	// holdMax bounds one such wait. The runtime ends it by a signal when it needs
	// the P, but somebody may have switched its signals off.
	holdMax = 20 * time.Millisecond
)

// holding counts the threads of this process that hold a P while they wait.
var holding atomic.Int32

// poll waits for fds, for at most limit if that is positive, or until a signal.
//
// A wait that Go's runtime knows of gives the P (the right to run Go code) back
// after a while, and getting one again takes longer than the wake-up itself, for
// the runtime's monitor is woken first. So the thread that polls a descriptor
// holds its P for a time after each packet. It leaves at least one to the others.
func (r *receiver) poll(fds []unix.PollFd, limit time.Duration) error {
	hold, spins := r.mayHold() && holdOne(r.dev.maxHolding), limit <= 0
	if hold {
		defer holding.Add(-1)
		r.th.count.rxHeld.Add(1)
		if limit <= 0 || limit > holdMax {
			limit = holdMax
		}
	}
	if spins = spins && hold && !r.dev.noSpin.Load(); spins && r.spin(fds) {
		return nil
	}
	if r.keeps {
		if next := r.th.timers.rest(hold); next > 0 && (limit <= 0 || next < limit) {
			limit = next
		}
	}
	var timeout *unix.Timespec
	if limit > 0 {
		ts := unix.NsecToTimespec(int64(limit))
		timeout = &ts
	}
	if !hold {
		_, err := unix.Ppoll(fds, timeout, nil)
		return err
	}
	begun := time.Now()
	n, _, errno := unix.RawSyscall6(unix.SYS_PPOLL, uintptr(unsafe.Pointer(unsafe.SliceData(fds))), uintptr(len(fds)), uintptr(unsafe.Pointer(timeout)), 0, 0, 0)
	if errno != 0 {
		return errno
	}
	if took := time.Since(begun); spins && (n > 0 || took > r.most) {
		r.waited(took)
	}
	return nil
}

// holdOne counts one thread more in holding if fewer than most would hold a P then. A thread that it turns
// away is not counted while it waits.
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

// mayHold reports whether r polls something and was active of late.
func (r *receiver) mayHold() bool {
	if r.dev.noHold.Load() || r.polled.Load() == nil {
		return false
	}
	now := time.Now()
	if r.active {
		r.active, r.activeAt = false, now
	}
	return now.Sub(r.activeAt) < holdFor
}

// tryHold sees whether waits can hold their P.
func (d *Device) tryHold() {
	d.maxHolding = runtime.GOMAXPROCS(0)
	switch {
	case !d.opts.HoldP:
		d.offloadOff(hold, switchedOff)
	case d.maxHolding < 2:
		d.offloadOff(hold, "GOMAXPROCS is 1: nothing else could run meanwhile")
	}
}
