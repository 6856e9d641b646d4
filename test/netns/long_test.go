package netns

import (
	"testing"
	"time"

	"ipoibcm/internal/lab"
)

// Over a round trip of 40 ms more packets are in flight than may be on a short path, and
// TCP has the right hash at the other end.
func TestLongPath(t *testing.T) {
	parallel(t)
	const short = 256 // packets of 4096 octets that may be in flight on a short path
	s := newSegment(t, topology{wire: &lab.Way{Delay: 20 * time.Millisecond}})
	s.start("--mode", "rc")
	a, b := s.hosts[0], s.hosts[1]
	a.connect(b, "RC")
	a.send(b, b.v4, 8<<20)
	done := make(chan struct{})
	go func() { defer close(done); a.send(b, b.v6, 96<<20) }()
	most := 0
	for running := true; running; {
		select {
		case <-done:
			running = false
		case <-time.After(20 * time.Millisecond):
			for _, c := range a.conns(b) {
				most = max(most, c.Health.InFlight)
			}
		}
	}
	if most <= short && !raceDetector {
		t.Errorf("at most %d packets were in flight, want more than %d", most, short)
	}
	t.Logf("at most %d packets were in flight", most)
}
