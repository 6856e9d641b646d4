package group

import (
	"cmp"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"time"

	"ipoibcm/counters"
	"ipoibcm/ib"
	"ipoibcm/wire/ip"
)

// Bounds that are no option.
const (
	maxAddrs = 4096 // addresses of the device
	// MaxPeers bounds a list of peers.
	MaxPeers = 4096
)

// A failed join is tried again after retryMin, doubled each time up to retryMax.
const (
	retryMin = time.Second
	retryMax = time.Minute
)

// always are the groups that every interface joins, in this order.
var always = []netip.Addr{ip.LimitedBroadcast, ip.AllSystems, ip.AllNodes}

// member is one joined IP group.
type member struct {
	mgid    ib.GID
	reasons Reason
	refs    int // addresses behind ForAddress
	since   time.Time
}

// underlay is one group of the underlay, which Join and Leave name.
type underlay struct {
	refs     int           // members that it carries
	joined   bool          // Join was issued and has not failed since
	retry    time.Time     // when to try again; zero while joined or down
	interval time.Duration // last wait before a retry
}

// A Machine is one interface's group membership.
type Machine struct {
	o     Options
	up    bool
	gid   ib.GID
	peers []ib.GID
	list  bool // copies go to peers instead of multicast, even if there are no peers

	addrs   map[netip.Prefix]netip.Addr // the subnet broadcast of each address, or the zero Addr
	members map[netip.Addr]*member
	wire    map[ib.GID]*underlay
	learned int // members with neither Always nor ForAddress: MaxGroups bounds them
	dirty   bool
	table   *Table

	counts

	// These are set during a Step only.
	out []Action
	now time.Time
}

// New returns a machine that waits for [Up].
func New(o Options) *Machine {
	o.PKey, o.Scope = cmp.Or(o.PKey, ib.DefaultPKey)|ib.PKeyFull, cmp.Or(o.Scope&0xf, DefaultScope)
	if !o.Underlay4.IsValid() {
		o.Underlay4 = UnderlayGroup4(o.PKey)
	}
	o.Log = cmp.Or(o.Log, slog.New(slog.DiscardHandler))
	m := &Machine{
		o:       o,
		addrs:   make(map[netip.Prefix]netip.Addr),
		members: make(map[netip.Addr]*member),
		wire:    make(map[ib.GID]*underlay),
	}
	m.setPeers(o.Peers, o.Copies)
	m.table = m.build()
	return m
}

// Step applies ev at time now and appends to dst what the driver must do, in
// order. It is the only way the state changes.
func (m *Machine) Step(dst []Action, now time.Time, ev Event) []Action {
	m.out, m.now = dst, now
	ev.step(m)
	if m.dirty {
		m.dirty, m.table = false, m.build()
		m.act(Publish{m.table})
	}
	dst, m.out = m.out, nil
	return dst
}

func (m *Machine) act(a Action) { m.out = append(m.out, a) }

// start joins everything anew, because a new QP is attached to nothing.
func (m *Machine) start(gid ib.GID) {
	for _, u := range m.wire {
		u.joined, u.retry, u.interval = false, time.Time{}, 0
	}
	m.up = false
	for _, a := range always {
		m.want(a, Always)
	}
	m.changeUnderlay(func() { m.up, m.gid = true, gid })
}

// stop leaves everything, broadcast last because it was joined first.
func (m *Machine) stop() {
	m.up = false
	for _, g := range slices.Backward(m.wireOrder()) {
		u := m.wire[g]
		if u.joined {
			m.leave(g)
		}
		u.joined, u.retry = false, time.Time{}
	}
}

// changeUnderlay calls f, which changes the underlay groups that carry the members, and then joins
// and leaves underlay groups accordingly.
func (m *Machine) changeUnderlay(f func()) {
	order := m.joinOrder()
	before := make([]ib.GID, len(order))
	for i, a := range order {
		before[i] = m.rideOn(m.members[a])
	}
	f()
	m.dirty = true
	// Hold the new groups first: a group that stays must not be left in between.
	for _, a := range order {
		m.hold(m.rideOn(m.members[a]))
	}
	for _, g := range before {
		m.release(g)
	}
}

// rideOn returns the underlay group that carries e: its own, the one of an IPv4
// underlay, or none (zero) if copies go to peers.
func (m *Machine) rideOn(e *member) ib.GID {
	switch {
	case m.list:
		return ib.GID{}
	case m.gid.Is4():
		return ib.GIDFromAddr(m.o.Underlay4)
	}
	return e.mgid
}

// hold takes a reference to the underlay group g. It joins g, unless the machine is down, g is
// joined already, or g waits for a retry.
func (m *Machine) hold(g ib.GID) {
	if g.IsZero() {
		return
	}
	u := m.wire[g]
	if u == nil {
		u = &underlay{}
		m.wire[g] = u
	}
	u.refs++
	if m.up && !u.joined && !m.now.Before(u.retry) {
		m.join(g, u)
	}
}

