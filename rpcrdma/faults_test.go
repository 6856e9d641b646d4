package rpcrdma

import (
	"testing"
	"time"

	"ipoibcm/internal/expect"
)

// said gives an end a message and returns what it sends because of it, the
// number of calls that its program got, and the reason that was counted.
func (e *end) hear(data []byte) (answer string, calls int, reason Reason) {
	before, sent, served := *e.Counters(), len(e.sends), len(e.serves)
	e.program = nil
	e.step(Recv{Data: data})
	for _, s := range e.sends[sent:] {
		h, _, _ := ParseHeader(s.Data)
		answer += h.String()
		if s.WithInv {
			answer += " invalidating" // never: an error matches no call
		}
	}
	for r := range before {
		if before[r] != e.Counters()[r] {
			reason = Reason(r)
		}
	}
	return answer, len(e.serves) - served, reason
}

// message is a header with a payload behind it, whatever sense that makes.
func message(h Header, payload ...byte) []byte {
	h.XID = 7
	b, err := h.AppendBinary(nil)
	if err != nil {
		panic(err)
	}
	return append(b, payload...)
}

type responderCase struct {
	name   string
	in     []byte
	want   string // "" for silence
	reason Reason
	calls  int
}

// What those of responderCases send and hear.
var (
	e2, e1      = "v2 ERROR xid=00000007 credit=32 ", "v1 ERROR xid=00000007 credit=32 "
	nullCall    = (&RPCCall{XID: 7, Prog: 1}).Append(nil)
	otherCall   = (&RPCCall{XID: 8, Prog: 1}).Append(nil)
	nullReply   = (&RPCReply{XID: 7}).Append(nil)
	someSegment = Segment{0xa, 64, 0x1000}
	longCall    = []ReadSegment{{0, someSegment}}
)

