package datapath

import "time"

const (
	// sendDelay is how much longer than on an idle path a request may take because of the requests
	// posted before it. Packets that would wait longer stay in the backlog, where flows take turns
	// and CoDel sees them.
	sendDelay = 3 * time.Millisecond
	// firstLimit is how many octets may be posted before anything is known of the path.
	firstLimit = 128 << 10
	// leastLimit is how many octets may always be posted, whatever was measured: a few full frames
	// of an Ethernet.
	leastLimit = 6 << 10
	// mostLimit is how many octets may be posted at most.
	mostLimit = 64 << 20
	// baseWindow is the length of a window. The least latency of the present window and of the last
	// counts. When a window ends while the limit holds something back, the limit falls to an eighth
	// for one timed request, so that the queue runs nearly dry and the least latency is measured
	// again.
	baseWindow = 10 * time.Second
	// rateWindow is for how long the highest rate counts at least. For that long the path may be
	// slower, or the processor busy elsewhere, without a consequence. A measurement that takes longer
	// does not count.
	rateWindow = time.Second
	// moreMessages is how many messages the limit allows beyond what the path carries in the time
	// that a request may take, if the path carries one message within moreWithin. Of several
	// senders, the one that has least posted gains most by that (as in TCP Vegas, Brakmo and
	// Peterson, 1995).
	moreMessages = 2
	moreWithin   = 10 * time.Millisecond
	// rateSpans is over how many timed requests, one after the other, a rate is measured at least.
	rateSpans = 2
	// triesAfter is how many times in a row late lowers the limit before it raises the limit once,
	// to compare how long requests take behind more octets.
	triesAfter = 32
)

// A sendLimit bounds the octets that are posted on a queue pair and not completed, as byte queue
// limits do for a network device. It follows the time that requests take from post to completion:
// on a longer path more octets may be posted, on a slow one fewer (the least latency and the
// highest rate of the last seconds, as in BBR, draft-ietf-ccwg-bbr section 4). It bounds the
// octets in the queue pair; the provider bounds those on the wire.
type sendLimit struct {
	octets int64 // the limit; zero means firstLimit

	// One request at a time is timed.
	timing  bool
	reached bool  // the limit held something back since judge looked at this last
	drain   bool  // the limit is an eighth, until judge has seen one request
	held    bool  // the limit held something back since the rate measurement began
	spans   uint8 // timed requests completed since then
	cuts    uint8 // times in a row that late lowered the limit, at most triesAfter
	size    int32 // octets of the timed request
	ahead   int32 // octets posted before it and not completed, its own included
	id      uint64
	at      int64

	// What late found when it changed the limit last: the limit before, the octets ahead of the
	// request, and the time that the request took. Zero wasAhead means that there is nothing to
	// compare with.
	was, wasAhead int32
	wasTook       int64

	base   [2]int64 // least latencies of this window and of the last; 0: none
	baseAt int64    // when this window began

	done   int64    // octets completed
	rates  [2]int64 // highest rates of this window and of the last, octets per second
	rateAt int64    // when this window began
	from   int64    // when the first request of the rate measurement was posted; 0: none under way
	before int64    // value of done then
}

// limit returns how many octets may be posted.
func (s *sendLimit) limit() int64 {
	if s.octets == 0 {
		return firstLimit
	}
	if s.drain {
		return max(leastLimit, s.octets/8)
	}
	return s.octets
}

// posted notes that a signaled request of size octets was posted, with its id. ahead is the number
// of octets posted and not completed, the request's own included.
func (s *sendLimit) posted(id uint64, size, ahead, now int64) {
	if !s.timing {
		s.timing, s.id, s.size, s.ahead, s.at = true, id, int32(size), int32(min(ahead, 2*mostLimit)), now
		if s.from == 0 {
			s.from, s.before, s.spans, s.held = now, s.done, 0, false
		}
	}
}

// full notes that the limit holds something back.
func (s *sendLimit) full() { s.reached, s.held = true, true }

// completed notes that all requests up to id have completed. octets is the sum of those that have
// completed since the last call.
func (s *sendLimit) completed(id uint64, octets, now int64) {
	s.done += octets
	if !s.timing || id < s.id {
		return
	}
	s.timing = false
	s.measureRate(now)
	s.judge(max(now-s.at, 1), now)
}

