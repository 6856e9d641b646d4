package agent

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"ipoibcm/cm"
	"ipoibcm/control"
	"ipoibcm/ib"
	"ipoibcm/ipoib"
	"ipoibcm/peerrpc"
	"ipoibcm/rdmacm"
	"ipoibcm/rpcrdma"
	"ipoibcm/rpcrdma/transport"
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
	peerWithin   = 8 * time.Second        // how long we wait for a peer that we ask
)

// DefaultPeerAllow allows whoever is on the same Ethernet, because routers forward no packets from link-local
// addresses. It applies unless the configuration has another list.
var DefaultPeerAllow = []netip.Prefix{netip.MustParsePrefix("fe80::/10")}

// A peerService lets agents ask each other over the fabric: it serves the program of package peerrpc, and
// calls it at other hosts. It has a CM of its own, which shares QP 1 with the interface's.
type peerService struct {
	a    *Agent
	port *rdmacm.Port // nil where QP 1 cannot be had

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

	events eventRing
	view   func(context.Context) (control.Status, error) // makes our own status
	seen   recent[control.Status]                        // what view returned last
}

// openPeers starts the service. It answers only hosts in Options.PeerAllow and PeerTrust.
func (a *Agent) openPeers() (err error) {
	s := &a.peers
	s.from = map[ib.GID]int{}
	s.a, s.known, s.live, s.past = a, map[netip.Addr]ib.GID{}, map[*transport.End]struct{}{}, map[string]uint64{}
	s.view = a.viewStatus
	if a.opt.Provider.MADPort() == nil {
		return nil
	}
	s.port, err = rdmacm.Open(rdmacm.Options{Provider: a.opt.Provider, Shared: true,
		CM: cm.Options{GID: a.link.GID, MaxConns: maxPeerConns},
		Log: func(n cm.Note) {
			if n.Dir == cm.Decided && n.Text == "" {
				return
			}
			e := a.event("peers", "cm", n.String())
			if n.Dir != cm.Decided {
				e.Out = new(n.Dir == cm.Sent)
			}
			a.hub.publish(e)
		}})
	return err
}

// serve answers peers until ctx ends, while PeerAllow or PeerTrust has anybody. There must be a port.
func (s *peerService) serve(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		s.a.live.await(ctx, true)
		if ctx.Err() != nil {
			return nil
		}
		if err := s.listen(ctx, &wg); err != nil {
			return err
		}
	}
}

// listen answers peers until nobody may ask any more.
func (s *peerService) listen(ctx context.Context, wg *sync.WaitGroup) error {
	l, err := s.port.Listen(peerrpc.Port)
	if err != nil {
		return err
	}
	defer l.Close()
	listening, stop := context.WithCancel(ctx)
	defer stop()
	wg.Go(func() {
		s.a.live.await(listening, false)
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

// An arrival is a REQ that we answer. Anybody can send a REQ in another's name. So an arrival takes no place
// among the connections that may ask until its sender has shown that the REP reached it. The sender shows
// that by the RTU, or by data on the queue pair: both have what only the REP told (communication ID, QPN,
// PSN).
type arrival struct {
	from      ib.GID
	displaced chan struct{} // closed when another arrival displaces this one
}

// arrive adds an arrival of g, and never refuses. If g has maxEndsEach already, the oldest of these is
// displaced. Otherwise, if there are maxArrivals, the oldest of all is displaced. A sender that is at its GID
// answers within milliseconds, and with maxArrivals waiting the oldest has been there for longer.
func (s *peerService) arrive(g ib.GID) *arrival {
	s.mu.Lock()
	defer s.mu.Unlock()
	same, oldest := 0, -1
	for i, a := range s.arrivals {
		if a.from != g {
			continue
		}
		if same++; oldest < 0 {
			oldest = i
		}
	}
	if same < maxEndsEach && len(s.arrivals) >= maxArrivals {
		oldest = 0
	}
	if same >= maxEndsEach || len(s.arrivals) >= maxArrivals {
		close(s.arrivals[oldest].displaced)
		s.arrivals = slices.Delete(s.arrivals, oldest, oldest+1)
		s.n.displaced.Add(1)
	}
	a := &arrival{g, make(chan struct{})}
	s.arrivals = append(s.arrivals, a)
	return a
}

func (s *peerService) depart(a *arrival) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.arrivals = slices.DeleteFunc(s.arrivals, func(x *arrival) bool { return x == a })
}

// full reports whether no connection of g may enter now.
func (s *peerService) full(g ib.GID) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ends >= maxPeerEnds || s.from[g] >= maxEndsEach
}

// enter takes a place among the connections that may ask. It returns false if there is none for g.
func (s *peerService) enter(g ib.GID) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ends >= maxPeerEnds || s.from[g] >= maxEndsEach {
		return false
	}
	s.ends++
	s.from[g]++
	return true
}

