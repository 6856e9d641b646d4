package neigh

import (
	"net/netip"
	"testing"
	"time"
)

// While another host answers, the pauses between detections grow to a minute at
// most, and the address is ours soon after that host falls silent.
func TestDetectionPauses(t *testing.T) {
	l := newLAN(t, 1, 2, 0)
	l.shared = true
	a, b := l.nodes[0], l.nodes[1]
	l.run(l.now.Add(5 * time.Second))
	vip := netip.MustParseAddr("10.0.0.100")
	l.step(b, AddrAdded{netip.PrefixFrom(vip, 24)})
	l.run(l.now.Add(5 * time.Second))
	probes, last, longest := a.tab.Counters().DADProbes, l.now, time.Duration(0)
	l.step(a, AddrAdded{netip.PrefixFrom(vip, 24)})
	var pauses []time.Duration
	for end := l.now.Add(10 * time.Minute); l.now.Before(end); {
		l.run(l.now.Add(10 * time.Millisecond))
		if n := a.tab.Counters().DADProbes; n != probes {
			pauses, probes, last = append(pauses, l.now.Sub(last)), n, l.now
		}
	}
	for i, p := range pauses {
		longest = max(longest, p)
		if i > 6 && p < 30*time.Second {
			t.Errorf("pause %d is %v, want at least half a minute", i, p)
		}
	}
	if longest > longestPause+50*time.Millisecond {
		t.Errorf("longest pause %v, want a minute at most", longest)
	}
	if len(pauses) < 12 {
		t.Errorf("%d detections in ten minutes: %v", len(pauses), pauses)
	}
	if got := a.state(vip); got != AddrDuplicate {
		t.Errorf("it is %v, want duplicate", got)
	}
	l.step(b, AddrRemoved{vip})
	l.run(l.now.Add(time.Second))
	if got := a.state(vip); got != AddrReady {
		t.Errorf("it is %v a second after the other host has given it up, want ready", got)
	}
}

func (n *lanNode) state(ip netip.Addr) AddrState {
	for _, a := range n.tab.Addrs() {
		if a.Prefix.Addr() == ip {
			return a.State
		}
	}
	return 0
}

// Two hosts get one address, some seconds apart or at once. One of them has it in
// the end, each of the others sends to that one, and when it gives the address up
// the other one has it within two seconds.
func TestOneAddressTwoHosts(t *testing.T) {
	for seed := range uint64(200) {
		l := newLAN(t, seed, 3, 0)
		l.shared = true
		a, b, c := l.nodes[0], l.nodes[1], l.nodes[2]
		l.run(l.now.Add(5 * time.Second))
		vip := netip.MustParseAddr("10.0.0.100")
		if seed%2 == 1 {
			vip = netip.MustParseAddr("fd00::100")
		}
		l.step(a, AddrAdded{netip.PrefixFrom(vip, vip.BitLen()-8)})
		l.run(l.now.Add(time.Duration(l.r.IntN(1500)) * time.Millisecond))
		l.step(b, AddrAdded{netip.PrefixFrom(vip, vip.BitLen()-8)})
		if seed%4 >= 2 { // both have verified it: a split network has healed
			l.run(l.now.Add(time.Second))
			l.step(b, Insist{vip})
		}
		l.run(l.now.Add(20 * time.Second))
		owner, other := a, b
		if b.state(vip) == AddrReady {
			owner, other = b, a
		}
		if got := owner.state(vip); got != AddrReady {
			t.Fatalf("seed %d: it is %v at the one and %v at the other, want ready at one", seed, got, other.state(vip))
		}
		if got := other.state(vip); got != AddrDuplicate {
			t.Fatalf("seed %d: it is ready at one and %v at the other, want duplicate", seed, got)
		}
		if seed%4 >= 2 && owner != b {
			t.Errorf("seed %d: the host that insisted does not have it", seed)
		}
		l.want(c, vip)
		l.run(l.now.Add(time.Second))
		if n, _ := c.tab.Lookup(vip); n.LinkAddr != owner.link {
			t.Errorf("seed %d: a neighbour sends to %v, want %v", seed, n.LinkAddr, owner.link)
		}
		l.step(owner, AddrRemoved{vip})
		l.run(l.now.Add(2 * time.Second))
		if got := other.state(vip); got != AddrReady {
			t.Errorf("seed %d: it is %v at the other two seconds after its owner gave it up, want ready", seed, got)
		}
		if n, _ := c.tab.Lookup(vip); n.LinkAddr != other.link {
			t.Errorf("seed %d: a neighbour sends to %v then, want %v", seed, n.LinkAddr, other.link)
		}
	}
}
