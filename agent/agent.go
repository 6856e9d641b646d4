// Package agent runs one interface: it owns every goroutine and the clock,
// drives the [ipoib.Interface] machine, and carries out what it decides on the
// verbs provider, the TUN and the kernel's routes. It also serves the control
// socket.
//
// One goroutine, the driver, owns the machine and all that hangs on it. It waits
// for an event or the machine's deadline, steps, and carries out the actions in
// order. Packets that have a path never come here: datapath moves them.
package agent

import (
	"cmp"
	"context"
	crand "crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"ipoibcm/cm"
	"ipoibcm/control"
	"ipoibcm/datapath"
	"ipoibcm/eventqueue"
	"ipoibcm/hostnet"
	"ipoibcm/ib"
	"ipoibcm/ipoib"
	"ipoibcm/mtu"
	"ipoibcm/neigh"
	"ipoibcm/nexthop"
	"ipoibcm/peerrpc/peers"
	"ipoibcm/tun"
	"ipoibcm/verbs"
	"ipoibcm/wire/encap"
)

// Options configures an agent. Provider and Name are required.
type Options struct {
	Provider verbs.Provider // Run closes it
	GID      ib.GID         // zero: the provider's first
	Name     string         // name of the interface
	Netns    string         // namespace to make it in, by name or path; empty: ours
	Prefixes []netip.Prefix // addresses to put on it
	Control  string         // path of the control socket; empty: none
	Group    string         // its members may read over the control socket; empty, or unknown here: nobody

	Mode       ipoib.Mode
	CM         ipoib.CMTransport // of CM messages; zero means auto
	LinuxFirst bool              // a new peer is asked for the 0x10 service ID first
	UDMTU      int               // octets of IP; zero means what Check says, or 2044
	ReceiveMTU int               // octets with the header; zero means 65524
	PKey       ib.PKey           // zero means 0xffff
	QKey       ib.QKey           // zero means 0x00000b1b
	Idle       time.Duration     // zero means 5 minutes, negative never
	ARPAlways  bool              // a neighbour moves as soon as an announcement says so
	Peers      []ib.GID          // GIDs of all others, where the underlay has no multicast
	// Members finds the GIDs of all others; Peers is empty then. If Members is nil, Peers has them, or
	// the underlay has multicast.
	Members *Members
	// MaxConns bounds the connections. MaxNeighbours bounds the neighbour cache, and the peers on
	// record. Zero means 2048 and 4096.
	MaxConns, MaxNeighbours int
	// Allow has the GIDs of the hosts that we talk with at all: only their datagrams and CM messages
	// are taken. Empty means everybody.
	Allow ib.GIDSet
	// PeerAllow has the GIDs of the hosts whose agents may ask ours over the fabric whether it lives, and for
	// a short status. PeerTrust has those of the hosts whose agents may ask for everything. Empty: nobody.
	PeerAllow, PeerTrust []netip.Prefix

	// FewerThreads accepts an interface whose queues do not fit the provider's threads, and serves it by
	// one data thread. That may be an interface with a single queue that exists already or was handed
	// over, however many threads the provider has. If the provider has one thread, it may also be an
	// interface with several queues that was handed over. Without FewerThreads, Run refuses an existing
	// interface, and makes one that was handed over anew.
	FewerThreads bool
	// OwnTUNThread reads the TUN on a thread of its own, not on the one that receives packets
	// ([datapath.Config]).
	OwnTUNThread bool
	// TrafficClass is what the provider was opened with.
	TrafficClass uint8
	// InheritClass copies the DSCP of IP packets to datagrams ([datapath.Config]).
	InheritClass bool
	// CopyECN does the same with the ECN codepoint.
	CopyECN bool
	// NoChecksum leaves the checksums of TCP and UDP to the kernel ([tun.Options]).
	NoChecksum bool
	// NoSegments has the kernel give and take single packets of TCP only ([tun.Options]).
	NoSegments bool
	// NoDatagrams has the kernel give and take single packets of UDP only ([tun.Options]).
	NoDatagrams bool

	// Metrics is a TCP address that serves the metrics, besides the control socket; empty: none.
	// MetricPeers is how many peers have series of their own in the metrics.
	Metrics     string
	MetricPeers int
	// MetricsTLS is a PEM file with a certificate chain and its key. MetricsAuth is a file with lines
	// of user:password. Both are read again when they have changed. Empty: no TLS, no passwords.
	MetricsTLS, MetricsAuth string

	// Reload reads the configuration anew; nil means that there is none. Clients of the control socket
	// can ask for a reload, and so can signals from Hangup.
	Reload func() (Plan, error)
	Hangup <-chan os.Signal

	// Notify takes messages for a service manager, as sd_notify(3) has them; it may block. Nil: there
	// is no service manager. Watchdog is how long the manager waits for a sign of life before it ends
	// the process. Zero: the manager expects none.
	Notify   func(string)
	Watchdog time.Duration

	// Store keeps descriptors for the next process; nil: there is no store. Predecessor is what the
	// process before left in it.
	Store       Store
	Predecessor Predecessor

	Build string   // version, for status
	Notes []string // what is worth knowing about the provider, for status
	NoQP1 error    // why the provider has no QP 1, if it is known
	// CreateBroadcast makes the broadcast group of an InfiniBand port where the subnet
	// manager has none. Shared says whether the kernel has an IPoIB interface of its own
	// on that port and P_Key; nil means that it has none.
	CreateBroadcast bool
	Shared          func() bool
	// Check returns the UD MTU that the underlay has now, and notes about the underlay. It returns an
	// error if the underlay does not carry the UD MTU any more. Nil: there is nothing to check.
	Check func(verbs.Port) (mtu.UDPlan, error)
	Log   *slog.Logger // nil discards
	// Confine gives up the rights that the process does not need once it serves. Nil means that it
	// gives up nothing.
	Confine func() ([]control.Protection, error)
	// LogCounts returns how many lines of the log were lost, and how many were left out because there
	// were too many of their kind. Nil: there are no such counts.
	LogCounts func() (lost, leftOut uint64)
}