func (s *peerService) leave(g ib.GID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ends--
	if s.from[g]--; s.from[g] == 0 {
		delete(s.from, g)
	}
}

func (s *peerService) accept(ctx context.Context, r *rdmacm.Request) {
	from := r.Params.Remote
	who := s.asker(from)
	if who == askerRefused {
		s.n.refused.Add(1)
		s.a.hub.publish(s.a.event("peers", "refused", from.String()+" asks, and is not in peer_allow"))
		r.Reject([]byte("peer_allow"))
		return
	}
	if s.full(from) {
		s.n.full.Add(1)
		r.Reject([]byte("busy"))
		return
	}
	a := s.arrive(from)
	defer s.depart(a)
	idle := time.NewTimer(peerFirst)
	defer idle.Stop()
	asked := make(chan struct{}, 1)
	e, err := transport.AcceptRoCE(r, transport.Options{Provider: s.a.opt.Provider,
		RPC: rpcrdma.Options{Grant: peerGrant, Ask: 1, MaxLong: peerrpc.MaxDocument + 4096},
		Serve: func(ctx context.Context, c rpcrdma.Serve) rpcrdma.Event {
			idle.Reset(peerIdle)
			wake(asked) // a call stands for an RTU that was lost
			s.n.served.Add(1)
			return s.answer(ctx, who, &c)
		}})
	if err != nil {
		s.a.log.Debug("a peer asks, and was not answered", "peer", from, "err", err)
		return
	}
	s.begin(e)
	defer s.end(e)
	select {
	case <-e.Settled():
	case <-asked:
	case <-e.Done():
		return
	case <-a.displaced:
		return
	case <-idle.C:
		return
	case <-ctx.Done():
		return
	}
	if !s.enter(from) { // others were quicker
		s.n.full.Add(1)
		return
	}
	defer s.leave(from)
	s.depart(a)
	select {
	case <-e.Done():
	case <-idle.C:
	case <-ctx.Done():
	}
}

// begin makes counters include those of an open connection. end closes the connection and keeps its counts.
func (s *peerService) begin(e *transport.End) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.live[e] = struct{}{}
}

func (s *peerService) end(e *transport.End) {
	e.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.live, e)
	e.Counters(func(name string, v uint64) { s.past[name] += v })
}

// counters calls f with each counter of RPC-over-RDMA, summed over all connections, in a fixed order.
func (s *peerService) counters(f func(name string, v uint64)) {
	s.mu.Lock()
	sum := maps.Clone(s.past)
	for e := range s.live {
		e.Counters(func(name string, v uint64) { sum[name] += v })
	}
	s.mu.Unlock()
	(&rpcrdma.Counters{}).Each(func(name string, _ uint64) { f(name, sum[name]) })
}

// answer carries out one call of the program for who.
func (s *peerService) answer(ctx context.Context, who asker, in *rpcrdma.Serve) rpcrdma.Event {
	call, args, err := rpcrdma.ParseRPCCall(in.Payload)
	var reply rpcrdma.RPCReply
	var doc []byte
	at := 0 // where the document's octets begin in results, behind its length
	results := []byte(nil)
	var fault *rpcrdma.Error
	switch {
	case errors.As(err, &fault) && fault.Reason == rpcrdma.ReasonRPCVersion:
		reply.Status, reply.Low, reply.High = rpcrdma.RPCMismatch, 2, 2
	case err != nil:
		reply.Status = rpcrdma.RPCGarbageArgs
	case call.Prog != peerrpc.Program:
		reply.Status = rpcrdma.RPCProgUnavail
	case call.Vers != peerrpc.Version:
		reply.Status, reply.Low, reply.High = rpcrdma.RPCProgMismatch, peerrpc.Version, peerrpc.Version
	case call.Proc == peerrpc.ProcNull && len(args) == 0:
	case call.Proc == peerrpc.ProcStatus && len(args) == 0:
		if doc, err = s.status(ctx, who); err != nil {
			reply.Status = rpcrdma.RPCSystemErr
			break
		}
		results, at = peerrpc.AppendDocument(nil, doc), 4
	case call.Proc == peerrpc.ProcEvents && who != askerTrusted:
		s.n.distrusted.Add(1)
		reply.Status, reply.AuthStat = rpcrdma.RPCAuthError, peerrpc.AuthTooWeak
	case call.Proc == peerrpc.ProcEvents:
		r, err := peerrpc.ParseRange(args)
		if err != nil {
			reply.Status = rpcrdma.RPCGarbageArgs
			break
		}
		last, lines := s.events.after(r.After, int(min(r.Max, peerrpc.MaxEvents)))
		doc = lines
		results, at = peerrpc.AppendBatch(nil, last, lines), 12
	case call.Proc == peerrpc.ProcEcho:
		if doc, err = peerrpc.ParseEcho(args, nil); err != nil {
			reply.Status = rpcrdma.RPCGarbageArgs
			break
		}
		results, at = peerrpc.AppendEcho(nil, doc), 4
	case call.Proc <= peerrpc.ProcLast:
		reply.Status = rpcrdma.RPCGarbageArgs
	default:
		reply.Status = rpcrdma.RPCProcUnavail
	}
	out := reply.Append(nil)
	a := rpcrdma.Answer{Payload: append(out, results...)}
	// A Write chunk without segments asks for the document inline.
	if at > 0 && len(doc) > 0 && len(in.Results) == 1 && in.Results[0] > 0 {
		if in.Results[0] < len(doc) {
			return rpcrdma.CannotAnswer{Need: len(a.Payload)}
		}
		a.Reduce = []rpcrdma.Span{{Offset: len(out) + at, Len: len(doc)}}
	}
	return a
}

