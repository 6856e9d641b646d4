package engine

import (
	"math"
	"time"
)

const (
	// initialOctets is what an RC requester has in flight at first, in octets; TCP
	// has as much with packets of the same length (RFC 6928 section 2).
	initialOctets = 32 << 10
	// minWindow keeps a packet on its way while the ACK of another comes back.
	minWindow = 2
	// delayTarget is how long packets may wait in queues on their way, beside what
	// target adds: more than two programs take to wake, less than a short queue holds.
	delayTarget = 800 * time.Microsecond
	// delayLook is the shortest time whose least delay may lower the window: a
	// program that the scheduler keeps from a processor now and then is no queue.
	delayLook = 100 * time.Millisecond
	// In each basePeriod, or as many round trips as baseRounds if that is longer, one
	// packet travels alone. The least round trip counts for basePeriods of them, once
	// or twice, but no longer if it was exceeded in longerPeriods in a row.
	basePeriod, baseRounds     = time.Second, 100
	basePeriods, longerPeriods = 8, 3
	// firstPeriod is the same at first: the first packets may have met a queue.
	firstPeriod = 100 * time.Millisecond
	// Growth of the window per round trip: twice in slow start, then one packet, and
	// after fastAfter times in a row a 1/fastPart more.
	fastAfter, fastPart = 5, 16
	// lossTolerated is how many packets must arrive for one that is lost, or the
	// window shrinks although nothing waits in a queue; 1<<lossShift losses are
	// averaged.
	lossTolerated, lossShift = 12, 4
	// idleAfter is how long nothing may be sent until the window is in doubt.
	idleAfter = time.Second
)

// A congestion decides how many packets of one RC requester may be in flight, from
// what the round trip, losses and congestion notifications tell.
//
// It is much like Swift (Kumar et al., SIGCOMM 2020): the window grows by a packet per
// round trip while packets wait less than a target in queues, and shrinks to what
// leaves a quarter of that waiting if they wait longer, by half at most. docs/adr/0023 says
// why, and what differs.
type congestion struct {
	window, initial, most int
	slow                  bool // slow start: nothing has waited or was lost yet
	settle                bool // the last doubling of it has still to be taken back
	full                  bool // the window kept a packet back since the last sample
	fullEver              bool // or since look
	streak                int  // samples in a row that let the window grow
	drain                 bool // one packet at a time, until one was measured

	known   bool
	base    [2]time.Duration // least round trip of these basePeriods and of those before
	alone   time.Duration    // least one of a packet that traveled alone in this period
	period  time.Time        // when it began
	periods uint8            // of basePeriods
	longer  uint8            // periods in a row in which alone was far above base

	delay time.Duration // of the last sample
	least time.Duration // delay since look
	look  time.Time
	cutAt time.Time // when the window was lowered last for a loss or a notification
	used  time.Time // when something was sent last

	every    int    // packets between two losses, on average, shifted by lossShift
	notified uint32 // how much of the last was marked, of 1<<10: alpha of DCQCN
	marks    bool   // notifications since look
}

func (c *congestion) start(mtu, most int) {
	initial := min(max(initialOctets/max(mtu, 1), minWindow), most)
	*c = congestion{window: initial, initial: initial, most: most, slow: true}
}

// allowed returns how many packets may be in flight.
func (c *congestion) allowed() int {
	if c.drain {
		return 1
	}
	return c.window
}

// leastTrip returns the least round trip of late.
func (c *congestion) leastTrip() time.Duration { return min(c.base[0], c.base[1]) }

// target returns how long packets may wait in queues: longer for a small window, so
// that of flows with one queue the smaller ones grow while the larger ones shrink.
func (c *congestion) target() time.Duration {
	return delayTarget + time.Duration(3*float64(delayTarget)/math.Sqrt(float64(c.window))) + c.leastTrip()/8
}

