package sim

import (
	"encoding/binary"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"time"

	"ipoibcm/fib"
	"ipoibcm/group"
	"ipoibcm/ib"
	"ipoibcm/internal/simfabric"
	"ipoibcm/ipoib"
	"ipoibcm/nexthop"
	"ipoibcm/rtnl"
	"ipoibcm/verbs"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/mad"
)

// usageEvery is how often the stand-in for the agent reports what was counted.
const usageEvery = 2 * time.Second

// What is at a host's QP 1.
type qp1 uint8

const (
	qp1Ours   qp1 = iota // our CM
	qp1Taken             // the kernel's CM: our agent cannot have it, REQs are rejected
	qp1Silent            // ours, but nothing that is sent there arrives
)

// A config is what hosts may differ in. Zero is the default.
type config struct {
	mode    ipoib.Mode
	receive int    // Receive MTU
	path    ib.MTU // of the port
	srq     bool   // RC receives come from a shared queue
	cm      ipoib.CMTransport
	qp1     qp1
	lag     time.Duration // the control plane takes up to this for each event
	tune    func(*ipoib.Options)
	fault   fault // what its agent does wrong on purpose
}

// A host is one machine on the network. The kernel's part outlives the agent's.
type host struct {
	w   *world
	i   int
	cfg config
	gid ib.GID
	ib  *ibPort // nil: on Ethernet

	kernel

	// Everything from here is made anew by boot.
	life  int  // which boot
	dead  bool // killed and not booted again
	port  *simfabric.Port
	m     *ipoib.Interface
	link  encap.LinkAddr
	mUp   bool // the machine was told so
	table *group.Table
	paths map[netip.Addr]nexthop.Path // by next hop
	dests map[rtnl.Flow]netip.Addr

	datagrams int // IP packets that came by UD

	pending  []ipoib.Event
	stepping bool
	skew     time.Duration // of its clock
	busy     time.Time     // until then the control plane is at work
	held     int           // what waits for it
	late     bool          // it has been held up
	timer    simfabric.Timer
	waking   bool // Wake waits for the control plane
	wokeAt   time.Time
	wakes    int // at wokeAt
	books    books
	touched  map[netip.Addr]bool // addresses that the Step under way said something about
	looked   int                 // by checkExplained

	ud       *conn
	conns    map[nexthop.Conn]*conn
	byQPN    map[ib.QPN]*conn
	sendCQ   verbs.CQ
	recvCQ   verbs.CQ
	srq      verbs.SRQ
	srqBufs  recvBufs
	udUse    map[encap.LinkAddr]ipoib.UDUse
	mads     map[mad.AttrID]int // sent
	inband   int                // of those, by the UD QP
	flushes  int
	notes    map[ipoib.NoteKind]int
	onSent   func(c *conn) // a send completed
	txDrops  int
	stalled  bool     // does not post the receive buffers of connections again
	delayed  []func() // until then
	shutdown bool
}

// host adds a host with 10.0.0.i/24 and 2001:db8::i/64 and boots it.
func (w *world) host(cfg config) *host {
	i := len(w.hosts) + 1
	if i == 1 {
		cfg.fault = w.fault
	}
	h := &host{w: w, i: i, cfg: cfg}
	h.gid, _ = ib.ParseGID(fmt.Sprintf("fe80::%x:%x", w.r.Uint32N(0xffff), i))
	if w.subnet != nil {
		h.attachPort()
	}
	h.kernel = kernel{h: h, addrs: []netip.Prefix{
		netip.MustParsePrefix(fmt.Sprintf("10.0.0.%d/24", i)),
		netip.MustParsePrefix(fmt.Sprintf("2001:db8::%d/64", i)),
	}}
	w.hosts = append(w.hosts, h)
	h.boot()
	return h
}

