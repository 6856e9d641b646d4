package softroce

import (
	"slices"
	"sync/atomic"

	"ipoibcm/counters"
	"ipoibcm/ib"
	"ipoibcm/provider/softroce/engine"
)

// counts are the counters of the device. Queue pairs and data threads have their own.
type counts struct {
	txWaits         atomic.Uint64 `name:"tx_waits"`
	txNoRoom        atomic.Uint64 `name:"tx_drop_no_room"`
	txTooBig        atomic.Uint64 `name:"tx_drop_too_big"`
	txErrors        atomic.Uint64 `name:"tx_drop_errors"`
	lastErrno       atomic.Uint64 `name:"tx_last_errno"`
	gsoRefused      atomic.Uint64 `name:"tx_gso_refused"`
	txFragmented    atomic.Uint64 `name:"tx_fragmented"`
	groRefused      atomic.Uint64 `name:"rx_gro_refused"`
	connectFailed   atomic.Uint64 `name:"tx_connect_failed"`
	connectLost     atomic.Uint64 `name:"tx_connect_lost"`
	selfTestFailed  byOffload     `name:""`
	rxErrors        atomic.Uint64 `name:"rx_errors"`
	rxTruncated     atomic.Uint64 `name:"rx_drop_truncated"`
	rxOverflow      atomic.Uint64 `name:"rx_drop_overflow"`
	rxMalformed     atomic.Uint64 `name:"rx_drop_malformed"`
	rxICRC          atomic.Uint64 `name:"rx_drop_icrc"`
	rxForeignID     atomic.Uint64 `name:"rx_foreign_id"`
	rxOtherGID      atomic.Uint64 `name:"rx_drop_other_gid"`
	rxOwnEcho       atomic.Uint64 `name:"rx_drop_own_echo"`
	rxUnknownQPN    atomic.Uint64 `name:"rx_drop_unknown_qpn"`
	rxNoMember      atomic.Uint64 `name:"rx_drop_no_member"`
	rxEarly         atomic.Uint64 `name:"rx_drop_early"`
	rxCNP           atomic.Uint64 `name:"rx_cnp"`
	rxNotOurs       atomic.Uint64 `name:"rx_drop_not_ours"`
	rxRefused       atomic.Uint64 `name:"rx_drop_refused"`
	rxFiltered      atomic.Uint64 `name:"rx_drop_filtered"`
	filterErrors    atomic.Uint64 `name:"filter_errors"`
	madsIn          atomic.Uint64 `name:"mads_in"`
	madsOut         atomic.Uint64 `name:"mads_out"`
	madsDropped     atomic.Uint64 `name:"mads_dropped"`
	madsFlood       atomic.Uint64 `name:"mads_drop_flood"`
	eventsDropped   atomic.Uint64 `name:"events_dropped"`
	cqGrown         atomic.Uint64 `name:"cq_grown"`
	joinErrors      atomic.Uint64 `name:"multicast_join_errors"`
	reopenFailed    atomic.Uint64 `name:"reopen_failed"`
	recvBuffer      atomic.Uint64 `name:"socket_recv_buffer"`
	recvBufferAsked atomic.Uint64 `name:"socket_recv_buffer_asked"`
	sendBuffer      atomic.Uint64 `name:"socket_send_buffer"`
	sendBufferAsked atomic.Uint64 `name:"socket_send_buffer_asked"`
	// rxDrops also counts packets to groups and to QP 1.
	rxDrops engine.DropCounts[atomic.Uint64] `name:"rx_drop_"`
}

// byOffload are counters of GSO and GRO.
type byOffload [2]atomic.Uint64

// Name returns the name of counter i.
func (*byOffload) Name(i int) string {
	return [...]string{gso: "tx_gso_selftest_failed", gro: "rx_gro_selftest_failed"}[i]
}

// Counters implements [verbs.Provider]. It reports what the sockets did and dropped, the
// buffers that the kernel gave, and for each transport the sums over all queue pairs,
// including those that are gone. No sum falls: what a queue pair that goes meanwhile has counted is in
// neither part of the sum, and so in the next report.
func (d *Device) Counters(f func(name string, value uint64)) {
	ofThreads := d.ofThreads()
	counters.Each(&ofThreads, f)
	counters.Each(&d.count, f)
	d.mu.Lock()
	sums := d.retired
	d.mu.Unlock()
	for _, q := range d.qps.all() {
		q.mu.Lock()
		if !q.gone {
			counters.Add(&sums[transportIndex(q.transport)], q.eng.Counters())
		}
		q.mu.Unlock()
	}
	d.mu.Lock()
	for i := range sums {
		counters.Raise(&d.reported[i], &sums[i])
	}
	sums = d.reported
	d.mu.Unlock()
	for i, name := range [...]string{"rc_", "uc_", "ud_"} {
		counters.Each(&sums[i], func(n string, v uint64) { f(name+n, v) })
	}
}

var transports = [...]ib.Transport{ib.RC, ib.UC, ib.UD}

func transportIndex(t ib.Transport) int { return slices.Index(transports[:], t) }

// retire adds the counters of q, which is being destroyed, to the sums of the device. The
// caller holds q.mu.
func (d *Device) retire(q *qp) {
	d.mu.Lock()
	counters.Add(&d.retired[transportIndex(q.transport)], q.eng.Counters())
	d.mu.Unlock()
}