// responderCases are the cases of TestAnswersOfResponder.
var responderCases = []responderCase{
	{"a good call", message(Header{Vers: 2, Credit: 1}, nullCall...), "", ReasonNone, 1},
	// V2-R1-7
	{"15 octets", words(7, 2, 1, 0)[:15], "", ReasonShort, 0},
	{"version one, 20 octets", words(7, 1, 1, 0, 0), "", ReasonShort, 0},
	// V2-5.2.4-3, V2-6.2-1, V2-5.2.4-2: the version is copied
	{"version 0", words(7, 0, 1, 0), "v0 ERROR xid=00000007 credit=32 VERS 1-2", ReasonVersion, 0},
	{"version 3", words(7, 3, 1, 0), "v3 ERROR xid=00000007 credit=32 VERS 1-2", ReasonVersion, 0},
	{"version 0xffffffff, unknown procedure", words(7, 0xffffffff, 1, 99),
		"v4294967295 ERROR xid=00000007 credit=32 VERS 1-2", ReasonVersion, 0},
	// V2-5.2.4-4
	{"procedure 2", words(7, 2, 1, 2), e2 + "INVAL_PROC", ReasonProc, 0},
	{"procedure 3", words(7, 2, 1, 3), e2 + "INVAL_PROC", ReasonProc, 0},
	{"procedure 6", words(7, 2, 1, 6), e2 + "INVAL_PROC", ReasonProc, 0},
	{"procedure 0xffffffff", words(7, 2, 1, 0xffffffff), e2 + "INVAL_PROC", ReasonProc, 0},
	// V2-5.2.4-5, V2-R1-8, V2-5.2.1-1
	{"no lists", words(7, 2, 1, 0, 0, 0), e2 + "BAD_XDR", ReasonTruncated, 0},
	{"direction 2", words(7, 2, 1, 0, 2, 0, 0, 0, 0), e2 + "BAD_XDR", ReasonEnum, 0},
	{"a chunk of 2^32-1 segments", words(7, 2, 1, 0, 0, 0, 0, 1, 0xffffffff), e2 + "BAD_XDR", ReasonBound, 0},
	{"a header alone", message(Header{Vers: 2}), e2 + "BAD_XDR", ReasonNoPayload, 0},
	{"octets behind NOMSG", message(Header{Vers: 2, Proc: ProcNOMSG, Reads: longCall}, 0, 0, 0, 0), e2 + "BAD_XDR",
		ReasonExtra, 0},
	{"NOMSG without chunks", message(Header{Vers: 2, Proc: ProcNOMSG}), e2 + "BAD_XDR", ReasonNoChunks, 0},
	{"NOMSG with nothing to read", message(Header{Vers: 2, Proc: ProcNOMSG, Reply: Chunk{someSegment}}), e2 + "BAD_XDR",
		ReasonNoChunks, 0},
	// V2-R1-5
	{"another XID in the payload", message(Header{Vers: 2}, otherCall...), e2 + "BAD_XDR", ReasonXID, 0},
	// V2-5.2.2-2
	{"a reply behind direction CALL", message(Header{Vers: 2}, nullReply...), e2 + "BAD_XDR", ReasonDirection, 0},
	// V2-R1-11
	{"position zero beside a payload", message(Header{Vers: 2, Reads: longCall}, nullCall...), e2 + "BAD_XDR",
		ReasonReadList, 0},
	{"a position behind the end", message(Header{Vers: 2, Reads: []ReadSegment{{44, someSegment}}}, nullCall...),
		e2 + "BAD_XDR", ReasonReadList, 0},
	{"items that overlap", message(Header{Vers: 2, Reads: []ReadSegment{{8, someSegment}, {12, someSegment}}},
		nullCall...),
		e2 + "BAD_XDR", ReasonReadList, 0},
	{"more to read than is taken", message(Header{Vers: 2, Proc: ProcNOMSG,
		Reads: []ReadSegment{{0, Segment{1, 1 << 30, 0}}}}), e2 + "BAD_XDR", ReasonBound, 0},
	{"memory that wraps", message(Header{Vers: 2, Proc: ProcNOMSG,
		Reads: []ReadSegment{{0, Segment{1, 64, 1<<64 - 32}}}}), e2 + "BAD_XDR", ReasonBound, 0},
	{"memory for results that wraps", message(Header{Vers: 2, Writes: []Chunk{{{1, 64, 1<<64 - 32}}}}, nullCall...),
		e2 + "BAD_XDR", ReasonBound, 0},
	// V2-5.2.4-11, V2-4.1-3
	{"an option", message(Header{Vers: 2, Proc: ProcOPTIONAL, OptType: 1}), e2 + "INVAL_OPTION", ReasonOption, 0},
	{"an option with a payload", message(Header{Vers: 2, Proc: ProcOPTIONAL, OptType: 1}, nullCall...),
		e2 + "INVAL_OPTION", ReasonOption, 0},
	{"an option in a reply", message(Header{Vers: 2, Proc: ProcOPTIONAL, OptType: 1, Direction: DirReply}),
		e2 + "INVAL_OPTION", ReasonOption, 0},
	{"an option without end", words(7, 2, 1, 5, 0, 1, 99), e2 + "BAD_XDR", ReasonTruncated, 0},
	// V2-R1-8: replies are not answered
	{"a reply that cannot be read", words(7, 2, 1, 0, 1, 0), "", ReasonTruncated, 0},
	{"a reply to nothing", message(Header{Vers: 2, Direction: DirReply}, nullReply...), "", ReasonStray, 0},
	{"an option without end, in a reply", words(7, 2, 1, 5, 1, 1, 99), "", ReasonTruncated, 0},
	// V2-5.2.4-12, V2-R1-6: no error answers an error
	{"an error", unhex(vecBadXDR), "", ReasonStray, 0},
	{"an error of version 3", words(7, 3, 1, 4, 2), "", ReasonVersion, 0},
	{"an error that cannot be read", words(7, 2, 1, 4, 9), "", ReasonEnum, 0},
	{"an error without end", words(7, 2, 1, 4), "", ReasonTruncated, 0},
	// V2-R1-9, V2-R1-10: version one
	{"version one, procedure 9", words(7, 1, 1, 9, 0, 0, 0), e1 + "BAD_XDR", ReasonProc, 0},
	{"version one, no lists", words(7, 1, 1, 0, 1, 0, 0), e1 + "BAD_XDR", ReasonTruncated, 0},
	{"version one, MSGP", words(7, 1, 1, 2, 0, 0, 0, 0, 0), e1 + "BAD_XDR", ReasonNeverSent, 0},
	{"version one, DONE", words(7, 1, 1, 3), "", ReasonNeverSent, 0},
	{"version one, NOMSG without chunks", words(7, 1, 1, 1, 0, 0, 0), e1 + "BAD_XDR", ReasonDirection, 0},
	{"version one, another XID", message(Header{Vers: 1}, otherCall...), e1 + "BAD_XDR", ReasonXID, 0},
	{"version one, no payload", message(Header{Vers: 1}), e1 + "BAD_XDR", ReasonDirection, 0},
	{"version one, msg_type 2", message(Header{Vers: 1}, words(7, 2, 2)...), e1 + "BAD_XDR", ReasonDirection, 0},
	// V2-6.3-1: a good call of the other version is served
	{"version one", message(Header{Vers: 1, Credit: 1}, nullCall...), "", ReasonNone, 1},
}

