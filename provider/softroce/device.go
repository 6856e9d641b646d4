// Package softroce is RoCEv2 in pure Go: a verbs provider whose wire is UDP
// port 4791 on any network device.
//
// It has the sockets, the goroutines and the memory. Package
// provider/softroce/engine, whose queue pairs it drives, decides what a packet
// means. Linux rdma_rxe and hardware use the same packets. Every received ICRC
// is checked.
//
// The goroutine that reads the socket handles a packet as far as the user's
// handler ([verbs.CallbackCQ]). A posted packet leaves on the poster's goroutine,
// or later on a reader's when the window or the socket has room, or on that of
// the timers. A payload is copied on its way out only if the socket has no room.
//
// Sources: IBA annex A17, docs/adr/0003-verbs-contract.md, docs/adr/0004-roce-datagrams.md,
// docs/adr/0019-groups-on-an-underlay.md and docs/adr/0029-congestion-marks.md,
// docs/security.md. Missing: the packet socket that would see foreign IPv4 identifications.
package softroce

import (
	"encoding/binary"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"weak"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ipoibcm/hostnet"
	"ipoibcm/ib"
	"ipoibcm/provider/softroce/engine"
	"ipoibcm/verbs"
	"ipoibcm/verbs/events"
	"ipoibcm/verbs/regions"
)

const (
	// sendersPerFamily bounds the pool of sending sockets of a family. Each has its own
	// source port, by which the network chooses among paths, and busy hosts have many
	// queue pairs.
	sendersPerFamily = 64
	maxDepth         = 1 << 15
)

// A Device is one underlay network device, open as an RDMA device.
// It implements [verbs.Provider].
type Device struct {
	opts     Options
	log      *slog.Logger
	caps     verbs.Caps
	pkeys    []ib.PKey
	ifindex  atomic.Int32
	firstGID ib.GID // the default GID as long as the underlay has it
	under    underlay
	port     atomic.Pointer[portState]

	mem     memory
	qps     qpTable
	groups  groups
	gsi     *gsi
	early   earlyPool
	count   counts
	threads []*thread
	// whyFewer says why there are fewer threads than were asked for, and whyUnsteered why
	// packets do not come to the thread of their queue pair.
	whyFewer     string
	whyUnsteered atomic.Pointer[string]
	class        atomic.Uint32 // traffic class of paths that have none of their own
	offload      [offloads]offloadState

	connecting sync.WaitGroup // goroutines that open connected sockets
	maxHolding int            // fewer threads of the process than this may hold a P
	tap        events.Tap
	filter     atomic.Pointer[datagramFilter]
	filtering  sync.Mutex // guards sources and slice
	sources    *sourceSet
	slice      uint32
	// dropHook lets tests lose packets before they are looked at.
	dropHook atomic.Pointer[func(udp []byte) bool]

	receivers []*receiver
	ports     [2]portSet   // by familyIndex: source ports that are ours
	senders   []*sender    // all, each at its index
	pools     [2][]*sender // by familyIndex: those that paths choose from
	sender6UD *sender      // IPv6 UD packets that may be fragmented leave by it
	monitor   *monitor
	routes    routeMTUs

	closing atomic.Bool
	handover

	wg sync.WaitGroup

	mu       sync.Mutex
	retired  [len(transports)]engine.Counters // of destroyed queue pairs, by transportIndex
	reported [len(transports)]engine.Counters // the most that Counters has said of each
	events   *events.Queue

	notes struct { // completion queues whose handlers the notifier is to run
		mu   sync.Mutex
		list []*cq
		wake bell
	}
}

var _ verbs.Provider = (*Device)(nil)

// Open opens the underlay device. It waits for a usable address, up to Options.AddressWait,
// and fails if there is none then.
func Open(opts Options) (*Device, error) {
	if opts.GUID == 0 {
		opts.GUID = ib.GUID(random64()&^(1<<56) | 1<<57) // locally administered, unicast
	}
	d := &Device{opts: opts, pkeys: opts.pkeys()}
	d.events = events.NewQueue(&d.count.eventsDropped)
	d.log = opts.log().With("underlay", opts.Underlay)
	d.mem.Init(random)
	d.early.full = &d.count.rxEarly
	d.groups.dev, d.routes.dev = d, d
	d.groups.table.Store(&map[ib.GID][]*qp{})
	d.routes.known = make(map[[2]ib.GID]weak.Pointer[routeMTU])
	d.gsi = newGSI(d)
	for i := range opts.threads() {
		d.threads = append(d.threads, newThread(d, i))
	}
	d.notes.wake = newBell()
	d.tryOffloads()
	if err := d.open(); err != nil {
		d.release()
		return nil, err
	}
	d.tryConnect()
	d.start()
	p := d.port.Load()
	d.log.Info("softroce open", "gids", p.GIDs, "mtu", p.MTU, "ud_payload", d.caps.MaxUDPayload)
	return d, nil
}

