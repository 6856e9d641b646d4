package rpcrdma

import (
	"testing"
	"time"

	"ipoibcm/internal/expect"
)

// flight is how many calls an end has unanswered, those given up included.
func (e *end) flight() (n int) {
	for _, k := range e.calls {
		if k.state != callQueued {
			n++
		}
	}
	return n + len(e.abandoned)
}

// TestCredits: never more calls than the less of what was asked and granted.
func TestCredits(t *testing.T) {
	for _, tt := range []struct {
		name        string
		ask, grant  int
		most        int
		wantGranted int
	}{
		// V2-R1-1, V2-R1-3
		{"the responder has fewer", 10, 3, 3, 3},
		{"the requester has fewer", 4, 16, 4, 16},
		{"one", 8, 1, 1, 1},
	} {
		for _, version := range []Version{1, 2} {
			w := up(t, Options{MaxVersion: version, Ask: tt.ask}, Options{MaxVersion: version, Grant: tt.grant})
			c, s := w.client(), w.server()
			s.program = nil
			most := 0
			for i := range 20 {
				c.step(Submit{ID: uint64(i), Payload: rpc(i)})
			}
			for {
				w.run(time.Second)
				if len(c.done) == 20 {
					break
				}
				most = max(most, c.flight(), len(s.served))
				if c.flight() == 0 {
					w.Fatalf("%s: nothing moves", tt.name)
				}
				s.step(echo(s.serves[len(c.done)+1]))
			}
			switch {
			case most != tt.most:
				w.Fatalf("%s: most is %v, want %v", tt.name, most, tt.most)
			case c.granted != tt.wantGranted:
				w.Fatalf("%s: granted is %v, want %v", tt.name, c.granted, tt.wantGranted)
			case w.violations > 0:
				w.Fatalf("%s: violations is %v, want 0", tt.name, w.violations)
			case s.Counters()[ReasonOverrun] > 0:
				w.Fatalf("%s: Counters()[ReasonOverrun] is %v, want 0", tt.name, s.Counters()[ReasonOverrun])
			}
			for i, d := range c.done { // in their order
				if d.ID != uint64(i) || d.Err != nil {
					w.Fatalf("%s: %+v", tt.name, d)
				}
			}
		}
	}
}

// TestGrantChanges: what the responder grants counts from the next reply on.
func TestGrantChanges(t *testing.T) {
	w := up(t, Options{Ask: 8, CallTimeout: time.Hour}, Options{Grant: 8})
	c, s := w.client(), w.server()
	s.program = nil
	for i := range 60 {
		c.step(Submit{ID: uint64(i), Payload: rpc(0)})
	}
	w.run(time.Second)
	for _, tt := range []struct{ grant, want int }{{3, 3}, {0, 1}, {99, 8}, {2, 2}} { // V2-R1-2: zero is never granted
		s.step(SetGrant{tt.grant})
		for range 8 { // those under way may be more
			if len(s.served) > 0 {
				s.step(echo(Serve{ID: s.served[0].id, Payload: rpc(0)}))
			}
			w.run(time.Second)
		}
		if c.flight() != tt.want || c.granted != tt.want {
			w.Fatalf("granted %d: %d in flight, want %d", tt.grant, c.flight(), tt.want)
		}
		if h, _ := s.header(-1); h.Credit != uint32(tt.want) {
			w.Fatalf("%v", &h)
		}
	}
}

// TestOverrun: a requester that does not count.
func TestOverrun(t *testing.T) {
	w := up(t, Options{}, Options{Grant: 2})
	s := w.server()
	for i, want := range []int{1, 1, 0, 0} {
		h := Header{XID: XID(i), Vers: 2, Credit: 9}
		b, _ := h.AppendBinary(nil)
		_, calls, _ := s.hear(append(b, (&RPCCall{XID: XID(i)}).Append(nil)...))
		if calls != want {
			w.Fatalf("call %d: served %d", i, calls)
		}
	}
	if n := s.Counters()[ReasonOverrun]; n != 2 {
		w.Fatalf("counted %d", n)
	}
}

