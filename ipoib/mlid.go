package ipoib

import (
	"bytes"
	"fmt"
	"maps"
	"slices"

	"ipoibcm/group"
	"ipoibcm/ib"
	"ipoibcm/lru"
	"ipoibcm/mtu"
	"ipoibcm/sa"
	"ipoibcm/verbs"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/ip"
	wire "ipoibcm/wire/sa"
)

// This file joins groups at the subnet administrator, which gives each group its LID
// (RFC 4391 sections 5 and 10). The port becomes a full member of the groups that package
// group joins, and a send-only member of groups that packets are only sent to.

// Bounds of groups that are only sent to.
const (
	maxSendOnly   = 256
	maxGroupQueue = 16 // packets that wait for one such group
)

// An mcGroup is a group that the port has joined, or is joining.
type mcGroup struct {
	mgid   ib.GID
	member bool // the UD QP is to receive it; otherwise packets are only sent to it
	record wire.MCMemberRecord
	joined bool   // record says how the group is, and packets can be sent to it
	gone   bool   // the administrator says that it does not exist
	at     ib.LID // LID at which the UD QP is attached; zero means not attached
	queue  [][]byte

	lru.Links[mcGroup] // in fabric.sendOnly, unless member
}

// joinBroadcast joins the group that every interface is in, which says what the link is.
func (f *Interface) joinBroadcast() {
	f.saStep(sa.Join{MGID: f.broadcastMGID(), PKey: f.opt.pkey() | ib.PKeyFull, State: wire.FullMember,
		Create: f.fab.opt.CreateBroadcast, Params: f.ownParams()})
}

func (f *Interface) broadcastMGID() ib.GID {
	return group.BroadcastGID(f.opt.pkey(), group.DefaultScope)
}

// ownParams returns the parameters of a broadcast group that we create; zero without
// Fabric.CreateBroadcast.
func (f *Interface) ownParams() sa.Params {
	if !f.fab.opt.CreateBroadcast {
		return sa.Params{}
	}
	m := min(ib.MTU2048, f.pathMTU)
	return sa.Params{QKey: f.opt.qkey(), MTU: m, Rate: ib.Rate10G}
}

// groupJoined takes what the administrator says of a group that the port has joined.
func (f *Interface) groupJoined(r wire.MCMemberRecord) {
	g, broadcast := f.fab.groups[r.MGID], r.MGID == f.broadcastMGID()
	if g == nil && broadcast {
		g = f.newGroup(r.MGID, true)
	}
	if g != nil { // otherwise we have left it meanwhile
		f.takeGroup(g, r)
	}
	if broadcast {
		f.broadcastJoined(r)
	}
}

// takeGroup uses a group as the administrator describes it.
func (f *Interface) takeGroup(g *mcGroup, r wire.MCMemberRecord) {
	g.record, g.joined, g.gone = r, true, false
	path := verbs.Path{SGID: f.link.GID, DGID: r.MGID, DLID: r.MLID, GRH: true, FlowLabel: r.FlowLabel,
		TrafficClass: r.TrafficClass, HopLimit: r.HopLimit, SL: r.SL, PKey: r.PKey, MTU: r.MTU, Rate: r.Rate, Life: r.Life}
	f.note(Note{Kind: NoteGroup, Text: fmt.Sprintf("joined %v (%v): MLID %#04x, SL %d, rate %v, hop limit %d", r.MGID, r.JoinState, uint16(r.MLID), r.SL, r.Rate, r.HopLimit)})
	f.do(UsePath{Path: path})
	f.attach(g)
	queue := g.queue
	g.queue = nil
	for _, fr := range queue {
		f.do(SendUD{MGID: g.mgid, Frame: fr})
	}
	f.settleGroups()
}

// attach has the UD QP receive a group of which the port is a full member.
func (f *Interface) attach(g *mcGroup) {
	if !g.member || !g.joined || g.record.JoinState&wire.FullMember == 0 || !f.up {
		return
	}
	if g.at != g.record.MLID {
		f.detach(g)
	}
	g.at = g.record.MLID
	f.do(JoinGroup{MGID: g.mgid, MLID: g.at})
}

// detach undoes attach.
func (f *Interface) detach(g *mcGroup) {
	if g.at != 0 {
		f.do(LeaveGroup{MGID: g.mgid, MLID: g.at})
		g.at = 0
	}
}

