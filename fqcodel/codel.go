package fqcodel

import "math"

// A codel is CoDel's state of one flow (RFC 8289 section 5.3). It outlives the
// flow's packets: a flow that comes back soon is controlled as before.
type codel struct {
	firstAbove int64  // when the waits will have been too long for an interval; 0 while they are not too long
	dropNext   int64  // when the next packet is marked or dropped
	count      uint32 // packets marked or dropped since dropping began
	lastCount  uint32 // value of count when dropping last began
	dropping   bool
}

// remember is for how many intervals a flow's last count is used (the kernel's codel_dequeue).
const remember = 16

// control takes the next packet out of f by the rules of CoDel. mark says that the caller has to
// mark the packet. ok is false if no packet is left. control appends packets that it drops to
// dropped.
func (s *Scheduler) control(q *Queue, f *flow, rate, now int64, dropped []int32) (id int32, mark, ok bool, _ []int32) {
	c := &f.codel
	if f.head == 0 {
		c.dropping = false
		return 0, false, false, dropped
	}
	id, p := s.pop(q, f)
	own := f.ownWait(rate, s.interval)
	late := s.late(q, f, p, own, now)
	switch {
	case c.dropping && !late:
		c.dropping = false
	case c.dropping:
		for c.dropping && now >= c.dropNext {
			c.count++
			if p.ecn {
				c.dropNext = s.after(c.dropNext, own, c.count)
				return id, true, true, dropped
			}
			dropped = append(dropped, id)
			if f.head == 0 {
				c.dropping = false
				return 0, false, false, dropped
			}
			if id, p = s.pop(q, f); s.late(q, f, p, own, now) {
				c.dropNext = s.after(c.dropNext, own, c.count)
			} else {
				c.dropping = false
			}
		}
	case late:
		c.dropping = true
		if delta := c.count - c.lastCount; delta > 1 && now-c.dropNext < remember*(s.interval+own) {
			c.count = delta
		} else {
			c.count = 1
		}
		c.lastCount = c.count
		c.dropNext = s.after(now, own, c.count)
		if p.ecn {
			return id, true, true, dropped
		}
		dropped = append(dropped, id)
		if f.head == 0 {
			return 0, false, false, dropped
		}
		id, p = s.pop(q, f)
		s.late(q, f, p, own, now)
	}
	return id, false, true, dropped
}

// ownPackets bounds how long a packet may wait beyond the target: as long as that many packets of
// its flow's largest size take to leave. TCP adds one packet to those in flight in about two round
// trips, and a loss takes away three tenths (RFC 9438). So the length of the queue decides how often
// a packet is lost, and which share of long packets TCP sends again.
const ownPackets = 6

// ownWait returns how much longer than the target packets of f may wait, in nanoseconds. On a slow
// path each packet takes long to leave, at rate octets per second. The parameter most bounds the
// result (RFC 8289 section 4.4; CAKE allows one and a half packets).
func (f *flow) ownWait(rate, most int64) int64 {
	if rate <= 0 {
		return 0
	}
	return min(int64(ownPackets*float64(f.largest)*1e9/float64(rate)), most)
}

// late reports whether packets of f have waited too long for an interval, now that p was taken
// out. own is ownWait of f. Two cases do not count. If q holds no more octets than f's largest packet
// has, the destination is slow, but not behind. If no other packet of f waits, p waited for the turns
// of other flows, which no loss in f makes shorter.
func (s *Scheduler) late(q *Queue, f *flow, p *packet, own, now int64) bool {
	c := &f.codel
	if now-p.since < s.target+own || f.packets == 0 || q.octets <= f.largest {
		c.firstAbove = 0
		return false
	}
	if c.firstAbove == 0 {
		c.firstAbove = now + s.interval + own
		return false
	}
	return now >= c.firstAbove
}

// after is the control law: it returns the time of the next drop after t. The intervals shrink
// with the square root of count (RFC 8289 section 3.2).
func (s *Scheduler) after(t, own int64, count uint32) int64 {
	return t + int64(float64(s.interval+own)/math.Sqrt(float64(count)))
}
