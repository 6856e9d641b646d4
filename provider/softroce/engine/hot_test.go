package engine

import (
	"fmt"
	"testing"
	"time"
	"unsafe"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/verbs"
	"ipoibcm/wire/roce"
)

// pump exchanges packets in batches as a provider does, through one buffer.
type pump struct {
	*pair
	buf []byte
	pkt roce.Packet
	src [2]Source
}

func newPump(tb testing.TB, tr ib.Transport, mtu ib.MTU) *pump {
	p := &pump{pair: newPair(tb, tr, func(c *Config, attr *verbs.QPAttr) {
		attr.PathMTU = mtu
		c.MaxUDPayload = 4096
	}), buf: make([]byte, 0, 8192)}
	p.a.count, p.b.count = true, true
	p.src = [2]Source{{Src: gidA, Dst: gidB}, {Src: gidB, Dst: gidA}}
	return p
}

func (p *pump) run() {
	for moved := true; moved; {
		moved = false
		for i, e := range [2]*end{p.a, p.b} {
			to := p.b
			if i == 1 {
				to = p.a
			}
			for n := e.Output(e.pkts[:], p.now); n > 0; n = e.Output(e.pkts[:], p.now) {
				moved = true
				for k := range e.pkts[:n] {
					if err := p.pkt.Parse(p.wire(p.buf, &e.pkts[k])); err != nil {
						p.t.Fatal(err)
					}
					to.Receive(&p.pkt, &p.src[i], p.now)
				}
			}
		}
	}
}

// wire writes a packet to b, which has room for it, without an ICRC.
func (p *pump) wire(b []byte, pkt *Packet) []byte {
	b = append(b, pkt.Header[:pkt.HeaderLen]...)
	for _, s := range pkt.Payload[:pkt.NPayload] {
		b = append(b, s...)
	}
	return b[:len(b)+int(pkt.Pad)+roce.ICRCLen]
}

// messageOf returns a function that moves one message of n octets.
func (p *pump) messageOf(op verbs.Opcode, n int) func() {
	src, dst := make([]byte, n), make([]byte, n+verbs.GRHLen)
	p.b.mem[7] = &mem{va: 0, buf: dst, access: verbs.RemoteRead | verbs.RemoteWrite}
	sends := []verbs.SendWR{{Opcode: op, Flags: verbs.Signaled, SG: []verbs.SGE{{Buf: src[:n/2]}, {Buf: src[n/2:]}}, RKey: 7}}
	recvs := []verbs.RecvWR{{SG: []verbs.SGE{{Buf: dst}}}}
	if p.a.Transport() == ib.UD {
		sends[0].AH, sends[0].RemoteQPN, sends[0].RemoteQKey = fakeAH{}, p.b.QPN(), 0xb1b
	}
	return func() {
		if op == verbs.Send {
			if _, err := p.b.PostRecv(recvs); err != nil {
				p.t.Fatal(err)
			}
		}
		if _, err := p.a.PostSend(sends, p.now); err != nil {
			p.t.Fatal(err)
		}
		done := p.a.nsend
		p.run()
		if n := p.a.nsend - done; n != 1 {
			p.t.Fatalf("%d requests completed, want 1", n)
		}
		if op == verbs.Send && p.b.nrecv == 0 {
			p.t.Fatal("no receive completed")
		}
	}
}

type fakeAH struct{}

func (fakeAH) Attr() verbs.AHAttr { return verbs.AHAttr{} }
func (fakeAH) Destroy() error     { return nil }

var hot = []struct {
	tr  ib.Transport
	op  verbs.Opcode
	len int
}{
	{ib.RC, verbs.Send, 65524}, {ib.RC, verbs.Write, 65524}, {ib.RC, verbs.Read, 65524}, {ib.RC, verbs.Send, 64},
	{ib.UC, verbs.Send, 65524}, {ib.UD, verbs.Send, 2044},
}

// TestNoAllocs: nothing is allocated per packet or message, by requester,
// responder or completer.
func TestNoAllocs(t *testing.T) {
	for _, h := range hot {
		one := newPump(t, h.tr, ib.MTU1024).messageOf(h.op, h.len)
		one() // rings grow to what is used
		if n := testing.AllocsPerRun(20, one); n != 0 {
			t.Errorf("%v %v of %d: %v allocations", h.tr, h.op, h.len, n)
		}
	}
}

func BenchmarkMessage(b *testing.B) {
	for _, h := range hot {
		for _, mtu := range []ib.MTU{ib.MTU1024, ib.MTU4096} {
			b.Run(fmt.Sprintf("%v/%v/%d/mtu=%v", h.tr, h.op, h.len, mtu), func(b *testing.B) {
				one := newPump(b, h.tr, mtu).messageOf(h.op, h.len)
				b.SetBytes(int64(h.len))
				b.ReportAllocs()
				for b.Loop() {
					one()
				}
			})
		}
	}
}

