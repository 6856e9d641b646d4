// Package ipoib is one IPoIB connected-mode interface as a pure state machine.
//
// An [Interface] composes the neighbour cache, the multicast groups, the
// connection manager and the MTU rules into one answer per next hop: which
// queue pair, which MTU. Its driver feeds it events (a packet without a path, a
// MAD, an address added) and carries out its actions (send, create a queue
// pair, change a route). It reads no clock and starts nothing; packets that
// have a path never come here.
//
// # One peer
//
// Addresses that resolve to one link-layer address share a peer, and a peer has
// one connection to send on. A path to the peer is
//
//	Miss    while there is no connection: the next packet opens one. On InfiniBand also
//	        while the path to the port is not known: the next packet asks for it
//	UD      while a connection is being set up, during the pause after a failure,
//	        and for good where the two ends have no mode in common
//	Conn    while a connection is up
//
// Packets too large for UD wait in the peer's queue while a connection is on
// its way; those that fit go by UD meanwhile (docs/ambiguities.md).
//
// # One port
//
// On Ethernet a known link-layer address is all that sending takes. On InfiniBand
// ([Fabric]) the subnet administrator is asked for the path to the port first, and packets
// and connections wait for its answer. The interface is up there once the port has joined
// the broadcast group, which says what the link is like. The machine is the same for both:
// on Ethernet every path is known at once.
//
// Sources: RFC 4755, RFC 4391, docs/rfc4755.md and the decisions in docs/adr.
package ipoib

import (
	"cmp"
	"fmt"
	"net/netip"
	"time"

	"ipoibcm/cm"
	"ipoibcm/fib"
	"ipoibcm/group"
	"ipoibcm/ib"
	"ipoibcm/mtu"
	"ipoibcm/neigh"
	"ipoibcm/nexthop"
	"ipoibcm/ratelimit"
	"ipoibcm/serviceid"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/ip"
)

// maxQueuedOctets bounds the octets of packets that wait for connections to all peers together.
const maxQueuedOctets = 64 << 20

// An Interface is the machine. It is not safe for concurrent use.
type Interface struct {
	opt Options

	link             encap.LinkAddr
	pathMTU          ib.MTU
	deviceMTU        int
	ipv6             bool // the UD MTU allows IPv6
	started, up      bool
	active, shutdown bool // the underlay is active; Shutdown or HandOver came
	atCapacity       bool // few connections may still be made, so that no mode is announced

	neigh  *neigh.Table
	cm     *cm.Manager
	group  *group.Machine
	budget mtu.Budget // of UC receive rings

	addrs addrs // of the device

	peers   peers
	conns   conns
	counted time.Time // when the last Usage came; zero if none did

	fib   *fib.Table
	hops  hops
	n     [numCounters]uint64
	tells ratelimit.Bucket // of notes about drops

	fab *fabric // nil: Ethernet

	copies      copies
	unreachable unreachable
	answers     answers

	now time.Time // of the Step under way
	out []Action
}

// New returns the machine of one interface. It panics if opt.Rand is nil.
func New(opt Options) *Interface {
	if opt.Rand == nil {
		panic("ipoib: Options.Rand is nil")
	}
	f := &Interface{
		opt: opt, link: opt.Link, pathMTU: opt.PathMTU, deviceMTU: opt.deviceMTU(), active: true,
		ipv6:   opt.udMTU() >= mtu.MinIPv6,
		budget: mtu.Budget{Limit: opt.ucBudget(), Ring: opt.ucRing(), Full: uint32(opt.receiveMTU())},
		addrs:  addrs{prefixes: map[netip.Addr][]netip.Prefix{}}, peers: peers{byLink: map[encap.LinkAddr]*peer{}},
		conns: conns{byID: map[nexthop.Conn]*conn{}, byHandle: map[cm.Handle]*conn{}, ofHost: map[ib.GID]int{}},
		hops:  hops{peers: map[netip.Addr]*peer{}, groups: map[netip.Addr]bool{}},
	}
	f.link.Flags = opt.Mode.Flags()
	f.fab = newFabric(&f.opt)
	f.fib = fib.New(fib.Options{UDMTU: opt.udMTU(), BestMessage: opt.BestMessage})
	f.neigh = neigh.New(f.neighOptions())
	c := opt.CM
	c.GID, c.CAGUID, c.Rand = f.link.GID, opt.GUID, opt.Rand
	f.cm = cm.New(c)
	f.group = group.New(group.Options{PKey: opt.pkey(), Underlay4: opt.Underlay4, Peers: opt.Peers, Copies: opt.Copies, Log: opt.Log})
	f.watchFor(opt.Peers)
	return f
}

