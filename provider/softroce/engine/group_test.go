package engine

import (
	"fmt"
	"math/rand"
	"slices"
	"strings"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/verbs"
	"ipoibcm/wire/roce"
)

// groups has both ends of a pair say that their peer may group packets.
func groups(c *Config, _ *verbs.QPAttr) { c.Ahead = true }

// groupedPair returns a connected pair whose ends know that of each other.
func groupedPair(t *testing.T, adjust func(*Config, *verbs.QPAttr)) *pair {
	p := newPair(t, ib.RC, func(c *Config, attr *verbs.QPAttr) {
		groups(c, attr)
		if adjust != nil {
			adjust(c, attr)
		}
	})
	for _, e := range []*end{p.a, p.b} {
		p.other(e).postRecv(0, make([]byte, 1))
		e.post(verbs.SendWR{SG: sg(make([]byte, 1))})
		p.run()
		e.send, p.other(e).recv = nil, nil
	}
	return p
}

// Packets of messages that have two each are grouped, all others keep their places.
func TestGroup(t *testing.T) {
	for _, tt := range []struct {
		lengths []int  // of the messages, path MTU 256
		want    string // PSNs, "+" behind those with the mark
	}{
		{[]int{300, 300}, "0 2+ 1 3"},
		{[]int{300, 300, 300, 300, 300}, "0 2+ 4+ 6+ 8+ 1 3 5 7 9"},
		{[]int{300}, "0 1"},
		{[]int{300, 301, 304}, "0 1 2 4+ 3 5"}, // 301 and 304 have one length with the pad
		{[]int{300, 305, 305}, "0 1 2 4+ 3 5"},
		{[]int{200, 300, 300, 200, 300, 300}, "0 1 3+ 2 4 5 6 8+ 7 9"},
		{[]int{300, 300, 700, 300, 300}, "0 2+ 1 3 4 5 6 7 9+ 8 10"},
		{[]int{700, 700}, "0 1 2 3 4 5"},
		{[]int{512, 512}, "0 2+ 1 3"},
		{[]int{256, 256}, "0 1"},
	} {
		p := groupedPair(t, func(_ *Config, attr *verbs.QPAttr) { attr.RQPSN, attr.SQPSN = 0xffffff, 0xffffff })
		for i, n := range tt.lengths {
			p.b.postRecv(uint64(i), make([]byte, n))
		}
		wrs := make([]verbs.SendWR, len(tt.lengths))
		for i, n := range tt.lengths {
			wrs[i].SG = sg(fill(n, i))
		}
		_, err := p.a.PostSend(wrs, p.now)
		expect.MustEqual(t, err, nil, "error of PostSend")
		var got []string
		for _, b := range p.output(p.a) {
			mark := ""
			if roce.BTH(b).Reserved() == sentAhead {
				mark = "+"
			}
			got = append(got, fmt.Sprint(uint32(roce.BTH(b).PSN()), mark))
			p.input(p.b, b)
		}
		expect.Equal(t, strings.Join(got, " "), tt.want, "order of messages of %v octets", tt.lengths)
		for i, wc := range p.b.recv {
			expect.MustEqual(t, wc.ID, uint64(i), "ID of receive %d", i)
		}
		expect.Equal(t, len(p.b.recv), len(tt.lengths), "messages received")
	}
}

// Nothing is grouped to a peer that has not said that it keeps early packets, and nothing that is
// sent again.
func TestGroupsOnlyWhatMayBe(t *testing.T) {
	post := func(p *pair) {
		for i := range 4 {
			p.b.postRecv(uint64(i), make([]byte, 300))
		}
		_, err := p.a.PostSend(slices.Repeat([]verbs.SendWR{{SG: sg(fill(300, 0))}}, 4), p.now)
		expect.MustEqual(t, err, nil, "error of PostSend")
	}
	inOrder := func(out [][]byte) bool {
		return slices.IsSortedFunc(out, func(a, b []byte) int { return roce.BTH(a).PSN().Sub(roce.BTH(b).PSN()) })
	}
	fresh := newPair(t, ib.RC, groups)
	post(fresh)
	expect.Equal(t, inOrder(fresh.output(fresh.a)), true, "in order before the first ACK")

	silent := newPair(t, ib.RC, nil)
	silent.b.postRecv(9, make([]byte, 1))
	silent.a.post(verbs.SendWR{SG: sg(make([]byte, 1))})
	silent.run()
	post(silent)
	expect.Equal(t, inOrder(silent.output(silent.a)), true, "in order to a peer that says nothing")

	p := groupedPair(t, nil)
	post(p)
	expect.Equal(t, inOrder(p.output(p.a)), false, "in order to a peer that keeps early packets")
	p.now = p.a.Deadline()
	for p.a.Counters().Timeouts == 0 { // nothing has arrived
		p.a.Wake(p.now)
		expect.Equal(t, inOrder(p.output(p.a)), true, "in order when sent again")
		p.now = p.a.Deadline()
	}
	expect.Equal(t, p.a.Counters().Retransmits > 0, true, "something was sent again")

	p = groupedPair(t, nil)
	post(p)
	for i, b := range p.output(p.a) {
		if i%4 >= 2 { // the first two messages are lost, the others are kept
			p.input(p.b, b)
		}
	}
	p.now = p.b.Deadline()
	p.b.Wake(p.now)
	for _, b := range p.output(p.b) {
		p.input(p.a, b)
	}
	again := p.output(p.a)
	expect.Equal(t, len(again), 4, "packets sent again")
	expect.Equal(t, inOrder(again), true, "in order what a NAK asked for")
	for _, b := range again {
		expect.Equal(t, roce.BTH(b).Reserved(), uint8(sentAgain), "mark of PSN %v", roce.BTH(b).PSN())
	}
}

