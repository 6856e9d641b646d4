package datapath

import (
	"errors"
	"net/netip"
	"testing"

	"ipoibcm/ib"
	"ipoibcm/tun/tuntest"
	"ipoibcm/wire/encap"
)

// While groups are held, packets to groups and broadcast addresses that would go up are dropped and
// counted; others go up, and so does what the control plane must see.
func TestHeldGroups(t *testing.T) { inBubble(t, testHeldGroups) }

func testHeldGroups(t *testing.T) {
	w := newWorld()
	a := start(t, w, 1, nil)
	a.SetBroadcasts([]netip.Addr{netip.MustParseAddr("10.9.0.255")})
	a.route("10.9.0.77", NewPath(1, Target{Kind: Miss}))
	a.route("224.0.0.9", NewPath(2, Target{Kind: Miss}))
	held := uint64(0)
	for _, tt := range []struct {
		name string
		pkt  []byte
		held bool
	}{
		{"a neighbour", ip4("10.9.0.77", 100, 17), false},
		{"an address without a route", ip4("10.9.1.1", 100, 17), false},
		{"a group", ip4("224.0.0.251", 100, 17), true},
		{"a group whose path is a Miss", ip4("224.0.0.9", 100, 17), true},
		{"a subnet broadcast", ip4("10.9.0.255", 100, 17), true},
		{"the limited broadcast", ip4("255.255.255.255", 100, 17), true},
		{"an IPv6 group", ip6("ff02::fb", 17, 1, 2, 3, 4), true},
		{"IGMP", ip4("224.0.0.22", 40, 2), false},
		{"a neighbour solicitation", ip6("ff02::1:ff00:2", 58, 135, 0, 0, 0), false},
	} {
		for _, on := range []bool{true, false} {
			a.HoldGroups(on)
			a.tun.Send(tt.pkt)
			if on && tt.held {
				held++
				eventually(t, tt.name+" is dropped", func() bool { return a.Counters().TxGroupHeld == held })
				continue
			}
			up(t, a).Release()
			if got := a.Counters().TxGroupHeld; got != held {
				t.Errorf("%s, held %v: %d packets held, want %d", tt.name, on, got, held)
			}
		}
	}
}

// Copies of one payload go to each destination, more than one batch of them, and cost no allocation.
func TestSendCopies(t *testing.T) { inBubble(t, testSendCopies) }

func testSendCopies(t *testing.T) {
	w := newWorld()
	a, b := start(t, w, 1, nil), start(t, w, 2, nil)
	pkt := ip4("224.0.0.251", 40, 17)
	to := make([]UDDest, 3*batchLen/2)
	for i := range to {
		to[i] = a.udTo(b)
	}
	sent, err := a.SendCopies(to, encap.IPv4, pkt)
	if err != nil {
		t.Errorf("error %v, want none", err)
	}
	if sent != len(to) {
		t.Errorf("%d copies left, want %d", sent, len(to))
	}
	eventually(t, "all have arrived", func() bool { return b.Counters().RxUD == uint64(len(to)) })
	if got := a.Counters().TxUD; got != uint64(len(to)) {
		t.Errorf("%d datagrams are counted, want %d", got, len(to))
	}
	if sent, err := a.SendCopies(to, encap.IPv4, make([]byte, maxPacket+1)); sent != 0 || !errors.Is(err, ErrTooBig) {
		t.Errorf("%d copies of what is too large left, error %v; want none and %v", sent, err, ErrTooBig)
	}

	h := &host{tun: tuntest.New("ibcm0", 16), fab: &fabric{w: w, srq: true}}
	l, err := New(Config{Provider: h.fab, TUN: h.tun, UDSendDepth: batchLen})
	if err != nil {
		t.Fatal(err)
	}
	nobody := UDDest{AH: fakeAH{DGID: ib.GID{15: 99}}, QPN: ib.QPNMulticast}
	for i := range to {
		to[i] = nobody
	}
	if n := testing.AllocsPerRun(100, func() {
		l.threads[0].sendWC.drain()
		_, _ = l.SendCopies(to[:batchLen], encap.IPv4, pkt)
	}); n != 0 {
		t.Errorf("%v allocations for %d copies, want 0", n, batchLen)
	}
	// The queue takes one batch, and nobody has taken its completions.
	l.threads[0].sendWC.drain()
	sent, err = l.SendCopies(to, encap.IPv4, pkt)
	if !errors.Is(err, ErrFull) {
		t.Errorf("error %v of a full queue, want %v", err, ErrFull)
	}
	if sent != batchLen {
		t.Errorf("%d copies left with room for %d", sent, batchLen)
	}
	l.threads[0].sendWC.drain()
	if got, want := l.threads[0].pool.available(), l.cfg.sendBuffers(); got != want {
		t.Errorf("%d of %d buffers are left", got, want)
	}
	l.Close()
	if sent, err := l.SendCopies(to, encap.IPv4, pkt); sent != 0 || !errors.Is(err, ErrClosed) {
		t.Errorf("%d copies left after the end, error %v; want none and %v", sent, err, ErrClosed)
	}
}
