package softroce

import (
	"sync/atomic"
	"testing"

	"ipoibcm/ib"
)

// The filter is asked about datagrams to its queue pair, before their ICRC is looked
// at, and about no others. What it refuses goes no further.
func TestFilterDatagrams(t *testing.T) {
	const from, to, mine = "127.0.0.1", "127.0.0.2", ib.QPN(0x123456)
	_, d := pair(t, families[0], nil)
	send, port := foreign(t, from)
	var asked atomic.Int64
	var answer atomic.Bool
	pass := func(src ib.GID, qpn ib.QPN, payload []byte) bool {
		if src != gid(from) {
			t.Errorf("asked about %v, want %v", src, gid(from))
		}
		if qpn != 77 {
			t.Errorf("asked about QPN %v, want 77", qpn)
		}
		if len(payload) != 64 {
			t.Errorf("asked about %d octets, want 64", len(payload))
		}
		asked.Add(1)
		return answer.Load()
	}
	d.FilterDatagrams(mine, pass)
	dropped := func() (n uint64) {
		for _, name := range []string{"rx_drop_refused", "rx_drop_unknown_qpn", "rx_drop_icrc", "rx_drop_malformed"} {
			n += counter(d, name)
		}
		return n
	}
	begin, sent := dropped(), uint64(0)
	for _, tt := range []struct {
		name    string
		to      ib.QPN
		answer  bool
		spoiled bool
		remove  bool
		counter string
		asked   int64
	}{
		{"refused", mine, false, false, false, "rx_drop_refused", 1},
		{"refused, with a wrong ICRC", mine, false, true, false, "rx_drop_refused", 1},
		{"passed on, where nobody has the QPN", mine, true, false, false, "rx_drop_unknown_qpn", 1},
		{"passed on, with a wrong ICRC", mine, true, true, false, "rx_drop_icrc", 1},
		{"another queue pair's", mine + 1, false, false, false, "rx_drop_unknown_qpn", 0},
		{"QP 1's", ib.QPNGSI, false, false, false, "rx_drop_malformed", 0},
		{"without a filter", mine, false, false, true, "rx_drop_unknown_qpn", 0},
	} {
		if tt.remove {
			d.FilterDatagrams(0, nil)
		}
		answer.Store(tt.answer)
		before, was := counter(d, tt.counter), asked.Load()
		b := datagramFor(from, to, port, 64, tt.to, 0xffff, ib.QKeyIPoIB)
		if tt.spoiled {
			b[len(b)-1] ^= 1
		}
		send(b, to)
		sent++
		until(t, tt.name+": "+tt.counter, func() bool { return counter(d, tt.counter) == before+1 })
		if got := asked.Load() - was; got != tt.asked {
			t.Errorf("%s: asked %d times, want %d", tt.name, got, tt.asked)
		}
	}
	if got := dropped() - begin; got != sent {
		t.Errorf("%d drops were counted of %d datagrams, want one each", got, sent)
	}
}