// A group that comes whole costs no NAK, and nothing is sent again, if there is a pause in it, or the
// receiver takes long for each message.
func TestGroupWithPauses(t *testing.T) {
	const msgs = 16
	for _, tt := range []struct {
		from, to int // the packets before which there are pauses
		pause    time.Duration
	}{{msgs, msgs, aheadTime * 9 / 10}, {msgs, 2*msgs - 1, 2 * patienceTime}} {
		p := groupedPair(t, nil)
		for i := range msgs {
			p.b.postRecv(uint64(i), make([]byte, 300))
		}
		_, err := p.a.PostSend(slices.Repeat([]verbs.SendWR{{SG: sg(fill(300, 0))}}, msgs), p.now)
		expect.MustEqual(t, err, nil, "error of PostSend")
		for i, b := range p.output(p.a) {
			if i >= tt.from && i <= tt.to {
				p.now = p.now.Add(tt.pause)
				p.b.Wake(p.now)
				p.output(p.b)
			}
			p.input(p.b, b)
		}
		p.run()
		expect.Equal(t, len(p.b.recv), msgs, "messages received")
		expect.Equal(t, p.b.Counters().NAKsOut, uint64(0), "NAKs")
		expect.Equal(t, p.b.Counters().Early, uint64(0), "packets that count as early")
		expect.Equal(t, p.b.Counters().Ahead, uint64(msgs-1), "packets that were ahead")
	}
}

// The last packets of a group are lost: what is missing is told of after aheadTime, or once others
// follow, and only that is sent again.
func TestGroupLosesItsEnd(t *testing.T) {
	for _, follow := range []bool{false, true} {
		p := groupedPair(t, nil)
		const msgs = 8
		for i := range 2 * msgs {
			p.b.postRecv(uint64(i), make([]byte, 300))
		}
		_, err := p.a.PostSend(slices.Repeat([]verbs.SendWR{{SG: sg(fill(300, 0))}}, msgs), p.now)
		expect.MustEqual(t, err, nil, "error of PostSend")
		for i, b := range p.output(p.a) {
			if i < msgs {
				p.input(p.b, b)
			}
		}
		if follow {
			for range patiencePackets {
				p.a.post(verbs.SendWR{SG: sg(fill(10, 0))})
			}
			for _, b := range p.output(p.a) {
				p.input(p.b, b)
			}
		} else {
			expect.Equal(t, p.b.Deadline().Sub(p.now), aheadTime, "wait for the missing packets")
			p.now = p.b.Deadline()
			p.b.Wake(p.now)
		}
		p.runUntil(func() bool { return len(p.b.recv) >= msgs })
		expect.Equal(t, p.b.Counters().NAKsOut, uint64(1), "follow %v: NAKs", follow)
		if n := p.a.Counters().Retransmits; n > 2*msgs-1 {
			t.Errorf("follow %v: %d packets sent again, %d were missing or between those", follow, n, 2*msgs-1)
		}
	}
}

// A single packet of a group is lost: it is sent again, and of the others none or few.
func TestGroupLosesAPacket(t *testing.T) {
	const msgs = 16
	for lost := range 2 * msgs {
		p := groupedPair(t, nil)
		for i := range msgs {
			p.b.postRecv(uint64(i), make([]byte, 300))
		}
		_, err := p.a.PostSend(slices.Repeat([]verbs.SendWR{{SG: sg(fill(300, 0))}}, msgs), p.now)
		expect.MustEqual(t, err, nil, "error of PostSend")
		for i, b := range p.output(p.a) {
			if i != lost {
				p.input(p.b, b)
			}
			for _, b := range p.output(p.b) {
				p.input(p.a, b)
			}
		}
		p.runUntil(func() bool { return len(p.b.recv) == msgs && p.a.Deadline().IsZero() })
		if n := p.a.Counters().Retransmits; n < 1 || n > 2 {
			t.Errorf("packet %d of %d lost: %d packets sent again", lost, 2*msgs, n)
		}
	}
}

