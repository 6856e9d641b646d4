package datapath

import (
	"testing"

	"ipoibcm/ib"
	"ipoibcm/verbs"
	"ipoibcm/wire/encap"
)

// What has met congestion on the way passes the mark on to an IP packet that is
// ECN-capable. Another is dropped (RFC 6040 section 4.2), but not if it came over RC.
func TestCongestionIsPassedOn(t *testing.T) {
	const notECT, ect1, ect0, ce, dropped = 0, 1, 2, 3, 0xff
	for _, tt := range []struct {
		name  string
		t     ib.Transport
		met   bool
		inner byte
		want  byte
		count func(Counters) uint64
	}{
		{"UD, none met", ib.UD, false, ect0, ect0, nil},
		{"UD", ib.UD, true, ect0, ce, func(c Counters) uint64 { return c.RxMarked }},
		{"UD, ECT(1)", ib.UD, true, ect1, ce, func(c Counters) uint64 { return c.RxMarked }},
		{"UD, marked before", ib.UD, true, ce, ce, func(c Counters) uint64 { return c.RxMarked }},
		{"UD, not ECN-capable", ib.UD, true, notECT, dropped, func(c Counters) uint64 { return c.RxCongested }},
		{"UC", ib.UC, true, ect0, ce, func(c Counters) uint64 { return c.RxMarked }},
		{"UC, not ECN-capable", ib.UC, true, notECT, dropped, func(c Counters) uint64 { return c.RxCongested }},
		{"RC", ib.RC, true, ect0, ce, func(c Counters) uint64 { return c.RxMarked }},
		{"RC, not ECN-capable", ib.RC, true, notECT, notECT, func(c Counters) uint64 { return c.RxNotECT }},
	} {
		a, b := still(t, 256)
		side, msg := b.ud, make([]byte, verbs.GRHLen)
		wc := verbs.WC{Flags: verbs.WithGRH, QPN: b.UDQP().QPN(), SrcQPN: a.UDQP().QPN()}
		if tt.met {
			wc.Flags |= verbs.Congested
		}
		pkt := ip4("10.9.0.2", 100, 17)
		pkt[1] = 0x48 | tt.inner
		frame := append(make([]byte, headerLen), pkt...)
		encap.Put(frame, encap.IPv4)
		if tt.t == ib.UD {
			side.takeUD(append(msg, frame...), &wc, 1)
		} else {
			_, c := connect(t, a, b, tt.t)
			side = b.threads[0].conn
			side.takeConn(frame, c, tt.met, 1)
		}
		got := byte(dropped)
		if len(side.pkts) == 1 {
			got = side.pkts[0][1] & 3
		}
		if got != tt.want {
			t.Errorf("%s: ECN codepoint %d arrives, want %d", tt.name, got, tt.want)
		}
		if tt.count != nil && tt.count(b.Counters()) != 1 {
			t.Errorf("%s: counted %d times, want once", tt.name, tt.count(b.Counters()))
		}
		side.pkts = nil
	}
}
