package softroce

import (
	"net/netip"
	"testing"

	"ipoibcm/ib"
	"ipoibcm/verbs"
	"ipoibcm/wire/roce"
)

// qp1QKey is the well-known Q_Key of QP 1 (IBA volume 1, section 10.2.5), as a
// number of its own.
const qp1QKey ib.QKey = 0x80010000

// datagramFor makes a UD SEND Only of n octets from QP 77, with a right ICRC.
func datagramFor(src, dst string, port uint16, n int, qpn ib.QPN, k ib.PKey, q ib.QKey) []byte {
	b := make([]byte, roce.BTHLen+roce.DETHLen+n, roce.BTHLen+roce.DETHLen+n+roce.ICRCLen)
	roce.PutBTH(b, roce.BTHFields{Opcode: roce.UDSendOnly, PKey: k, DestQPN: qpn})
	roce.PutDETH(b[roce.BTHLen:], q, 77)
	icrc := roce.NewFlow(netip.MustParseAddr(src), netip.MustParseAddr(dst)).Sum(port, b, 0)
	b = b[:cap(b)]
	icrc.Put(b[len(b)-roce.ICRCLen:])
	return b
}

// QP 1 takes a MAD with the Q_Key of QP 1 and a P_Key of the port's partition,
// and no other.
func TestGSIChecks(t *testing.T) {
	const from, to = "127.0.0.1", "127.0.0.2"
	_, d := pair(t, families[0], nil)
	send, port := foreign(t, from)
	for _, tt := range []struct {
		name, counter string
		pkey          ib.PKey
		qkey          ib.QKey
		size          int
	}{
		{"another Q_Key", "rx_drop_qkey", 0xffff, 0x00000b1b, verbs.MADLen},
		{"Q_Key 0", "rx_drop_qkey", 0xffff, 0, verbs.MADLen},
		{"Q_Key without its high bit", "rx_drop_qkey", 0xffff, 0x00010000, verbs.MADLen},
		{"another partition", "rx_drop_pkey", 0x8001, qp1QKey, verbs.MADLen},
		{"P_Key 0, which is none", "rx_drop_pkey", 0, qp1QKey, verbs.MADLen},
		{"shorter than a MAD", "rx_drop_malformed", 0xffff, qp1QKey, verbs.MADLen - 4},
		{"longer than a MAD", "rx_drop_malformed", 0xffff, qp1QKey, verbs.MADLen + 4},
		{"as it should be", "mads_in", 0xffff, qp1QKey, verbs.MADLen},
		{"from a limited member", "mads_in", 0x7fff, qp1QKey, verbs.MADLen},
	} {
		before, taken := counter(d, tt.counter), counter(d, "mads_in")
		send(datagramFor(from, to, port, tt.size, ib.QPNGSI, tt.pkey, tt.qkey), to)
		until(t, tt.name+": "+tt.counter, func() bool { return counter(d, tt.counter) == before+1 })
		if tt.counter != "mads_in" {
			if got := counter(d, "mads_in"); got != taken {
				t.Errorf("%s: QP 1 took %d MADs, want %d", tt.name, got, taken)
			}
			continue
		}
		m := <-d.MADPort().MADs()
		if m.Remote != gid(from) {
			t.Errorf("%s: from %v, want %v", tt.name, m.Remote, gid(from))
		}
		if m.QPN != 77 {
			t.Errorf("%s: from QP %v, want 0x00004d", tt.name, m.QPN)
		}
		if m.PKey != tt.pkey {
			t.Errorf("%s: P_Key %v, want %v", tt.name, m.PKey, tt.pkey)
		}
	}
}