// boot starts the agent: a new provider, a new UD QP, a new machine, a new
// network device with the addresses of before.
func (h *host) boot() {
	h.life++
	h.dead, h.shutdown = false, false
	h.port = h.w.f.NewPort(simfabric.PortOptions{GID: h.gid, MTU: h.cfg.path})
	h.paths, h.dests, h.table = map[netip.Addr]nexthop.Path{}, map[rtnl.Flow]netip.Addr{}, nil
	h.conns, h.byQPN = map[nexthop.Conn]*conn{}, map[ib.QPN]*conn{}
	h.udUse, h.mads, h.notes = map[encap.LinkAddr]ipoib.UDUse{}, map[mad.AttrID]int{}, map[ipoib.NoteKind]int{}
	h.pending, h.stepping, h.busy, h.held, h.waking, h.inband = nil, false, time.Time{}, 0, false, 0
	h.books, h.touched = books{}, map[netip.Addr]bool{}
	h.openUD()
	h.link = encap.LinkAddr{QPN: h.ud.qp.QPN(), GID: h.gid}
	opt := ipoib.Options{Link: h.link, GUID: h.port.Port().GUID, PathMTU: h.port.Port().MTU, SRQ: h.cfg.srq,
		Mode: h.cfg.mode, CMTransport: h.cfg.cm, NoGSI: h.cfg.qp1 == qp1Taken, ReceiveMTU: h.cfg.receive,
		Rand: rand.New(rand.NewPCG(h.w.r.Uint64(), 1))}
	if h.ib != nil {
		opt.Fabric = h.ib.reset()
	}
	if h.cfg.tune != nil {
		h.cfg.tune(&opt)
	}
	h.cfg.spoil(&opt)
	h.m = ipoib.New(opt)
	h.tell("boot: %v, mode %v, CM %v with QP 1 %d, Receive MTU %d, path MTU %v, lag %v", h.link, h.cfg.mode,
		h.cfg.cm, h.cfg.qp1, h.cfg.receiveMTU(), opt.PathMTU, h.cfg.lag)
	h.port.Notify(h.poll)
	h.port.SetTap(h.onWire)
	h.step(ipoib.Start{})
	h.kernel.create()
	life := h.life
	var tick func()
	tick = func() {
		if h.life == life && !h.dead && !h.shutdown {
			h.usage()
			h.checkBooks()
			h.checkExplained(h.m.Conns(), h.m.Neighbours(), true)
			h.w.f.After(usageEvery, tick)
		}
	}
	h.w.f.After(usageEvery, tick)
}

// kill ends the agent as SIGKILL does: no goodbye.
func (h *host) kill() {
	if h.dead {
		return
	}
	h.tell("killed")
	h.exit()
}

// stop ends the agent as SIGTERM does, with DREQs, and keeps the provider.
func (h *host) stop() {
	h.tell("stops")
	h.shutdown = true
	h.step(ipoib.Shutdown{})
}

// exit closes the provider and takes the device away.
func (h *host) exit() {
	h.account()
	h.dead = true
	h.life++
	h.timer.Stop()
	h.port.Close()
	h.kernel.destroy()
}

// account adds what the agent counted in its life to the tally.
func (h *host) account() {
	h.checkBooks()
	for _, c := range h.m.Counters() {
		h.w.count(c.Name, c.Value)
	}
	h.port.Counters(h.w.count)
}

func (h *host) name() string {
	if h.i > 26 {
		return fmt.Sprintf("h%d", h.i)
	}
	return string(rune('a' + h.i - 1))
}

// now is the time by the clock of h.
func (h *host) now() time.Time { return h.w.f.Now().Add(h.skew) }

// jump sets the clock of h forward, or back, by d.
func (h *host) jump(d time.Duration) {
	h.skew += d
	h.setTimer()
}

// stall keeps the control plane of h from running for d: what happens meanwhile
// waits for it.
func (h *host) stall(d time.Duration) {
	h.busy, h.late = h.w.f.Now().Add(d), true
}

