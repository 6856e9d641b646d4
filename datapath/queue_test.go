package datapath

import (
	"testing"

	"ipoibcm/ib"
	"ipoibcm/verbs"
	"ipoibcm/wire/encap"
)

// queue returns a send queue without a QP, n of whose messages are posted, among
// free free buffers.
func queue(n, free int) *sendQ {
	pool := &sendPool{large: 200, posted: make([]posted, 200), free: make([]int32, free)}
	q := newSendQ(&thread{pool: pool}, 64, false, 7<<genShift)
	for i := range n {
		q.ring[i] = int32(100 + i)
	}
	q.tail.Store(q.base + uint64(n))
	return q
}

// A completion gives back all buffers up to its own.
func TestCompletion(t *testing.T) {
	q := queue(4, 100)
	got := q.complete(nil, q.base+2, 5)
	if len(got) != 3 {
		t.Errorf("%d buffers came back, want 3", len(got))
	}
	if n := q.inflight(); n != 1 {
		t.Errorf("%d in flight, want 1", n)
	}
}

// A completion of the QP that had the number before, or after close, is nothing.
func TestCompletionOfAnotherLife(t *testing.T) {
	for _, base := range []uint64{6 << genShift, 8 << genShift} {
		q := queue(4, 100)
		if got := q.complete(nil, base+2, 5); len(got) != 0 {
			t.Errorf("base %#x: %d buffers came back, want none", base, len(got))
		}
		if n := q.inflight(); n != 4 {
			t.Errorf("base %#x: %d in flight, want 4", base, n)
		}
	}
}

// A queue has no more of the buffers than are left for the others, but always a few.
func TestRoom(t *testing.T) {
	for _, tt := range []struct{ posted, free, want int }{
		{0, 1000, 64}, {10, 1000, 54}, {0, 20, 20}, {10, 20, 10}, {0, 0, minShare}, {minShare, 0, 0},
	} {
		if got := queue(tt.posted, tt.free).room(); got != tt.want {
			t.Errorf("%d posted and %d buffers free: room for %d, want %d", tt.posted, tt.free, got, tt.want)
		}
	}
}

// Another agent may have our UD QPN: only GID and QPN together are our own.
func TestEchoIsOurs(t *testing.T) {
	a := start(t, newWorld(), 1, nil)
	pkt := ip4("10.9.0.2", 40, 17)
	for _, tt := range []struct {
		name string
		last byte // of the source GID
		qpn  ib.QPN
		want uint64
	}{
		{"our own", 1, 0, 1},
		{"another QPN of our GID", 1, 1, 0},
		{"our QPN at another GID", 2, 0, 0},
	} {
		own := a.UDQP().QPN()
		msg := make([]byte, verbs.GRHLen+headerLen, 200)
		encap.Put(msg[verbs.GRHLen:], encap.IPv4)
		copy(msg[8:], []byte{0: 0xfe, 1: 0x80, 15: tt.last})
		wc := verbs.WC{Flags: verbs.WithGRH, QPN: own, SrcQPN: own + tt.qpn}
		before := a.Counters().RxOwnEcho
		a.ud.mu.Lock()
		a.ud.takeUD(append(msg, pkt...), &wc, 1)
		a.ud.mu.Unlock()
		if got := a.Counters().RxOwnEcho - before; got != tt.want {
			t.Errorf("%s: %d taken for our own, want %d", tt.name, got, tt.want)
		}
	}
}

// A flood of ARP requests is bounded before it reaches the agent.
func TestFloodOfARP(t *testing.T) { inBubble(t, testFloodOfARP) }

func testFloodOfARP(t *testing.T) {
	w := newWorld()
	a, b := start(t, w, 1, nil), start(t, w, 2, nil)
	request := []byte{0, 32, 8, 0, 20, 4, 0, 1, 55: 0}
	const sent = 1000
	for n := uint64(1); n <= sent; n++ {
		if err := a.SendUD(a.udTo(b), encap.ARP, request); err != nil {
			t.Fatal(err)
		}
		if n%16 == 0 {
			eventually(t, "sent", func() bool { c := b.Counters(); return c.RxFlood+c.Up+c.UpFull == n })
		}
	}
	eventually(t, "all counted", func() bool { return b.Counters().RxFlood+b.Counters().Up+b.Counters().UpFull == sent })
	// The share of one source may come twice in a second, and the second may end meanwhile.
	if n := b.Counters().RxFlood; n < sent-4*uint64(requestRate.Source) {
		t.Errorf("%d of %d were too many, want more than %d", n, sent, sent-4*requestRate.Source)
	}
}
