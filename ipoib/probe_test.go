package ipoib

import (
	"strings"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/nexthop"
	"ipoibcm/wire/encap"
)

// jumbo is a host whose underlay has jumbo frames.
func jumbo(m Mode) Options { return Options{Mode: m, PathMTU: ib.MTU4096, Idle: time.Hour} }

// narrow has what a path through a smaller underlay swallows be lost, both ways.
func narrow(path ib.MTU, datagram int, nodes ...*node) {
	for _, n := range nodes {
		n.hole, n.holeUD = path, datagram
	}
}

// carry has a send large packets for d, and returns whether the last one arrived.
func (w *world) carry(a, b *node, d time.Duration) bool {
	var last []byte
	for end := w.now.Add(d); w.now.Before(end); w.run(500 * time.Millisecond) {
		last = a.ping("10.0.0.2", 1200, false)
	}
	return b.got(last) == 1
}

// Over UC a path that carries less than its ends is found within half a second of the
// connection, is said, and more is used again once it carries more.
func TestProbesOverUC(t *testing.T) {
	for _, tt := range []struct {
		name     string
		path     ib.MTU
		datagram int
		want     ib.MTU
		wantUD   int
	}{
		{"a hop of 1500", ib.MTU1024, 1424, ib.MTU1024, 1424},
		{"a hop of 1420", ib.MTU1024, 1344, ib.MTU1024, 1344},
		{"a hop of 3000", ib.MTU2048, 2044, ib.MTU2048, 2044},
		{"none", 0, 0, ib.MTU4096, 2044},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t, 43)
			a, b := w.node(1, jumbo(ModeUC)), w.node(2, jumbo(ModeUC))
			narrow(tt.path, tt.datagram, a, b)
			w.run(2 * time.Second)
			a.ping("10.0.0.2", 100, true)
			w.run(600 * time.Millisecond)
			ping := a.ping("10.0.0.2", 60000, true)
			w.run(100 * time.Millisecond)
			w.agree(a, b)
			if got := w.mtuOf(a); got != tt.want {
				t.Errorf("path MTU %v, want %v", got, tt.want)
			}
			if n := b.got(ping); n != 1 {
				t.Errorf("a packet of 60000 octets arrived %d times, want once", n)
			}
			p := a.f.peers.byLink[b.link()]
			if got := a.f.udMTUTo(p); got != tt.wantUD {
				t.Errorf("datagrams of up to %d octets, want %d", got, tt.wantUD)
			}
			if path := a.f.path(p); path.Kind != nexthop.PathConn || path.UDMTU != 1020 {
				t.Errorf("path %+v, want a connection, and 1020 octets by UD beside it", path)
			}
			lowered := a.counter("path_mtu_lowered") + b.counter("path_mtu_lowered")
			if want := tt.want != ib.MTU4096; (lowered > 0) != want || lowered > 2 {
				t.Errorf("lowered %d times, lowered wanted %v", lowered, want)
			}
			why := strings.Join(a.explain(ip4("10.0.0.2")).Reasons, "\n")
			if got, want := strings.Contains(why, "larger probes were lost on the way"), tt.want != ib.MTU4096; got != want {
				t.Errorf("explain names the hole: %v, want %v\n%s", got, want, why)
			}
		})
	}
}

// What a path carries again is used again while there is traffic; where larger packets cannot
// be probed by datagrams, ten minutes later by the next connection.
func TestProbesRaise(t *testing.T) {
	for _, mode := range []Mode{ModeUC, ModeRC} {
		t.Run(mode.String(), func(t *testing.T) {
			w := newWorld(t, 44)
			a, b := w.node(1, jumbo(mode)), w.node(2, jumbo(mode))
			narrow(ib.MTU1024, 1424, a, b)
			w.run(2 * time.Second)
			a.ping("10.0.0.2", 100, true)
			w.run(time.Second)
			a.ping("10.0.0.2", 60000, true)
			w.run(2 * time.Second)
			if got := w.mtuOf(a); got != ib.MTU1024 {
				t.Fatalf("path MTU %v, want %v", got, ib.MTU1024)
			}
			narrow(0, 0, a, b)
			if !w.carry(a, b, 30*time.Second) {
				t.Error("packets are lost after the path was found to carry more")
			}
			w.agree(a, b)
			if got := w.mtuOf(a); got != ib.MTU4096 {
				t.Errorf("path MTU %v half a minute later, want %v", got, ib.MTU4096)
			}
		})
	}
}

