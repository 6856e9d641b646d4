package engine

import (
	"slices"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/verbs"
	"ipoibcm/wire/roce"
)

const ect0 = 2

// ecnPair connects two QPs of a path that a keeps full, with messages of 64 packets.
func ecnPair(t *testing.T, tr ib.Transport, a, b ECNMode) *pair {
	modes := []ECNMode{a, b}
	return newPair(t, tr, func(c *Config, _ *verbs.QPAttr) { c.ECN, modes = modes[0], modes[1:] })
}

// rounds sends n messages of 64 packets from a to b over a round trip of 1 ms. The path
// makes of each packet's codepoint what path says; it returns those that arrived, and
// what b sent.
func (p *pair) rounds(n int, path func(ecn uint8) uint8) (arrived []uint8, back [][]byte) {
	for range n {
		p.b.postRecv(0, make([]byte, 64*256))
		p.a.post(verbs.SendWR{Opcode: verbs.Send, SG: sg(make([]byte, 64*256))})
		for p.a.sq.len() > 0 {
			out := p.output(p.a)
			if len(out) == 0 && p.a.sq.len() > 0 {
				p.t.Fatalf("nothing goes out, and %d requests are outstanding", p.a.sq.len())
			}
			for _, b := range out {
				ecn := uint8(notECT)
				if p.a.SendsECT() {
					ecn = ect0
				}
				if path != nil {
					ecn = path(ecn)
				}
				arrived = append(arrived, ecn)
				p.inputECN(p.b, b, ecn)
			}
			p.now = p.now.Add(time.Millisecond)
			for _, b := range p.output(p.b) {
				back = append(back, b)
				p.input(p.a, b)
			}
		}
	}
	return arrived, back
}

// inputECN is input of a packet with an ECN codepoint.
func (p *pair) inputECN(e *end, b []byte, ecn uint8) DropReason {
	var pkt roce.Packet
	if err := pkt.Parse(b); err != nil {
		p.t.Fatalf("%x: %v", b, err)
	}
	return e.Receive(&pkt, &Source{Src: p.other(e).gid, Dst: e.gid, ECN: ecn}, p.now)
}

// markOne marks the i-th packet and no other.
func markOne(i int) func(uint8) uint8 {
	return func(ecn uint8) uint8 {
		if i--; i == -1 && ecn != notECT {
			return ce
		}
		return ecn
	}
}

func cnps(packets [][]byte) (n int) {
	for _, b := range packets {
		if roce.Opcode(b[0]) == roce.CNP {
			n++
		}
	}
	return n
}

// Packets leave ECN-capable once the peer has said in an ACK that it answers marks.
func TestECNIsAgreedUpon(t *testing.T) {
	for _, tt := range []struct {
		name string
		tr   ib.Transport
		a, b ECNMode
		want bool
	}{
		{"both by themselves", ib.RC, ECNAuto, ECNAuto, true},
		{"the peer is told to", ib.RC, ECNAuto, ECNOn, true},
		{"the peer does not", ib.RC, ECNAuto, ECNOff, false},
		{"we do not", ib.RC, ECNOff, ECNAuto, false},
		{"we are told to, whatever the peer is", ib.RC, ECNOn, ECNOff, true},
		{"UC has no ACK", ib.UC, ECNAuto, ECNAuto, false},
		{"UC, told to", ib.UC, ECNOn, ECNOff, true},
	} {
		p := ecnPair(t, tt.tr, tt.a, tt.b)
		if got, want := p.a.SendsECT(), tt.a == ECNOn; got != want {
			t.Errorf("%s: ECN-capable from the beginning: %v, want %v", tt.name, got, want)
		}
		if tt.tr == ib.RC {
			p.rounds(2, nil)
		}
		if got := p.a.SendsECT(); got != tt.want {
			t.Errorf("%s: ECN-capable: %v, want %v", tt.name, got, tt.want)
		}
	}
}

// A mark takes half of what is in flight at first, once in a round trip, and less where
// marks are rare. Without marks it comes back.
func TestMarksBoundTheFlight(t *testing.T) {
	p := ecnPair(t, ib.RC, ECNAuto, ECNAuto)
	p.rounds(4, nil)
	if got := p.a.req.ecn.allowed; got != 0 {
		t.Fatalf("without marks %d packets may be in flight", got)
	}
	_, back := p.rounds(1, markOne(5))
	first := p.a.req.ecn.allowed
	if first < 28 || first > 34 {
		t.Errorf("after the first mark among 64 packets %d may be in flight, want about half", first)
	}
	if n := p.a.Counters().Reductions; n != 1 {
		t.Errorf("%d reductions, want 1", n)
	}
	if n := cnps(back); n != 1 {
		t.Errorf("%d CNPs, want 1", n)
	}
	p.rounds(1, func(ecn uint8) uint8 { return ce })
	if got := p.a.req.limit; got > first/2 || got < leastMarked {
		t.Errorf("with each packet marked %d may be in flight, want %d to %d", got, leastMarked, first/2)
	}
	for range 40 {
		p.rounds(1, func(ecn uint8) uint8 { return ce })
	}
	if got := p.a.req.ecn.allowed; got != leastMarked {
		t.Errorf("with each packet marked for long %d may be in flight, want %d", got, leastMarked)
	}
	p.rounds(200, nil)
	if got := p.a.req.ecn.allowed; got != 0 {
		t.Errorf("long after the marks %d packets may be in flight, want no bound", got)
	}
	p.rounds(1, markOne(5))
	if got := p.a.req.ecn.allowed; got < 60 {
		t.Errorf("after a mark that is rare %d of 64 packets may be in flight, want 60 at least", got)
	}
	if n := p.a.Counters().Retransmits; n != 0 {
		t.Errorf("%d packets were sent again", n)
	}
}

