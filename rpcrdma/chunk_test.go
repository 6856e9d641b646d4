package rpcrdma

import (
	"bytes"
	"fmt"
	"slices"
	"testing"
	"time"

	"ipoibcm/internal/expect"
)

// up makes a pair whose version is settled.
func up(t testing.TB, client, server Options) *fabric {
	t.Helper()
	client.Program = 100003
	w := pair(t, client, server).connect().run(time.Second)
	expect.MustEqual(w, len(w.client().ready), 1, "how often the client was ready")
	expect.MustEqual(w, len(w.server().ready), 1, "how often the server was ready")
	return w
}

// clean checks that nothing is exposed at the client, and that no end has broken a rule.
func (w *fabric) clean(name string) {
	w.Helper()
	expect.MustEqual(w, w.violations, 0, "%s: violations", name)
	expect.MustEqual(w, w.client().exposed(), 0, "%s: pieces of memory that are exposed", name)
}

// one and two are options of ends that speak that version only.
func one(o Options) Options { o.MinVersion, o.MaxVersion = 1, 1; return o }

// sizes answers with a reply of that many octets of results, items of which are
// those.
func sizes(results int, items ...Span) func(Serve) Event {
	return func(s Serve) Event {
		return Answer{ID: s.ID, Payload: append((&RPCReply{}).Append(nil), args(results)...), Reduce: items}
	}
}

// TestThresholds: what goes inline, to the octet. head is the length of the
// transport header without chunks.
func TestThresholds(t *testing.T) {
	for _, tt := range []struct {
		name           string
		client, server Options
		head           int
		call, reply    int // thresholds
	}{
		// V2-2.3-1, V2-2.3-3, V2-6.1-2, V2-2.1-1
		{"version two", Options{}, Options{}, 36, 4096, 4096},
		{"version two, whatever was said for one", Options{SendSize: 65536, RecvSize: 65536},
			Options{SendSize: 65536, RecvSize: 65536}, 36, 4096, 4096},
		// V2-6.2-5, V2-R1-4, 8797-3.1-2
		{"version one", Options{Silent: true}, one(Options{}), 28, 1024, 1024},
		{"version one, private data", Options{SendSize: 16384, RecvSize: 8192},
			one(Options{SendSize: 65536, RecvSize: 2048}), 28, 2048, 8192},
	} {
		for _, over := range []int{0, 4} {
			w := up(t, tt.client, tt.server)
			c, s := w.client(), w.server()
			// NULL has made the first reply, so that the real limits hold.
			s.program = sizes(tt.reply - tt.head - 24 + over)
			call := tt.call - tt.head - 40 + over
			if over > 0 {
				call = tt.call - tt.head - 20 - 40 + 4 // the Reply chunk is in the way
			}
			c.step(Submit{ID: 1, Payload: rpc(call), MaxReply: tt.reply - tt.head + over})
			w.run(time.Second)
			switch d := c.result(1); {
			case d.Err != nil:
				w.Fatalf("%s, %d over: Err is %v, want nil", tt.name, over, d.Err)
			case !bytes.Equal(d.Payload[24:], args(tt.reply-tt.head-24+over)):
				w.Fatalf("%s, %d over: d.Payload[24:] is %x, want %x", tt.name, over, d.Payload[24:],
					args(tt.reply-tt.head-24+over))
			case xidOf(d.Payload) == 0:
				w.Fatalf("%s, %d over: the reply has XID 0, want that of its call", tt.name, over)
			}
			h, _ := c.header(-1)
			r, _ := s.header(-1)
			want := ProcMSG
			if over > 0 {
				want = ProcNOMSG // V2-2.1-4, V2-5.2.1-4: Long Call, Long Reply
			}
			expect.MustEqual(w, h.Proc, want, "%s, %d over: Proc of the call", tt.name, over)
			expect.MustEqual(w, r.Proc, want, "%s, %d over: Proc of the reply", tt.name, over)
			if over == 0 {
				expect.MustEqual(w, len(c.sends[len(c.sends)-1].Data), tt.call, "%s: octets of the call", tt.name)
				expect.MustEqual(w, len(s.sends[len(s.sends)-1].Data), tt.reply, "%s: octets of the reply", tt.name)
			}
			last := s.serves[len(s.serves)-1]
			expect.MustEqual(w, len(last.Payload), call+40, "%s, %d over: octets of the call that came", tt.name, over)
			if !bytes.Equal(last.Payload[40:], args(call)) {
				w.Fatalf("%s, %d over: the call came as %x, want %x", tt.name, over, last.Payload[40:], args(call))
			}
			w.clean(tt.name)
		}
	}
}

