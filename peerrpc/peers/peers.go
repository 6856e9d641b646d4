// Package peers lets agents ask each other over the fabric: it serves the program of package peerrpc by
// RPC-over-RDMA, and calls it at other hosts. It knows nothing of the agent but what Options has.
package peers

import (
	"context"
	"log/slog"
	"maps"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"ipoibcm/cm"
	"ipoibcm/control"
	"ipoibcm/counters"
	"ipoibcm/ib"
	"ipoibcm/ipoib"
	"ipoibcm/peerrpc"
	"ipoibcm/rdmacm"
	"ipoibcm/rpcrdma"
	"ipoibcm/rpcrdma/transport"
	"ipoibcm/verbs"
)

// Bounds of what agents ask each other over the fabric.
const (
	maxPeerConns = 1024                   // connections of the CM, those in TIMEWAIT included
	maxPeerEnds  = 16                     // connections of peers that ask us
	maxEndsEach  = 4                      // such connections of one GID, so that no peer keeps the others out
	maxArrivals  = 128                    // REQs whose senders have not yet shown that they are at their GID
	peerIdle     = 30 * time.Second       // a connection that asks nothing for this long is ended
	peerFirst    = 3 * time.Second        // the same before its first question: anybody can send a REQ in another's name
	peerGrant    = 4                      // credits for each connection
	peerStatusOf = 100 * time.Millisecond // how long one status answers all that ask for it
	maxKnownGIDs = 4096                   // addresses whose GID is remembered
)

// Within is how long we wait for a peer that we ask.
const Within = 8 * time.Second

// Options are what a Service needs of the agent that it speaks for.
type Options struct {
	Provider     verbs.Provider
	Allow, Trust []netip.Prefix // who may ask at first, as in [Service.SetAskers]
	Log          *slog.Logger
	// Status makes our own status.
	Status func(context.Context) (control.Status, error)
	// Neighbour returns the GID and the class of the neighbour that has the address. The GID is zero if there
	// is no such neighbour.
	Neighbour func(context.Context, netip.Addr) (ib.GID, ipoib.Class, error)
	// Publish tells an event. A nil out: it is no message.
	Publish func(kind, text string, out *bool)
}

// A Service answers peers and asks them. It has a CM of its own, which shares QP 1 with the interface's.
type Service struct {
	opt  Options
	port *rdmacm.Port // nil where QP 1 cannot be had
	may  atomic.Pointer[askers]

	n struct {
		asked      atomic.Uint64 `name:"asked"`
		served     atomic.Uint64 `name:"served"`
		refused    atomic.Uint64 `name:"drop_not_allowed"`
		distrusted atomic.Uint64 `name:"drop_not_trusted"`
		full       atomic.Uint64 `name:"drop_too_many"`
		displaced  atomic.Uint64 `name:"drop_displaced"`
	}

	mu       sync.Mutex
	arrivals []*arrival // oldest first
	ends     int
	from     map[ib.GID]int        // ends by the peer's GID
	known    map[netip.Addr]ib.GID // the GIDs of neighbours, also of those that are gone
	live     map[*transport.End]struct{}
	past     map[string]uint64 // counters of connections that have ended

	versions transport.Versions // what the peers that we asked speak

	events eventRing
	seen   recent[control.Status] // what Options.Status returned last
}

// New returns a service that is not open: it remembers events and neighbours, and answers and asks nobody.
func New(opt Options) *Service {
	s := &Service{opt: opt, from: map[ib.GID]int{}, known: map[netip.Addr]ib.GID{},
		live: map[*transport.End]struct{}{}, past: map[string]uint64{}}
	s.SetAskers(opt.Allow, opt.Trust)
	return s
}

// Open opens the CM of the host with GID gid, where QP 1 can be had.
func (s *Service) Open(gid ib.GID) (err error) {
	if s.opt.Provider.MADPort() == nil {
		return nil
	}
	s.port, err = rdmacm.Open(rdmacm.Options{Provider: s.opt.Provider, Shared: true,
		CM: cm.Options{GID: gid, MaxConns: maxPeerConns},
		Log: func(n cm.Note) {
			if n.Dir == cm.Decided && n.Text == "" {
				return
			}
			var out *bool
			if n.Dir != cm.Decided {
				out = new(n.Dir == cm.Sent)
			}
			s.opt.Publish("cm", n.String(), out)
		}})
	return err
}

// Close closes the CM.
func (s *Service) Close() {
	if s.port != nil {
		s.port.Close()
	}
}

// Usable reports whether there is a CM, without which the service answers and asks nobody.
func (s *Service) Usable() bool { return s.port != nil }

// MAD takes a MAD if it is for the service's CM. It returns false if it is not.
func (s *Service) MAD(m *verbs.MAD) bool {
	if s.port == nil || !s.port.Owns(m) {
		return false
	}
	s.port.MAD(m)
	return true
}

// Event takes an event of the provider.
func (s *Service) Event(ev verbs.Event) {
	if s.port != nil {
		s.port.Event(ev)
	}
}

// Serve answers peers until ctx ends, while anybody may ask. The service must be usable.
func (s *Service) Serve(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		s.await(ctx, true)
		if ctx.Err() != nil {
			return nil
		}
		if err := s.listen(ctx, &wg); err != nil {
			return err
		}
	}
}

// listen answers peers until nobody may ask any more.
func (s *Service) listen(ctx context.Context, wg *sync.WaitGroup) error {
	l, err := s.port.Listen(peerrpc.Port)
	if err != nil {
		return err
	}
	defer l.Close()
	listening, stop := context.WithCancel(ctx)
	defer stop()
	wg.Go(func() {
		s.await(listening, false)
		stop()
	})
	for {
		r, err := l.Next(listening)
		if err != nil {
			return nil // stopped
		}
		wg.Go(func() { s.accept(ctx, r) })
	}
}

// Counters calls f with each counter of the service, of its CM and of RPC-over-RDMA, in a fixed order.
func (s *Service) Counters(f func(name string, v uint64)) {
	counters.Each(&s.n, f)
	if s.port != nil {
		s.port.Counters(func(name string, v uint64) { f("cm_"+name, v) })
		s.rpcCounters(func(name string, v uint64) { f("rpc_"+name, v) })
	}
}

// rpcCounters calls f with each counter of RPC-over-RDMA, summed over all connections, in a fixed order.
func (s *Service) rpcCounters(f func(name string, v uint64)) {
	s.mu.Lock()
	sum := maps.Clone(s.past)
	for e := range s.live {
		e.Counters(func(name string, v uint64) { sum[name] += v })
	}
	s.mu.Unlock()
	(&rpcrdma.Counters{}).Each(func(name string, _ uint64) { f(name, sum[name]) })
}
