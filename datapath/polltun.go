package datapath

import (
	"time"

	"ipoibcm/tun"
	"ipoibcm/verbs"
)

// pollTUN lets the provider's receiving goroutine read the TUN too. The kernel's answer to a packet
// that came in then leaves on the same thread: nobody is woken, and the data is still in the
// processor's cache. pollTUN returns a function that ends the polling, or nil if the TUN needs a
// reader of its own. It calls fail when the TUN fails.
func (l *thread) pollTUN(fail func(error)) (stop func()) {
	p, ok1 := l.p.(verbs.FDPoller)
	dev, ok2 := l.tun.(tun.Pollable)
	if l.cfg.OwnTUNThread {
		l.offload("switched off")
		return nil
	}
	if !ok1 || !ok2 {
		l.offload("the provider cannot do it")
		return nil
	}
	s := newSender(l, dev.TryRead)
	failed := false
	end, err := p.PollFD(dev.FD(), func() (bool, time.Duration) {
		if failed {
			return false, time.Hour
		}
		n, err := s.step()
		if n > 0 {
			l.turns.Add(1)
		}
		if err != nil {
			failed = true
			fail(err)
			return false, time.Hour
		}
		return n > 0 && !s.drained, 0
	})
	if err != nil {
		l.offload(err.Error())
		return nil
	}
	l.polling.Store(&verbs.Offload{On: true})
	return end
}

// offload notes why the TUN has a reader of its own.
func (l *thread) offload(why string) { l.polling.Store(&verbs.Offload{Why: why}) }

// Offload reports whether the provider's receiving threads read the TUN: On only if all do. Uses
// counts the turns in which they read packets.
func (l *Loop) Offload() verbs.Offload {
	var o verbs.Offload
	for _, th := range l.threads {
		if p := th.polling.Load(); p != nil && (th.index == 0 || !p.On) {
			o.On, o.Why = p.On, p.Why
		}
		o.Uses += th.turns.Load()
	}
	o.Name, o.What = "one_thread", "one thread for TUN and underlay"
	return o
}
