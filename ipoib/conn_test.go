package ipoib

import (
	"fmt"
	"testing"
	"time"

	"ipoibcm/cm"
	"ipoibcm/fib"
	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/serviceid"
	"ipoibcm/wire/ip"
	"ipoibcm/wire/mad"
)

// The life of a peer's connection
//
//	from      event                               to         action
//	none      first packet                        creating   CreateQP; what fits goes by UD
//	creating  QP there                            asked      REQ
//	asked     REP                                 up         RTS, RTU; path, host route, queue
//	asked     REJ 8, no private data              creating   the other service ID; after both, in-band
//	asked     no answer by QP 1                   creating   in-band, if it may know that
//	asked     REJ 8, a UD QPN                     none       forget the neighbour, resolve again
//	asked     REJ 10; REJ 26 once                 creating   a new QP; another size
//	asked     REJ 28, 0x01, we are smaller        waiting    the peer's REQ is due
//	asked     other REJ, no answer                none       pause, doubled each time
//	asked     0x01 REQ, we are smaller            replied    ours withdrawn, REP
//	asked     0x01 REQ, we are larger             asked      REJ 28
//	none, up  0x01 REQ                            replied    REP
//	replied   RTU or data                         up         path moves over; DREQ for an older one
//	up        DREQ, QP error                      none       the next packet starts again
//	up        idle, neighbour gone, link down     none       DREQ

// TestConnection runs testdata/conn-*.txt.
//
//	conn-req            a REQ of a peer that is not known is all that is known of it: 4755-3.2-13, 4755-3.3-2, 4755-5.1-2,
//	                    4755-6-4; an unfinished connection goes: 4755-3.2-7; our own address is no peer: 4755-3.3-11
//	conn-former-life    an RTU that is late makes a connection that no neighbour leads to
func TestConnection(t *testing.T) { playScripts(t, "conn-*") }

func TestFirstPacket(t *testing.T) {
	for _, dst := range []string{"10.0.0.2", "fd00::2"} {
		w := newWorld(t, 1)
		a, b := w.node(1, Options{}), w.node(2, Options{})
		w.run(2 * time.Second) // DAD
		small := a.ping(dst, 100, true)
		large := a.ping(dst, 65520, true)
		if len(a.up()) != 0 || len(a.qps) != 0 {
			w.Fatalf("a connection before address resolution") // 4755-2.3-1
		}
		w.settle()
		// 4755-3.3-10, 4755-5-4: small by UD or connection, large by connection, each once
		if b.got(small) != 1 || b.got(large) != 1 {
			w.Fatalf("%s: got %d and %d", dst, b.got(small), b.got(large))
		}
		x, y := w.agree(a, b)
		// 4755-5.1-5, 4755-5.1-6
		switch {
		case x.MTU != 65520:
			w.Fatalf("x's MTU is %v, want 65520", x.MTU)
		case x.Transport != ib.RC:
			w.Fatalf("x's Transport is %v, want %v", x.Transport, ib.RC)
		case !x.Active:
			w.Fatalf("x's Active is false, want true")
		case x.Class != ClassUnknown && x.Class != ClassRFC:
			w.Fatalf("%+v\n%+v", x, y)
		case y.Class != ClassRFC:
			w.Fatalf("y's Class is %v, want %v", y.Class, ClassRFC)
		}
		// 4755-3.2-6, 4755-3.5-4, 4755-3.1-12: 0x01 and the peer's UD QPN
		if x.ServiceID != 0x0100000000000102 {
			t.Errorf("service ID %#x", x.ServiceID)
		}
		r := a.reqs[0]
		// 4755-2.3-2, 4755-3.2-5
		expect.Equal(t, r.LocalQPN, x.LocalQPN, "LocalQPN")
		expect.Equal(t, r.ServiceID, serviceid.New(serviceid.RFC, 0x102), "ServiceID")
		expect.Equal(t, r.Primary.LocalGID, gid(1), "Primary.LocalGID")
		if x.RemoteQPN == 0 || y.LocalQPN != x.RemoteQPN {
			t.Errorf("REP did not bring the peer's QPN") // 4755-2.3-3, 4755-3.2-3
		}
		if a.onConn == 0 {
			t.Errorf("nothing on the connection")
		}
		// 4755-7-2: and by UD while it is up
		fr := frame(mustEcho("10.0.0.2", "10.0.0.1", 99))
		before := len(a.tun)
		b.sendUD(a.link(), fr)
		w.run(time.Second)
		if len(a.tun) != before+1 {
			t.Errorf("a UD packet was not taken beside the connection")
		}
		// 4755-7.2-1: the MTU of the destination is in its host route
		if a.k.HostMTU(ip4(dst)) != 65520 {
			t.Errorf("host routes %v", a.hostRoutes())
		}
		n := a.onConn
		back := b.ping(a.addr(dst), 3000, true)
		again := a.ping(dst, 65520, true)
		w.run(time.Second)
		if a.got(back) != 1 || b.got(again) != 1 || a.onConn != n+1 || len(a.reqs)+len(b.reqs) != 1 {
			w.Fatalf("not both ways on one connection")
		}
	}
}