// status returns the document of STATUS for who.
func (s *peerService) status(ctx context.Context, who asker) ([]byte, error) {
	v, err := s.seen.get(ctx, func() (control.Status, error) { return s.view(ctx) })
	if err != nil {
		return nil, err
	}
	if who != askerTrusted {
		return statusDocument(briefStatus(v))
	}
	return statusDocument(wholeStatus(v))
}

// A recent keeps a value for a short time, so that peers that ask often do not keep the driver from its work.
type recent[T any] struct {
	mu  sync.Mutex
	at  time.Time
	v   T
	err error
}

// get returns the value if it was made within the last peerStatusOf, else makes it anew.
func (r *recent[T]) get(ctx context.Context, anew func() (T, error)) (T, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.at.IsZero() || time.Since(r.at) >= peerStatusOf {
		v, err := anew()
		if ctx.Err() != nil { // the error is this asker's alone, so it is not kept
			return v, err
		}
		r.at, r.v, r.err = time.Now(), v, err
	}
	return r.v, r.err
}

var errDocument = errors.New("the status is too large for a document")

// statusDocument encodes v. If the document would be too large, it leaves peers out and adds a warning that
// says so.
func statusDocument(v control.Status) ([]byte, error) {
	peers, warnings := v.Peers, v.Warnings
	for n := len(peers); ; n /= 2 {
		if v.Peers = peers[:n]; n < len(peers) {
			v.Warnings = append(warnings[:len(warnings):len(warnings)], leftOut(len(peers)-n))
		}
		b, err := json.Marshal(v)
		switch {
		case err != nil:
			return nil, err
		case len(b) <= peerrpc.MaxDocument:
			return b, nil
		case n == 0:
			return nil, errDocument
		}
	}
}

