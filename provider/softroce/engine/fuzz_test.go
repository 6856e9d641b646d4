package engine

import (
	"bytes"
	"math/rand"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/verbs"
	"ipoibcm/wire/roce"
)

// hostileRun gives a QP with work outstanding what the octets of in say:
// packets of every kind near the PSNs that matter, posts, and time. It checks
// what must hold whatever a peer sends.
func hostileRun(t *testing.T, tr ib.Transport, in []byte) {
	var whole [4096]byte
	for i := range whole {
		whole[i] = 0xa5
	}
	e := &end{t: t, gid: gidA, mem: memory{7: {va: 0x1000, buf: whole[1024:2048:2048], access: 3}}}
	cfg := Config{QPN: 0xa1, Transport: tr, SendDepth: 8, RecvDepth: 8, MaxSendSGE: 2, MaxRecvSGE: 2, Memory: e.mem, Sink: e}
	bufs := &countedBuffers{}
	cfg.Buffers = bufs
	e.QP = New(cfg)
	attr := verbs.QPAttr{PKey: ib.DefaultPKey, QKey: 1, Access: 3, Path: verbs.AHAttr{DGID: gidB}, PathMTU: ib.MTU256, DestQPN: 0xa2,
		RQPSN: 0xfffffa, SQPSN: 0xfffffa, MaxDestRDAtomic: 2, MaxRDAtomic: 2, MinRNRTimer: 1, Timeout: 4, RetryCount: 3, RNRRetry: 3}
	for attr.State = verbs.StateInit; attr.State <= verbs.StateRTS; attr.State++ {
		if err := e.Modify(&attr, start); err != nil {
			t.Fatal(err)
		}
	}
	now, sends, recvs := start, 0, 0
	next := func() byte {
		if len(in) == 0 {
			return 0
		}
		b := in[0]
		in = in[1:]
		return b
	}
	local := make([]byte, 3000)
	guard := bytes.Clone(whole[:1024])
	for len(in) > 0 {
		switch what := next(); what % 8 {
		case 0:
			wr := verbs.SendWR{Opcode: verbs.Opcode(next() % 6), Flags: verbs.SendFlags(next()) | verbs.Signaled, SG: sg(local[:8+int(next())*8], 3), AH: fakeAH{}, RKey: 7}
			if n, _ := e.PostSend([]verbs.SendWR{wr}, now); n == 1 {
				sends++
			}
		case 1:
			if n, _ := e.PostRecv([]verbs.RecvWR{{SG: sg(make([]byte, int(next())*4))}}); n == 1 {
				recvs++
			}
		case 2:
			now = now.Add(time.Duration(next()) * 10 * time.Microsecond)
			e.Wake(now)
		default:
			hostilePacket(t, e, tr, next, now)
		}
		var pkts [4]Packet
		out := 0
		for n := e.Output(pkts[:], now); n > 0; n = e.Output(pkts[:], now) {
			if out += n; out > 1<<14 {
				t.Fatalf("output does not end: %d packets", out)
			}
			for i := range pkts[:n] {
				checkLength(t, tr, &pkts[i])
			}
		}
		if e.State() == verbs.StateRTS && tr == ib.RC {
			checkPSNs(t, &e.req)
		}
		if bufs.out != e.rsp.early.n {
			t.Fatalf("%d buffers are in use, for %d early packets", bufs.out, e.rsp.early.n)
		}
		checkMissing(t, &e.req)
		if n := len(e.rsp.reads); n > 4 {
			t.Fatalf("%d READs are waiting, want at most 4", n)
		}
		if e.nsend > sends {
			t.Fatalf("%d sends completed, want at most %d", e.nsend, sends)
		}
		if e.nrecv > recvs {
			t.Fatalf("%d receives completed, want at most %d", e.nrecv, recvs)
		}
	}
	same(t, "before registered memory", whole[:1024], guard)
	same(t, "behind registered memory", whole[2048:3072], guard)
	attr.State = verbs.StateError
	e.Modify(&attr, now)
	if bufs.out != 0 {
		t.Fatalf("in ERR %d buffers of early packets are in use", bufs.out)
	}
	if e.nsend != sends {
		t.Fatalf("in ERR %d sends have completed, want %d", e.nsend, sends)
	}
	if e.nrecv != recvs {
		t.Fatalf("in ERR %d receives have completed, want %d", e.nrecv, recvs)
	}
}