// 4755-2.3-5, 4755-5-1: a second address behind the same link-layer address,
// also of the other family, uses the connection that is there.
func TestOneConnectionForAllAddresses(t *testing.T) {
	w := newWorld(t, 1)
	a, b := w.node(1, Options{}), w.node(2, Options{})
	b.addAddr("10.0.0.22/24")
	w.run(2 * time.Second)
	for _, d := range []string{"10.0.0.2", "10.0.0.22", "fd00::2"} {
		p := a.ping(d, 1000, true)
		w.run(3 * time.Second)
		if b.got(p) != 1 {
			w.Fatalf("%s: got %d", d, b.got(p))
		}
	}
	x, _ := w.agree(a, b)
	switch {
	case len(a.reqs)+len(b.reqs) != 1:
		w.Fatalf("%d REQs, addresses %v, host routes %v", len(a.reqs)+len(b.reqs), x.Addrs, a.hostRoutes())
	case len(x.Addrs) != 3:
		w.Fatalf("x's Addrs has %v elements, want 3", len(x.Addrs))
	case len(a.hostRoutes()) != 3:
		w.Fatalf("a's hostRoutes has %v elements, want 3", len(a.hostRoutes()))
	}
}

// The capability matrix: 4755-1-2, 4755-3.1-6, 4755-3.1-15, 4755-7-1, 4755-1-1.
func TestModes(t *testing.T) {
	want := map[[2]Mode]string{}
	for _, m := range []Mode{ModeRC, ModeUC, ModeAuto, ModeUD} {
		for _, k := range []Mode{ModeRC, ModeUC, ModeAuto, ModeUD} {
			want[[2]Mode{m, k}] = "UD"
		}
	}
	want[[2]Mode{ModeRC, ModeRC}], want[[2]Mode{ModeUC, ModeUC}], want[[2]Mode{ModeAuto, ModeAuto}] = "RC", "UC", "RC"
	want[[2]Mode{ModeRC, ModeAuto}], want[[2]Mode{ModeAuto, ModeRC}] = "RC", "RC"
	want[[2]Mode{ModeUC, ModeAuto}], want[[2]Mode{ModeAuto, ModeUC}] = "UC", "UC"
	for k, mode := range want {
		w := newWorld(t, 3)
		a, b := w.node(1, Options{Mode: k[0]}), w.node(2, Options{Mode: k[1]})
		w.run(2 * time.Second)
		p := a.ping("10.0.0.2", 2044, true)
		w.settle()
		q := b.ping("10.0.0.1", 2044, true)
		large := a.ping("10.0.0.2", 9000, true)
		cut := a.ping("10.0.0.2", 9000, false)
		w.settle()
		e := a.explain(ip4("10.0.0.2"))
		expect.MustEqual(w, b.got(p), 1, "%v to %v: b's copies of p", k[0], k[1])
		expect.MustEqual(w, a.got(q), 1, "%v to %v: a's copies of q", k[0], k[1])
		expect.MustEqual(w, e.Mode, mode, "%v to %v: Mode", k[0], k[1])
		if len(e.Reasons) < 3 {
			w.Fatalf("%v to %v: Reasons has %v elements, want at least 3", k[0], k[1], len(e.Reasons))
		}
		if mode == "UD" {
			// 4755-3.1-7, 4755-3.1-8, 4755-3.1-16, 4755-2-1, 4755-2-2: never a REQ to who has no mode in common
			if len(a.reqs)+len(b.reqs) != 0 || len(a.qps)+len(b.qps) != 0 {
				w.Fatalf("%v to %v: a REQ", k[0], k[1])
			}
			// 4755-7.2-1: answered (DF) or fragmented
			expect.MustEqual(w, b.got(large), 0, "%v to %v: b's copies of large", k[0], k[1])
			expect.MustEqual(w, a.counter("icmp_too_big"), 1, "%v to %v: a's icmp_too_big", k[0], k[1])
			expect.MustEqual(w, b.got(cut), 0, "%v to %v: b's copies of cut", k[0], k[1])
			expect.MustEqual(w, a.counter("fragmented"), 1, "%v to %v: a's fragmented", k[0], k[1])
			switch { // 4755-3.1-9
			case a.f.Link().Flags != k[0].Flags():
				t.Errorf("Link.Flags is %v, want %v", a.f.Link().Flags, k[0].Flags())
			case k[0] == ModeUD && a.f.Link().Flags != 0:
				t.Errorf("Link.Flags is %v, want 0", a.f.Link().Flags)
			}
			continue
		}
		if b.got(large) != 1 || b.got(cut) != 1 {
			w.Fatalf("%v to %v: large packets %d %d", k[0], k[1], b.got(large), b.got(cut))
		}
		x, _ := w.agree(a, b)
		if x.Transport.String() != mode {
			w.Fatalf("%v to %v: %v", k[0], k[1], x.Transport)
		}
	}
}