func (h *host) tell(format string, args ...any) {
	h.w.tell("%s: %s", h.name(), fmt.Sprintf(format, args...))
}

// String prints all that is known of h.
func (h *host) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "host %s %v mode %v dead %v up %v host routes %v\n", h.name(), h.link, h.cfg.mode, h.dead,
		h.up, h.hostRoutes())
	if h.dead {
		return b.String()
	}
	for _, c := range h.m.Conns() {
		fmt.Fprintf(&b, "  conn %d %v %v to %v, %v to %v, comm %08x %08x, mtu %d, addrs %v\n", c.Conn, c.Transport,
			c.State, c.Peer, c.LocalQPN, c.RemoteQPN, c.LocalComm, c.RemoteComm, c.MTU, c.Addrs)
	}
	for _, n := range h.m.Neighbours() {
		fmt.Fprintf(&b, "  %v\n", n)
	}
	for _, c := range h.m.Counters() {
		if c.Value != 0 {
			fmt.Fprintf(&b, " %s=%d", c.Name, c.Value)
		}
	}
	return b.String()
}

// poll takes what the provider has put into its channels: MADs first, so that a seed has one order.
func (h *host) poll() {
	for {
		select {
		case m := <-h.port.MADPort().MADs():
			h.recvMAD(m)
			continue
		default:
		}
		select {
		case ev := <-h.port.Events():
			h.later(func() { h.verbsEvent(ev) })
		default:
			return
		}
	}
}

// recvMAD takes what arrived at QP 1 to whom it belongs.
func (h *host) recvMAD(m *verbs.MAD) {
	if h.deaf(m) {
		return
	}
	h.nameLIDs(m)
	switch h.cfg.qp1 {
	case qp1Ours:
		h.later(func() { h.step(ipoib.RecvMAD{MAD: m}) })
	case qp1Taken: // the kernel knows nobody who listens
		if _, msg, err := mad.Parse(m.Data[:]); err == nil {
			if req, ok := msg.(mad.REQ); ok {
				out := &verbs.MAD{Remote: m.Remote, Local: m.Local, QPN: ib.QPNGSI}
				mad.REJ{TransactionID: req.TransactionID, RemoteCommID: req.LocalCommID, MessageRejected: mad.KindREQ,
					Reason: mad.RejInvalidServiceID}.AppendBinary(out.Data[:0])
				h.port.MADPort().SendMAD(out)
			}
		}
	}
}

func (h *host) verbsEvent(ev verbs.Event) {
	c := h.byQPN[ev.QPN]
	switch ev.Kind {
	case verbs.QPFatal:
		if c != nil {
			h.step(ipoib.QPError{Conn: c.id, Status: ev.Status, Text: ev.Text})
		}
	case verbs.CommEst:
		if c != nil {
			h.step(ipoib.CommEst{Conn: c.id})
		}
	default:
		p := h.port.Port()
		h.step(ipoib.UnderlayChanged{Link: h.link, PathMTU: p.MTU, Active: p.Active})
	}
}

// later has the control plane do f after what it has to do already.
func (h *host) later(f func()) {
	at := h.w.f.Now()
	if h.cfg.lag == 0 && h.held == 0 && !at.Before(h.busy) {
		f()
		return
	}
	if h.cfg.lag > 0 {
		at = at.Add(h.w.upTo(h.cfg.lag))
	}
	if at.Before(h.busy) {
		at = h.busy
	}
	h.busy = at
	h.held++
	life := h.life
	h.w.f.At(at, func() {
		if h.life == life {
			h.held--
			f()
		}
	})
}

// event gives the machine an event when the control plane gets to it.
func (h *host) event(ev ipoib.Event) { h.later(func() { h.step(ev) }) }

