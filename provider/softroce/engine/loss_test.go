package engine

import (
	"math/rand"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/verbs"
	"ipoibcm/wire/roce"
)

// Where packets are lost fewer are in flight, so that not much is sent again for
// one of them; when none is lost any more the window soon is what it was.
func TestFlightUnderLoss(t *testing.T) {
	const window = 256
	for _, oneIn := range []int{0, 1000, 300, 100, 30} {
		rnd := rand.New(rand.NewSource(int64(oneIn)))
		lossy := oneIn > 0
		p := newPair(t, ib.RC, func(c *Config, attr *verbs.QPAttr) { c.Window, attr.PathMTU = window, ib.MTU1024 })
		lost := 0
		p.drop = func(fromA bool, b []byte) bool {
			if !lossy || !fromA || rnd.Intn(oneIn) > 0 {
				return false
			}
			lost++
			return true
		}
		src, dst := fill(65524, 1), make([]byte, 65524)
		sent := 0
		send := func(messages int) {
			for range messages {
				for i := range 8 {
					p.b.postRecv(uint64(i), dst)
					p.a.post(verbs.SendWR{ID: uint64(i), Opcode: verbs.Send, SG: sg(src)})
				}
				sent += 8
				p.runUntil(func() bool { return len(p.a.send) == sent })
				same(t, "message", dst, src)
			}
		}
		send(100)
		again, out := p.a.Counters().Retransmits, p.a.Counters().PacketsOut
		most := 0.4
		switch {
		case oneIn == 0:
			most = 0
			expect.Equal(t, p.a.req.limit, window, "nothing lost: what may be in flight")
		case oneIn >= 300:
			most = 0.15
		}
		if share := float64(again) / float64(out); share > most {
			t.Errorf("one in %d lost: %d of %d packets were sent again (%.2f), want at most %v", oneIn, again, out, share, most)
		}
		if oneIn > 0 && lost < 51200/oneIn/2 {
			t.Errorf("one in %d lost: only %d were, want at least %d", oneIn, lost, 51200/oneIn/2)
		}
		if lossy = false; oneIn > 0 {
			send(lossMemory)
			if p.a.req.limit != window {
				t.Errorf("one in %d lost, then none for %d messages: %d may be in flight, want %d", oneIn, 8*8, p.a.req.limit, window)
			}
		}
		t.Logf("one in %d lost: %d of %d sent again, probes %d, timeouts %d", oneIn, again, out, p.a.Counters().Probes, p.a.Counters().Timeouts)
	}
}

// Health is what happened: a round trip of 300 us, six packets out, one of them lost
// and sent again by itself.
func TestHealth(t *testing.T) {
	p := newPair(t, ib.RC, nil)
	if h, ok := p.a.Health(); !ok || h != (verbs.Health{Limit: 128, Window: 128}) {
		t.Errorf("at first: %+v, %v", h, ok)
	}
	send := func(id uint64, lose int) {
		p.b.postRecv(id, make([]byte, 600))
		p.a.post(verbs.SendWR{ID: id, Opcode: verbs.Send, SG: sg(make([]byte, 600))})
		for i, b := range p.output(p.a) {
			if i != lose {
				p.input(p.b, b)
			}
		}
	}
	send(1, -1)
	p.now = p.now.Add(300 * time.Microsecond)
	if h, _ := p.a.Health(); h.InFlight != 3 {
		t.Errorf("%d in flight, want 3", h.InFlight)
	}
	p.run()
	send(2, 1)
	p.now = p.now.Add(patienceTime)
	p.b.Wake(p.now)
	p.run()
	want := verbs.Health{RTT: 300 * time.Microsecond, RTTSpread: 150 * time.Microsecond, Limit: minFlight, Window: 128, Packets: 7, Retransmits: 1}
	if h, ok := p.a.Health(); !ok || h != want {
		t.Errorf("%+v, want %+v", h, want)
	}
	p.a.Close()
	if _, ok := p.a.Health(); ok {
		t.Error("health in RESET")
	}
	if _, ok := newPair(t, ib.UC, nil).a.Health(); ok {
		t.Error("health of UC")
	}
}