// TestAnswersOfResponder: every fault of a call, and what answers it. Nothing of
// it reaches the program. V2-5.2.4-1: as in version one, with more codes.
func TestAnswersOfResponder(t *testing.T) {
	for _, tt := range responderCases {
		w := up(t, Options{}, Options{SendInv: true})
		got, calls, reason := w.server().hear(tt.in)
		expect.Equal(t, got, tt.want, "%s: got", tt.name)
		expect.Equal(t, reason, tt.reason, "%s: reason", tt.name)
		expect.Equal(t, calls, tt.calls, "%s: calls", tt.name)
	}
}

// TestTruncatedCalls: V2-5.2.4-5, a call cut at every octet reaches no program.
func TestTruncatedCalls(t *testing.T) {
	whole := unhex(vecChunks)
	for n := range whole {
		w := up(t, Options{}, Options{})
		got, calls, _ := w.server().hear(whole[:n])
		want := ""
		if n >= MinHeaderLen {
			want = "v2 ERROR xid=11223344 credit=32 BAD_XDR"
		}
		if got != want || calls != 0 {
			t.Errorf("%d octets: answered %q, %d calls", n, got, calls)
		}
	}
}

// badReplies are the cases of TestBadReplies.
var badReplies = []struct {
	name   string
	change func(h *Header, payload []byte) []byte // of a good reply that uses the Write chunk
	reason Reason
	ends   bool // the call, with that reason
}{
	{"good", func(*Header, []byte) []byte { return nil }, ReasonNone, true},
	// V2-R1-12, V2-5.2.2-2, V2-R1-5
	{"a Read list", func(h *Header, _ []byte) []byte {
		h.Reads = []ReadSegment{{0, Segment{1, 2, 3}}}
		return nil
	}, ReasonReadList, false},
	{"a call behind direction REPLY", func(_ *Header, p []byte) []byte {
		copy(p[4:], words(0))
		return nil
	}, ReasonDirection, false},
	{"another XID in the payload", func(_ *Header, p []byte) []byte { p[3]++; return nil }, ReasonXID, false},
	{"no payload", func(h *Header, _ []byte) []byte { b, _ := h.AppendBinary(nil); return b }, ReasonNoPayload, false},
	{"NOMSG without Reply chunk", func(h *Header, _ []byte) []byte {
		h.Proc, h.Reply = ProcNOMSG, nil
		b, _ := h.AppendBinary(nil)
		return b
	}, ReasonNoChunks, false},
	{"version one", func(h *Header, p []byte) []byte {
		h.Vers, h.Direction, h.InvHandle = 1, 0, 0
		return nil
	}, ReasonWrongVers, false},
	{"another XID", func(h *Header, p []byte) []byte { h.XID++; p[3]++; return nil }, ReasonStray, false},
	{"cut", func(h *Header, _ []byte) []byte { b, _ := h.AppendBinary(nil); return b[:30] }, ReasonTruncated, false},
	{"procedure 3", func(h *Header, _ []byte) []byte { return words(uint32(h.XID), 2, 1, 3) }, ReasonProc, false},
	// What was written cannot be more than was offered, nor elsewhere.
	{"more than was offered", func(h *Header, _ []byte) []byte {
		h.Writes[0][0].Length++
		return nil
	}, ReasonBadReply, true},
	{"another handle", func(h *Header, _ []byte) []byte { h.Writes[0][0].Handle++; return nil }, ReasonBadReply, true},
	{"another offset", func(h *Header, _ []byte) []byte { h.Writes[0][0].Offset++; return nil }, ReasonBadReply, true},
	{"more segments", func(h *Header, _ []byte) []byte {
		h.Writes[0] = append(h.Writes[0], Segment{})
		return nil
	}, ReasonBadReply, true},
	{"more chunks", func(h *Header, _ []byte) []byte {
		h.Writes = append(h.Writes, Chunk{})
		return nil
	}, ReasonBadReply, true},
	{"a gap", func(h *Header, _ []byte) []byte { h.Writes[0][0].Length--; return nil }, ReasonBadReply, true},
	{"a Reply chunk of more", func(h *Header, _ []byte) []byte {
		h.Reply[0].Length = 0xffffffff
		return nil
	}, ReasonBadReply, true},
	{"NOMSG with nothing written", func(h *Header, _ []byte) []byte {
		h.Proc = ProcNOMSG
		b, _ := h.AppendBinary(nil)
		return b
	}, ReasonNoPayload, true},
	// V2-R1-2: taken as one
	{"no credits", func(h *Header, _ []byte) []byte { h.Credit = 0; return nil }, ReasonZeroCredits, true},
}