// TestTimeouts: a call that is given up keeps its credit until its answer comes,
// and when all are lost the connection is.
func TestTimeouts(t *testing.T) {
	w := up(t, Options{CallTimeout: 10 * time.Second}, Options{Grant: 2})
	c, s := w.client(), w.server()
	s.program = nil
	c.step(Submit{ID: 1, Payload: rpc(0)})
	c.step(Submit{ID: 2, Payload: rpc(0), Timeout: time.Minute})
	c.step(Submit{ID: 3, Payload: rpc(0)}) // waits
	w.run(9 * time.Second)
	if len(c.done) != 0 {
		w.Fatalf("early")
	}
	w.run(2 * time.Second)
	for _, id := range []uint64{1, 3} {
		if d := c.result(id); d.Err == nil || d.Err.Reason != ReasonTimeout {
			w.Fatalf("%+v", d)
		}
	}
	c.step(Submit{ID: 4, Payload: rpc(0), Timeout: time.Minute})
	w.run(time.Second)
	if c.flight() != 2 {
		w.Fatalf("%d in flight", c.flight())
	}
	s.step(echo(s.serves[1])) // the answer to 1, late
	w.run(time.Second)
	expect.MustEqual(w, c.flight(), 2, "flight")
	expect.MustEqual(w, len(c.abandoned), 0, "length of abandoned")
	expect.MustEqual(w, len(c.done), 2, "length of done")
	expect.MustEqual(w, c.Counters()[ReasonStray], 1, "Counters()[ReasonStray]")
	c.step(Cancel{2})
	switch d := c.result(2); {
	case d.Err == nil:
		w.Fatalf("Err is nil")
	case d.Err.Reason != ReasonCancelled:
		w.Fatalf("Err.Reason is %v, want %v", d.Err.Reason, ReasonCancelled)
	case c.closed != nil:
		w.Fatalf("closed is %v, want nil", c.closed)
	}
	c.step(Cancel{4})
	switch {
	case c.closed == nil:
		w.Fatalf("closed: closed is nil")
	case c.closed.Reason != ReasonStarved:
		w.Fatalf("closed: Reason is %v, want %v", c.closed.Reason, ReasonStarved)
	case !c.Deadline().IsZero():
		w.Fatalf("closed: Deadline.IsZero is false, want true")
	}
	// Nothing can be done with it any more.
	answer, calls, reason := c.hear(unhex(vecNullCall2))
	expect.MustEqual(w, answer, "", "answer")
	expect.MustEqual(w, calls, 0, "calls")
	expect.MustEqual(w, reason, ReasonNone, "reason")
	c.step(Submit{ID: 5, Payload: rpc(0)})
	if d := c.result(5); d.Err == nil || d.Err.Reason != ReasonDisconnected {
		w.Fatalf("%+v", d)
	}
}

// TestSlowFirstCall: a user's first call in version one may take its time; there
// is nothing to fall back to.
func TestSlowFirstCall(t *testing.T) {
	w := pair(t, one(Options{}), Options{}).connect()
	w.server().program = nil
	w.client().step(Submit{ID: 1, Payload: rpc(0)})
	w.run(20 * time.Second)
	w.server().step(echo(w.server().serves[0]))
	w.run(time.Second)
	if d := w.client().result(1); d.Err != nil {
		w.Fatalf("%v", d.Err)
	}
}

