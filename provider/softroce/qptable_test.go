package softroce

import (
	"testing"

	"ipoibcm/ib"
)

// A QPN rests after use even if chance offers it again, and those with a meaning
// of their own are never given.
func TestQPNsRest(t *testing.T) {
	var table qpTable
	next := uint32(0)
	random := func(b []byte) { // 0, 1, 2, …, as if by chance
		b[0], b[1], b[2], b[3] = byte(next), byte(next>>8), byte(next>>16), 0
		next++
	}
	make := func() *qp {
		q := &qp{}
		must(t, table.insert(q, 0, qpnClass{}, random, func(ib.QPN) {}))
		return q
	}
	first := make()
	if first.qpn != 2 {
		t.Errorf("first QPN is %v, want 2: 0 and 1 are not to be had", first.qpn)
	}
	if table.lookup(2) != first || table.lookup(3) != nil {
		t.Error("lookup finds something else")
	}
	table.remove(first)
	if table.lookup(2) != nil {
		t.Error("found after it was removed")
	}
	next = 2
	if q := make(); q.qpn != 3 {
		t.Errorf("QPN %v straight after 2 was freed, want 3", q.qpn)
	}
	for range qpnRest { // others come and go
		table.remove(make())
	}
	next = 2
	if q := make(); q.qpn != 2 {
		t.Errorf("QPN %v, want 2: it has rested", q.qpn)
	}
	next = uint32(ib.QPNMulticast)
	if q := make(); q.qpn == ib.QPNMulticast {
		t.Error("gave away the multicast QPN")
	}
}