func TestReceiveMTU(t *testing.T) {
	for _, tt := range []struct {
		a, b, want int
	}{{65524, 9000, 8996}, {9000, 65524, 8996}, {65524, 2048, 2044}, {0, 0, 65520}, {5000, 4000, 3996}} {
		w := newWorld(t, 4)
		a, b := w.node(1, Options{ReceiveMTU: tt.a}), w.node(2, Options{ReceiveMTU: tt.b})
		w.run(2 * time.Second)
		a.ping("10.0.0.2", 100, true)
		w.settle()
		x, _ := w.agree(a, b)
		if x.MTU != tt.want || a.k.HostMTU(ip4("10.0.0.2")) != tt.want {
			w.Fatalf("%d and %d: MTU %d, host routes %v", tt.a, tt.b, x.MTU, a.hostRoutes()) // 4755-5.1-5, 4755-5.1-6
		}
		for _, size := range []int{64, 1280, tt.want - 1, tt.want} { // 4755-5.1-3
			if p := a.ping("10.0.0.2", size, true); b.got(p) != 0 {
				t.Fatal("no time passed")
			} else if w.run(time.Second); b.got(p) != 1 {
				w.Fatalf("%d octets: got %d", size, b.got(p))
			}
		}
		if tt.want == 65520 {
			continue
		}
		n := len(a.tun)
		p := a.ping("10.0.0.2", tt.want+1, true)
		w.run(time.Second)
		expect.MustEqual(w, b.got(p), 0, "%d octets with DF: b's copies of p", tt.want+1)
		expect.MustEqual(w, len(a.tun), n+1, "%d octets with DF: length of a's tun", tt.want+1)
		if a.counter("icmp_too_big") == 0 {
			w.Fatalf("%d octets with DF: a's icmp_too_big is 0, want more", tt.want+1)
		}
		src, _ := ip.Src(a.tun[n])
		switch {
		case a.tun[n][20] != 3:
			w.Fatalf("a's tun[n][20] is %v, want 3", a.tun[n][20])
		case a.tun[n][21] != 4:
			w.Fatalf("a's tun[n][21] is %v, want 4", a.tun[n][21])
		case int(a.tun[n][26])<<8|int(a.tun[n][27]) != tt.want:
			w.Fatalf("ICMP % x", a.tun[n][:28])
		case src != ip4("10.0.0.2"):
			w.Fatalf("src is %v, want %v", src, ip4("10.0.0.2"))
		}
		n = len(b.tun)
		a.ping("10.0.0.2", tt.want+1, false)
		w.run(time.Second)
		if len(b.tun) != n+2 {
			w.Fatalf("fragments: %d", len(b.tun)-n)
		}
	}
}

