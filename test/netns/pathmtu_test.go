package netns

import (
	"testing"
	"time"
)

// Between two hosts with jumbo frames the path carries 1500 octets only and says so to
// nobody. TCP is carried all the same, and no connection is made anew for ever.
func TestBlackHole(t *testing.T) {
	parallel(t)
	needNFT(t)
	s := newSegment(t, topology{udMTU: 1280})
	a, b := s.hosts[0], s.hosts[1]
	s.must(a.Swallow(underlay, b.Host, underlay, 1500))
	s.must(b.Swallow(underlay, a.Host, underlay, 1500))
	s.start("--ud-mtu", "1280")
	a.reach(b.v4)
	a.connect(b, "RC")
	began := time.Now()
	a.send(b, b.v4, 8<<20)
	t.Logf("8 MiB in %v, the black hole found in them", time.Since(began).Round(time.Millisecond))
	mine, theirs := a.paired(b, "RC")
	for _, c := range []struct {
		of   string
		path int
	}{{a.Name, mine.PathMTU}, {b.Name, theirs.PathMTU}} {
		if c.path != 1024 {
			t.Errorf("%s has a connection with path MTU %d, want 1024", c.of, c.path)
		}
	}
	if n := a.counter("ipoib", "path_mtu_lowered"); n != 1 {
		t.Errorf("the path MTU was lowered %d times, want once", n)
	}
	before := a.counter("ipoib", "qp_errors")
	r := a.send(b, b.v6, 8<<20)
	t.Logf("8 MiB more in %v", r.Duration.Round(time.Millisecond))
	if n := a.counter("ipoib", "qp_errors") - before; n != 0 {
		t.Errorf("%d connections were lost after that, want none", n)
	}
}
