package rpcrdma

import (
	"encoding/binary"
	"errors"
	"testing"
	"time"
)

// FuzzConn lets octets decide what happens to one end: it never panics, ends
// every call once, says nothing after Close but what tidies up, sends no more
// than it may, and writes only to memory that a call has offered.
func FuzzConn(f *testing.F) {
	f.Add(byte(1), unhex("00"+"0600"+"0f0000"+"0400"+"0b00"+"0b01"+"0f0001"))
	f.Add(byte(0), unhex("00"+"100001"+"0805"+"0a"+"0300"+"0f0000"))
	f.Add(byte(12), unhex("00"+"10ff00"+"07000700"+"0800"+"10f301"+"0700"+"0801"))
	f.Add(byte(3), unhex("00"+"110109"+"0f0000"+"0500"+"0b00"+"110305"))
	f.Add(byte(1), unhex("00"+"0304"+"0f0000"+"0400"+"0b100b110b12"+"0f1200"+"0304"+"01ff"+"0f0000"))
	f.Add(byte(4), append([]byte{0, 14, 76}, unhex(vecNullCall2)...))
	f.Fuzz(func(t *testing.T, mode byte, in []byte) {
		o := Options{Client: mode&1 != 0, Program: uint32(mode >> 1 & 1), RecvInv: mode&4 != 0, SendInv: mode&8 != 0,
			Silent: mode&16 != 0, BackwardChunks: mode&32 != 0, Ask: 3, Grant: 2, MaxLong: 8192, MaxCalls: 6,
			OptTypes: []uint32{7}}
		if mode&64 != 0 {
			o.MaxVersion = 1
		}
		c, err := NewConn(o)
		if err != nil {
			t.Fatal(err)
		}
		d := fuzzDriver{t: t, c: c, now: t0, open: map[uint64]bool{}, bufs: map[RegID][]byte{}}
		for len(in) > 0 && d.steps < 400 {
			in = d.next(in)
		}
		d.step(Disconnected{})
		if len(d.open) > 0 {
			t.Fatalf("calls without an end: %v", d.open)
		}
		if !c.Deadline().IsZero() {
			t.Fatalf("deadline %v after the end", c.Deadline())
		}
	})
}

type fuzzDriver struct {
	t       *testing.T
	c       *Conn
	now     time.Time
	steps   int
	nextID  uint64
	open    map[uint64]bool // calls without Done
	regs    []Register
	reads   []Read
	serves  []Serve
	offered Chunk  // by every call so far
	last    Header // of the last message that was sent and is no error
	option  bool   // it is an OPTIONAL
	bufs    map[RegID][]byte
	closed  bool
}

// next takes an event from in.
func (d *fuzzDriver) next(in []byte) []byte {
	arg := func() int {
		if len(in) == 0 {
			return 0
		}
		v := in[0]
		in = in[1:]
		return int(v)
	}
	switch op := arg() % 19; op {
	case 0:
		d.step(Connected{unhex("f6ab0e1801010307")})
	case 1:
		d.now = d.now.Add(time.Duration(arg()) * 100 * time.Millisecond)
		d.step(Wake{})
		if dl := d.c.Deadline(); !dl.IsZero() && !dl.After(d.now) {
			d.t.Fatalf("deadline %v stays at %v", dl, d.now)
		}
	case 2:
		d.step(Disconnected{Err: errors.New("x")})
	case 3, 4, 5, 6:
		d.nextID++
		s := Submit{ID: d.nextID, Payload: rpc(16 * op), Timeout: time.Duration(arg()) * time.Second}
		switch op {
		case 4:
			s.MaxReply, s.Results = 3000, []int{arg() + 1, 100}
		case 5:
			s.Payload, s.Reduce = rpc(5000), []Span{{44, 4096 + arg()}}
		case 6:
			if arg()%4 == 0 {
				s.Option, s.Payload = &Option{Type: 7}, nil
			}
		}
		d.open[s.ID] = true
		d.step(s)
	case 7:
		d.readDone(arg())
	case 8:
		d.answer(arg())
	case 9:
		if i := arg(); len(d.serves) > 0 {
			d.step(CannotAnswer{d.serves[i%len(d.serves)].ID, i * 100})
		}
	case 10:
		d.step(PeerReady{})
	case 11:
		d.registered(arg())
	case 12:
		d.step(Cancel{uint64(arg())})
	case 13:
		d.step(SetGrant{arg()})
	case 14: // octets
		n := min(arg(), len(in))
		d.hear(append([]byte(nil), in[:n]...), 0)
		in = in[n:]
	case 15: // an answer to what was sent last, with a word changed
		d.hear(d.reply(arg()), arg())
	case 16: // a call
		d.hear(d.call(arg()), arg())
	case 17:
		d.transportError(arg(), arg())
	case 18:
		if i := arg(); len(d.regs) > 0 {
			d.step(ReleaseFailed{d.regs[i%len(d.regs)].Reg})
		}
	}
	return in
}

