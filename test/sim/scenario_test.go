package sim

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"ipoibcm/cm"
	"ipoibcm/ib"
	"ipoibcm/internal/foreign"
	"ipoibcm/internal/long"
	"ipoibcm/internal/simfabric"
	"ipoibcm/ipoib"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/mad"
)

// want fails unless cond holds.
func (w *world) want(cond bool, format string, args ...any) {
	if !cond {
		w.fatalf(format, args...)
	}
}

// arrives sends one packet and wants it delivered within d, by mode.
func (w *world) arrives(from *host, to netip.Addr, size int, mode ib.Transport, d time.Duration) {
	p := from.send(to, size, true)
	w.want(p != nil, "%s cannot send to %v", from.name(), to)
	w.f.RunWhile(func() bool { return p.delivered == 0 }, d)
	w.want(p.delivered == 1, "%v did not arrive within %v", p, d)
	w.want(p.mode() == mode, "%v went by %v, want %v", p, p.mode(), mode)
}

var modes = []ipoib.Mode{ipoib.ModeRC, ipoib.ModeUC, ipoib.ModeAuto, ipoib.ModeUD}

// TestModes lets hosts of every policy meet each other.
func TestModes(t *testing.T) {
	for _, am := range modes {
		for _, bm := range modes {
			t.Run(fmt.Sprintf("%v-%v", am, bm), func(t *testing.T) {
				seeds(t, 3, func(w *world) {
					a, b := w.host(config{mode: am}), w.host(config{mode: bm, srq: true})
					mode := common(a, b)
					// The first packet opens the connection, and 100 ms is ample for that.
					// 4755-1-1, 4755-3.1-15, 4755-3.2-1: either side may begin.
					if w.chance(0.5) {
						a, b = b, a
					}
					a.send(b.addr4(), 100, true)
					w.run(100 * time.Millisecond)
					w.arrives(a, b.addr4(), 100, mode, time.Millisecond)
					w.arrives(b, a.addr4(), 100, mode, time.Millisecond)
					// 4755-2.2-1, 4755-2.3-4, 4755-3.1-11: one UD QP, and one QP at each end.
					n := 1
					if mode != ib.UD {
						n = 2
					}
					w.want(len(a.port.QPs()) == n && len(b.port.QPs()) == n, "%d and %d QPs, want %d", len(a.port.QPs()),
						len(b.port.QPs()), n)
					if mode == ib.UD {
						// 4755-2-1, 4755-3.1-7, 4755-3.1-16: flags oblige nobody.
						w.want(a.mads[mad.AttrREQ]+b.mads[mad.AttrREQ] == 0, "a REQ without a mode in common")
						w.arrives(a, b.addr4(), udMTU, mode, time.Second)
					} else {
						w.want(a.mads[mad.AttrREQ] == 1 && b.mads[mad.AttrREQ] == 0, "%d and %d REQs", a.mads[mad.AttrREQ],
							b.mads[mad.AttrREQ])
						// 4755-5.1-3, 4755-5-4: every size up to the limit.
						for _, size := range []int{28, 60, 1499, 2043, 2044, 2045, 4091, 4092, 4093, 9000, 20000, 65519, 65520,
							28 + w.r.IntN(65493)} {
							w.arrives(a, b.addr4(), size, mode, 100*time.Millisecond)
							w.arrives(b, a.addr4(), size, mode, 100*time.Millisecond)
						}
					}
					// 4755-5-1, 4755-7-2: IPv6 on the same connection, and unicast on the UD QP
					// while there is one. The first packet to the address has to wait for ND.
					for _, dst := range []netip.Addr{b.addr6(), ip6(b)} {
						a.send(dst, 100, true)
						w.run(10 * time.Millisecond)
						w.arrives(a, dst, 1280, mode, 10*time.Millisecond)
					}
					w.lastID++
					p := &packet{id: w.lastID, from: a, to: b, src: a.addr4(), dst: b.addr4(), size: 500, at: w.f.Now()}
					w.packets[p.id] = p
					a.postUD(b.link, ib.GID{}, foreign.Frame(p.octets()))
					w.run(time.Millisecond)
					w.want(p.delivered == 1, "%v by UD was not accepted", p)
					// 4755-2.3-5: all this is one connection, made once.
					w.want(len(a.m.Conns()) == n-1, "%d connections", len(a.m.Conns()))
					w.checkQuiet()
					w.end()
				})
			})
		}
	}
}

