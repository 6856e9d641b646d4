package softroce

import (
	"fmt"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"ipoibcm/verbs"
)

var _ verbs.Attender = (*Device)(nil)

// An attention is a descriptor of the user's that a receiver looks after.
type attention struct {
	fd   int
	step func() (more bool, wait time.Duration)
	stop atomic.Bool
	left chan struct{} // closed when the receiver has let go of it
}

// Attend implements [verbs.Attender]. The receiver of the default GID's family
// does it.
func (d *Device) Attend(fd int, step func() (more bool, wait time.Duration)) (stop func(), err error) {
	r := d.attendant()
	if fd < 0 || step == nil || r == nil {
		return nil, verbs.ErrInvalid
	}
	a := &attention{fd: fd, step: step, left: make(chan struct{})}
	r.attMu.Lock()
	defer r.attMu.Unlock()
	if r.ended {
		return nil, verbs.ErrClosed
	}
	if !d.attended.CompareAndSwap(false, true) {
		return nil, verbs.ErrQueueFull
	}
	r.att.Store(a)
	r.wake()
	return func() {
		a.stop.Store(true)
		r.wake()
		<-a.left
	}, nil
}

// attendant picks the receiver that most packets come to.
func (d *Device) attendant() *receiver {
	for _, r := range d.receivers {
		if r.v6 == !d.firstGID.Is4() && (!r.share || !r.mcast) {
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

// attend calls the step of what r looks after, if anything. Completions that it
// causes wait for its end: their handlers need not run beside it.
func (r *receiver) attend() (more bool, wait time.Duration) {
	a := r.att.Load()
	if a == nil {
		return false, 0
	}
	if a.stop.Load() {
		r.letGo()
		return false, 0
	}
	d := r.dev
	d.stepping.Store(true)
	more, wait = a.step()
	d.stepping.Store(false)
	if d.deferred.Swap(false) {
		d.mu.Lock()
		r.kicks = r.kicks[:0]
		for c := range d.cqs {
			if c.pending.Load() {
				r.kicks = append(r.kicks, c)
			}
		}
		d.mu.Unlock()
		for i, c := range r.kicks {
			c.kick(true)
			r.kicks[i] = nil
		}
	}
	return more, wait
}

// letGo ends the attention, if there is one.
func (r *receiver) letGo() {
	if a := r.att.Swap(nil); a != nil {
		r.dev.attended.Store(false)
		close(a.left)
	}
}

// end is called when r reads no more.
func (r *receiver) end() {
	r.attMu.Lock()
	defer r.attMu.Unlock()
	r.ended = true
	r.letGo()
}

// sleep returns when there is something to read, or after wait if that is
// positive; then the descriptor looked after is not watched.
func (r *receiver) sleep(wait time.Duration) {
	fds := [4]unix.PollFd{{Fd: int32(r.fd), Events: unix.POLLIN}, {Fd: int32(r.wakeFD), Events: unix.POLLIN},
		{Fd: int32(r.room), Events: unix.POLLIN}}
	n := 3
	if a := r.att.Load(); a != nil && wait <= 0 {
		fds[3] = unix.PollFd{Fd: int32(a.fd), Events: unix.POLLIN}
		n = 4
	}
	if r.poll(fds[:n], wait) != nil {
		return // EINTR
	}
	if fds[3].Revents != 0 {
		r.active, r.readable = true, fds[0].Revents != 0
	}
	if fds[2].Revents != 0 {
		r.goOn(time.Now())
	}
	if fds[1].Revents != 0 {
		var b [8]byte
		_, _ = unix.Read(r.wakeFD, b[:])
	}
}

// newWake makes the descriptor that wakes r.
func (r *receiver) newWake() (err error) {
	if r.wakeFD, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return fmt.Errorf("create eventfd: %w", err)
	}
	return nil
}
