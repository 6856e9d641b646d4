package softroce

import (
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	// DefaultBusyPoll is what Options.BusyPoll is best set to.
	DefaultBusyPoll = 100 * time.Microsecond
	// spinFirst is how long a receiver polls after the first short wait.
	spinFirst = 10 * time.Microsecond
	// spinLate is how long a look may take, the yield before it included. Longer
	// ones mean that others have work for this processor.
	spinLate = 200 * time.Microsecond
	// After such a late look polling pauses for spinPause, twice as long each time, and at
	// most spinPauseMax.
	spinPause, spinPauseMax = 10 * time.Millisecond, time.Second
)

// A spinner decides how long a receiver polls before it waits: the time depends on how long
// earlier waits were. Waits after turns of different kinds (see turn) count separately: after
// a packet for the host the answer may come at once, and after the answer nothing for long.
type spinner struct {
	most  time.Duration // longest polling; zero: never poll
	after [4]time.Duration
	kind  int // index in after: that of the last turn that received or sent

	pauseEnds time.Time
	pause     time.Duration
}

// turn notes what the turn that ends did. A turn that did nothing changes nothing.
func (s *spinner) turn(received, sent bool) {
	switch {
	case received && sent:
		s.kind = 3
	case received:
		s.kind = 2
	case sent:
		s.kind = 1
	}
}

// bound returns how long to poll before a wait that begins now.
func (s *spinner) bound(now time.Time) time.Duration {
	if now.Before(s.pauseEnds) {
		return 0
	}
	return s.after[s.kind]
}

// waited adapts the bound to a wait that took d.
func (s *spinner) waited(d time.Duration) {
	b := &s.after[s.kind]
	switch {
	case d <= s.most:
		*b = min(max(2**b, spinFirst), s.most)
	case *b >= 4*spinFirst:
		*b /= 4
	default:
		*b = 0
	}
}

// late notes that others want the processor: polling pauses.
func (s *spinner) late(now time.Time) {
	s.pause = min(max(2*s.pause, spinPause), spinPauseMax)
	s.pauseEnds = now.Add(s.pause)
}

// hit notes that polling was right.
func (s *spinner) hit() { s.pause -= s.pause / 8 }

// spin looks at fds again and again, for as long as the spinner allows, and reports whether
// one of them is ready. It yields the processor between two looks.
func (r *receiver) spin(fds []unix.PollFd) bool {
	s, c := &r.spinner, &r.th.count
	start := time.Now()
	bound := s.bound(start)
	if bound == 0 {
		return false
	}
	var none unix.Timespec
	for last := start; last.Sub(start) < bound; {
		yield()
		n, _, _ := unix.RawSyscall6(unix.SYS_PPOLL, uintptr(unsafe.Pointer(unsafe.SliceData(fds))), uintptr(len(fds)), uintptr(unsafe.Pointer(&none)), 0, 0, 0)
		now := time.Now()
		switch {
		case now.Sub(last) > spinLate:
			c.rxSpinLate.Add(1)
			s.late(now)
			return int(n) > 0
		case int(n) > 0:
			c.rxSpinHits.Add(1)
			s.hit()
			return true
		}
		last = now
	}
	c.rxSpinMisses.Add(1)
	return false
}

// yield is replaced in tests.
var yield = func() { _, _, _ = unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0) }

// trySpin switches polling off if the user does not want it, or if waits do not hold their
// P.
func (d *Device) trySpin() {
	switch {
	case d.opts.BusyPoll <= 0:
		d.offloadOff(busyPoll, switchedOff)
	case d.isOff(hold):
		d.offloadOff(busyPoll, "waits give their P back")
	}
}
