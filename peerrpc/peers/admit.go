package peers

import (
	"context"
	"net/netip"
	"slices"
	"time"

	"ipoibcm/ib"
	"ipoibcm/peerrpc"
	"ipoibcm/rdmacm"
	"ipoibcm/rpcrdma"
	"ipoibcm/rpcrdma/transport"
)

// An asker says what another host's agent may ask of ours.
type asker uint8

const (
	askerRefused asker = iota // nothing
	askerAllowed              // NULL, ECHO, and a STATUS that says little
	askerTrusted              // everything there is, without identifiers
)

// asker returns what the agent at g may ask.
func (s *Service) asker(g ib.GID) asker {
	in := func(list []netip.Prefix) bool {
		return slices.ContainsFunc(list, func(p netip.Prefix) bool { return p.Contains(g.Addr().Unmap()) })
	}
	switch now := s.may.Load(); {
	case in(now.trust):
		return askerTrusted
	case in(now.allow):
		return askerAllowed
	}
	return askerRefused
}

// askers says who may ask, by GID.
type askers struct {
	allow, trust []netip.Prefix
	replaced     chan struct{} // closed when others are in force
}

// SetAskers lets those in allow ask for little, and those in trust for everything. Others may ask nothing.
func (s *Service) SetAskers(allow, trust []netip.Prefix) {
	if old := s.may.Swap(&askers{allow, trust, make(chan struct{})}); old != nil {
		close(old.replaced)
	}
}

// await waits until somebody may ask us if some is set, else until nobody may, or until ctx ends.
func (s *Service) await(ctx context.Context, some bool) {
	for ctx.Err() == nil {
		now := s.may.Load()
		if (len(now.allow)+len(now.trust) > 0) == some {
			return
		}
		select {
		case <-now.replaced:
		case <-ctx.Done():
		}
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
func (s *Service) arrive(g ib.GID) *arrival {
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

func (s *Service) depart(a *arrival) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.arrivals = slices.DeleteFunc(s.arrivals, func(x *arrival) bool { return x == a })
}

// full reports whether no connection of g may enter now.
func (s *Service) full(g ib.GID) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ends >= maxPeerEnds || s.from[g] >= maxEndsEach
}

// enter takes a place among the connections that may ask. It returns false if there is none for g.
func (s *Service) enter(g ib.GID) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ends >= maxPeerEnds || s.from[g] >= maxEndsEach {
		return false
	}
	s.ends++
	s.from[g]++
	return true
}

func (s *Service) leave(g ib.GID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ends--
	if s.from[g]--; s.from[g] == 0 {
		delete(s.from, g)
	}
}

func (s *Service) accept(ctx context.Context, r *rdmacm.Request) {
	from := r.Params.Remote
	if s.asker(from) == askerRefused {
		s.n.refused.Add(1)
		s.opt.Publish("refused", from.String()+" asks, and is not in peer_allow", nil)
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
	e, err := transport.AcceptRoCE(r, transport.Options{Provider: s.opt.Provider,
		RPC: rpcrdma.Options{Grant: peerGrant, Ask: 1, MaxLong: peerrpc.MaxDocument + 4096},
		Serve: func(ctx context.Context, c rpcrdma.Serve) rpcrdma.Event {
			idle.Reset(peerIdle)
			select {
			case asked <- struct{}{}: // a call stands for an RTU that was lost
			default:
			}
			s.n.served.Add(1)
			return s.answer(ctx, s.asker(from), &c)
		}})
	if err != nil {
		s.opt.Log.Debug("a peer asks, and was not answered", "peer", from, "err", err)
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
	for {
		now := s.may.Load() // before the check, so that no change after it is missed
		if s.asker(from) == askerRefused {
			return
		}
		select {
		case <-now.replaced:
		case <-e.Done():
			return
		case <-idle.C:
			return
		case <-ctx.Done():
			return
		}
	}
}

// begin makes counters include those of an open connection. end closes the connection and keeps its counts.
func (s *Service) begin(e *transport.End) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.live[e] = struct{}{}
}

func (s *Service) end(e *transport.End) {
	e.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.live, e)
	e.Counters(func(name string, v uint64) { s.past[name] += v })
}
