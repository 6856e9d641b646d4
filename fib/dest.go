package fib

import (
	"net/netip"
	"slices"
	"time"

	"ipoibcm/lru"
	"ipoibcm/rtnl"
	"ipoibcm/wire/ip"
)

const (
	// maxAge is the age at which an answer in use is asked for again: the data path reports its use with Stale.
	maxAge = 30 * time.Second
	// maxWaitingPackets bounds the packets that wait for one answer.
	maxWaitingPackets = 64
	// expireBatch bounds how many destinations one Wake forgets.
	expireBatch = 1024
)

// A dest is a destination that the data path knows, or for which the kernel has been asked.
type dest struct {
	entry
	hop      netip.Addr // zero until the first answer
	answered time.Time  // when the kernel answered last; zero before the first answer
	asked    uint32     // generation at the last Lookup; reroute makes it differ after a change to a prefix
	asking   bool       // a Lookup is under way
	waiting  [][]byte   // packets for the first answer

	lru.Links[dest] // in dests.idle, unless asking
}

// dests is the cache of the kernel's answers.
type dests struct {
	fields rtnl.Fields
	index  index[*dest]
	// idle has the destinations for which no Lookup is under way, in the order of their last answers. One in use is
	// asked for every maxAge, so the oldest was used longest ago, with an error of at most maxAge.
	idle       lru.List[dest, *dest]
	packets    int    // packets that wait for answers, without nil ones
	octets     int    // octets of these packets
	generation uint32 // number of changes that concerned all destinations
	resets     uint32 // how often all destinations were forgotten
}

// lookups returns how many Lookups are under way.
func (s *dests) lookups() int { return s.index.Len() - s.idle.Len() }

// Deadline returns when the driver must send Wake, which forgets the oldest idle destination. Zero means never.
func (t *Table) Deadline() time.Time {
	if d := t.dests.idle.Oldest(); d != nil {
		return d.answered.Add(2 * maxAge)
	}
	return time.Time{}
}

// step forwards a packet for which the data path had no destination, or one that a change made stale long ago. If the
// next hop is not known, or may have changed, it asks the kernel and keeps the packet. Above the limits another
// destination gives way, an old answer serves, or step drops the packet.
func (ev Resolve) step(t *Table) {
	d := t.dests.index.get(ev.Flow)
	if d == nil {
		oldest, full := t.dests.idle.Oldest(), t.dests.index.Len() >= t.opt.MaxDests
		if t.dests.lookups() >= t.opt.MaxLookups || full && oldest == nil {
			t.n.DropBusy += uint64(min(1, len(ev.Packet))) // a nil packet is none
			return
		}
		if full {
			t.n.Evicted++
			t.forget(oldest)
		}
		d = &dest{entry: entry{ev.Flow}}
		t.dests.index.Set(d)
		t.dests.idle.Push(d)
		var src netip.Addr
		for p := range t.routes.addrs {
			if p.Contains(d.flow.Dst) {
				src, _ = ip.Src(ev.Packet)
			}
		}
		t.ask(d, src)
	} else if !d.asking && t.dests.lookups() < t.opt.MaxLookups &&
		(d.asked != t.dests.generation || t.now.Sub(d.answered) >= maxAge) { // its answer may be another now
		t.ask(d, netip.Addr{})
	}
	full := len(d.waiting) >= maxWaitingPackets || t.dests.octets+len(ev.Packet) > t.opt.MaxWaiting
	switch {
	case d.hop.IsValid() && (!d.asking || full):
		t.do(Forward{Hop: d.hop, Packet: ev.Packet})
	case full:
		t.n.DropWaiting += uint64(min(1, len(ev.Packet)))
	default:
		d.waiting = append(d.waiting, ev.Packet)
		t.dests.packets += min(1, len(ev.Packet))
		t.dests.octets += len(ev.Packet)
	}
}

// step asks again for a destination that is in use.
func (ev Stale) step(t *Table) {
	d := t.dests.index.get(ev.Flow)
	switch {
	case d == nil || d.asking:
	case t.dests.lookups() >= t.opt.MaxLookups:
		t.do(StaleDest(ev)) // a later packet asks again
	default:
		t.ask(d, netip.Addr{})
	}
}