// chunkCases are the cases of TestChunks.
var chunkCases = []struct {
	name    string
	call    int    // octets of arguments
	reduce  []Span // of the call
	reply   int    // octets of results
	items   []Span // of the reply
	max     int
	results []int
	want    string // headers of call and reply, without numbers
}{
	{"inline", 100, nil, 100, nil, 200, nil, "MSG MSG"},
	// V2-5.2-4, V2-R1-11: an item has a position; the rest stays
	{"an item", 9000, []Span{{44, 8900}}, 10, nil, 100, nil, "MSG r@44 MSG"},
	// The padding of an odd item stays out, and comes back as zero.
	{"an odd item", 9000, []Span{{44, 8893}}, 10, nil, 100, nil, "MSG r@44 MSG"},
	{"two items", 9000, []Span{{44, 4001}, {4052, 4900}}, 10, nil, 100, nil, "MSG r@44 r@4052 MSG"},
	{"items that are not enough", 9000, []Span{{44, 1000}}, 10, nil, 100, nil, "NOMSG r@0 MSG"},
	{"items that need not move", 900, []Span{{44, 800}}, 10, nil, 100, nil, "MSG MSG"},
	{"Long Call", 20000, nil, 10, nil, 100, nil, "NOMSG r@0 MSG"},
	// V2-R1-13: unused chunks come back with lengths of zero
	{"a Reply chunk that is not used", 100, nil, 100, nil, 9000, nil, "MSG R MSG R0"},
	{"Long Reply", 100, nil, 8900, nil, 9000, nil, "MSG R NOMSG R8924"},
	{"Long Call and Long Reply", 20000, nil, 8900, nil, 9000, nil, "NOMSG r@0 R NOMSG R8924"},
	// V2-5.2-5, V2-5.2-6: results by themselves
	{"a result", 100, nil, 5000, []Span{{28, 4900}}, 200, []int{6000}, "MSG w MSG w4900"},
	{"an odd result", 100, nil, 5000, []Span{{28, 4901}}, 200, []int{6000}, "MSG w MSG w4901"},
	{"two results", 100, nil, 9000, []Span{{28, 3000}, {3028, 5000}}, 1100, []int{3000, 6000},
		"MSG w w R NOMSG w3000 w5000 R1024"},
	{"one result for two chunks", 100, nil, 3000, []Span{{28, 2900}}, 200, []int{3000, 6000}, "MSG w w MSG w2900 w0"},
	{"no result for a chunk", 100, nil, 100, nil, 200, []int{3000}, "MSG w MSG w0"},
	{"everything", 9000, []Span{{44, 8900}}, 9000, []Span{{28, 3000}}, 9000, []int{3000},
		"MSG r@44 w R NOMSG w3000 R6024"},
}