// broadcastJoined takes Q_Key and UD MTU of the link from the broadcast group. The first time it
// brings the link up; later it joins the other groups again if the parameters have changed.
func (f *Interface) broadcastJoined(r wire.MCMemberRecord) {
	b := f.fab
	first, old := !b.joined, sa.ParamsOf(b.broadcast)
	b.broadcast, b.joined, b.failed = r, true, nil
	if r.QKey != f.opt.qkey() {
		f.opt.QKey = r.QKey
		f.do(SetQKey{QKey: r.QKey})
	}
	n := r.MTU.Octets() - encap.HeaderLen
	if b.udMTU != 0 {
		n = min(n, b.udMTU)
	}
	if !first && f.up && f.ipv6 != (n >= mtu.MinIPv6) {
		f.linkDown(fmt.Sprintf("the broadcast group has a UD MTU of %d now", n))
		first = true
	}
	if first && !f.up {
		f.ipv6 = n >= mtu.MinIPv6
		f.addLinkLocal()
	}
	f.setUDMTU(n)
	if first {
		f.note(Note{Kind: NoteLink, Text: fmt.Sprintf("the broadcast group is joined: Q_Key %v, UD MTU %d, SL %d, rate %v", r.QKey, n, r.SL, r.Rate)})
		if f.fib.Link().Up {
			f.linkUp()
		}
		return
	}
	if sa.ParamsOf(r) == old {
		return
	}
	for _, g := range f.groupsInOrder() { // they have its parameters
		if g.mgid != r.MGID {
			f.joinAdmin(g)
		}
	}
}

// groupFailed takes the failure to join a group, or the loss of a membership.
func (f *Interface) groupFailed(a sa.JoinFailed) {
	why := a.Cause.String()
	if a.Cause == sa.Refused {
		why = a.Status.String()
	}
	f.note(Note{Kind: NoteGroup, Text: fmt.Sprintf("joining %v failed: %s", a.MGID, why)}) // 4391-12-1
	if a.MGID == f.broadcastMGID() {
		f.fab.failed = &a
		if f.fab.joined {
			f.fab.joined = false
			f.linkDown("the broadcast group is gone: " + why)
		}
		return
	}
	g := f.fab.groups[a.MGID]
	if g == nil {
		return
	}
	g.joined, g.gone = false, a.NoGroup
	f.detach(g)
	queue := g.queue
	g.queue = nil
	for _, fr := range queue {
		f.toRouters(g, fr)
	}
	f.settleGroups()
}

// newGroup makes the record of a group.
func (f *Interface) newGroup(mgid ib.GID, member bool) *mcGroup {
	g := &mcGroup{mgid: mgid, member: member}
	f.fab.groups[mgid] = g
	if !member {
		f.fab.sendOnly.Push(g)
		f.hearOfGroups()
	}
	return g
}

// hearOfGroups subscribes to the traps about groups created and deleted, as a sender to groups
// that it has not joined must (RFC 4391 section 10): 4391-10-3.
func (f *Interface) hearOfGroups() {
	if f.fab.traps || f.fab.opt.NoReports {
		return
	}
	f.fab.traps = true
	for _, t := range groupTraps {
		f.saStep(sa.Subscribe{Trap: t})
	}
}

var groupTraps = [...]wire.Trap{wire.TrapGroupCreated, wire.TrapGroupDeleted}

// hearNoMore ends the subscriptions of hearOfGroups, but not with Fabric.Shared: the
// administrator does not count the subscriptions of a port either.
func (f *Interface) hearNoMore() {
	if !f.fab.traps || f.fab.opt.Shared {
		return
	}
	for _, t := range groupTraps {
		f.saStep(sa.Unsubscribe{Trap: t})
	}
}

// joinAdmin asks the administrator for g, as a member that receives or one that sends.
func (f *Interface) joinAdmin(g *mcGroup) {
	if g.mgid == f.broadcastMGID() {
		return // startFabric has joined it
	}
	state := wire.SendOnlyFullMember
	if g.member {
		state = wire.FullMember
	}
	f.saStep(sa.Join{MGID: g.mgid, PKey: f.opt.pkey() | ib.PKeyFull, State: state, Create: true,
		Params: sa.ParamsOf(f.fab.broadcast)})
}

