package neigh

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/internal/long"
	"ipoibcm/wire/encap"
)

// A lan joins tables in memory and virtual time, with loss, duplication and
// delay. Everything is drawn from one seed.
type lan struct {
	t       *testing.T
	r       *rand.Rand
	now     time.Time
	loss    float64
	shared  bool // two hosts may have one address
	nodes   []*lanNode
	flights []flight
	waiting map[string]bool // packets given in and not come back
	got     map[string]int  // deliveries
	serial  int
}

type lanNode struct {
	tab  *Table
	link encap.LinkAddr
	ips  []netip.Addr
}

type flight struct {
	at time.Time
	to *lanNode
	ev Event
}

func newLAN(t *testing.T, seed uint64, n int, loss float64) *lan {
	l := &lan{t: t, r: rand.New(rand.NewPCG(seed, 0)), now: time.Unix(1, 0), loss: loss,
		waiting: map[string]bool{}, got: map[string]int{}}
	for i := range n {
		nd := &lanNode{
			link: encap.LinkAddr{Flags: encap.FlagRC, QPN: ib.QPN(0x100 + i),
				GID: ib.GIDFromAddr(netip.MustParseAddr(fmt.Sprintf("fe80::%x", i+1)))},
			ips: []netip.Addr{netip.MustParseAddr(fmt.Sprintf("10.0.0.%d", i+1)),
				netip.MustParseAddr(fmt.Sprintf("fd00::%d", i+1))},
		}
		l.nodes = append(l.nodes, nd)
		l.start(nd)
	}
	return l
}

// start gives a node a fresh table, as a restart does.
func (l *lan) start(n *lanNode) {
	n.tab = New(Options{LinkAddr: n.link, Rand: rand.New(rand.NewPCG(l.r.Uint64(), 1))})
	for _, ip := range n.ips {
		l.step(n, AddrAdded{netip.PrefixFrom(ip, ip.BitLen()-8)})
	}
}

func (l *lan) step(n *lanNode, ev Event) {
	for _, a := range n.tab.Step(nil, l.now, ev) {
		switch a := a.(type) {
		case SendUD:
			l.send(n, a)
		case Deliver:
			l.back(a.Packet)
			l.got[string(a.Packet)]++
		case Discard:
			l.back(a.Packet)
		case Duplicate, Conflict:
			if !l.shared {
				l.t.Fatalf("no address is used twice, but %T %v", a, a)
			}
		}
	}
	if q := n.tab.QueuedOctets(); q > 16<<20 || q < 0 {
		l.t.Fatalf("%d octets queued", q)
	}
}

func (l *lan) back(pkt []byte) {
	if !l.waiting[string(pkt)] {
		l.t.Fatalf("packet %s came back twice", pkt)
	}
	delete(l.waiting, string(pkt))
}

func (l *lan) send(from *lanNode, a SendUD) {
	for _, to := range l.nodes {
		if to == from || a.To.LinkAddr != (encap.LinkAddr{}) && a.To.LinkAddr.Key() != to.link.Key() {
			continue
		}
		copies := 1
		if l.r.Float64() < 0.05 {
			copies = 2
		}
		for range copies {
			if l.r.Float64() < l.loss {
				continue
			}
			var ev Event = RecvND{From: from.link.Key(), Payload: a.Payload}
			if a.EtherType == encap.ARP {
				ev = RecvARP{From: from.link.Key(), Payload: a.Payload}
			}
			l.flights = append(l.flights, flight{l.now.Add(time.Duration(l.r.IntN(3_000_000))), to, ev})
		}
	}
}

// run advances to t, in the order of deadlines and arrivals.
func (l *lan) run(t time.Time) {
	for {
		next, what := t, -1
		for i, f := range l.flights {
			if f.at.Before(next) {
				next, what = f.at, i
			}
		}
		var waker *lanNode
		for _, n := range l.nodes {
			if d := n.tab.Deadline(); !d.IsZero() && d.Before(next) {
				next, waker = d, n
			}
		}
		if next.After(l.now) {
			l.now = next
		}
		switch {
		case waker != nil:
			l.step(waker, Wake{})
			if d := waker.tab.Deadline(); !d.IsZero() && !d.After(l.now) {
				l.t.Fatal("a deadline has passed and Wake did not serve it")
			}
		case what >= 0:
			f := l.flights[what]
			l.flights = append(l.flights[:what], l.flights[what+1:]...)
			l.step(f.to, f.ev)
		default:
			return
		}
	}
}

// want sends a packet from n to ip and says its name.
func (l *lan) want(n *lanNode, ip netip.Addr) string {
	l.serial++
	name := fmt.Sprintf("#%d", l.serial)
	l.waiting[name] = true
	l.step(n, Resolve{IP: ip, Packet: []byte(name)})
	return name
}

// TestLAN joins three tables with 30% loss, many seeds. Everybody finds everybody
// in both families, and again after one of them has restarted with another QPN.
func TestLAN(t *testing.T) {
	for seed := range long.Of[uint64](100, 300) {
		l := newLAN(t, seed, 3, 0.3)
		l.converge(seed, "start")
		n := l.nodes[seed%3]
		n.link.QPN += 0x1000
		for name := range l.waiting { // its packets died with it
			delete(l.waiting, name)
		}
		l.start(n)
		l.converge(seed, "restart")
		l.run(l.now.Add(10 * time.Second)) // what waited has come back or failed
		if len(l.waiting) != 0 {
			t.Fatalf("seed %d: packets never came back: %v", seed, l.waiting)
		}
		for _, n := range l.nodes {
			if n.tab.QueuedOctets() != 0 {
				t.Fatalf("seed %d: %d octets accounted, none waiting", seed, n.tab.QueuedOctets())
			}
		}
	}
}

// converge sends traffic until all know the right address of all others.
func (l *lan) converge(seed uint64, phase string) {
	for start := l.now; l.now.Sub(start) < 2*time.Minute; {
		good := true
		for _, a := range l.nodes {
			for _, b := range l.nodes {
				if a == b {
					continue
				}
				for _, ip := range b.ips {
					l.want(a, ip)
					e, ok := a.tab.Lookup(ip)
					good = good && ok && e.State.Known() && e.LinkAddr == b.link
				}
			}
		}
		if good {
			return
		}
		l.run(l.now.Add(700 * time.Millisecond))
	}
	l.t.Fatalf("seed %d: %s: not everybody found everybody in two minutes: %+v", seed, phase, l.nodes[0].tab.Neighbors())
}

// TestReplay runs one seed twice: the actions are the same.
func TestReplay(t *testing.T) {
	var sums [2]string
	for i := range sums {
		l := newLAN(t, 42, 3, 0.2)
		l.converge(42, "start")
		for _, n := range l.nodes {
			sums[i] += fmt.Sprintf("%+v %+v\n", n.tab.Neighbors(), n.tab.Counters())
		}
	}
	if sums[0] != sums[1] {
		t.Errorf("one seed, two outcomes:\n%s\n%s", sums[0], sums[1])
	}
}