// 4755-5-2: a Receive MTU below the protocols' minimum gets REJ 26 and UD.
func TestUselessReceiveMTU(t *testing.T) {
	w := newWorld(t, 5)
	a, b := w.node(1, Options{}), w.node(2, Options{ReceiveMTU: 1000, UDMTU: 576})
	b.f.ipv6 = false
	w.run(2 * time.Second)
	p := a.ping("10.0.0.2", 500, true)
	w.settle()
	expect.MustEqual(w, b.got(p), 1, "b's copies of p")
	expect.MustEqual(w, len(a.up()), 0, "length of a's up")
	expect.MustEqual(w, len(b.up()), 0, "length of b's up")
	expect.MustEqual(w, len(a.qps), 0, "length of a's qps")
	rej, ok := lastREJ(a)
	if !ok || rej.Reason != cm.ReasonInvalidMTU {
		w.Fatalf("REJ %+v", rej)
	}
	q := b.ping("10.0.0.1", 500, true)
	w.settle()
	if a.got(q) != 1 || len(a.up()) != 0 {
		w.Fatalf("got %d", a.got(q))
	}
}

// A path that carries less than the port is asked for with less, and a REQ that asks
// for more gets REJ 26 with what it carries.
func TestPathMTUToPeer(t *testing.T) {
	for _, tt := range []struct {
		name         string
		dials, takes ib.MTU
		rejs         int
	}{
		{"known to who dials", ib.MTU512, 0, 0},
		{"known to who accepts", 0, ib.MTU512, 1},
		{"less to who dials", ib.MTU256, ib.MTU512, 0},
		{"less to who accepts", ib.MTU512, ib.MTU256, 1},
	} {
		w := newWorld(t, 21)
		a, b := w.node(1, Options{}), w.node(2, Options{})
		a.pathTo, b.pathTo = tt.dials, tt.takes
		w.run(2 * time.Second)
		a.ping("10.0.0.2", 100, true)
		w.settle()
		w.agree(a, b)
		want := ib.MTU256
		if tt.dials == 0 || tt.takes == 0 {
			want = ib.MTU512
		}
		for _, n := range []*node{a, b} {
			for _, q := range n.qps {
				if q.pathMTU != want {
					t.Errorf("%s: %s uses path MTU %v, want %v", tt.name, n.name, q.pathMTU, want)
				}
			}
		}
		if got := len(a.reqs); got != 1+tt.rejs {
			t.Errorf("%s: %d REQs, want %d", tt.name, got, 1+tt.rejs)
		}
		if rej, ok := lastREJ(b); ok != (tt.rejs > 0) {
			t.Errorf("%s: b sent a REJ: %v (%+v)", tt.name, ok, rej)
		} else if ok && rej.Reason != cm.ReasonInvalidMTU {
			t.Errorf("%s: REJ %v, want %v", tt.name, rej.Reason, cm.ReasonInvalidMTU)
		}
	}
}

func TestDeviceMTULowered(t *testing.T) {
	w, a, b := newPair(t, 6)
	a.ping("10.0.0.2", 100, true)
	w.settle()
	w.agree(a, b)
	for _, m := range []int{9000, 1500, 65520} {
		a.kernel(a.k.MTU(m))
		if a.k.HostMTU(ip4("10.0.0.2")) != m || a.paths[ip4("10.0.0.2")].MTU != m {
			t.Errorf("device MTU %d: host routes %v", m, a.hostRoutes())
		}
	}
}

// 4755-3.2-4: the requester's own REJ, after a REP that cannot be used.
func TestRefusedREP(t *testing.T) {
	w := newWorld(t, 7)
	a, b := w.node(1, Options{}), w.node(2, Options{})
	b.f.ipv6 = false // so that it accepts what a cannot use
	b.f.opt.ReceiveMTU = 1000
	w.run(2 * time.Second)
	p := a.ping("10.0.0.2", 500, true)
	w.settle()
	rej, ok := lastREJ(a)
	expect.MustEqual(w, ok, true, "ok")
	expect.MustEqual(w, rej.Reason, cm.ReasonInvalidMTU, "Reason")
	expect.MustEqual(w, b.got(p), 1, "b's copies of p")
	expect.MustEqual(w, len(b.qps), 0, "length of b's qps")
	expect.MustEqual(w, len(a.qps), 0, "length of a's qps")
}