// ip6 is the link-local address that the interface gave itself.
func ip6(h *host) netip.Addr {
	for _, p := range h.addrs {
		if p.Addr().IsLinkLocalUnicast() {
			return p.Addr()
		}
	}
	h.w.fatalf("%s has no link-local address", h.name())
	return netip.Addr{}
}

// TestUDOnly: what never goes on a connection goes on beside it.
func TestUDOnly(t *testing.T) {
	seeds(t, 20, func(w *world) {
		mode := oneOf(w.r, ipoib.ModeRC, ipoib.ModeUC)
		var hs []*host
		for range 3 {
			hs = append(hs, w.host(config{mode: mode, lag: 20 * time.Microsecond}))
		}
		hs[1].join(group4, group6)
		w.talk()
		w.run(time.Second)
		// 4755-2.1-1, 4755-2.1-2, 4755-7-3: multicast and broadcast reach all of the
		// group; checkPost has none of it on a connection. 4755-2.1-3: unicast meanwhile.
		for dst, n := range map[string]int{"239.1.2.3": 1, "ff05::1:3": 1, "255.255.255.255": 2, "10.0.0.255": 2,
			"224.0.0.1": 2, "ff02::1": 2} {
			p := hs[0].send(netip.MustParseAddr(dst), udMTU, true)
			q := hs[0].send(hs[1].addr4(), udMTU, true)
			w.run(10 * time.Millisecond)
			w.want(p.delivered == n && p.conn == nil, "%v reached %d hosts, want %d", p, p.delivered, n)
			w.want(q.delivered == 1, "%v did not arrive", q)
		}
		// 4755-7-4, 4755-4-5: neighbours are asked again while connections are up, and
		// answer by UD. (RC need not ask: acknowledgements confirm.)
		answers := func() uint64 { return hs[0].counter("neigh_answers") + hs[1].counter("neigh_answers") }
		before := answers()
		for range 60 {
			w.want(hs[0].send(hs[1].addr4(), 3000, true) != nil && hs[1].send(hs[0].addr4(), 3000, true) != nil, "cannot send")
			w.run(time.Second)
		}
		w.want(len(hs[0].with(hs[1])) == 1 && (mode == ipoib.ModeRC || answers() > before), "nobody was asked again")
		before = answers()
		hs[2].kill() // the others still think that they are connected to it
		hs[2].boot()
		hs[2].send(hs[0].addr4(), 100, true)
		hs[2].send(hs[1].addr4(), 100, true)
		w.run(time.Second)
		w.want(answers() >= before+2, "the new host was not answered")
		w.settle()
		w.end()
	})
}

// settledOn sees that nothing is under way, that hosts a and b have a connection, the same at
// both ends, and that every packet was delivered once. It returns the connections as a has them.
func (w *world) settledOn(a, b *host, ps []*packet) []ipoib.ConnInfo {
	w.checkQuiet()
	as := a.with(b)
	w.want(len(as) == 1, "no connection")
	for _, p := range ps {
		w.want(p.delivered == 1, "%v was delivered %d times", p, p.delivered)
	}
	return as
}