func (d *Device) open() error {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("open netlink: %w", err)
	}
	d.under = underlay{opts: &d.opts, handle: h}
	if d.under.routes, err = hostnet.OpenResolver(); err != nil {
		return err
	}
	if d.monitor, err = newMonitor(d); err != nil { // before we read the state, so that no change is missed
		return err
	}
	p, link, err := d.under.wait()
	if err != nil {
		return err
	}
	d.port.Store(p)
	d.ifindex.Store(int32(link.Attrs().Index))
	d.firstGID = p.GIDs[0]
	if d.firstGID.Is4() && d.opts.GID.IsZero() && !d.opts.PreferIPv4 {
		d.log.Info("no IPv6 on the underlay, using its IPv4 address", "gid", d.firstGID)
	}
	if p.MTU == 0 {
		return fmt.Errorf("underlay %s: MTU %d is too small for any path MTU", d.opts.Underlay, p.UnderMTU)
	}
	for _, th := range d.threads {
		if th.writable, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
			return fmt.Errorf("create epoll: %w", err)
		}
	}
	defer d.dropSockets()
	if err := d.openSockets(p); err != nil {
		return err
	}
	ud := d.opts.maxUDPayload()
	if p.GIDs[0].Is4() { // IPv4 sends are never fragmented
		ud = min(ud, p.UnderMTU-52)
	}
	d.caps = verbs.Caps{
		Name: "softroce", Device: d.opts.Underlay,
		RC: true, UC: true, UD: true, SRQ: true, SRQForUC: true, RDMA: true, Inv: true, MAD: true, Multicast: true,
		MaxMessage: engine.MaxMessage, BestMessage: bestMessage, MaxUDPayload: ud, MaxSGE: engine.MaxSGE, MaxQPDepth: maxDepth,
	}
	return nil
}

// start runs the goroutines; Close waits for them.
func (d *Device) start() {
	for _, th := range d.threads {
		if r := th.eventLoop(); r != nil {
			r.writable = th.writable
		}
		d.wg.Go(th.timers.run)
	}
	if !d.adopted {
		d.Begin()
	}
	d.wg.Go(d.notifier)
	d.wg.Go(d.monitor.run)
	d.wg.Go(d.monitor.watchRoutes)
}

// Close implements [verbs.Provider].
func (d *Device) Close() error {
	if d.closing.Swap(true) {
		return verbs.ErrClosed
	}
	for _, q := range d.qps.all() {
		_ = q.Destroy()
	}
	for _, th := range d.threads {
		for _, c := range th.queues() {
			_ = c.Destroy()
		}
	}
	for _, r := range d.receivers {
		r.wake()
	}
	for _, th := range d.threads {
		close(th.timers.stop)
	}
	d.notes.wake.ring()
	d.release()
	return nil
}

// release ends the goroutines and frees what open took.
func (d *Device) release() {
	if d.monitor != nil {
		_ = d.monitor.nl.Close()
		_ = d.monitor.routes.Close()
	}
	d.wg.Wait()
	for _, s := range d.senders {
		s.mu.Lock()
		s.disconnect()
		if s.fd >= 0 {
			unix.Close(s.fd)
		}
		s.fd = -1
		s.backlog = backlog{}
		s.closeGuard()
		s.mu.Unlock()
	}
	d.connecting.Wait()
	for _, th := range d.threads {
		th.close()
	}
	if d.monitor != nil {
		d.monitor.close()
	}
	if d.under.handle != nil {
		d.under.handle.Close()
		d.under.routes.Close()
	}
	for _, r := range d.receivers {
		unix.Close(r.fd)
		unix.Close(r.wakeFD)
	}
	d.events.Close()
	d.mu.Lock()
	close(d.gsi.in)
	d.mu.Unlock()
}

// Caps implements [verbs.Provider].
func (d *Device) Caps() verbs.Caps { return d.caps }

// Port implements [verbs.Provider].
func (d *Device) Port() verbs.Port { return d.port.Load().Port }

// Alloc implements [verbs.Provider].
func (d *Device) Alloc(n int) (*verbs.Region, error) {
	if n <= 0 {
		return nil, verbs.ErrInvalid
	}
	return d.mem.Register(regions.Alloc(n), 0)
}

// Register implements [verbs.Provider].
func (d *Device) Register(buf []byte, access verbs.Access) (*verbs.Region, error) {
	if d.closing.Load() {
		return nil, verbs.ErrClosed
	}
	return d.mem.Register(buf, access)
}

// Deregister implements [verbs.Provider].
func (d *Device) Deregister(r *verbs.Region) error {
	if err := d.mem.Deregister(r); err != nil {
		return err
	}
	for _, q := range d.qps.all() { // State waits for the lock of q, and so for an access that has begun
		_ = q.State()
	}
	return nil
}

