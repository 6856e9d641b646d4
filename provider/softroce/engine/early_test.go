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

// forged returns a packet with a message of its own, ahead of what e expects.
func forged(e *end, ahead int, mark bool) []byte {
	const n = 64
	b := make([]byte, roce.BTHLen, roce.BTHLen+n+roce.ICRCLen)
	roce.PutBTH(b, roce.BTHFields{Opcode: roce.RCSendOnly, PKey: ib.DefaultPKey, DestQPN: e.QPN(), AckReq: true, PSN: e.rsp.epsn.Add(ahead)})
	if mark {
		roce.BTH(b).SetReserved(sentAgain)
	}
	return append(b, make([]byte, n+roce.ICRCLen)...)
}

// Whoever guesses a PSN that is ahead by two or more has nothing delivered, and ends
// nothing: beside packets under way, of which some are overtaken, and on an idle
// connection. 64 octets of zero are nobody's message but the forger's.
func TestForgedEarly(t *testing.T) {
	for seed := range int64(20) {
		rnd := rand.New(rand.NewSource(seed))
		p := newPair(t, ib.RC, nil)
		src, dst := fill(3000, 1), make([]byte, 3000)
		hits := 0
		for i := range 50 {
			p.b.postRecv(uint64(i), dst)
			p.b.postRecv(uint64(i), dst) // one for the forger
			p.a.post(verbs.SendWR{ID: uint64(i), Opcode: verbs.Send, SG: sg(src)})
			for try := 0; len(p.a.send) <= i; try++ {
				if try > 10000 {
					t.Fatalf("seed %d: message %d: A %+v B %+v", seed, i, p.a.req, p.b.rsp)
				}
				for _, b := range p.output(p.a) {
					if ahead := rnd.Intn(40); ahead >= 2 {
						p.input(p.b, forged(p.b, ahead, rnd.Intn(2) == 0))
						hits++
					}
					p.input(p.b, b)
				}
				p.now = p.now.Add(100 * time.Microsecond)
				for _, e := range []*end{p.a, p.b} {
					e.Wake(p.now)
				}
				for _, b := range p.output(p.b) {
					p.input(p.a, b)
				}
			}
			if len(p.b.recv) != i+1 {
				t.Fatalf("seed %d: %d messages were delivered, want %d", seed, len(p.b.recv), i+1)
			}
			if n := p.b.recv[i].ByteLen; n != len(src) {
				t.Fatalf("seed %d: a message of %d octets was delivered, want %d", seed, n, len(src))
			}
			same(t, "message", dst, src)
		}
		expect.Equal(t, p.a.state, verbs.StateRTS, "seed %d: a's state", seed)
		expect.Equal(t, p.b.state, verbs.StateRTS, "seed %d: b's state", seed)
		if p.b.Counters().Early == 0 {
			t.Errorf("seed %d: nothing of %d was kept: this shows nothing", seed, hits)
		}
	}
}

// What comes late, while there is no room to send it again, is not sent again; nor is
// what is behind it.
func TestMissingComesLate(t *testing.T) {
	p := newPair(t, ib.RC, nil)
	p.a.post(verbs.SendWR{Opcode: verbs.Send, SG: sg(make([]byte, 256))})
	p.a.post(verbs.SendWR{Opcode: verbs.Send, SG: sg(make([]byte, 10*256))})
	out := p.output(p.a)
	ack := func(s roce.Syndrome, k int, gap uint8) {
		b := make([]byte, roce.BTHLen+roce.AETHLen+roce.ICRCLen)
		roce.PutBTH(b, roce.BTHFields{Opcode: roce.RCAck, PKey: ib.DefaultPKey, DestQPN: p.a.QPN(), PSN: roce.BTH(out[k]).PSN()})
		roce.BTH(b).SetReserved(gap)
		roce.PutAETH(b[roce.BTHLen:], s, 0)
		p.input(p.a, b)
	}
	ack(roce.NAKSequence, 0, 4)
	ack(roce.SyndromeACK, 1, 0) // the first two had only been overtaken
	again := p.output(p.a)
	if len(again) != 2 {
		t.Fatalf("%d packets were sent again, want 2", len(again))
	}
	for i, b := range again {
		if got, want := roce.BTH(b).PSN(), roce.BTH(out[2+i]).PSN(); got != want {
			t.Errorf("%v was sent again, want %v", got, want)
		}
	}
}

