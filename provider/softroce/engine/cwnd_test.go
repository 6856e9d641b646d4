package engine

import (
	"cmp"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/verbs"
)

// congest is a requester with n packets in flight on a path whose round trip was once least, and is
// trip now.
func congest(t *testing.T, n int, least, trip time.Duration) *pair {
	p := newPair(t, ib.RC, func(c *Config, attr *verbs.QPAttr) { c.Window, attr.PathMTU = 256, ib.MTU4096 })
	p.trip(least)
	p.a.req.rtt.last = trip
	p.a.req.missing.keeps = true
	p.a.post(verbs.SendWR{Opcode: verbs.Send, SG: sg(make([]byte, n*4096))})
	if got := len(p.output(p.a)); got != n {
		t.Fatalf("%d packets left, want %d", got, n)
	}
	return p
}

// A loss where a queue on the path has filled up leaves seven tenths of what was in flight, once for
// each window; any other loss leaves that to how often packets are lost.
func TestCongestion(t *testing.T) {
	for _, tt := range []struct {
		name              string
		least, trip, most time.Duration
		gap               int
		want              int
	}{
		{"a short path with a queue", 100 * time.Microsecond, 2 * time.Millisecond, 0, 1, 35},
		{"a long path with a queue", 10 * time.Millisecond, 15 * time.Millisecond, 0, 1, 35},
		{"several packets, of a queue", 100 * time.Microsecond, 310 * time.Microsecond, 900 * time.Microsecond, 2, 35},
		{"several packets, and hardly a queue", 100 * time.Microsecond, 290 * time.Microsecond, 900 * time.Microsecond, 2, 0},
		{"several packets, and hardly a queue on a long path", 2 * time.Millisecond, 2400 * time.Microsecond, 9 * time.Millisecond, 2, 0},
		{"one packet, and a round trip that was longer", 100 * time.Microsecond, 790 * time.Microsecond, 900 * time.Microsecond, 1, 0},
		{"one packet, and a round trip that was hardly longer", 100 * time.Microsecond, 810 * time.Microsecond, 900 * time.Microsecond, 1, 35},
		// 50 packets of 4096 octets take 3.125 ms of a slow path.
		{"one packet of a slow path", 100 * time.Microsecond, 3300 * time.Microsecond, 9 * time.Millisecond, 1, 35},
		{"one packet of a path that is not slow", 100 * time.Microsecond, 3200 * time.Microsecond, 9 * time.Millisecond, 1, 0},
		{"a short path", 100 * time.Microsecond, 250 * time.Microsecond, 0, 2, 0},
		{"a long path", 10 * time.Millisecond, 12 * time.Millisecond, 0, 2, 0},
	} {
		p := congest(t, 50, tt.least, tt.trip)
		r := &p.a.req
		r.rtt.most = cmp.Or(tt.most, tt.trip)
		for i := range 3 {
			p.a.lost(r.una.Add(10*i), tt.gap) // of one window
		}
		if got := r.cwnd.allowed; got != tt.want {
			t.Errorf("%s: %d packets may be in flight, want %d", tt.name, got, tt.want)
		}
		if got, want := r.lossEvery != 0, tt.want == 0; got != want {
			t.Errorf("%s: counted as a loss of the path: %v, want %v", tt.name, got, want)
		}
		p.a.lost(r.highest, tt.gap) // of the next window
		if got, want := r.cwnd.allowed < tt.want, tt.want > 0; got != want {
			t.Errorf("%s: the next window had a loss, %d packets may be in flight, fewer wanted: %v", tt.name,
				r.cwnd.allowed, want)
		}
	}
}

