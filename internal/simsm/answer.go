package simsm

import (
	"encoding/binary"
	"slices"
	"time"

	"ipoibcm/ib"
	"ipoibcm/sa"
	wire "ipoibcm/wire/sa"
)

// A group is one multicast group and its members.
type group struct {
	record  wire.MCMemberRecord // without PortGID and JoinState
	members map[ib.GID]wire.JoinState
	fixed   bool // the group is configured, and stays without members
}

func (s *Subnet) find(mgid ib.GID) *group {
	if i := slices.IndexFunc(s.groups, func(g *group) bool { return g.record.MGID == mgid }); i >= 0 {
		return s.groups[i]
	}
	return nil
}

// newGroup makes a group with the lowest MLID that is free.
func (s *Subnet) newGroup(mgid ib.GID, pkey ib.PKey, p sa.Params) *group {
	mlid := s.firstML
	for slices.ContainsFunc(s.groups, func(g *group) bool { return g.record.MLID == mlid }) {
		mlid++
	}
	g := &group{members: map[ib.GID]wire.JoinState{}, record: wire.MCMemberRecord{MGID: mgid, QKey: p.QKey, MLID: mlid,
		MTUSelector: wire.Exactly, MTU: p.MTU, RateSelector: wire.Exactly, Rate: p.Rate, LifeSelector: wire.Exactly,
		TrafficClass: p.TrafficClass, PKey: pkey | ib.PKeyFull, SL: p.SL, FlowLabel: p.FlowLabel, HopLimit: p.HopLimit}}
	s.groups = append(s.groups, g)
	return g
}

func (g *group) leave(port ib.GID, how wire.JoinState) {
	if g.members[port] &^= how; g.members[port] == 0 {
		delete(g.members, port)
	}
}

// reap deletes a group without members, unless it is fixed. NonMember and
// SendOnlyNonMember do not count as members.
func (s *Subnet) reap(now time.Time, g *group) {
	for _, how := range g.members {
		if how&(wire.FullMember|wire.SendOnlyFullMember) != 0 {
			return
		}
	}
	if g.fixed {
		return
	}
	s.groups = slices.DeleteFunc(s.groups, func(o *group) bool { return o == g })
	s.notify(now, wire.TrapGroupDeleted, g.record.MGID)
}

// answer returns the answer to a request of the client at p. ok is false if the method
// asks for no answer.
func (s *Subnet) answer(now time.Time, p *Port, q wire.Message) (a wire.Message, ok bool) {
	a = q
	switch q.Method {
	case wire.MethodGet, wire.MethodSet:
		a.Method = wire.MethodGetResp
	case wire.MethodDelete:
		a.Method = wire.MethodDeleteResp
	default:
		return a, false
	}
	if s.lucky(s.Busy) {
		s.Stats.Busy++
		a.Status = wire.StatusBusy
		return a, true
	}
	switch r := q.Record.(type) {
	case wire.ClassPortInfo:
		info := wire.ClassPortInfo{BaseVersion: 1, ClassVersion: 2, CapabilityMask: 0x2602, CapabilityMask2: 0xb5e8,
			ResponseTime: 16}
		if s.NoSendOnlyFull {
			info.CapabilityMask2 &^= wire.Cap2SendOnlyFullMember
		}
		a.Record = info
	case wire.PathRecord:
		a.Record, a.Status = s.path(q.Mask, r)
	case wire.InformInfo:
		a.Status = s.inform(p, r)
	case wire.MCMemberRecord:
		a.Record, a.Status = s.multicast(now, p, q.Method, q.Mask, r)
	default:
		a.Status = wire.StatusBadAttribute
	}
	return a, true
}

// multicast answers a request to read, join or leave a group.
func (s *Subnet) multicast(now time.Time, p *Port, how wire.Method, mask wire.Mask,
	r wire.MCMemberRecord) (wire.Record, wire.Status) {
	g := s.find(r.MGID)
	if how == wire.MethodGet {
		if g == nil {
			return r, wire.StatusNoRecords
		}
		return g.record, 0
	}
	const needed = wire.MCMGID | wire.MCPortGID | wire.MCJoinState
	of := s.byGID(r.PortGID)
	switch {
	case mask&needed != needed:
		return r, wire.StatusInsufficientComponents
	case binary.BigEndian.Uint64(r.PortGID[:]) != Prefix:
		return r, wire.StatusInvalidGID
	case of == nil:
		return r, wire.StatusInvalid
	}
	if how == wire.MethodDelete {
		return s.leave(now, g, of, r)
	}
	return s.join(now, p, of, g, mask, r)
}

func (s *Subnet) leave(now time.Time, g *group, of *Port, r wire.MCMemberRecord) (wire.Record, wire.Status) {
	if g == nil || g.members[of.GID()]&r.JoinState == 0 {
		return r, wire.StatusInvalid
	}
	out := g.record
	out.PortGID, out.QKey, out.MLID, out.MTU, out.Rate, out.Life = r.PortGID, 0, 0, 0, 0, 0
	g.leave(of.GID(), r.JoinState)
	out.JoinState = g.members[of.GID()]
	s.reap(now, g)
	return out, 0
}