// A message that had a marked packet says so when it completes, and no other does.
func TestMarkedMessage(t *testing.T) {
	for _, tr := range []ib.Transport{ib.RC, ib.UC} {
		p := ecnPair(t, tr, ECNOn, ECNOn)
		var want []bool
		for i := range 6 {
			p.b.postRecv(uint64(i), make([]byte, 1024))
			p.a.post(verbs.SendWR{Opcode: verbs.Send, SG: sg(make([]byte, 1024))})
			want = append(want, i%2 == 1)
		}
		sent := 0
		for i, b := range p.output(p.a) {
			ecn := uint8(ect0)
			if i/4%2 == 1 && i%4 == 2 {
				ecn = ce
			}
			p.inputECN(p.b, b, ecn)
			sent += cnps(p.output(p.b))
		}
		var got []bool
		for _, wc := range p.b.recv {
			got = append(got, wc.Flags&verbs.Congested != 0)
		}
		if !slices.Equal(got, want) {
			t.Errorf("%v: messages that met congestion: %v, want %v", tr, got, want)
		}
		if n := p.b.Counters().CEIn; n != 3 {
			t.Errorf("%v: %d packets with a mark, want 3", tr, n)
		}
		if sent != 1 {
			t.Errorf("%v: %d CNPs at one moment, want 1", tr, sent)
		}
	}
}

// Where something on the way clears ECT, packets are not ECN-capable any more.
func TestBleachedPath(t *testing.T) {
	p := ecnPair(t, ib.RC, ECNAuto, ECNAuto)
	arrived, _ := p.rounds(20, func(uint8) uint8 { return notECT })
	if n := p.a.Counters().ECTLost; n != 1 {
		t.Errorf("the path was seen to clear ECT %d times, want once", n)
	}
	if p.a.SendsECT() {
		t.Error("packets are ECN-capable still")
	}
	if n := len(arrived); n != 20*64 {
		t.Errorf("%d packets, want %d", n, 20*64)
	}
	// One that gets through now and then is enough.
	p = ecnPair(t, ib.RC, ECNAuto, ECNAuto)
	i := 0
	p.rounds(40, func(ecn uint8) uint8 {
		if i++; i%(5*64) != 0 { // four ACKs of five tell of none
			return notECT
		}
		return ecn
	})
	if !p.a.SendsECT() {
		t.Error("packets are not ECN-capable, and some arrived as such")
	}
}

// A CNP counts only where nothing better tells of marks, from the peer, once in a round
// trip, and never leaves less than 16 packets: anybody who guesses the QPN can forge it.
func TestForgedCNP(t *testing.T) {
	cnp := make([]byte, roce.BTHLen+16+roce.ICRCLen)
	for _, tt := range []struct {
		name       string
		a, b       ECNMode
		tr         ib.Transport
		from       ib.GID
		gap        time.Duration // between two of 100
		reductions uint64
		ignored    uint64
		least      int
	}{
		{"a peer that tells by ACKs", ECNAuto, ECNAuto, ib.RC, gidB, time.Millisecond, 0, 100, 128},
		{"a peer that is not asked to", ECNAuto, ECNOff, ib.RC, gidB, time.Millisecond, 0, 100, 128},
		{"an adapter, all at once", ECNOn, ECNOff, ib.RC, gidB, 0, 1, 99, minFlight},
		{"an adapter, one by one", ECNOn, ECNOff, ib.RC, gidB, 2 * time.Millisecond, 100, 0, minFlight},
		{"UC", ECNOn, ECNOn, ib.UC, gidB, 2 * time.Millisecond, 0, 100, 128},
		{"another host", ECNOn, ECNOff, ib.RC, gidA, 2 * time.Millisecond, 0, 0, 128},
	} {
		p := ecnPair(t, tt.tr, tt.a, tt.b)
		if tt.tr == ib.RC {
			p.rounds(4, nil)
		}
		roce.PutBTH(cnp, roce.BTHFields{Opcode: roce.CNP, PKey: ib.DefaultPKey, DestQPN: p.a.QPN()})
		var pkt roce.Packet
		if err := pkt.Parse(cnp); err != nil {
			t.Fatal(err)
		}
		for range 100 {
			p.now = p.now.Add(tt.gap)
			r := p.a.Receive(&pkt, &Source{Src: tt.from, Dst: gidA}, p.now)
			if want := map[bool]DropReason{true: DropSource}[tt.from != gidB]; r != want {
				t.Fatalf("%s: dropped because of %v, want %v", tt.name, r, want)
			}
		}
		c := p.a.Counters()
		if c.Reductions != tt.reductions {
			t.Errorf("%s: %d reductions, want %d", tt.name, c.Reductions, tt.reductions)
		}
		if c.CNPsIgnored != tt.ignored {
			t.Errorf("%s: %d were ignored, want %d", tt.name, c.CNPsIgnored, tt.ignored)
		}
		if got := p.a.flight(); got < tt.least {
			t.Errorf("%s: %d packets may be in flight, want %d at least", tt.name, got, tt.least)
		}
	}
}