// TestCrossing: both ends send their first packet at about the same time.
func TestCrossing(t *testing.T) {
	crossed, flagsWouldInvert := 0, 0
	seeds(t, 300, func(w *world) {
		w.f.Delay = 100 * time.Microsecond
		a := w.host(config{mode: oneOf(w.r, ipoib.ModeRC, ipoib.ModeUC, ipoib.ModeAuto)})
		b := w.host(config{mode: oneOf(w.r, a.cfg.mode, ipoib.ModeAuto)})
		w.run(2 * time.Second) // duplicate address detection is over
		var ps []*packet
		first := func(from, to *host) {
			for _, size := range []int{100, 9000, 65520} { // the last two must wait
				ps = append(ps, from.send(to.addr4(), size, true))
			}
		}
		first(a, b)
		w.run(w.upTo(600 * time.Microsecond))
		first(b, a)
		w.run(100 * time.Millisecond)
		// 4755-3.3-1: one connection, the same at both ends, with no mode chosen anew.
		// 4755-3.3-10: what waited for the refused REQ goes out on the other, once.
		w.settledOn(a, b, ps)
		w.want(a.mads[mad.AttrREQ] <= 1 && b.mads[mad.AttrREQ] <= 1, "a REQ after the verdict")
		ca, cb := a.m.Status().Crossings, b.m.Status().Crossings
		if a.mads[mad.AttrREQ] == 1 && b.mads[mad.AttrREQ] == 1 {
			crossed++
			// 4755-3.3-3, 4755-3.3-5, 4755-3.3-8: the larger address's REQ wins.
			larger, smaller := a, b
			if a.link.Compare(b.link) < 0 {
				larger, smaller = b, a
			}
			w.want(larger.with(smaller)[0].Active, "the REQ of the smaller address won")
			w.want(ca.Seen >= 1 && cb.Seen >= 1, "crossings seen: %d and %d", ca.Seen, cb.Seen)
			w.want(larger.m.Status().Crossings.Rejected == 1, "the larger address has not rejected")
			// 4755-3.3-7: with the flags the verdict would be another.
			if fa, fb := a.cfg.mode.Flags(), b.cfg.mode.Flags(); fa != fb && (fa < fb) != (a.link.Compare(b.link) < 0) {
				flagsWouldInvert++
			}
		} else {
			// 4755-3.3-4: nothing was outstanding.
			w.want(ca.Seen == 0 && cb.Seen == 0, "crossings seen: %d and %d", ca.Seen, cb.Seen)
		}
		w.end()
	})
	t.Logf("%d crossed, in %d of them the flags would have decided otherwise", crossed, flagsWouldInvert)
	if raceDetector {
		return
	}
	if least := long.Of(5, 25); crossed < least {
		t.Errorf("%d crossed, want %d at least", crossed, least)
	}
	if least := long.Of(1, 2); flagsWouldInvert < least {
		t.Errorf("in %d crossings the flags would have decided otherwise, want %d at least", flagsWouldInvert, least)
	}
}

// TestRing: a asks b, b asks c, c asks a, all at once. Nothing crosses.
func TestRing(t *testing.T) {
	seeds(t, 30, func(w *world) {
		hs := []*host{w.host(config{}), w.host(config{}), w.host(config{})}
		w.run(2 * time.Second)
		for i, h := range hs {
			h.send(hs[(i+1)%3].addr4(), 5000, true)
		}
		w.run(100 * time.Millisecond)
		w.checkQuiet()
		for _, h := range hs {
			// 4755-3.3-3: a REQ outstanding to somebody else is none.
			w.want(h.m.Status().Crossings.Seen == 0, "%s saw a crossing", h.name())
			// 4755-2.2-1, 4755-3.2-7: two connections in the record, and their QPs beside the UD QP.
			w.want(len(h.m.Conns()) == 2 && len(h.port.QPs()) == 3, "%s has %d connections", h.name(), len(h.m.Conns()))
		}
		w.end()
	})
}

// TestLossyCrossing: the same while the network loses a tenth of everything.
func TestLossyCrossing(t *testing.T) {
	seeds(t, 100, func(w *world) {
		a, b := w.host(config{mode: ipoib.ModeAuto}), w.host(config{mode: oneOf(w.r, modes[:3]...)})
		w.run(time.Second)
		w.f.Options = simfabric.Options{Loss: 0.1, Jitter: 200 * time.Microsecond, Dup: 0.05}
		w.dups = true
		for range 20 {
			a.send(b.addr4(), 9000, true)
			b.send(a.addr4(), 9000, true)
			w.run(w.upTo(time.Second))
		}
		w.settle()
		w.end()
	})
}