// TestBadReplies: a requester answers nothing, and its call goes on or ends.
func TestBadReplies(t *testing.T) {
	reply := func(xid XID) []byte { return (&RPCReply{XID: xid}).Append(nil) }
	for _, tt := range badReplies {
		w := up(t, Options{}, Options{})
		c := w.client()
		c.segment = 3000
		c.step(Submit{ID: 1, Payload: rpc(10), MaxReply: 9000, Results: []int{5000}})
		call, _ := c.header(-1)
		h := Header{XID: call.XID, Vers: 2, Credit: 9, Direction: DirReply, Writes: []Chunk{call.Writes[0]},
			Reply: call.Reply[:3]}
		h.Reply, _ = call.Reply.fill(0)
		h.Writes[0], _ = call.Writes[0].fill(5000)
		payload := reply(call.XID)
		in := tt.change(&h, payload)
		if in == nil {
			b, err := h.AppendBinary(nil)
			if err != nil {
				t.Fatalf("%s: %v", tt.name, err)
			}
			in = append(b, payload...)
		}
		answer, _, reason := c.hear(in)
		wantAnswer := ""
		if tt.reason == ReasonProc { // an unknown rdma_proc has no direction
			h := Header{XID: call.XID, Vers: 2, Credit: 2, Proc: ProcERROR, Error: TransportError{Code: ErrInvalProc}}
			wantAnswer = h.String()
		}
		if answer != wantAnswer || reason != tt.reason || len(c.done) > 0 != tt.ends {
			t.Errorf("%s: answered %q, counted %v, done %+v", tt.name, answer, reason, c.done)
			continue
		}
		if tt.ends {
			d := c.result(1)
			if lies := tt.reason == ReasonBadReply || tt.reason == ReasonNoPayload; lies != (d.Err != nil) {
				t.Errorf("%s: ended with %v", tt.name, d.Err)
			}
			if c.exposed() > 0 {
				t.Errorf("%s: memory stays exposed", tt.name)
			}
			if want := max(1, int(h.Credit)); c.granted != want {
				t.Errorf("%s: %d credits, want %d", tt.name, c.granted, want)
			}
			continue
		}
		w.run(2 * time.Second) // the good answer comes
		if d := c.result(1); d.Err != nil {
			t.Errorf("%s: the good answer does not count: %v", tt.name, d.Err)
		}
	}
}

