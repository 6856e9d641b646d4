package engine

import (
	"errors"
	"math/rand"
	"testing"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/verbs"
)

var sizes = []int{0, 1, 3, 255, 256, 257, 512, 600, 65524, 1 << 20}

// TestRCOperations moves messages of every kind and size with every path MTU.
// PSNs start at 0xfffffe, so that each of them crosses the wrap.
func TestRCOperations(t *testing.T) {
	for mtu := ib.MTU256; mtu <= ib.MTU4096; mtu++ {
		p := newPair(t, ib.RC, func(_ *Config, attr *verbs.QPAttr) { attr.PathMTU = mtu })
		for i, n := range sizes {
			for _, op := range []verbs.Opcode{verbs.Send, verbs.SendImm, verbs.SendInv, verbs.Write, verbs.WriteImm, verbs.Read} {
				src, dst := fill(n, i), make([]byte, n+8)
				p.a.send, p.b.recv = nil, nil
				p.b.mem[7] = &mem{va: 0x1000, buf: dst, access: verbs.RemoteWrite | verbs.RemoteRead}
				p.b.mem[9] = &mem{}
				recv := op != verbs.Write && op != verbs.Read
				if recv {
					p.b.postRecv(5, dst, min(n, 1), min(n-min(n, 1), 300))
				}
				local := src
				if op == verbs.Read {
					copy(dst, src)
					local = make([]byte, n)
				}
				p.a.post(verbs.SendWR{ID: 77, Opcode: op, SG: sg(local, n/3, n/3), Imm: 0xdeadbeef, InvKey: 9, RemoteAddr: 0x1000, RKey: 7})
				p.run()
				if len(p.a.send) != 1 || p.a.send[0] != (verbs.WC{ID: 77, Opcode: op, QPN: 0xa1, ByteLen: n}) {
					t.Fatalf("%v of %d: send completions %+v, state %v", op, n, p.a.send, p.a.State())
				}
				if op == verbs.Read {
					same(t, "read", local, src)
				} else {
					same(t, op.String(), dst[:n], src)
				}
				if !recv {
					if len(p.b.recv) != 0 {
						t.Fatalf("%v: receive completions %+v", op, p.b.recv)
					}
					continue
				}
				want := verbs.WC{ID: 5, Opcode: verbs.Recv, QPN: 0xa2, ByteLen: n}
				switch op {
				case verbs.SendImm:
					want.Flags, want.Imm = verbs.WithImm, 0xdeadbeef
				case verbs.SendInv:
					want.Flags, want.Imm = verbs.WithInv, 9
					if p.b.mem[9] != nil {
						t.Fatal("rkey still valid after SEND with invalidate")
					}
				case verbs.WriteImm:
					want.Flags, want.Imm, want.Opcode = verbs.WithImm, 0xdeadbeef, verbs.RecvWriteImm
				}
				if len(p.b.recv) != 1 || p.b.recv[0] != want {
					t.Fatalf("%v of %d: got %+v, want %+v", op, n, p.b.recv, want)
				}
			}
		}
		if p.a.Deadline() != p.b.Deadline() || !p.a.Deadline().IsZero() {
			t.Error("a timer runs although nothing is outstanding")
		}
	}
}

// TestRCHostileLink loses, repeats and reorders packets: all messages arrive
// whole, in order and one time.
func TestRCHostileLink(t *testing.T) {
	for seed := range int64(60) {
		rnd := rand.New(rand.NewSource(seed))
		p := newPair(t, ib.RC, func(c *Config, attr *verbs.QPAttr) { c.Window = []int{1, 8, 128}[seed%3] })
		rate := []float64{0.01, 0.05, 0.10}[seed/3%3]
		p.hostile(rnd, rate)
		region := make([]byte, 1<<16)
		p.b.mem[7] = &mem{va: 0, buf: region, access: verbs.RemoteRead | verbs.RemoteWrite}
		const msgs = 40
		want, got, reads := [msgs][]byte{}, [msgs][]byte{}, map[int][]byte{}
		recvs := 0
		for i := range msgs {
			want[i], got[i] = fill(rnd.Intn(5000), i), make([]byte, 5000)
			p.b.postRecv(uint64(i), got[i])
			switch rnd.Intn(4) {
			case 0:
				copy(region[i*1000:], fill(900, i))
				reads[i] = make([]byte, 900)
				p.a.post(verbs.SendWR{ID: uint64(i), Opcode: verbs.Read, SG: sg(reads[i]), RemoteAddr: uint64(i * 1000), RKey: 7})
			default:
				want[recvs] = fill(len(want[i]), recvs)
				p.a.post(verbs.SendWR{ID: uint64(i), Opcode: verbs.SendImm, Imm: uint32(recvs), SG: sg(want[recvs])})
				recvs++
			}
		}
		p.runUntil(func() bool { return len(p.a.send) == msgs })
		for i, wc := range p.a.send {
			expect.MustEqual(t, wc.ID, uint64(i), "seed %d: ID of completion %d", seed, i)
			expect.MustEqual(t, wc.Status, verbs.Success, "seed %d: Status of completion %d", seed, i)
		}
		for i, b := range reads {
			same(t, "read", b, fill(900, i))
		}
		expect.MustEqual(t, len(p.b.recv), recvs, "seed %d: number of receives", seed)
		for i, wc := range p.b.recv {
			expect.MustEqual(t, wc.ID, uint64(i), "seed %d: ID of receive %d", seed, i)
			expect.MustEqual(t, wc.Imm, uint32(i), "seed %d: Imm of receive %d", seed, i)
			expect.MustEqual(t, wc.ByteLen, len(want[i]), "seed %d: ByteLen of receive %d", seed, i)
			same(t, "message", got[i][:wc.ByteLen], want[i])
		}
		if seed%3 == 2 && rate >= 0.05 {
			if p.a.Counters().Retransmits == 0 {
				t.Errorf("seed %d: nothing was sent again", seed)
			}
		}
	}
}

