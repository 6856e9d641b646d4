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

// A copier sends the copies that replace multicast where the underlay has none.
type copier struct {
	took    time.Duration // processor time that the copies of the current step took
	handles []*handle     // of the current SendCopies
	to      []datapath.UDDest
}

// sendCopies sends a frame to many peers in few calls, and measures the processor time that this takes. The
// time in which the thread waits for a processor does not count: on a busy host it would make copies rare.
func (a *Agent) sendCopies(act ipoib.SendCopies) {
	runtime.LockOSThread() // processorTime reads the clock of this thread
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

// holdHandles puts the address handles of to into the copier, and counts the copier as a user of each, so
// that none is destroyed while the others are made. It leaves out GIDs for which no handle can be made.
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
