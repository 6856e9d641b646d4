package engine

import (
	"bytes"
	"fmt"
	"math/rand"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/verbs"
	"ipoibcm/wire/roce"
)

var (
	gidA  = ib.GID{15: 1}
	gidB  = ib.GID{15: 2}
	start = time.Unix(1000, 0)
)

// memory is a Memory of one region per rkey.
type memory map[uint32]*mem

type mem struct {
	va     uint64
	buf    []byte
	access verbs.Access
}

func (m memory) Lookup(rkey uint32, va uint64, n int, access verbs.Access) ([]byte, bool) {
	r := m[rkey]
	if r == nil || r.access&access != access || va < r.va || va-r.va > uint64(len(r.buf)) || uint64(n) > uint64(len(r.buf))-(va-r.va) {
		return nil, false
	}
	return r.buf[va-r.va:][:n], true
}

func (m memory) Invalidate(rkey uint32) bool {
	_, ok := m[rkey]
	delete(m, rkey)
	return ok
}

// end is one QP with all that it told.
type end struct {
	*QP
	t          testing.TB
	gid        ib.GID
	mem        memory
	send, recv []verbs.WC
	events     []verbs.Event
	pkts       [32]Packet
	count      bool // keep no completions, count them
	nsend      int
	nrecv      int
}

func (e *end) SendDone(wc verbs.WC) {
	e.nsend++
	if !e.count {
		e.send = append(e.send, wc)
	}
}

func (e *end) RecvDone(wc verbs.WC) {
	e.nrecv++
	if !e.count {
		e.recv = append(e.recv, wc)
	}
}
func (e *end) Event(ev verbs.Event) { e.events = append(e.events, ev) }

type pair struct {
	t    testing.TB
	a, b *end
	now  time.Time
	cfg  Config
	// drop decides about each packet; nil keeps all.
	drop func(out bool, p []byte) bool
	// trace, if set, gets each packet.
	trace func(fromA bool, p []byte)
}

// newPair connects two QPs; adjust may change configuration and attributes.
func newPair(t testing.TB, tr ib.Transport, adjust func(cfg *Config, attr *verbs.QPAttr)) *pair {
	p := &pair{t: t, now: start}
	for i, gid := range []ib.GID{gidA, gidB} {
		e := &end{t: t, gid: gid, mem: memory{}}
		cfg := Config{QPN: ib.QPN(0xa1 + i), Transport: tr, SendDepth: 64, RecvDepth: 64, MaxSendSGE: 4, MaxRecvSGE: 4, Memory: e.mem, Sink: e}
		attr := verbs.QPAttr{
			PKey: ib.DefaultPKey, QKey: 0xb1b, Access: verbs.RemoteRead | verbs.RemoteWrite,
			Path: verbs.AHAttr{SGID: gid, DGID: gidA}, PathMTU: ib.MTU256, DestQPN: ib.QPN(0xa2 - i),
			RQPSN: 0xfffffe, SQPSN: 0xfffffe, MaxDestRDAtomic: 4, MaxRDAtomic: 4,
			MinRNRTimer: 12, Timeout: 14, RetryCount: 7, RNRRetry: 7,
		}
		if i == 0 {
			attr.Path.DGID = gidB
		}
		if adjust != nil {
			adjust(&cfg, &attr)
		}
		p.cfg = cfg
		e.QP = New(cfg)
		for s := verbs.StateInit; s <= verbs.StateRTS; s++ {
			attr.State = s
			if err := e.Modify(&attr, p.now); err != nil {
				t.Fatalf("to %v: %v", s, err)
			}
		}
		if i == 0 {
			p.a = e
		} else {
			p.b = e
		}
	}
	return p
}

func (p *pair) other(e *end) *end {
	if e == p.a {
		return p.b
	}
	return p.a
}

// output returns what e sends now, as octets from BTH through the ICRC's place.
func (p *pair) output(e *end) (out [][]byte) {
	for {
		group := e.MayGroup()
		n := e.Output(e.pkts[:], p.now)
		if n == 0 {
			return out
		}
		if group {
			Group(e.pkts[:n], make([]Packet, n/2))
		}
		for i := range e.pkts[:n] {
			b := e.pkts[i].Append(nil)
			if len(b) != e.pkts[i].Len() || len(b)%4 != 0 {
				p.t.Fatalf("packet of %d octets says %d", len(b), e.pkts[i].Len())
			}
			out = append(out, append(b, 0, 0, 0, 0))
		}
	}
}

