package sa

import (
	"slices"

	"ipoibcm/ib"
	wire "ipoibcm/wire/sa"
)

// A group is one multicast group that the user has joined, or is leaving.
type group struct {
	join  Join
	asked Join           // by the last question
	want  wire.JoinState // zero: to be left
	held  wire.JoinState // what the administrator has, as far as we know
	// stale says that held may not be true any more.
	stale bool
	// record is of the last answer, and told whether the user has it.
	record wire.MCMemberRecord
	told   bool
	// failed is what the user was told last; failing whether it was told.
	failed  JoinFailed
	failing bool
	task    *task
}

// join is the event.
func (c *Client) join(ev Join) {
	g := c.groups[ev.MGID]
	switch {
	case !ev.MGID.IsMulticast() || ev.State == 0 || ev.State > 15:
		c.act(JoinFailed{MGID: ev.MGID, Cause: BadArgument})
		return
	case g == nil && len(c.groups) >= c.opt.MaxGroups:
		c.counters.refusedGroups++
		c.act(JoinFailed{MGID: ev.MGID, Cause: NoRoom})
		return
	case g == nil:
		g = &group{task: c.newTask(kindGroup)}
		g.task.group = g
		c.groups[ev.MGID] = g
		c.order = append(c.order, g)
	case g.join == ev && g.want != 0:
		return
	default:
		g.stale = true // not only State may have changed
	}
	g.join, g.want, g.failing, g.told = ev, ev.State, false, false
	c.hasten(g)
}

// leave is the event.
func (c *Client) leave(ev Leave) {
	g := c.groups[ev.MGID]
	if g == nil || g.want == 0 && !ev.Forget {
		return
	}
	g.want = 0
	if ev.Forget || c.state == StateDown || g.held == 0 && g.task.status != sent {
		c.remove(g)
		return
	}
	c.hasten(g)
}

// remove is the end of g.
func (c *Client) remove(g *group) {
	c.stop(g.task)
	delete(c.groups, g.join.MGID)
	c.order = slices.DeleteFunc(c.order, func(o *group) bool { return o == g })
	c.act(Left{g.join.MGID})
}

// hasten asks for g as soon as it can be asked for, unless that is going on.
func (c *Client) hasten(g *group) {
	if g.task.status != sent {
		g.task.failures = 0
		c.enqueue(g.task)
	}
}

// renew asks for g again: the administrator may have forgotten it.
func (c *Client) renew(g *group) {
	g.stale = true
	g.task.succeeded()
	c.enqueue(g.task)
}

// wanted returns the join state to ask for.
func (c *Client) wanted(g *group) wire.JoinState {
	w := g.want
	if w&wire.SendOnlyFullMember != 0 && c.info.CapabilityMask2&wire.Cap2SendOnlyFullMember == 0 {
		w = w&^wire.SendOnlyFullMember | wire.SendOnlyNonMember
	}
	return w
}

// groupQuestion returns what has to be asked for g next.
func (c *Client) groupQuestion(g *group) (wire.Message, bool) {
	want := c.wanted(g)
	g.asked = g.join
	r := wire.MCMemberRecord{MGID: g.join.MGID, PortGID: c.port.GID, PKey: g.join.PKey}
	switch {
	case want != 0 && (g.stale || want&^g.held != 0):
		r.JoinState = want
		h := wire.Header{Method: wire.MethodSet, Mask: wire.JoinMask}
		if g.join.Create {
			p := g.join.Params
			h.Mask = wire.CreateMask
			r.QKey, r.MTUSelector, r.MTU, r.TrafficClass = p.QKey, wire.Exactly, p.MTU, p.TrafficClass
			r.RateSelector, r.Rate, r.SL, r.FlowLabel, r.HopLimit = wire.Exactly, p.Rate, p.SL, p.FlowLabel, p.HopLimit
		}
		return wire.Message{Header: h, Record: r}, true
	case g.held&^want != 0:
		r.JoinState = g.held &^ want
		return wire.Message{Header: wire.Header{Method: wire.MethodDelete, Mask: wire.JoinMask}, Record: r}, true
	case want == 0:
		c.remove(g)
	default: // nothing until it is time
		c.refresh(g.task)
	}
	return wire.Message{}, false
}

// groupAnswered is for an answer about g. It reports whether it is one.
func (c *Client) groupAnswered(g *group, r wire.MCMemberRecord) bool {
	asked := g.task.msg.Record.(wire.MCMemberRecord)
	if r.MGID != asked.MGID {
		return false
	}
	if g.task.msg.Method == wire.MethodDelete {
		c.stop(g.task)
		c.deleted(g, asked.JoinState)
		return true
	}
	if r.PortGID != asked.PortGID || !isMLID(r.MLID) || r.MTU.Octets() == 0 ||
		r.JoinState&asked.JoinState != asked.JoinState || (r.PKey^asked.PKey)&^ib.PKeyFull != 0 {
		return false
	}
	c.stop(g.task)
	g.held, g.stale = g.held|asked.JoinState, g.asked != g.join
	if g.want != 0 && !g.stale && (!g.told || g.record != r) {
		g.record, g.told, g.failing = r, true, false
		c.act(Joined{r})
	}
	c.enqueue(g.task) // there may be more to do: a Leave meanwhile, or another state
	return true
}

// deleted is for a Delete that is over, however it ended.
func (c *Client) deleted(g *group, state wire.JoinState) {
	if g.held &^= state; g.held == 0 && g.want == 0 {
		c.remove(g)
		return
	}
	g.record.JoinState &^= state
	c.enqueue(g.task)
}

// groupFailed is for a Set or a Delete that came to nothing.
func (c *Client) groupFailed(g *group, cause Cause, s wire.Status) {
	asked, _ := g.task.msg.Record.(wire.MCMemberRecord)
	if g.task.msg.Method == wire.MethodDelete { // not a member, or nobody to tell
		c.deleted(g, asked.JoinState)
		return
	}
	if cause == Refused {
		g.held &^= asked.JoinState
	} else {
		g.unheard()
	}
	if g.want == 0 {
		c.enqueue(g.task)
		return
	}
	c.backOff(g.task)
	if cause != Refused && g.told {
		return // still a member, for all we know
	}
	missing := cause == Refused && noGroup(s, asked.JoinState)
	c.tellFailed(g, JoinFailed{MGID: g.join.MGID, Cause: cause, Status: s, NoGroup: missing})
}

// unheard is for a Set without an answer: it may have come to pass.
func (g *group) unheard() {
	asked := g.task.msg.Record.(wire.MCMemberRecord)
	g.held, g.stale = g.held|asked.JoinState, true
}

// tellFailed tells the user, once, that it is not a member of g.
func (c *Client) tellFailed(g *group, f JoinFailed) {
	g.told = false
	if !g.failing || g.failed != f {
		g.failing, g.failed = true, f
		c.act(f)
	}
}

// noGroup reports whether an administrator refuses a join with s because the
// group does not exist and cannot be made from what the join says. To those who
// may not make a group opensm says no more than that the request is invalid.
func noGroup(s wire.Status, asked wire.JoinState) bool {
	mayMake := asked&(wire.FullMember|wire.SendOnlyFullMember) != 0
	return s == wire.StatusInsufficientComponents || s == wire.StatusNoRecords || s == wire.StatusInvalid && !mayMake
}

// isMLID reports whether l can be the LID of a group.
func isMLID(l ib.LID) bool { return l >= 0xc000 && l < ib.PermissiveLID }