// TestChunks: calls and replies of every shape, in both versions, in memory of
// one segment and of many.
func TestChunks(t *testing.T) {
	for _, version := range []Version{1, 2} {
		for _, segment := range []int{0, 1000} {
			for _, tt := range chunkCases {
				name := fmt.Sprintf("version %d, segments of %d, %s", version, segment, tt.name)
				o := Options{MaxVersion: version, SendSize: 1024, RecvSize: 1024}
				w := up(t, o, o)
				c, s := w.client(), w.server()
				c.segment = segment
				s.program = sizes(tt.reply, tt.items...)
				want := tt.want
				if version == 2 {
					// 4096 octets take more.
					switch tt.name {
					case "two results":
						want = "MSG w w MSG w3000 w5000"
					}
				}
				c.step(Submit{ID: 1, Payload: rpc(tt.call), Reduce: tt.reduce, MaxReply: tt.max, Results: tt.results})
				w.run(time.Second)
				d := c.result(1)
				if d.Err != nil {
					w.Fatalf("%s: %v", name, d.Err)
				}
				h, _ := c.header(-1)
				r, _ := s.header(-1)
				if got := shape(&h, false) + " " + shape(&r, true); got != want {
					w.Fatalf("%s: %s, want %s", name, got, want)
				}
				// V2-R1-12, V2-5.2.1-1, V2-5.2.1-4
				if len(r.Reads) > 0 {
					w.Fatalf("%s: a Read list in a reply", name)
				}
				wantCall := rpc(tt.call)
				for _, i := range tt.reduce {
					for p := i.Offset + i.Len; p%4 != 0 && h.Proc == ProcMSG && len(h.Reads) > 0; p++ {
						wantCall[p] = 0
					}
				}
				if got := s.serves[len(s.serves)-1].Payload; !bytes.Equal(got[4:], wantCall[4:]) {
					w.Fatalf("%s: the program got\n%x, want\n%x", name, got, wantCall)
				}
				whole := append((&RPCReply{}).Append(nil), args(tt.reply)...)
				for i, span := range tt.items {
					if !bytes.Equal(d.Results[i], whole[span.Offset:][:span.Len]) {
						w.Fatalf("%s: result %d has %d octets", name, i, len(d.Results[i]))
					}
				}
				if rest := without(whole, tt.items); !bytes.Equal(d.Payload[4:], rest[4:]) {
					w.Fatalf("%s: the reply has %d octets, want %d", name, len(d.Payload), len(rest))
				}
				switch {
				case len(d.Results) != len(tt.results):
					w.Fatalf("%s: Results has %v elements, want %v", name, len(d.Results), len(tt.results))
				case w.violations > 0:
					w.Fatalf("%s: violations is %v, want 0", name, w.violations)
				case c.exposed() > 0:
					w.Fatalf("%s: exposed is %v, want 0", name, c.exposed())
				}
				// The program was told what it may answer.
				if got := s.serves[len(s.serves)-1]; !slices.Equal(got.Results, tt.results) || got.MaxReply < tt.max-200 {
					w.Fatalf("%s: %+v", name, got)
				}
			}
		}
	}
}

// shape says what chunks a header has: positions of calls, octets of replies.
func shape(h *Header, lengths bool) string {
	s := h.Proc.String()
	last := uint32(1)
	for _, r := range h.Reads {
		if r.Position != last {
			s += fmt.Sprintf(" r@%d", r.Position)
		}
		last = r.Position
	}
	chunk := func(letter string, c Chunk) {
		s += " " + letter
		if lengths {
			s += fmt.Sprint(c.Len())
		}
	}
	for _, c := range h.Writes {
		chunk("w", c)
	}
	if h.Reply != nil {
		chunk("R", h.Reply)
	}
	return s
}

// TestTakenBack: nobody looks at memory while the peer can still reach it.
func TestTakenBack(t *testing.T) {
	w := up(t, Options{}, Options{})
	w.server().program = sizes(9000)
	c := w.client()
	c.notify = func(a Action) {
		if d, ok := a.(Done); ok && c.exposed() > 0 {
			w.Fatalf("call %d is done, and %d pieces of memory are exposed", d.ID, c.exposed())
		}
	}
	c.step(Submit{ID: 1, Payload: rpc(20000), MaxReply: 10000})
	if c.exposed() != 2 {
		w.Fatalf("%d exposed", c.exposed())
	}
	w.run(time.Second)
	c.result(1)

	// V2-R1-14: what cannot be taken back ends the connection.
	c.step(ReleaseFailed{1})
	if c.closed == nil || c.closed.Reason != ReasonRelease {
		w.Fatalf("closed: %v", c.closed)
	}
}

