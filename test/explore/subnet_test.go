package explore

import (
	"encoding/binary"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"ipoibcm/eventqueue"
	"ipoibcm/fib/fibtest"
	"ipoibcm/group"
	"ipoibcm/ib"
	"ipoibcm/internal/simsm"
	"ipoibcm/ipoib"
	"ipoibcm/neigh"
	"ipoibcm/sa"
	"ipoibcm/verbs"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/ip/iptest"
	wire "ipoibcm/wire/sa"
)

const (
	// lateBy bounds how long a MAD to or from the administrator is on its way: more than
	// one answer is waited for (250 ms).
	lateBy = 400 * time.Millisecond
	// settles is within what a subnet that is well again must be as its hosts want it: the
	// longest pause between two tries is 16 s.
	settles = 20 * time.Second
	// refresh is how often hosts join again of their own accord: what an administrator
	// that started anew without a word costs.
	refresh = 24 * time.Second
)

// theGroup is one that hosts join beside those of the link, and send to.
var theGroup = netip.MustParseAddr("239.1.2.3")

// A subnetSetup says what a subnet is made of and what may happen in it.
type subnetSetup struct {
	name string
	opt  simsm.Options
	// from says whether hosts are up when the search begins.
	fromStart bool
	member    bool // host a has joined theGroup before

	losses, delays int // MADs
	stops          int // of the subnet manager; it comes back when nothing else is left to happen
	starts         int // anew, with a word to all
	quiet          int // anew, without one
	moves          int // of the P_Key of a host
	relabels       int // LIDs of a host; the subnet manager tells all to register again
	joins, leaves  int // of theGroup, by host a
	sends          int // to theGroup, by host b
	flaps          int // of the link of a host
	timers         int // that expire before nothing goes wrong any more

	noLeave bool // broken on purpose: a Delete is never sent
	noHear  bool // broken on purpose: hosts do not hear the word
}

type subnetBudget struct{ losses, delays, stops, starts, quiet, moves, relabels, joins, leaves, sends, flaps, timers int }

// A portHost is one machine at a port of the subnet.
type portHost struct {
	f      *ipoib.Interface
	kernel *fibtest.Kernel
	index  int
	paths  map[ib.GID]verbs.Path // as UsePath told
	at     map[ib.GID]ib.LID     // where the UD QP is attached
	joined bool                  // theGroup, as its kernel wants it
	got    [2]int                // packets of the other host: of its own, by theGroup
}

// A madItem is something on its way between a host and the subnet manager.
type madItem struct {
	host int
	up   bool     // to the subnet manager
	mad  *sa.MAD  // nobody changes it
	ev   sa.Event // down: anything else that the driver is told
	sent time.Time
	slow bool
}

// A subnetWorld is one state.
type subnetWorld struct {
	*subnetSetup
	now   time.Time
	sub   *simsm.Subnet
	hosts []*portHost
	items []madItem
	left  subnetBudget
	// unsaid: the administrator has forgotten everybody and told nobody.
	unsaid bool

	t       *tools
	pending eventqueue.Queue[event]
	failure string
	log     func(string, ...any)
}

// A counter gives numbers that differ, and are no more than a few microseconds as pauses:
// the client of subnet administration takes both from what it is given.
type counter struct{ n uint64 }

func (c *counter) Uint64() uint64 {
	c.n++
	return c.n
}

func (s *subnetSetup) begin(t *tools) *subnetWorld {
	w := &subnetWorld{subnetSetup: s, now: time.Unix(1000, 0), t: t, sub: simsm.New(s.opt), left: subnetBudget{s.losses,
		s.delays, s.stops, s.starts, s.quiet, s.moves, s.relabels, s.joins, s.leaves, s.sends, s.flaps, s.timers}}
	for i := range 2 {
		w.sub.AddPort(ib.GUID(i + 1))
		w.hosts = append(w.hosts, &portHost{index: i, paths: map[ib.GID]verbs.Path{}, at: map[ib.GID]ib.LID{}})
	}
	for i := range w.hosts {
		w.boot(i)
	}
	if s.fromStart {
		return w
	}
	if s.member {
		w.join(0, true)
	}
	w.pass(time.Minute) // announcements and duplicate detection are over
	for i := range w.hosts {
		w.ping(i)
	}
	w.pass(time.Minute)
	if wrong := w.wrong(); wrong != "" {
		panic(fmt.Sprintf("explore: %s does not begin at rest: %s", s.name, wrong))
	}
	return w
}