// CreateCQ implements [verbs.Provider].
func (d *Device) CreateCQ(depth int) (verbs.CQ, error) {
	return d.threads[0].createCQ(depth)
}

// CreateSRQ implements [verbs.Provider].
func (d *Device) CreateSRQ(init verbs.SRQInit) (verbs.SRQ, error) {
	if init.Depth <= 0 || init.Depth > maxDepth || init.MaxSGE > engine.MaxSGE {
		return nil, verbs.ErrInvalid
	}
	return &srq{ring: engine.NewRecvRing(init.Depth, max(1, init.MaxSGE))}, nil
}

// CreateQP implements [verbs.Provider].
func (d *Device) CreateQP(init verbs.QPInit) (verbs.QP, error) {
	if d.closing.Load() {
		return nil, verbs.ErrClosed
	}
	send, ok1 := init.SendCQ.(*cq)
	recv, ok2 := init.RecvCQ.(*cq)
	switch {
	case !ok1 || !ok2 || send.dev != d || recv.dev != d:
		return nil, fmt.Errorf("%w: completion queues are not of this device", verbs.ErrInvalid)
	case init.Transport != ib.RC && init.Transport != ib.UC && init.Transport != ib.UD:
		return nil, fmt.Errorf("%w: transport %v", verbs.ErrNotSupported, init.Transport)
	case init.SendDepth > maxDepth || init.RecvDepth > maxDepth || init.MaxSendSGE > engine.MaxSGE || init.MaxRecvSGE > engine.MaxSGE:
		return nil, fmt.Errorf("%w: queue pair larger than the capabilities", verbs.ErrInvalid)
	}
	q := &qp{dev: d, th: recv.th, transport: init.Transport, sendCQ: send, recvCQ: recv}
	cfg := engine.Config{
		Transport: init.Transport, SendDepth: init.SendDepth, RecvDepth: init.RecvDepth,
		MaxSendSGE: init.MaxSendSGE, MaxRecvSGE: init.MaxRecvSGE,
		Memory: &d.mem, Buffers: &d.early, Sink: q, Window: d.opts.window(), WindowOctets: d.opts.windowOctets(), MaxWindowOctets: maxWindow, AckWithin: ackWithin, MaxUDPayload: d.opts.maxUDPayload(), ECN: d.opts.ECN, Ahead: true,
	}
	if init.SRQ != nil {
		s, ok := init.SRQ.(*srq)
		if !ok {
			return nil, fmt.Errorf("%w: shared receive queue is not of this provider", verbs.ErrInvalid)
		}
		cfg.Shared = s
	}
	if init.Transport == ib.UD {
		q.udPkts = make([]engine.Packet, udOutput)
	}
	err := d.qps.insert(q, init.QPN, d.steer(q), random, func(n ib.QPN) {
		cfg.QPN = n
		q.eng = engine.New(cfg)
	})
	if err != nil {
		return nil, err
	}
	return q, nil
}

// CreateAH implements [verbs.Provider].
func (d *Device) CreateAH(attr verbs.AHAttr) (verbs.AH, error) {
	if d.closing.Load() {
		return nil, verbs.ErrClosed
	}
	p, err := d.newPath(attr, true, ib.QPNGSI, ib.QPN(binary.BigEndian.Uint32(attr.DGID[12:]))&ib.QPNMask)
	if err != nil {
		return nil, err
	}
	p.overRoute()
	return &ah{path: p}, nil
}

// MADPort implements [verbs.Provider].
func (d *Device) MADPort() verbs.MADPort { return d.gsi }

// Events implements [verbs.Provider].
func (d *Device) Events() <-chan verbs.Event { return d.events.Events() }

// SetTap implements [verbs.Provider].
func (d *Device) SetTap(t verbs.Tap) { d.tap.Set(t) }

// matchPKey reports whether k matches an entry of our table.
func (d *Device) matchPKey(k ib.PKey) bool {
	return slices.ContainsFunc(d.pkeys, k.Match)
}

// notify makes the notifier's goroutine run the handler of c.
func (d *Device) notify(c *cq) {
	d.notes.mu.Lock()
	d.notes.list = append(d.notes.list, c)
	d.notes.mu.Unlock()
	d.notes.wake.ring()
}

// notifier runs the handlers of the completion queues that Device.notify was called for:
// their completions came from calls of the user, or from timers, and not from a receiver.
func (d *Device) notifier() {
	var list []*cq
	for range d.notes.wake {
		d.notes.mu.Lock()
		list, d.notes.list = d.notes.list, list[:0]
		d.notes.mu.Unlock()
		for i, c := range list {
			c.run()
			list[i] = nil
		}
		if d.closing.Load() {
			return
		}
	}
}