// TestErrorsToRequester: each error ends its call, is told, and is not answered.
func TestErrorsToRequester(t *testing.T) {
	for _, te := range []TransportError{{Code: ErrBadXDR}, {Code: ErrInvalProc}, {Code: ErrInvalOption},
		{Code: ErrVers, Low: 3, High: 4},
		{Code: ErrCantReply, Processed: true, LengthNeeded: 9000}, {Code: ErrCantReply}} {
		w := up(t, Options{}, Options{})
		c := w.client()
		c.step(Submit{ID: 1, Payload: rpc(10)})
		call, _ := c.header(-1)
		h := Header{XID: call.XID, Vers: 2, Credit: 5, Proc: ProcERROR, Error: te}
		b, _ := h.AppendBinary(nil)
		answer, _, reason := c.hear(append(b, 1, 2, 3)) // what is behind it is not looked at
		d := c.result(1)
		switch { // V2-5.2.4-12
		case answer != "":
			w.Fatalf("%+v: answer is %q, want \"\"", te, answer)
		case reason != ReasonPeerError:
			w.Fatalf("%+v: reason is %v, want %v", te, reason, ReasonPeerError)
		case d.Err == nil:
			w.Fatalf("%+v: Err is nil", te)
		case d.Err.Reason != ReasonPeerError:
			w.Fatalf("%+v: Err.Reason is %v, want %v", te, d.Err.Reason, ReasonPeerError)
		case d.Transport != te:
			w.Fatalf("%+v: Transport is %v, want %v", te, d.Transport, te)
		}
		if c.granted != 5 { // section 6: "non-error"
			w.Fatalf("%d credits", c.granted)
		}
	}
}

