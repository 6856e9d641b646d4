package rpcrdma

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"ipoibcm/eventqueue"
)

var t0 = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// A fabric joins two ends as a reliable connection does: what one end posts comes
// to the other in order, after a while, or the connection breaks. It holds the
// memory of both, and anything that reaches for memory that is not exposed
// breaks it.
type fabric struct {
	t     testing.TB
	now   time.Time
	rand  *rand.Rand
	ends  [2]*end
	down  bool
	trace []string
	// lose says whether a Send disappears, as no reliable connection lets it.
	lose func(from *end, h *Header) bool
	// twist may change a Send before it arrives.
	twist func(from *end, data []byte) []byte
	// delay is how long what is posted takes, at most.
	delay time.Duration
	// violations are accesses to memory that was not exposed.
	violations int
	nextHandle uint32
}

// An end is a Conn with its driver.
type end struct {
	*Conn
	w       *fabric
	name    string
	peer    *end
	queue   []packet // on the way to this end
	mem     map[uint32]*memory
	regs    map[RegID]*memory
	posted  int // receive buffers
	size    int
	program func(s Serve) Event // nil keeps the call
	done    []Done
	serves  []Serve
	ready   []Info
	learned []Learned
	closed  *Error
	segment int  // octets of a segment of registered memory; 0 for one segment
	fixed   bool // memory must not be invalidated
	refuse  bool // memory cannot be registered
	sends   []Send
	notify  func(a Action)
	offered []Segment // by the calls that came
	events  eventqueue.Queue[Event]
}

type memory struct {
	reg   RegID
	buf   []byte
	write bool // else read
	segs  []Segment
	fixed bool
	gone  bool
}

// A packet is what is on the way: a Send, a Write, a Read, or what a Read has
// read.
type packet struct {
	at     time.Time
	action Action
	data   []byte // of a read
}

// pair makes a client and a server, connected but for Connected.
func pair(t testing.TB, client, server Options) *fabric {
	client.Client = true
	if client.XID == 0 {
		client.XID = 0x1000
	}
	w := &fabric{t: t, now: t0, rand: rand.New(rand.NewPCG(1, 2)), nextHandle: 0x100}
	for i, o := range []Options{client, server} {
		c, err := NewConn(o)
		if err != nil {
			t.Fatal(err)
		}
		e := &end{Conn: c, w: w, name: [...]string{"client", "server"}[i], mem: map[uint32]*memory{},
			regs: map[RegID]*memory{}}
		e.posted, e.size = c.RecvBuffers()
		e.program = echo
		w.ends[i] = e
	}
	w.ends[0].peer, w.ends[1].peer = w.ends[1], w.ends[0]
	return w
}

func (w *fabric) client() *end { return w.ends[0] }
func (w *fabric) server() *end { return w.ends[1] }

// connect exchanges the private data, with what stands in front of it.
func (w *fabric) connect() *fabric {
	w.client().step(Connected{append([]byte{1, 2, 3}, w.server().Private()...)})
	w.server().step(Connected{w.client().Private()})
	return w
}

// echo answers a NULL call, and any other one with what it has.
func echo(s Serve) Event {
	if s.Option != nil {
		reply := slices.Clone(s.Payload)
		if len(reply) > 0 {
			reply[7] = 1 // msg_type REPLY
		}
		return Answer{ID: s.ID, Payload: reply, OptInfo: s.Option.Info}
	}
	c, args, err := ParseRPCCall(s.Payload)
	if err != nil {
		panic(err)
	}
	reply := (&RPCReply{XID: c.XID + 77}).Append(nil) // the XID is not ours to set
	return Answer{ID: s.ID, Payload: append(reply, args...)}
}

