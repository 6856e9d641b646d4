package ipoib

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"ipoibcm/internal/expect"
	"ipoibcm/neigh"
	"ipoibcm/wire/mad"
)

// TestExplainWhileItHappens looks at a neighbour and its connection at every
// stage: whatever the machine keeps, somebody can ask what for.
func TestExplainWhileItHappens(t *testing.T) {
	w := newWorld(t, 5)
	a, b := w.node(1, Options{Idle: time.Minute}), w.node(2, Options{Idle: time.Minute})
	w.run(2 * time.Second)
	says := func(stage, want string) {
		t.Helper()
		if e := a.explain(ip4("10.0.0.2")); !strings.Contains(strings.Join(e.Reasons, "\n"), want) {
			t.Errorf("%s: %q, want it to say %q", stage, e.Reasons, want)
		}
	}
	conn := func(n *node, stage, want string) {
		t.Helper()
		if cs := n.f.Conns(); len(cs) != 1 || !strings.Contains(cs[0].Why, want) {
			t.Errorf("%s: %+v, want one connection that is there because %q", stage, cs, want)
		}
	}
	outcome := func(stage, dst string, want Outcome) {
		t.Helper()
		if e := a.explain(ip4(dst)); e.Outcome != want {
			t.Errorf("%s: outcome %v, want %v: %q", stage, e.Outcome, want, e.Reasons)
		}
	}
	says("before", "the next packet asks for it")
	outcome("before", "10.0.0.2", OutcomeUnknown)
	outcome("own address", "10.0.0.1", OutcomeSent)
	outcome("group", "239.1.2.3", OutcomeSent)
	outcome("no route", "203.0.113.9", OutcomeDropped)
	w.loss = 1
	a.ping("10.0.0.2", 9000, true)
	says("asked", "1 times so far; 1 packets wait")
	n := a.f.Neighbours()
	expect.MustEqual(t, len(n), 1, "length of n")
	expect.Equal(t, n[0].Queued, 1, "Queued")
	expect.Equal(t, n[0].QueuedOctets, 9000, "QueuedOctets")
	w.run(5 * time.Second)
	says("no answer", "nobody answered")
	outcome("no answer", "10.0.0.2", OutcomeDropped)
	w.run(5 * time.Second)

	w.loss = 0
	w.dropMAD = func(_ *node, m mad.Message) bool { _, is := m.(mad.REQ); return is }
	a.ping("10.0.0.2", 9000, true)
	w.run(100 * time.Millisecond)
	says("dialling", "larger packets wait (1 now)")
	conn(a, "dialling", "our REQ waits")
	w.dropMAD = func(_ *node, m mad.Message) bool { _, is := m.(mad.RTU); return is }
	w.run(300 * time.Millisecond) // and the REQ is repeated; data stands for the RTU
	outcome("up", "10.0.0.2", OutcomeSent)
	conn(a, "up", "packets to 10.0.0.2 go by it; closed after 1m0s more")
	conn(b, "up", "packets to 10.0.0.1 go by it")

	// b forgets the neighbour, as if it had aged, and a still sends.
	for _, p := range b.f.peers.byLink {
		for len(p.addrs) > 0 {
			b.f.unlearn(p.addrs[0], neigh.ExpireUnused)
		}
	}
	conn(b, "without a neighbour", "no neighbour leads to it; closed after")
	givenUpWithLink(w)
}

// givenUpWithLink: what was queued when a peer is given up is counted.
func givenUpWithLink(w *world) {
	w.t.Helper()
	w.dropMAD = func(*node, mad.Message) bool { return true }
	c := w.node(3, Options{})
	for i := range 3 {
		c.ping("10.0.0.2", 9000+i, true)
	}
	w.run(50 * time.Millisecond)
	c.kernel(c.k.Up(false))
	if n := c.counter("drop_connection_queue_given_up"); n != 3 {
		w.t.Errorf("%d packets were given up with the link, want 3", n)
	}
}

// TestExplainNoRoom: a neighbour whose interface found no room on record is
// reached by UD, and explained so.
func TestExplainNoRoom(t *testing.T) {
	w := newWorld(t, 6)
	a := w.node(1, Options{MaxPeers: 1})
	w.node(2, Options{})
	w.node(3, Options{})
	w.run(2 * time.Second)
	for _, to := range []string{"10.0.0.2", "10.0.0.3"} {
		a.ping(to, 100, true)
		w.run(time.Second)
	}
	e := a.explain(ip4("10.0.0.3"))
	switch {
	case e.Mode != "UD":
		t.Errorf("Mode is %v, want \"UD\"", e.Mode)
	case e.Link.IsZero():
		t.Errorf("explained as %+v", e)
	case !strings.Contains(fmt.Sprint(e.Reasons), "no room"):
		t.Errorf("%q does not say \"no room\"", fmt.Sprint(e.Reasons))
	}
}

// TestFirstPacketTooLarge: a first packet that not even the connection it opens
// will carry whole waits for it, and is cut to what it carries.
func TestFirstPacketTooLarge(t *testing.T) {
	w := newWorld(t, 7)
	a, b := w.node(1, Options{ReceiveMTU: 9000}), w.node(2, Options{ReceiveMTU: 4096})
	w.run(2 * time.Second)
	n := len(b.tun)
	a.ping("10.0.0.2", 20000, false)
	w.run(time.Second)
	// 4755-7.2-1: 20000 octets in pieces of at most 4092, header included
	if got := len(b.tun) - n; got != 5 || a.onUD != 0 {
		t.Errorf("%d pieces arrived, want 5 by the connection (%d packets went by UD)", got, a.onUD)
	}
	if n := a.counter("drop_oversize"); n != 0 {
		t.Errorf("%d pieces were dropped for their size", n)
	}
}

// What is said of an address agrees with itself: nothing of a peer where there is
// none, no MTU without a path, no CM without a connection in sight.
func TestExplainAgreesWithItself(t *testing.T) {
	w := newWorld(t, 5)
	a, b := w.node(1, Options{}), w.node(2, Options{Mode: ModeUD})
	w.run(2 * time.Second)
	for _, tt := range []struct{ name, addr string }{{"our own", "10.0.0.1"}, {"unknown", "10.0.0.77"}} {
		e := a.explain(ip4(tt.addr))
		if e.Mode != "none" {
			t.Errorf("%s: mode %s, want none", tt.name, e.Mode)
		}
		if e.Path.MTU != 0 {
			t.Errorf("%s: MTU %d beside mode none", tt.name, e.Path.MTU)
		}
		if !e.Link.IsZero() {
			t.Errorf("%s: peer %v", tt.name, e.Link)
		}
	}
	a.ping("10.0.0.2", 100, true)
	w.run(2 * time.Second)
	e := a.explain(ip4("10.0.0.2"))
	if e.Mode != "UD" {
		t.Errorf("a UD peer: mode %s, want UD", e.Mode)
	}
	if e.ByCM {
		t.Error("a UD peer: CM messages have a path, and none can be sent")
	}
	if text := strings.Join(e.Reasons, "\n"); strings.Contains(text, "QP 1") {
		t.Errorf("a UD peer: it speaks of QP 1:\n%s", text)
	}
	if e.Path.MTU != 2044 {
		t.Errorf("a UD peer: MTU %d, want 2044", e.Path.MTU)
	}
	_ = b
}
