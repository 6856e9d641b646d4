package agent

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"ipoibcm/verbs"
)

// Messages to the service manager, as sd_notify(3) has them.
const (
	notifyReady     = "READY=1"
	notifyStopping  = "STOPPING=1"
	notifyReloading = "RELOADING=1\nMONOTONIC_USEC="
	notifyWatchdog  = "WATCHDOG=1"
	notifyStatus    = "STATUS="
)

// watchdogShare is the number of signs of life in the time that the manager waits for one: two may be late.
const watchdogShare = 3

// A service reports the state of the agent to a service manager. Only the handover at the end waits for it.
type service struct {
	notify func(string)
	every  time.Duration // between signs of life; zero: nobody waits for them
	last   string        // status that was told; the driver's own
	routed bool          // the kernel has the first routes; the driver's own
	ready  bool          // the manager knows that traffic can pass; the driver's own
	queue  chan string
	told   chan struct{} // closed once the manager knows that the agent stops
}

// serviceDepth is how many messages may wait for a manager that does not listen.
const serviceDepth = 16

func (a *Agent) newService() service {
	return service{notify: a.opt.Notify, every: a.opt.Watchdog / watchdogShare, queue: make(chan string, serviceDepth),
		told: make(chan struct{})}
}

// tell queues a message. It returns false if too many wait. Without a manager it does nothing and returns
// true.
func (s *service) tell(text string) bool {
	if s.notify == nil {
		return true
	}
	select {
	case s.queue <- text:
		return true
	default:
		return false
	}
}

// report notifies the manager once when traffic can pass, and of the agent's state whenever the state has
// changed. It runs on the driver's goroutine.
func (a *Agent) report() {
	s := &a.service
	if s.notify == nil {
		return
	}
	st := a.m.Status()
	text := fmt.Sprintf("%s: up, mode %v, %d connections, %d neighbours", a.opt.Name, st.Mode, st.Conns, st.Neighbours)
	switch {
	case !a.port().Active:
		text = a.opt.Name + ": the underlay is down or has lost its address"
	case !st.Up:
		text = a.opt.Name + ": the interface is down"
	case st.Silence.Asked.IsValid():
		text = a.opt.Name + ": up, no answer from anybody"
	}
	if text != s.last && s.tell(notifyStatus+text) {
		s.last = text
	}
	if st.Up && s.routed && !s.ready {
		s.ready = s.tell(notifyReady)
	}
}

// runService hands messages and signs of life to the manager until ctx ends.
func (a *Agent) runService(ctx context.Context) {
	s := &a.service
	if s.notify == nil {
		close(s.told)
		return
	}
	var watchdog sync.WaitGroup
	defer watchdog.Wait()
	if s.every > 0 {
		watchdog.Go(func() { a.runWatchdog(ctx) })
	}
	for {
		select {
		case text := <-s.queue:
			s.notify(text)
		case <-ctx.Done():
			s.notify(notifyStopping)
			close(s.told)
			return
		}
	}
}

// runWatchdog gives a sign of life as long as the driver, the data path and the provider move. If one of them
// is stuck, it logs which, and the manager ends the process.
func (a *Agent) runWatchdog(ctx context.Context) {
	tick := time.Tick(a.service.every)
	for {
		if err := a.alive(ctx, a.service.every); err != nil && ctx.Err() == nil {
			a.log.Error("no sign of life for the watchdog", "err", err)
		} else {
			a.service.tell(notifyWatchdog)
		}
		select {
		case <-tick:
		case <-ctx.Done():
			return
		}
	}
}

// alive returns an error that names the first part that has not moved within the time given.
func (a *Agent) alive(ctx context.Context, within time.Duration) error {
	asked, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	if _, err := ask(asked, a, func() struct{} { return struct{}{} }); err != nil {
		return fmt.Errorf("the driver has not moved for %v", within)
	}
	if err := a.sends(within); err != nil {
		return err
	}
	if p, ok := a.opt.Provider.(verbs.Prober); ok {
		return p.Alive(within)
	}
	return nil
}

// sends returns an error if a data thread has not finished, within the time given, the packets that it was
// sending. At most one question waits for the threads.
func (a *Agent) sends(within time.Duration) error {
	if a.barrier == nil {
		done := make(chan struct{})
		a.barrier = done
		go func() {
			a.loop.Barrier()
			close(done)
		}()
	}
	select {
	case <-a.barrier:
		a.barrier = nil
		return nil
	case <-time.After(within):
		return fmt.Errorf("the thread that sends packets has not moved for %v", within)
	}
}

// reloading returns the message before settings change, with the time that sd_notify(3) asks for.
func reloading() string {
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &now)
	return notifyReloading + strconv.FormatInt(now.Nano()/1000, 10)
}