// boot starts the machine of host i, whose kernel has an IPv4 address and no IPv6.
func (w *subnetWorld) boot(i int) {
	h := w.hosts[i]
	h.f = ipoib.New(ipoib.Options{
		Link: encap.LinkAddr{QPN: ib.QPN(0x101 + i), GID: w.sub.Ports()[i].GID()}, GUID: ib.GUID(0xc000 + i),
		PathMTU: ib.MTU2048, Mode: ipoib.ModeUD, UDMTU: 1024, Idle: -1,
		Rand: rand.New(&counter{uint64(i+1) << 12}),
		Neigh: neigh.Options{ReachableTime: 24 * time.Hour, DelayTime: 24 * time.Hour, StaleTime: 24 * time.Hour,
			DADProbes: -1, RequestRate: -1, SourceRate: -1},
		Fabric: &ipoib.Fabric{Port: w.sub.Ports()[i].Now(), SA: sa.Options{Refresh: refresh, MaxInFlight: 2}},
	})
	h.kernel = fibtest.New()
	w.step(i, ipoib.Start{})
	for _, ev := range slices.Concat(h.kernel.Start(), h.kernel.Up(true), h.kernel.AddAddr(netip.PrefixFrom(addr(i), 24))) {
		w.step(i, ipoib.FIBEvent{Event: ev})
	}
}

// fork returns a world that may be changed while w stays.
func (w *subnetWorld) fork() *subnetWorld {
	c := *w
	c.sub = clone(w.t.plans, w.sub)
	c.hosts = slices.Clone(w.hosts)
	for i, h := range c.hosts {
		n := *h
		n.f, n.kernel = clone(w.t.plans, h.f), clone(w.t.plans, h.kernel)
		n.paths, n.at = maps.Clone(h.paths), maps.Clone(h.at)
		c.hosts[i] = &n
	}
	c.items = slices.Clone(w.items)
	c.log = nil
	return &c
}

func (w *subnetWorld) failf(format string, args ...any) {
	if w.failure == "" {
		w.failure = fmt.Sprintf(format, args...)
	}
}

func (w *subnetWorld) sayf(format string, args ...any) {
	if w.log != nil {
		w.log(format, args...)
	}
}

func (h *portHost) name() string { return string(rune('a' + h.index)) }

func (w *subnetWorld) step(i int, ev ipoib.Event) {
	w.pending.Add(event{i, ev, true})
	w.pending.Run(func(e event) {
		h := w.hosts[e.to]
		for _, a := range h.f.Step(nil, w.now, e.ev) {
			w.do(h, a)
		}
		if h.f.Status().Up && !h.f.Ready() {
			w.failf("%s is up, and no member of the broadcast group", h.name())
		}
	})
}

func (w *subnetWorld) do(h *portHost, a ipoib.Action) {
	switch a := a.(type) {
	case ipoib.SendSubnet:
		var m wire.Message
		if err := m.UnmarshalBinary(a.MAD.Data[:]); err != nil {
			w.failf("%s sends a MAD that cannot be read: %v", h.name(), err)
			return
		}
		if w.noLeave && m.Method == wire.MethodDelete {
			return
		}
		w.items = append(w.items, madItem{host: h.index, up: true, mad: a.MAD, sent: w.now})
	case ipoib.UsePath:
		if a.Path.DLID == 0 {
			w.failf("%s has a path to %v without a LID", h.name(), a.Path.DGID)
		}
		h.paths[a.Path.DGID] = a.Path
	case ipoib.ForgetPath:
		delete(h.paths, a.DGID)
	case ipoib.JoinGroup:
		if h.at[a.MGID] != 0 && h.at[a.MGID] != a.MLID {
			w.failf("%s attaches its QP to %v at MLID %v and at %v", h.name(), a.MGID, h.at[a.MGID], a.MLID)
		}
		h.at[a.MGID] = a.MLID
	case ipoib.LeaveGroup:
		if h.at[a.MGID] != a.MLID {
			w.failf("%s detaches its QP from %v at MLID %v, where it is not", h.name(), a.MGID, a.MLID)
		}
		delete(h.at, a.MGID)
	case ipoib.SendUD:
		w.sendUD(h, a)
	case ipoib.FIBAction:
		evs, _ := h.kernel.Do(a.Action)
		for _, ev := range evs {
			w.step(h.index, ipoib.FIBEvent{Event: ev})
		}
	case ipoib.Note:
		w.sayf("      %s: %s", h.name(), a.Text)
	}
}