// checkLength checks the length that p says it has.
func checkLength(t *testing.T, tr ib.Transport, p *Packet) {
	n := p.Len()
	if n%4 != 0 {
		t.Fatalf("a packet of %d octets, want a multiple of 4", n)
	}
	if tr != ib.UD && n > HeaderMax+256 {
		t.Fatalf("a packet of %d octets, want at most %d", n, HeaderMax+256)
	}
	if got := len(p.Append(nil)); got != n {
		t.Fatalf("a packet of %d octets says that it has %d", got, n)
	}
}

// checkPSNs checks that no PSN of the requester is before one that it follows.
func checkPSNs(t *testing.T, r *requester) {
	if n := r.next.Sub(r.una); n < 0 {
		t.Fatalf("the next PSN %#x is %d before the oldest unacknowledged one %#x", r.next, -n, r.una)
	}
	if n := r.highest.Sub(r.next); n < 0 {
		t.Fatalf("the highest PSN %#x is %d before the next one %#x", r.highest, -n, r.next)
	}
	if n := r.post.Sub(r.highest); n < 0 {
		t.Fatalf("the PSN %#x of the next post is %d before the highest one %#x", r.post, -n, r.highest)
	}
}

// checkMissing checks that what the requester sends again was sent before.
func checkMissing(t *testing.T, r *requester) {
	m := &r.missing
	if n := m.end.Sub(m.next); n < 0 {
		t.Fatalf("%d packets from PSN %#x are to be sent again, want 0 or more", n, m.next)
	}
	if m.next.Before(m.end) && r.highest.Before(m.end) {
		t.Fatalf("PSNs before %#x are to be sent again, but only those before %#x were sent", m.end, r.highest)
	}
}

// hostilePacket makes one packet and gives it to e.
func hostilePacket(t *testing.T, e *end, tr ib.Transport, next func() byte, now time.Time) {
	op := roce.Opcode(next()&0x1f) | roce.Opcode(0).With(tr)
	n := op.HeaderLen()
	if n == 0 {
		return
	}
	near := []ib.PSN{e.rsp.epsn, e.req.una, e.req.next, e.req.highest}[next()%4]
	payload := int(next())
	flags := next()
	if flags&1 != 0 {
		payload = 256
	}
	b := make([]byte, n, n+260)
	roce.PutBTH(b, roce.BTHFields{Opcode: op, Pad: roce.Pad(payload), PKey: ib.DefaultPKey, DestQPN: 0xa1, AckReq: payload&1 != 0, PSN: near.Add(int(int8(next())) / 16)})
	roce.BTH(b).SetReserved(flags >> 1 & 15) // how long a gap is, or that it is sent again
	switch {
	case op.HasRETH():
		roce.PutRETH(b[roce.BTHLen:], 0x1000+uint64(int64(int8(next()))*16), 7, uint32(next())*uint32(next()))
	case op.HasAETH():
		roce.PutAETH(b[roce.BTHLen:], roce.Syndrome(next()&0x7f), uint32(next()))
	case op.HasDETH():
		roce.PutDETH(b[roce.BTHLen:], ib.QKey(next()&1), ib.QPN(next()))
	}
	b = append(b, fill(payload, 1)...)
	b = append(b, make([]byte, roce.Pad(payload)+roce.ICRCLen)...)
	var pkt roce.Packet
	if err := pkt.Parse(b); err != nil {
		t.Fatalf("%x: %v", b, err)
	}
	e.Receive(&pkt, &Source{Src: gidB, Dst: gidA}, now)
}

// FuzzReceive: whatever a peer sends, nothing panics, nothing is written outside
// registered memory, everything posted completes exactly one time.
func FuzzReceive(f *testing.F) {
	rnd := rand.New(rand.NewSource(1))
	for i := range 30 {
		b := make([]byte, 600)
		rnd.Read(b)
		f.Add(uint8(i), b)
	}
	f.Fuzz(func(t *testing.T, tr uint8, in []byte) {
		hostileRun(t, []ib.Transport{ib.RC, ib.RC, ib.UC, ib.UD}[tr%4], in[:min(len(in), 4096)])
	})
}

// TestRandomPackets is the same with many sequences, each time.
func TestRandomPackets(t *testing.T) {
	for seed := range int64(2000) {
		rnd := rand.New(rand.NewSource(seed))
		b := make([]byte, rnd.Intn(2000))
		rnd.Read(b)
		hostileRun(t, []ib.Transport{ib.RC, ib.RC, ib.UC, ib.UD}[seed%4], b)
	}
}
