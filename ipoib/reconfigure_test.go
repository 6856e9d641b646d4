package ipoib

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/mad"
)

// Settings change while a connection is up: it stays, and the next one has them.
func TestReconfigure(t *testing.T) {
	w := newWorld(t, 7)
	a, b := w.node(1, Options{Idle: time.Hour}), w.node(2, Options{Mode: ModeAuto, Idle: time.Hour})
	w.run(2 * time.Second)
	a.ping("10.0.0.2", 100, true)
	w.run(2 * time.Second)
	x, _ := w.agree(a, b)
	if x.Transport != ib.RC {
		t.Fatalf("%v before, want RC", x.Transport)
	}
	a.step(Reconfigure{Mode: ModeUC, ReceiveMTU: 16388, Idle: 20 * time.Second})
	p := a.ping("10.0.0.2", 9000, true)
	w.run(2 * time.Second)
	if y, _ := w.agree(a, b); y.Conn != x.Conn {
		t.Errorf("connection %d, want the old one, %d", y.Conn, x.Conn)
	}
	if got := b.got(p); got != 1 {
		t.Errorf("%d large packets came over the old connection, want 1", got)
	}
	s := a.f.Status()
	expect.Equal(t, s.Mode, ModeUC, "Mode")
	expect.Equal(t, s.ReceiveMTU, 16388, "ReceiveMTU")
	if n := b.neighbour("10.0.0.1"); n.Link.Flags != ModeUC.Flags() {
		t.Errorf("the peer knows flags %v, want %v: it was not told", n.Link.Flags, ModeUC.Flags())
	}

	// Idle ends it twenty seconds after the last packet, no longer after an hour.
	w.run(30 * time.Second)
	if n := len(a.f.Conns()); n != 0 {
		t.Fatalf("%d connections after the new idle time, want none", n)
	}
	var offered []uint32
	w.dropMAD = func(_ *node, m mad.Message) bool {
		if req, is := m.(mad.REQ); is {
			offered = append(offered, receiveMTUOf(t, req.PrivateData[:]))
		}
		return false
	}
	a.ping("10.0.0.2", 100, true)
	w.run(2 * time.Second)
	z, _ := w.agree(a, b)
	if z.Transport != ib.UC {
		t.Errorf("%v afterwards, want UC", z.Transport)
	}
	if len(offered) == 0 || offered[0] != 16388 {
		t.Errorf("Receive MTUs %d offered, want 16388 first", offered)
	}
}

// neighbour returns n's entry for an address.
func (n *node) neighbour(addr string) (found NeighbourInfo) {
	for _, i := range n.f.Neighbours() {
		if i.Addr == ip4(addr) {
			found = i
		}
	}
	return found
}

// receiveMTUOf reads what a REQ offers.
func receiveMTUOf(t *testing.T, b []byte) uint32 {
	t.Helper()
	var pd encap.PrivateData
	if err := pd.UnmarshalBinary(b); err != nil {
		t.Fatal(err)
	}
	return pd.ReceiveMTU
}

// A REQ of a host that is not allowed is dropped: no record, no answer. What there is with
// a host that leaves the list ends at once.
func TestAllow(t *testing.T) {
	w := newWorld(t, 8)
	only := ib.NewGIDSet([]netip.Prefix{netip.PrefixFrom(gid(2).Addr(), 128)})
	a, b, c := w.node(1, Options{Allow: only}), w.node(2, Options{}), w.node(3, Options{})
	w.run(2 * time.Second)
	a.ping("10.0.0.2", 9000, true)
	c.ping("10.0.0.1", 9000, true) // its ARP passes: the data path is not part of this
	w.run(10 * time.Second)
	w.agree(a, b)
	if n := a.counter("drop_not_allowed"); n == 0 {
		t.Error("no REQ of a host that is not allowed was dropped")
	}
	if n := len(c.up()); n != 0 {
		t.Errorf("%d connections with it, want none", n)
	}
	a.step(Reconfigure{Allow: ib.NewGIDSet([]netip.Prefix{netip.PrefixFrom(gid(3).Addr(), 128)})})
	w.run(time.Second)
	if n := len(b.up()); n != 0 {
		t.Errorf("%d connections with a host that has left the list, want none", n)
	}
	a.step(Reconfigure{})
	p := c.ping("10.0.0.1", 9000, true)
	w.run(2 * time.Minute)
	if got := a.got(p); got == 0 {
		t.Error("a host does not get through after the list is empty again")
	}
}

// Limits change while there is more than they allow: no new connection is made, those that carry
// something stay, idle ones go, and a higher limit has room at once.
func TestReconfigureLimits(t *testing.T) {
	w := newWorld(t, 33)
	const others = 24
	a := w.node(1, Options{MaxConns: 64, Idle: time.Hour})
	for i := range others {
		w.node(2+i, Options{Idle: time.Hour})
	}
	w.run(2 * time.Second)
	for i := range others {
		a.ping(fmt.Sprintf("10.0.0.%d", 2+i), 100, true)
	}
	w.run(2 * time.Second)
	if got := len(a.up()); got != others {
		t.Fatalf("%d connections, want %d", got, others)
	}
	first := a.up()[0].Conn
	a.step(Reconfigure{Idle: time.Hour, MaxConns: 16})
	if got := len(a.up()); got != others {
		t.Errorf("%d connections right after, want %d: they are in use", got, others)
	}
	for range 20 {
		a.ping("10.0.0.2", 100, true)
		w.run(time.Second)
	}
	if got, most := len(a.up()), 14; got > most {
		t.Errorf("%d connections once most are idle, want %d at most", got, most)
	}
	if got := a.up()[0].Conn; got != first {
		t.Errorf("the oldest is %d, want %d, which is in use", got, first)
	}
	a.step(Reconfigure{Idle: time.Hour, MaxConns: 64})
	for i := range others {
		a.ping(fmt.Sprintf("10.0.0.%d", 2+i), 100, true)
	}
	w.run(2 * time.Second)
	if got := len(a.up()); got != others {
		t.Errorf("%d connections with the old limit, want %d", got, others)
	}
}

// Neighbours above a new limit are forgotten, those in use stay.
func TestReconfigureNeighbours(t *testing.T) {
	w := newWorld(t, 34)
	const others = 24
	a := w.node(1, Options{Mode: ModeUD})
	for i := range others {
		w.node(2+i, Options{Mode: ModeUD})
	}
	w.run(2 * time.Second)
	for i := range others {
		a.ping(fmt.Sprintf("10.0.0.%d", 2+i), 100, true)
	}
	w.run(2 * time.Second)
	if got := len(a.f.Neighbours()); got < others {
		t.Fatalf("%d neighbours, want %d", got, others)
	}
	w.run(50 * time.Second) // they are stale
	a.step(Reconfigure{Mode: ModeUD, MaxPeers: 16})
	if got := len(a.f.Neighbours()); got > 16 {
		t.Errorf("%d neighbours, want 16 at most", got)
	}
	if got := len(a.f.peers.byLink); got > 16 {
		t.Errorf("%d interfaces on record, want 16 at most", got)
	}
}