// sendUD carries a datagram to where its path leads by LIDs, at once.
func (w *subnetWorld) sendUD(h *portHost, a ipoib.SendUD) {
	dst := a.Link.GID
	if !a.MGID.IsZero() {
		dst = a.MGID
	}
	path, ok := h.paths[dst]
	if !ok {
		w.failf("%s sends to %v, to which it has no path", h.name(), dst)
		return
	}
	to, port := w.hosts[1-h.index], w.sub.Ports()[1-h.index]
	members := w.sub.Members(dst)
	switch {
	case !port.Up, !w.sub.Ports()[h.index].Up, a.MGID.IsZero() && port.LID != path.DLID:
		return
	case !a.MGID.IsZero() && (members[w.sub.Ports()[h.index].GID()] == 0 ||
		members[port.GID()]&wire.FullMember == 0 || to.at[dst] != path.DLID):
		return
	case encap.EtherType(binary.BigEndian.Uint16(a.Frame)) != encap.ARP:
		to.got[bit(!a.MGID.IsZero())]++
		return
	}
	link := h.f.Link()
	w.step(to.index, ipoib.RecvFrame{SrcGID: link.GID, SrcQPN: link.QPN, DstGID: dst, Frame: slices.Clone(a.Frame)})
}

// ping has the kernel of host i send to the other one.
func (w *subnetWorld) ping(i int) { w.output(i, addr(1-i)) }

func (w *subnetWorld) output(i int, dst netip.Addr) {
	b, err := iptest.Echo{Src: addr(i), Dst: dst, Data: make([]byte, 100)}.AppendBinary(nil)
	if err != nil {
		panic(err)
	}
	w.step(i, ipoib.Packet{IP: b})
	w.collect()
}

// join has the kernel of host i join theGroup, or leave it.
func (w *subnetWorld) join(i int, in bool) {
	var groups []netip.Addr
	if in {
		groups = append(groups, theGroup)
	}
	w.hosts[i].joined = in
	w.step(i, ipoib.KernelGroups{Groups: groups})
	w.collect()
}

// collect takes up what the subnet manager has sent.
func (w *subnetWorld) collect() {
	for _, d := range w.sub.Drain() {
		it := madItem{host: slices.Index(w.sub.Ports(), d.To), ev: d.Event, sent: w.now}
		if m, ok := d.Event.(sa.RecvMAD); ok {
			it.mad, it.ev = m.MAD, nil
		}
		w.items = append(w.items, it)
	}
}

// arrive lets item i happen.
func (w *subnetWorld) arrive(i int) {
	it := w.items[i]
	w.items = slices.Delete(w.items, i, i+1)
	port := w.sub.Ports()[it.host]
	switch {
	case it.up:
		w.sub.Send(w.now, port, it.mad)
	case it.mad != nil:
		w.step(it.host, ipoib.RecvSubnet{MAD: it.mad})
	default:
		now := port.Now()
		_, register := it.ev.(sa.Reregister)
		port, changed := it.ev.(sa.SetPort)
		// As the agent does: what happened while a port was away, nobody has told it.
		again := (register || changed && port.Active) && !w.noHear
		w.step(it.host, ipoib.PortChanged{Port: now, Reregister: again})
		if changed {
			w.step(it.host, ipoib.UnderlayChanged{Link: w.hosts[it.host].f.Link(), PathMTU: ib.MTU2048, Active: now.Active})
		}
	}
	w.collect()
}

// due returns who has something to do first, and when: a host, or the subnet manager,
// which repeats a report. Refreshes, and what is as far away, are nobody's until the end.
func (w *subnetWorld) due() (first time.Time, who int) {
	who = -1
	for i, h := range w.hosts {
		if d := h.f.Deadline(); !d.IsZero() && (who < 0 || d.Before(first)) {
			first, who = d, i
		}
	}
	if d := w.sub.Due(); !d.IsZero() && (who < 0 || d.Before(first)) {
		first, who = d, len(w.hosts)
	}
	return first, who
}