// Bounds of the driver.
const (
	framesPerTurn = 64          // frames taken from the data path before other events get a turn
	usageEvery    = time.Second // how often the machine gets the data path's counts
	// shutdownWithin bounds the wait for DREPs at the end, which is time for four DREQs. Until then, peers that
	// have answered and dial again get REJ 3.
	shutdownWithin = time.Second
	addrWithin     = time.Second      // patience with the kernel for each address at the start
	queryWithin    = 10 * time.Second // patience of a control request
)

// An Agent is one interface being served.
type Agent struct {
	opt   Options
	log   *slog.Logger
	start time.Time

	tun *tun.File
	// queues are the TUN's queues for the data threads from the second on. whyFewer says why there are
	// fewer data threads than the provider has; empty: there are not.
	queues   []tun.Device
	whyFewer string
	host     *hostnet.Device // where the interface is
	loop     *datapath.Loop
	seat     seat
	lost     string // why the interface could not be followed into another namespace; empty: it was, or did not move

	m        *ipoib.Interface
	link     encap.LinkAddr
	pending  eventqueue.Queue[ipoib.Event] // events to step next: answers to actions of the current step
	actions  []ipoib.Action
	conns    map[nexthop.Conn]*conn
	byQPN    map[ib.QPN]nexthop.Conn
	paths    map[netip.Addr]*path // by next hop
	udUse    map[encap.LinkAddr]*ipoib.UDUse
	ahs      map[ib.GID]*handle
	groups   map[ib.GID]time.Time
	kernel   *kernelWorker
	counters counts
	fabric   fabric
	legacy   legacy
	copier   copier
	udDied   string // why the UD QP is in ERR; empty: it is not
	// tooBigBefore is what the counter tooBigName was when the MTU of the underlay or of a route last changed.
	tooBigBefore uint64
	end          context.CancelCauseFunc // ends Run with an error

	queries    chan func()
	hub        hub
	taps       taps
	peers      *peers.Service
	members    *members
	clientIdle time.Duration // idle time of the control socket's clients; zero means [clientIdle]
	service    service
	live       liveSettings
	barrier    chan struct{} // of the watchdog: closed when the sending threads have moved; nil: no question waits
	protected  []control.Protection

	clientsRefused atomic.Uint64 // connections that were refused because there were too many
}