// BenchmarkStages shares the cost of an RC SEND among requester, responder and
// completer: all data packets of a message, then what is answered to them. What
// lies between them, a copy and a parse, is left out.
func BenchmarkStages(b *testing.B) {
	for _, n := range []int{64, 65524} {
		for _, mtu := range []ib.MTU{ib.MTU1024, ib.MTU4096} {
			b.Run(fmt.Sprintf("%d/mtu=%v", n, mtu), func(b *testing.B) {
				p := newPump(b, ib.RC, mtu)
				sends := []verbs.SendWR{{Opcode: verbs.Send, Flags: verbs.Signaled, SG: []verbs.SGE{{Buf: make([]byte, n)}}}}
				recvs := []verbs.RecvWR{{SG: []verbs.SGE{{Buf: make([]byte, n)}}}}
				var requester, responder, completer time.Duration
				var data, answers flight
				for b.Loop() {
					if _, err := p.b.PostRecv(recvs); err != nil {
						b.Fatal(err)
					}
					start := time.Now()
					if _, err := p.a.PostSend(sends, p.now); err != nil {
						b.Fatal(err)
					}
					data.fill(p, p.a, &requester, start)
					responder += data.land(p, p.b, &p.src[0])
					answers.fill(p, p.b, &responder, time.Now())
					completer += answers.land(p, p.a, &p.src[1])
				}
				expect.MustEqual(b, p.a.nsend, b.N, "number of completed sends")
				expect.MustEqual(b, p.b.nrecv, b.N, "number of completed receives")
				for _, s := range []struct {
					name string
					d    time.Duration
				}{{"requester", requester}, {"responder", responder}, {"completer", completer}} {
					b.ReportMetric(float64(s.d)/float64(b.N), s.name+"-ns/op")
				}
			})
		}
	}
}

// A flight is the packets that one end had to send, as they are on the wire.
type flight struct {
	raw  [][]byte
	pkts []roce.Packet
	n    int
}

// fill takes all that e has to send. What e itself took is added to cost, from
// start on.
func (f *flight) fill(p *pump, e *end, cost *time.Duration, start time.Time) {
	for f.n = 0; ; start = time.Now() {
		n := e.Output(e.pkts[:], p.now)
		*cost += time.Since(start)
		if n == 0 {
			return
		}
		for k := range e.pkts[:n] {
			if f.n == len(f.pkts) {
				f.raw, f.pkts = append(f.raw, make([]byte, 0, 8192)), append(f.pkts, roce.Packet{})
			}
			b := p.wire(f.raw[f.n], &e.pkts[k])
			if err := f.pkts[f.n].Parse(b); err != nil {
				p.t.Fatal(err)
			}
			f.n++
		}
	}
}

// land gives them to the other end and returns what that took.
func (f *flight) land(p *pump, to *end, from *Source) time.Duration {
	start := time.Now()
	for k := range f.pkts[:f.n] {
		to.Receive(&f.pkts[k], from, p.now)
	}
	return time.Since(start)
}

// TestIdleMemory: a QP with 64 sends posted and completed, its receives from a
// shared queue, costs less than 8 KiB; one that was never used less than 2 KiB.
func TestIdleMemory(t *testing.T) {
	size := func(q *QP) int {
		n := int(unsafe.Sizeof(*q)) + cap(q.rsp.wqe.SG)*int(unsafe.Sizeof([]byte{})) + cap(q.rsp.reads)*int(unsafe.Sizeof(readJob{}))
		n += cap(q.sq.slots)*int(unsafe.Sizeof(sendWQE{})) + cap(q.sq.sgs)*int(unsafe.Sizeof([]byte{})) + cap(q.sq.dests)*int(unsafe.Sizeof(udDest{}))
		if r := q.rsp.ring; r != nil {
			n += int(unsafe.Sizeof(*r)) + cap(r.slots)*int(unsafe.Sizeof(recvSlot{})) + cap(r.sg)*int(unsafe.Sizeof([]byte{}))
		}
		return n
	}
	p := newPair(t, ib.RC, func(c *Config, _ *verbs.QPAttr) { c.Shared, c.MaxSendSGE = NewRecvRing(100, 1), 2 })
	if n := size(p.a.QP); n > 2<<10 {
		t.Errorf("unused QP: %d octets", n)
	}
	for range 64 {
		p.b.cfg.Shared.(*RecvRing).Post(&verbs.RecvWR{SG: sg(make([]byte, 10))})
		p.a.post(verbs.SendWR{Opcode: verbs.Send, SG: sg(make([]byte, 10))})
	}
	p.run()
	if n := size(p.a.QP); len(p.a.send) != 64 || n > 8<<10 {
		t.Errorf("QP after 64 sends: %d octets", n)
	}
}
