package softroce

import (
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"ipoibcm/verbs"
)

var _ verbs.FDPoller = (*Device)(nil)

// A polledFD is a descriptor of the user's that a receiver polls.
type polledFD struct {
	fd   int
	step func() (more bool, wait time.Duration)
	stop atomic.Bool
	left chan struct{} // closed when the receiver has stopped polling fd
}

// PollFD implements [verbs.FDPoller]. The first thread's receiver of the default GID's
// family polls fd.
func (d *Device) PollFD(fd int, step func() (more bool, wait time.Duration)) (stop func(), err error) {
	return d.threads[0].pollFD(fd, step)
}

// pollFD has the receiver of th poll fd.
func (th *thread) pollFD(fd int, step func() (more bool, wait time.Duration)) (stop func(), err error) {
	r := th.eventLoop()
	if fd < 0 || step == nil || r == nil {
		return nil, verbs.ErrInvalid
	}
	a := &polledFD{fd: fd, step: step, left: make(chan struct{})}
	r.polledMu.Lock()
	defer r.polledMu.Unlock()
	if r.ended {
		return nil, verbs.ErrClosed
	}
	if !th.polling.CompareAndSwap(false, true) {
		return nil, verbs.ErrQueueFull
	}
	r.polled.Store(a)
	r.wake()
	return func() {
		a.stop.Store(true)
		r.wake()
		<-a.left
	}, nil
}

// eventLoop returns the receiver of th at which most packets arrive: that of the default GID's
// family, but not one for groups only. It returns nil if there is none.
func (th *thread) eventLoop() *receiver {
	d := th.dev
	for _, r := range d.receivers {
		if r.th == th && r.v6 == !d.firstGID.Is4() && (!r.share || !r.mcast) {
			return r
		}
	}
	return nil
}

// wake ends r's sleep, or the next one. It may be called after r has ended.
func (r *receiver) wake() {
	one := [8]byte{1}
	_, _ = unix.Write(r.wakeFD, one[:]) // EAGAIN: it was woken often enough
}

// stepUser calls the user's step, if r polls a descriptor of the user.
func (r *receiver) stepUser() (more bool, wait time.Duration) {
	a := r.polled.Load()
	if a == nil {
		return false, 0
	}
	if a.stop.Load() {
		r.stopPolling()
		return false, 0
	}
	more, wait, r.due = r.th.step(a, r.due)
	return more, wait
}

// stopPolling ends the polling of the descriptor of the user, if there is one.
func (r *receiver) stopPolling() {
	if a := r.polled.Swap(nil); a != nil {
		r.th.polling.Store(false)
		close(a.left)
	}
}

// end stops polling for good: r reads no more.
func (r *receiver) end() {
	r.polledMu.Lock()
	defer r.polledMu.Unlock()
	r.ended = true
	r.stopPolling()
}

// sleep returns when there is something to do for r. If wait is positive it returns after
// wait at the latest, and does not watch the user's descriptor.
func (r *receiver) sleep(wait time.Duration) {
	fds := [4]unix.PollFd{{Fd: int32(r.fd), Events: unix.POLLIN}, {Fd: int32(r.wakeFD), Events: unix.POLLIN},
		{Fd: -1, Events: unix.POLLIN}}
	watches := r.writable >= 0 && r.th.full.Load()
	if watches {
		fds[2].Fd = int32(r.writable)
	}
	n := 3
	if a := r.polled.Load(); a != nil && wait <= 0 {
		fds[3] = unix.PollFd{Fd: int32(a.fd), Events: unix.POLLIN}
		n = 4
	}
	if r.poll(fds[:n], wait) != nil {
		return // EINTR
	}
	if fds[3].Revents != 0 {
		r.active, r.readable = true, fds[0].Revents != 0
	}
	switch {
	case fds[2].Revents != 0:
		r.idlePolls = 0
		r.goOn(time.Now())
	case watches:
		if r.idlePolls++; r.idlePolls >= pollsToRecheck {
			r.idlePolls = 0
			r.th.recheckFull()
		}
	}
	if fds[1].Revents != 0 {
		var b [8]byte
		_, _ = unix.Read(r.wakeFD, b[:])
	}
}
