// Package fqcodel is flow queueing with controlled delay (FQ-CoDel, RFC 8290), for many
// destinations that share one store of packets.
//
// A [Scheduler] knows packets by their number and never looks into them. Each destination has a
// [Queue], in which packets wait by flow. Flows take turns by deficit round robin, and a flow that
// had nothing waiting has the first turn. When a packet leaves, CoDel (RFC 8289) checks how long it
// waited. If packets wait longer than the target for an interval, CoDel marks or drops packets. The
// caller passes the time, and calls Dequeue when a destination can take more.
//
// All destinations share the flows, as in the kernel's mac80211 (include/net/fq_impl.h): a
// destination that has nothing waiting costs only its Queue. Flows are found in sets of eight. A
// flow that comes when its set is full shares the Queue's own flow.
//
// Sources: RFC 8290, RFC 8289; terms and defaults of the kernel's sch_fq_codel. A Scheduler does
// not lock, and allocates nothing after New.
package fqcodel

import (
	"cmp"
	"time"
)

// Options configures a Scheduler. The zero value is ready to use.
type Options struct {
	// Flows is the number of flows. Zero means 1024.
	Flows int
	// Quantum is how many octets a flow may send until another flow has its turn. Zero means 1514.
	Quantum int
	// Target is how long packets may wait. Zero means 5 ms.
	Target time.Duration
	// Interval is how long packets may wait for longer than Target before the
	// first is marked or dropped. Zero means 100 ms.
	Interval time.Duration
	// NoECN drops packets that could be marked.
	NoECN bool
}

// flowWays is how many flows a set has.
const flowWays = 8

// Defaults of [Options].
const (
	DefaultFlows    = 1024
	DefaultQuantum  = 1514
	DefaultTarget   = 5 * time.Millisecond
	DefaultInterval = 100 * time.Millisecond
)

func (o *Options) flows() int      { return max(1, cmp.Or(o.Flows, DefaultFlows)) }
func (o *Options) quantum() int    { return max(1, cmp.Or(o.Quantum, DefaultQuantum)) }
func (o *Options) target() int64   { return int64(cmp.Or(o.Target, DefaultTarget)) }
func (o *Options) interval() int64 { return int64(cmp.Or(o.Interval, DefaultInterval)) }

// A Scheduler is the store that queues share.
type Scheduler struct {
	flows            []flow
	packets          []packet
	quantum          int
	target, interval int64
	ecn              bool
}

// New returns a Scheduler for packets numbered 0 to n-1.
func New(o Options, n int) *Scheduler {
	return &Scheduler{flows: make([]flow, o.flows()), packets: make([]packet, n), quantum: o.quantum(),
		target: o.target(), interval: o.interval(), ecn: !o.NoECN}
}

// A packet is a waiting packet.
type packet struct {
	since  int64 // when it came, in nanoseconds
	next   int32 // number of the packet behind it, plus one; 0 if none
	octets int32
	ecn    bool // may be marked
}

// A flow has the waiting packets with one hash.
type flow struct {
	owner      *Queue // the queue in which it takes turns; nil if in none
	hash       uint32 // of its packets; while it has none, of those that codel is about
	packets    int32  // beside hash, because each idle destination has a flow of its own
	next       *flow  // the flow behind it in the list
	head, tail int32  // numbers of its first and last packet, plus one; 0 if none
	octets     int
	largest    int // octets of the largest packet since it has had its owner
	deficit    int
	codel      codel
}

// A Queue has the packets that wait for one destination. The zero value is empty.
type Queue struct {
	fresh, old flowList
	own        flow // for packets for whose flow the Scheduler had no room
	packets    int
	octets     int
	most       int // no flow has more octets waiting
}

// Len returns how many packets wait.
func (q *Queue) Len() int { return q.packets }

// Octets returns how many octets wait.
func (q *Queue) Octets() int { return q.octets }

// A flowList is a list of flows in the order of their turns.
type flowList struct{ head, tail *flow }

func (l *flowList) push(f *flow) {
	f.next = nil
	if l.tail == nil {
		l.head = f
	} else {
		l.tail.next = f
	}
	l.tail = f
}

func (l *flowList) pop() {
	f := l.head
	if l.head = f.next; l.head == nil {
		l.tail = nil
	}
	f.next = nil
}

// Enqueue appends packet id to the flow of q with that hash. The packet must not be waiting
// anywhere. ecn says that it may be marked instead of dropped.
func (s *Scheduler) Enqueue(q *Queue, id int32, octets int, hash uint32, ecn bool, now int64) {
	f := s.flowOf(q, hash)
	if f.owner == nil {
		f.owner, f.deficit, f.largest = q, s.quantum, 0
		q.fresh.push(f)
	}
	s.packets[id] = packet{since: now, octets: int32(octets), ecn: ecn && s.ecn}
	if f.head == 0 {
		f.head = id + 1
	} else {
		s.packets[f.tail-1].next = id + 1
	}
	f.tail = id + 1
	f.packets++
	f.octets += octets
	f.largest = max(f.largest, octets)
	q.most = max(q.most, f.octets)
	q.packets++
	q.octets += octets
}