// A peer that was slow for longer than a probe waits has lost nothing: its ACKs do
// not make us send again what it has.
func TestProbeInVain(t *testing.T) {
	p := newPair(t, ib.RC, func(c *Config, attr *verbs.QPAttr) { c.Window, attr.PathMTU = 256, ib.MTU1024 })
	src, dst := fill(65524, 1), make([]byte, 65524)
	for i := range 20 { // round trips of 200 us
		p.b.postRecv(uint64(i), dst)
		p.a.post(verbs.SendWR{ID: uint64(i), Opcode: verbs.Send, SG: sg(src[:100])})
		for _, b := range p.output(p.a) {
			p.input(p.b, b)
		}
		p.now = p.now.Add(200 * time.Microsecond)
		p.run()
	}
	for i := range 4 {
		p.b.postRecv(uint64(i), dst)
		p.a.post(verbs.SendWR{ID: uint64(i), Opcode: verbs.Send, SG: sg(src)})
	}
	flight := p.output(p.a)
	p.now = p.now.Add(MinProbe)
	p.a.Wake(p.now)
	flight = append(flight, p.output(p.a)...)
	p.now = p.now.Add(time.Millisecond)
	for _, b := range flight {
		p.input(p.b, b)
		for _, ack := range p.output(p.b) {
			p.input(p.a, ack)
			for _, b := range p.output(p.a) {
				p.input(p.b, b)
			}
		}
	}
	c := p.a.Counters()
	expect.Equal(t, len(flight), 257, "number of packets")
	expect.Equal(t, c.Probes, 1, "Probes")
	expect.Equal(t, c.Retransmits, 1, "Retransmits")
	expect.Equal(t, len(p.a.send), 24, "number of completed requests")
	if h, _ := p.a.Health(); h.Limit != h.Window {
		t.Errorf("%d may be in flight, want %d", h.Limit, h.Window)
	}
}

// The answer to a probe shows that the last packet is lost: the next probe, which brings it, comes soon, however long
// round trips were of late. Another ACK shows that the first one was only late: then it waits.
func TestLostBehindAProbe(t *testing.T) {
	for _, another := range []bool{false, true} {
		p := newPair(t, ib.RC, nil)
		p.trip(50 * time.Microsecond)
		for range seldomLost {
			p.trip(20 * time.Millisecond)
		}
		for range 3 {
			p.b.postRecv(0, make([]byte, 2*256))
			p.a.post(verbs.SendWR{Opcode: verbs.Send, SG: sg(make([]byte, 2*256))})
		}
		flight := p.output(p.a)
		for _, b := range flight[:2] {
			p.input(p.b, b)
		}
		p.output(p.b) // is lost
		p.now = p.a.Deadline()
		p.a.Wake(p.now)
		probe := p.output(p.a)
		p.now = p.now.Add(50 * time.Microsecond)
		for _, b := range append(probe, flight[2:4]...) {
			p.input(p.b, b)
			for _, ack := range p.output(p.b) {
				p.input(p.a, ack)
			}
			if !another { // all others are lost
				break
			}
		}
		wait := p.a.Deadline().Sub(p.now)
		if !another && wait > MinProbe {
			t.Errorf("the next probe comes after %v, want %v at most", wait, MinProbe)
		}
		if another && wait < 20*time.Millisecond {
			t.Errorf("the next probe comes after %v although more was acknowledged, want 20 ms at least", wait)
		}
	}
}

