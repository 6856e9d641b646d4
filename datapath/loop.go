package datapath

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"

	"ipoibcm/ib"
	"ipoibcm/rtnl"
	"ipoibcm/tun"
	"ipoibcm/verbs"
	"ipoibcm/wire/ip"
)

// Errors of the sending functions.
var (
	ErrFull   = errors.New("datapath: send queue full")
	ErrClosed = errors.New("datapath: closed")
	ErrTooBig = errors.New("datapath: packet larger than a send buffer")
)

// Config says what a Loop works on. Provider and TUN are required; the rest may
// be zero.
type Config struct {
	Provider verbs.Provider
	TUN      tun.Device
	// Queues are further queues of TUN. Each has a data thread of its own. The provider must have a
	// thread for each ([verbs.Threader]).
	Queues []tun.Device

	GID  ib.GID  // our own; zero means the first of Provider.Port
	PKey ib.PKey // zero means ib.DefaultPKey
	QKey ib.QKey // of the UD QP; zero means ib.QKeyIPoIB

	// UDQPN asks for the number of the UD QP ([verbs.QPInit]). Zero lets the provider choose.
	UDQPN ib.QPN

	UDMTU      int // largest IP packet over UD in octets; zero means 2044
	ReceiveMTU int // size of the shared receive buffers in octets, header included; zero means 65524

	// Depths in work requests. Zero means the number in brackets.
	SendDepth   int // per connection, at least 16 [128]
	UDSendDepth int // at least 16 [256]
	UDRecvDepth int // [512]
	SRQDepth    int // buffers of ReceiveMTU shared by the connections of a thread [256]
	UCRecvDepth int // per connection without an SRQ [16]
	SendBuffers int // of 64 KiB, for all QPs of a thread, at least 64 [512]; there are 8 of 2 KiB for each
	UpDepth     int // frames on their way up; a quarter is kept for control frames such as ARP and ND [256]

	// InheritClass copies the DSCP of IP packets to the datagrams that carry them. All packets
	// of a connection have one traffic class, because packets of two classes may overtake each
	// other.
	InheritClass bool
	// CopyECN copies the ECN codepoint too (RFC 6040, normal mode): the receiver of the datagrams
	// must pass a CE mark on.
	CopyECN bool

	// OwnTUNThread has a goroutine of its own read the TUN, even where the provider could read it
	// ([verbs.FDPoller]).
	OwnTUNThread bool
}

func (c *Config) pkey() ib.PKey    { return cmp.Or(c.PKey, ib.DefaultPKey) }
func (c *Config) qkey() ib.QKey    { return cmp.Or(c.QKey, ib.QKeyIPoIB) }
func (c *Config) udMTU() int       { return cmp.Or(c.UDMTU, 2044) }
func (c *Config) receiveMTU() int  { return cmp.Or(c.ReceiveMTU, 65524) }
func (c *Config) sendDepth() int   { return max(cmp.Or(c.SendDepth, 128), signalEvery) }
func (c *Config) udSendDepth() int { return max(cmp.Or(c.UDSendDepth, 256), signalEvery) }
func (c *Config) udRecvDepth() int { return cmp.Or(c.UDRecvDepth, 512) }
func (c *Config) srqDepth() int    { return cmp.Or(c.SRQDepth, 256) }
func (c *Config) ucRecvDepth() int { return cmp.Or(c.UCRecvDepth, 16) }
func (c *Config) sendBuffers() int { return max(cmp.Or(c.SendBuffers, 512), 2*batchLen) }
func (c *Config) upDepth() int     { return cmp.Or(c.UpDepth, 256) }

// cqDepth is the depth that a completion queue is made with. The queue pairs of a data thread share
// the queue. If more completions come, the provider decides what becomes of them.
const cqDepth = 4096

// maxForeignUD is the largest UD payload in octets that receive buffers hold even if our UD MTU is
// smaller. The loop can then take and count what a peer with a larger one sends (docs/limits.md).
const maxForeignUD = 4096

// A Loop moves the packets of one interface.
type Loop struct {
	cfg     Config
	p       verbs.Provider
	caps    verbs.Caps
	up      upRing
	c       Counts[atomic.Uint64] // without those of the threads
	threads []*thread

	udPeers  udPeers
	data     *dataLimits
	filtered bool // the provider calls passDatagram
	dests    atomic.Pointer[dests]
	groups   atomic.Pointer[map[netip.Addr]struct{}]
	allow    atomic.Pointer[ib.GIDSet]
	gid      atomic.Pointer[ib.GID]
	conns    connTable   // changed with mu held
	hold     atomic.Bool // HoldGroups
	// broadcasts are IPv4 addresses in ascending order.
	broadcasts atomic.Pointer[[]uint32]

	udq *sendQ
	ud  *rxSide

	stop     chan struct{}
	stopped  atomic.Bool
	stopOnce sync.Once

	mu         sync.Mutex // guards gen, closed, changes of conns
	gen        uint64
	closed     bool
	recvMemory atomic.Int64
}