// TestMTU: Receive MTUs of all kinds meet, and the kernel sees what comes of it.
func TestMTU(t *testing.T) {
	seeds(t, 40, func(w *world) {
		size := func() int { return oneOf(w.r, 0, 1284, 1500, 2048, 4096, 9000, 16388, 65524) }
		a := w.host(config{receive: size()})
		b, c := w.host(config{receive: size()}), w.host(config{receive: size(), mode: ipoib.ModeAuto})
		w.talk()
		w.run(time.Second)
		w.checkQuiet()
		for _, o := range []*host{b, c} {
			// 4755-5.1-2, 4755-5.1-5, 4755-5.1-6: the smaller one less 4 octets, both ways.
			mtu := min(a.cfg.receiveMTU(), o.cfg.receiveMTU()) - encap.HeaderLen
			w.want(a.hostRoutes()[o.addr4()] == mtu && o.hostRoutes()[a.addr4()] == mtu,
				"host routes %d and %d, want %d", a.hostRoutes()[o.addr4()], o.hostRoutes()[a.addr4()], mtu)
			w.arrives(a, o.addr4(), mtu, rc, 100*time.Millisecond)
			w.arrives(o, a.addr4(), mtu, rc, 100*time.Millisecond)
			if mtu == 65520 {
				continue
			}
			// 4755-7.2-1: what is too big for one peer is answered or cut.
			p := a.send(o.addr4(), mtu+1, true)
			w.run(time.Millisecond)
			w.want(p.refused && p.delivered == 0, "%v was not refused", p)
			p = a.send(o.addr4(), 60000, false)
			w.run(100 * time.Millisecond)
			w.want(p.delivered == 1 && !p.refused, "%v did not arrive in fragments", p)
		}
		a.setMTU(1400)
		w.checkRoutes(a)
		w.arrives(a, b.addr4(), min(1400, a.hostRoutes()[b.addr4()]), rc, 100*time.Millisecond)
		a.setMTU(65520)
		w.checkRoutes(a)
		w.end() // and the routes go with the connections
	})
}

// TestOneConnection: many addresses of one host are one peer.
func TestOneConnection(t *testing.T) {
	seeds(t, 20, func(w *world) {
		mode := oneOf(w.r, ipoib.ModeRC, ipoib.ModeUC)
		a, b := w.host(config{mode: mode}), w.host(config{mode: mode})
		var dsts []netip.Addr
		for i := range 5 {
			p := netip.MustParsePrefix(fmt.Sprintf("10.0.0.%d/24", 50+i))
			b.addAddr(p)
			dsts = append(dsts, p.Addr())
		}
		w.run(time.Second)
		dsts = append(dsts, b.addr4(), b.addr6(), ip6(b))
		for _, dst := range dsts {
			a.send(dst, 3000, true)
		}
		w.run(time.Second)
		for _, dst := range dsts {
			w.arrives(a, dst, 3000, common(a, b), 10*time.Millisecond)
		}
		// 4755-2.3-5: one REQ for all of them. 4755-5-1: both families on it.
		w.want(a.mads[mad.AttrREQ]+b.mads[mad.AttrREQ] == 1, "%d REQs", a.mads[mad.AttrREQ]+b.mads[mad.AttrREQ])
		w.want(len(a.hostRoutes()) == len(dsts), "%d host routes for %d addresses", len(a.hostRoutes()), len(dsts))
		w.checkQuiet()
		// An address that goes takes its route along, once its entry has aged. RC
		// acknowledgements prove the host and stand for the address for two
		// reachable times only.
		b.delAddr(netip.MustParsePrefix("10.0.0.50/24"))
		for range 130 {
			a.send(dsts[0], 100, true)
			w.run(time.Second)
		}
		_, there := a.hostRoutes()[dsts[0]]
		w.want(!there, "a route to an address that is gone")
		w.checkQuiet()
		w.end()
	})
}

