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
	var sum madCounts[uint64]
	if d.mads != nil {
		counters.Add(&sum, &d.mads.gsi.raw.madCounts)
		sum.dropped += d.mads.dropped.Load()
	}
	counters.Each(&sum, f)
}
