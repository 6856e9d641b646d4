//go:build ibverbs && cgo

package ibverbs

import (
	"testing"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/verbs"
	"ipoibcm/verbs/events"
)

// The first receive in RTR or RTS is an event, once.
func TestCommEst(t *testing.T) {
	for _, tt := range []struct {
		transport ib.Transport
		state     verbs.QPState
		want      int
	}{
		{ib.RC, verbs.StateInit, 0}, {ib.RC, verbs.StateRTR, 1}, {ib.RC, verbs.StateRTS, 1}, {ib.RC, verbs.StateError, 0},
		{ib.UC, verbs.StateRTS, 1}, {ib.UD, verbs.StateRTS, 0},
	} {
		d := &Device{}
		d.events = events.NewQueue(&d.count.eventsDropped)
		q := &qp{dev: d, transport: tt.transport}
		q.state.Store(uint32(tt.state))
		q.commEst()
		q.commEst()
		expect.Equal(t, len(d.events.Events()), tt.want, "events of a %v QP in %v", tt.transport, tt.state)
	}
}