func (f *Interface) neighOptions() neigh.Options {
	o := f.opt.Neigh
	o.LinkAddr, o.Rand, o.Log, o.AskOthers = f.announced(), f.opt.Rand, f.opt.Log, true
	o.StaleTime = f.staleTime()
	return o
}

// staleTime is how long an unused neighbour is kept. By default it is no shorter than Idle,
// so that a connection does not lose its neighbour before it is idle.
func (f *Interface) staleTime() time.Duration {
	return cmp.Or(f.opt.Neigh.StaleTime, max(time.Minute, f.opt.idle()))
}

// Step applies ev at time now and appends to dst what the driver must do, in
// order. It is the only way the state changes.
func (f *Interface) Step(dst []Action, now time.Time, ev Event) []Action {
	f.now, f.out = now, dst
	if f.shutdown {
		f.handleLeaving(ev)
	} else {
		ev.step(f)
	}
	f.advertise()
	f.settle()
	dst, f.out = f.out, nil
	return dst
}

// handleLeaving handles events after Shutdown or HandOver. It ignores all but CM messages, events
// of fib and Wake, which the DREQs need to complete.
func (f *Interface) handleLeaving(ev Event) {
	switch ev := ev.(type) {
	case RecvMAD:
		f.recvMAD(ev.MAD)
	case RecvFrame:
		if isInband(ev) {
			f.recvInband(ev)
		}
	case FIBEvent:
		f.fibStep(ev.Event)
	case Wake:
		f.cmStep(cm.Wake{})
	}
}

// Deadline returns when the driver must send Wake; zero means never. After Shutdown or
// HandOver it is zero once every DREQ has been answered or given up.
func (f *Interface) Deadline() time.Time {
	switch {
	case !f.shutdown:
		return earliest(f.cm.Deadline(), f.neigh.Deadline(), f.group.Deadline(), f.firstPeer(), f.fib.Deadline(),
			f.copies.deadline(), f.fabricDeadline())
	case f.cm.Disconnecting() > 0:
		return f.cm.Deadline()
	}
	return time.Time{}
}

// earliest returns the earliest of some deadlines, where zero means never.
func earliest(deadlines ...time.Time) (first time.Time) {
	for _, t := range deadlines {
		if first.IsZero() || !t.IsZero() && t.Before(first) {
			first = t
		}
	}
	return first
}

func (f *Interface) do(a Action) { f.out = append(f.out, a) }

func (f *Interface) note(n Note) {
	f.do(n)
}

// start listens for connections on both service IDs (RFC 4755's and Linux's). The CM listens on
// them also while the link is down: from a REJ 8 peers would conclude that we are of another kind.
func (f *Interface) start() {
	if f.started {
		return
	}
	f.started = true
	f.listen()
	if f.fab == nil {
		f.addLinkLocal() // on InfiniBand broadcastJoined does, when the UD MTU is known
	}
	f.startFabric()
}

func (f *Interface) listen() {
	for _, form := range [...]serviceid.Form{serviceid.RFC, serviceid.Legacy} {
		f.cmStep(cm.Listen{ServiceID: serviceid.New(form, f.link.QPN), GID: f.link.GID,
			PrivateData: f.privateData(uint32(f.opt.receiveMTU()))})
	}
}

