package rpcrdma

import "testing"

// TestPlainSendWithoutR: 8797-4.1-3, 8797-3.2-1. In version one a reply
// invalidates only if R, 0x01 of octet 5, is set in the private data of both
// ends as it went over the wire, and an end that sends none has cleared it.
func TestPlainSendWithoutR(t *testing.T) {
	inv := 0
	for how := range 128 {
		bit := func(n int) bool { return how>>n&1 != 0 }
		o := Options{MaxVersion: 1, Silent: bit(1), SendInv: bit(2), RecvInv: bit(3), MixedHandles: bit(4),
			Client: bit(6), BackwardChunks: true}
		peer := octets("f6ab0e18 01 00 0303")
		if bit(0) {
			peer[5] = 1
		}
		if bit(5) {
			peer = nil
		}
		c, err := NewConn(o)
		if err != nil {
			t.Fatal(err)
		}
		r := func(private []byte) bool { return len(private) == 8 && private[5]&1 != 0 }
		both := r(c.Private()) && r(peer)

		// A Long Call of one segment, 40 octets.
		c.Step(nil, t0, Connected{peer})
		acts := c.Step(nil, t0, Recv{Data: words(7, 1, 1, 1, 1, 0, 0x0a0b0c0d, 40, 0, 0x1000, 0, 0, 0)})
		read, ok := has[Read](acts)
		if !ok {
			t.Fatalf("%+v: no READ in %+v", o, acts)
		}
		acts = c.Step(nil, t0, ReadDone{Read: read.Read, Data: rpcOf(7)})
		serve, ok := has[Serve](acts)
		if !ok {
			t.Fatalf("%+v: no call in %+v", o, acts)
		}
		send, ok := has[Send](c.Step(nil, t0, Answer{ID: serve.ID, Payload: octets(rpcReply7)}))
		if !ok {
			t.Fatalf("%+v: no reply", o)
		}
		want := both && o.SendInv
		switch {
		case send.WithInv != want:
			t.Errorf("%+v, own private data %x, the peer's %x: WithInv is %v, want %v", o, c.Private(), peer,
				send.WithInv, want)
		case want && send.Invalidate != 0x0a0b0c0d:
			t.Errorf("%+v, own private data %x, the peer's %x: Invalidate is %#x, want 0x0a0b0c0d", o, c.Private(),
				peer, send.Invalidate)
		}
		if send.WithInv {
			inv++
		}
	}
	if inv == 0 {
		t.Error("nothing is ever invalidated")
	}
}
