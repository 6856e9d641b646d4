package sim

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/internal/simfabric"
	"ipoibcm/ipoib"
)

// anyConfig draws what a host is.
func (w *world) anyConfig() config {
	c := config{
		mode:    oneOf(w.r, ipoib.ModeRC, ipoib.ModeRC, ipoib.ModeUC, ipoib.ModeAuto, ipoib.ModeAuto, ipoib.ModeUD),
		receive: oneOf(w.r, 0, 0, 16388, 9000, 4096, 2048, 1500),
		path:    oneOf(w.r, ib.MTU4096, ib.MTU4096, ib.MTU1024, ib.MTU2048),
		srq:     w.chance(0.5),
		// A UC connection to a host that died is found out by its silence only.
		tune: func(o *ipoib.Options) { o.Idle = time.Minute },
	}
	if w.chance(0.3) {
		c.cm, c.qp1 = oneOf(w.r, ipoib.CMAuto, ipoib.CMAuto, ipoib.CMInband), oneOf(w.r, qp1Ours, qp1Taken, qp1Silent)
	}
	if w.chance(0.5) {
		c.lag = oneOf(w.r, 20*time.Microsecond, time.Millisecond, 20*time.Millisecond)
	}
	return c
}

var group4, group6 = netip.MustParseAddr("239.1.2.3"), netip.MustParseAddr("ff05::1:3")

// A storm says how many hosts talk, for how long and how much, and how often
// something goes wrong meanwhile.
type storm struct {
	hosts   int
	d       time.Duration
	gap     time.Duration // the most between two bursts of packets
	trouble float64       // chance of it after a burst
	ring    int           // see world.ring
}

// storms returns the usual storm among n hosts. The more there are, the more
// happens at a time, and in a large world each talks to some only.
func storms(n int, d time.Duration) storm {
	s := storm{hosts: n, d: d, gap: 300 * time.Millisecond, trouble: 0.25}
	if n > 3 {
		s.gap = time.Second / time.Duration(n)
		s.trouble = 0.5 / float64(n)
	}
	if n > 16 {
		s.gap, s.trouble, s.ring = 4*s.gap, 0.03, 4
	}
	return s
}

// chaos lets n hosts talk while things go wrong for d.
func (w *world) chaos(n int, d time.Duration) { w.storm(storms(n, d)) }

func (w *world) storm(s storm) {
	w.f.Delay = oneOf(w.r, 10*time.Microsecond, 200*time.Microsecond, 2*time.Millisecond)
	w.ring, w.stormy = s.ring, true
	for range s.hosts {
		w.host(w.anyConfig())
	}
	end := w.f.Now().Add(s.d)
	for w.f.Now().Before(end) {
		w.run(w.upTo(s.gap))
		w.burst()
		if w.chance(s.trouble) {
			w.trouble()
		}
	}
}

// burst sends some packets from one host.
func (w *world) burst() {
	a := oneOf(w.r, w.hosts...)
	size := oneOf(w.r, 28, 60, 500, 1500, 2044, 2045, 9000, 70000)
	if w.chance(0.02) { // more than any queue holds
		dst := oneOf(w.r, oneOf(w.r, w.hosts...).addr4(), netip.MustParseAddr("10.0.0.254"))
		for range 200 {
			a.send(dst, 1+w.r.IntN(size), w.chance(0.5))
		}
		return
	}
	for range 1 + w.r.IntN(8) {
		to := w.hosts
		if w.ring > 0 && w.chance(0.8) {
			to = w.partners(a)
		}
		dst := oneOf(w.r, to...).anyAddr()
		switch w.r.IntN(20) {
		case 0:
			dst = oneOf(w.r, group4, group6)
		case 1:
			dst = netip.MustParseAddr(oneOf(w.r, "10.0.0.255", "255.255.255.255"))
		case 2:
			dst = netip.MustParseAddr(oneOf(w.r, "10.0.0.254", "2001:db8::ffff")) // nobody
		}
		if a.owns(dst) {
			continue
		}
		a.send(dst, 1+w.r.IntN(size), w.chance(0.5))
		if w.chance(0.5) {
			w.run(w.upTo(time.Millisecond))
		}
	}
	if w.chance(0.1) && len(w.hosts) > 1 { // and the other way at the same instant
		for _, h := range w.hosts[1:] {
			w.hosts[0].send(h.addr4(), 100, false)
			h.send(w.hosts[0].addr4(), 100, false)
		}
	}
}

// anyAddr is one of the host's addresses.
func (h *host) anyAddr() netip.Addr { return oneOf(h.w.r, h.addrs...).Addr() }

// trouble makes one thing go wrong, most of them for a while.
func (w *world) trouble() {
	a := oneOf(w.r, w.hosts...)
	back := w.upTo(4 * time.Second)
	switch kind := w.r.IntN(16); kind {
	case 0, 1, 2, 3, 4, 11:
		w.networkTrouble(kind, a, back)
	default:
		w.hostTrouble(kind, a, back)
	}
}

