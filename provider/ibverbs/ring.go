package ibverbs

import (
	"ipoibcm/verbs"
)

// Kinds of queues in the IDs of work requests that libibverbs sees. A completion that failed has
// neither its queue nor its operation, and its QPN may belong to a new QP by now. So each ID has
// the kind of queue, the generation or number of the queue, and the place in it.
//
//	bits 62..63  idSend, idRecv, idShared
//	bits 32..61  generation of the QP, or number of the SRQ
//	bits  0..31  place
const (
	idSend = iota
	idRecv
	idShared
)

func makeID(kind, owner, place uint32) uint64 {
	return uint64(kind)<<62 | uint64(owner&0x3fffffff)<<32 | uint64(place)
}

func splitID(id uint64) (kind, owner, place uint32) {
	return uint32(id >> 62), uint32(id>>32) & 0x3fffffff, uint32(id)
}

// An entry is a posted work request.
type entry struct {
	id  uint64
	op  verbs.Opcode
	len int         // octets of a send
	sg  []verbs.SGE // of a receive; a part of ring.sges or slots.sges
}

// A ring remembers the requests posted on a queue whose requests complete in order. A request that
// is not signaled completes silently: the next completion frees its place too.
type ring struct {
	entries    []entry // its length is a power of two
	sges       []verbs.SGE
	maxSGE     int
	limit      uint32
	head, tail uint32 // places of the oldest request and of the next; they wrap
}

func newRing(depth, maxSGE int) ring {
	size := 1
	for size < depth {
		size *= 2
	}
	return ring{entries: make([]entry, size), sges: make([]verbs.SGE, size*maxSGE), maxSGE: maxSGE, limit: uint32(depth)}
}

// room returns how many more requests may be posted.
func (r *ring) room() int { return int(r.limit - (r.tail - r.head)) }

// push adds a request and returns its place.
func (r *ring) push(e entry) (place uint32) {
	place = r.tail
	i := int(place) & (len(r.entries) - 1)
	if sg := e.sg; sg != nil {
		e.sg = r.sges[i*r.maxSGE : i*r.maxSGE+copy(r.sges[i*r.maxSGE:(i+1)*r.maxSGE], sg)]
	}
	r.entries[i] = e
	r.tail++
	return place
}

// unpush removes the last n requests, which could not be posted after all.
func (r *ring) unpush(n int) { r.tail -= uint32(n) }

// take returns the request at place, which has completed, and frees its place and all before it. ok
// is false if no request is there.
func (r *ring) take(place uint32) (e entry, ok bool) {
	if place-r.head >= r.tail-r.head {
		return entry{}, false
	}
	r.head = place + 1
	return r.entries[int(place)&(len(r.entries)-1)], true
}

// clear forgets all requests. Places go on, so that old completions find none.
func (r *ring) clear() { r.head = r.tail }

// A slots remembers the requests posted on a shared receive queue, which complete in any order.
type slots struct {
	entries []entry
	used    []bool
	free    []uint32
	sges    []verbs.SGE
	maxSGE  int
}

func newSlots(depth, maxSGE int) slots {
	s := slots{entries: make([]entry, depth), used: make([]bool, depth), sges: make([]verbs.SGE, depth*maxSGE),
		maxSGE: maxSGE}
	for i := range depth {
		s.free = append(s.free, uint32(depth-1-i))
	}
	return s
}

func (s *slots) room() int { return len(s.free) }

func (s *slots) push(id uint64, sg []verbs.SGE) (place uint32) {
	place = s.free[len(s.free)-1]
	s.free = s.free[:len(s.free)-1]
	i := int(place)
	s.used[i] = true
	s.entries[i] = entry{id: id, op: verbs.Recv,
		sg: s.sges[i*s.maxSGE : i*s.maxSGE+copy(s.sges[i*s.maxSGE:(i+1)*s.maxSGE], sg)]}
	return place
}

func (s *slots) take(place uint32) (e entry, ok bool) {
	if int(place) >= len(s.entries) || !s.used[place] {
		return entry{}, false
	}
	s.used[place] = false
	s.free = append(s.free, place)
	return s.entries[place], true
}