func (m *Machine) join(g ib.GID, u *underlay) {
	u.joined, u.retry = true, time.Time{}
	m.joins++
	m.act(Join{g})
}

func (m *Machine) leave(g ib.GID) {
	m.leaves++
	m.act(Leave{g})
}

// release gives back one reference to g. With the last reference it leaves g.
func (m *Machine) release(g ib.GID) {
	u := m.wire[g]
	if u == nil {
		return // the zero GID
	}
	if u.refs--; u.refs > 0 {
		return
	}
	delete(m.wire, g)
	if u.joined && m.up {
		m.leave(g)
	}
}

// want adds reason r for the group a.
func (m *Machine) want(a netip.Addr, r Reason) {
	if e := m.members[a]; e != nil {
		m.setReasons(e, e.reasons|r)
		return
	}
	mgid, ok := MGID(a, m.o.PKey, m.o.Scope)
	if !ok {
		m.ignoredNodeLocal++
		return
	}
	if learned(r) > 0 && m.learned >= m.o.maxGroups() {
		if m.refusedGroups == 0 { // further groups are counted only
			m.o.Log.Warn("group refused, too many", "group", a, "max", m.o.maxGroups())
		}
		m.refusedGroups++
		return
	}
	e := &member{mgid: mgid, since: m.now}
	m.setReasons(e, r)
	m.members[a] = e
	m.dirty = true
	m.hold(m.rideOn(e))
}

// setReasons sets the reasons for e. A group that loses its address then counts against MaxGroups.
// So the groups may exceed the bound for a while, by no more than the number of addresses.
func (m *Machine) setReasons(e *member, r Reason) {
	m.learned += learned(r) - learned(e.reasons)
	e.reasons = r
}

// learned returns 1 for a member with reasons r that MaxGroups bounds, else 0.
func learned(r Reason) int {
	if r == 0 || r&(Always|ForAddress) != 0 {
		return 0
	}
	return 1
}

// unwant removes reasons r for the group a. With the last reason it drops the group.
func (m *Machine) unwant(a netip.Addr, r Reason) {
	e := m.members[a]
	if e == nil || e.reasons&r == 0 {
		return
	}
	m.setReasons(e, e.reasons&^r)
	if e.reasons == 0 {
		delete(m.members, a)
		m.dirty = true
		m.release(m.rideOn(e))
	}
}

func (m *Machine) addAddr(ev AddAddr) {
	p := ev.Prefix
	if !p.IsValid() {
		return
	}
	bcast := ev.Broadcast
	if p.Addr().Is4() && !bcast.IsValid() {
		bcast = subnetBroadcast(p)
	}
	old, known := m.addrs[p]
	if !known && len(m.addrs) >= maxAddrs {
		if m.refusedAddrs == 0 {
			m.o.Log.Warn("address refused, too many", "address", p, "max", maxAddrs)
		}
		m.refusedAddrs++
		return
	}
	m.addrs[p] = bcast
	m.dirty = m.dirty || old != bcast
	if known || p.Addr().Is4() {
		return
	}
	g := ip.SolicitedNode(p.Addr())
	m.want(g, ForAddress)
	m.members[g].refs++ // a solicited-node group always has an MGID
}

func (m *Machine) delAddr(p netip.Prefix) {
	bcast, known := m.addrs[p]
	if !known {
		return
	}
	delete(m.addrs, p)
	m.dirty = m.dirty || bcast.IsValid()
	if p.Addr().Is4() {
		return
	}
	g := ip.SolicitedNode(p.Addr())
	e := m.members[g]
	if e.refs--; e.refs == 0 {
		m.unwant(g, ForAddress)
	}
}

// subnetBroadcast returns the address of p with all ones in its host part. A
// network of one or two addresses has none (RFC 3021).
func subnetBroadcast(p netip.Prefix) netip.Addr {
	if p.Bits() > 30 {
		return netip.Addr{}
	}
	a := p.Addr().As4()
	for i := p.Bits(); i < 32; i++ {
		a[i/8] |= 0x80 >> (i % 8)
	}
	return netip.AddrFrom4(a)
}

// report applies one group record. A leave of the kernel means that none of its sockets wants the
// group. So it removes both reasons, an earlier report and the kernel's list.
func (m *Machine) report(c ip.Change) {
	m.changes++
	switch want, known := c.Wanted(); {
	case !known: // sources blocked: the group may still be wanted
	case want:
		m.want(c.Group, Reported)
	default:
		m.unwant(c.Group, Reported|InKernel)
	}
}

// kernel applies the kernel's list. It first drops the groups that are not in the list, to
// make room for new ones.
func (m *Machine) kernel(groups []netip.Addr) {
	list := make([]netip.Addr, 0, len(groups))
	for _, a := range groups {
		if a = a.Unmap().WithZone(""); a.IsMulticast() {
			list = append(list, a)
		}
	}
	slices.SortFunc(list, netip.Addr.Compare)
	for _, a := range m.order() {
		if _, in := slices.BinarySearchFunc(list, a, netip.Addr.Compare); !in {
			m.unwant(a, Reported|InKernel)
		}
	}
	for _, a := range slices.Compact(list) {
		m.want(a, InKernel)
	}
}