// TestCantReply: replies that do not fit into what the call offers.
func TestCantReply(t *testing.T) {
	const ran, not = true, false
	for _, tt := range []struct {
		name    string
		segment int
		submit  Submit
		reply   int
		items   []Span
		before  int // the program says before it runs that it needs so much
		want    TransportError
		v1      bool // likewise in version one
	}{
		// V2-5.2.4-6, V2-5.2.4-7, V2-5.2.4-8, V2-5.2.4-9
		{"no Reply chunk", 0, Submit{}, 9000, nil, 0,
			TransportError{Code: ErrCantReply, Processed: ran, LengthNeeded: 9024}, true},
		{"too short a Reply chunk", 0, Submit{MaxReply: 5000}, 9000, nil, 0,
			TransportError{Code: ErrCantReply, Processed: ran, SegmentIndex: 1, LengthNeeded: 9024}, true},
		{"of five segments", 1000, Submit{MaxReply: 5000}, 9000, nil, 0,
			TransportError{Code: ErrCantReply, Processed: ran, SegmentIndex: 5, LengthNeeded: 5024}, true},
		{"behind a Write list", 1000, Submit{MaxReply: 5000, Results: []int{3000}}, 9000, nil, 0,
			TransportError{Code: ErrCantReply, Processed: ran, SegmentIndex: 8, LengthNeeded: 5024}, true},
		{"too short a Write chunk", 1000, Submit{MaxReply: 5000, Results: []int{1500, 2500}}, 9000,
			[]Span{{28, 1500}, {1528, 3000}}, 0,
			TransportError{Code: ErrCantReply, Processed: ran, SegmentIndex: 5, LengthNeeded: 1000}, true},
		{"known before", 0, Submit{MaxReply: 5000}, 0, nil, 9024,
			TransportError{Code: ErrCantReply, Processed: not, SegmentIndex: 1, LengthNeeded: 9024}, true},
		{"known before, no Reply chunk", 0, Submit{}, 0, nil, 9024,
			TransportError{Code: ErrCantReply, Processed: not, LengthNeeded: 9024}, true},
		{"known before, for another reason", 0, Submit{MaxReply: 10000}, 0, nil, 9024,
			TransportError{Code: ErrCantReply}, true},
	} {
		for _, version := range []Version{1, 2} {
			o := Options{MaxVersion: version, MaxRetries: -1, SendInv: true, RecvInv: true}
			w := up(t, o, o)
			c, s := w.client(), w.server()
			c.segment = tt.segment
			s.program = sizes(tt.reply, tt.items...)
			if tt.before > 0 {
				s.program = func(a Serve) Event { return CannotAnswer{a.ID, tt.before} }
			}
			tt.submit.ID, tt.submit.Payload = 1, rpc(10)
			c.step(tt.submit)
			w.run(time.Second)
			want := tt.want
			if version == 1 {
				want = TransportError{Code: ErrChunk} // V2-R1-9
			}
			if d := c.result(1); d.Transport != want {
				w.Fatalf("version %d, %s: %+v, want %+v", version, tt.name, d.Transport, want)
			}
			switch last := s.sends[len(s.sends)-1]; {
			case last.WithInv:
				w.Fatalf("version %d, %s: WithInv is true, want false", version, tt.name)
			case w.violations > 0:
				w.Fatalf("version %d, %s: violations is %v, want 0", version, tt.name, w.violations)
			case len(s.served) > 0:
				w.Fatalf("version %d, %s: served has %v elements, want 0", version, tt.name, len(s.served))
			case s.Counters()[ReasonCannotReply] != 1:
				w.Fatalf("version %d, %s: Counters()[ReasonCannotReply] is %v, want 1", version, tt.name,
					s.Counters()[ReasonCannotReply])
			}
		}
	}
}

// TestRetry: a call that has not run is sent again with the same XID and more
// memory, so often and no more; one that ran is the user's to repeat.
func TestRetry(t *testing.T) {
	for _, tt := range []struct {
		name   string
		submit Submit
		say    TransportError
		sends  int // of this call
		last   string
	}{
		// V2-5.2.4-10
		{"a Reply chunk that is too short", Submit{MaxReply: 5000},
			TransportError{Code: ErrCantReply, SegmentIndex: 1, LengthNeeded: 9000}, 2, "R9000"},
		{"none at all", Submit{}, TransportError{Code: ErrCantReply, LengthNeeded: 9000}, 2, "R9000"},
		{"a result", Submit{Results: []int{100, 200}},
			TransportError{Code: ErrCantReply, SegmentIndex: 2, LengthNeeded: 300}, 2, "w100 w300"},
		// rdma_processed TRUE leaves it to the caller (docs/ambiguities.md)
		{"it ran", Submit{MaxReply: 5000}, TransportError{Code: ErrCantReply, Processed: true, SegmentIndex: 1,
			LengthNeeded: 9000}, 1, "R5000"},
		{"nothing is known", Submit{MaxReply: 5000}, TransportError{Code: ErrCantReply}, 1, "R5000"},
		// A peer that asks for what there is, for nonsense, or for everything.
		{"less than there is", Submit{MaxReply: 5000},
			TransportError{Code: ErrCantReply, SegmentIndex: 1, LengthNeeded: 5000}, 1, "R5000"},
		{"a segment that is not there", Submit{MaxReply: 5000},
			TransportError{Code: ErrCantReply, SegmentIndex: 2, LengthNeeded: 9000}, 1, "R5000"},
		{"more than we lend", Submit{MaxReply: 5000},
			TransportError{Code: ErrCantReply, SegmentIndex: 1, LengthNeeded: 0xffffffff}, 1, "R5000"},
	} {
		w := up(t, Options{}, Options{})
		c, s := w.client(), w.server()
		s.program = nil
		before := len(c.sends)
		tt.submit.ID, tt.submit.Payload = 1, rpc(10)
		c.step(tt.submit)
		for range 5 {
			w.run(time.Second)
			if len(c.done) > 0 {
				break
			}
			h, _ := c.header(-1)
			e := Header{XID: h.XID, Vers: 2, Credit: 32, Proc: ProcERROR, Error: tt.say}
			b, _ := e.AppendBinary(nil)
			c.step(Recv{Data: b})
		}
		first, _ := c.header(before)
		h, _ := c.header(-1)
		d := c.result(1)
		expect.MustEqual(w, d.Transport, tt.say, "%s: Transport", tt.name)
		expect.MustEqual(w, len(c.sends)-before, tt.sends, "%s: len(c.sends)-before", tt.name)
		expect.MustEqual(w, h.XID, first.XID, "%s: XID", tt.name)
		if got := shape(&h, true); got != "MSG "+tt.last {
			w.Fatalf("%s: %s, want %s", tt.name, got, tt.last)
		}
		if c.exposed() > 0 {
			w.Fatalf("%s: %d exposed", tt.name, c.exposed())
		}
	}
}