func TestGateway(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		dst, far, gw, net := "10.0.0.2", "192.0.2.9", "10.0.0.2", "192.0.2.0/24"
		if v6 {
			dst, far, gw, net = "fd00::2", "2001:db8::9", "fd00::2", "2001:db8::/32"
		}
		w := newWorld(t, 8)
		a, b := w.node(1, Options{}), w.node(2, Options{})
		a.addRoute("0.0.0.0/0", "10.0.0.3") // nobody there: on-link hosts must not go by it
		a.addRoute("::/0", "fd00::3")
		a.addRoute(net, gw)
		w.run(2 * time.Second)
		p := a.ping(far, 9000, true)
		q := a.ping(dst, 9000, true)
		w.settle()
		expect.MustEqual(w, b.got(p), 1, "%s: b's copies of p", far)
		expect.MustEqual(w, b.got(q), 1, "%s: b's copies of q", far)
		expect.MustEqual(w, len(a.reqs), 1, "%s: length of a's reqs", far)
		// What was too large for UD waited, so the kernel never heard of a smaller MTU.
		if a.k.Flushed != 0 {
			w.Fatalf("%d flushes", a.k.Flushed)
		}
		e := a.explain(ip4(far))
		if e.NextHop != ip4(gw) || e.Mode != "RC" {
			w.Fatalf("%+v", e)
		}
		if path, _ := a.path(ip4(far)); path.Kind != fib.PathConn || path.MTU != 65520 {
			w.Fatalf("path %+v", path)
		}
		if a.k.HostMTU(ip4(far)) != 0 {
			t.Errorf("a host route for what is behind a gateway")
		}
		// a neighbour that the routes put behind a gateway gets no path of its own
		a.addRoute(ipPrefix(dst+"/"+fmt.Sprint(ip4(dst).BitLen())).String(), "10.0.0.3")
		if path, _ := a.path(ip4(dst)); path.Kind == fib.PathConn || a.k.HostMTU(ip4(dst)) != 0 {
			w.Fatalf("path %+v, host routes %v", path, a.hostRoutes())
		}
	}
}

// connectedPair returns two hosts of a world with a connection.
func connectedPair(t *testing.T, opt Options) (*world, *node, *node) {
	w := newWorld(t, 9)
	a, b := w.node(1, opt), w.node(2, Options{})
	w.run(2 * time.Second)
	a.ping("10.0.0.2", 100, true)
	w.settle()
	w.agree(a, b)
	return w, a, b
}

// noneLeft fails the test if anything of a connection is left at a or b.
func noneLeft(w *world, a, b *node) {
	w.t.Helper()
	if len(a.f.Conns())+len(b.f.Conns())+len(a.qps)+len(b.qps)+len(a.hostRoutes())+len(b.hostRoutes()) != 0 {
		w.Fatalf("left: %v %v, host routes %v %v", a.f.Conns(), b.f.Conns(), a.hostRoutes(), b.hostRoutes()) // 4755-3.2-7
	}
}

// tearDownLink: the link goes down, and everything is back after it.
func tearDownLink(t *testing.T) {
	w, a, b := connectedPair(t, Options{})
	a.kernel(a.k.Up(false)) // 4755-3.4-2, 4755-3.4-1
	w.run(time.Second)
	noneLeft(w, a, b)
	if len(a.dests)+len(a.paths) != 0 || len(a.joined) != 0 {
		t.Errorf("left: %v %v", a.dests, a.joined)
	}
	ours := a.f.addrs.own
	a.delAddr(ours.String()) // as the kernel does
	a.kernel(a.k.Up(true))
	if !a.f.addrs.has(ours.Addr()) {
		t.Errorf("the link-local address did not come back")
	}
	w.run(2 * time.Second)
	w.wantConnection(a, b, "10.0.0.2", "up again")
}