// What probes have found outlives the connection: the next one sends larger packets only after one of
// them has been answered, however long ago the last was lost, and none of a program's is lost to find out.
func TestLargerIsProvenFirst(t *testing.T) {
	w := newWorld(t, 49)
	opt := jumbo(ModeUC)
	opt.Idle = 30 * time.Second
	a, b := w.node(1, opt), w.node(2, opt)
	narrow(ib.MTU2048, 2044, a, b)
	w.run(2 * time.Second)
	a.ping("10.0.0.2", 100, true)
	w.run(time.Second)
	for i, want := range []ib.MTU{ib.MTU2048, ib.MTU2048, ib.MTU4096} {
		if want == ib.MTU4096 {
			narrow(0, 0, a, b)
		}
		w.run(9 * time.Minute)
		if n := len(a.f.Conns()); n != 0 {
			t.Fatalf("%d: %d connections after nine minutes without a packet, want none", i, n)
		}
		var pings [][]byte
		for range 40 {
			pings = append(pings, a.ping("10.0.0.2", 8000, false))
			w.run(25 * time.Millisecond)
		}
		w.run(time.Second)
		for k, ping := range pings {
			if n := b.got(ping); n != 1 {
				t.Errorf("%d: packet %d arrived %d times, want once", i, k, n)
			}
		}
		w.agree(a, b)
		if got := w.mtuOf(a); got != want {
			t.Errorf("%d: path MTU %v, want %v", i, got, want)
		}
	}
}

// A path that comes to carry less while a UC connection is in use is noticed.
func TestProbesNoticeAChange(t *testing.T) {
	w := newWorld(t, 45)
	a, b := w.node(1, jumbo(ModeUC)), w.node(2, jumbo(ModeUC))
	w.run(2 * time.Second)
	w.carry(a, b, 5*time.Second)
	narrow(ib.MTU1024, 1424, a, b)
	w.carry(a, b, 20*time.Second)
	w.agree(a, b)
	if got := w.mtuOf(a); got != ib.MTU1024 {
		t.Errorf("path MTU %v, want %v", got, ib.MTU1024)
	}
}

// Datagrams to a peer are as large as what reaches it; those that the peer sends are not
// concerned, and senders of larger ones hear so.
func TestProbesOverUD(t *testing.T) {
	w := newWorld(t, 46)
	a, b := w.node(1, jumbo(ModeUD)), w.node(2, jumbo(ModeUD))
	narrow(0, 1424, b)
	w.run(2 * time.Second)
	b.ping("10.0.0.1", 100, true)
	w.run(time.Second)
	a.ping("10.0.0.2", 100, true)
	for _, c := range []struct {
		of   *node
		dst  string
		want int
	}{{b, "10.0.0.1", 1424}, {a, "10.0.0.2", 2044}} {
		if p, ok := c.of.path(ip4(c.dst)); !ok || p.MTU != c.want {
			t.Errorf("path to %s: MTU %d (known: %v), want %d", c.dst, p.MTU, ok, c.want)
		}
		large := c.of.ping(c.dst, 2000, true)
		w.run(time.Second)
		if to := w.nodes[c.dst[len(c.dst)-1]-'1']; to.got(large) != c.want/2044 {
			t.Errorf("2000 octets to %s arrived %d times, want %d", c.dst, to.got(large), c.want/2044)
		}
	}
	if n := b.counter("icmp_too_big"); n != 1 {
		t.Errorf("%d ICMP messages to senders of more than that, want 1", n)
	}
	if why := strings.Join(b.explain(ip4("10.0.0.1")).Reasons, "\n"); !strings.Contains(why,
		"datagrams of up to 1424 octets") {
		t.Errorf("explained as:\n%s", why)
	}
}

// An older version answers no probes: nothing changes for it.
func TestProbesToAnOlderVersion(t *testing.T) {
	w := newWorld(t, 47)
	a, b := w.node(1, jumbo(ModeUC)), w.node(2, jumbo(ModeUC))
	b.older = true
	w.run(2 * time.Second)
	if !w.carry(a, b, 60*time.Second) {
		t.Error("a packet is lost")
	}
	w.agree(a, b)
	if got := w.mtuOf(a); got != ib.MTU4096 {
		t.Errorf("path MTU %v, want %v", got, ib.MTU4096)
	}
	if n := len(a.probes); n > 30 {
		t.Errorf("%d probes in a minute to a peer that answers none, want 30 at most", n)
	}
}

// A probe is answered once, shortly, to who has sent it, and an answer to nothing that we have
// asked changes nothing.
func TestProbeAnswers(t *testing.T) {
	w := newWorld(t, 48)
	a, b := w.node(1, jumbo(ModeUD)), w.node(2, jumbo(ModeUD))
	w.run(2 * time.Second)
	b.probes = nil
	ask := func(p encap.Probe) {
		body, _ := p.AppendBinary(nil)
		b.recvUD(a.link(), b.opt.Link.GID, frameOf(encap.PathProbe, body))
	}
	ask(encap.Probe{Octets: 2000, ID: 5})
	if len(b.probes) != 1 || b.probes[0] != encap.ProbeLen {
		t.Errorf("answered with %d octets, want one frame of %d", b.probes, encap.ProbeLen)
	}
	ask(encap.Probe{Octets: 2044, ID: 5, Answer: true})
	if n := b.counter("drop_path_probe"); n != 1 {
		t.Errorf("%d answers refused, want 1", n)
	}
}