// flowOf returns the flow for q's packets with that hash: one of a set of flowWays, or q.own if the
// set has no free flow or q.own has packets. With sets so few hashes share a flow that a SYN hardly
// ever waits behind a stream (as in CAKE, Høiland-Jørgensen et al., 2018).
func (s *Scheduler) flowOf(q *Queue, hash uint32) *flow {
	var free *flow
	set := s.set(hash)
	for i := range set {
		switch f := &set[i]; {
		case f.owner == q && f.hash == hash:
			return f
		case f.owner == nil && (free == nil || f.hash == hash):
			free = f
		}
	}
	if free == nil || q.own.packets > 0 { // a packet in own may be of the same flow
		return &q.own
	}
	if free.hash != hash {
		free.hash, free.codel = hash, codel{}
	}
	return free
}

// set returns the flows among which the one with that hash is looked for.
func (s *Scheduler) set(hash uint32) []flow {
	n := min(flowWays, len(s.flows))
	at := int(uint64(hash)*uint64(len(s.flows)/n)>>32) * n
	return s.flows[at : at+n]
}

// Sparse reports whether the flow of q with that hash has no packet waiting and no turn to come: the next packet
// of it would have the first turn.
func (s *Scheduler) Sparse(q *Queue, hash uint32) bool {
	set := s.set(hash)
	for i := range set {
		if f := &set[i]; f.owner == q && f.hash == hash {
			return false
		}
	}
	return q.own.packets == 0
}

// pop takes the first packet of f out of q. f must have one.
func (s *Scheduler) pop(q *Queue, f *flow) (id int32, p *packet) {
	id = f.head - 1
	p = &s.packets[id]
	if f.head = p.next; f.head == 0 {
		f.tail = 0
	}
	n := int(p.octets)
	f.packets--
	f.octets -= n
	q.packets--
	q.octets -= n
	return id, p
}

// Dequeue takes out the packet whose turn it is. mark says that the caller has to give it a CE mark.
// Dequeue appends packets that CoDel drops meanwhile to dropped. ok is false if nothing is left. rate
// is how many octets per second the destination takes, zero if that is not known. For a slow
// destination a packet may wait longer than the target, for a few others of its own flow.
func (s *Scheduler) Dequeue(q *Queue, rate, now int64, dropped []int32) (id int32, mark, ok bool, _ []int32) {
	for {
		list := &q.fresh
		if list.head == nil {
			if list = &q.old; list.head == nil {
				return 0, false, false, dropped
			}
		}
		f := list.head
		if f.deficit <= 0 {
			f.deficit += s.quantum
			list.pop()
			q.old.push(f)
			continue
		}
		id, mark, ok, dropped = s.control(q, f, rate, now, dropped)
		if ok {
			f.deficit -= int(s.packets[id].octets)
			return id, mark, true, dropped
		}
		list.pop()
		if list == &q.fresh && q.old.head != nil {
			q.old.push(f) // else it would be fresh again at once, and starve the old flows
			continue
		}
		f.owner = nil
	}
}

// DropFattest takes packets from the head of the flow of q that has most octets waiting, and appends
// them to dropped. It stops when they have at least n octets in all, or are one more than half of the
// flow's packets.
func (s *Scheduler) DropFattest(q *Queue, n int, dropped []int32) []int32 {
	fattest := q.fattest()
	if fattest == nil {
		return dropped
	}
	for left := fattest.packets/2 + 1; left > 0 && n > 0; left-- {
		id, p := s.pop(q, fattest)
		n -= int(p.octets)
		dropped = append(dropped, id)
	}
	for f := q.fresh.head; f != nil && f.packets == 0 && f.deficit == s.quantum; f = q.fresh.head {
		q.fresh.pop() // it was not served: whatever comes next may have the first turn
		f.owner = nil
	}
	return dropped
}

// fattest returns a flow that has most octets waiting, nil if nothing waits. It notes how many they are: if many flows
// have as many, as those of single packets have, or one keeps as many, the next search ends at the first of them.
func (q *Queue) fattest() *flow {
	fattest := &q.own
	if fattest.octets == q.most && q.most > 0 {
		return fattest
	}
	for _, list := range [...]*flow{q.fresh.head, q.old.head} {
		for f := list; f != nil; f = f.next {
			if f.octets > fattest.octets {
				if fattest = f; f.octets == q.most {
					return f
				}
			}
		}
	}
	q.most = fattest.octets
	if fattest.packets == 0 {
		return nil
	}
	return fattest
}

// Purge takes all packets out of q and appends them to dropped.
func (s *Scheduler) Purge(q *Queue, dropped []int32) []int32 {
	for _, list := range []*flowList{&q.fresh, &q.old} {
		for list.head != nil {
			f := list.head
			for f.head != 0 {
				var id int32
				id, _ = s.pop(q, f)
				dropped = append(dropped, id)
			}
			list.pop()
			f.owner = nil
		}
	}
	return dropped
}