func TestTearDown(t *testing.T) {
	t.Run("link down", tearDownLink)
	t.Run("shutdown", func(t *testing.T) {
		w, a, b := connectedPair(t, Options{})
		a.step(Shutdown{})
		w.run(time.Second)
		noneLeft(w, a, b)
		if !a.f.Deadline().IsZero() {
			t.Errorf("deadline %v", a.f.Deadline())
		}
	})
	t.Run("idle", func(t *testing.T) { // 4755-3.4-4
		w, a, b := connectedPair(t, Options{Idle: 40 * time.Second})
		for range 6 {
			a.ping("10.0.0.2", 100, true)
			w.run(30 * time.Second)
		}
		w.agree(a, b)
		w.run(time.Minute)
		noneLeft(w, a, b)
		if a.counter("closed_idle") != 1 {
			t.Errorf("closed_idle %d", a.counter("closed_idle"))
		}
		p := a.ping("10.0.0.2", 9000, true) // and back on demand
		w.settle()
		if w.agree(a, b); b.got(p) != 1 {
			w.Fatalf("not up again")
		}
	})
	for _, uc := range []bool{false, true} { // 4755-3.4-3
		w, a, b := connectedPair(t, Options{Mode: ModeAuto})
		if uc {
			w, a, b = meet(t, 9, ModeUC, ModeUC)
			a.ping("10.0.0.2", 100, true)
			w.settle()
			w.agree(a, b)
		}
		b.dead = true
		for range 100 {
			a.ping("10.0.0.2", 100, true)
			w.run(time.Second)
		}
		if len(a.f.Conns())+len(a.qps)+len(a.hostRoutes()) != 0 {
			w.Fatalf("left: %v", a.f.Conns())
		}
	}
	t.Run("peer's addresses moved away", func(t *testing.T) {
		w, a, b := connectedPair(t, Options{})
		c := w.node(3, Options{})
		b.delAddr("10.0.0.2/24")
		c.addAddr("10.0.0.2/24") // announced
		w.run(3 * time.Second)
		p := a.ping("10.0.0.2", 9000, true)
		w.settle()
		if c.got(p) != 1 || b.got(p) != 0 {
			w.Fatalf("got %d at c, %d at b", c.got(p), b.got(p))
		}
		if cs := a.up(); len(cs) != 1 || cs[0].Peer.Key() != c.link() {
			w.Fatalf("%+v", cs)
		}
	})
}

func TestRestart(t *testing.T) {
	for _, newQPN := range []bool{false, true} {
		w, a, b := newPair(t, 10)
		a.ping("10.0.0.2", 100, true)
		w.settle()
		w.agree(a, b)
		b.dead = true
		w.run(time.Second)
		if newQPN {
			b.opt.Link.QPN = 0x777
		}
		b.boot()
		start := w.now
		var p []byte
		for {
			p = b.ping("10.0.0.1", 9000, true)
			w.run(100 * time.Millisecond)
			if a.got(p) == 1 || w.now.Sub(start) > 20*time.Second {
				break
			}
		}
		w.settle()
		x, _ := w.agree(a, b)
		if x.Peer.QPN != b.opt.Link.QPN || w.now.Sub(start) > 22*time.Second {
			w.Fatalf("%v: %v after %v", newQPN, x.Peer, w.now.Sub(start))
		}
		q := a.ping("10.0.0.2", 9000, true)
		w.settle()
		if w.agree(a, b); b.got(q) != 1 || !newQPN && a.counter("redials_accepted") != 1 {
			w.Fatalf("%v: got %d, redials %d", newQPN, b.got(q), a.counter("redials_accepted"))
		}
	}
}

// A peer whose UD QPN changed unnoticed answers our REQ with REJ 8 and its new
// QPN: forget and resolve again (4755-3.5-5).
func TestMoved(t *testing.T) {
	w, a, b := newPair(t, 11)
	a.ping("10.0.0.2", 100, true)
	w.settle()
	b.kernel(b.k.Up(false)) // DREQ, so that a has no connection but knows b
	w.run(3 * time.Second)
	b.dead = true
	b.opt.Link.QPN = 0x777
	loss := w.loss
	w.loss = 1 // its announcements are lost
	b.boot()
	w.run(3 * time.Second)
	w.loss = loss
	p := a.ping("10.0.0.2", 9000, true)
	w.settle()
	if w.agree(a, b); b.got(p) != 1 || a.counter("peer_qpn_changed") != 1 {
		w.Fatalf("got %d, moved %d", b.got(p), a.counter("peer_qpn_changed"))
	}
	if rej, ok := lastREJ(b); !ok || rej.Reason != cm.ReasonInvalidServiceID {
		w.Fatalf("REJ %+v", rej)
	}
}