// step feeds the machine one event and what its actions lead to.
func (h *host) step(ev ipoib.Event) {
	if h.dead {
		return
	}
	h.pending = append(h.pending, ev)
	if h.stepping {
		return
	}
	h.stepping = true
	idle := true
	for len(h.pending) > 0 {
		ev := h.pending[0]
		h.pending = h.pending[1:]
		switch ev := ev.(type) {
		case ipoib.Shutdown:
			h.mUp = false
		case ipoib.FIBEvent:
			if k, ok := ev.Event.(fib.Host); ok && k.Kind == rtnl.LinkChange {
				h.mUp = k.Link.Up
			}
		}
		h.w.steps++
		h.bookEvent(ev)
		h.traceEvent(ev)
		if _, frame := ev.(ipoib.RecvFrame); !frame {
			idle = false
		}
		for _, a := range h.m.Step(nil, h.now(), ev) {
			idle = false
			if h.swallows(a) {
				continue
			}
			h.bookAction(a)
			h.traceAction(a)
			h.do(a)
		}
	}
	h.stepping = false
	h.afterStep(idle)
	h.setTimer()
}

func (h *host) setTimer() {
	if h.cfg.fault != leaksTimers {
		h.timer.Stop()
	}
	if d := h.m.Deadline(); !d.IsZero() && h.cfg.fault != neverWakes {
		life := h.life
		h.timer = h.w.f.At(d.Add(-h.skew), func() {
			if h.life == life && !h.waking {
				h.waking = true
				h.later(h.wake)
			}
		})
	}
}

func (h *host) wake() {
	h.waking = false
	if now := h.w.f.Now(); now.Equal(h.wokeAt) {
		if h.wakes++; h.wakes > 100 {
			h.w.fatalf("%s: the machine wants to be woken again and again", h.name())
		}
	} else {
		h.wokeAt, h.wakes = now, 0
	}
	h.step(ipoib.Wake{})
}

// do carries out one action.
func (h *host) do(a ipoib.Action) {
	if h.doSubnet(a) {
		return
	}
	switch a := a.(type) {
	case ipoib.SendUD:
		if hd, _, err := mad.Parse(a.Frame[encap.HeaderLen:]); err == nil &&
			encap.EtherType(binary.BigEndian.Uint16(a.Frame)) == encap.InbandCM {
			h.mads[hd.Attr]++
			h.inband++
		}
		h.postUD(a.Link, a.MGID, a.Frame)
	case ipoib.SendCopies:
		for ud := range a.Each() {
			h.do(ud)
		}
	case ipoib.SendConn:
		if c := h.conns[a.Conn]; c != nil {
			h.post(c, verbs.SendWR{}, a.Frame)
		}
	case ipoib.WriteTUN:
		h.kernel.receive(a.IP, nil)
	case ipoib.SendMAD:
		hd, _, err := mad.Parse(a.MAD.Data[:])
		if err != nil {
			h.w.fatalf("%s sends a MAD that cannot be read: %v", h.name(), err)
		}
		if h.cfg.qp1 == qp1Taken || h.cfg.cm == ipoib.CMInband {
			h.w.fatalf("%s sends a %v to QP 1", h.name(), hd.Attr)
		}
		h.mads[hd.Attr]++
		h.port.MADPort().SendMAD(a.MAD)
	case ipoib.CreateQP:
		h.createQP(a)
	case ipoib.ConnectQP:
		h.connectQP(a)
	case ipoib.DestroyQP:
		h.destroyQP(a.Conn)
	case ipoib.JoinGroup:
		if err := h.ud.qp.AttachMulticast(a.MGID); err != nil {
			h.w.fatalf("%s: join %v: %v", h.name(), a.MGID, err)
		}
	case ipoib.LeaveGroup:
		if err := h.ud.qp.DetachMulticast(a.MGID); err != nil {
			h.w.fatalf("%s: leave %v: %v", h.name(), a.MGID, err)
		}
	case ipoib.PublishGroups:
		h.table = a.Table
	case ipoib.FIBAction:
		h.doFIB(a.Action)
	case ipoib.HoldGroups: // the machine drops what comes all the same
	case ipoib.AskOther:
		h.event(ipoib.OtherIs{Addr: a.Addr})
	case ipoib.SetUpIPv6: // this kernel forgets no settings
	case ipoib.AddAddr:
		h.soon(func() { h.kernel.addAddr(a.Prefix) })
	case ipoib.RemoveAddr:
		h.soon(func() { h.kernel.delAddr(a.Prefix) })
	case ipoib.Note:
		h.notes[a.Kind]++
		h.touched[a.Addr] = true
		h.tell("%s %v %v %d %s", a.Kind, a.Peer.QPN, a.Addr, a.Conn, a.Text)
	default:
		h.w.fatalf("unknown action %T", a)
	}
}

