package netns

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"ipoibcm/control"
	"ipoibcm/internal/lab"
)

// A host talks only with those in allow: nothing is kept of the others, who get no answer.
// The list changes while the agent runs, and connections to those who leave it end.
func TestAllow(t *testing.T) {
	parallel(t)
	s, a, b, c := newTrio(t)
	gid := func(h *host) string {
		g, err := h.LinkLocal(underlay)
		s.must(err)
		return g.String()
	}
	a.runFile(fmt.Sprintf("allow: [%s]\n", gid(b)))
	b.run()
	c.run()
	a.connect(b, "RC")
	a.ping(b.v6, 1000, true)
	unanswered := func(from, to *host) {
		t.Helper()
		for _, dst := range []netip.Addr{to.v4, to.v6} {
			if _, err := from.Ping(lab.Ping{Dst: dst, Timeout: 500 * time.Millisecond}); err == nil {
				t.Errorf("%s answers %s, whom it does not allow or who does not allow it", dst, from.Name)
			}
		}
	}
	unanswered(c, a)
	unanswered(a, c)
	if a.counter("datapath", "rx_drop_not_allowed") == 0 {
		t.Error("no datagram was counted as not allowed")
	}
	var known control.Neighbours
	s.must(a.agent.Get(s.ctx, control.PathNeigh, &known))
	for _, n := range known.Neighbours {
		if n.IP != c.v4.String() && n.IP != c.v6.String() {
			continue
		}
		if n.LinkAddr != "" {
			t.Errorf("%s is known to be at %s: the host is not allowed", n.IP, n.LinkAddr)
		}
	}

	a.rewrite(a.settings(fmt.Sprintf("allow: [%s]\n", gid(c))))
	a.reload(0)
	s.eventually(patience, "the connection to b ends", func() error {
		conns, err := a.agent.Conns(s.ctx)
		if err != nil {
			return err
		}
		for _, v := range conns {
			if v.Peer[2:] == b.link() {
				return fmt.Errorf("%s", v.Peer)
			}
		}
		return nil
	})
	unanswered(b, a)
	a.connect(c, "RC")
	c.ping(a.v6, 1000, true)

	a.rewrite(a.settings(""))
	a.reload(0)
	b.reach(a.v4)
}