// While a gap is repaired that the path made by chance, more packets may leave than the limit says: a quarter of those
// behind the gap with each quarter of a round trip, because the peer has these. Not where a queue has overflowed,
// or where CE marks say that it is full.
// The ACK of what leaves then waits for the gap: as a measure of the round trip it is too long, and
// counts only if it is short.
func TestInFlightBesideAGap(t *testing.T) {
	const n = 50
	for _, tt := range []struct {
		name  string
		trip  time.Duration // now; 100 us is the least
		ce    int           // packets that CE marks leave in flight; 0: there were none
		wants []int         // packets that leave after each quarter of trip; nil: none do
	}{
		{"lost by chance", 160 * time.Microsecond, 0, []int{12, 12, 12, 13}},
		{"a queue that overflowed", time.Millisecond, 0, nil},
		{"a queue that marks", 160 * time.Microsecond, n, nil},
	} {
		p := congest(t, n, 100*time.Microsecond, tt.trip)
		a := p.a
		r := &a.req
		r.rtt.most, r.ecn.allowed = tt.trip, tt.ce
		r.lossEvery, r.sinceLoss = 3*n/2, 3*n/2 // so n may be in flight, after one more loss too
		r.limit = a.flight()
		a.post(verbs.SendWR{ID: 1, Opcode: verbs.Send, SG: sg(make([]byte, 4*n*4096))})
		lost := r.una
		p.output(a)
		a.nakSequence(lost, 1, p.now)
		out := p.output(a)
		if len(out) != 1 || roce.BTH(out[0]).PSN() != lost {
			t.Fatalf("%s: %d packets left after a NAK, want the one that it asks for", tt.name, len(out))
		}
		for i := range 6 {
			want := 0
			if i < len(tt.wants) {
				want = tt.wants[i]
				if due := a.Deadline(); !due.Equal(p.now.Add(tt.trip / 4)) {
					t.Errorf("%s: quarter %d: the next packets leave at %v, want %v later", tt.name, i, due, tt.trip/4)
				}
			}
			p.now = p.now.Add(tt.trip/4 - 1)
			a.Wake(p.now)
			if early := len(p.output(a)); early != 0 {
				t.Errorf("%s: quarter %d: %d packets left too early", tt.name, i, early)
			}
			p.now = p.now.Add(1)
			a.Wake(p.now)
			if left := len(p.output(a)); left != want {
				t.Errorf("%s: quarter %d: %d packets left, want %d", tt.name, i, left, want)
			}
		}
		before := r.rtt.mean
		p.now = p.now.Add(time.Second)
		a.advance(r.highest, p.now)
		a.ackMissing()
		expect.Equal(t, r.rtt.mean, before, "%s: round trip after the gap is closed", tt.name)
		expect.Equal(t, r.rtt.pending, false, "%s: a packet is measured after all are acknowledged", tt.name)
		if got := a.mostInFlight(); got != r.limit {
			t.Errorf("%s: %d may be in flight after the gap is closed, want the limit of %d", tt.name, got, r.limit)
		}
	}
}

// Two thirds of the packets between two losses may be in flight, half where these make the round trip long, and with a
// peer that keeps none an eighth.
func TestLossFlight(t *testing.T) {
	for _, tt := range []struct {
		keeps bool
		mean  time.Duration // 100 us is the least
		every int
		want  int
	}{
		{true, 150 * time.Microsecond, 90, 60},
		{true, 200 * time.Microsecond, 90, 60},
		{true, 201 * time.Microsecond, 90, 45},
		{true, 150 * time.Microsecond, 6, 8},
		{true, 150 * time.Microsecond, 900, 256},
		{false, 150 * time.Microsecond, 800, 100},
		{false, 150 * time.Microsecond, 90, minFlight},
	} {
		p := newPair(t, ib.RC, func(c *Config, attr *verbs.QPAttr) { c.Window, attr.PathMTU = 256, ib.MTU4096 })
		p.trip(100 * time.Microsecond)
		r := &p.a.req
		r.missing.keeps, r.rtt.mean, r.lossEvery, r.sinceLoss = tt.keeps, tt.mean, tt.every, 0
		if got := p.a.lossFlight(); got != tt.want {
			t.Errorf("peer keeps: %v, round trip %v, a loss in %d packets: %d may be in flight, want %d", tt.keeps, tt.mean, tt.every, got, tt.want)
		}
	}
}