// Run serves the interface until ctx ends or a part of the agent fails. Then it says goodbye to every peer
// and removes what it made, or hands over to the next process. It calls ready once the interface is up and
// the kernel has its first routes.
func Run(ctx context.Context, opt Options, ready func()) error {
	opt.Log = cmp.Or(opt.Log, slog.New(slog.DiscardHandler))
	a := &Agent{
		opt: opt, log: opt.Log, start: time.Now(),
		conns: map[nexthop.Conn]*conn{}, byQPN: map[ib.QPN]nexthop.Conn{}, paths: map[netip.Addr]*path{},
		udUse: map[encap.LinkAddr]*ipoib.UDUse{}, ahs: map[ib.GID]*handle{}, groups: map[ib.GID]time.Time{},
		queries: make(chan func()),
	}
	a.service = a.newService()
	a.live.setPrefixes(opt.Prefixes)
	a.peers = a.newPeers()
	a.members = a.newMembers()
	return errors.Join(a.run(ctx, ready), opt.Provider.Close())
}

func (a *Agent) run(ctx context.Context, ready func()) (err error) {
	if err := a.checkCM(); err != nil {
		return err
	}
	in, err := a.listen()
	defer in.close()
	if err != nil {
		return err
	}
	if err := a.prepareHandOver(); err != nil {
		return err
	}
	defer a.legacy.state.Close() // nothing if it is nil
	if err := a.open(); err != nil {
		return err
	}
	a.carry(a.port().Active)

	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	a.end = stop
	loopCtx, stopLoop := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	a.begin(ctx, loopCtx, &wg, in)
	a.drive(ctx, func() bool {
		if err := a.confine(); err != nil {
			stop(err)
			return false
		}
		a.keepTUN()
		return true
	}, ready)
	a.hub.close()
	stopLoop()
	a.kernel.endNotices()
	a.peers.Close()
	wg.Wait()
	err = a.closeHost()
	if cause := context.Cause(ctx); !errors.Is(cause, context.Canceled) {
		err = errors.Join(cause, err)
	}
	return err
}

// listeners are where others ask the agent: the control socket and the metrics. Each may be nil.
type listeners struct {
	control, scrapes net.Listener
	metrics          *http.Server
}

func (l *listeners) close() {
	for _, x := range []net.Listener{l.control, l.scrapes} {
		if x != nil {
			x.Close()
		}
	}
}

// listen opens the listeners; with an error, some of them may be open. It runs before the TUN is opened, so
// that a second agent of the same name fails here, with an error that says why.
func (a *Agent) listen() (l listeners, err error) {
	if a.opt.Control != "" {
		if l.control, err = listen(a.opt.Control); err != nil {
			return l, err
		}
		if err := share(a.opt.Control, a.opt.Group); err != nil {
			return l, err
		}
	}
	if a.opt.Metrics != "" {
		if l.metrics, err = a.metricsServer(); err != nil {
			return l, err
		}
		if l.scrapes, err = listenMetrics(a.opt.Metrics); err != nil {
			return l, err
		}
	}
	return l, nil
}

// gid returns the GID of this host: that of the options, else the first of the provider's.
func (a *Agent) gid(port verbs.Port) (ib.GID, error) {
	if !a.opt.GID.IsZero() {
		return a.opt.GID, nil
	}
	if len(port.GIDs) == 0 {
		return ib.GID{}, errors.New("the provider has no GID: is the underlay up and has it an address?")
	}
	return port.GIDs[0], nil
}

