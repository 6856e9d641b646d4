package softroce

import (
	"errors"
	"sync/atomic"

	"ipoibcm/verbs"
)

// The offloads, as indices.
const (
	gso       = iota // UDP_SEGMENT
	gro              // UDP_GRO
	hold             // of the P while waiting
	busyPoll         // before waiting
	connected        // sockets connected to one destination
	offloads
)

// tryOffloads tests what is not switched off, and switches off what fails.
func (d *Device) tryOffloads() {
	d.noGSO.Store(d.opts.NoGSO)
	d.noGRO.Store(d.opts.NoGRO)
	for i, off := range []bool{d.opts.NoGSO, d.opts.NoGRO} {
		if off {
			d.offloadOff(i, "switched off")
			continue
		}
		test := d.opts.testOffload
		if test == nil {
			test = testOffload
		}
		switch err := test(i == gso, i == gro); {
		case errors.Is(err, ErrLoopback):
			text := "not tried, because " + err.Error()
			d.whyOff[i].Store(&text)
		case err != nil:
			d.count.selfTestFailed[i].Add(1)
			d.log.Warn("an offload does not work and is not used", "offload", offloadNames[i].what, "err", err)
			d.offloadOff(i, "its test failed: "+err.Error())
		}
	}
	d.tryHold()
	d.trySpin()
}

// offloadOff switches one off and notes why.
func (d *Device) offloadOff(i int, why string) {
	[...]*atomic.Bool{gso: &d.noGSO, gro: &d.noGRO, hold: &d.noHold, busyPoll: &d.noSpin, connected: &d.noConnect}[i].Store(true)
	d.whyOff[i].Store(&why)
}

var offloadNames = [...]struct{ name, what string }{
	gso: {"gso", "UDP_SEGMENT"}, gro: {"gro", "UDP_GRO"}, hold: {"hold_p", "waits that hold Go's P"},
	busyPoll: {"busy_poll", "polling before waits"}, connected: {"connected", "connected sockets (IPv6)"},
}

// Offloads implements [verbs.Offloader].
func (d *Device) Offloads() []verbs.Offload {
	out := make([]verbs.Offload, len(offloadNames))
	for i, n := range offloadNames {
		out[i] = verbs.Offload{Name: n.name, What: n.what}
		if why := d.whyOff[i].Load(); why != nil {
			out[i].Why = *why
		}
	}
	out[gso].On, out[gso].Uses = !d.noGSO.Load(), d.count.txBatches.Load()
	out[gro].On, out[gro].Uses = !d.noGRO.Load(), d.count.rxChains.Load()
	out[hold].On, out[hold].Uses = !d.noHold.Load(), d.count.rxHeld.Load()
	out[busyPoll].On, out[busyPoll].Uses = !d.noSpin.Load(), d.count.rxSpinHits.Load()
	out[connected].On, out[connected].Uses = !d.noConnect.Load(), d.count.txConnected.Load()
	return out
}
