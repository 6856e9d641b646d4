package sa

import (
	"time"

	"ipoibcm/ib"
	"ipoibcm/lru"
	"ipoibcm/verbs"
	wire "ipoibcm/wire/sa"
)

// A path is a path that is known, in question, or known not to exist.
type path struct {
	key    PathKey
	record wire.PathRecord
	found  bool
	until  time.Time // when found or cause expires
	cause  Cause     // why it was not found
	status wire.Status
	// giveUp is when a path in question counts as failed.
	giveUp time.Time
	task   *task

	lru.Links[path] // in Client.used
}

// inQuestion reports whether p waits for an answer, or to be asked about.
func (p *path) inQuestion() bool { return p.task.status != idle }

// query handles the event Query.
func (c *Client) query(key PathKey) {
	p := c.paths[key]
	switch {
	case c.state == StateDown:
		c.act(PathFailed{Key: key, Cause: NoAdmin})
		return
	case p == nil:
		if p = c.newPath(key); p == nil {
			c.counters.refusedPaths++
			c.act(PathFailed{Key: key, Cause: NoRoom})
			return
		}
	case p.inQuestion():
		c.use(p)
		return
	case c.now.Before(p.until):
		c.use(p)
		c.counters.pathHits++
		c.answer(p)
		return
	}
	c.use(p)
	p.giveUp = c.now.Add(c.opt.QueryTimeout)
	p.task.succeeded()
	c.enqueue(p.task)
}

// doubt handles the event Doubt.
func (c *Client) doubt(key PathKey) {
	if p := c.paths[key]; p != nil && !p.inQuestion() {
		c.forget(p)
	}
}

// answer tells the user the outcome for p.
func (c *Client) answer(p *path) {
	if p.found {
		c.act(PathFound{p.key, c.pathOf(p.record)})
		return
	}
	c.act(PathFailed{p.key, p.cause, p.status})
}

// pathOf returns the path that a record describes. A GRH is needed where a router
// is on the way (IBA 8.4.1 and 19.2.4.1), or where the port asks for it.
func (c *Client) pathOf(r wire.PathRecord) verbs.Path {
	return verbs.Path{
		SGID: r.SGID, DGID: r.DGID, SLID: r.SLID, DLID: r.DLID,
		GRH:       r.HopLimit > 1 || c.port.GRHRequired,
		FlowLabel: r.FlowLabel, TrafficClass: r.TrafficClass, HopLimit: r.HopLimit,
		SL: r.SL, PKey: r.PKey, MTU: r.MTU, Rate: r.Rate, Life: r.Life,
	}
}

// newPath adds a path. If MaxPaths is reached it forgets the path that was used longest ago and is
// not in question; it returns nil if all are in question.
func (c *Client) newPath(key PathKey) *path {
	if len(c.paths) >= c.opt.MaxPaths {
		old := c.used.Oldest()
		for old != nil && old.inQuestion() {
			old = old.Newer()
		}
		if old == nil {
			return nil
		}
		c.counters.evictedPaths++
		c.forget(old)
	}
	p := &path{key: key, task: c.newTask(kindPath)}
	p.task.path = p
	c.paths[key] = p
	c.used.Push(p)
	return p
}

func (c *Client) pathQuestion(p *path) wire.Message {
	return wire.Message{
		Header: wire.Header{Method: wire.MethodGet, Mask: wire.PathMask},
		Record: wire.PathRecord{DGID: p.key.DGID, SGID: c.port.GID, Numb: 1, TrafficClass: p.key.TrafficClass,
			PKey: p.key.PKey},
	}
}

// pathAnswered handles an answer about p. It returns false if the record does not match the
// question.
func (c *Client) pathAnswered(p *path, r wire.PathRecord) bool {
	asked := p.task.msg.Record.(wire.PathRecord)
	if r.DGID != asked.DGID || r.SGID != asked.SGID || r.DLID == 0 || isMLID(r.DLID) ||
		r.MTU.Octets() == 0 || (r.PKey^asked.PKey)&^ib.PKeyFull != 0 {
		return false
	}
	c.stop(p.task)
	p.record, p.found, p.until = r, true, c.now.Add(c.opt.PathLife)
	c.answer(p)
	return true
}

// pathFailed ends the question of p and tells the user why.
func (c *Client) pathFailed(p *path, cause Cause, s wire.Status) {
	c.stop(p.task)
	p.found, p.cause, p.status, p.until = false, cause, s, c.now.Add(c.opt.FailedLife)
	c.answer(p)
	if cause != Refused { // only a refusal says something about the path
		c.forget(p)
	}
}

// flush forgets all paths but those in question, and returns Flushed if one of them had been found.
func (c *Client) flush() {
	told := false
	for _, p := range c.used.Values() {
		if !p.inQuestion() {
			told = told || p.found
			c.forget(p)
		}
	}
	if told {
		c.act(Flushed{})
	}
}

// forgetPort forgets the paths to dgid that are not in question.
func (c *Client) forgetPort(dgid ib.GID) {
	for _, p := range c.used.Values() {
		if p.key.DGID == dgid && !p.inQuestion() {
			c.forget(p)
		}
	}
}

func (c *Client) forget(p *path) {
	c.stop(p.task)
	delete(c.paths, p.key)
	c.used.Remove(p)
}

// use moves p to the newest end of the list.
func (c *Client) use(p *path) {
	c.used.Remove(p)
	c.used.Push(p)
}