func TestQPErrorRedials(t *testing.T) {
	w, a, b := newPair(t, 15)
	a.ping("10.0.0.2", 100, true)
	w.settle()
	x, _ := w.agree(a, b)
	a.step(QPError{Conn: x.Conn, Text: "test"})
	w.run(time.Second)
	if len(a.f.Conns())+len(b.f.Conns()) != 0 {
		w.Fatalf("left %v %v", a.f.Conns(), b.f.Conns())
	}
	p := a.ping("10.0.0.2", 9000, true)
	w.run(time.Second) // at once
	if w.agree(a, b); b.got(p) != 1 {
		w.Fatalf("got %d", b.got(p))
	}
}

// The RTU is lost for good: data stands for it.
func TestDataForRTU(t *testing.T) {
	w := newWorld(t, 16)
	a, b := w.node(1, Options{}), w.node(2, Options{})
	w.dropMAD = func(from *node, m mad.Message) bool { return m.Attr() == mad.AttrRTU }
	w.run(2 * time.Second)
	w.wantConnection(a, b, "10.0.0.2", "without an RTU")
}

// An ARP request from outside every prefix must not give the kernel a route.
func TestNoHostRouteOffLink(t *testing.T) {
	w := newWorld(t, 19)
	a, b := w.node(1, Options{}), w.node(2, Options{})
	b.delAddr("10.0.0.2/24")
	b.addAddr("10.99.0.2/8")
	w.run(2 * time.Second)
	b.ping("10.0.0.1", 3000, true)
	w.settle()
	w.agree(a, b)
	if a.k.HostMTU(ip4("10.99.0.2")) != 0 || b.k.HostMTU(ip4("10.0.0.1")) == 0 {
		w.Fatalf("host routes %v and %v", a.hostRoutes(), b.hostRoutes())
	}
}

// After an ICMP answer the kernel remembers the small MTU; when the connection
// comes up after all, its exceptions are flushed (docs/adr/0005-mtu-in-the-routing-table.md).
func TestFlushAfterTooBig(t *testing.T) {
	w := newWorld(t, 20)
	a, b := w.node(1, Options{}), w.node(2, Options{})
	b.noQP = true
	w.run(2 * time.Second)
	a.ping("10.0.0.2", 9000, true)
	w.run(time.Second)
	if a.counter("icmp_too_big") != 1 || a.k.Flushed != 0 {
		w.Fatalf("%d answers, %d flushes", a.counter("icmp_too_big"), a.k.Flushed)
	}
	b.noQP = false
	w.run(5 * time.Second)
	a.ping("10.0.0.2", 100, true)
	w.settle()
	if w.agree(a, b); a.k.Flushed != 1 {
		w.Fatalf("%d flushes", a.k.Flushed)
	}
}

// RC acknowledgements confirm a neighbour, so traffic keeps it reachable with
// few probes, which ask for the address itself; UC has none and needs more.
func TestAcknowledgementsConfirm(t *testing.T) {
	var probes []uint64
	for _, mode := range []Mode{ModeRC, ModeUC} {
		w, a, b := meet(t, 21, mode, mode)
		for range 300 {
			a.ping("10.0.0.2", 100, true)
			w.run(time.Second)
		}
		w.agree(a, b)
		probes = append(probes, a.f.neigh.Counters().Probes)
	}
	if rc, uc := probes[0], probes[1]; rc == 0 || rc >= uc {
		t.Errorf("%d probes over RC, %d over UC; want some, and fewer over RC", rc, uc)
	}
}

// The class of a peer is remembered for ten minutes (docs/adr/0007-both-service-ids.md).
func TestClassIsForgotten(t *testing.T) {
	w, a, k := newLinuxPair(t, 22)
	a.ping("10.0.0.2", 100, true)
	w.run(time.Second)
	for i, wait := range []time.Duration{7 * time.Minute, 11 * time.Minute} { // idle after five
		n := len(a.reqs)
		w.run(wait)
		a.ping("10.0.0.2", 100, true)
		w.run(time.Second)
		if got := len(a.reqs) - n; got != 1+i || k.legacy.up() != 1 {
			w.Fatalf("after %v: %d REQs, %d connections", wait, got, k.legacy.up())
		}
	}
}