// optionCases are the cases of TestOptions.
var optionCases = []struct {
	name    string
	types   []uint32
	payload []byte
	want    string
}{
	// V2-4.1-1, V2-4.1-2, V2-5.2.1-3, V2-5.2.2-5: without payload
	{"known", []uint32{5, 7}, nil, ""},
	// V2-5.2.2-4
	{"known, with a payload", []uint32{7}, rpc(10), ""},
	{"known, with more payload than fits", []uint32{7}, rpc(4096), "too_big"},
	// V2-4.1-3, V2-5.2.4-11, V2-4.3-2
	{"unknown", nil, nil, "INVAL_OPTION"},
}

// TestOptions: RDMA2_OPTIONAL between ends that know a type, and that do not.
func TestOptions(t *testing.T) {
	for _, tt := range optionCases {
		w := up(t, Options{OptTypes: []uint32{7}}, Options{OptTypes: tt.types})
		c, s := w.client(), w.server()
		c.step(Submit{ID: 1, Payload: tt.payload, Option: &Option{Type: 7, Info: []byte("abc")}})
		w.run(time.Second)
		d := c.result(1)
		switch {
		case tt.want == "too_big":
			if d.Err == nil || d.Err.Reason != ReasonTooBig {
				w.Fatalf("%s: %v", tt.name, d.Err)
			}
			continue
		case tt.want != "":
			if d.Err == nil || d.Transport.Code.String() != tt.want {
				w.Fatalf("%s: %+v", tt.name, d)
			}
			continue
		}
		h, _ := c.header(-1)
		r, _ := s.header(-1)
		// V2-5.2.2-6, V2-5.2.2-7: XID and credits as in that direction's calls and replies
		expect.MustEqual(w, h.Proc, ProcOPTIONAL, "%s: Proc", tt.name)
		expect.MustEqual(w, h.Direction, DirCall, "%s: Direction", tt.name)
		expect.MustEqual(w, h.Credit, 32, "%s: Credit", tt.name)
		expect.MustEqual(w, r.Direction, DirReply, "%s: Direction", tt.name)
		expect.MustEqual(w, r.XID, h.XID, "%s: XID", tt.name)
		expect.MustEqual(w, r.Credit, 32, "%s: Credit", tt.name)
		switch {
		case d.Err != nil:
			w.Fatalf("%s: Err is %v, want nil", tt.name, d.Err)
		case d.Option == nil:
			w.Fatalf("%s: Option is nil", tt.name)
		case d.Option.Type != 7:
			w.Fatalf("%s: Option.Type is %v, want 7", tt.name, d.Option.Type)
		case string(d.Option.Info) != "abc":
			w.Fatalf("%s: Option.Info is %q, want \"abc\"", tt.name, string(d.Option.Info))
		case len(d.Payload) != len(tt.payload):
			w.Fatalf("%s: Payload has %v elements, want %v", tt.name, len(d.Payload), len(tt.payload))
		}
		if last := s.serves[len(s.serves)-1]; last.Option == nil || last.Option.Type != 7 {
			w.Fatalf("%s: %+v", tt.name, last)
		}
	}
	// Version one has none, and before the version is settled nobody knows.
	w := up(t, Options{}, one(Options{}))
	w.client().step(Submit{ID: 1, Option: &Option{Type: 7}})
	if d := w.client().result(1); d.Err == nil || d.Err.Reason != ReasonNotReady {
		w.Fatalf("%+v", d)
	}
}

