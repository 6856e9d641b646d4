package ipoib

import (
	"encoding/binary"
	"fmt"
	"testing"
	"time"

	"ipoibcm/cm"
	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/wire/mad"
)

func TestUCBudget(t *testing.T) {
	w := newWorld(t, 17)
	a := w.node(1, Options{Mode: ModeUC, UCBudget: 16 * 65524})
	b, c := w.node(2, Options{Mode: ModeUC}), w.node(3, Options{Mode: ModeUC})
	w.run(2 * time.Second)
	a.ping("10.0.0.2", 100, true)
	w.settle()
	a.ping("10.0.0.3", 100, true)
	w.settle()
	expect.MustEqual(w, b.up()[0].MTU, 65520, "b's MTU")
	expect.MustEqual(w, c.up()[0].MTU, 16384, "c's MTU")
}

func TestMaxConns(t *testing.T) {
	w := newWorld(t, 18)
	a, b, c := w.node(1, Options{MaxConns: 1}), w.node(2, Options{}), w.node(3, Options{})
	w.run(2 * time.Second)
	a.ping("10.0.0.2", 100, true)
	w.settle()
	p := a.ping("10.0.0.3", 100, true)
	q := c.ping("10.0.0.1", 100, true)
	w.settle()
	w.agree(a, b)
	expect.MustEqual(w, c.got(p), 1, "c's copies of p")
	expect.MustEqual(w, a.got(q), 1, "a's copies of q")
	if a.counter("connections_full") == 0 {
		w.Fatalf("a's connections_full is 0, want more")
	}
	// Nobody is refused, because nobody is invited, until there is room.
	switch rej, ok := lastREJ(a); {
	case ok:
		w.Fatalf("%+v was sent, want no REJ", rej)
	case len(c.reqs) != 0:
		w.Fatalf("c's reqs has %v elements, want 0", len(c.reqs))
	case a.counter("modes_withdrawn") != 1:
		w.Fatalf("a's modes_withdrawn is %v, want 1", a.counter("modes_withdrawn"))
	}
	a.step(QPError{Conn: a.up()[0].Conn})
	w.run(time.Minute)
	c.ping("10.0.0.1", 100, true) // after so long it asks whether a is still there
	w.settle()
	w.wantConnection(c, a, "10.0.0.1", "with room again")
}

// A UC connection that we accept past the budget of receive rings has smaller
// buffers, and the REP says so: Receive MTU is what its sender can accept.
// 4755-5.1-2, 4755-5.1-6
func TestUCBudgetInREP(t *testing.T) {
	w := newWorld(t, 24)
	a := w.node(1, Options{Mode: ModeUC, UCBudget: 16 * 65524}) // of one ring
	b, c := w.node(2, Options{Mode: ModeUC}), w.node(3, Options{Mode: ModeUC})
	w.run(2 * time.Second)
	for _, tt := range []struct {
		from *node
		want uint32
	}{{b, 65524}, {c, 16388}} {
		p := tt.from.ping("10.0.0.1", 100, true)
		w.settle()
		if got := a.got(p); got != 1 {
			w.Fatalf("%s: a got %d packets, want 1", tt.from.name, got)
		}
		rep, ok := last[mad.REP](a)
		if !ok {
			w.Fatalf("%s: no REP", tt.from.name)
		}
		if got := binary.BigEndian.Uint32(rep.PrivateData[4:8]); got != tt.want {
			w.Fatalf("%s: the REP says Receive MTU %d, want %d", tt.from.name, got, tt.want)
		}
		conns := tt.from.up()
		if len(conns) != 1 {
			w.Fatalf("%s: %d connections, want 1", tt.from.name, len(conns))
		}
		if got := conns[0].MTU; got != int(tt.want)-4 {
			w.Fatalf("%s: MTU %d, want %d", tt.from.name, got, tt.want-4)
		}
	}
}

