//go:build ibverbs && cgo

package ibverbs

import (
	"sync/atomic"

	"ipoibcm/counters"
)

// counts are the counters of a Device. The kernel's own are in
// /sys/class/infiniband/NAME/ports/N/hw_counters.
type counts struct {
	eventsDropped atomic.Uint64 `name:"events_dropped"`
	asyncEvents   atomic.Uint64 `name:"async_events"`
	stale         atomic.Uint64 `name:"stale_completions"`
	sqErrors      atomic.Uint64 `name:"send_queue_errors"`
	cqErrors      atomic.Uint64 `name:"completion_queue_errors"`
	joinErrors    atomic.Uint64 `name:"multicast_join_errors"`
}

// Counters implements [verbs.Provider].
func (d *Device) Counters(f func(name string, value uint64)) {
	counters.Each(&d.count, f)
	d.mu.RLock()
	qps, srqs, cqs, ahs, regions := len(d.qps), len(d.srqs), len(d.cqs), len(d.ahs), len(d.regions)
	d.mu.RUnlock()
	f("queue_pairs", uint64(qps))
	f("shared_receive_queues", uint64(srqs))
	f("completion_queues", uint64(cqs))
	f("address_handles", uint64(ahs))
	f("memory_regions", uint64(regions))
	m := &madPort{} // counters of the port's QP 1, which other Devices of this process may share
	if d.mads != nil {
		m = d.mads.gsi.raw
	}
	f("mads_in", m.received.Load())
	f("mads_out", m.sent.Load())
	dropped := m.dropped.Load()
	if d.mads != nil {
		dropped += d.mads.dropped.Load()
	}
	f("mads_dropped", dropped)
	f("mads_drop_flood", m.flood.Load())
	f("mads_refused", m.refused.Load())
	f("mads_slow", m.slow.Load())
}
