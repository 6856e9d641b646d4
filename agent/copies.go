package agent

import (
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"ipoibcm/datapath"
	"ipoibcm/ib"
	"ipoibcm/ipoib"
	"ipoibcm/wire/encap"
)

// A copier sends the copies that stand for multicast.
type copier struct {
	took    time.Duration // time of a processor that those of the step in hand took
	handles []*handle     // of one SendCopies
	to      []datapath.UDDest
}

// sendCopies sends a frame to many, in few calls, and measures what that takes. The time that the
// thread waits for a processor is not in it: where others have the processors, copies would become rare.
func (a *Agent) sendCopies(act ipoib.SendCopies) {
	runtime.LockOSThread() // whose clock is read
	defer runtime.UnlockOSThread()
	began := processorTime()
	a.holdHandles(act.To)
	sent := 0
	var h encap.Header
	if h.UnmarshalBinary(act.Frame) == nil {
		sent, _ = a.loop.SendCopies(a.copier.to, h.Type, act.Frame[encap.HeaderLen:])
	}
	a.releaseHandles()
	a.counters.sendUD.Add(uint64(len(act.To)))
	a.counters.sendUDFailed.Add(uint64(len(act.To) - sent))
	a.copier.took += processorTime() - began
}

// holdHandles has the address handles of to in the copier, and none of them destroyed to make room for
// the next one.
func (a *Agent) holdHandles(to []ib.GID) {
	c := &a.copier
	c.handles, c.to = c.handles[:0], c.to[:0]
	for _, gid := range to {
		h, err := a.handle(gid)
		if err != nil {
			continue
		}
		h.refs++
		c.handles = append(c.handles, h)
		c.to = append(c.to, a.dest(h.ah, ib.QPNMulticast))
	}
}

func (a *Agent) releaseHandles() {
	for _, h := range a.copier.handles {
		h.refs--
	}
}

// processorTime returns how long the calling thread has had a processor.
func processorTime() time.Duration {
	var t unix.Timespec
	if unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t) != nil {
		return 0
	}
	return time.Duration(t.Nano())
}