// A host that asks in the names of a hundred interfaces does not have the places of others: so many are
// its share, and others connect. When it has let go of some, it has others.
func TestConnectionsOfOneHost(t *testing.T) {
	w := newWorld(t, 27)
	a, b, c := w.node(1, Options{}), w.node(2, Options{}), w.node(3, Options{})
	w.run(2 * time.Second)
	ask := func(i int) {
		req := honest(a, b)
		req.LocalCommID, req.LocalQPN, req.MaxCMRetries = mad.CommID(0x100+i), ib.QPN(0x1000+i), 15
		says(&req, ib.QPN(0x2000+i), 65524)
		w.inject(b, a, req)
		w.run(20 * time.Millisecond)
	}
	for i := range 2 * connsPerHost {
		ask(i)
	}
	if n := len(a.f.Conns()); n != connsPerHost {
		t.Errorf("there are %d connections with one host, want %d", n, connsPerHost)
	}
	if n := a.counter("connections_of_host_full"); n != connsPerHost {
		t.Errorf("%d are counted, want %d", n, connsPerHost)
	}
	if rej, _ := lastREJ(a); rej.Reason != cm.ReasonNoQP {
		t.Errorf("it was rejected for %v, want %v", rej.Reason, cm.ReasonNoQP)
	}
	p := c.ping("10.0.0.1", 9000, true)
	w.run(time.Second)
	if n := a.got(p); n != 1 {
		t.Errorf("the packet of another host arrived %d times, want 1", n)
	}
	w.settle() // none of those ever had an RTU
	w.agree(a, c)
	ask(2 * connsPerHost)
	if n := len(a.f.Conns()); n != 2 {
		t.Errorf("there are %d connections in the end, want 2", n)
	}
}

// Beyond the limit the connection that was used longest ago makes room for another, and
// never one that carries something; nobody is offered no mode for it.
func TestIdleMakesRoom(t *testing.T) {
	w := newWorld(t, 31)
	a := w.node(1, Options{MaxConns: 16, Idle: time.Hour})
	const others = 30
	for i := range others {
		w.node(2+i, Options{Idle: time.Hour})
	}
	w.run(2 * time.Second)
	first := fmt.Sprintf("10.0.0.%d", 2)
	a.ping(first, 100, true)
	w.run(time.Second)
	kept := a.up()[0].Conn
	for i := range others {
		a.ping(fmt.Sprintf("10.0.0.%d", 2+i), 100, true)
		for range 3 {
			a.ping(first, 100, true)
			w.run(4 * time.Second)
		}
		if last := a.up(); last[len(last)-1].Peer.GID != gid(2+i) {
			t.Fatalf("peer %d has no connection: the last is to %v", 2+i, last[len(last)-1].Peer)
		}
	}
	if got := a.up()[0].Conn; got != kept {
		t.Errorf("the oldest connection is %d, want %d, which is used all the time", got, kept)
	}
	if got := a.counter("modes_withdrawn"); got != 0 {
		t.Errorf("modes were withdrawn %d times, want never", got)
	}
	if got, want := a.counter("conns_made_room"), uint64(others-14); got < want {
		t.Errorf("%d connections made room, want %d at least", got, want)
	}
}

// Where all connections carry something the limit is one: no mode is announced. When they fall idle it
// is announced again, without a packet.
func TestLimitWithTraffic(t *testing.T) {
	w := newWorld(t, 32)
	a := w.node(1, Options{MaxConns: 16, Idle: time.Hour})
	for i := range 20 {
		w.node(2+i, Options{Idle: time.Hour})
	}
	w.run(2 * time.Second)
	for range 10 {
		for i := range 20 {
			a.ping(fmt.Sprintf("10.0.0.%d", 2+i), 100, true)
		}
		w.run(time.Second)
	}
	if got := a.counter("conns_made_room"); got != 0 {
		t.Errorf("%d connections made room, want none: all are in use", got)
	}
	if got := a.counter("modes_withdrawn"); got != 1 {
		t.Errorf("modes were withdrawn %d times, want once", got)
	}
	w.run(20 * time.Second)
	if a.f.atCapacity {
		t.Errorf("no mode is announced with %d idle connections", len(a.up()))
	}
}
