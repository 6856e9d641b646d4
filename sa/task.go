package sa

import (
	"slices"
	"time"

	"ipoibcm/timerheap"
	wire "ipoibcm/wire/sa"
)

// Waits.
const (
	minWait      = 250 * time.Millisecond // for an answer, at the least
	maxWait      = time.Second            // and at the most
	probeWait    = 200 * time.Millisecond // for the first answer; it doubles
	maxProbeWait = 1500 * time.Millisecond
	busyWait     = 250 * time.Millisecond // after a BUSY answer; it doubles
	failWait     = time.Second            // after a refusal; it doubles
	maxFailWait  = 16 * time.Second
)

// A kind is what a task asks for.
type kind uint8

const (
	kindProbe kind = iota
	kindGroup
	kindPath
	kindTrap
	numKinds
)

// A status is the state of a task.
type status uint8

const (
	idle    status = iota
	queued         // waits to be sent
	sent           // waits for an answer
	pausing        // is queued again when its deadline passes
)

// A task is a question to the administrator, asked once or again and again. The probe and each
// group, path and subscription have one.
type task struct {
	kind   kind
	group  *group
	path   *path
	trap   *subscription
	status status

	tid      uint64
	to       Address
	msg      wire.Message // the question as last sent
	asked    time.Time    // when msg was first sent
	tries    int
	busies   int
	hops     int // redirects
	failures int // failures in a row; the wait after the next grows with them

	deadline time.Time
	seq      uint64 // breaks ties between deadlines
	timerheap.Slot
}

func (c *Client) newTask(k kind) *task {
	c.lastSeq++
	return &task{kind: k, seq: c.lastSeq}
}

// Before orders tasks by deadline, then by age.
func (t *task) Before(o *task) bool {
	if !t.deadline.Equal(o.deadline) {
		return t.deadline.Before(o.deadline)
	}
	return t.seq < o.seq
}

// setTimer makes t due after d.
func (c *Client) setTimer(t *task, d time.Duration) {
	t.deadline = c.now.Add(d)
	c.timers.Set(t)
}

// stop makes t idle: it leaves the queue, the unanswered questions and the timers.
func (c *Client) stop(t *task) {
	switch t.status {
	case queued:
		c.queue = slices.DeleteFunc(c.queue, func(q *task) bool { return q == t })
	case sent:
		delete(c.byTID, uint32(t.tid))
	}
	t.status = idle
	c.timers.Stop(t)
}

// enqueue queues t to be sent. A path in question keeps the deadline by which its Query has to be
// answered.
func (c *Client) enqueue(t *task) {
	if t.status == queued {
		return
	}
	c.stop(t)
	t.status = queued
	c.queue = append(c.queue, t)
	if t.kind == kindPath {
		c.setTimer(t, t.path.giveUp.Sub(c.now))
	}
}

// pause makes t wait for d before it is queued.
func (c *Client) pause(t *task, d time.Duration) {
	c.stop(t)
	t.status = pausing
	c.setTimer(t, d)
}

// inFlight returns how many questions are unanswered.
func (c *Client) inFlight() int { return len(c.byTID) }

// pump sends queued questions, as far as the state and MaxInFlight allow.
func (c *Client) pump() {
	for {
		i := slices.IndexFunc(c.queue, func(t *task) bool {
			return c.state == StateReady || c.state == StateAsking && t == c.probe
		})
		if i < 0 || c.inFlight() >= c.opt.MaxInFlight {
			return
		}
		t := c.queue[i]
		c.stop(t)
		if msg, ok := c.question(t); ok {
			c.send(t, msg)
		}
	}
}

// question returns the next question of t; ok is false if there is none.
func (c *Client) question(t *task) (msg wire.Message, ok bool) {
	switch t.kind {
	case kindGroup:
		return c.groupQuestion(t.group)
	case kindPath:
		return c.pathQuestion(t.path), true
	case kindTrap:
		return c.trapQuestion(t.trap)
	}
	return wire.Message{Header: wire.Header{Method: wire.MethodGet}, Record: wire.ClassPortInfo{}}, true
}