// step gives an end an event and carries out what comes of it, and then what
// came of that.
func (e *end) step(ev Event) {
	e.events.Add(ev)
	ran := e.events.Run(func(ev Event) {
		e.w.trace = append(e.w.trace, fmt.Sprintf("%s< %T", e.name, ev))
		for _, a := range e.Conn.Step(nil, e.w.now, ev) {
			e.do(a)
		}
	})
	if !ran {
		return
	}
	if n := e.exposed(); n > 0 && e.state == connDead {
		e.w.Fatalf("%s leaves %d pieces of memory exposed", e.name, n)
	}
}

func (e *end) do(a Action) {
	w := e.w
	w.trace = append(w.trace, e.name+"> "+show(a))
	if e.notify != nil {
		e.notify(a)
	}
	switch a := a.(type) {
	case Send:
		e.sends = append(e.sends, Send{slices.Clone(a.Data), a.WithInv, a.Invalidate})
		if _, size := e.SendBuffers(); len(a.Data) > size {
			w.t.Fatalf("%s sends %d octets, said at most %d", e.name, len(a.Data), size)
		}
		h, _, _ := ParseHeader(a.Data)
		if w.lose != nil && w.lose(e, &h) {
			return
		}
		data := slices.Clone(a.Data)
		if w.twist != nil {
			data = w.twist(e, data)
		}
		w.post(e.peer, packet{action: Send{data, a.WithInv, a.Invalidate}})
	case Write:
		for _, s := range a.Segments {
			if !slices.ContainsFunc(e.offered, func(o Segment) bool {
				return o.Handle == s.Handle && o.Offset == s.Offset && s.Length <= o.Length
			}) {
				w.Fatalf("%s writes to %v, which nobody has offered", e.name, s)
			}
		}
		w.post(e.peer, packet{action: Write{slices.Clone(a.Segments), slices.Clone(a.Data)}})
	case Read:
		w.post(e.peer, packet{action: Read{a.Read, slices.Clone(a.Segments), a.Len}})
	case Register:
		e.register(a)
	case Release:
		if m := e.regs[a.Reg]; m != nil {
			m.gone = true
			for _, s := range m.segs {
				delete(e.mem, s.Handle)
			}
		}
	case Serve:
		kept := a
		kept.Payload = slices.Clone(a.Payload)
		e.serves = append(e.serves, kept)
		if e.program != nil {
			if ev := e.program(a); ev != nil {
				e.step(ev)
			}
		}
	case Done:
		a.Payload = slices.Clone(a.Payload)
		for i := range a.Results {
			a.Results[i] = slices.Clone(a.Results[i])
		}
		if a.Option != nil {
			a.Option = &Option{a.Option.Type, slices.Clone(a.Option.Info)}
		}
		e.done = append(e.done, a)
	case Ready:
		e.ready = append(e.ready, a.Info)
	case Learned:
		e.learned = append(e.learned, a)
	case Close:
		e.closed = a.Err
		w.cut(e)
	default:
		w.t.Fatalf("unknown action %T", a)
	}
}

func show(a Action) string {
	switch a := a.(type) {
	case Send:
		h, _, err := ParseHeader(a.Data)
		if err != nil {
			return fmt.Sprintf("Send %x (%v)", a.Data, err)
		}
		inv := ""
		if a.WithInv {
			inv = fmt.Sprintf(" invalidating %08x", a.Invalidate)
		}
		return fmt.Sprintf("Send %d octets%s: %v", len(a.Data), inv, &h)
	case Write:
		return fmt.Sprintf("Write %d octets to %v", len(a.Data), a.Segments)
	case Done:
		return fmt.Sprintf("Done %d: %d octets, %v", a.ID, len(a.Payload), a.Err)
	case Serve:
		return fmt.Sprintf("Serve %d: %d octets, room for %d and %v", a.ID, len(a.Payload), a.MaxReply, a.Results)
	case Register:
		return fmt.Sprintf("Register %d: %d octets", a.Reg, a.Len)
	}
	return fmt.Sprintf("%T %+v", a, a)
}