// TestBadLongCalls: what is wrong with a call can be in its chunks. Its XID, its
// direction, or that there is hardly anything.
func TestBadLongCalls(t *testing.T) {
	for _, tt := range []struct {
		name    string
		payload []byte
		reason  Reason
	}{
		{"good", (&RPCCall{XID: 7}).Append(nil), ReasonNone},
		{"another XID", (&RPCCall{XID: 8}).Append(nil), ReasonXID},
		{"a reply", (&RPCReply{XID: 7}).Append(nil), ReasonDirection},
		{"7 octets", make([]byte, 7), ReasonNoPayload},
		{"nothing", nil, ReasonNoPayload},
	} {
		for _, version := range []Version{1, 2} {
			w := up(t, Options{}, Options{})
			s := w.server()
			s.program = nil
			before := len(s.serves)
			var read []Read
			s.notify = func(a Action) {
				if r, ok := a.(Read); ok {
					read = append(read, r)
				}
			}
			s.step(Recv{Data: message(Header{Vers: version, Proc: ProcNOMSG,
				Reads: []ReadSegment{{0, Segment{1, uint32(len(tt.payload)), 64}}}})})
			if len(tt.payload) > 0 {
				if len(read) != 1 {
					w.Fatalf("%s: %d READs", tt.name, len(read))
				}
				s.step(ReadDone{Read: read[0].Read, Data: tt.payload})
			}
			calls := len(s.serves) - before
			switch {
			case (tt.reason == ReasonNone) != (calls == 1):
				w.Fatalf("%s: tt.reason == ReasonNone is %v, want %v", tt.name, tt.reason == ReasonNone, calls == 1)
			case tt.reason != ReasonNone && s.Counters()[tt.reason] != 1:
				w.Fatalf("%s: Counters()[tt.reason] is %v, want 1", tt.name, s.Counters()[tt.reason])
			}
			if h, _ := s.header(-1); calls == 0 && (h.Error.Code != ErrBadXDR || h.Vers != version) {
				w.Fatalf("%s: answered by %v", tt.name, &h)
			}
		}
	}
	// A READ that fails, or brings something else, is the end of the connection.
	for _, ev := range []ReadDone{{Read: 1}, {Read: 1, Data: make([]byte, 99)}} {
		w := up(t, Options{}, Options{})
		s := w.server()
		s.notify = func(a Action) {
			if _, ok := a.(Read); ok {
				s.step(ev)
			}
		}
		s.step(Recv{Data: message(Header{Vers: 2, Proc: ProcNOMSG, Reads: []ReadSegment{{0, Segment{1, 100, 64}}}})})
		if s.closed == nil || s.closed.Reason != ReasonRead {
			w.Fatalf("%v", s.closed)
		}
	}
}
