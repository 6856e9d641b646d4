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
	f.Add(byte(1), unhex("00"+"06"+"0a"+"0b00"+"0c01"+"01"+"0d"))
	f.Add(byte(0), append(append([]byte{0, 14, 76}, unhex(vecNullCall2)...), 8, 9, 3))
	f.Add(byte(2), append(append([]byte{0, 14, byte(len(vecChunks)/2 + 8)}, unhex(vecChunks+"1122334400000000")...), 7, 8))
	f.Add(byte(1), append(append([]byte{0, 6, 15, 28}, unhex(vecVers11)...), 1, 10, 11))
	f.Add(byte(5), append(append([]byte{0, 4, 11, 15, 32}, unhex(vecCantReply)...), 5, 2))
	f.Fuzz(func(t *testing.T, mode byte, in []byte) {
		o := Options{Client: mode&1 != 0, Program: uint32(mode >> 1 & 1), RecvInv: mode&4 != 0, SendInv: mode&8 != 0,
			Silent: mode&16 != 0, BackwardChunks: mode&32 != 0, Ask: 3, Grant: 2, MaxLong: 8192, MaxCalls: 6, OptTypes: []uint32{7}}
		if mode&64 != 0 {
			o.MaxVersion = 1
		}
		c, err := NewConn(o)
		if err != nil {
			t.Fatal(err)
		}
		d := fuzzDriver{t: t, c: c, now: t0, open: map[uint64]bool{}}
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
	offered Chunk // by every call so far
	last    XID   // that we have sent
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
	switch op := arg() % 17; op {
	case 0:
		d.step(Connected{unhex("f6ab0e1801010307")})
	case 1:
		d.now = d.now.Add(time.Duration(arg()) * 100 * time.Millisecond)
		d.step(Wake{})
	case 2:
		d.step(Disconnected{errors.New("x")})
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
		if i := arg(); len(d.reads) > 0 {
			r := d.reads[i%len(d.reads)]
			data := rpc(max(0, r.Len-40))[:r.Len]
			if len(data) >= 4 {
				binary.BigEndian.PutUint32(data, 0x11223344)
			}
			ev := ReadDone{Read: r.Read, Data: data}
			if i > 250 {
				ev = ReadDone{Read: r.Read, Err: errors.New("x")}
			}
			d.step(ev)
		}
	case 8:
		if i := arg(); len(d.serves) > 0 {
			s := d.serves[i%len(d.serves)]
			a := Answer{ID: s.ID, Payload: append((&RPCReply{}).Append(nil), make([]byte, i*24)...)}
			if i > 10 {
				a.Reduce = []Span{{24, i}}
			}
			d.step(a)
		}
	case 9:
		if i := arg(); len(d.serves) > 0 {
			d.step(CannotAnswer{d.serves[i%len(d.serves)].ID, i * 100})
		}
	case 10:
		d.step(PeerReady{})
	case 11:
		if i := arg(); len(d.regs) > 0 {
			r := d.regs[i%len(d.regs)]
			ev := Registered{Reg: r.Reg, Buf: make([]byte, r.Len), Invalidatable: i&1 == 0}
			for at, n := 0, 1+i>>4; at < r.Len; at += r.Len/n + 1 {
				ev.Segments = append(ev.Segments, Segment{uint32(r.Reg)<<8 + uint32(at), uint32(min(r.Len-at, r.Len/n+1)), uint64(at)})
			}
			if i > 250 {
				ev = Registered{Reg: r.Reg, Err: errors.New("x")}
			}
			d.step(ev)
		}
	case 12:
		d.step(Cancel{uint64(arg())})
	case 13:
		d.step(SetGrant{arg()})
	default: // a message, as it is or with our last XID
		n := min(arg(), len(in))
		data := append([]byte(nil), in[:n]...)
		in = in[n:]
		if op >= 15 && n >= 4 {
			binary.BigEndian.PutUint32(data, uint32(d.last))
		}
		if h, _, err := ParseHeader(data); err == nil {
			for _, w := range h.Writes {
				d.offered = append(d.offered, w...)
			}
			d.offered = append(d.offered, h.Reply...)
		}
		d.step(Recv{Data: data, WithInv: op == 16, Invalidated: uint32(n)})
	}
	return in
}

func (d *fuzzDriver) step(ev Event) {
	d.steps++
	for _, a := range d.c.Step(nil, d.now, ev) {
		switch a := a.(type) {
		case Send:
			h, _, err := ParseHeader(a.Data)
			if _, size := d.c.SendBuffers(); err != nil || len(a.Data) > size || d.closed {
				d.t.Fatalf("sends %x (%v), closed %v", a.Data, err, d.closed)
			}
			if h.Proc == ProcERROR && a.WithInv {
				d.t.Fatal("an error invalidates")
			}
			if h.Credit == 0 {
				d.t.Fatal("no credits") // V2-R1-2
			}
			d.last = h.XID
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
	if len(d.c.served) > 2 || len(d.c.abandoned) > 4096 {
		d.t.Fatalf("%d served, %d abandoned", len(d.c.served), len(d.c.abandoned))
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