// No more packets are in flight beside a gap than a peer keeps, however many are behind it.
func TestInFlightBesideAGapIsKept(t *testing.T) {
	for _, tt := range []struct{ window, octets, want int }{
		{256, 8 << 20, 512},
		{256, 0, 256},
		{1500, 8 << 20, 2048},
		{3000, 64 << 20, earlyPackets},
		{5000, 64 << 20, 5000},
	} {
		p := newPair(t, ib.RC, func(c *Config, attr *verbs.QPAttr) {
			c.Window, c.MaxWindowOctets, attr.PathMTU = tt.window, tt.octets, ib.MTU4096
		})
		r := &p.a.req
		r.limit = tt.window
		r.missing = missing{asked: true, quarters: 4, end: r.una.Add(1), behind: r.una.Add(1 + tt.window)}
		if got := p.a.mostInFlight(); got != tt.want {
			t.Errorf("window of %d, %d octets at most: %d packets may be in flight, want %d", tt.window, tt.octets, got, tt.want)
		}
	}
}

// A round trip whose ACK waited for a repair counts only if it is shorter than what is known: it was at most so long.
func TestTripBehindAGap(t *testing.T) {
	const known = 10 * time.Millisecond
	for what, begin := range map[string]func(trip *roundTrip, now time.Time){
		"sent behind a gap":         func(trip *roundTrip, now time.Time) { trip.begin(1, true, true, now) },
		"sent again":                func(trip *roundTrip, now time.Time) { trip.begin(1, true, false, now); trip.boundFrom(0) },
		"acknowledged with a NAK's": func(trip *roundTrip, now time.Time) { trip.begin(1, true, false, now); trip.bound() },
	} {
		for _, tt := range []struct {
			took   time.Duration
			counts bool
		}{{2 * known, false}, {known / 2, true}} {
			var trip roundTrip
			now := time.Unix(1000, 0)
			trip.take(known, now)
			begin(&trip, now)
			trip.end(2, now.Add(tt.took))
			if got := trip.last == tt.took; got != tt.counts {
				t.Errorf("%s: %v, where %v was known, counts: %v, want %v", what, tt.took, known, got, tt.counts)
			}
		}
	}
}

// One long measurement counts for a few round trips at most: a host may only have been away.
func TestPauseIsNoTrip(t *testing.T) {
	const known = 10 * time.Millisecond
	var trip roundTrip
	now := time.Unix(1000, 0)
	for range 100 {
		trip.take(known, now)
	}
	trip.take(time.Second, now)
	if most := known + (tripGrows*known+MinProbe)/8; trip.mean > most {
		t.Errorf("round trip of %v after one of a second, where %v was known, want %v at most", trip.mean, known, most)
	}
	expect.Equal(t, trip.last, time.Second, "last round trip")
	for range 50 {
		trip.take(time.Second, now)
	}
	if trip.mean < 900*time.Millisecond {
		t.Errorf("round trip of %v after 51 of a second", trip.mean)
	}
}

// What a NAK acknowledges may have waited for what the NAK asks for: its time is no round trip if it is long.
func TestTripOfANAK(t *testing.T) {
	p := newPair(t, ib.RC, nil)
	p.trip(100 * time.Microsecond)
	known := p.a.req.rtt.mean
	for range 4 {
		p.b.postRecv(0, make([]byte, 100))
		p.a.post(verbs.SendWR{Opcode: verbs.Send, SG: sg(make([]byte, 100))})
	}
	out := p.output(p.a)
	p.input(p.b, out[0])
	p.output(p.b) // its ACK is lost
	p.now = p.now.Add(time.Second)
	p.input(p.b, out[3])
	naks := p.output(p.b)
	if len(naks) != 1 || roce.BTH(naks[0]).PSN() != roce.BTH(out[1]).PSN() {
		t.Fatalf("%d packets, want the NAK for the second message", len(naks))
	}
	p.input(p.a, naks[0])
	expect.Equal(t, p.a.req.una, roce.BTH(out[1]).PSN(), "what is not acknowledged")
	expect.Equal(t, p.a.req.rtt.mean, known, "round trip after a NAK that came late")
}