// learn remembers the GID of a neighbour.
func (s *peerService) learn(n ipoib.Note) {
	if !n.Addr.IsValid() || n.Peer.IsZero() {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, there := s.known[n.Addr]; !there && len(s.known) >= maxKnownGIDs {
		for a := range s.known { // any
			delete(s.known, a)
			break
		}
	}
	s.known[n.Addr] = n.Peer.GID
}

// find returns the GID of the host with address ip. about says how the GID is known, and has the class of
// the host's interface.
func (s *peerService) find(ctx context.Context, ip netip.Addr) (g ib.GID, about control.PeerPath, err error) {
	about.IP = ip.String()
	hop, err := s.a.nextHop(ctx, ip)
	if err != nil {
		return g, about, err
	}
	now, err := ask(ctx, s.a, func() ipoib.Explanation { return s.a.m.Explain(ip, hop) })
	if err != nil {
		return g, about, err
	}
	s.mu.Lock()
	known, ok := s.known[ip]
	s.mu.Unlock()
	switch {
	case !now.Link.GID.IsZero():
		g, about.Via, about.Class = now.Link.GID, "neighbour", now.Class.String()
	case ok:
		g, about.Via = known, "remembered"
	default:
		g, about.Via = ib.GIDFromAddr(ip), viaGiven
	}
	about.GID = g.String()
	return g, about, nil
}

var errNoQP1 = errors.New("QP 1 cannot be had, which asking peers over the fabric takes")

// viaGiven says that the address itself was taken for a GID.
const viaGiven = "as given"

// errNoNeighbour says that no neighbour has the address, and that it cannot be a GID of the fabric, whose
// GIDs are of the other IP version.
var errNoNeighbour = errors.New("it is not a neighbour that this host knows")

// hasFamily reports whether we have a GID of the IP version of g.
func (a *Agent) hasFamily(g ib.GID) bool {
	return slices.ContainsFunc(a.opt.Provider.Port().GIDs, func(own ib.GID) bool { return own.Is4() == g.Is4() })
}

// errSelf says that a host need not ask itself over the fabric.
var errSelf = errors.New("that is this host")

// dial connects to the agent of a peer. ip is an address behind the interface, or the peer's GID. The
// caller gives the connection to s.end.
func (s *peerService) dial(ctx context.Context, ip netip.Addr) (e *transport.End, about control.PeerPath, err error) {
	if s.port == nil {
		return nil, about, errNoQP1
	}
	g, about, err := s.find(ctx, ip)
	if err != nil {
		return nil, about, err
	}
	if slices.Contains(s.a.opt.Provider.Port().GIDs, g) {
		return nil, about, errSelf
	}
	if about.Via == viaGiven && !s.a.hasFamily(g) {
		return nil, about, errNoNeighbour
	}
	s.n.asked.Add(1)
	start := time.Now()
	e, err = transport.DialRoCE(ctx, s.port, g.Addr(), peerrpc.Port, transport.Options{Provider: s.a.opt.Provider,
		RPC: rpcrdma.Options{Ask: 1, Grant: 1, Program: peerrpc.Program, ProgVersion: peerrpc.Version,
			NegotiateTimeout: peerWithin / 2, CallTimeout: peerWithin, MaxLong: peerrpc.MaxDocument + 4096}})
	about.SetupMS = float64(time.Since(start).Microseconds()) / 1000
	if err != nil {
		return nil, about, err
	}
	s.begin(e)
	select {
	case <-e.Ready():
		about.RPCRDMA = int(e.Info().Version)
		return e, about, nil
	case <-e.Done():
		err = e.Err()
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	s.end(e)
	return nil, about, err
}

// call makes one call of the program. It returns the results. If the peer put the document into the Write
// chunk, written is the document.
func (s *peerService) call(ctx context.Context, e *transport.End, proc uint32,
	args []byte) (results, written []byte, err error) {
	req := rpcrdma.Submit{Payload: append((&rpcrdma.RPCCall{Prog: peerrpc.Program, Vers: peerrpc.Version,
		Proc: proc}).Append(nil), args...), MaxReply: 64}
	if proc != peerrpc.ProcNull {
		req.Results = []int{peerrpc.MaxDocument}
	}
	if proc == peerrpc.ProcEcho {
		req.Results = []int{peerrpc.MaxEcho}
	}
	r, err := e.Call(ctx, req)
	if err != nil {
		return nil, nil, err
	}
	head, results, err := rpcrdma.ParseRPCReply(r.Payload)
	if err == nil && head.Status == rpcrdma.RPCAuthError {
		return nil, nil, errNotTrusted
	}
	if err == nil && head.Status != rpcrdma.RPCSuccess {
		err = errors.New("the peer's agent answers " + head.Status.String())
	}
	if len(r.Results) == 1 {
		written = r.Results[0]
	}
	return results, written, err
}

// errNotTrusted says that the peer refuses us this call, not all calls.
var errNotTrusted = errors.New("that is told only to those whom the agent there trusts")

// An eventRing keeps the last events for peers that ask.
type eventRing struct {
	mu   sync.Mutex
	last uint64 // number of the newest, from 1 up
	ring [peerrpc.MaxEvents]control.Event
}

func (r *eventRing) add(e control.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.last++
	r.ring[r.last%peerrpc.MaxEvents] = e
}

// after returns at most n events with numbers above seq, as JSON lines, and the number of the last of them.
func (r *eventRing) after(seq uint64, n int) (last uint64, lines []byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if seq > r.last { // the number is of an agent before this one
		seq = 0
	}
	if r.last > peerrpc.MaxEvents {
		seq = max(seq, r.last-peerrpc.MaxEvents)
	}
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	for ; seq < r.last && n > 0; n-- {
		size := b.Len()
		if enc.Encode(forPeers(r.ring[(seq+1)%peerrpc.MaxEvents])) != nil || b.Len() > peerrpc.MaxDocument {
			b.Truncate(size)
			break
		}
		seq++
	}
	return seq, b.Bytes()
}