// send sends msg for the first time, with a new transaction ID. The lower half of the ID must be
// unique: the provider may overwrite the upper half on the wire (Linux's ib_umad does).
func (c *Client) send(t *task, msg wire.Message) {
	for {
		t.tid = c.opt.Rand.Uint64()
		if low := uint32(t.tid); low != 0 && c.byTID[low] == nil {
			break
		}
	}
	msg.TransactionID = t.tid
	t.msg, t.to, t.status, t.asked, t.tries = msg, c.admin, sent, c.now, 0
	c.byTID[uint32(t.tid)] = t
	c.transmit(t)
}

// transmit sends the question of t, for the first time or again.
func (c *Client) transmit(t *task) {
	m := &MAD{Peer: t.to}
	t.msg.AppendBinary(m.Data[:0]) // the error is always nil
	wait := c.patience(t)
	if t.kind == kindPath {
		wait = max(min(wait, t.path.giveUp.Sub(c.now)), time.Millisecond)
	}
	c.counters.sent[t.kind]++
	c.setTimer(t, wait)
	c.act(SendMAD{MAD: m, Wait: wait})
}

// wake handles every deadline that has passed.
func (c *Client) wake() {
	for t := c.timers.First(); t != nil && !c.now.Before(t.deadline); t = c.timers.First() {
		c.expire(t)
	}
}

// expire handles the deadline of t.
func (c *Client) expire(t *task) {
	late := t.kind == kindPath && !c.now.Before(t.path.giveUp)
	switch {
	case late && t.status == pausing:
		c.failed(t, Busy, 0)
	case t.status == pausing:
		c.due(t)
	case late, t != c.probe && t.tries+1 >= c.opt.MaxTries:
		c.unanswered(t)
	default:
		t.tries++
		c.counters.retried[t.kind]++
		c.transmit(t)
	}
}

// due queues t after its pause.
func (c *Client) due(t *task) {
	switch t.kind {
	case kindGroup:
		t.group.stale = true
	case kindTrap:
		t.trap.held = t.trap.held && !t.trap.wanted
	}
	c.enqueue(t)
}

// unanswered handles a question without an answer in time. If the administrator has answered
// nothing since the question was first sent, the Client goes back to StateAsking.
func (c *Client) unanswered(t *task) {
	c.counters.timeouts[t.kind]++
	gone := t.status == sent && !c.heard.After(t.asked)
	c.failed(t, TimedOut, 0)
	if gone && c.state == StateReady {
		c.ask()
	}
}

// failed handles a question that failed.
func (c *Client) failed(t *task, cause Cause, s wire.Status) {
	c.stop(t)
	t.busies, t.hops = 0, 0
	switch t.kind {
	case kindProbe:
		if cause == Refused { // a refusal shows that the administrator is there
			c.probed(wire.ClassPortInfo{})
			return
		}
		c.atManager()
		c.pause(t, maxProbeWait-c.jitter(maxProbeWait/10))
	case kindGroup:
		c.groupFailed(t.group, cause, s)
	case kindPath:
		c.pathFailed(t.path, cause, s)
	case kindTrap:
		if cause == Refused && !t.trap.wanted { // the administrator knows no such subscription
			c.removeTrap(t.trap)
			return
		}
		c.backOff(t)
	}
}

// backOff queues t again after a wait that grows with each failure.
func (c *Client) backOff(t *task) {
	d := min(failWait<<min(t.failures, 8), maxFailWait)
	t.failures++
	c.pause(t, d-c.jitter(d/10))
}

// refresh queues t again after Options.Refresh, if that is positive.
func (c *Client) refresh(t *task) {
	t.succeeded()
	if c.opt.Refresh > 0 {
		c.pause(t, c.opt.Refresh-c.jitter(c.opt.Refresh/10))
	}
}

// succeeded resets the counts of what went wrong with t.
func (t *task) succeeded() { t.busies, t.hops, t.failures = 0, 0, 0 }
