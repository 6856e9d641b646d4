package netns

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"ipoibcm/control"
	"ipoibcm/internal/lab"
)

// A sweep of addresses fills the neighbour cache to its limit and no further; who answers
// gets a place all the same.
func TestNeighbourLimit(t *testing.T) {
	parallel(t)
	s, a, b := newPair(t)
	a.runFile("limits: {neighbours: 16}\n")
	b.run()
	dst := netip.MustParseAddr("10.0.0.100")
	for range 40 {
		_, _ = a.Ping(lab.Ping{Dst: dst, Timeout: time.Millisecond})
		dst = dst.Next()
	}
	s.eventually(patience, "8 neighbours at least after a sweep of 40", func() error {
		var known control.Neighbours
		s.must(a.agent.Get(s.ctx, control.PathNeigh, &known))
		n := len(known.Neighbours)
		if n > 16 {
			t.Errorf("%d neighbours after a sweep of 40, want 16 at most", n)
		}
		if n < 8 {
			return fmt.Errorf("%d", n)
		}
		return nil
	})
	a.reach(b.v4)
	a.rewrite(a.settings("limits: {neighbours: 32}\n"))
	if err := containsAll(a.reload(0, "--check"), "limits.neighbours at once"); err != nil {
		t.Error(err)
	}
}
