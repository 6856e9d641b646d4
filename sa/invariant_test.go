package sa

import (
	"errors"
	"fmt"
)

// check says what of c contradicts itself.
func (c *Client) check() error {
	waiting := map[*task]bool{}
	for _, t := range c.queue {
		if t.status != queued || waiting[t] {
			return fmt.Errorf("the queue holds a task in status %d, or twice", t.status)
		}
		waiting[t] = true
	}
	for tid, t := range c.byTID {
		if t.status != sent || uint32(t.tid) != tid {
			return fmt.Errorf("tid %08x leads to a task in status %d with tid %08x", tid, t.status, t.tid)
		}
	}
	if len(c.byTID) > c.opt.MaxInFlight {
		return fmt.Errorf("%d questions out, want at most %d", len(c.byTID), c.opt.MaxInFlight)
	}
	for _, t := range c.timers.All() {
		if t.status == idle || t.status == queued && t.kind != kindPath {
			return fmt.Errorf("a task of kind %d in status %d has a deadline", t.kind, t.status)
		}
	}
	all := []*task{c.probe}
	for _, g := range c.order {
		if c.groups[g.join.MGID] != g {
			return errors.New("a group is in order and not in groups")
		}
		if g.task.status == idle && c.opt.Refresh > 0 {
			return fmt.Errorf("group %v waits for nothing", g.join.MGID)
		}
		if g.told && g.failing {
			return fmt.Errorf("group %v is joined and failed", g.join.MGID)
		}
		all = append(all, g.task)
	}
	for _, s := range c.traps {
		all = append(all, s.task)
	}
	listed := 0
	for _, p := range c.used.Values() {
		listed++
		if c.paths[p.key] != p {
			return fmt.Errorf("path to %v is listed and not in paths", p.key.DGID)
		}
		if p.inQuestion() && !p.task.Armed() {
			return fmt.Errorf("path to %v is in question for ever", p.key.DGID)
		}
		if c.state == StateDown && p.inQuestion() {
			return fmt.Errorf("path to %v is in question without anybody to ask", p.key.DGID)
		}
		all = append(all, p.task)
	}
	switch {
	case len(c.order) != len(c.groups):
		return fmt.Errorf("%d groups in order, %d in all", len(c.order), len(c.groups))
	case listed != len(c.paths):
		return fmt.Errorf("%d paths listed, %d in all", listed, len(c.paths))
	case len(c.groups) > c.opt.MaxGroups:
		return fmt.Errorf("%d groups, want at most %d", len(c.groups), c.opt.MaxGroups)
	case len(c.paths) > c.opt.MaxPaths:
		return fmt.Errorf("%d paths, want at most %d", len(c.paths), c.opt.MaxPaths)
	case len(c.traps) > maxTraps:
		return fmt.Errorf("%d traps, want at most %d", len(c.traps), maxTraps)
	}
	return c.checkTasks(all, waiting)
}

// checkTasks says what of the tasks that have an owner contradicts the rest.
func (c *Client) checkTasks(all []*task, waiting map[*task]bool) error {
	timed, out := 0, 0
	for _, t := range all {
		if (t.status == queued) != waiting[t] {
			return fmt.Errorf("a task of kind %d in status %d is queued: %v", t.kind, t.status, waiting[t])
		}
		if t.Armed() {
			timed++
		}
		if t.status == sent {
			out++
			if t != c.probe && c.state != StateReady {
				return fmt.Errorf("a question of kind %d is out in state %v", t.kind, c.state)
			}
		}
		delete(waiting, t)
	}
	switch {
	case timed != c.timers.Len():
		return fmt.Errorf("%d tasks have a deadline, %d timers", timed, c.timers.Len())
	case out != len(c.byTID):
		return fmt.Errorf("%d tasks are out, %d transaction IDs", out, len(c.byTID))
	case len(waiting) != 0:
		return fmt.Errorf("%d tasks are queued that nobody owns", len(waiting))
	case c.state == StateAsking && c.probe.status == idle:
		return errors.New("nobody asks for the administrator")
	case c.state != StateAsking && c.probe.status != idle:
		return fmt.Errorf("the administrator is asked for in state %v", c.state)
	}
	return nil
}
