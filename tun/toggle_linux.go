package tun

import "sync/atomic"

// switchedOff is the reason that is given when the options switch something off.
const switchedOff = "switched off"

// A toggle is the state of one kind of GSO packets. It can be switched while packets move.
type toggle struct {
	on     atomic.Bool
	why    string // why it is off, or what is doubtful
	cannot string // why it can never be on; empty if it can
	doubt  string // what is doubtful while it is on

	noMerge         atomic.Bool // the kernel refused a merged packet
	merged, written atomic.Uint64
}

// reason returns why it is off, or what is doubtful.
func (o *toggle) reason() string {
	if o.noMerge.Load() {
		return "the kernel did not take one of ours: no more are put together"
	}
	return o.why
}

// judged takes the result of a trial.
func (o *toggle) judged(err error) {
	if ok, why := judge(err); ok {
		o.doubt = why
	} else {
		o.cannot = why
	}
}

// set switches it on if it can be on, or off, and reports whether that changed anything.
func (o *toggle) set(on bool) bool {
	o.why = switchedOff
	if on {
		o.why = o.doubt
		if o.cannot != "" {
			on, o.why = false, o.cannot
		}
	}
	return o.on.Swap(on) != on
}

// fail switches it off for good because the kernel refuses it.
func (o *toggle) fail(why string) {
	o.on.Store(false)
	o.cannot, o.why = why, why
}

// SetGSO sets whether the kernel gives and takes TCP and UDP in GSO packets, as
// [Options.NoSegments] and [Options.NoDatagrams] do at the start. Packets may move meanwhile. Only
// one goroutine at a time may call SetGSO, Segments and Datagrams.
func (t *File) SetGSO(segments, datagrams bool) {
	tcp, udp := t.tso.set(segments), t.uso.set(datagrams)
	if !tcp && !udp || !t.csum.on {
		return
	}
	if t.offerGSO(); !t.tso.on.Load() && !t.uso.on.Load() {
		t.offload(tunFCsum)
	}
	for _, q := range t.queues {
		q.follow(t)
	}
}

// offerGSO sets in the kernel what is on, and switches off what the kernel refuses.
func (t *File) offerGSO() {
	for _, o := range []struct {
		*toggle
		name string
	}{{&t.uso.toggle, "UDP"}, {&t.tso.toggle, "TCP"}} {
		if !o.on.Load() {
			continue
		}
		e := t.offload(t.features())
		if e == 0 {
			return
		}
		o.fail("the kernel does not give " + o.name + " in GSO packets: " + e.Error())
	}
}