// The ring in which packets are found has slots for what is kept, and a few: one packet far ahead on
// each of a thousand queue pairs, or one that is left over of many, does not take 96 KiB for each.
func TestEarlyRingIsBounded(t *testing.T) {
	for seed := range int64(20) {
		rnd := rand.New(rand.NewSource(seed))
		bufs := &countedBuffers{}
		p := newPair(t, ib.RC, func(c *Config, _ *verbs.QPAttr) { c.Buffers, c.RecvDepth = bufs, 4096 })
		for i := range 4096 {
			p.b.postRecv(uint64(i), make([]byte, 100))
		}
		check := func(what string) {
			t.Helper()
			e := &p.b.rsp.early
			if most := max(nearRing, sparseRing*(e.n+1)); len(e.slots) > most {
				t.Fatalf("seed %d: after %s %d packets are kept in %d slots, want %d at most", seed, what, e.n, len(e.slots), most)
			}
		}
		p.input(p.b, forged(p.b, earlyPackets-1, false))
		check("one far ahead")
		for ahead := 1; ahead < earlyPackets; ahead++ {
			if rnd.Intn(100) > 0 || ahead == earlyPackets-1 {
				p.input(p.b, forged(p.b, ahead, false))
			}
			check("a burst")
		}
		most := bufs.out
		for range 200 { // what is missing comes, sent again
			p.input(p.b, forged(p.b, 0, true))
			check("what was missing")
		}
		if most < earlyPackets/2 {
			t.Errorf("seed %d: %d packets were kept at most: this shows nothing", seed, most)
		}
		if bufs.out != p.b.rsp.early.n {
			t.Errorf("seed %d: %d buffers are in use, for %d packets", seed, bufs.out, p.b.rsp.early.n)
		}
	}
}

// What a queue pair keeps has a bound, and all of it is given back.
func TestEarlyIsGivenBack(t *testing.T) {
	bufs := &countedBuffers{}
	p := newPair(t, ib.RC, func(c *Config, _ *verbs.QPAttr) { c.Buffers = bufs })
	for ahead := 1; ahead < 2*earlyPackets; ahead++ {
		p.input(p.b, forged(p.b, ahead, false))
	}
	if bufs.out != earlyPackets-1 {
		t.Errorf("%d packets are kept, want %d", bufs.out, earlyPackets-1)
	}
	p.b.Close()
	for _, end := range []struct {
		name string
		do   func()
	}{
		{"the peer did not say so", func() { p.input(p.b, forged(p.b, 0, false)) }},
		{"ERR", func() { p.b.Modify(&verbs.QPAttr{State: verbs.StateError}, p.now) }},
		{"RESET", func() { p.b.Close() }},
	} {
		p = newPair(t, ib.RC, func(c *Config, _ *verbs.QPAttr) { c.Buffers = bufs })
		p.b.postRecv(1, make([]byte, 100))
		p.input(p.b, forged(p.b, 5, false))
		if bufs.out != 1 {
			t.Errorf("%s: %d are kept, want 1", end.name, bufs.out)
		}
		if end.do(); bufs.out != 0 {
			t.Errorf("%s: %d are kept", end.name, bufs.out)
		}
	}
}

// A packet ahead of the expected one that is longer than a buffer takes none.
func TestEarlyPacketLongerThanABuffer(t *testing.T) {
	bufs := &countedBuffers{}
	p := newPair(t, ib.RC, func(c *Config, _ *verbs.QPAttr) { c.Buffers = bufs })
	for range 3 {
		p.input(p.b, append(forged(p.b, 5, false), make([]byte, 4400)...))
	}
	expect.Equal(t, bufs.out, 0, "buffers in use")
}

type countedBuffers struct{ out int }

func (b *countedBuffers) Get(int) []byte { b.out++; return make([]byte, 4200) }
func (b *countedBuffers) Put([]byte)     { b.out-- }

// A kept packet that a READ has overtaken is not overwritten by one that would be in its place: its buffer
// would be lost.
func TestEarlySlotIsTaken(t *testing.T) {
	bufs, e := &countedBuffers{}, earlyBuffer{}
	keep := func(psn ib.PSN, ahead int) bool {
		b := make([]byte, roce.BTHLen+roce.ICRCLen)
		roce.PutBTH(b, roce.BTHFields{Opcode: roce.RCSendOnly, PSN: psn})
		var pkt roce.Packet
		if err := pkt.Parse(b); err != nil {
			t.Fatal(err)
		}
		return e.keep(&pkt, notECT, ahead, bufs)
	}
	if !keep(3, 3) {
		t.Fatal("the first packet was not kept")
	}
	if keep(3+smallRing, 3) {
		t.Error("a packet was kept in the place of another")
	}
	if bufs.out != e.n {
		t.Errorf("%d buffers are in use for %d packets", bufs.out, e.n)
	}
}

// However many forged packets differ from those that are kept, one NAK is sent until the packet comes that is missing:
// each costs the peer a retry.
func TestForgedEarlyCostsOneNAK(t *testing.T) {
	p := newPair(t, ib.RC, nil)
	p.b.postRecv(1, make([]byte, 700))
	p.a.post(verbs.SendWR{ID: 1, Opcode: verbs.Send, SG: sg(make([]byte, 700))})
	out := p.output(p.a)
	for range 8 {
		for i := range 2 {
			b := forged(p.b, 5, false)
			b[roce.BTHLen] = byte(i)
			p.input(p.b, b)
		}
		for _, b := range p.output(p.b) {
			p.input(p.a, b)
			p.output(p.a)
		}
	}
	if n := p.b.Counters().NAKsOut; n != 1 {
		t.Errorf("%d NAKs were sent, want 1", n)
	}
	expect.Equal(t, p.a.state, verbs.StateRTS, "state")
	for _, b := range out {
		p.input(p.b, b)
	}
	if len(p.b.recv) != 1 {
		t.Error("the message was not delivered")
	}
}