// open opens the TUN, the data path, the machine and the kernel's side, in this order.
func (a *Agent) open() error {
	port := a.opt.Provider.Port()
	gid, err := a.gid(port)
	if err != nil {
		return err
	}
	if err := a.openTUN(); err != nil {
		return err
	}
	if a.loop, err = a.openLoop(gid); err != nil {
		return errors.Join(fmt.Errorf("set up the data path: %w", err), a.tun.Close())
	}
	a.loop.SetAllow(a.opt.Allow)
	a.link = encap.LinkAddr{Flags: a.opt.Mode.Flags(), QPN: a.loop.UDQP().QPN(), GID: gid}
	if err := a.takeCopies(gid); err != nil {
		return errors.Join(err, a.loop.Close(), a.tun.Close())
	}
	if err := a.openFabric(port); err != nil {
		return errors.Join(err, a.loop.Close(), a.tun.Close())
	}
	a.m = ipoib.New(a.machineOptions(port))
	if err := a.openHost(); err != nil {
		return errors.Join(err, a.loop.Close(), a.tun.Close())
	}
	a.taps.provider = a.opt.Provider
	if err := a.peers.Open(a.link.GID); err != nil {
		return errors.Join(err, a.kernel.endNotices(), a.host.Close(), a.loop.Close(), a.tun.Close())
	}
	return nil
}

// begin starts what runs beside the driver. The data path, the kernel's side, the metrics and the control
// socket serve until loopCtx ends, the rest until ctx ends. The first part to fail ends ctx.
func (a *Agent) begin(ctx, loopCtx context.Context, wg *sync.WaitGroup, in listeners) {
	part := func(what string, serve func() error) {
		wg.Go(func() {
			if err := serve(); err != nil {
				a.end(fmt.Errorf("%s: %w", what, err))
			}
		})
	}
	if s, ok := a.opt.Provider.(verbs.Successor); ok {
		s.Begin()
	}
	wg.Go(func() {
		switch err := a.loop.Run(loopCtx); {
		case errors.Is(err, syscall.EBADFD), errors.Is(err, syscall.ENODEV): // of a TUN
			a.end(fmt.Errorf("interface %s was removed, and not by us", a.opt.Name))
		case err != nil:
			a.end(fmt.Errorf("data path: %w", err))
		}
	})
	wg.Go(func() { a.kernel.run(loopCtx) })
	wg.Go(func() { a.runService(ctx) })
	if a.opt.Members != nil {
		wg.Go(func() { a.members.run(ctx) })
	}
	if a.opt.Reload != nil {
		wg.Go(func() { a.hangups(ctx) })
	}
	if in.scrapes != nil {
		part("metrics", func() error { return a.serveMetrics(loopCtx, in.metrics, in.scrapes) })
	}
	part("watch sysctls and groups", func() error { return a.kernel.watch(loopCtx) })
	if in.control != nil {
		part("control socket", func() error { return a.serve(loopCtx, in.control) })
	}
	if a.peers.Usable() {
		part("answer peers", func() error { return a.peers.Serve(ctx) })
	}
}

// closeHost takes our routes out of the kernel and closes the device.
func (a *Agent) closeHost() error {
	_, err := a.kernel.host.RemoveOurs()
	if errors.Is(err, hostnet.ErrNotFound) {
		err = nil // the routes went with the TUN
	}
	return errors.Join(a.kernel.host.Close(), err)
}

// confine gives up the rights that the process does not need any more.
func (a *Agent) confine() (err error) {
	if a.opt.Confine == nil {
		return nil
	}
	if a.protected, err = a.opt.Confine(); err != nil {
		return fmt.Errorf("confine the process: %w", err)
	}
	return nil
}