// New creates the UD QP (in RTS), the queues and the buffers. The caller must then call [Loop.Run],
// which releases them all when it ends, or [Loop.Close] instead.
func New(cfg Config) (_ *Loop, err error) {
	l := &Loop{
		cfg: cfg, p: cfg.Provider, caps: cfg.Provider.Caps(),
		up: newUpRing(cfg.upDepth()), stop: make(chan struct{}), gen: 1,
		data: newDataLimits(),
	}
	if cfg.receiveMTU() > maxPacket {
		return nil, fmt.Errorf("receive MTU %d is above %d", cfg.receiveMTU(), maxPacket)
	}
	l.ResetDests(rtnl.DstOnly)
	gid := cfg.GID
	if gid.IsZero() {
		if port := l.p.Port(); len(port.GIDs) > 0 {
			gid = port.GIDs[0]
		}
	}
	l.gid.Store(&gid)
	defer func() {
		if err != nil {
			l.release()
		}
	}()
	for _, dev := range append([]tun.Device{cfg.TUN}, cfg.Queues...) {
		if err = l.addThread(dev); err != nil {
			return nil, err
		}
	}
	if err = l.makeUD(); err != nil {
		return nil, err
	}
	return l, nil
}

// copiedClass returns the bits of the traffic class that datagrams take over from IP packets.
func (c *Config) copiedClass() (bits uint8) {
	if c.InheritClass {
		bits = ip.DSCPMask
	}
	if c.CopyECN {
		bits |= ip.ECNMask
	}
	return bits
}

// SetInheritClass changes Config.InheritClass for datagrams that are sent from now on.
func (l *Loop) SetInheritClass(on bool) {
	c := Config{InheritClass: on, CopyECN: l.cfg.CopyECN}
	l.udq.copies.Store(uint32(c.copiedClass()))
}

func (l *Loop) makeUD() error {
	th := l.threads[0]
	udq := newSendQ(th, l.cfg.udSendDepth(), true, l.gen<<genShift)
	qp, err := l.p.CreateQP(verbs.QPInit{
		Transport: ib.UD, QPN: l.cfg.UDQPN, SendCQ: th.sendWC.cq, RecvCQ: l.ud.cq,
		SendDepth: l.cfg.udSendDepth(), RecvDepth: l.cfg.udRecvDepth(), MaxSendSGE: 1, MaxRecvSGE: 1,
	})
	if err != nil {
		return fmt.Errorf("create UD QP: %w", err)
	}
	udq.copies.Store(uint32(l.cfg.copiedClass()))
	udq.qp, l.udq, l.ud.shared.to = qp, udq, qp
	if f, ok := l.p.(verbs.DatagramFilterer); ok {
		l.filtered = true
		f.FilterDatagrams(qp.QPN(), l.passDatagram)
	}
	return l.startUD()
}

// Run moves packets until ctx ends or the TUN or a CQ fails. When it returns it has closed the
// TUN, destroyed all QPs and queues that it made, and ended all its goroutines. The result is nil
// if the TUN was closed or if the cause of ctx's end is [context.Canceled].
func (l *Loop) Run(ctx context.Context) error {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	var tunReader, pollers sync.WaitGroup
	var stopPolling []func()
	for _, th := range l.threads {
		if end := th.pollTUN(stop); end != nil {
			stopPolling = append(stopPolling, end)
		} else {
			tunReader.Go(func() { stop(newSender(th, th.tun.Read).run()) })
		}
		for _, q := range th.queues() {
			if _, ok := q.cq.(verbs.CallbackCQ); !ok {
				pollers.Go(func() { stop(q.poll()) })
			}
		}
	}
	if p, ok := l.p.(verbs.FloodFilterer); ok {
		pollers.Go(func() { l.keepFloodFilter(ctx, p) })
	}
	<-ctx.Done()
	l.shut()
	for _, end := range stopPolling {
		end()
	}
	for _, th := range l.threads {
		th.tun.Close() // unblocks Read
	}
	tunReader.Wait()
	l.destroyQueues() // unblocks Wait
	pollers.Wait()
	l.freeMemory()
	close(l.up.ch)
	if err := context.Cause(ctx); !errors.Is(err, context.Canceled) && !errors.Is(err, os.ErrClosed) {
		return err
	}
	return nil
}

// Close releases everything when Run was never called. It leaves the TUN open.
func (l *Loop) Close() error {
	l.release()
	close(l.up.ch)
	return nil
}

func (l *Loop) release() {
	l.shut()
	l.destroyQueues()
	l.freeMemory()
}

// shut marks the loop as done: from now on the sending functions of the control plane return an
// error, and nobody takes completions.
func (l *Loop) shut() {
	l.stopOnce.Do(func() { l.stopped.Store(true); close(l.stop) })
}

func (l *Loop) done() bool { return l.stopped.Load() }

func (l *Loop) destroyQueues() {
	l.mu.Lock()
	l.closed = true
	conns := slices.Collect(l.conns.all())
	l.mu.Unlock()
	for _, c := range conns {
		c.Close()
	}
	if l.udq != nil {
		if f, ok := l.p.(verbs.DatagramFilterer); ok {
			f.FilterDatagrams(0, nil)
		}
		l.udq.close()
		l.udq.th.abandon(l.udq)
	}
	for _, th := range l.threads {
		th.destroyQueues()
	}
}