// measureRate takes the completion of a timed request. A rate is measured from the post of one
// timed request to the completion of the next, or of a later one if less than sendDelay has
// passed. It counts only if less than rateWindow has passed, in which the limit held something back.
// A single request is not enough. While the processor is elsewhere, or a packet is sent again,
// completions are held up, and then they come all at once. A request that is posted at that moment
// takes nearly no time, and the one before it takes all the more.
func (s *sendLimit) measureRate(now int64) {
	d := now - s.from
	if s.spans++; s.spans < rateSpans || d < int64(sendDelay) {
		return
	}
	if s.held && d < int64(rateWindow) {
		if now-s.rateAt > int64(rateWindow) {
			s.rates[1], s.rates[0], s.rateAt = s.rates[0], 0, now
		}
		s.rates[0] = max(s.rates[0], int64(float64(s.done-s.before)*1e9/float64(d)))
	}
	s.from = 0
}

// rate returns the highest rate of this window and the last, in octets per second.
func (s *sendLimit) rate() int64 { return max(s.rates[0], s.rates[1]) }

// judge sets the limit after a timed request that took so many nanoseconds.
func (s *sendLimit) judge(took, now int64) {
	switch {
	case s.base[0] == 0:
		s.base[0], s.baseAt = took, now
	case s.drain:
		s.drain = false
		s.base[0] = min(s.base[0], took)
		return
	case now-s.baseAt > int64(baseWindow):
		s.base[1], s.base[0], s.baseAt = s.base[0], took, now
		s.drain = s.reached
	}
	s.base[0] = min(s.base[0], took)
	if !s.reached {
		return
	}
	s.reached = false
	if s.octets == 0 {
		s.octets = firstLimit
	}
	may := s.least() + int64(sendDelay)
	switch {
	case took <= may-int64(sendDelay)/2: // with s.ahead octets ahead, which says little about many more
		s.octets = max(s.octets, min(2*s.octets, 4*int64(s.ahead), mostLimit))
	case took <= may:
		s.octets = min(s.octets+s.octets/8, mostLimit)
	default:
		s.late(took, may)
	}
}

// late sets the limit after a request that took more than may nanoseconds. The octets that wait on
// the path may be ours or those of other senders. A lower limit does not shorten the wait for
// octets of others, who would take the whole path if we left it. So late compares the request with
// an earlier one that had more or fewer of our octets ahead of it. If the time did not change with
// the octets, late takes its last change back. Otherwise it lowers the limit, and once after
// triesAfter times in a row it raises the limit instead.
func (s *sendLimit) late(took, may int64) {
	less, more := s.ahead < s.wasAhead/5*4, s.ahead > s.wasAhead/4*5
	switch {
	case s.wasAhead > 0 && (less || more) && !s.proportional(took):
		s.octets, s.wasAhead, s.cuts = max(s.octets, int64(s.was)), 0, 0
		return
	case less || more: // the time follows the octets
	case s.cuts >= triesAfter && !more: // if only one is posted at a time, try two
		s.was, s.wasAhead, s.wasTook, s.cuts = int32(s.octets), s.ahead, took, 0
		s.octets = max(s.octets, int64(s.ahead)) + int64(s.ahead)*3/8
		return
	}
	s.cuts = min(s.cuts+1, triesAfter)
	s.was, s.wasAhead, s.wasTook = int32(s.octets), s.ahead, took
	s.octets = max(leastLimit, min(s.octets, max(s.octets/2, s.carries(may))))
}

// carries returns how many octets may be posted so that a request takes at most may nanoseconds.
func (s *sendLimit) carries(may int64) int64 {
	rate := s.rate()
	octets := int64(float64(rate) * float64(may) / 1e9)
	if float64(s.size) <= float64(rate)*moreWithin.Seconds() {
		octets += moreMessages * int64(s.size)
	}
	return octets
}

// proportional reports whether the time that a request took has changed with the octets ahead of
// it, by at least a quarter of their relative change.
func (s *sendLimit) proportional(took int64) bool {
	if s.ahead < s.wasAhead {
		return (s.wasTook-took)*4 >= int64(float64(s.wasTook)*(1-float64(s.ahead)/float64(s.wasAhead)))
	}
	return (took-s.wasTook)*4 >= int64(float64(s.wasTook)*(float64(s.ahead)/float64(s.wasAhead)-1))
}

// least returns the least latency of this window and the last.
func (s *sendLimit) least() int64 {
	if s.base[1] == 0 {
		return s.base[0]
	}
	return min(s.base[0], s.base[1])
}

// reset forgets the posted requests, but not what was measured of the path.
func (s *sendLimit) reset() { s.timing, s.reached, s.drain, s.from = false, false, false, 0 }