// addLinkLocal installs the RFC 4391 link-local address (its section 8).
func (f *Interface) addLinkLocal() {
	if !f.ipv6 {
		return
	}
	f.addrs.own, f.addrs.ownGone = netip.PrefixFrom(ip.LinkLocal(f.link.GID), 64), false
	f.do(AddAddr{Prefix: f.addrs.own})
}

func (f *Interface) linkUp() {
	if !f.started || f.up || f.shutdown || !f.Ready() {
		return
	}
	f.up, f.hops.allDirty = true, true
	f.note(Note{Kind: NoteLink, Text: "interface up", Report: InterfaceUp})
	f.groupStep(group.Up{GID: f.link.GID})
	for _, p := range f.addrs.sorted() {
		f.announce(p)
	}
	if f.addrs.ownGone {
		f.addLinkLocal() // the kernel removes it when a device goes down
	}
	f.recall(f.opt.Memory)
	f.opt.Memory = Memory{} // from now on our own records are newer
}

// linkDown gives up everything that needs the link (RFC 4755 section 3.4).
func (f *Interface) linkDown(why string) {
	if !f.up {
		return
	}
	f.up = false
	for _, c := range f.conns.byAge() {
		f.hangUp(c, why)
	}
	for _, p := range f.allPeers() {
		f.dropQueue(p)
		f.endAttempt(p)
		p.holdUntil, p.failures = time.Time{}, 0
		f.forgetBlackHole(p)
		f.setSearch(p, nil)
	}
	f.neighStep(neigh.Flush{})
	f.copies.waiting = [copyClasses][]copyJob{}
	f.holdGroups()
	for _, a := range f.addrs.sorted() {
		f.neighStep(neigh.AddrRemoved{IP: a.Addr()})
		f.groupStep(group.DelAddr{Prefix: a})
	}
	f.groupStep(group.Down{})
	f.dropPaths()
	f.hops.allDirty = true
	f.note(Note{Kind: NoteLink, Text: "interface down: " + why, Report: InterfaceDown})
}

// stop closes all connections. The CM still listens on the service IDs, so that a late REQ gets
// REJ 3: from a REJ 8 the peer would conclude that we are of another kind.
func (f *Interface) stop() {
	f.linkDown("the agent stops")
	f.leaveFabric()
	f.fibStep(fib.Stop{})
	f.shutdown = true
}

// advertise stops announcing modes before connections run out, and announces them again
// when enough have ended. To refuse REQs is not enough: after a REJ 1 Linux drops its next packet
// and sends another REQ instead. To a peer whose flags are zero Linux sends packets by UD.
func (f *Interface) advertise() {
	limit, full := f.opt.maxConns(), f.fullAt()
	switch n := len(f.conns.byID); {
	case !f.atCapacity && n >= full:
		f.count(nCrowded)
		f.note(Note{Kind: NoteLink, Text: fmt.Sprintf("%d of %d connections: no mode is announced until there is room", n, limit), Report: LimitReached})
	case f.atCapacity && n < f.leaveAt():
		f.note(Note{Kind: NoteLink, Text: fmt.Sprintf("%d of %d connections: modes are announced again", n, limit), Report: LimitLeft})
	default:
		return
	}
	f.atCapacity = !f.atCapacity
	f.neighStep(neigh.SetFlags{Flags: f.announced().Flags})
}

// fullAt returns the number of connections from which on we announce no mode.
func (f *Interface) fullAt() int { return f.opt.maxConns() - f.opt.maxConns()/16 }

// leaveAt returns the number of connections below which we announce modes again.
func (f *Interface) leaveAt() int { return f.fullAt() - f.opt.maxConns()/16 }

// announced returns our link-layer address with the flags that peers are told: none at
// capacity, or if REQs to our QP 1 reach somebody else.
func (f *Interface) announced() encap.LinkAddr {
	link := f.link
	if f.atCapacity || f.foreignREQs() {
		link.Flags = 0
	}
	return link
}