// TestRegistration: memory that cannot be had, or not as was promised.
func TestRegistration(t *testing.T) {
	for _, tt := range []struct {
		name    string
		client  Options
		prepare func(e *end)
		want    Reason
	}{
		{"refused", Options{}, func(e *end) { e.refuse = true }, ReasonRegister},
		// 8797-3.2-3: R was set, so no handle may be one that must stay
		{"fixed after R", one(Options{RecvInv: true}), func(e *end) { e.fixed = true }, ReasonRegister},
		{"fixed without R", one(Options{RecvInv: true, MixedHandles: true}), func(e *end) { e.fixed = true }, ReasonNone},
		{"fixed in version two", Options{RecvInv: true}, func(e *end) { e.fixed = true }, ReasonNone},
		// More segments than a header may have, and too many for a Send.
		{"shreds", Options{}, func(e *end) { e.segment = 100 }, ReasonRegister},
		{"scraps", one(Options{Silent: true}), func(e *end) { e.segment = 400 }, ReasonTooBig},
	} {
		w := up(t, tt.client, Options{})
		c := w.client()
		w.server().program = sizes(8)
		tt.prepare(c)
		c.step(Submit{ID: 1, Payload: rpc(20000)})
		w.run(time.Second)
		got := ReasonNone
		if err := c.result(1).Err; err != nil {
			got = err.Reason
		}
		expect.MustEqual(w, got, tt.want, "%s: why the call failed", tt.name)
		w.clean(tt.name)
		*c = end{Conn: c.Conn, w: w, name: c.name, peer: c.peer, mem: c.mem, regs: c.regs, posted: c.posted,
			size: c.size, queue: c.queue}
		c.step(Submit{ID: 2, Payload: rpc(10)}) // the connection is fine
		w.run(time.Second)
		if d := c.result(2); d.Err != nil {
			w.Fatalf("%s: afterwards %v", tt.name, d.Err)
		}
	}
}

// invalidationCases are the cases of TestInvalidation.
func invalidationCases() []invalidationCase {

	const yes = true

	return []invalidationCase{
		// V2-5.2.3-1, V2-5.2.3-6, V2-5.2.3-7, V2-3-2, V2-3-3
		{"version two", Options{RecvInv: yes}, Options{SendInv: yes}, false, Submit{Payload: rpc(20000)}, true, true},
		{"several handles", Options{RecvInv: yes}, Options{SendInv: yes}, false,
			Submit{Payload: rpc(20000), MaxReply: 9000, Results: []int{5000}}, true, true},
		// V2-5.2.3-4: copied although the responder cannot
		{"the responder cannot", Options{RecvInv: yes}, Options{}, false, Submit{Payload: rpc(20000)}, true, false},
		// V2-5.2.3-2, V2-5.2.3-5, V2-3-1
		{"the requester cannot", Options{}, Options{SendInv: yes}, false, Submit{Payload: rpc(20000)}, false, false},
		{"the memory must stay", Options{RecvInv: yes}, Options{SendInv: yes}, true, Submit{Payload: rpc(20000)},
			false, false},
		{"no memory", Options{RecvInv: yes}, Options{SendInv: yes}, false, Submit{Payload: rpc(20)}, false, false},
		// 8797-4.1-1, 8797-4.1-2, 8797-4-9: both R bits, and one handle
		{"version one", one(Options{RecvInv: yes}), one(Options{SendInv: yes}), false, Submit{Payload: rpc(20000)},
			false, true},
		{"version one, two handles", one(Options{RecvInv: yes}), one(Options{SendInv: yes}), false,
			Submit{Payload: rpc(20000), MaxReply: 9000}, false, false},
		// 8797-4.1-3, 8797-3.2-1: three combinations
		{"version one, no R from the server", one(Options{RecvInv: yes}), one(Options{}), false,
			Submit{Payload: rpc(20000)}, false, false},
		{"version one, no R from the client", one(Options{}), one(Options{SendInv: yes}), false,
			Submit{Payload: rpc(20000)}, false, false},
		{"version one, no R at all", one(Options{}), one(Options{}), false, Submit{Payload: rpc(20000)}, false, false},
		{"version one, a silent client", one(Options{RecvInv: yes, Silent: yes}), one(Options{SendInv: yes}), false,
			Submit{Payload: rpc(20000)}, false, false},
		{"version one, mixed memory", one(Options{RecvInv: yes, MixedHandles: yes}), one(Options{SendInv: yes}), true,
			Submit{Payload: rpc(20000)}, false, false},
	}
}

