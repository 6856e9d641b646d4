package softiwarp

import (
	"sync"
	"sync/atomic"

	"ipoibcm/mpa"
)

// counters are those of the device.
type counters struct {
	engineCounters
	streams, connectErrors          atomic.Uint64
	acceptErrors, guestsRefused     atomic.Uint64
	unknownSources, nobodyHome      atomic.Uint64
	txOctets, rxSegments            atomic.Uint64
	termsIn, termsOut, closes, lost atomic.Uint64
	recvWaits, recvTimeouts         atomic.Uint64
	eventsDropped, cqOver           atomic.Uint64
	faultsRDMAP, faultsDDP          atomic.Uint64

	mu  sync.Mutex
	mpa mpa.Counters
}

// engineCounters are those of the queue pairs' engines, in sum.
type engineCounters struct {
	overIRD atomic.Uint64 // Read Requests above the IRD
}

// Counters implements [verbs.Provider].
func (d *Device) Counters(f func(name string, value uint64)) {
	c := &d.count
	for _, e := range [...]struct {
		name  string
		value *atomic.Uint64
	}{
		{"streams", &c.streams}, {"connect_errors", &c.connectErrors}, {"accept_errors", &c.acceptErrors},
		{"pending_refused", &c.guestsRefused}, {"unknown_sources_rejected", &c.unknownSources},
		{"no_queue_pair", &c.nobodyHome},
		{"tx_octets", &c.txOctets}, {"rx_segments", &c.rxSegments}, {"terminates_received", &c.termsIn},
		{"terminates_sent", &c.termsOut},
		{"peer_closed", &c.closes}, {"connections_lost", &c.lost}, {"receive_waits", &c.recvWaits},
		{"receive_timeouts", &c.recvTimeouts},
		{"reads_over_ird", &c.overIRD}, {"events_dropped", &c.eventsDropped}, {"cq_over_depth", &c.cqOver},
		{"rx_faults_rdmap", &c.faultsRDMAP}, {"rx_faults_ddp", &c.faultsDDP},
	} {
		f(e.name, e.value.Load())
	}
	c.mu.Lock()
	sums := c.mpa
	c.mu.Unlock()
	sums.Each(func(name string, v uint64) { f("mpa_"+name, v) })
}

// counted returns a function for [Startup.Count] that adds to the device's
// counters and calls also.
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

// countReason counts a fault of FPDUs. Those of a machine it counts itself.
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

// A semaphore counts what is there at a time.
type semaphore struct{ n atomic.Int32 }

func (s *semaphore) enter(limit int32) bool {
	if s.n.Add(1) > limit {
		s.n.Add(-1)
		return false
	}
	return true
}

func (s *semaphore) leave() { s.n.Add(-1) }