// soon is how long netlink takes.
func (h *host) soon(f func()) {
	life := h.life
	h.w.f.After(50*time.Microsecond, func() {
		if h.life == life {
			f()
		}
	})
}

// usage reports what the data path has counted.
func (h *host) usage() {
	var u ipoib.Usage
	for _, id := range slices.Sorted(maps.Keys(h.conns)) {
		u.Conns = append(u.Conns, h.conns[id].use())
	}
	for _, l := range slices.SortedFunc(maps.Keys(h.udUse), encap.LinkAddr.Compare) {
		u.UD = append(u.UD, h.udUse[l])
	}
	h.event(u)
}

// counter returns one of the machine's counters by name.
func (h *host) counter(name string) uint64 {
	for _, c := range h.m.Counters() {
		if c.Name == name {
			return c.Value
		}
	}
	h.w.fatalf("no counter %q", name)
	return 0
}

// with returns h's connections to peer.
func (h *host) with(peer *host) (cs []ipoib.ConnInfo) {
	for _, c := range h.m.Conns() {
		if c.Peer.GID == peer.gid {
			cs = append(cs, c)
		}
	}
	return cs
}

// doFIB is the data path's table and the kernel's.
func (h *host) doFIB(a fib.Action) {
	switch a := a.(type) {
	case fib.SetPath:
		if a.Path == (nexthop.Path{}) {
			if _, ok := h.paths[a.Hop]; !ok && h.cfg.fault != forgetsPaths {
				h.w.fatalf("%s: there is no path of %v to remove", h.name(), a.Hop)
			}
			delete(h.paths, a.Hop)
			return
		}
		h.touched[a.Hop] = true
		if h.cfg.fault == forgetsPaths && a.Path.Kind == nexthop.PathConn {
			return
		}
		if a.Path.Kind == nexthop.PathConn && h.conns[a.Path.Conn] == nil {
			h.w.fatalf("%s: path of %v leads to connection %d, which is not there", h.name(), a.Hop, a.Path.Conn)
		}
		h.paths[a.Hop] = a.Path
	case fib.SetDest:
		if a.Hop.IsValid() {
			h.dests[a.Flow] = a.Hop
			return
		}
		if _, ok := h.dests[a.Flow]; !ok {
			h.w.fatalf("%s: there is no destination %v to remove", h.name(), a.Flow.Dst)
		}
		delete(h.dests, a.Flow)
	case fib.StaleDest: // told at once, where a data path waits for a packet
		for _, flow := range slices.SortedFunc(maps.Keys(h.dests), func(x, y rtnl.Flow) int { return x.Dst.Compare(y.Dst) }) {
			if a.Flow.Dst == flow.Dst || !a.Flow.Dst.IsValid() {
				h.event(ipoib.FIBEvent{Event: fib.Stale{Flow: flow}})
			}
		}
	case fib.ResetDests:
		clear(h.dests)
	default:
		if h.tables == nil {
			return // the device is gone
		}
		if _, ok := a.(fib.FlushExceptions); ok {
			h.flushes++
		}
		evs, ok := h.tables.Do(a)
		if !ok {
			h.w.fatalf("%s: unknown action %T of fib", h.name(), a)
		}
		h.kernel.tell(evs)
	}
}