type invalidationCase struct {
	name           string
	client, server Options
	fixed          bool
	submit         Submit
	inv            bool // the call names a handle
	want           bool // and the reply invalidates one
}

// TestInvalidation: which handle a reply invalidates.
func TestInvalidation(t *testing.T) {
	for _, tt := range invalidationCases() {
		w := up(t, tt.client, tt.server)
		c, s := w.client(), w.server()
		c.fixed = tt.fixed
		s.program = sizes(8)
		tt.submit.ID = 1
		var released []uint32
		c.notify = func(a Action) {
			if r, ok := a.(Release); ok {
				released = append(released, r.Invalidated)
			}
		}
		c.step(tt.submit)
		w.run(time.Second)
		if d := c.result(1); d.Err != nil {
			w.Fatalf("%s: %v", tt.name, d.Err)
		}
		expect.MustEqual(w, w.violations, 0, "%s: violations", tt.name)
		call, _ := c.header(-1)
		reply, _ := s.header(-1)
		sent := s.sends[len(s.sends)-1]
		switch {
		case (call.InvHandle != 0) != tt.inv:
			w.Fatalf("%s: call.InvHandle != 0 is %v, want %v", tt.name, call.InvHandle != 0, tt.inv)
		case tt.inv && !call.HasHandle(call.InvHandle):
			w.Fatalf("%s: HasHandle(call.InvHandle) is false, want true", tt.name)
		case reply.InvHandle != call.InvHandle:
			w.Fatalf("%s: InvHandle is %v, want %v", tt.name, reply.InvHandle, call.InvHandle)
		}
		switch {
		case sent.WithInv != tt.want:
			w.Fatalf("%s: WithInv is %v, want %v", tt.name, sent.WithInv, tt.want)
		case tt.want && !call.HasHandle(sent.Invalidate):
			w.Fatalf("%s: HasHandle(sent.Invalidate) is false, want true", tt.name)
		}
		if tt.inv && tt.want {
			expect.MustEqual(w, sent.Invalidate, call.InvHandle, "%s: Invalidate", tt.name)
		}
		// The requester knows what it need not take back itself (8797-3.2-2).
		if tt.want {
			if !slices.Contains(released, sent.Invalidate) {
				w.Fatalf("%s: released %x, want %x among them", tt.name, released, sent.Invalidate)
			}
		} else if slices.Max(append(released, 0)) > 0 {
			w.Fatalf("%s: released %x as invalidated, want none", tt.name, released)
		}
	}
}