// TestReadWindow: a READ longer than ReadChunk packets goes out in parts, never
// more of them at a time than MaxRDAtomic; the responder never holds more.
func TestReadWindow(t *testing.T) {
	p := newPair(t, ib.RC, nil)
	const n = 256 * ReadChunk * 10
	p.b.mem[7] = &mem{buf: fill(n, 1), access: 3}
	buf := make([]byte, n)
	p.a.post(verbs.SendWR{Opcode: verbs.Read, SG: sg(buf), RKey: 7})
	asked, answered := 0, 0
	p.trace = func(fromA bool, b []byte) {
		if fromA {
			asked++
		} else {
			answered++
		}
		if n := p.a.readsOut(); n > 4 {
			t.Fatalf("%d READs are asked, want at most 4", n)
		}
		if n := len(p.b.rsp.reads); n > 4 {
			t.Fatalf("%d READs are waiting, want at most 4", n)
		}
	}
	p.run()
	same(t, "READ", buf, fill(n, 1))
	expect.Equal(t, asked, 10, "number of requests")
	expect.Equal(t, answered, 10*ReadChunk, "number of responses")
}

// TestWQELimits: what is too much is refused when it is posted.
func TestWQELimits(t *testing.T) {
	p := newPair(t, ib.UD, func(c *Config, _ *verbs.QPAttr) { c.MaxUDPayload = 100 })
	wr := verbs.SendWR{Opcode: verbs.Send, SG: sg(make([]byte, 101)), AH: fakeAH{}, RemoteQPN: 5}
	if n, err := p.a.PostSend([]verbs.SendWR{wr}, start); n != 0 || !errors.Is(err, verbs.ErrInvalid) {
		t.Errorf("UD payload of 101: %d, %v", n, err)
	}
	wr.SG = sg(make([]byte, 100))
	if n, err := p.a.PostSend([]verbs.SendWR{wr, wr, {Opcode: verbs.Send}}, start); n != 2 || !errors.Is(err, verbs.ErrInvalid) {
		t.Errorf("third without AH: %d, %v", n, err)
	}
	many := make([]verbs.SendWR, 100)
	for i := range many {
		many[i] = wr
	}
	if n, err := p.a.PostSend(many, start); n != 62 || !errors.Is(err, verbs.ErrQueueFull) {
		t.Errorf("room for 62: %d, %v", n, err)
	}
	for _, attr := range []verbs.QPAttr{
		{State: verbs.StateRTR, PathMTU: 6}, {State: verbs.StateRTR, PathMTU: 5, DestQPN: 1 << 24},
		{State: verbs.StateRTR, PathMTU: 5, MaxDestRDAtomic: MaxRDAtomic + 1},
	} {
		cfg := p.cfg
		cfg.Transport = ib.RC
		q := New(cfg)
		q.Modify(&verbs.QPAttr{State: verbs.StateInit}, start)
		if err := q.Modify(&attr, start); !errors.Is(err, verbs.ErrInvalid) || q.State() != verbs.StateInit {
			t.Errorf("%+v: %v, state %v", attr, err, q.State())
		}
	}
}

// With a small path MTU more packets make the window.
func TestWindowOctets(t *testing.T) {
	for mtu, want := range map[ib.MTU]int{ib.MTU256: 32, ib.MTU1024: 8, ib.MTU4096: 4} {
		p := newPair(t, ib.RC, func(c *Config, attr *verbs.QPAttr) {
			attr.PathMTU, c.Window, c.WindowOctets = mtu, 4, 8<<10
		})
		sent := 0
		p.drop = func(fromA bool, _ []byte) bool {
			if fromA {
				sent++
			}
			return true
		}
		p.b.postRecv(1, make([]byte, 1<<20))
		p.a.post(verbs.SendWR{Opcode: verbs.Send, SG: sg(make([]byte, 1<<20))})
		p.run()
		if sent != want {
			t.Errorf("%v: %d packets without an ACK, want %d", mtu, sent, want)
		}
	}
}

// A QP that ends in the middle of a message gives its work request back to the shared receive queue: each one
// lost would be one less for all others.
func TestCloseReturnsSharedReceive(t *testing.T) {
	for _, tr := range []ib.Transport{ib.RC, ib.UC} {
		ring := NewRecvRing(1, 1)
		p := newPair(t, tr, func(c *Config, _ *verbs.QPAttr) { c.Shared = ring })
		buf := make([]byte, 1000)
		if err := ring.Post(&verbs.RecvWR{ID: 7, SG: sg(buf)}); err != nil {
			t.Fatal(err)
		}
		p.a.post(verbs.SendWR{SG: sg(fill(1000, 1))})
		p.input(p.b, p.output(p.a)[0])
		if ring.Len() != 0 {
			t.Fatalf("%v: the message takes no work request", tr)
		}
		p.b.Close()
		p.b.Close() // once only
		var w RecvWQE
		if !ring.Pop(&w) || w.ID != 7 || len(w.SG) != 1 || &w.SG[0][0] != &buf[0] {
			t.Errorf("%v: the queue has %+v, want the work request", tr, w)
		}
		if ring.Pop(&w) {
			t.Errorf("%v: the queue has another work request", tr)
		}
	}
}