// TestSubmit: what cannot be asked for.
func TestSubmit(t *testing.T) {
	for _, tt := range []struct {
		name string
		s    Submit
		want Reason
	}{
		{"no call", Submit{Payload: []byte("abc")}, ReasonArgument},
		{"a reply", Submit{Payload: (&RPCReply{}).Append(nil)}, ReasonArgument},
		{"items out of order", Submit{Payload: rpc(100), Reduce: []Span{{80, 4}, {60, 4}}}, ReasonArgument},
		{"an item that is not aligned", Submit{Payload: rpc(100), Reduce: []Span{{42, 4}}}, ReasonArgument},
		{"an item beyond the end", Submit{Payload: rpc(100), Reduce: []Span{{136, 8}}}, ReasonArgument},
		{"the XID as an item", Submit{Payload: rpc(100), Reduce: []Span{{0, 8}}}, ReasonArgument},
		{"too long a call", Submit{Payload: rpc(1 << 20)}, ReasonTooBig},
		{"too long a reply", Submit{Payload: rpc(0), MaxReply: 1<<20 + 1}, ReasonTooBig},
		{"a result of nothing", Submit{Payload: rpc(0), Results: []int{0}}, ReasonTooBig},
		{"too long together", Submit{Payload: rpc(0), MaxReply: 1 << 19, Results: []int{1<<19 + 1}}, ReasonTooBig},
		{"too many results", Submit{Payload: rpc(0), Results: make([]int, 65)}, ReasonTooBig},
		{"an option with a result", Submit{Option: &Option{}, Results: []int{1}}, ReasonArgument},
	} {
		w := up(t, Options{}, Options{})
		c := w.client()
		tt.s.ID = 1
		c.step(tt.s)
		switch d := c.result(1); {
		case d.Err == nil:
			w.Fatalf("%s: Err is nil", tt.name)
		case d.Err.Reason != tt.want:
			w.Fatalf("%s: Err.Reason is %v, want %v", tt.name, d.Err.Reason, tt.want)
		case c.Counters()[tt.want] != 1:
			w.Fatalf("%s: Counters()[tt.want] is %v, want 1", tt.name, c.Counters()[tt.want])
		}
	}
	// V2-6-4: the first message is small, whatever has to be sent.
	for _, n := range []int{DefaultInline1 - 36 - 40, DefaultInline1 - 36 - 40 + 4} {
		w := pair(t, Options{}, Options{}).connect()
		c := w.client()
		w.server().program = sizes(8)
		c.step(Submit{ID: 1, Payload: rpc(n)})
		w.run(time.Second)
		if d := c.result(1); d.Err != nil || len(c.sends[0].Data) > DefaultInline1 {
			w.Fatalf("%v, %d octets", d.Err, len(c.sends[0].Data))
		}
		if h, _ := c.header(0); (h.Proc == ProcNOMSG) != (n > 948) {
			w.Fatalf("%v", &h)
		}
	}
	// The bound on calls.
	w := up(t, Options{MaxCalls: 3}, Options{})
	w.server().program = nil
	for i := range 5 {
		w.client().step(Submit{ID: uint64(i), Payload: rpc(0)})
	}
	if len(w.client().done) != 2 || w.client().done[0].Err.Reason != ReasonTooMany {
		w.Fatalf("%+v", w.client().done)
	}
}

// TestFirstReply: it is no larger than 1024 octets, and those behind it are
// (section 6.1).
func TestFirstReply(t *testing.T) {
	w := pair(t, Options{}, Options{}).connect()
	c, s := w.client(), w.server()
	s.program = sizes(1500)
	c.step(Submit{ID: 1, Payload: rpc(0), MaxReply: 2000})
	w.run(time.Second)
	c.step(Submit{ID: 2, Payload: rpc(0), MaxReply: 2000})
	w.run(time.Second)
	first, _ := s.header(0)
	second, _ := s.header(1)
	expect.MustEqual(w, first.Proc, ProcNOMSG, "Proc")
	expect.MustEqual(w, second.Proc, ProcMSG, "Proc")
	expect.MustEqual(w, second.Reply == nil, true, "Reply == nil")
	expect.MustEqual(w, c.result(1).Err, nil, "Err")
	expect.MustEqual(w, c.result(2).Err, nil, "Err")
	// V2-6.2-6, V2-2.3-1: the buffers are large enough from the start.
	for _, o := range []Options{{}, {Client: true}, {Silent: true}, {SendSize: 1024, RecvSize: 1024}} {
		c, err := NewConn(o)
		if err != nil {
			t.Fatal(err)
		}
		if n, size := c.RecvBuffers(); size < DefaultInline2 || n != 35 {
			t.Errorf("%+v: %d buffers of %d", o, n, size)
		}
	}
}