// input gives e one packet from its peer.
func (p *pair) input(e *end, b []byte) DropReason {
	var pkt roce.Packet
	if err := pkt.Parse(b); err != nil {
		p.t.Fatalf("%x: %v", b, err)
	}
	src := Source{Src: p.other(e).gid, Dst: e.gid}
	copy(src.GRH[:], "grh")
	return e.Receive(&pkt, &src, p.now)
}

// run exchanges packets until both are silent; returns how many went.
func (p *pair) run() (n int) {
	for {
		moved := false
		for _, e := range []*end{p.a, p.b} {
			for _, b := range p.output(e) {
				moved = true
				n++
				if p.trace != nil {
					p.trace(e == p.a, b)
				}
				if p.drop != nil && p.drop(e == p.a, b) {
					continue
				}
				p.input(p.other(e), b)
			}
		}
		if !moved {
			return n
		}
	}
}

// hostile has p lose, double and displace packets, each at that rate.
func (p *pair) hostile(rnd *rand.Rand, rate float64) {
	var held []byte
	var heldBy *end
	p.drop = func(fromA bool, b []byte) bool {
		to := p.a
		if fromA {
			to = p.b
		}
		if held != nil && rnd.Intn(3) == 0 {
			p.input(heldBy, held)
			held = nil
		}
		switch x := rnd.Float64() / rate; {
		case x < 1:
			return true
		case x < 2:
			p.input(to, b)
		case x < 3 && held == nil:
			held, heldBy = b, to
			return true
		}
		return false
	}
}

// runUntil also moves the clock from deadline to deadline until done.
func (p *pair) runUntil(done func() bool) {
	for i := 0; ; i++ {
		p.run()
		if done() {
			return
		}
		var next time.Time
		for _, e := range []*end{p.a, p.b} {
			if d := e.Deadline(); !d.IsZero() && (next.IsZero() || d.Before(next)) {
				next = d
			}
		}
		if next.IsZero() || i > 20000 {
			p.t.Fatalf("stuck at %v: A %+v %+v\nB %+v %+v", p.now.Sub(start), p.a.state, p.a.req, p.b.state, p.b.rsp)
		}
		p.now = next
		p.a.Wake(p.now)
		p.b.Wake(p.now)
	}
}

// fill returns n octets that depend on seed and place.
func fill(n, seed int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*7 + i>>8 + seed*31)
	}
	return b
}

// sg cuts b into parts of the given lengths; the rest is the last part.
func sg(b []byte, cuts ...int) (l []verbs.SGE) {
	for _, c := range cuts {
		l = append(l, verbs.SGE{Buf: b[:c]})
		b = b[c:]
	}
	return append(l, verbs.SGE{Buf: b})
}

func (e *end) postRecv(id uint64, b []byte, cuts ...int) {
	e.t.Helper()
	if _, err := e.PostRecv([]verbs.RecvWR{{ID: id, SG: sg(b, cuts...)}}); err != nil {
		e.t.Fatal(err)
	}
}

func (e *end) post(wr verbs.SendWR) {
	e.t.Helper()
	wr.Flags |= verbs.Signaled
	if _, err := e.PostSend([]verbs.SendWR{wr}, start); err != nil {
		e.t.Fatal(err)
	}
}

func same(t testing.TB, what string, got, want []byte) {
	t.Helper()
	if !bytes.Equal(got, want) {
		i := 0
		for i < min(len(got), len(want)) && got[i] == want[i] {
			i++
		}
		t.Fatalf("%s: differ at octet %d of %d and %d", what, i, len(got), len(want))
	}
}

func opName(b []byte) string {
	var p roce.Packet
	if err := p.Parse(b); err != nil {
		return err.Error()
	}
	s := fmt.Sprintf("%s psn=%v", p.Op, p.BTH.PSN())
	if p.BTH.AckReq() {
		s += " A"
	}
	if v := p.BTH.Reserved(); v != 0 && p.Op.IsAck() {
		s += fmt.Sprintf(" gap=%d", v)
	} else if v != 0 {
		s += " again"
	}
	if n := len(p.Payload); n > 0 {
		s += fmt.Sprintf(" len=%d", n)
	}
	if h := p.RETH(); h != nil {
		s += fmt.Sprintf(" va=%#x rkey=%d dma=%d", h.Addr(), h.RKey(), h.Length())
	}
	if h := p.AETH(); h != nil {
		s += fmt.Sprintf(" syndrome=%02x msn=%d", uint8(h.Syndrome()), h.MSN())
	}
	if h := p.ImmDt(); h != nil {
		s += fmt.Sprintf(" imm=%#x", h.Value())
	}
	if h := p.IETH(); h != nil {
		s += fmt.Sprintf(" inv=%d", h.RKey())
	}
	return s
}