// joinGroup has the UD QP receive a group: at once on Ethernet, on InfiniBand when the
// administrator has made the port a member.
func (f *Interface) joinGroup(mgid ib.GID) {
	if f.fab == nil {
		f.do(JoinGroup{MGID: mgid})
		return
	}
	g := f.fab.groups[mgid]
	if g == nil {
		g = f.newGroup(mgid, true)
	} else if !g.member {
		f.fab.sendOnly.Remove(g)
		g.member = true
	}
	f.attach(g)
	f.joinAdmin(g)
}

// leaveGroup undoes joinGroup. The port stays in the broadcast group until leaveFabric, because
// that group says whether there is a link.
func (f *Interface) leaveGroup(mgid ib.GID) {
	if f.fab == nil {
		f.do(LeaveGroup{MGID: mgid})
		return
	}
	g := f.fab.groups[mgid]
	if g == nil {
		return
	}
	f.detach(g)
	if mgid != f.broadcastMGID() {
		f.forgetGroup(g)
	}
}

// forgetGroup drops g and ends the port's membership of it. With Fabric.Shared the
// administrator is not told.
func (f *Interface) forgetGroup(g *mcGroup) {
	if !g.member {
		f.fab.sendOnly.Remove(g)
	}
	delete(f.fab.groups, g.mgid)
	f.n[dropNoGroup] += uint64(len(g.queue))
	f.saStep(sa.Leave{MGID: g.mgid, Forget: f.fab.opt.Shared})
	f.do(ForgetPath{DGID: g.mgid})
	f.settleGroups()
}

// leaveFabric ends all memberships, that of the broadcast group last.
func (f *Interface) leaveFabric() {
	if f.fab == nil {
		return
	}
	for _, g := range f.groupsInOrder() {
		if g.mgid != f.broadcastMGID() {
			f.forgetGroup(g)
		}
	}
	f.hearNoMore()
	f.saStep(sa.Leave{MGID: f.broadcastMGID(), Forget: f.fab.opt.Shared})
	f.saStep(sa.Finish{})
}

func (f *Interface) groupsInOrder() []*mcGroup {
	return slices.SortedFunc(maps.Values(f.fab.groups), func(a, b *mcGroup) int { return bytes.Compare(a.mgid[:], b.mgid[:]) })
}

// groupKnown reports whether packets can be sent to a group.
func (f *Interface) groupKnown(mgid ib.GID) bool {
	if f.fab == nil {
		return true
	}
	g := f.fab.groups[mgid]
	return g != nil && g.joined
}

// sendMulticast sends a frame to a group. On InfiniBand a group that the port is no member
// of is joined first, to send only (RFC 4391 section 10), and the frame waits.
func (f *Interface) sendMulticast(mgid ib.GID, fr []byte) {
	if f.groupKnown(mgid) {
		f.do(SendUD{MGID: mgid, Frame: fr})
		return
	}
	g := f.fab.groups[mgid]
	if g == nil {
		if f.fab.sendOnly.Len() >= maxSendOnly {
			f.forgetGroup(f.fab.sendOnly.Oldest())
		}
		g = f.newGroup(mgid, false)
		f.joinAdmin(g)
	}
	switch {
	case g.joined:
		f.do(SendUD{MGID: mgid, Frame: fr})
	case g.gone:
		f.toRouters(g, fr)
	case len(g.queue) >= maxGroupQueue:
		f.count(dropGroupQueue)
	default:
		g.queue = append(g.queue, fr)
	}
}

// toRouters sends a frame for a group that does not exist to the group of all routers, which
// may know hosts of g beyond the link. Without the group of all routers the frame is dropped
// (RFC 4391 section 10).
func (f *Interface) toRouters(g *mcGroup, fr []byte) {
	routers := ip.AllRouters4
	if encap.EtherType(fr[0])<<8|encap.EtherType(fr[1]) == encap.IPv6 {
		routers = ip.AllRouters6
	}
	mgid, _ := group.MGID(routers, f.opt.pkey(), group.DefaultScope)
	// Routers forward no group of the link itself.
	if dst, _ := ip.Dst(fr[encap.HeaderLen:]); !g.gone || mgid == g.mgid || dst.IsLinkLocalMulticast() {
		f.count(dropNoGroup)
		return
	}
	f.count(nToRouters)
	f.sendMulticast(mgid, fr)
}