// TestGateway: packets for a network behind a host go on its connection.
func TestGateway(t *testing.T) {
	seeds(t, 20, func(w *world) {
		a, b := w.host(config{}), w.host(config{receive: 9000})
		far := netip.MustParseAddr("192.168.7.7")
		b.local = append(b.local, far)
		a.via(netip.MustParsePrefix("192.168.0.0/16"), b.addr4())
		w.run(time.Second)
		p := a.send(far, 5000, true)
		w.run(100 * time.Millisecond)
		w.want(p.delivered == 1 && p.mode() == rc, "%v: delivered %d, by %v", p, p.delivered, p.mode())
		w.arrives(a, far, 8996, rc, 10*time.Millisecond)
		w.want(a.mads[mad.AttrREQ] == 1, "%d REQs", a.mads[mad.AttrREQ])
		if _, ok := a.hostRoutes()[far]; ok {
			w.fatalf("a host route to what lies behind the gateway")
		}
		p = a.send(far, 8997, true)
		w.run(time.Millisecond)
		w.want(p.refused, "%v was not refused", p)
		// When the gateway takes more, the kernel must forget the small value.
		b.kill()
		b.cfg.receive = 0
		b.boot()
		flushes := a.flushes
		for range 20 {
			a.send(far, 1000, true)
			w.run(500 * time.Millisecond)
		}
		w.want(a.flushes > flushes, "the path MTU rose and nothing was flushed")
		w.arrives(a, far, 65520, rc, 10*time.Millisecond)
		w.settle()
		w.end()
	})
}

// backWithin is how long traffic to a host that was killed and started again
// may be away, counted from its start: the old connection breaks within 0.6 s,
// REJ 8 or silence tells that the QPN is another, the neighbour is asked again.
const backWithin = 10 * time.Second

// TestRestart: a host is killed in mid-transfer and comes back as another.
func TestRestart(t *testing.T) {
	var worst time.Duration
	seeds(t, 60, func(w *world) {
		a := w.host(config{mode: oneOf(w.r, ipoib.ModeRC, ipoib.ModeAuto)})
		b := w.host(config{mode: oneOf(w.r, ipoib.ModeRC, ipoib.ModeAuto)})
		c := w.host(config{})
		w.talk()
		w.run(time.Second)
		w.checkQuiet()
		traffic := func(d time.Duration) {
			for end := w.f.Now().Add(d); w.f.Now().Before(end); w.run(20 * time.Millisecond) {
				a.send(b.addr4(), 4000, true)
				p := a.send(c.addr4(), 4000, true)
				w.run(10 * time.Millisecond)
				w.want(p.delivered == 1, "%v: a dead peer is in its way", p)
			}
		}
		traffic(200 * time.Millisecond)
		b.kill()
		traffic(w.upTo(5 * time.Second))
		b.boot()
		start := w.f.Now()
		for {
			p := a.send(b.addr4(), 4000, true)
			q := b.send(a.addr4(), 4000, true)
			w.run(100 * time.Millisecond)
			if p.delivered+q.delivered == 2 && p.mode() == rc && q.mode() == rc {
				break
			}
			w.want(w.f.Now().Sub(start) < backWithin, "%v after the restart there is still no traffic", w.f.Now().Sub(start))
		}
		worst = max(worst, w.f.Now().Sub(start))
		w.settle()
		w.end()
	})
	t.Logf("traffic was back within %v", worst)
}

// TestLinkDownUp: the device goes down and up again.
func TestLinkDownUp(t *testing.T) {
	seeds(t, 20, func(w *world) {
		a, b := w.host(config{}), w.host(config{})
		w.talk()
		w.run(time.Second)
		own := ip6(a)
		a.linkDown()
		w.run(10 * time.Millisecond)
		// 4755-3.4-1, 4755-3.4-2: connections go with the interface, at both ends.
		w.want(len(a.m.Conns()) == 0 && len(b.m.Conns()) == 0, "%d and %d connections after link down",
			len(a.m.Conns()), len(b.m.Conns()))
		w.want(len(a.hostRoutes()) == 0 && len(b.hostRoutes()) == 0 && len(a.paths) == 0,
			"routes are left over: %v %v", a.hostRoutes(), b.hostRoutes())
		b.send(a.addr4(), 100, true)
		w.run(time.Second)
		a.linkUp()
		a.reAddr()
		w.run(10 * time.Second)
		w.want(ip6(a) == own, "another link-local address")
		for range 3 { // the first packets may fall into the pause after the failure
			w.talk()
			w.run(time.Second)
		}
		w.arrives(a, b.addr4(), 60000, rc, 10*time.Millisecond)
		w.arrives(b, a.addr4(), 60000, rc, 10*time.Millisecond)
		w.checkQuiet()
		w.end()
	})
}