// TestInvalidationOfItsOwn: with two calls in flight each reply invalidates
// only what belongs to its own (8797-4.1-2).
func TestInvalidationOfItsOwn(t *testing.T) {
	for _, version := range []Version{1, 2} {
		w := up(t, Options{MaxVersion: version, RecvInv: true}, Options{MaxVersion: version, SendInv: true})
		c, s := w.client(), w.server()
		s.program = nil
		first := len(s.serves)
		c.step(Submit{ID: 1, Payload: rpc(20000)})
		c.step(Submit{ID: 2, Payload: rpc(30000)})
		w.run(time.Second)
		for i := len(s.serves) - 1; i >= first; i-- { // the other way round
			s.step(echo(Serve{ID: s.serves[i].ID, Payload: s.serves[i].Payload[:40]}))
		}
		w.run(time.Second)
		for i := range 2 {
			call, _ := c.header(1 + i)
			reply, _ := s.header(2 - i)
			inv := s.sends[2-i]
			expect.MustEqual(w, call.XID, reply.XID, "version %d: XID", version)
			expect.MustEqual(w, inv.WithInv, true, "version %d: WithInv", version)
			expect.MustEqual(w, call.HasHandle(inv.Invalidate), true, "version %d: HasHandle(inv.Invalidate)", version)
		}
		switch {
		case w.violations > 0:
			w.Fatalf("violations is %v, want 0", w.violations)
		case c.exposed() > 0:
			w.Fatalf("exposed is %v, want 0", c.exposed())
		case c.Counters()[ReasonWrongInv] > 0:
			w.Fatalf("Counters()[ReasonWrongInv] is %v, want 0", c.Counters()[ReasonWrongInv])
		}
	}
}

// TestWrongInvalidation: a peer that invalidates something else. Only what the
// completion says counts.
func TestWrongInvalidation(t *testing.T) {
	w := up(t, Options{RecvInv: true}, Options{})
	c, s := w.client(), w.server()
	s.program = nil
	c.step(Submit{ID: 1, Payload: rpc(20000)})
	c.step(Submit{ID: 2, Payload: rpc(30000)})
	w.run(time.Second)
	one, _ := c.header(1)
	two, _ := c.header(2)
	var released []Release
	c.notify = func(a Action) {
		if r, ok := a.(Release); ok {
			released = append(released, r)
		}
	}
	answer := func(xid XID, says, does uint32) {
		h := Header{XID: xid, Vers: 2, Credit: 32, Direction: DirReply, InvHandle: says}
		b, _ := h.AppendBinary(nil)
		c.step(Recv{Data: append(b, (&RPCReply{XID: xid}).Append(nil)...), WithInv: does != 0, Invalidated: does})
	}
	answer(one.XID, 0x99, two.InvHandle) // the other call's
	answer(two.XID, two.InvHandle, 0x77) // nobody's
	d := c.result(1)
	expect.MustEqual(w, d.Err, nil, "Err")
	expect.MustEqual(w, len(released), 2, "length of released")
	expect.MustEqual(w, released[0].Invalidated, 0, "Invalidated")
	expect.MustEqual(w, released[1].Invalidated, two.InvHandle, "Invalidated")
	if n := c.Counters()[ReasonWrongInv]; n != 3 {
		w.Fatalf("counted %d", n)
	}
}

// TestBogusInvalidationHandle: a handle that the call does not have is copied,
// counted and not used (V2-5.2.3-4, V2-5.2.3-7).
func TestBogusInvalidationHandle(t *testing.T) {
	w := up(t, Options{}, Options{SendInv: true})
	s := w.server()
	in := message(Header{Vers: 2, InvHandle: 5, Reply: Chunk{{5, 5000, 64}}}, (&RPCCall{XID: 7}).Append(nil)...)
	copy(in[20:], words(6))
	s.step(Recv{Data: in})
	h, _ := s.header(-1)
	last := s.sends[len(s.sends)-1]
	expect.MustEqual(w, last.WithInv, false, "WithInv")
	expect.MustEqual(w, h.InvHandle, 6, "InvHandle")
	expect.MustEqual(w, h.XID, 7, "XID")
	expect.MustEqual(w, s.Counters()[ReasonInvHandle], 1, "Counters()[ReasonInvHandle]")
}