// TestBackward: calls of the server to the client.
func TestBackward(t *testing.T) {
	for _, version := range []Version{1, 2} {
		o := Options{MaxVersion: version, RecvInv: true, SendInv: true}
		w := pair(t, o, o)
		c, s := w.client(), w.server()
		// V2-R1-17, V2-R1-19: not before the version is settled and the program of
		// the client is ready
		s.step(Submit{ID: 1, Payload: rpc(0)})
		w.connect()
		s.step(PeerReady{})
		s.step(Submit{ID: 2, Payload: rpc(0)})
		s.program = nil
		c.step(Submit{ID: 1, Payload: rpc(0)})
		w.run(time.Second)
		s.step(Submit{ID: 3, Payload: rpc(0)}) // the client has not heard of the version
		s.step(echo(s.serves[0]))
		w.run(time.Second)
		for _, id := range []uint64{1, 2, 3} {
			if d := s.result(id); d.Err == nil || d.Err.Reason != ReasonNotReady {
				w.Fatalf("%+v", d)
			}
		}
		// V2-4.2-1, V2-R1-15: XIDs and credits of their own, the same ones even
		s.nextXID = c.nextXID
		s.program, c.program = nil, nil
		c.step(Submit{ID: 10, Payload: rpc(10)})
		for i := range 3 {
			s.step(Submit{ID: uint64(20 + i), Payload: rpc(20 + i)})
		}
		w.run(time.Second)
		if c.flight() != 1 || s.flight() != 1 { // the client has not granted yet
			w.Fatalf("%d and %d in flight", c.flight(), s.flight())
		}
		fh, _ := c.header(-1)
		bh, _ := s.header(-1)
		switch { // V2-R1-17
		case fh.XID != bh.XID:
			w.Fatalf("XID is %v, want %v", fh.XID, bh.XID)
		case bh.Vers != version:
			w.Fatalf("Vers is %v, want %v", bh.Vers, version)
		case bh.Credit != 2:
			w.Fatalf("Credit is %v, want 2", bh.Credit)
		case fh.Credit != 32:
			w.Fatalf("Credit is %v, want 32", fh.Credit)
		case version == 2 && bh.Direction != DirCall:
			w.Fatalf("Direction is %v, want %v", bh.Direction, DirCall)
		}
		c.program = sizes(8)
		c.step(sizes(8)(c.serves[0]))
		w.run(time.Second)
		s.step(echo(s.serves[len(s.serves)-1]))
		w.run(time.Second)
		if s.granted != 2 || c.granted != 32 {
			w.Fatalf("granted %d and %d", s.granted, c.granted)
		}
		for _, id := range []uint64{20, 21, 22} {
			if d := s.result(id); d.Err != nil { // V2-5.2.2-1
				w.Fatalf("%+v", d)
			}
		}
		if d := c.result(10); d.Err != nil {
			w.Fatalf("%+v", d)
		}

		backwardChunk(w, version)
		if w.violations > 0 {
			w.Fatalf("%d violations", w.violations)
		}
	}
}

// backwardChunk has the server call with a chunk.
func backwardChunk(w *fabric, version Version) {
	c, s := w.client(), w.server()
	// Chunks, and what a reply invalidates: V2-3.1-1, V2-3.1-2
	s.step(Submit{ID: 30, Payload: rpc(20000), MaxReply: 100})
	w.run(time.Second)
	switch d := s.result(30); version {
	case 1: // V2-R1-18: a peer need not take them
		if d.Err == nil || d.Err.Reason != ReasonTooBig {
			w.Fatalf("%+v", d)
		}
	case 2:
		sent := c.sends[len(c.sends)-1]
		expect.MustEqual(w, d.Err, nil, "Err")
		expect.MustEqual(w, sent.WithInv, true, "WithInv")
		if s.exposed() > 0 {
			w.Fatalf("exposed is %v, want 0", s.exposed())
		}
	}
}

// TestBackwardThreshold: a backward call may be as large as a forward reply, and
// the other way round (V2-R1-16).
func TestBackwardThreshold(t *testing.T) {
	for _, tt := range []struct {
		server      Options
		head        int
		call, reply int
	}{
		{one(Options{SendSize: 2048, RecvSize: 3072}), 28, 2048, 3072},
		{Options{}, 36, 4096, 4096},
	} {
		for _, over := range []int{0, 4} {
			w := up(t, Options{}, tt.server)
			c, s := w.client(), w.server()
			s.step(PeerReady{})
			c.program = sizes(tt.reply - tt.head - 24)
			s.step(Submit{ID: 1, Payload: rpc(tt.call - tt.head - 40 + over), MaxReply: tt.reply - tt.head})
			w.run(time.Second)
			d := s.result(1)
			if over == 0 && (d.Err != nil || len(d.Payload) != tt.reply-tt.head ||
				len(s.sends[len(s.sends)-1].Data) != tt.call) {
				w.Fatalf("%+v: %v", tt.server, d.Err)
			}
			if h, _ := s.header(-1); over > 0 && (d.Err == nil) != (h.Proc == ProcNOMSG) {
				w.Fatalf("%+v: %v, %v", tt.server, d.Err, &h)
			}
			if over > 0 && tt.head == 28 && d.Err.Reason != ReasonTooBig {
				w.Fatalf("%+v: %v", tt.server, d.Err)
			}
		}
	}
}

