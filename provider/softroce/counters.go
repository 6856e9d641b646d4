package softroce

import (
	"sync/atomic"

	"ipoibcm/ib"
	"ipoibcm/provider/softroce/engine"
)

// counters are those of the device; queue pairs count for themselves, and so does each data thread.
type counters struct {
	txWaits, txNoRoom, txTooBig         atomic.Uint64
	txErrors, lastErrno, gsoRefused     atomic.Uint64
	selfTestFailed                      [2]atomic.Uint64 // of GSO and GRO
	txFragmented, groRefused            atomic.Uint64
	connectFailed, connectLost          atomic.Uint64
	rxErrors, rxTruncated, rxOverflow   atomic.Uint64
	rxMalformed, rxICRC, rxForeignID    atomic.Uint64
	rxOtherGID, rxOwnEcho, rxUnknownQPN atomic.Uint64
	rxNoMember, rxCNP                   atomic.Uint64
	rxNotOurs, rxRefused                atomic.Uint64
	rxFiltered, filterErrors            atomic.Uint64
	rxDrops                             [engine.NumDropReasons]atomic.Uint64
	madsIn, madsOut, madsDropped        atomic.Uint64
	madsFlood                           atomic.Uint64
	eventsDropped, cqGrown, joinErrors  atomic.Uint64
	reopenFailed                        atomic.Uint64
	recvBuffer, sendBuffer              atomic.Uint64
	recvBufferAsked, sendBufferAsked    atomic.Uint64
}

// Counters implements [verbs.Provider]: what the sockets did and dropped, what
// the kernel gave, and the sums over all queue pairs there were and are, by
// transport.
func (d *Device) Counters(f func(name string, value uint64)) {
	for i, e := range d.threads[0].count.all() {
		value := e.value.Load()
		for _, th := range d.threads[1:] {
			value += th.count.all()[i].value.Load()
		}
		f(e.name, value)
	}
	c := &d.count
	for _, e := range [...]namedCounter{
		{"tx_waits", &c.txWaits}, {"tx_drop_no_room", &c.txNoRoom}, {"tx_drop_too_big", &c.txTooBig},
		{"tx_drop_errors", &c.txErrors}, {"tx_last_errno", &c.lastErrno}, {"tx_gso_refused", &c.gsoRefused},
		{"tx_fragmented", &c.txFragmented}, {"rx_gro_refused", &c.groRefused},
		{"tx_connect_failed", &c.connectFailed}, {"tx_connect_lost", &c.connectLost},
		{"tx_gso_selftest_failed", &c.selfTestFailed[gso]}, {"rx_gro_selftest_failed", &c.selfTestFailed[gro]},
		{"rx_errors", &c.rxErrors}, {"rx_drop_truncated", &c.rxTruncated}, {"rx_drop_overflow", &c.rxOverflow},
		{"rx_drop_malformed", &c.rxMalformed}, {"rx_drop_icrc", &c.rxICRC}, {"rx_foreign_id", &c.rxForeignID},
		{"rx_drop_other_gid", &c.rxOtherGID}, {"rx_drop_own_echo", &c.rxOwnEcho}, {"rx_drop_unknown_qpn", &c.rxUnknownQPN},
		{"rx_drop_no_member", &c.rxNoMember}, {"rx_drop_early", &d.early.full}, {"rx_cnp", &c.rxCNP},
		{"rx_drop_not_ours", &c.rxNotOurs}, {"rx_drop_refused", &c.rxRefused},
		{"rx_drop_filtered", &c.rxFiltered}, {"filter_errors", &c.filterErrors},
		{"mads_in", &c.madsIn}, {"mads_out", &c.madsOut}, {"mads_dropped", &c.madsDropped},
		{"mads_drop_flood", &c.madsFlood},
		{"events_dropped", &c.eventsDropped}, {"cq_grown", &c.cqGrown}, {"multicast_join_errors", &c.joinErrors},
		{"reopen_failed", &c.reopenFailed},
		{"socket_recv_buffer", &c.recvBuffer}, {"socket_recv_buffer_asked", &c.recvBufferAsked},
		{"socket_send_buffer", &c.sendBuffer}, {"socket_send_buffer_asked", &c.sendBufferAsked},
	} {
		f(e.name, e.value.Load())
	}
	// Packets to groups and to QP 1 too; the sums below do not have the latter.
	for r := engine.NoDrop + 1; r < engine.NumDropReasons; r++ {
		f("rx_drop_"+r.String(), c.rxDrops[r].Load())
	}
	var sums [3]engine.Counters
	d.mu.Lock()
	sums = d.retired
	d.mu.Unlock()
	for _, q := range d.qps.all() {
		q.mu.Lock()
		if !q.gone {
			sums[transportIndex(q.transport)].Add(q.eng.Counters())
		}
		q.mu.Unlock()
	}
	for i, name := range [...]string{"rc_", "uc_", "ud_"} {
		sums[i].Each(func(n string, v uint64) { f(name+n, v) })
	}
}

func transportIndex(t ib.Transport) int {
	switch t {
	case ib.RC:
		return 0
	case ib.UC:
		return 1
	}
	return 2
}

// retire keeps what a queue pair that goes has counted. Its lock is held.
func (d *Device) retire(q *qp) {
	d.mu.Lock()
	d.retired[transportIndex(q.transport)].Add(q.eng.Counters())
	d.mu.Unlock()
}