// A forged packet with the mark of one that is ahead has one NAK sent at most, and is forgotten soon.
func TestForgedAhead(t *testing.T) {
	p := groupedPair(t, nil)
	for i := range 20 {
		p.b.postRecv(uint64(i), make([]byte, 300))
	}
	send := func() {
		p.a.post(verbs.SendWR{SG: sg(fill(10, 0))})
		for _, b := range p.output(p.a) {
			p.input(p.b, b)
		}
	}
	send()
	forged := make([]byte, roce.BTHLen+8+roce.ICRCLen)
	roce.PutBTH(forged, roce.BTHFields{Opcode: roce.RCSendOnly, PKey: ib.DefaultPKey, DestQPN: 0xa2, PSN: p.b.rsp.epsn.Add(100)})
	roce.BTH(forged).SetReserved(sentAhead)
	p.input(p.b, forged)
	expect.MustEqual(t, p.b.Counters().Ahead, uint64(1), "packets kept")
	for range 10 {
		p.now = p.now.Add(aheadTime / 2)
		p.b.Wake(p.now)
		p.output(p.b)
		send()
	}
	expect.Equal(t, p.b.Counters().NAKsOut, uint64(1), "NAKs")
	expect.Equal(t, len(p.b.rsp.early.slots) == 0 || p.b.rsp.early.n == 0, true, "the forged packet is forgotten")
}

// A CE mark of a packet that was kept counts when it is taken.
func TestKeptPacketHasItsMark(t *testing.T) {
	p := groupedPair(t, func(c *Config, _ *verbs.QPAttr) { c.ECN = ECNAuto })
	p.b.postRecv(0, make([]byte, 300))
	p.b.postRecv(1, make([]byte, 300))
	_, err := p.a.PostSend(slices.Repeat([]verbs.SendWR{{SG: sg(fill(300, 0))}}, 2), p.now)
	expect.MustEqual(t, err, nil, "error of PostSend")
	for i, b := range p.output(p.a) {
		var pkt roce.Packet
		expect.MustEqual(t, pkt.Parse(b), nil, "packet %d", i)
		src := Source{Src: p.a.gid, Dst: p.b.gid, ECN: 2}
		if i == 1 { // the first packet of the second message
			src.ECN = ce
		}
		p.b.Receive(&pkt, &src, p.now)
	}
	expect.Equal(t, p.b.Counters().CEIn, uint64(1), "marked packets")
	expect.MustEqual(t, len(p.b.recv), 2, "messages received")
	expect.Equal(t, p.b.recv[0].Flags&verbs.Congested != 0, false, "the first message met congestion")
	expect.Equal(t, p.b.recv[1].Flags&verbs.Congested != 0, true, "the second message met congestion")
}

// Messages arrive once, in order and whole over a link that loses, doubles and displaces packets of
// groups.
func TestGroupsOnHostileLink(t *testing.T) {
	for seed := range int64(60) {
		rnd := rand.New(rand.NewSource(seed))
		p := groupedPair(t, func(c *Config, _ *verbs.QPAttr) { c.Window = []int{8, 32, 128}[seed%3] })
		rate := []float64{0.01, 0.05, 0.10}[seed/3%3]
		p.hostile(rnd, rate)
		const msgs = 60
		got, wrs := [msgs][]byte{}, []verbs.SendWR{}
		for i := range msgs {
			got[i] = make([]byte, 600)
			p.b.postRecv(uint64(i), got[i])
			wrs = append(wrs, verbs.SendWR{ID: uint64(i), Opcode: verbs.Send, SG: sg(fill([]int{300, 300, 300, 100, 600}[rnd.Intn(5)], i)), Flags: verbs.Signaled})
		}
		_, err := p.a.PostSend(wrs, p.now)
		expect.MustEqual(t, err, nil, "error of PostSend")
		p.runUntil(func() bool { return len(p.a.send) == msgs })
		expect.MustEqual(t, len(p.b.recv), msgs, "seed %d: number of receives", seed)
		for i, wc := range p.b.recv {
			expect.MustEqual(t, wc.ID, uint64(i), "seed %d: ID of receive %d", seed, i)
			same(t, "message", got[i][:wc.ByteLen], fill(wc.ByteLen, i))
			expect.MustEqual(t, wc.ByteLen, len(wrs[i].SG[0].Buf), "seed %d: length of receive %d", seed, i)
		}
		expect.Equal(t, p.b.Counters().Ahead > 0, true, "seed %d: packets were ahead", seed)
	}
}