// networkTrouble: the network loses, delays or stops packets, for a time.
func (w *world) networkTrouble(kind int, a *host, back time.Duration) {
	switch kind {
	case 0, 1:
		w.f.Options = simfabric.Options{Delay: w.f.Delay, Jitter: w.upTo(500*time.Microsecond) + 1,
			Loss: oneOf(w.r, 0, 0.001, 0.01, 0.05, 0.1), Dup: oneOf(w.r, 0, 0, 0.02), Reorder: oneOf(w.r, 0, 0.02),
			Flip: oneOf(w.r, 0, 0.01)}
		w.dups = w.dups || w.f.Dup > 0
		w.tell("network: %+v", w.f.Options)
	case 2:
		w.f.Partition([]*simfabric.Port{a.port})
		w.tell("%s is cut off for %v", a.name(), back)
		w.f.After(back, func() { w.f.Partition() })
	case 3:
		port := a.port
		w.f.Filter = func(from, to *simfabric.Port, ip []byte) bool { return from != port }
		w.tell("nobody hears %s for %v", a.name(), back)
		w.f.After(back, func() { w.f.Filter = nil })
	case 4:
		w.f.Filter = func(from, to *simfabric.Port, ip []byte) bool { return !isMAD(ip) }
		w.tell("no MADs for %v", back)
		w.f.After(back, func() { w.f.Filter = nil })
	case 11:
		var parts [3][]*simfabric.Port
		for _, h := range w.hosts {
			i := w.r.IntN(len(parts))
			parts[i] = append(parts[i], h.port)
		}
		w.f.Partition(parts[:]...)
		w.tell("the network is in parts of %d, %d and %d for %v", len(parts[0]), len(parts[1]), len(parts[2]), back)
		w.f.After(back, func() { w.f.Partition() })
	}
}

// hostTrouble: something happens to host a.
func (w *world) hostTrouble(kind int, a *host, back time.Duration) {
	switch kind {
	case 5:
		a.kill()
		w.run(back / 4)
		a.boot()
		a.reAddr()
	case 6:
		if a.dead {
			return
		}
		a.stop()
		w.run(back / 4)
		a.exit()
		a.boot()
		a.reAddr()
	case 7:
		a.tell("link down")
		a.linkDown()
		w.run(back / 4)
		a.linkUp()
		a.reAddr()
	case 8:
		a.tell("port down")
		a.port.SetActive(false)
		w.run(back / 4)
		a.port.SetActive(true)
	case 9:
		p := netip.MustParsePrefix(fmt.Sprintf("2001:db8::1:%x/64", a.i))
		if a.i < 100 && len(w.hosts) < 100 {
			p = netip.MustParsePrefix(fmt.Sprintf("10.0.0.%d/24", 100+a.i))
		}
		if a.owns(p.Addr()) {
			a.delAddr(p)
		} else {
			a.addAddr(p)
		}
	case 10:
		if w.chance(0.5) {
			a.join(group4, group6)
		} else {
			a.setMTU(oneOf(w.r, 65520, 9000, 2044, 1500))
		}
	case 12:
		a.changeQPN()
	case 13: // a virtual machine that slept, or a clock that was set
		if a.dead {
			return
		}
		d := oneOf(w.r, -w.upTo(2*time.Second), w.upTo(time.Second), w.upTo(time.Minute), w.upTo(time.Hour))
		a.tell("clock jumps by %v", d)
		a.jump(d)
	case 14: // the agent gets no processor
		a.tell("stalls for %v", back)
		a.stall(back)
	case 15: // nor does anything else of the host
		a.tell("sleeps for %v", back)
		a.stall(back)
		w.f.Partition([]*simfabric.Port{a.port})
		w.f.After(back, func() { w.f.Partition() })
	}
}

// reAddr is the operator, who configures the address that Linux drops when the
// device goes down.
func (h *host) reAddr() {
	h.addAddr(netip.MustParsePrefix(fmt.Sprintf("2001:db8::%d/64", h.i)))
}

// isMAD reports whether an underlay packet (IPv6, UDP, BTH) is for QP 1.
func isMAD(ip []byte) bool { return ip[53] == 0 && ip[54] == 0 && ip[55] == 1 }

// TestChaos lets everything go wrong for a while. Afterwards the network is
// perfect, and so must the hosts be: connected, agreed, nothing left over.
func TestChaos(t *testing.T) {
	tally := map[string]uint64{}
	runs := 0
	for n := 2; n <= 3; n++ {
		t.Run(fmt.Sprintf("hosts=%d", n), func(t *testing.T) {
			seeds(t, 400, func(w *world) {
				w.tally = tally
				runs++
				// At every post: no packet on a connection that is not up (4755-2.3-1), none
				// above its MTU (4755-5.1-2, 4755-5.1-6), no multicast, broadcast, ARP or ND on it
				// (4755-2.1-1, 4755-2.1-2, 4755-7-3, 4755-7-4, 4755-4-5). On arrival: RC keeps order
				// and count. After every step: each QP is in the record (4755-3.2-7, 4755-2.3-4),
				// and one more is the UD QP (4755-2.2-1, 4755-3.1-11).
				w.chaos(n, 15*time.Second)
				// 4755-3.3-1, 4755-3.2-10: one connection for each pair, both ends agree about its
				// QPNs, PSNs and MTU (4755-5.1-5); 4755-8-1: whatever was tried, traffic flows.
				w.settle()
				// 4755-3.4-1, 4755-3.4-2: the interface takes its connections along.
				w.end()
			})
		})
	}
	for _, name := range slices.Sorted(maps.Keys(tally)) {
		if tally[name] > 0 {
			t.Logf("%10d %s", tally[name], name)
		}
	}
	if t.Failed() || runs < 800 {
		return // too few to have seen everything
	}
	for _, name := range []string{"delivered over RC", "delivered over UC", "delivered over UD", "delivered in fragments",
		"established_active", "established_passive", "redials_accepted", "crossings_accepted", "crossings_rejected",
		"qp_errors", "closed_by_us", "closed_by_peer", "peer_qpn_changed", "dial_failed", "accept_failed", "rej_received",
		"inband_turned_to", "inband_established", "drop_gsi_off",
		"queue_sent_on_connection", "fragmented", "icmp_too_big", "fib_exception_flushes", "neigh_failed", "neigh_changed",
		"bad_icrc", "no_qp", "retransmits", "timeouts", "rnr_in", "duplicates"} {
		if tally[name] == 0 {
			t.Errorf("%d runs, and never %s", runs, name)
		}
	}
}