// ask asks the kernel for the next hop of d, which is idle. If src is valid, the next hop is most likely d itself.
func (t *Table) ask(d *dest, src netip.Addr) {
	t.dests.idle.Remove(d)
	d.asking, d.asked = true, t.dests.generation
	t.n.Lookups++
	t.do(Lookup{Flow: d.flow, Link: t.routes.link, Resets: t.dests.resets, Src: src})
}

// step gives the kernel's answer to the data path, and forwards the packets that waited for it. If the kernel could
// not be asked, an old answer stays in force; without one, step drops the packets.
func (ev Answered) step(t *Table) {
	d := t.dests.index.get(ev.Lookup.Flow)
	if d == nil || !d.asking || ev.Lookup.Resets != t.dests.resets {
		return // forgotten meanwhile, and perhaps asked for again
	}
	d.asking, d.answered = false, t.now
	old, hop := d.hop, ev.NextHop.Addr
	if ev.Err != nil {
		t.n.LookupsFailed++
		t.note(d.flow.Dst, "the kernel cannot be asked: %v", ev.Err)
		hop = old // the old answer serves on, if there is one
	}
	if d.hop = hop; hop.IsValid() {
		t.hold(hop)
		t.do(SetDest{Flow: d.flow, Hop: hop})
	}
	if old.IsValid() {
		t.release(old)
	}
	for _, packet := range d.waiting {
		t.dests.packets -= min(1, len(packet))
		t.dests.octets -= len(packet)
		if hop.IsValid() {
			t.do(Forward{Hop: hop, Packet: packet})
		} else {
			t.n.DropNoAnswer += uint64(min(1, len(packet)))
		}
	}
	d.waiting = nil
	if !hop.IsValid() {
		t.dests.index.Delete(d)
		return
	}
	t.dests.idle.Push(d)
	if ev.Err == nil && d.asked != t.dests.generation { // something changed since it was asked
		t.ask(d, netip.Addr{})
	}
}

// forget removes d, which is idle, from every record.
func (t *Table) forget(d *dest) {
	t.dests.index.Delete(d)
	t.dests.idle.Remove(d)
	t.do(SetDest{Flow: d.flow})
	t.release(d.hop)
}

// step forgets destinations that were not used for long.
func (Wake) step(t *Table) {
	for range expireBatch {
		if at := t.Deadline(); at.IsZero() || t.now.Before(at) {
			return
		}
		t.forget(t.dests.idle.Oldest())
	}
}

// reroute makes the next packet to each destination inside p, to any if p is zero, ask the kernel again.
func (t *Table) reroute(p netip.Prefix) {
	if !p.IsValid() || p.Bits() == 0 {
		t.dests.generation++
		t.do(StaleDest{})
		return
	}
	for d := range t.dests.index.in(p) {
		if d.asked--; !d.asking {
			t.do(StaleDest{Flow: d.flow})
		}
	}
}

// setFields defines a flow as the packets that are alike in the fields f. If that is a change, setFields forgets
// all destinations and resolves the waiting packets again.
func (t *Table) setFields(f rtnl.Fields) {
	if f == t.dests.fields {
		return
	}
	for _, packet := range t.resetDests(f) {
		if flow, ok := ip.FlowOf(packet, f); ok {
			Resolve{Flow: flow, Packet: packet}.step(t)
		}
	}
}

// resetDests forgets all destinations, and returns the packets that waited.
func (t *Table) resetDests(f rtnl.Fields) (waiting [][]byte) {
	old := t.dests.index
	t.dests = dests{fields: f, index: newIndex(&dest{}), resets: t.dests.resets + 1}
	t.do(ResetDests{Fields: f})
	for d := range old.in(netip.Prefix{}) {
		waiting = append(waiting, slices.DeleteFunc(d.waiting, func(p []byte) bool { return p == nil })...)
		if d.hop.IsValid() {
			t.release(d.hop)
		}
	}
	return waiting
}