// sample takes in one round trip. alone says that no other packet was in flight when
// it began, so that it met no queue of ours.
func (c *congestion) sample(d time.Duration, alone bool, now time.Time) {
	drained := c.drain
	c.drain = c.drain && !alone
	c.measure(d, alone, now)
	target := c.target()
	c.delay = d - c.leastTrip()
	c.least = min(c.least, c.delay)
	switch {
	case drained:
	case c.delay > target && (c.slow || c.settle):
		// What is measured now left when the window was half as large, or a quarter.
		c.shrink(1, 2)
		c.settle = true
	case c.delay > target:
		c.streak = 0
	case c.settle:
		c.settle = false
	case c.full:
		c.grow(c.delay > target/2)
	}
	c.fullEver = c.fullEver || c.full
	c.full, c.used = false, now
	if now.Sub(c.look) < max(delayLook, d) {
		return
	}
	if c.least > target && c.fullEver {
		c.shrink(int64(c.least-target/4), int64(c.leastTrip()+c.least))
	}
	if !c.marks {
		c.notified -= c.notified / 16
	}
	c.least, c.look, c.marks, c.fullEver = time.Hour, now, false, false
}

// measure keeps the least round trip. Once in a period a packet must travel alone: a
// queue that always stands would look like the path.
func (c *congestion) measure(d time.Duration, alone bool, now time.Time) {
	if !c.known {
		c.known, c.base, c.alone = true, [2]time.Duration{d, d}, time.Hour
		c.period, c.look, c.least = now.Add(firstPeriod-basePeriod), now, time.Hour
	}
	c.base[0] = min(c.base[0], d)
	if alone {
		c.alone = min(c.alone, d)
	}
	switch {
	case now.Sub(c.period) < max(basePeriod, baseRounds*c.leastTrip()):
		return
	case c.alone == time.Hour && c.full:
		c.drain = true
		return
	case c.alone == time.Hour || c.alone <= c.leastTrip()+c.target():
		c.longer = 0
	default:
		c.longer++
	}
	c.periods++
	if c.longer == longerPeriods { // another path, or a queue that others keep full
		c.base, c.longer, c.periods = [2]time.Duration{c.alone, c.alone}, 0, 0
	} else if c.periods == basePeriods {
		c.base, c.periods = [2]time.Duration{d, c.base[0]}, 0
	}
	c.period, c.alone = now, time.Hour
}

// grow lets the window grow after a round trip in which it was used up. late says
// that something waits in queues already.
func (c *congestion) grow(late bool) {
	if late {
		c.slow, c.streak = false, 0
	}
	switch c.streak++; {
	case c.slow:
		c.window *= 2
	case c.streak > fastAfter:
		c.window += 1 + c.window/fastPart
	default:
		c.window++
	}
	c.window = min(c.window, c.most)
}

// shrink takes part/of of the window away, half of it at most.
func (c *congestion) shrink(part, of int64) {
	c.slow, c.streak = false, 0
	c.window = max(c.window-max(1, int(int64(c.window)*min(2*part, of)/(2*of))), minWindow)
}

// again reports whether the window may be lowered again: once per round trip.
func (c *congestion) again(now time.Time) bool {
	if now.Sub(c.cutAt) < max(c.leastTrip()+c.delay, delayTarget) {
		return false
	}
	c.cutAt = now
	return true
}

// lost takes in the loss of a packet after n that arrived. Only one that a full queue
// dropped says anything: others are lost as often with a small window.
func (c *congestion) lost(n int, now time.Time) {
	if c.every == 0 {
		c.every = max(n, 4*lossTolerated) << lossShift
	}
	c.every += n - c.every>>lossShift
	queue := c.slow || c.delay > c.target()/2 || c.every>>lossShift < lossTolerated
	c.slow, c.streak = false, 0
	if queue && c.again(now) {
		c.shrink(3, 10)
	}
}

// notification takes in a CNP, as DCQCN does (Zhu et al., SIGCOMM 2015).
func (c *congestion) notification(now time.Time) {
	c.marks = true
	if c.again(now) {
		c.notified += (1<<10 - c.notified) / 16
		c.shrink(int64(max(c.notified, 64)), 2<<10)
	}
}

// notReady takes in that the receiver had no buffer: it is slower than the path.
func (c *congestion) notReady(now time.Time) {
	if c.again(now) {
		c.shrink(1, 2)
	}
}

// silent takes in that nothing was heard for the whole of a timeout.
func (c *congestion) silent() {
	c.window, c.slow, c.streak, c.drain = min(c.window, minWindow), true, 0, false
}

// sending takes in that a packet leaves when nothing was in flight.
func (c *congestion) sending(now time.Time) {
	if c.known && now.Sub(c.used) > idleAfter {
		c.window, c.slow = max(min(c.window, c.initial), c.window/2), true
	}
	c.used = now
}