func (l *Loop) freeMemory() {
	l.Barrier() // Send and SendUD copy into send buffers
	for _, th := range l.threads {
		th.freeMemory()
	}
}

// UDQP returns the interface's UD QP, for its QPN and to attach groups.
func (l *Loop) UDQP() verbs.QP { return l.udq.qp }

// Dead returns an event QPFatal for each QP of the loop that is in ERR, the lowest QPN first. It asks the provider for
// the state of each.
func (l *Loop) Dead() (evs []verbs.Event) {
	l.mu.Lock()
	conns := slices.Collect(l.conns.all())
	l.mu.Unlock()
	for _, c := range conns {
		if qp := c.QP(); qp.State() == verbs.StateError {
			evs = append(evs, verbs.Event{Kind: verbs.QPFatal, QPN: qp.QPN(), Status: c.Counters().LastError})
		}
	}
	if qp := l.UDQP(); qp.State() == verbs.StateError {
		evs = append(evs, verbs.Event{Kind: verbs.QPFatal, QPN: qp.QPN(), Status: verbs.WRFlushError})
	}
	slices.SortFunc(evs, func(a, b verbs.Event) int { return cmp.Compare(a.QPN, b.QPN) })
	return evs
}

// SetGID sets our GID after it has changed. The loop recognises our own multicast packets, when
// they come back, by this GID.
func (l *Loop) SetGID(g ib.GID) { l.gid.Store(&g) }

// SetAllow sets the GIDs whose datagrams the loop takes, besides our own. It drops those of others
// before it keeps anything of them. An empty set allows all.
func (l *Loop) SetAllow(s ib.GIDSet) {
	if s.IsEmpty() {
		l.allow.Store(nil)
		return
	}
	l.allow.Store(&s)
}

// isAllowed reports whether datagrams from src are taken. src is zero if there is no GRH. Our own
// GID is allowed, so that takeUD can count our own multicast when it comes back.
func (l *Loop) isAllowed(src ib.GID) bool {
	s := l.allow.Load()
	return s == nil || s.Contains(src) || src == *l.gid.Load()
}

// SetGroups sets the inner multicast groups that we want. That matters where one underlay group
// carries many of them (IPv4 underlay): the loop then drops UD packets to other inner groups. ND
// and IPv4 broadcasts always pass. Nil means that we want all.
func (l *Loop) SetGroups(groups []netip.Addr) {
	if groups == nil {
		l.groups.Store(nil)
		return
	}
	m := make(map[netip.Addr]struct{}, len(groups))
	for _, g := range groups {
		m[g] = struct{}{}
	}
	l.groups.Store(&m)
}

// HoldGroups makes the loop drop those packets from the TUN to groups and broadcast addresses that
// would go up because they have no path yet. TXControl frames still go up.
func (l *Loop) HoldGroups(on bool) { l.hold.Store(on) }

// SetBroadcasts sets the IPv4 addresses that are subnet broadcasts of the interface. The loop drops
// packets to them that come on a connection (RFC 4755 section 2.1). HoldGroups treats them as
// groups.
func (l *Loop) SetBroadcasts(addrs []netip.Addr) {
	subnets := make([]uint32, 0, len(addrs))
	for _, a := range addrs {
		if a.Is4() {
			subnets = append(subnets, uint32(addr4(a)))
		}
	}
	slices.Sort(subnets)
	l.broadcasts.Store(&subnets)
}

// Broadcasts returns the addresses of SetBroadcasts in ascending order.
func (l *Loop) Broadcasts() (addrs []netip.Addr) {
	subnets := l.broadcasts.Load()
	if subnets == nil {
		return nil
	}
	for _, s := range *subnets {
		addrs = append(addrs, netip.AddrFrom4([4]byte{byte(s >> 24), byte(s >> 16), byte(s >> 8), byte(s)}))
	}
	return addrs
}

// Up is the bounded ring of frames for the control plane. Every frame must be released. Run and
// Close close the channel at their end.
func (l *Loop) Up() <-chan *Frame { return l.up.ch }

// Barrier returns when no send under way uses a target, path or connection that was replaced before
// the call. Packets that wait for the UD QP look their path's target up again when their turn
// comes. Packets that wait for a connection stay there until it is closed.
func (l *Loop) Barrier() {
	for _, th := range l.threads {
		th.hand.Lock()
		//lint:ignore SA2001 whoever held it has let go
		th.hand.Unlock()
	}
}

// Threads returns how many data threads there are.
func (l *Loop) Threads() int { return len(l.threads) }

// InjectTUN writes an IP packet of our own to the kernel, such as an ICMP error or a router
// advertisement.
func (l *Loop) InjectTUN(packet []byte) error {
	if l.done() {
		return ErrClosed
	}
	one, dev := [1][]byte{packet}, l.threads[0].tun
	if _, err := dev.Write(one[:]); err != nil {
		l.c.RxTUN.Add(1)
		return fmt.Errorf("write to %s: %w", dev.Name(), err)
	}
	l.c.Injected.Add(1)
	return nil
}