// addrAdded handles a new address of the device, whoever added it.
func (f *Interface) addrAdded(p netip.Prefix) {
	p = netip.PrefixFrom(p.Addr().Unmap().WithZone(""), p.Bits())
	if !p.IsValid() {
		return
	}
	if p.Addr().Is6() && !f.ipv6 {
		f.note(Note{Kind: NoteAddr, Addr: p.Addr(), Text: "ignored: the UD MTU is below 1280, so there is no IPv6 on this link"})
		return
	}
	if !f.addrs.add(p) {
		return
	}
	f.note(Note{Kind: NoteAddr, Addr: p.Addr(), Text: fmt.Sprintf("address %v added", p)})
	if f.up {
		f.announce(p)
	}
}

func (f *Interface) announce(p netip.Prefix) {
	f.groupStep(group.AddAddr{Prefix: p})
	f.neighStep(neigh.AddrAdded{Prefix: p})
	if f.addrs.unclaim(p.Addr(), f.now) {
		f.neighStep(neigh.Insist{IP: p.Addr()})
	}
}

func (f *Interface) addrRemoved(p netip.Prefix) {
	a := p.Addr().Unmap().WithZone("")
	p = netip.PrefixFrom(a, p.Bits())
	if !f.addrs.remove(p) {
		return
	}
	last := !f.addrs.has(a)
	f.addrs.ownGone = f.addrs.ownGone || p == f.addrs.own
	f.note(Note{Kind: NoteAddr, Addr: a, Text: fmt.Sprintf("address %v removed", p)})
	if f.up {
		f.groupStep(group.DelAddr{Prefix: p})
		if last { // the device may still have the address with another prefix length
			f.neighStep(neigh.AddrRemoved{IP: a})
		}
	}
}

// setUDMTU makes n octets of IP the largest datagram; zero changes nothing. It does not switch
// IPv6 on or off: on a link with IPv6 it raises n to at least 1280, and a link without IPv6 stays
// without whatever n is.
func (f *Interface) setUDMTU(n int) {
	if f.ipv6 && n != 0 {
		n = max(n, mtu.MinIPv6)
	}
	if n == 0 || n == f.opt.udMTU() {
		return
	}
	f.opt.UDMTU = n
	f.note(Note{Kind: NoteLink, Text: fmt.Sprintf("UD MTU is %d", n), Report: MTUChanged})
	f.fibStep(fib.SetUDMTU{MTU: n})
	f.hops.allDirty = true
	f.settleGroups()
}

// underlay follows the port. A new GID or QPN makes us another interface in the
// eyes of every peer, so no connection and no neighbour entry survives it.
func (f *Interface) underlay(ev UnderlayChanged) {
	moved := ev.Link.Key() != f.link.Key()
	back := ev.Active && !f.active
	f.active, f.pathMTU = ev.Active, cmp.Or(ev.PathMTU, f.pathMTU)
	if f.fab == nil { // on InfiniBand the broadcast group sets the UD MTU
		f.setUDMTU(ev.UDMTU)
	}
	f.probeAgain()
	f.note(Note{Kind: NoteLink, Text: fmt.Sprintf("underlay: %v, path MTU %v, active %v", ev.Link.GID, f.pathMTU, ev.Active)})
	if moved {
		wasUp := f.up
		f.linkDown("the underlay address changed")
		for _, form := range [...]serviceid.Form{serviceid.RFC, serviceid.Legacy} {
			f.cmStep(cm.Unlisten{ServiceID: serviceid.New(form, f.link.QPN), GID: f.link.GID})
		}
		flags := f.link.Flags
		f.link = ev.Link
		f.link.Flags = flags
		f.neighStep(neigh.SetLinkAddr{LinkAddr: f.announced()})
		if f.started {
			f.listen()
			if f.addrs.own.IsValid() && f.addrs.own.Addr() != ip.LinkLocal(f.link.GID) {
				f.do(RemoveAddr{Prefix: f.addrs.own})
				f.addLinkLocal()
			}
		}
		if wasUp && ev.Active {
			f.linkUp()
		}
		return
	}
	if back && f.up {
		f.groupStep(group.Up{GID: f.link.GID})
		f.neighStep(neigh.Reannounce{})
	}
}
