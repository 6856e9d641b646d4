package sa

import (
	"cmp"
	"slices"

	"ipoibcm/ib"
	wire "ipoibcm/wire/sa"
)

// A subscription is our subscription to the notices of one trap.
type subscription struct {
	trap   wire.Trap
	wanted bool
	held   bool
	task   *task
}

// reportWait is how long the administrator waits for our answer to a report before it repeats the
// report: 2.1 s.
const reportWait ib.Timeout = 19

func (c *Client) findTrap(t wire.Trap) *subscription {
	if i := slices.IndexFunc(c.traps, func(s *subscription) bool { return s.trap == t }); i >= 0 {
		return c.traps[i]
	}
	return nil
}

// subscribe handles the event Subscribe.
func (c *Client) subscribe(t wire.Trap) {
	s := c.findTrap(t)
	switch {
	case s == nil && len(c.traps) >= maxTraps:
		c.counters.refusedTraps++
		return
	case s == nil:
		s = &subscription{trap: t, task: c.newTask(kindTrap)}
		s.task.trap = s
		c.traps = append(c.traps, s)
	case s.wanted:
		return
	}
	s.wanted = true
	c.hasten(s.task)
}

// unsubscribe handles the event Unsubscribe.
func (c *Client) unsubscribe(t wire.Trap) {
	s := c.findTrap(t)
	if s == nil || !s.wanted {
		return
	}
	s.wanted = false
	if c.state == StateDown || !s.held && s.task.status != sent {
		c.removeTrap(s)
		return
	}
	c.hasten(s.task)
}

func (c *Client) removeTrap(s *subscription) {
	c.stop(s.task)
	c.traps = slices.DeleteFunc(c.traps, func(o *subscription) bool { return o == s })
}

func (c *Client) trapQuestion(s *subscription) (msg wire.Message, ok bool) {
	switch {
	case s.wanted != s.held:
		return wire.Message{Header: wire.Header{Method: wire.MethodSet}, Record: wire.InformInfo{
			LIDBegin: wire.AnyLID, Generic: true, Subscribe: s.wanted, Type: wire.AnyType, Trap: s.trap,
			QPN: ib.QPNGSI, ResponseTime: reportWait, Producer: wire.AnyProducer,
		}}, true
	case s.wanted:
		c.refresh(s.task)
	default:
		c.removeTrap(s)
	}
	return msg, false
}

// trapAnswered handles an answer about s. It returns false if the record does not match the
// question.
func (c *Client) trapAnswered(s *subscription, r wire.InformInfo) bool {
	asked := s.task.msg.Record.(wire.InformInfo)
	if r.Trap != asked.Trap || r.Subscribe != asked.Subscribe {
		return false
	}
	c.stop(s.task)
	s.held = asked.Subscribe
	c.enqueue(s.task)
	return true
}

// report handles a Report. It answers every valid one, wanted or not, because the administrator
// repeats a report without an answer.
func (c *Client) report(in *MAD, m wire.Message) {
	if c.state == StateDown || in.Peer.LID != c.admin.LID && in.Peer.LID != c.port.SMLID {
		c.counters.drops[DropSource]++
		return
	}
	n, ok := m.Record.(wire.Notice)
	if !ok || m.Method != wire.MethodReport {
		c.counters.drops[DropMethod]++
		return
	}
	c.counters.reports++
	out := &MAD{Peer: in.Peer}
	m.Method = wire.MethodReportResp
	m.AppendBinary(out.Data[:0])
	out.Peer.QKey = cmp.Or(out.Peer.QKey, ib.QKeyGSI)
	c.act(SendMAD{MAD: out})
	if s := c.findTrap(n.Trap); s == nil || !s.wanted || !n.Generic {
		c.counters.strayReports++
		return
	}
	gid, _ := n.GID()
	lid, _ := n.LID()
	c.act(Noticed{n.Trap, gid, lid})
	switch n.Trap {
	case wire.TrapGIDInService:
		c.forgetPort(gid)
	case wire.TrapGIDOutOfService:
		c.forgetPort(gid)
		c.act(PathGone{gid})
	case wire.TrapGroupCreated:
		if g := c.groups[gid]; g != nil && g.failing {
			c.hasten(g.task)
		}
	case wire.TrapGroupDeleted:
		c.groupDeleted(c.groups[gid])
	}
}

// groupDeleted handles the notice that group g was deleted, and joins it again. A group lives as
// long as it has a member with FullMember or SendOnlyFullMember. If the port is such a member, the
// notice may be old. If not, the group may be deleted while the port needs it, and the user gets
// JoinFailed.
func (c *Client) groupDeleted(g *group) {
	if g == nil || g.want == 0 {
		return
	}
	g.stale = true
	if g.want&(wire.FullMember|wire.SendOnlyFullMember) == 0 {
		c.tellFailed(g, JoinFailed{MGID: g.join.MGID, Cause: Deleted, NoGroup: true})
	}
	c.hasten(g.task)
}
