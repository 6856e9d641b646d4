package ipoib

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"ipoibcm/wire/ip"
	"ipoibcm/wire/ip/iptest"
)

// told counts the messages that tell n's kernel that dst is unreachable.
func (n *node) told(dst string) (k int) {
	for _, p := range n.tun {
		if src, _ := ip.Src(p); src != netip.MustParseAddr(dst) {
			continue
		}
		if v4, err := ip.AsV4(p); err == nil && v4.Protocol() == ip.ProtoICMP && v4.Payload()[0] == 3 &&
			v4.Payload()[1] == 1 {
			k++
		}
		if v6, err := ip.AsV6(p); err == nil && v6[6] == ip.ProtoICMPv6 && v6[40] == 1 && v6[41] == 3 {
			k++
		}
	}
	return k
}

// A sender learns within three seconds that nobody answers for its next hop, as on
// Ethernet, and again at once from each packet in the hold-down.
func TestUnreachable(t *testing.T) {
	for _, dst := range []string{"10.0.0.77", "fd00::77"} {
		w := newWorld(t, 1)
		a := w.node(1, Options{})
		w.settle()
		a.tun = nil
		for range 3 {
			a.ping(dst, 100, false)
		}
		w.run(2700 * time.Millisecond)
		if got := a.told(dst); got != 0 {
			t.Errorf("%s: %d messages while it is being asked for, want none", dst, got)
		}
		w.run(300 * time.Millisecond)
		if got := a.told(dst); got != 3 {
			t.Errorf("%s: %d messages after 3 s, want one for each of 3 packets", dst, got)
		}
		a.tun = nil
		a.ping(dst, 100, false)
		if got := a.told(dst); got != 1 {
			t.Errorf("%s: %d messages for a packet in the hold-down, want 1", dst, got)
		}
		for range 200 {
			a.ping(dst, 100, false)
		}
		if got := a.told(dst); got != unreachableRate {
			t.Errorf("%s: %d messages for 201 packets at once, want %d", dst, got, unreachableRate)
		}
		w.run(500 * time.Millisecond)
		a.tun = nil
		for range 200 {
			a.ping(dst, 100, false)
		}
		if got, want := a.told(dst), unreachableRate/2; got != want {
			t.Errorf("%s: %d messages half a second later, want %d", dst, got, want)
		}
	}
}

// Of packets that other hosts have sent the kernel tells one a second, six at once.
func TestUnreachableForwarded(t *testing.T) {
	w := newWorld(t, 1)
	a := w.node(1, Options{})
	w.settle()
	forward := func(src string, n int) {
		for range n {
			e := iptest.Echo{Src: netip.MustParseAddr(src), Dst: netip.MustParseAddr("10.0.0.77"), ID: 1, Seq: 1}
			b, err := e.AppendBinary(nil)
			if err != nil {
				t.Fatal(err)
			}
			a.output(b)
		}
	}
	forward("192.0.2.1", 20)
	forward("192.0.2.2", 2)
	a.tun = nil
	w.run(3 * time.Second)
	count := func(dst string) (k int) {
		for _, p := range a.tun {
			if d, _ := ip.Dst(p); d == netip.MustParseAddr(dst) {
				k++
			}
		}
		return k
	}
	if got := count("192.0.2.1"); got != forwardedBurst {
		t.Errorf("%d messages to the sender of 20 packets, want %d", got, forwardedBurst)
	}
	if got := count("192.0.2.2"); got != 2 {
		t.Errorf("%d messages to the sender of 2 packets, want 2", got)
	}
	if got, want := a.counter("unreachable_not_told"), uint64(14); got != want {
		t.Errorf("%d not told, want %d", got, want)
	}
	for i := range 2 * maxUnreachable {
		forward(netip.AddrFrom4([4]byte{198, 18, byte(i >> 8), byte(i)}).String(), 1)
	}
	if got := a.f.unreachable.senders.Len(); got > maxUnreachable {
		t.Errorf("%d senders on record, want %d at most", got, maxUnreachable)
	}
	w.run(10 * time.Second)
	forward("192.0.2.3", 1)
	w.run(3 * time.Second)
	if got := count("192.0.2.3"); got != 1 {
		t.Errorf("%d messages to a sender after others have been silent, want 1", got)
	}
}

// A neighbour that does not answer is shown with how long it has not, and
// explained so.
func TestFailedIsShown(t *testing.T) {
	w := newWorld(t, 1)
	a := w.node(1, Options{})
	w.settle()
	a.ping("10.0.0.77", 100, false)
	w.run(12750 * time.Millisecond)
	dst := netip.MustParseAddr("10.0.0.77")
	var found *NeighbourInfo
	for _, n := range a.f.Neighbours() {
		if n.Addr == dst {
			found = &n
		}
	}
	if found == nil {
		t.Fatal("it is not shown")
	}
	if found.State != "FAILED" {
		t.Errorf("state %s, want FAILED", found.State)
	}
	if age := w.now.Sub(found.Updated).Round(time.Second); age != 10*time.Second {
		t.Errorf("age %v, want 10s", age)
	}
	a.step(Wake{})
	why := strings.Join(a.explain(dst).Reasons, "; ")
	if want := "nobody answered for 10.0.0.77 since "; !strings.Contains(why, want) {
		t.Errorf("explained as %q, want %q in it", why, want)
	}
	if want := "10s ago"; !strings.Contains(why, want) {
		t.Errorf("explained as %q, want %q in it", why, want)
	}
}