// TestIdle: a connection that nobody uses goes, and comes back when needed.
func TestIdle(t *testing.T) {
	seeds(t, 10, func(w *world) {
		idle := func(o *ipoib.Options) { o.Idle = 20 * time.Second }
		a, b := w.host(config{tune: idle}), w.host(config{tune: idle})
		w.talk()
		w.run(5 * time.Second)
		w.want(len(a.with(b)) == 1, "no connection")
		w.run(30 * time.Second)
		// 4755-3.4-4
		w.want(len(a.m.Conns()) == 0 && len(b.m.Conns()) == 0 && len(a.hostRoutes()) == 0, "an idle connection")
		a.send(b.addr4(), 9000, true)
		w.run(time.Second)
		w.arrives(a, b.addr4(), 9000, rc, 10*time.Millisecond)
		w.end()
	})
}

// TestExpiry: a neighbour that does not answer any more loses its connection.
func TestExpiry(t *testing.T) {
	seeds(t, 10, func(w *world) {
		a, b := w.host(config{mode: ipoib.ModeUC}), w.host(config{mode: ipoib.ModeUC})
		w.talk()
		w.run(5 * time.Second)
		w.want(len(a.with(b)) == 1, "no connection")
		w.f.Partition([]*simfabric.Port{a.port})
		for range 70 {
			a.send(b.addr4(), 500, true)
			w.run(time.Second)
		}
		// 4755-3.4-3: UC itself would never notice.
		w.want(len(a.m.Conns()) == 0 && len(a.hostRoutes()) == 0, "the connection outlived its neighbour")
		w.settle()
		w.end()
	})
}

// TestNeverAnswers: a peer whose flags promise more than it does.
func TestNeverAnswers(t *testing.T) {
	seeds(t, 20, func(w *world) {
		a, b := w.host(config{}), w.host(config{})
		w.f.Filter = func(_, _ *simfabric.Port, ip []byte) bool { return !isMAD(ip) }
		sent, lost := 0, 0
		for range 120 {
			p := a.send(b.addr4(), 1500, true)
			for i := 0; sent > 0 && i < 10; i++ {
				a.send(b.addr4(), 30000, true)
			}
			w.run(time.Second)
			if sent++; p.delivered == 0 {
				lost++
			}
		}
		// 4755-8-1, 4755-2.2-2: UD carries on, and attempts are bounded. In two minutes there is
		// room for the pauses 1, 2, 4 … 60 s, halved at worst, and eight REQs for each.
		w.want(lost == 0, "%d of %d packets were lost", lost, sent)
		w.want(a.counter("req_sent") <= 12 && a.mads[mad.AttrREQ] <= 96, "%d attempts, %d REQs",
			a.counter("req_sent"), a.mads[mad.AttrREQ])
		w.settle()
		w.end()
	})
}

// TestAlwaysRejects: a peer whose connection manager has no room, and whose flags
// promise otherwise.
func TestAlwaysRejects(t *testing.T) {
	seeds(t, 20, func(w *world) {
		a, b := w.host(config{}), w.host(config{tune: func(o *ipoib.Options) { o.CM.MaxConns = -1 }})
		for range 60 {
			p := a.send(b.addr4(), 1500, true)
			w.run(time.Second)
			w.want(p.delivered == 1 && p.mode() == ib.UD, "%v: delivered %d, by %v", p, p.delivered, p.mode())
			a.send(b.addr4(), 30000, true)
		}
		w.run(100 * time.Millisecond)
		// 4755-8-1, 4755-3.2-9: each REQ is answered by a REJ, and they become rare.
		w.want(a.mads[mad.AttrREQ] > 2 && a.mads[mad.AttrREQ] < 15, "%d REQs", a.mads[mad.AttrREQ])
		w.want(b.mads[mad.AttrREJ] == a.mads[mad.AttrREQ], "%d REJs for %d REQs", b.mads[mad.AttrREJ], a.mads[mad.AttrREQ])
		w.want(len(a.m.Conns())+len(b.m.Conns()) == 0, "a connection")
		w.end()
	})
}

