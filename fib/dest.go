package fib

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	"ipoibcm/rtnl"
	"ipoibcm/wire/ip"
)

const (
	// maxGroups bounds the groups that have a destination of their own; packets
	// to others come up every time.
	maxGroups = 1024
	// maxWaitingPackets bounds what waits for one answer.
	maxWaitingPackets = 64
	// expireBatch bounds how many destinations one Wake forgets.
	expireBatch = 1024
)

// A dest is a destination that the data path knows, or for which an answer of
// the kernel is due.
type dest struct {
	flow rtnl.Flow
	hop  netip.Addr // zero until the first answer

	answered time.Time // zero before
	asked    uint32    // the generation of the last Lookup
	asking   bool      // it is out
	again    bool      // what it will answer is old already
	fixed    bool      // a group: not the kernel's answer

	waiting [][]byte // packets for the first answer

	older, newer *dest // by when they were answered, or asked for first
}

// dests is the cache of the kernel's answers. Destinations that are used are
// asked for again every MaxAge, so the one answered longest ago is the one that
// was used longest ago, give or take that.
type dests struct {
	fields  rtnl.Fields
	n       int
	index   index
	oldest  *dest
	newest  *dest
	lookups int                 // out
	packets int                 // waiting for answers
	octets  int                 // of them
	groups  map[rtnl.Flow]*dest // fixed ones

	generation uint32 // counts what concerned all destinations
}

func newDests() dests { return dests{groups: map[rtnl.Flow]*dest{}} }

// deadline returns when the oldest destination has not been used for so long that
// it goes.
func (s *dests) deadline(maxAge time.Duration) time.Time {
	if s.oldest == nil || s.oldest.asking {
		return time.Time{}
	}
	return s.oldest.answered.Add(2 * maxAge)
}

func (s *dests) add(d *dest) {
	s.index.add(d)
	s.n++
}

// link puts d at the end of the list.
func (s *dests) link(d *dest) {
	d.older, d.newer = s.newest, nil
	if s.newest == nil {
		s.oldest = d
	} else {
		s.newest.newer = d
	}
	s.newest = d
}

func (s *dests) unlink(d *dest) {
	if d.older == nil {
		s.oldest = d.newer
	} else {
		d.older.newer = d.newer
	}
	if d.newer == nil {
		s.newest = d.older
	} else {
		d.newer.older = d.older
	}
	d.older, d.newer = nil, nil
}

// resolve forwards a packet that the data path could not, or asks where it goes.
func (t *Table) resolve(ev Resolve) {
	d := t.dests.index.get(ev.Flow)
	if d == nil {
		if t.dests.lookups >= t.opt.maxLookups() || !t.room() {
			t.n.DropBusy++
			return
		}
		d = &dest{flow: ev.Flow}
		t.dests.add(d)
		t.dests.link(d)
		t.ask(d)
	}
	if d.hop.IsValid() {
		t.do(Forward{Hop: d.hop, Packet: ev.Packet})
		return
	}
	if len(d.waiting) >= maxWaitingPackets || t.dests.octets+len(ev.Packet) > t.opt.maxWaiting() {
		t.n.DropWaiting++
		return
	}
	d.waiting = append(d.waiting, ev.Packet)
	t.dests.packets++
	t.dests.octets += len(ev.Packet)
}

// room makes room for one more destination.
func (t *Table) room() bool {
	if t.dests.n < t.opt.maxDests() {
		return true
	}
	for d := t.dests.oldest; d != nil; d = d.newer {
		if !d.asking { // of those there are few
			t.n.Evicted++
			t.forget(d)
			return true
		}
	}
	return false
}

// stale asks again for a destination that is in use.
func (t *Table) stale(flow rtnl.Flow) {
	if d := t.dests.index.get(flow); d != nil && !d.asking && !d.fixed {
		if t.dests.lookups >= t.opt.maxLookups() {
			t.do(StaleDest{Flow: flow}) // with a later packet
			return
		}
		t.ask(d)
	}
}

func (t *Table) ask(d *dest) {
	d.asking, d.again, d.asked = true, false, t.dests.generation
	t.dests.lookups++
	t.n.Lookups++
	t.do(Lookup{Flow: d.flow, Link: t.device.link})
}

