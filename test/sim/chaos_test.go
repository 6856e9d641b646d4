package sim

import (
	"fmt"
	"net/netip"
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
	if w.chance(0.5) {
		c.lag = oneOf(w.r, 20*time.Microsecond, time.Millisecond, 20*time.Millisecond)
	}
	return c
}

var group4, group6 = netip.MustParseAddr("239.1.2.3"), netip.MustParseAddr("ff05::1:3")

// chaos lets n hosts talk while things go wrong for d.
func (w *world) chaos(n int, d time.Duration) {
	w.f.Delay = oneOf(w.r, 10*time.Microsecond, 200*time.Microsecond, 2*time.Millisecond)
	for range n {
		w.host(w.anyConfig())
	}
	end := w.f.Now().Add(d)
	for w.f.Now().Before(end) {
		w.run(w.upTo(300 * time.Millisecond))
		w.burst()
		if w.chance(0.25) {
			w.trouble()
		}
	}
}

// burst sends some packets from one host.
func (w *world) burst() {
	a := oneOf(w.r, w.hosts...)
	size := oneOf(w.r, 28, 60, 500, 1500, 2044, 2045, 9000, 70000)
	for range 1 + w.r.IntN(8) {
		dst := oneOf(w.r, w.hosts...).anyAddr()
		switch w.r.IntN(20) {
		case 0:
			dst = oneOf(w.r, group4, group6)
		case 1:
			dst = netip.MustParseAddr(oneOf(w.r, "10.0.0.255", "255.255.255.255"))
		case 2:
			dst = netip.MustParseAddr(oneOf(w.r, "10.0.0.77", "2001:db8::77")) // nobody
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
	switch kind := w.r.IntN(11); kind {
	case 0, 1:
		w.f.Options = simfabric.Options{Delay: w.f.Delay, Jitter: w.upTo(500*time.Microsecond) + 1,
			Loss: oneOf(w.r, 0, 0.001, 0.01, 0.05, 0.1), Dup: oneOf(w.r, 0, 0, 0.02), Reorder: oneOf(w.r, 0, 0.02), Flip: oneOf(w.r, 0, 0.01)}
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
		p := netip.MustParsePrefix(fmt.Sprintf("10.0.0.%d/24", 100+a.i))
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
	for n := 2; n <= 3; n++ {
		t.Run(fmt.Sprintf("hosts=%d", n), func(t *testing.T) {
			seeds(t, 150, func(w *world) {
				w.chaos(n, 15*time.Second)
				w.settle()
				w.end()
			})
		})
	}
}