// answer answers one of the calls that the program has, which i chooses.
func (d *fuzzDriver) answer(i int) {
	if len(d.serves) == 0 {
		return
	}
	s := d.serves[i%len(d.serves)]
	a := Answer{ID: s.ID, Payload: append((&RPCReply{}).Append(nil), make([]byte, i*24)...)}
	if i > 10 {
		a.Reduce = []Span{{24, i}}
	}
	d.step(a)
}

// transportError has the peer answer the last call with an error.
func (d *fuzzDriver) transportError(code, n int) {
	e := Header{XID: d.last.XID, Vers: d.last.Vers, Credit: uint32(n & 7), Proc: ProcERROR,
		Error: TransportError{Code: ErrCode(code & 7), Low: Version(code >> 3 & 3), High: Version(code >> 5),
			Processed: n&64 != 0, SegmentIndex: uint32(n & 3), LengthNeeded: uint32(n) * 64}}
	if e.Error.Code == ErrBadXDR || e.Vers == 1 && e.Error.Code > ErrBadXDR {
		e.Error = TransportError{Code: ErrBadXDR}
	}
	if b, err := e.AppendBinary(nil); err == nil {
		d.hear(b, 0)
	}
}

// readDone ends one of the reads that are asked for, which i chooses.
func (d *fuzzDriver) readDone(i int) {
	if len(d.reads) == 0 {
		return
	}
	r := d.reads[i%len(d.reads)]
	data := rpc(max(0, r.Len-40))[:r.Len]
	if len(d.c.served) > 0 && len(data) >= 4 && i&1 == 0 {
		binary.BigEndian.PutUint32(data, uint32(d.c.served[0].h.XID))
	}
	ev := ReadDone{Read: r.Read, Data: data}
	if i > 250 {
		ev = ReadDone{Read: r.Read, Err: errors.New("x")}
	}
	d.step(ev)
}

// registered ends one of the registrations that are asked for, which i chooses.
func (d *fuzzDriver) registered(i int) {
	if len(d.regs) == 0 {
		return
	}
	r := d.regs[i%len(d.regs)]
	ev := Registered{Reg: r.Reg, Buf: make([]byte, r.Len), Invalidatable: i&1 == 0}
	for at, n := 0, 1+i>>4; at < r.Len; at += r.Len/n + 1 {
		ev.Segments = append(ev.Segments, Segment{uint32(r.Reg)<<8 + uint32(at),
			uint32(min(r.Len-at, r.Len/n+1)), uint64(at)})
	}
	if i > 250 {
		ev = Registered{Reg: r.Reg, Err: errors.New("x")}
	}
	d.bufs[r.Reg] = ev.Buf
	d.step(ev)
}

// reply answers the last call that was sent; how says what is written.
func (d *fuzzDriver) reply(how int) []byte {
	h := d.last
	h.Direction, h.Reads, h.Proc = DirReply, nil, ProcMSG
	if h.Vers == 1 {
		h.Direction = DirCall
	}
	for i, w := range h.Writes {
		h.Writes[i], _ = w.fill(how * 8)
	}
	payload := (&RPCReply{XID: h.XID}).Append(nil)
	if h.Reply != nil && how&1 != 0 {
		h.Proc = ProcNOMSG
		h.Reply, _ = h.Reply.fill(len(payload))
		for _, r := range d.regs {
			if b := d.bufs[r.Reg]; r.Data == nil && len(b) >= len(payload) {
				copy(b, payload)
			}
		}
		payload = nil
	} else if h.Reply != nil {
		h.Reply, _ = h.Reply.fill(0)
	}
	if d.option {
		h.Proc, h.OptType = ProcOPTIONAL, 7
	}
	b, _ := h.AppendBinary(nil)
	return append(b, payload...)
}