// TestAnswerWaits: nothing is sent on a connection before it is up, and the
// answer to a query goes to who asked, by unicast.
func TestAnswerWaits(t *testing.T) {
	seeds(t, 20, func(w *world) {
		w.f.Delay = time.Millisecond
		a, b, c := w.host(config{}), w.host(config{}), w.host(config{})
		w.run(2 * time.Second)
		heard := map[*host]int{}
		for _, h := range w.hosts {
			h.port.SetTap(func(out bool, ip []byte) {
				if !out {
					heard[h]++
				}
			})
		}
		p := a.send(b.addr4(), 9000, true)
		w.run(w.f.Delay + 500*time.Microsecond)
		// 4755-3.1-13, 4755-3-1: the query is for all.
		w.want(heard[b] == 1 && heard[c] == 1, "the query was heard %d and %d times", heard[b], heard[c])
		w.run(w.f.Delay)
		// 4755-3.1-14, 4755-2.2-2, 4755-3-2: the answer is for a alone, on its UD QP.
		w.want(heard[a] == 1 && heard[c] == 1, "the answer was heard %d and %d times", heard[a], heard[c])
		// 4755-2.3-1: REQ, REP, then the packet; checkPost has looked at the state.
		w.want(p.posts == 0, "sent before there was a connection")
		w.run(20 * time.Millisecond)
		w.want(p.delivered == 1 && p.mode() == rc, "%v did not arrive by RC", p)
		w.want(p.gotAt.Sub(p.at) >= 5*w.f.Delay, "it took only %v", p.gotAt.Sub(p.at))
		w.end()
	})
}

// TestLostRTU: no RTU of b arrives. Its first packet stands for the RTU at once. So it does beside REQs in the names
// of a hundred hosts that are not there: with so many half-open connections no REP is sent again by itself.
func TestLostRTU(t *testing.T) {
	for _, tt := range []struct {
		mode   ipoib.Mode
		by     ib.Transport
		forged int
	}{{ipoib.ModeRC, ib.RC, 0}, {ipoib.ModeUC, ib.UC, 0}, {ipoib.ModeRC, ib.RC, 100}} {
		t.Run(fmt.Sprintf("%v beside %d", tt.by, tt.forged), func(t *testing.T) {
			seeds(t, 10, func(w *world) {
				a, b := w.host(config{mode: tt.mode, srq: true}), w.host(config{mode: tt.mode})
				w.f.Filter = func(_, _ *simfabric.Port, ip []byte) bool {
					return !isMAD(ip) || mad.AttrID(binary.BigEndian.Uint16(ip[68+16:])) != mad.AttrRTU
				}
				x := w.blindAs(a, encap.LinkAddr{QPN: 0x500})
				for i := range tt.forged {
					x.as.GID = ib.GIDFromAddr(netip.MustParseAddr(fmt.Sprintf("fe80::dead:%x", i)))
					x.mad(x.req(0x600, ib.GUID(i)))
				}
				w.run(10 * time.Millisecond)
				p := b.send(a.addr4(), 9000, true)
				w.run(100 * time.Millisecond)
				w.want(p.delivered == 1, "b's packet was delivered %d times, want 1", p.delivered)
				was := b.with(a)
				w.want(len(was) == 1, "b has %d connections to a, want 1", len(was))
				w.wantUp(a, b, was[0].LocalQPN)
				w.run(4 * time.Second)
				w.want(len(a.m.Conns()) == 1+tt.forged, "a has %d connections, want %d", len(a.m.Conns()), 1+tt.forged)
				w.wantUp(a, b, was[0].LocalQPN)
				w.arrives(a, b.addr4(), 9000, tt.by, time.Millisecond)
				w.arrives(b, a.addr4(), 9000, tt.by, time.Millisecond)
				w.settle()
				w.end()
			})
		})
	}
}

// wantUp fails unless a has one connection to b, to the queue pair qpn, and it is established.
func (w *world) wantUp(a, b *host, qpn ib.QPN) {
	cs := a.with(b)
	w.want(len(cs) == 1, "%s has %d connections to %s, want 1", a.name(), len(cs), b.name())
	w.want(cs[0].State == cm.StateEstablished.String(), "the connection is %s, want ESTABLISHED", cs[0].State)
	w.want(cs[0].RemoteQPN == qpn, "it leads to QP %v, want %v", cs[0].RemoteQPN, qpn)
}
