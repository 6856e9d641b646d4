package rpcrdma

import (
	"bytes"
	"testing"
	"time"
)

// TestOptions runs testdata/optional-*.txt: RDMA2_OPTIONAL.
//
//	optional-types     a type that is known, with and without a payload: V2-4.1-1, V2-4.1-2, V2-5.2.1-3, V2-5.2.2-4,
//	                   V2-5.2.2-5; XIDs and credits: V2-5.2.2-6, V2-5.2.2-7; one that is not known: V2-4.1-3,
//	                   V2-5.2.4-11, V2-4.3-2
//	optional-payload   a payload whose msg_type is not rdma_optdir is neither sent nor taken: V2-5.2.2-4
func TestOptions(t *testing.T) { playScripts(t, "optional-*") }

// TestAnswerIsReply: V2-5.2.2-4. A program that answers an RDMA2_OPTIONAL by a call is our mistake, and no peer's.
func TestAnswerIsReply(t *testing.T) {
	o := Options{OptTypes: []uint32{0x2a}}
	s := up(t, o, o).server()
	s.program = func(a Serve) Event { return Answer{ID: a.ID, Payload: octets(rpcCall7)} }
	defer func() {
		if recover() == nil {
			t.Error("a call was sent as the payload of a reply")
		}
	}()
	s.step(Recv{Data: words(7, 2, 1, 5, 0, 0x2a, 0)})
}

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
