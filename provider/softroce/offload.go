package softroce

import (
	"errors"
	"slices"
	"sync/atomic"

	"ipoibcm/verbs"
)

// The offloads, as indices.
const (
	gso       = iota // UDP_SEGMENT
	gro              // UDP_GRO
	hold             // waits that hold the P
	busyPoll         // polling before waits
	connected        // sockets connected to one destination
	offloads
)

// tryOffloads tests UDP_SEGMENT and UDP_GRO, unless the user has switched them off, and
// switches off what fails. It decides on held waits and busy polling too.
func (d *Device) tryOffloads() {
	d.SetTrafficClass(d.opts.TrafficClass)
	d.noGSO.Store(d.opts.NoGSO)
	d.noGRO.Store(d.opts.NoGRO)
	for i, off := range []bool{d.opts.NoGSO, d.opts.NoGRO} {
		if off {
			d.offloadOff(i, switchedOff)
			continue
		}
		d.tryOffload(i)
	}
	d.tryHold()
	d.trySpin()
}

// switchedOff is the reason why an offload is off if the user does not want it.
const switchedOff = "switched off"

// onlyIPv6 is why there are no connected sockets on an IPv4 underlay.
const onlyIPv6 = "for IPv6 only"

// tryOffload tests UDP_SEGMENT or UDP_GRO, and switches it off if that fails.
func (d *Device) tryOffload(i int) {
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

// SetOffload implements [verbs.Tuner] for gso, gro and connected. It does not change hold_p and
// busy_poll, for which the threads were laid out.
func (d *Device) SetOffload(name string, on bool) {
	i := slices.IndexFunc(offloadNames[:], func(n struct{ name, what string }) bool { return n.name == name })
	if i != gso && i != gro && i != connected {
		return
	}
	if off := d.isOff(i); off.Load() == !on || d.closing.Load() {
		return
	} else if on {
		d.whyOff[i].Store(nil)
		off.Store(false)
		if i != connected {
			d.tryOffload(i)
		} else if len(d.senders6) == 0 {
			d.offloadOff(i, onlyIPv6)
		}
	} else {
		d.offloadOff(i, switchedOff)
	}
	if i == connected && !on {
		for _, s := range d.senders {
			s.mu.Lock()
			s.disconnect()
			s.mu.Unlock()
		}
	}
	if i == gro {
		for _, r := range d.receivers {
			r.setGRO(r.fd)
		}
	}
}

// SetTrafficClass implements [verbs.Tuner].
func (d *Device) SetTrafficClass(class uint8) { d.class.Store(uint32(class)) }

// isOff returns the flag that switches offload i off.
func (d *Device) isOff(i int) *atomic.Bool {
	return [...]*atomic.Bool{gso: &d.noGSO, gro: &d.noGRO, hold: &d.noHold, busyPoll: &d.noSpin, connected: &d.noConnect}[i]
}

// offloadOff switches offload i off and notes why.
func (d *Device) offloadOff(i int, why string) {
	d.isOff(i).Store(true)
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
	n := d.ofThreads()
	out[gso].On, out[gso].Uses = !d.noGSO.Load(), n.txBatches
	out[gro].On, out[gro].Uses = !d.noGRO.Load(), n.rxChains
	out[hold].On, out[hold].Uses = !d.noHold.Load(), n.rxHeld
	out[busyPoll].On, out[busyPoll].Uses = !d.noSpin.Load(), n.rxSpinHits
	out[connected].On, out[connected].Uses = !d.noConnect.Load(), n.txConnected
	return out
}
