package netns

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"ipoibcm/internal/lab"
)

// What the host sends while no process serves the interface waits at the TUN, and the next process
// sends all of it: it knows the interface before it takes the first packet.
func TestHandOverPacketsWait(t *testing.T) {
	parallel(t)
	const restarts, requests = 5, 40
	_, a, b, k := keptPair(t)
	for i := range restarts {
		a.stop()
		var wg sync.WaitGroup
		var lost atomic.Int32
		for range requests {
			wg.Go(func() {
				if _, err := a.Ping(lab.Ping{Dst: b.v4, Timeout: patience}); err != nil {
					lost.Add(1)
				}
			})
		}
		time.Sleep(50 * time.Millisecond) // until they wait
		k.start()
		if n := a.counter("ipoib", "drop_interface_down"); n != 0 {
			t.Errorf("restart %d: %d packets came before the interface was known to be up, want none", i, n)
		}
		wg.Wait()
		if n := lost.Load(); n != 0 {
			t.Errorf("restart %d: %d of %d requests were not answered", i, n, requests)
		}
	}
}
