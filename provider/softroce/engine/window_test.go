package engine

import (
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/verbs"
)

// trip exchanges one message over a path with that round trip.
func (p *pair) trip(d time.Duration) {
	p.b.postRecv(0, make([]byte, 100))
	p.a.post(verbs.SendWR{Opcode: verbs.Send, SG: sg(make([]byte, 100))})
	for _, b := range p.output(p.a) {
		p.input(p.b, b)
	}
	p.now = p.now.Add(d)
	for _, b := range p.output(p.b) {
		p.input(p.a, b)
	}
}

// The least round trip counts for one or two periods, with traffic in them or not.
func TestLeastRoundTripAges(t *testing.T) {
	var trip roundTrip
	begin := time.Unix(1000, 0)
	for _, step := range []struct{ after, trip, want time.Duration }{
		{0, time.Millisecond, time.Millisecond},
		{leastPeriod + 1, 5 * time.Millisecond, time.Millisecond},
		{2*leastPeriod + 2, 6 * time.Millisecond, 5 * time.Millisecond},
		{10 * leastPeriod, 7 * time.Millisecond, 7 * time.Millisecond},
	} {
		trip.take(step.trip, begin.Add(step.after))
		expect.Equal(t, trip.least(), step.want, "least round trip after %v", step.after)
	}
}

// The window follows the least round trip of late: on a short path it is as
// configured, on a longer one as many times larger, up to its bound.
func TestWindowFollowsTheRoundTrip(t *testing.T) {
	p := newPair(t, ib.RC, func(c *Config, attr *verbs.QPAttr) {
		c.Window, c.MaxWindowOctets, attr.PathMTU = 256, 8<<20, ib.MTU4096
	})
	for _, tt := range []struct {
		what string
		d    time.Duration
		n    int
		want int
	}{
		{"nothing is known", 0, 0, 256},
		{"a short path", 100 * time.Microsecond, 3, 256},
		{"a queue for less than the period", 5 * time.Millisecond, 100, 256},
		{"a longer path for two periods", 5 * time.Millisecond, 4000, 1280},
		{"and more", 20 * time.Millisecond, 1100, 2048},
		{"a short one again", 200 * time.Microsecond, 1, 256},
	} {
		for range tt.n {
			p.trip(tt.d)
		}
		if got := p.a.window(); got != tt.want {
			t.Errorf("%s: %d packets may be in flight, want %d", tt.what, got, tt.want)
		}
	}
	if n := p.a.Counters().Retransmits; n != 0 {
		t.Errorf("%d packets were sent again, and none was lost", n)
	}
}

// However long the path, no more packets are in flight than a receiver keeps behind a lost one.
func TestWindowIsWhatIsKept(t *testing.T) {
	p := newPair(t, ib.RC, func(c *Config, attr *verbs.QPAttr) {
		c.Window, c.MaxWindowOctets, attr.PathMTU = 512, 8<<20, ib.MTU1024
	})
	p.trip(100 * time.Millisecond)
	expect.Equal(t, p.a.window(), earlyPackets, "packets that may be in flight")
}

// A path that is longer than the first probe waits has its round trip measured all
// the same, and no probe follows then.
func TestLongPathIsMeasured(t *testing.T) {
	p := newPair(t, ib.RC, func(c *Config, attr *verbs.QPAttr) { c.MaxWindowOctets, attr.PathMTU = 8<<20, ib.MTU4096 })
	p.slowly(20, 100, 40*time.Millisecond) // a probe goes out after a quarter of 67 ms
	if got, want := p.a.window(), 2048; got != want {
		t.Errorf("%d packets may be in flight, want %d", got, want)
	}
	if n := p.a.Counters().Probes; n > 2 {
		t.Errorf("%d probes went out, want 2 at most: the path is no longer than it was", n)
	}
}

// Where the round trip varies, because messages wait in a queue, no probes go out into
// that queue.
func TestQueueIsNotProbed(t *testing.T) {
	p := newPair(t, ib.RC, nil)
	p.slowly(20, 100, 20*time.Millisecond, 40*time.Millisecond)
	if n := p.a.Counters().Probes; n > 2 {
		t.Errorf("%d probes went out, want 2 at most: no round trip was longer than others", n)
	}
}

// A path that comes to take longer than a probe waits is measured all the same: the next probe waits
// longer, until a packet that was not sent again has been acknowledged (RFC 6298 section 5).
func TestPathThatTakesLonger(t *testing.T) {
	p := newPair(t, ib.RC, func(_ *Config, attr *verbs.QPAttr) { attr.PathMTU = ib.MTU256 })
	for range seldomLost {
		p.trip(200 * time.Microsecond)
	}
	p.slowly(20, 1000, 25*time.Millisecond)
	if n := p.a.Counters().Probes; n > 4 {
		t.Errorf("%d probes went out for 20 messages, want 4 at most", n)
	}
	if got, least := p.a.req.rtt.mean, 20*time.Millisecond; got < least {
		t.Errorf("the round trip is taken for %v, want %v at least", got, least)
	}
}

// slowly exchanges messages over round trips of these lengths in turn, n times, and lets
// the requester's timers run meanwhile.
func (p *pair) slowly(n, octets int, trips ...time.Duration) {
	for i := range n * len(trips) {
		trip := trips[i%len(trips)]
		p.b.postRecv(0, make([]byte, 1000))
		p.a.post(verbs.SendWR{Opcode: verbs.Send, SG: sg(make([]byte, octets))})
		wire := p.output(p.a)
		for end := p.now.Add(trip); p.now.Before(end); p.now = p.now.Add(time.Millisecond) {
			p.a.Wake(p.now)
			wire = append(wire, p.output(p.a)...)
		}
		for _, b := range wire {
			p.input(p.b, b)
		}
		for _, b := range p.output(p.b) {
			p.input(p.a, b)
		}
	}
}