func (s *Subnet) join(now time.Time, p, of *Port, g *group, mask wire.Mask,
	r wire.MCMemberRecord) (wire.Record, wire.Status) {
	made := g == nil
	if made {
		key, member := of.key(r.PKey)
		switch {
		case r.JoinState&(wire.FullMember|wire.SendOnlyFullMember) == 0:
			return r, wire.StatusInvalid
		case mask&wire.CreateMask != wire.CreateMask:
			return r, wire.StatusInsufficientComponents
		case !member, r.MTU > of.MTU:
			return r, wire.StatusInvalid
		}
		g = s.newGroup(r.MGID, key, sa.ParamsOf(r))
	}
	_, member := of.key(g.record.PKey)
	old := g.members[of.GID()]
	switch {
	case !member, of.MTU < g.record.MTU, old != 0 && of != p, !g.like(mask, r):
		return r, wire.StatusInvalid
	}
	g.members[of.GID()] = old | r.JoinState
	if made {
		s.notify(now, wire.TrapGroupCreated, r.MGID)
	}
	out := g.record
	out.PortGID, out.JoinState = r.PortGID, g.members[of.GID()]
	return out, 0
}

// like reports whether the components that mask selects in a join have the values of g.
func (g *group) like(mask wire.Mask, r wire.MCMemberRecord) bool {
	for bit, same := range map[wire.Mask]bool{
		wire.MCQKey: r.QKey == g.record.QKey, wire.MCTrafficClass: r.TrafficClass == g.record.TrafficClass,
		wire.MCPKey: (r.PKey^g.record.PKey)&^ib.PKeyFull == 0, wire.MCSL: r.SL == g.record.SL,
		wire.MCFlowLabel: r.FlowLabel == g.record.FlowLabel, wire.MCHopLimit: r.HopLimit == g.record.HopLimit,
		wire.MCMTU:  r.MTUSelector != wire.Exactly || r.MTU == g.record.MTU,
		wire.MCRate: r.RateSelector != wire.Exactly || r.Rate == g.record.Rate,
	} {
		if mask&bit != 0 && !same {
			return false
		}
	}
	return true
}

// key returns the port's P_Key of a partition.
func (p *Port) key(k ib.PKey) (ib.PKey, bool) {
	for _, own := range p.PKeys {
		if (own^k)&^ib.PKeyFull == 0 {
			return own, true
		}
	}
	return 0, false
}

func (s *Subnet) byGID(g ib.GID) *Port {
	for _, p := range s.ports {
		if p.GID() == g && p.Up {
			return p
		}
	}
	return nil
}

// path answers a request for a path.
func (s *Subnet) path(mask wire.Mask, r wire.PathRecord) (wire.Record, wire.Status) {
	from, to := s.byGID(r.SGID), s.byGID(r.DGID)
	if mask&(wire.PathSGID|wire.PathDGID) != wire.PathSGID|wire.PathDGID {
		return r, wire.StatusInsufficientComponents
	}
	if from == nil || to == nil {
		return r, wire.StatusNoRecords
	}
	for _, k := range from.PKeys {
		other, ok := to.key(k)
		if !ok || !k.Match(other) || mask&wire.PathPKey != 0 && (k^r.PKey)&^ib.PKeyFull != 0 {
			continue
		}
		return wire.PathRecord{DGID: r.DGID, SGID: r.SGID, DLID: to.LID, SLID: from.LID, Reversible: true,
			PKey: k | ib.PKeyFull, MTUSelector: wire.Exactly, MTU: min(from.MTU, to.MTU),
			RateSelector: wire.Exactly, Rate: ib.Rate10G,
			LifeSelector: wire.Exactly, Life: 18}, 0
	}
	return r, wire.StatusNoRecords
}

// An inform is one subscription.
type inform struct {
	port *Port
	trap wire.Trap
}

func (s *Subnet) inform(p *Port, r wire.InformInfo) wire.Status {
	i := slices.Index(s.informs, inform{p, r.Trap})
	switch {
	case r.Subscribe && i < 0:
		s.informs = append(s.informs, inform{p, r.Trap})
	case !r.Subscribe && i < 0:
		return wire.StatusInvalid
	case !r.Subscribe:
		s.informs = slices.Delete(s.informs, i, i+1)
	}
	return 0
}

// A report is a notice on its way, repeated until it is answered.
type report struct {
	to    *Port
	msg   wire.Message
	again time.Time
	tries int
}

// A report without an answer is sent again after reportWait, reportTries times in all.
const (
	reportWait  = time.Second
	reportTries = 3
)

// notify sends a report of a trap about a GID to all ports that have subscribed to the trap.
func (s *Subnet) notify(now time.Time, trap wire.Trap, about ib.GID) {
	n := wire.Notice{Generic: true, Type: 3, Producer: 4, Trap: trap, IssuerLID: smLID}
	copy(n.Details[6:], about[:])
	for _, i := range s.informs {
		if i.trap != trap {
			continue
		}
		s.lastTID++
		s.Stats.Reports++
		m := wire.Message{Header: wire.Header{Method: wire.MethodReport, TransactionID: s.lastTID}, Record: n}
		s.reports = append(s.reports, &report{i.port, m, now.Add(reportWait), 1})
		s.sendTo(now, i.port, m)
	}
}

// Repeat repeats the reports that are due. Take does so too.
func (s *Subnet) Repeat(now time.Time) {
	for _, r := range slices.Clone(s.reports) {
		if r.again.After(now) {
			continue
		}
		if r.tries >= reportTries {
			s.reports = slices.DeleteFunc(s.reports, func(o *report) bool { return o == r })
			continue
		}
		r.tries++
		r.again = now.Add(reportWait)
		s.sendTo(now, r.to, r.msg)
	}
}