// expire lets the timer of who expire.
func (w *subnetWorld) expire(who int) {
	if who == len(w.hosts) {
		w.sub.Repeat(w.now)
	} else {
		w.step(who, ipoib.Wake{})
	}
	w.collect()
}

// pass lets time go by, in which everything arrives in order.
func (w *subnetWorld) pass(d time.Duration) {
	w.until(d, func() bool { return false })
}

// until is pass until done, and says when that was.
func (w *subnetWorld) until(d time.Duration, done func() bool) bool {
	end := w.now.Add(d)
	for {
		w.collect()
		for len(w.items) > 0 {
			w.arrive(0)
		}
		if done() || w.failure != "" {
			return true
		}
		at, who := w.due()
		if who < 0 || at.After(end) {
			w.now = latest(w.now, end)
			return false
		}
		w.now = latest(w.now, at)
		w.expire(who)
	}
}

// recover lets the subnet be well again, and says what is not as the hosts want it in time.
func (w *subnetWorld) recover() {
	if !w.sub.Running() {
		w.sub.Start(w.now)
		w.unsaid = w.opt.Quiet
	}
	for i, p := range w.sub.Ports() {
		if !p.Up {
			w.sub.SetLink(w.now, w.sub.Ports()[i], true)
		}
	}
	within := settles
	if w.unsaid {
		within += refresh
	}
	if !w.until(within, func() bool { return w.wrong() == "" }) {
		w.failf("%v after nothing went wrong any more: %s", within, w.wrong())
		return
	}
	// What is right at one moment may be wrong at the next: it stays.
	w.pass(2 * refresh)
	if wrong := w.wrong(); wrong != "" {
		w.failf("later on: %s", wrong)
	}
	w.traffic()
}

// wrong says what is not as hosts want it.
func (w *subnetWorld) wrong() string {
	mgid, _ := group.MGID(theGroup, ib.DefaultPKey, group.DefaultScope)
	broadcast := group.BroadcastGID(ib.DefaultPKey, group.DefaultScope)
	for i, h := range w.hosts {
		port := w.sub.Ports()[i]
		if !h.f.Status().Up {
			return h.name() + " is not up"
		}
		if h.at[broadcast] == 0 {
			return h.name() + " does not receive the broadcast group"
		}
		if h.joined && h.at[mgid] == 0 {
			return h.name() + " does not receive the group that it has joined"
		}
		for g, at := range h.at {
			if w.sub.Members(g)[port.GID()]&wire.FullMember == 0 {
				return fmt.Sprintf("%s receives %v at MLID %v, and is no member", h.name(), g, at)
			}
			if h.paths[g].DLID != at {
				return fmt.Sprintf("%s receives %v at MLID %v and sends to %v", h.name(), g, at, h.paths[g].DLID)
			}
		}
		if !h.joined && w.sub.Members(mgid)[port.GID()]&wire.FullMember != 0 {
			return h.name() + " is still a member of a group that it has left"
		}
	}
	return w.wrongGroups(mgid)
}

// wrongGroups looks at theGroup: the last leave has deleted it.
func (w *subnetWorld) wrongGroups(mgid ib.GID) string {
	members := w.sub.Members(mgid)
	if members != nil && len(members) == 0 {
		return "a group is left without members"
	}
	if members == nil && w.hosts[0].joined {
		return "there is no group that a host has joined"
	}
	return ""
}

// traffic checks that packets arrive: each host's own, and those to theGroup.
func (w *subnetWorld) traffic() {
	for i, h := range w.hosts {
		to := w.hosts[1-i]
		before := to.got
		arrived := false
		for range 3 { // the first may be what a stale path or neighbour costs
			w.ping(i)
			w.pass(4 * time.Second)
			if arrived = to.got[0] > before[0]; arrived {
				break
			}
		}
		if !arrived {
			w.failf("packets of %s do not arrive at %s", h.name(), to.name())
		}
	}
	if !w.hosts[0].joined {
		return
	}
	before := w.hosts[0].got[1]
	w.output(1, theGroup)
	w.pass(settles)
	if w.hosts[0].got[1] == before {
		w.failf("a packet to the group that a has joined does not arrive")
	}
}