func (e *end) register(a Register) {
	if e.refuse {
		e.step(Registered{Reg: a.Reg, Err: errors.New("no memory")})
		return
	}
	m := &memory{reg: a.Reg, buf: make([]byte, a.Len), write: a.Data == nil, fixed: e.fixed}
	if !m.write && len(a.Data) != a.Len {
		e.w.t.Fatalf("%d octets of %d", len(a.Data), a.Len)
	}
	copy(m.buf, a.Data)
	seg := e.segment
	if seg == 0 {
		seg = a.Len
	}
	for at := 0; at < a.Len; at += seg {
		e.w.nextHandle++
		s := Segment{e.w.nextHandle, uint32(min(seg, a.Len-at)), uint64(e.w.nextHandle)<<32 + uint64(at)}
		m.segs = append(m.segs, s)
		e.mem[s.Handle] = m
	}
	e.regs[a.Reg] = m
	e.step(Registered{Reg: a.Reg, Segments: m.segs, Buf: m.buf, Invalidatable: !e.fixed})
}

// reach finds the octets of a segment that the peer names.
func (e *end) reach(s Segment, write bool) ([]byte, bool) {
	m := e.mem[s.Handle]
	if m == nil || m.gone || m.write != write {
		return nil, false
	}
	at := 0
	for _, have := range m.segs {
		if have.Handle == s.Handle {
			if s.Offset < have.Offset || s.Offset+uint64(s.Length) > have.Offset+uint64(have.Length) {
				return nil, false
			}
			return m.buf[at+int(s.Offset-have.Offset):][:s.Length], true
		}
		at += int(have.Length)
	}
	return nil, false
}

func (w *fabric) post(to *end, p packet) {
	if w.down {
		return
	}
	p.at = w.now
	if w.delay > 0 {
		p.at = p.at.Add(time.Duration(w.rand.Int64N(int64(w.delay))))
	}
	if n := len(to.queue); n > 0 && to.queue[n-1].at.After(p.at) {
		p.at = to.queue[n-1].at
	}
	to.queue = append(to.queue, p)
}

// cut breaks the connection.
func (w *fabric) cut(by *end) {
	if w.down {
		return
	}
	w.down = true
	for _, e := range w.ends {
		e.queue = nil
	}
	for _, e := range w.ends {
		e.step(Disconnected{Err: errors.New("cut by " + by.name)})
	}
}

// arrive delivers one packet.
func (w *fabric) arrive(to *end, p packet) {
	switch a := p.action.(type) {
	case Send:
		if a.WithInv {
			m := to.mem[a.Invalidate]
			if m == nil || m.fixed {
				w.violate(to, "handle %08x is invalidated", a.Invalidate)
				return
			}
			delete(to.mem, a.Invalidate)
		}
		if len(a.Data) > to.size || to.posted == 0 {
			w.violate(to, "%d octets into %d buffers of %d", len(a.Data), to.posted, to.size)
			return
		}
		// The buffer is posted again before anything else is done, but what is in
		// it must not be needed later.
		data := slices.Clone(a.Data)
		h, _, _ := ParseHeader(data)
		for _, c := range append(h.Writes, h.Reply) {
			to.offered = append(to.offered, c...)
		}
		to.step(Recv{data, a.WithInv, a.Invalidate})
		for i := range data {
			data[i] = 0xee
		}
	case Write:
		rest := a.Data
		for _, s := range a.Segments {
			buf, ok := to.reach(s, true)
			if !ok || int(s.Length) > len(rest) {
				w.violate(to, "write to %v", s)
				return
			}
			copy(buf, rest)
			rest = rest[s.Length:]
		}
		if len(rest) > 0 {
			w.violate(to, "%d octets without a place", len(rest))
		}
	case Read:
		var data []byte
		for _, s := range a.Segments {
			buf, ok := to.reach(s, false)
			if !ok {
				w.violate(to, "read of %v", s)
				return
			}
			data = append(data, buf...)
		}
		if len(data) != a.Len {
			w.t.Fatalf("%d octets were to be read from %v", a.Len, a.Segments)
		}
		w.post(to.peer, packet{action: a, data: data})
	}
}

