package ipoib

import (
	"strings"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/verbs"
)

// mtuOf returns the path MTU of the one connection of n.
func (w *world) mtuOf(n *node) ib.MTU {
	w.t.Helper()
	conns := n.f.Conns()
	if len(conns) != 1 {
		w.Fatalf("%s has %d connections, want 1", n.name, len(conns))
	}
	return conns[0].PathMTU
}

// A path that swallows large packets gets connections with a path MTU that it
// carries, from either end, without a pause; and larger ones again once ten minutes
// have passed.
func TestBlackHole(t *testing.T) {
	w := newWorld(t, 41)
	a, b := w.node(1, Options{Idle: time.Minute, PathMTU: ib.MTU4096}),
		w.node(2, Options{Idle: time.Minute, PathMTU: ib.MTU4096})
	a.hole = ib.MTU2048 // one way only: b does not notice by itself
	w.run(2 * time.Second)
	a.ping("10.0.0.2", 100, true)
	w.run(time.Second)
	if got := w.mtuOf(a); got != ib.MTU4096 {
		t.Fatalf("path MTU %v before anything was lost, want %v", got, ib.MTU4096)
	}
	a.ping("10.0.0.2", 5000, false) // the loss takes 0.54 s to find
	w.run(time.Second)
	a.ping("10.0.0.2", 5000, true)
	w.run(time.Second)
	w.agree(a, b)
	if got := w.mtuOf(a); got != basePathMTU {
		t.Errorf("path MTU %v after large packets were lost, want %v", got, basePathMTU)
	}
	if got := a.f.n[nBlackHoles]; got != 1 {
		t.Errorf("%d black holes counted, want 1", got)
	}
	if why := strings.Join(a.explain(ip4("10.0.0.2")).Reasons, "\n"); !strings.Contains(why,
		"larger packets were lost on the way") {
		t.Errorf("explained as:\n%s", why)
	}
	w.run(3 * time.Minute) // idle: the connection goes
	b.ping("10.0.0.1", 5000, true)
	w.run(2 * time.Second)
	w.agree(a, b)
	if got := w.mtuOf(b); got != basePathMTU {
		t.Errorf("path MTU %v of a REQ of the other end, want %v", got, basePathMTU)
	}
	a.hole = 0
	w.run(12 * time.Minute)
	a.ping("10.0.0.2", 5000, true)
	w.run(2 * time.Second)
	if got := w.mtuOf(a); got != ib.MTU4096 {
		t.Errorf("path MTU %v ten minutes later, want %v", got, ib.MTU4096)
	}
}

// A connection that ends although its packets are small, or whose peer is gone, says
// nothing of the path's MTU.
func TestNoBlackHole(t *testing.T) {
	for _, tt := range []struct {
		name string
		lose func(w *world, a, b *node)
	}{
		{"the peer is gone", func(w *world, a, b *node) {
			b.dead = true
			a.ping("10.0.0.2", 5000, false)
			w.run(20 * time.Second)
			b.dead = false
			w.run(3 * time.Minute)
		}},
		{"a connection that served", func(w *world, a, _ *node) {
			w.run(settled)
			a.step(QPError{Conn: a.f.conns.byAge()[0].id, Status: verbs.RetryExceeded})
		}},
		{"another error", func(_ *world, a, _ *node) {
			a.step(QPError{Conn: a.f.conns.byAge()[0].id, Status: verbs.RemoteAccess})
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t, 42)
			a, b := w.node(1, Options{PathMTU: ib.MTU4096}), w.node(2, Options{PathMTU: ib.MTU4096})
			w.run(2 * time.Second)
			a.ping("10.0.0.2", 100, true)
			w.run(time.Second)
			tt.lose(w, a, b)
			p := a.f.peers.byLink[b.link()]
			if got := p.blackHole; got != 0 {
				t.Errorf("a black hole for path MTU %v, want none", got)
			}
			if got := p.pathMTU; got != 0 {
				t.Errorf("path MTU %v to ask for, want the port's", got)
			}
		})
	}
}
