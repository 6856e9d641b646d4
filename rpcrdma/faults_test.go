package rpcrdma

import (
	"testing"

	"ipoibcm/internal/expect"
)

// TestErrors runs testdata/errors-*.txt.
//
//	errors-replies     bad replies to a requester: V2-R1-12, V2-5.2.2-2, V2-R1-5, V2-R1-2
//	errors-requester   errors to a requester: V2-5.2.4-12
//	errors-responder   errors to a responder: V2-R1-6
//	errors-cantreply   replies that do not fit: V2-5.2.4-6, V2-5.2.4-7, V2-5.2.4-8, V2-5.2.4-9, V2-R1-9
//	errors-retry       what a requester makes of that: V2-5.2.4-10
//	errors-longcall    what is wrong with a call can be in its chunks
//	errors-version     the answer has the version of its call: V2-6.3-1
func TestErrors(t *testing.T) { playScripts(t, "errors-*") }

// hear gives an end a message and returns what it sends because of it, the
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
		expect.Equal(t, got, want, "%d octets: got", n)
		expect.Equal(t, calls, 0, "%d octets: calls", n)
	}
}
