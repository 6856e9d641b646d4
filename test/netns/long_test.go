package netns

import (
	"testing"
	"time"

	"ipoibcm/internal/lab"
)

// Over a round trip of 100 ms more packets are in flight than may be on a short path, and
// TCP has the right hash at the other end. A machine that has little time for the stream
// fills the path later, or not at all in one transfer.
func TestLongPath(t *testing.T) {
	parallel(t)
	const short = 256 // packets of 4096 octets that may be in flight on a short path
	s := newSegment(t, topology{wire: &lab.Way{Delay: 50 * time.Millisecond}})
	s.start("--mode", "rc")
	a, b := s.hosts[0], s.hosts[1]
	a.connect(b, "RC")
	a.send(b, b.v4, 8<<20)
	most := 0
	for range 5 {
		most = max(most, a.mostInFlight(b, 96<<20))
		if most > short || raceDetector {
			break
		}
	}
	if most <= short && !raceDetector {
		t.Errorf("at most %d packets were in flight, want more than %d", most, short)
	}
	t.Logf("at most %d packets were in flight", most)
}

// mostInFlight sends octets to b by TCP and returns the most packets that h's connections
// to it had in flight meanwhile.
func (h *host) mostInFlight(b *host, octets int64) (most int) {
	h.seg.Helper()
	done := make(chan struct{})
	go func() { defer close(done); h.send(b, b.v6, octets) }()
	for {
		select {
		case <-done:
			return most
		case <-time.After(20 * time.Millisecond):
			for _, c := range h.conns(b) {
				most = max(most, c.Health.InFlight)
			}
		}
	}
}
