package ipoib

import (
	"testing"
	"time"

	"ipoibcm/ib"
)

// What a REJ 26 lowered is asked for again once the peer may have changed: after ten
// minutes the REQ has our own path MTU again.
func TestLoweredForAWhile(t *testing.T) {
	w := newWorld(t, 31)
	a, b := w.node(1, Options{Idle: time.Minute}), w.node(2, Options{Idle: time.Minute, PathMTU: ib.MTU512})
	w.run(2 * time.Second)
	asked := func(when string, want ib.MTU) {
		t.Helper()
		a.ping("10.0.0.2", 100, true)
		w.settle()
		if len(a.reqs) == 0 {
			w.Fatalf("%s: no REQ", when)
		}
		if got := a.reqs[len(a.reqs)-1].PathMTU; got != want {
			w.Fatalf("%s: the REQ has path MTU %v, want %v", when, got, want)
		}
	}
	asked("after a REJ 26", ib.MTU512)
	b.step(UnderlayChanged{Link: b.opt.Link, PathMTU: ib.MTU1024, Active: true})
	w.run(5 * time.Minute)
	asked("five minutes later", ib.MTU512)
	w.run(6 * time.Minute)
	asked("eleven minutes later", ib.MTU1024)
}