func (m *Machine) setPeers(peers []ib.GID, copies bool) {
	m.peers = nil
	seen := make(map[ib.GID]bool, min(len(peers), MaxPeers))
	for _, g := range peers {
		switch {
		case g.IsZero() || g.IsMulticast() || seen[g]:
			// no host, or one that is in the list already
		case len(m.peers) >= MaxPeers:
			if m.refusedPeers == 0 { // further peers are counted only
				m.o.Log.Warn("peer refused, too many", "gid", g, "max", MaxPeers)
			}
			m.refusedPeers++
		default:
			seen[g] = true
			m.peers = append(m.peers, g)
		}
	}
	m.list = copies || len(m.peers) > 0
}

func (m *Machine) joinFailed(ev JoinFailed) {
	u := m.wire[ev.MGID]
	if u == nil || !u.joined || !m.up {
		return // the group has been left meanwhile
	}
	m.joinFailures++
	u.joined, u.interval = false, min(retryMax, max(retryMin, 2*u.interval))
	u.retry = m.now.Add(u.interval)
	// RFC 4391 section 12: every failure of a group operation is to be logged.
	m.o.Log.Warn("join failed", "mgid", ev.MGID, "err", ev.Err, "retry", u.interval)
}

func (m *Machine) wake() {
	for _, g := range m.wireOrder() {
		if u := m.wire[g]; !u.retry.IsZero() && !m.now.Before(u.retry) {
			m.join(g, u)
		}
	}
}

// Deadline returns when the driver must send [Wake]; zero means never.
func (m *Machine) Deadline() (t time.Time) {
	for _, u := range m.wire { // a minimum: order does not matter
		if !u.retry.IsZero() && (t.IsZero() || u.retry.Before(t)) {
			t = u.retry
		}
	}
	return t
}

// build makes the table of the present state.
func (m *Machine) build() *Table {
	t := &Table{
		pkey: m.o.PKey, scope: m.o.Scope, peers: slices.Clone(m.peers), list: m.list,
		wanted:    make(map[netip.Addr]struct{}, len(m.members)),
		broadcast: make(map[netip.Addr]struct{}),
	}
	if m.gid.Is4() {
		t.underlay4 = ib.GIDFromAddr(m.o.Underlay4)
	}
	for a := range m.members {
		t.wanted[a] = struct{}{}
	}
	for _, b := range m.addrs {
		if b.IsValid() {
			t.broadcast[b] = struct{}{}
		}
	}
	return t
}

// order returns the joined IP groups: IPv4 before IPv6, by address.
func (m *Machine) order() []netip.Addr {
	return slices.SortedFunc(maps.Keys(m.members), netip.Addr.Compare)
}

// joinOrder returns the joined IP groups, those of always in front, broadcast
// first: RFC 4391 section 5 makes broadcast the condition for everything else.
func (m *Machine) joinOrder() []netip.Addr {
	rank := func(a netip.Addr) int {
		if i := slices.Index(always, a); i >= 0 {
			return i
		}
		return len(always)
	}
	return slices.SortedFunc(maps.Keys(m.members), func(a, b netip.Addr) int {
		return cmp.Or(rank(a)-rank(b), a.Compare(b))
	})
}

// wireOrder returns the underlay groups in the order in which members join them.
func (m *Machine) wireOrder() []ib.GID {
	var out []ib.GID
	seen := make(map[ib.GID]bool, len(m.wire))
	for _, a := range m.joinOrder() {
		if g := m.rideOn(m.members[a]); !g.IsZero() && !seen[g] {
			seen[g] = true
			out = append(out, g)
		}
	}
	return out
}

// Table returns the table published last. It is never nil.
func (m *Machine) Table() *Table { return m.table }

// Groups returns the joined groups: IPv4 before IPv6, by address.
func (m *Machine) Groups() []Group {
	var out []Group
	for _, a := range m.order() {
		e := m.members[a]
		u := m.wire[m.rideOn(e)]
		out = append(out, Group{
			IP: a, MGID: e.mgid, Reasons: e.reasons, Refs: e.refs, Since: e.since,
			Joined: u != nil && u.joined,
		})
	}
	return out
}

// counts are the counters of a Machine.
type counts struct {
	joins            uint64 `name:"joins"`
	leaves           uint64 `name:"leaves"`
	joinFailures     uint64 `name:"join_failures"`
	changes          uint64 `name:"report_changes"`
	refusedGroups    uint64 `name:"refused_groups"`
	refusedAddrs     uint64 `name:"refused_addresses"`
	refusedPeers     uint64 `name:"refused_peers"`
	ignoredNodeLocal uint64 `name:"ignored_node_local"`
}

// Counters calls f for every counter, in a fixed order.
func (m *Machine) Counters(f func(name string, value uint64)) { counters.Each(&m.counts, f) }
