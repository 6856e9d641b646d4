package rpcrdma

import "testing"

// TestCredits runs testdata/credits-*.txt. A requester has never more calls unanswered than the less of
// what it asks for and what was granted.
//
//	credits-client    V2-R1-1, V2-R1-3; a grant of zero is taken as one: V2-R1-2
//	credits-server    what is granted, which is never zero: V2-R1-2; a requester that does not count
//	credits-timeout   a call that is given up keeps its credit, and its late answer grants: V2-R1-1
func TestCredits(t *testing.T) { playScripts(t, "credits-*") }

// TestCalls runs testdata/calls-*.txt.
//
//	calls-first     the first message, and the first reply, has at most 1024 octets: V2-6-4, V2-6.2-6
//	calls-refused   what cannot be asked for
//	calls-end       a connection that breaks
func TestCalls(t *testing.T) { playScripts(t, "calls-*") }

// TestRecvBuffers: V2-6.2-6, V2-2.3-1. The buffers are large enough from the start.
func TestRecvBuffers(t *testing.T) {
	for _, o := range []Options{{}, {Client: true}, {Silent: true}, {SendSize: 1024, RecvSize: 1024}} {
		c, err := NewConn(o)
		if err != nil {
			t.Fatal(err)
		}
		n, size := c.RecvBuffers()
		if size < DefaultInline2 {
			t.Errorf("%+v: buffers of %d octets, want at least %d", o, size, DefaultInline2)
		}
		if n != 35 {
			t.Errorf("%+v: %d buffers, want 35", o, n)
		}
	}
}
