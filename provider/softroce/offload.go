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
	for i, off := range [...]bool{gso: d.opts.NoGSO, gro: d.opts.NoGRO} {
		if off {
			d.offloadOff(i, switchedOff)
		} else {
			d.tryOffload(i)
		}
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
		d.offload[i].why.Store(&text)
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
	o := &d.offload[i]
	if o.off.Load() == !on || d.closing.Load() {
		return
	}
	switch {
	case !on:
		d.offloadOff(i, switchedOff)
	case i == connected && len(d.sendersOf(true)) == 0:
		d.offloadOff(i, onlyIPv6)
	default:
		o.why.Store(nil)
		o.off.Store(false)
	}
	switch {
	case i == connected && !on:
		d.disconnectAll()
	case i != connected && on:
		d.tryOffload(i)
	}
	if i == gro {
		for _, r := range d.receivers {
			r.setGRO(r.fd)
		}
	}
}

// SetTrafficClass implements [verbs.Tuner].
func (d *Device) SetTrafficClass(class uint8) { d.class.Store(uint32(class)) }

// An offloadState says whether an offload is off, and why it is, or was not tried.
type offloadState struct {
	off atomic.Bool
	why atomic.Pointer[string]
}

// isOff reports whether offload i is off.
func (d *Device) isOff(i int) bool { return d.offload[i].off.Load() }

// offloadOff switches offload i off and notes why.
func (d *Device) offloadOff(i int, why string) {
	d.offload[i].off.Store(true)
	d.offload[i].why.Store(&why)
}

var offloadNames = [...]struct{ name, what string }{
	gso: {"gso", "UDP_SEGMENT"}, gro: {"gro", "UDP_GRO"}, hold: {"hold_p", "waits that hold Go's P"},
	busyPoll: {"busy_poll", "polling before waits"}, connected: {"connected", "connected sockets (IPv6)"},
}

// Offloads implements [verbs.Offloader].
func (d *Device) Offloads() []verbs.Offload {
	n := d.ofThreads()
	uses := [...]uint64{gso: n.txBatches, gro: n.rxChains, hold: n.rxHeld, busyPoll: n.rxSpinHits,
		connected: n.txConnected}
	out := make([]verbs.Offload, len(offloadNames))
	for i, o := range offloadNames {
		out[i] = verbs.Offload{Name: o.name, What: o.what, On: !d.isOff(i), Uses: uses[i]}
		if why := d.offload[i].why.Load(); why != nil {
			out[i].Why = *why
		}
	}
	return out
}