func (w *fabric) violate(at *end, format string, args ...any) {
	w.violations++
	w.trace = append(w.trace, "violation at "+at.name+": "+fmt.Sprintf(format, args...))
	w.cut(at)
}

// run delivers everything, and lets time pass until d is over or nothing is left
// to happen.
func (w *fabric) run(d time.Duration) *fabric {
	until := w.now.Add(d)
	for {
		var next *end
		var at time.Time
		wake := false
		for _, e := range w.ends {
			if len(e.queue) > 0 && (next == nil || e.queue[0].at.Before(at)) {
				next, at, wake = e, e.queue[0].at, false
			}
		}
		for _, e := range w.ends {
			if dl := e.Deadline(); !dl.IsZero() && (next == nil || dl.Before(at)) {
				next, at, wake = e, dl, true
			}
		}
		if next == nil || at.After(until) {
			w.now = until
			return w
		}
		if at.After(w.now) {
			w.now = at
		}
		if wake {
			next.step(Wake{})
			if dl := next.Deadline(); !dl.IsZero() && !dl.After(w.now) {
				w.t.Fatalf("%s: deadline %v stays at %v", next.name, dl, w.now)
			}
			continue
		}
		p := next.queue[0]
		next.queue = next.queue[1:]
		if r, ok := p.action.(Read); ok && p.data != nil {
			next.step(ReadDone{Read: r.Read, Data: p.data})
			continue
		}
		w.arrive(next, p)
	}
}

// Fatalf ends the test with what has happened.
func (w *fabric) Fatalf(format string, args ...any) {
	w.t.Helper()
	w.t.Fatalf("%s\n%s", fmt.Sprintf(format, args...), strings.Join(w.trace, "\n"))
}

// Helper is for package expect, as Fatalf is.
func (w *fabric) Helper() { w.t.Helper() }

// header returns the i-th header that an end has sent, from the end if negative.
func (e *end) header(i int) (h Header, payload []byte) {
	e.w.t.Helper()
	if i < 0 {
		i += len(e.sends)
	}
	if i < 0 || i >= len(e.sends) {
		e.w.Fatalf("%s has sent %d messages, not %d", e.name, len(e.sends), i+1)
	}
	h, payload, err := ParseHeader(e.sends[i].Data)
	if err != nil {
		e.w.Fatalf("%s sent %x: %v", e.name, e.sends[i].Data, err)
	}
	return h, payload
}

// result returns how call id ended.
func (e *end) result(id uint64) Done {
	e.w.t.Helper()
	var found []Done
	for _, d := range e.done {
		if d.ID == id {
			found = append(found, d)
		}
	}
	if len(found) != 1 {
		e.w.Fatalf("%s: call %d ended %d times", e.name, id, len(found))
	}
	return found[0]
}

// rpc makes a call with that many octets of arguments.
func rpc(args int) []byte {
	b := (&RPCCall{Prog: 100003, Vers: 4, Proc: 1}).Append(nil)
	for i := range args {
		b = append(b, byte(i*7+i>>8))
	}
	return b
}

// args are those octets of arguments.
func args(n int) []byte { return rpc(n)[40:] }

// flight is how many calls an end has unanswered, those given up included.
func (e *end) flight() (n int) {
	for _, k := range e.calls {
		if k.state != callQueued {
			n++
		}
	}
	return n + len(e.abandoned)
}

// exposed counts the memory that a peer can reach.
func (e *end) exposed() (n int) {
	for _, m := range e.regs {
		if !m.gone {
			n++
		}
	}
	return n
}

func xidOf(payload []byte) XID { return XID(binary.BigEndian.Uint32(payload)) }