// TestIdle: nobody ends a connection that is idle, for the peer may call (V2-R1-20).
func TestIdle(t *testing.T) {
	w := up(t, Options{}, Options{})
	w.server().step(PeerReady{})
	w.run(24 * time.Hour)
	if !w.client().Deadline().IsZero() || w.down {
		w.Fatalf("deadline %v", w.client().Deadline())
	}
	w.server().step(Submit{ID: 1, Payload: rpc(0)})
	w.run(time.Second)
	if d := w.server().result(1); d.Err != nil {
		w.Fatalf("%v", d.Err)
	}
}

// TestBackwardChunks: V2-R1-18, a version one client without them, and with.
func TestBackwardChunks(t *testing.T) {
	null := (&RPCCall{XID: 7, Prog: 1}).Append(nil)
	in := message(Header{Vers: 1, Credit: 1, Reply: Chunk{{1, 5000, 0}}}, null...)
	for _, tt := range []struct {
		o      Options
		want   string
		reason Reason
		calls  int
	}{
		{Options{}, "v1 ERROR xid=00000007 credit=2 BAD_XDR", ReasonBackward, 0},
		{Options{BackwardChunks: true}, "", ReasonNone, 1},
		{Options{Grant: -1}, "", ReasonBackward, 0},
	} {
		w := up(t, tt.o, one(Options{}))
		got, calls, reason := w.client().hear(in)
		expect.MustEqual(w, got, tt.want, "%+v: got", tt.o)
		expect.MustEqual(w, calls, tt.calls, "%+v: calls", tt.o)
		expect.MustEqual(w, reason, tt.reason, "%+v: reason", tt.o)
	}
	// What a client cannot tell from a reply it does not answer (V2-R1-8).
	w := up(t, Options{}, one(Options{}))
	for _, in := range [][]byte{words(7, 1, 1, 0, 1, 0, 0), words(7, 1, 1, 1, 0, 0, 0),
		words(7, 1, 1, 2, 0, 0, 0, 0, 0), words(7, 1, 1, 9, 0, 0, 0)} {
		switch got, calls, reason := w.client().hear(in); {
		case got != "":
			w.Fatalf("%x: got is %q, want \"\"", in, got)
		case calls != 0:
			w.Fatalf("%x: calls is %v, want 0", in, calls)
		case reason == ReasonNone:
			w.Fatalf("%x: no reason, want one", in)
		}
	}
}

// TestDisconnect: whatever is under way ends, and all memory is taken back.
func TestDisconnect(t *testing.T) {
	w := up(t, Options{}, Options{})
	c, s := w.client(), w.server()
	s.program = nil
	c.step(Submit{ID: 1, Payload: rpc(20000), MaxReply: 9000})
	c.step(Submit{ID: 2, Payload: rpc(20)})
	w.run(time.Second)
	w.cut(s)
	for _, id := range []uint64{1, 2} {
		if d := c.result(id); d.Err == nil || d.Err.Reason != ReasonDisconnected {
			w.Fatalf("%+v", d)
		}
	}
	if len(c.learned) != 1 { // only that version two works: it was settled
		w.Fatalf("%+v", c.learned)
	}
	s.step(echo(Serve{ID: 2, Payload: rpc(0)})) // too late, and no fault
	c.step(Registered{Reg: 99, Buf: []byte{1}})
	if len(s.served) > 0 {
		w.Fatalf("%d served", len(s.served))
	}
	n := 0
	c.Counters().Each(func(name string, value uint64) {
		if name == "disconnected" {
			n += int(value)
		}
	})
	if n != 1 {
		w.Fatalf("counted %d", n)
	}
}