// answered takes what the kernel says into the data path.
func (t *Table) answered(ev Answered) {
	d := t.dests.index.get(ev.Flow)
	if d == nil || !d.asking {
		return // forgotten meanwhile
	}
	d.asking = false
	t.dests.lookups--
	t.dests.unlink(d)
	t.dests.link(d)
	d.answered = t.now
	if ev.Err != nil {
		t.n.LookupsFailed++
		t.note(ev.Flow.Dst, "the kernel cannot be asked: %v", ev.Err)
		if !d.hop.IsValid() {
			t.n.DropNoAnswer += uint64(len(t.takeWaiting(d)))
			t.forget(d)
			return
		}
		t.do(SetDest{Flow: d.flow, Hop: d.hop}) // the old one serves on
		return
	}
	t.lead(d, ev.NextHop.Addr)
	for _, packet := range t.takeWaiting(d) {
		t.do(Forward{Hop: d.hop, Packet: packet})
	}
	if d.again || d.asked != t.dests.generation { // something changed since it was asked
		t.ask(d)
	}
}

// lead makes packets to d go by hop a.
func (t *Table) lead(d *dest, a netip.Addr) {
	old := d.hop
	if old != a {
		t.hold(a)
	}
	d.hop = a
	t.do(SetDest{Flow: d.flow, Hop: a, Fixed: d.fixed})
	if old.IsValid() && old != a {
		t.release(old)
	}
}

func (t *Table) takeWaiting(d *dest) [][]byte {
	packets := d.waiting
	t.dests.packets -= len(packets)
	for _, p := range packets {
		t.dests.octets -= len(p)
	}
	d.waiting = nil
	return packets
}

// forget removes d from every record.
func (t *Table) forget(d *dest) {
	t.dests.index.remove(d)
	t.dests.n--
	if d.fixed {
		delete(t.dests.groups, d.flow)
	} else {
		t.dests.unlink(d)
	}
	if d.asking {
		t.dests.lookups--
	}
	if d.hop.IsValid() {
		t.do(DelDest{Flow: d.flow})
		t.release(d.hop)
	}
}

// expire forgets what was not used for long.
func (t *Table) expire() {
	for range expireBatch {
		if at := t.dests.deadline(t.opt.maxAge()); at.IsZero() || t.now.Before(at) {
			return
		}
		t.forget(t.dests.oldest)
	}
}

// reroute makes destinations inside p be asked for again; all with a zero p.
func (t *Table) reroute(p netip.Prefix) {
	if !p.IsValid() || p.Bits() == 0 {
		t.dests.generation++
		t.do(StaleDest{})
		return
	}
	for d := range t.dests.index.in(p) {
		switch {
		case d.fixed:
		case d.asking:
			d.again = true
		default:
			t.do(StaleDest{Flow: d.flow})
		}
	}
}

// setFields takes other fields of packets for their flows from now on. What
// waits is asked for anew.
func (t *Table) setFields(f rtnl.Fields) {
	if f == t.dests.fields {
		return
	}
	for _, packet := range t.resetDests(f) {
		if flow, ok := ip.FlowOf(packet, f); ok {
			t.resolve(Resolve{Flow: flow, Packet: packet})
		}
	}
}

// resetDests forgets all destinations. It returns the packets that waited.
func (t *Table) resetDests(f rtnl.Fields) (waiting [][]byte) {
	for d := t.dests.oldest; d != nil; d = d.newer {
		waiting = append(waiting, t.takeWaiting(d)...)
	}
	old := t.dests
	t.dests = newDests()
	t.dests.fields = f
	t.do(ResetDests{Fields: f})
	for d := range old.index.all() {
		if d.hop.IsValid() {
			t.release(d.hop)
		}
	}
	return waiting
}

// setGroup gives a group or broadcast address a destination of its own.
func (t *Table) setGroup(ev SetGroup) {
	d := t.dests.index.get(ev.Flow)
	switch {
	case ev.Path.MTU == 0:
		if d != nil && d.fixed {
			t.forget(d)
		}
		return
	case d != nil && !d.fixed:
		t.forget(d) // the kernel's answer, of before it was a group
		d = nil
	}
	if d == nil {
		if len(t.dests.groups) >= maxGroups {
			t.n.GroupsRefused++
			return
		}
		d = &dest{flow: ev.Flow, fixed: true}
		t.dests.add(d)
		t.dests.groups[d.flow] = d
	}
	a := d.flow.Dst
	if t.hops[a] == nil {
		t.hops[a] = &hop{path: ev.Path, known: true}
		t.do(SetPath{Hop: a, Path: ev.Path})
	}
	t.setHop(a, ev.Path)
	if !d.hop.IsValid() {
		t.lead(d, a)
	}
}

// Groups lists the flows that SetGroup has given a destination.
func (t *Table) Groups() []rtnl.Flow {
	return slices.SortedFunc(maps.Keys(t.dests.groups), compareFlows)
}
