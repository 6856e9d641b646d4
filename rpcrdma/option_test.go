package rpcrdma

import (
	"bytes"
	"testing"
	"time"

	"ipoibcm/internal/expect"
)

// TestOptionalPayloadSent: what an RDMA2_OPTIONAL says of its direction, and the
// msg_type behind it, octet by octet (V2-5.2.2-4, V2-5.2.2-5, V2-R1-5).
func TestOptionalPayloadSent(t *testing.T) {
	for _, tt := range []struct {
		name          string
		payload       string // of the call, with XID 7
		answer        string
		call, reply   string // behind the XID, the version and the credits
		callX, replyX bool   // the payload begins with rdma_xid
	}{
		{"nothing", "", "",
			"00000005 00000000 0000002a 00000003 61626300",
			"00000005 00000001 0000002a 00000000", false, false},
		{"whole messages", rpcCall7, rpcReply7,
			"00000005 00000000 0000002a 00000003 61626300" + rpcCall7,
			"00000005 00000001 0000002a 00000000" + rpcReply7, true, true},
		{"the least parts", rpcCall7[:17], rpcReply7[:17],
			"00000005 00000000 0000002a 00000003 61626300" + rpcCall7[:17],
			"00000005 00000001 0000002a 00000000" + rpcReply7[:17], true, true},
	} {
		o := Options{OptTypes: []uint32{0x2a}}
		w := up(t, o, o)
		c, s := w.client(), w.server()
		s.program = func(a Serve) Event { return Answer{ID: a.ID, Payload: octets(tt.answer)} }
		c.step(Submit{ID: 1, Payload: octets(tt.payload), Option: &Option{Type: 0x2a, Info: []byte("abc")}})
		w.run(time.Second)
		if d := c.result(1); d.Err != nil {
			w.Fatalf("%s: %v", tt.name, d.Err)
		}
		xid := wordAt(c.lastSent(), 0)
		for _, m := range []struct {
			of   *end
			want []byte
			x    bool
		}{{c, octets(tt.call), tt.callX}, {s, octets(tt.reply), tt.replyX}} {
			got := m.of.lastSent()
			want := append(words(xid, 2, 32), m.want...)
			if m.x { // the XID of the RPC message is the header's
				at := len(want) - len(octets(tt.payload))
				if m.of == s {
					at = len(want) - len(octets(tt.answer))
				}
				copy(want[at:], words(xid))
			}
			if !bytes.Equal(got, want) {
				t.Errorf("%s, of the %s:\n got %x\nwant %x", tt.name, m.of.name, got, want)
			}
		}
	}
}

// optionalPayloads are the cases of TestOptionalPayloadRefused.
var optionalPayloads = []struct {
	name, payload string
	opt           uint32
	fromClient    Reason // as the payload of a call
	fromServer    Reason // as that of a reply
}{
	{"nothing", "", 0x2a, ReasonNone, ReasonNone},
	{"a call", rpcCall7, 0x2a, ReasonNone, ReasonDirection},
	{"a reply", rpcReply7, 0x2a, ReasonDirection, ReasonNone},
	{"neither", "00000007 00000002", 0x2a, ReasonDirection, ReasonDirection},
	{"7 octets", "00000007 000000", 0x2a, ReasonNoPayload, ReasonNoPayload},
	{"another XID", rpcCall8, 0x2a, ReasonXID, ReasonDirection},
	// A later part of an RPC message has no msg_type.
	{"a tail", "00000008 00000009 0a", 0x2b, ReasonNone, ReasonNone},
}

// TestOptionalPayloadRefused: a payload whose msg_type is not rdma_optdir is
// neither sent nor taken (V2-5.2.2-4).
func TestOptionalPayloadRefused(t *testing.T) {
	o := Options{OptTypes: []uint32{0x2a, 0x2b}, TailTypes: []uint32{0x2b}}
	for _, tt := range optionalPayloads {
		// A call that comes.
		w := up(t, o, o)
		in := append(words(7, 2, 1, 5, 0, tt.opt, 0), octets(tt.payload)...)
		answer, calls, reason := w.server().hear(in)
		want := ""
		if tt.fromClient != ReasonNone {
			want = "v2 ERROR xid=00000007 credit=32 BAD_XDR"
		}
		expect.Equal(t, answer, want, "%s, to a server: answer", tt.name)
		expect.Equal(t, reason, tt.fromClient, "%s, to a server: reason", tt.name)
		expect.Equal(t, calls == 1, want == "", "%s, to a server: calls == 1", tt.name)

		// A call of the user's.
		c := w.client()
		c.step(Submit{ID: 1, Payload: octets(tt.payload), Option: &Option{Type: tt.opt}})
		wantEnd := tt.fromClient != ReasonNone && tt.fromClient != ReasonXID // the XID is set here
		if ended := len(c.done) == 1 && c.done[0].Err.Reason == ReasonArgument; ended != wantEnd {
			t.Errorf("%s, from a user: refused %v, want %v", tt.name, ended, wantEnd)
		}

		// A reply that comes.
		w = up(t, o, o)
		c = w.client()
		c.step(Submit{ID: 2, Option: &Option{Type: tt.opt}})
		xid := wordAt(c.lastSent(), 0)
		payload := octets(tt.payload)
		if len(payload) >= 4 && tt.opt == 0x2a && tt.fromServer != ReasonXID {
			copy(payload, words(xid))
		}
		answer, _, reason = c.hear(append(words(xid, 2, 1, 5, 1, tt.opt, 0), payload...))
		expect.Equal(t, answer, "", "%s, to a client: answer", tt.name)
		expect.Equal(t, reason, tt.fromServer, "%s, to a client: reason", tt.name)
		expect.Equal(t, len(c.done) == 1, tt.fromServer == ReasonNone, "%s, to a client: len(c.done) == 1", tt.name)
	}
	// The program's mistake is no peer's.
	w := up(t, o, o)
	s := w.server()
	s.program = func(a Serve) Event { return Answer{ID: a.ID, Payload: octets(rpcCall7)} }
	defer func() {
		if recover() == nil {
			t.Error("a call was sent as the payload of a reply")
		}
	}()
	s.step(Recv{Data: words(7, 2, 1, 5, 0, 0x2a, 0)})
}