// checkCM returns an error if the CM transport needs QP 1 and the provider has none. With CM transport auto
// it adds a note instead.
func (a *Agent) checkCM() error {
	if a.opt.Provider.MADPort() != nil || a.opt.CM == ipoib.CMInband {
		return nil
	}
	why := fmt.Sprintf("QP 1 cannot be had (%v)", cmp.Or(a.opt.NoQP1, errors.New("the kernel's ib_cm owns CM messages")))
	if a.opt.CM == ipoib.CMGSI {
		return errors.New(why + ": unload ib_cm and what uses it, or use cm_transport auto")
	}
	a.opt.Notes = append(a.opt.Notes, why+": they travel in-band, which only ipoibcmd understands")
	return nil
}

// takeCopies makes the UD QP receive the copies of multicast packets that peers
// send by unicast, where the underlay has no multicast.
func (a *Agent) takeCopies(gid ib.GID) error {
	if !a.copies() {
		return nil
	}
	if err := a.loop.UDQP().AttachMulticast(gid); err != nil {
		return fmt.Errorf("receive the peers' copies of multicast packets: %w", err)
	}
	return nil
}

func explainTUN(name string, err error) error {
	switch {
	case errors.Is(err, os.ErrNotExist):
		return fmt.Errorf("%w (load the tun module, or give the container /dev/net/tun)", err)
	case errors.Is(err, os.ErrPermission):
		return fmt.Errorf("%w (CAP_NET_ADMIN is needed: run as root)", err)
	case errors.Is(err, errBusy):
		return fmt.Errorf("interface %s is there already: choose another --name, or stop the agent that has it", name)
	case errors.Is(err, syscall.EINVAL): // of TUNSETIFF: a name that it cannot have
		return fmt.Errorf("interface %s is there already and is no TUN, or its name is impossible: choose another --name",
			name)
	}
	return err
}

func (a *Agent) machineOptions(port verbs.Port) ipoib.Options {
	return ipoib.Options{
		Link: a.link, GUID: port.GUID, PathMTU: port.MTU, PKey: a.opt.PKey, QKey: a.opt.QKey,
		SRQ: a.opt.Provider.Caps().SRQ, Mode: a.opt.Mode, CMTransport: a.opt.CM,
		LinuxFirst: a.opt.LinuxFirst, NoGSI: a.opt.Provider.MADPort() == nil,
		UDMTU: a.udMTU(port), UDAuto: a.opt.UDMTU == 0, ReceiveMTU: a.opt.ReceiveMTU,
		BestMessage: a.opt.Provider.Caps().BestMessage, Idle: a.opt.Idle,
		Fabric: a.machineFabric(port), Peers: a.memberGIDs(), Copies: a.copies(), Allow: a.opt.Allow, Log: a.log,
		Rand:   newRand(),
		Memory: a.before().Memory, MaxConns: a.opt.maxConns(), MaxPeers: a.opt.maxNeighbours(),
		Neigh: neigh.Options{AcceptAlways: a.opt.ARPAlways, MaxNeighbors: a.opt.maxNeighbours()},
		CM:    cm.Options{MaxConns: 4 * a.opt.maxConns()}, // half-open ones and TIMEWAIT included
	}
}

// udMTU returns the configured UD MTU, else the one that Check returns for port. It returns zero if neither
// is known.
func (a *Agent) udMTU(port verbs.Port) int {
	if a.opt.UDMTU != 0 || a.opt.Check == nil {
		return a.opt.UDMTU
	}
	plan, _ := a.opt.Check(port)
	return plan.MTU // zero if there was an error, which status shows
}

func (o *Options) pkey() ib.PKey      { return cmp.Or(o.PKey, ib.DefaultPKey) }
func (o *Options) maxConns() int      { return cmp.Or(o.MaxConns, 2048) }
func (o *Options) maxNeighbours() int { return cmp.Or(o.MaxNeighbours, 4096) }

// newRand returns a generator that outsiders cannot predict: communication IDs
// and PSNs come from it (docs/security.md).
func newRand() *rand.Rand {
	var seed [32]byte
	crand.Read(seed[:]) // never fails
	return rand.New(rand.NewChaCha8(seed))
}
