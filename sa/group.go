package sa

import (
	"slices"

	"ipoibcm/ib"
	wire "ipoibcm/wire/sa"
)

// A group is one multicast group that the user has joined, or is leaving.
type group struct {
	join  Join
	asked Join           // the Join for which the last question was made
	want  wire.JoinState // zero means that the group is to be left
	held  wire.JoinState // the membership at the administrator, as far as we know
	// stale is set if held may be wrong.
	stale bool
	// record is that of the last answer; told is set if the user has got it in Joined.
	record wire.MCMemberRecord
	told   bool
	// failed is the last JoinFailed for the user; failing is set while it holds.
	failed  JoinFailed
	failing bool
	task    *task
}

// join handles the event Join.
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
		g.stale = true // fields other than State may have changed
	}
	g.join, g.want, g.failing, g.told = ev, ev.State, false, false
	c.hasten(g.task)
}

// leave handles the event Leave.
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
	c.hasten(g.task)
}

// remove forgets g and returns Left to the user.
func (c *Client) remove(g *group) {
	c.stop(g.task)
	delete(c.groups, g.join.MGID)
	c.order = slices.DeleteFunc(c.order, func(o *group) bool { return o == g })
	c.act(Left{g.join.MGID})
}

// hasten queues t, unless its question is unanswered.
func (c *Client) hasten(t *task) {
	if t.status != sent {
		t.failures = 0
		c.enqueue(t)
	}
}

// renew queues the question of g again, because the administrator may have forgotten the
// membership.
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

// groupQuestion returns the next question about g. If there is none it returns false, after it has
// removed g if g was to be left, or else has set the time of the next refresh.
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
	default: // nothing until the next refresh
		c.refresh(g.task)
	}
	return wire.Message{}, false
}

// groupAnswered handles an answer about g. It returns false if the record does not match the
// question.
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
	c.enqueue(g.task) // there may be more to do: a Leave came meanwhile, or another state
	return true
}

// deleted handles the end of a Delete, whether it succeeded or not.
func (c *Client) deleted(g *group, state wire.JoinState) {
	if g.held &^= state; g.held == 0 && g.want == 0 {
		c.remove(g)
		return
	}
	g.record.JoinState &^= state
	c.enqueue(g.task)
}

// groupFailed handles a Set or a Delete that failed.
func (c *Client) groupFailed(g *group, cause Cause, s wire.Status) {
	asked, _ := g.task.msg.Record.(wire.MCMemberRecord)
	if g.task.msg.Method == wire.MethodDelete { // the port is no member, or the administrator is away
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

// unheard handles a Set without an answer: the administrator may have carried it out.
func (g *group) unheard() {
	asked := g.task.msg.Record.(wire.MCMemberRecord)
	g.held, g.stale = g.held|asked.JoinState, true
}

// tellFailed tells the user, once, that the port is not a member of g.
func (c *Client) tellFailed(g *group, f JoinFailed) {
	g.told = false
	if !g.failing || g.failed != f {
		g.failing, g.failed = true, f
		c.act(f)
	}
}

// noGroup reports whether status s of a refused join means that the group does not exist and that
// the join cannot create it. If the join state asked for may not create a group, opensm answers
// only that the request is invalid.
func noGroup(s wire.Status, asked wire.JoinState) bool {
	mayMake := asked&(wire.FullMember|wire.SendOnlyFullMember) != 0
	return s == wire.StatusInsufficientComponents || s == wire.StatusNoRecords || s == wire.StatusInvalid && !mayMake
}

// isMLID reports whether l can be the LID of a group.
func isMLID(l ib.LID) bool { return l >= 0xc000 && l < ib.PermissiveLID }
