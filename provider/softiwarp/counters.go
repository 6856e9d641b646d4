package softiwarp

import (
	"sync"
	"sync/atomic"

	"ipoibcm/counters"
	"ipoibcm/mpa"
)

// counts are the counters of the device.
type counts struct {
	streams        atomic.Uint64 `name:"streams"`
	connectErrors  atomic.Uint64 `name:"connect_errors"`
	acceptErrors   atomic.Uint64 `name:"accept_errors"`
	guestsRefused  atomic.Uint64 `name:"pending_refused"`
	unknownSources atomic.Uint64 `name:"unknown_sources_rejected"`
	nobodyHome     atomic.Uint64 `name:"no_queue_pair"`
	txOctets       atomic.Uint64 `name:"tx_octets"`
	rxSegments     atomic.Uint64 `name:"rx_segments"`
	termsIn        atomic.Uint64 `name:"terminates_received"`
	termsOut       atomic.Uint64 `name:"terminates_sent"`
	closes         atomic.Uint64 `name:"peer_closed"`
	lost           atomic.Uint64 `name:"connections_lost"`
	recvWaits      atomic.Uint64 `name:"receive_waits"`
	recvTimeouts   atomic.Uint64 `name:"receive_timeouts"`
	overIRD        atomic.Uint64 `name:"reads_over_ird"`
	eventsDropped  atomic.Uint64 `name:"events_dropped"`
	cqOver         atomic.Uint64 `name:"cq_over_depth"`
	faultsRDMAP    atomic.Uint64 `name:"rx_faults_rdmap"`
	faultsDDP      atomic.Uint64 `name:"rx_faults_ddp"`

	mu  sync.Mutex
	mpa mpa.Counters
}

// Counters implements [verbs.Provider].
func (d *Device) Counters(f func(name string, value uint64)) {
	c := &d.count
	counters.Each(c, f)
	c.mu.Lock()
	sums := c.mpa
	c.mu.Unlock()
	sums.Each(func(name string, v uint64) { f("mpa_"+name, v) })
}

// counted returns a function for [Startup.Count]. That function adds what it gets to the device's
// counters, and then passes it to the parameter also, unless that is nil.
func (d *Device) counted(also func(*mpa.Counters)) func(*mpa.Counters) {
	return func(c *mpa.Counters) {
		d.count.mu.Lock()
		d.count.mpa.Add(c)
		d.count.mu.Unlock()
		if also != nil {
			also(c)
		}
	}
}

// countReason counts a fault of FPDUs. The machine counts its own faults itself.
func (d *Device) countReason(r mpa.Reason) {
	if !r.FPDU() {
		return
	}
	d.count.mu.Lock()
	d.count.mpa[r]++
	d.count.mu.Unlock()
}

func (d *Device) countTerm(c mpa.Cause) {
	if c.Layer() == 0 {
		d.count.faultsRDMAP.Add(1)
	} else {
		d.count.faultsDDP.Add(1)
	}
}