// call is one of the peer's; how has a bit for each of its parts.
func (d *fuzzDriver) call(how int) []byte {
	h := Header{XID: XID(d.steps), Vers: Version(1 + how&1), Credit: uint32(how)}
	payload := (&RPCCall{XID: h.XID, Prog: 1}).Append(nil)
	if how&2 != 0 {
		h.Proc = ProcNOMSG
		h.Reads = append(h.Reads, ReadSegment{0, Segment{1, uint32(len(payload)), 64}})
	}
	if how&4 != 0 {
		h.Reads = append(h.Reads, ReadSegment{40, Segment{2, 33, 640}}, ReadSegment{40, Segment{3, 33, 640}})
	}
	if how&8 != 0 {
		h.Writes = []Chunk{{{4, 100, 64}, {5, 200, 64}}, {}, {{6, 3, 0}}}
	}
	if how&16 != 0 {
		h.Reply = Chunk{{7, uint32(how) * 20, 0}, {8, 1000, 0}}
	}
	if how&32 != 0 && h.Vers == 2 && h.HasChunks() {
		if all := h.Handles(); len(all) > 0 && how&64 != 0 {
			h.InvHandle = all[len(all)-1]
		} else if len(all) > 0 {
			h.InvHandle = all[0]
		}
	}
	if how&2 != 0 {
		payload = nil
	}
	b, err := h.AppendBinary(nil)
	if err != nil {
		d.t.Fatal(err)
	}
	return append(b, payload...)
}

// hear receives a message of which a word is changed unless how is zero.
func (d *fuzzDriver) hear(data []byte, how int) {
	if n := len(data) / 4; how != 0 && n > 0 {
		copy(data[how%n*4:], words([]uint32{0, 1, 2, 3, 4, 5, 65, 0xffffffff}[how/n&7]))
	}
	if h, _, err := ParseHeader(data); err == nil {
		for _, w := range append(h.Writes, h.Reply) {
			d.offered = append(d.offered, w...)
		}
	}
	ev := Recv{Data: data}
	if d.last.InvHandle != 0 && how&1 == 0 {
		ev.WithInv, ev.Invalidated = true, d.last.InvHandle
	}
	d.step(ev)
}

func (d *fuzzDriver) step(ev Event) {
	d.steps++
	for _, a := range d.c.Step(nil, d.now, ev) {
		switch a := a.(type) {
		case Send:
			h, _, err := ParseHeader(a.Data)
			switch _, size := d.c.SendBuffers(); {
			case err != nil:
				d.t.Fatalf("err is %v, want nil", err)
			case len(a.Data) > size:
				d.t.Fatalf("Data has %v elements, want at most %v", len(a.Data), size)
			case d.closed:
				d.t.Fatalf("closed is true, want false")
			}
			if h.Proc == ProcERROR && a.WithInv {
				d.t.Fatal("an error invalidates")
			}
			if h.Credit == 0 {
				d.t.Fatal("no credits") // V2-R1-2
			}
			if h.Proc != ProcERROR {
				d.last, d.option = h, h.Proc == ProcOPTIONAL
				d.last.OptInfo = nil
			}
		case Register:
			d.regs = append(d.regs, a)
		case Read:
			if a.Len > d.c.opts.maxLong() || uint64(a.Len) != Chunk(a.Segments).Len() {
				d.t.Fatalf("reads %d octets: %v", a.Len, a.Segments)
			}
			d.reads = append(d.reads, a)
		case Write:
			if uint64(len(a.Data)) != Chunk(a.Segments).Len() {
				d.t.Fatalf("writes %d octets to %v", len(a.Data), a.Segments)
			}
			for _, s := range a.Segments {
				if !d.offers(s) {
					d.t.Fatalf("writes to %v, which nobody has offered", s)
				}
			}
		case Serve:
			d.serves = append(d.serves, a)
		case Done:
			if !d.open[a.ID] {
				d.t.Fatalf("call %d ends twice", a.ID)
			}
			delete(d.open, a.ID)
		case Close:
			if d.closed {
				d.t.Fatal("closes twice")
			}
			d.closed = true
		}
	}
	if n := len(d.c.calls); n > 6+1 {
		d.t.Fatalf("%d calls", n)
	}
	if n := len(d.c.served); n > 2 {
		d.t.Fatalf("%d calls are served, want 2 at most", n)
	}
	if n := len(d.c.abandoned); n > 4096 {
		d.t.Fatalf("%d calls are abandoned, want 4096 at most", n)
	}
}

func (d *fuzzDriver) offers(s Segment) bool {
	for _, o := range d.offered {
		if o.Handle == s.Handle && o.Offset == s.Offset && s.Length <= o.Length {
			return true
		}
	}
	return false
}
