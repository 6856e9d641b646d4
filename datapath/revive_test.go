package datapath

import (
	"bytes"
	"errors"
	"slices"
	"testing"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/verbs"
)

// A UD QP that went to ERR comes back with every receive posted once and no send
// buffer lost, however much was posted and not taken from the completion queue.
func TestReviveUD(t *testing.T) {
	for name, callback := range map[string]bool{"polled": false, "callback": true} {
		bubble(t, name, func(t *testing.T) {
			w := newWorld()
			tune := func(cfg *Config, f *fabric) { cfg.UDRecvDepth, f.callback = 16, callback }
			a, b := start(t, w, 1, tune), start(t, w, 2, tune)
			a.route("10.9.0.2", NewPath(1, Target{Kind: ToUD, MTU: 2044, UD: a.udTo(b)}))
			passes := func() {
				t.Helper()
				for i := range 40 { // more than the receive queue has
					want := ip4("10.9.0.2", 100+i, 6)
					a.tun.Send(want)
					if got := b.tun.Receive(patience); !bytes.Equal(got, want) {
						t.Fatalf("packet %d: got %d octets, %+v", i, len(got), b.Counters())
					}
				}
			}
			passes()
			for round := range 5 {
				for _, h := range []*host{a, b} {
					qp := h.UDQP().(*fakeQP)
					qp.mu.Lock()
					qp.hold = h == a
					qp.mu.Unlock()
				}
				for range 8 {
					a.tun.Send(ip4("10.9.0.2", 1000, 6)) // held, and lost with the QP
				}
				held := func() int {
					qp := a.UDQP().(*fakeQP)
					qp.mu.Lock()
					defer qp.mu.Unlock()
					return len(qp.held)
				}
				eventually(t, "eight packets are held", func() bool { return held() >= 8 })
				for _, h := range []*host{b, a} {
					qp := h.UDQP().(*fakeQP)
					if err := qp.Modify(verbs.QPAttr{State: verbs.StateError}); err != nil {
						t.Fatal(err)
					}
					qp.mu.Lock()
					qp.hold = false
					qp.mu.Unlock()
					if err := h.ReviveUD(); err != nil {
						t.Fatal(err)
					}
					expect.MustEqual(t, qp.State(), verbs.StateRTS, "round %d: state", round)
					expect.MustEqual(t, h.udq.inflight(), 0, "round %d: number of datagrams in flight", round)
					postedOnce(t, qp)
				}
				passes()
			}
			if n := b.Counters().RepostFailures; n != 0 {
				t.Errorf("%d receives could not be posted again", n)
			}
		})
	}
}

// postedOnce checks that each of the 16 receives of qp is posted, and once.
func postedOnce(t *testing.T, qp *fakeQP) {
	t.Helper()
	qp.rq.mu.Lock()
	posted := map[uint64]bool{}
	for i := qp.rq.h; i < qp.rq.t; i++ {
		wr := &qp.rq.ring[i%len(qp.rq.ring)]
		if posted[wr.ID] {
			t.Errorf("receive %d is posted twice", wr.ID)
		}
		posted[wr.ID] = true
	}
	qp.rq.mu.Unlock()
	if len(posted) != 16 {
		t.Errorf("%d receives are posted, want 16", len(posted))
	}
}

func TestReviveUDClosed(t *testing.T) {
	w := newWorld()
	h := &host{fab: &fabric{w: w, srq: true}}
	l, err := New(Config{Provider: h.fab, SendBuffers: 64, SRQDepth: 16})
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if err := l.ReviveUD(); !errors.Is(err, ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
}

// Dead finds the QPs that are in ERR, the UD QP too.
func TestDead(t *testing.T) { inBubble(t, testDead) }

func testDead(t *testing.T) {
	w := newWorld()
	a, b := start(t, w, 1, nil), start(t, w, 2, nil)
	c, _ := connect(t, a, b, ib.RC)
	connect(t, a, b, ib.UC)
	expect.Equal(t, len(a.Dead()), 0, "dead QPs")
	want := []ib.QPN{c.QP().QPN(), a.UDQP().QPN()}
	slices.Sort(want)
	for _, qp := range []verbs.QP{c.QP(), a.UDQP()} {
		if err := qp.Modify(verbs.QPAttr{State: verbs.StateError}); err != nil {
			t.Fatal(err)
		}
	}
	var got []ib.QPN
	for _, ev := range a.Dead() {
		expect.Equal(t, ev.Kind, verbs.QPFatal, "kind of event")
		got = append(got, ev.QPN)
	}
	if !slices.Equal(got, want) {
		t.Errorf("dead are %v, want %v", got, want)
	}
}