// What may be in flight stays for some round trips after a loss, then grows by a packet or a part of one in a
// round trip, by more the longer nothing was lost, and is not bounded any more where the window is reached.
func TestCongestionWindowGrows(t *testing.T) {
	p := congest(t, 50, 100*time.Microsecond, 2*time.Millisecond)
	r := &p.a.req
	p.a.lost(r.una, 2)
	grown := func(rounds int) int {
		before := r.cwnd.allowed
		for range rounds {
			r.next = r.highest.Add(r.cwnd.allowed)
			r.una, r.highest = r.highest, r.next
			p.a.cwndAcked(r.next.Sub(r.una), r.una)
		}
		return r.cwnd.allowed - before
	}
	if got := grown(stayRounds); got != 0 {
		t.Errorf("%d packets more after %d round trips, want none yet", got, stayRounds)
	}
	if got := grown(10); got < 9 || got > 14 {
		t.Errorf("%d packets more after ten others, want some 10", got)
	}
	if got := grown(10); got < 14 || got > 25 {
		t.Errorf("%d packets more after ten more, want some 18", got)
	}
	if got := grown(200); got >= 0 || r.cwnd.allowed != 0 {
		t.Errorf("%d packets may be in flight in the end, want as many as the window has (0)", r.cwnd.allowed)
	}
	for _, n := range []int{4, 7} { // a short queue would overflow all the time
		r.cwnd = congestionWindow{allowed: n, end: r.una, round: r.una, rounds: stayRounds}
		if got := grown(1); got > 0 {
			t.Errorf("%d packets: %d more after one round trip, want less than one", n, got)
		}
	}
}

// A window that a loss has lowered goes on growing, and falls at the next loss, however many packets that do
// not fill it have been sent between: also after half of all PSNs.
func TestCongestionWindowOutlivesPSNs(t *testing.T) {
	p := congest(t, 50, 100*time.Microsecond, 2*time.Millisecond)
	r := &p.a.req
	p.a.lost(r.una, 2)
	lowered := r.cwnd.allowed
	acked := func(flight int) {
		r.next = r.highest.Add(flight)
		r.una, r.highest = r.highest, r.next
		p.a.cwndAcked(flight, r.una)
	}
	for range 1<<23 + 1000 {
		acked(1)
	}
	if got := r.cwnd.allowed; got != lowered {
		t.Fatalf("%d packets may be in flight after packets that came singly, want %d", got, lowered)
	}
	for range 20 {
		acked(r.cwnd.allowed)
	}
	grown := r.cwnd.allowed
	if grown <= lowered {
		t.Errorf("%d packets may be in flight after 20 full round trips, want more than %d", grown, lowered)
	}
	p.a.lost(r.una, 2)
	if got := r.cwnd.allowed; got >= grown {
		t.Errorf("%d packets may be in flight after a loss, want fewer than %d", got, grown)
	}
}

// Where most losses come at any time, those that a full queue would explain are no overflow either. Where a queue
// begins to overflow, that shows after some losses.
func TestLossesByChance(t *testing.T) {
	const least, full = 100 * time.Microsecond, 900 * time.Microsecond
	p := congest(t, 50, least, full)
	r := &p.a.req
	r.rtt.most = full
	lost := func(trip time.Duration) (overflow bool) {
		r.rtt.last, r.rtt.mean, r.cwnd.allowed = trip, trip, 0
		return p.a.congested(r.una, 1)
	}
	for i := range 40 {
		if overflow := lost(full); !overflow {
			t.Fatalf("loss %d of a queue that overflows is taken for chance", i)
		}
	}
	if overflow := lost(full / 2); overflow {
		t.Error("a loss beside a queue that is half full is taken for an overflow")
	}
	if overflow := lost(full); !overflow {
		t.Error("a loss of a queue that overflows is taken for chance after one that was")
	}
	overflows := 0
	for i := range 100 { // every second one with a full queue
		if lost(full/2 + time.Duration(i%2)*full/2) {
			overflows++
		}
	}
	if overflows == 0 || overflows > 10 {
		t.Errorf("%d of 100 losses are taken for overflows though half of them are none, want the first few", overflows)
	}
	after := 0
	for !lost(full) {
		if after++; after > 20 {
			t.Fatal("20 losses of a queue that overflows are taken for chance")
		}
	}
	if after < 4 {
		t.Errorf("a queue is taken to overflow after %d losses, want some more: it may be chance", after)
	}
}
