package datapath

import (
	"time"

	"ipoibcm/tun"
	"ipoibcm/verbs"
)

// attend lets the provider's receiving goroutine read the TUN too. What the
// kernel answers to a packet that came in then leaves on the same thread, with
// what it wrote still in the cache and nobody woken. It returns what ends that,
// nil if the TUN needs a reader of its own. fail is called when the TUN fails.
func (l *Loop) attend(fail func(error)) (stop func()) {
	p, ok1 := l.p.(verbs.Attender)
	dev, ok2 := l.tun.(tun.Pollable)
	if !ok1 || !ok2 || l.cfg.NoAttend {
		return nil
	}
	s := newSender(l, dev.TryRead)
	failed := false
	end, err := p.Attend(dev.FD(), func() (bool, time.Duration) {
		if failed {
			return false, time.Hour
		}
		n, wait, err := s.step()
		if err != nil {
			failed = true
			fail(err)
			return false, time.Hour
		}
		return n > 0, wait
	})
	if err != nil {
		return nil
	}
	return func() {
		end()
		s.giveUp()
	}
}
