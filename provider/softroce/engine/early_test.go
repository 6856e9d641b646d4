package engine

import (
	"math/rand"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/verbs"
)

// Packets that overtake three others cost nothing: none is sent again for them.
func TestDisplacedPackets(t *testing.T) {
	l := link{rate: 125e6, queue: 4 << 20, delay: 50 * time.Microsecond, displace: 0.005}
	b := newBottleneck(t, &l, 1, ib.MTU1024, nil)
	b.run(start, time.Second)
	f := b.flows[0]
	c := f.a.Counters()
	if early := f.b.Counters().Early; early < 100 {
		t.Errorf("%d packets arrived early, want hundreds", early)
	}
	if c.Retransmits > c.PacketsOut/10000 {
		t.Errorf("%d of %d packets were sent again", c.Retransmits, c.PacketsOut)
	}
	if share := float64(f.goodput()) / (l.rate * 1024 / (1024 + 106)); share < 0.9 {
		t.Errorf("%.3f of the rate, want 0.9", share)
	}
}

// Of packets that are lost one by one only those are sent again, and the path stays full.
func TestOnlyWhatIsMissing(t *testing.T) {
	for _, lose := range []float64{0.001, 0.01} {
		l := link{rate: 125e6, queue: 4 << 20, delay: 50 * time.Microsecond, lose: lose}
		b := newBottleneck(t, &l, 1, ib.MTU1024, nil)
		b.run(start, 2*time.Second)
		f := b.flows[0]
		c := f.a.Counters()
		if again := float64(c.Retransmits) / float64(c.PacketsOut); again > 1.3*lose {
			t.Errorf("%g lost: %.5f of the packets were sent again", lose, again)
		}
		if share := float64(f.goodput()) / 2 / (l.rate * 1024 / (1024 + 106)); share < 0.85 {
			t.Errorf("%g lost: %.3f of the rate, want 0.85", lose, share)
		}
	}
}

// goBackN makes a NAK of e what every other stack sends: without a number.
func goBackN(b []byte) []byte {
	b[8] &= 0x80
	return b
}

// A receiver that tells nothing of what it has gets all from the gap on, as ever, and
// a sender that does not know of it is served too.
func TestGoBackNStill(t *testing.T) {
	rnd := rand.New(rand.NewSource(3))
	p := newPair(t, ib.RC, nil)
	p.trace = func(fromA bool, b []byte) { goBackN(b) }
	p.drop = func(bool, []byte) bool { return rnd.Intn(30) == 0 }
	src, dst := fill(20000, 1), make([]byte, 20000)
	for i := range 50 {
		p.b.postRecv(uint64(i), dst)
		p.a.post(verbs.SendWR{ID: uint64(i), Opcode: verbs.Send, SG: sg(src)})
		p.runUntil(func() bool { return len(p.a.send) == i+1 })
		same(t, "message", dst, src)
	}
	if p.a.req.missing.keeps {
		t.Error("the sender believes that its peer keeps what is early")
	}
	if p.a.Counters().NAKsIn == 0 {
		t.Error("no NAK came")
	}
}

// A gap that is longer than a NAK can tell is filled part by part.
func TestLongGap(t *testing.T) {
	p := newPair(t, ib.RC, func(c *Config, _ *verbs.QPAttr) { c.Window = 1024 })
	p.a.req.cc.window, p.a.req.limit = 1024, 1024
	src, dst := fill(256*900, 1), make([]byte, 256*900)
	sent := 0
	p.drop = func(fromA bool, _ []byte) bool {
		if fromA {
			sent++
		}
		return fromA && sent > 100 && sent <= 500
	}
	p.b.postRecv(1, dst)
	p.a.post(verbs.SendWR{ID: 1, Opcode: verbs.Send, SG: sg(src)})
	p.runUntil(func() bool { return len(p.a.send) == 1 })
	same(t, "message", dst, src)
	if c := p.a.Counters(); c.Retransmits != 400 {
		t.Errorf("%d packets were sent again, want 400", c.Retransmits)
	}
}

// What is kept has a bound, in packets and in octets; what is beyond is dropped.
func TestEarlyIsBounded(t *testing.T) {
	p := newPair(t, ib.RC, func(c *Config, attr *verbs.QPAttr) { c.Window, attr.PathMTU = 1<<14, ib.MTU4096 })
	p.a.req.cc.window, p.a.req.limit = 1<<14, 1<<14
	p.b.postRecv(1, make([]byte, 16<<20))
	p.a.post(verbs.SendWR{ID: 1, Opcode: verbs.Send, SG: sg(make([]byte, 16<<20))})
	for i, b := range p.output(p.a) {
		if i > 0 {
			p.input(p.b, b)
		}
	}
	if e := &p.b.rsp.early; e.octets > earlyOctets || e.octets < earlyOctets/2 {
		t.Errorf("%d octets are kept, want at most %d", e.octets, earlyOctets)
	}
	if n := p.b.Counters().Drops[DropSequence]; n == 0 {
		t.Error("nothing was dropped")
	}
	p.b.Close()
	if e := &p.b.rsp.early; e.n != 0 || e.octets != 0 {
		t.Errorf("after Close %d packets of %d octets are kept", e.n, e.octets)
	}
}

// After an RNR NAK a few packets go first, and their ACKs bring the rest.
func TestNoBurstAfterRNR(t *testing.T) {
	p := newPair(t, ib.RC, nil)
	p.a.post(verbs.SendWR{ID: 1, Opcode: verbs.Send, SG: sg(make([]byte, 256*64))})
	p.run()
	p.now = p.a.Deadline()
	p.b.postRecv(1, make([]byte, 256*64))
	p.a.Wake(p.now)
	if n := len(p.output(p.a)); n != rnrFlight {
		t.Errorf("%d packets after an RNR NAK, want %d", n, rnrFlight)
	}
}
