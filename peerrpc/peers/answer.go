package peers

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"ipoibcm/control"
	"ipoibcm/peerrpc"
	"ipoibcm/redact"
	"ipoibcm/rpcrdma"
)

// answer carries out one call of the program for who.
func (s *Service) answer(ctx context.Context, who asker, in *rpcrdma.Serve) rpcrdma.Event {
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
	case who == askerRefused, call.Proc == peerrpc.ProcEvents && who != askerTrusted:
		s.n.distrusted.Add(1)
		reply.Status, reply.AuthStat = rpcrdma.RPCAuthError, peerrpc.AuthTooWeak
	case call.Proc == peerrpc.ProcNull && len(args) == 0:
	case call.Proc == peerrpc.ProcStatus && len(args) == 0:
		if doc, err = s.status(ctx, who); err != nil {
			reply.Status = rpcrdma.RPCSystemErr
			break
		}
		results, at = peerrpc.AppendDocument(nil, doc), 4
	case call.Proc == peerrpc.ProcEvents:
		r, err := peerrpc.ParseRange(args)
		if err != nil {
			reply.Status = rpcrdma.RPCGarbageArgs
			break
		}
		last, lines := s.EventsAfter(r.After, int(min(r.Max, peerrpc.MaxEvents)))
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
func (s *Service) status(ctx context.Context, who asker) ([]byte, error) {
	v, err := s.seen.get(ctx, func() (control.Status, error) { return s.opt.Status(ctx) })
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

func leftOut(n int) string { return fmt.Sprintf("%d peers were left out: too many for one answer", n) }

// wholeStatus returns what a trusted peer sees of our status: all but the identifiers that protect
// connections, and the protections.
func wholeStatus(s control.Status) control.Status {
	out := redact.All(s)
	out.Interface.Build = s.Interface.Build // it has the number of a commit, which looks like an identifier
	out.Protections = nil                   // they say what an attacker would have to overcome
	out.Limited = "identifiers of queue pairs and connections are shown on that host only"
	return out
}

// briefStatus returns what any other peer that may ask sees: that the agent lives, and the settings that
// both ends must have alike. It names nobody.
func briefStatus(s control.Status) control.Status {
	i, u := s.Interface, s.Underlay
	return control.Status{
		Version: s.Version,
		Interface: control.Interface{State: i.State, Mode: i.Mode, UDMTU: i.UDMTU, UDAccept: i.UDAccept,
			ReceiveMTU: i.ReceiveMTU, Build: i.Build,
			CMPaths: []string{}, Addresses: []control.Address{}},
		Underlay: control.Underlay{PathMTU: u.PathMTU, Active: u.Active, GIDs: []string{}},
		Peers:    []control.Peer{},
		Limited:  "the rest is for the GIDs in peer_trust of that host's configuration",
	}
}

// forPeers returns the event as a trusted peer sees it.
func forPeers(e control.Event) control.Event { return redact.All(e) }

// Record keeps an event for peers that ask.
func (s *Service) Record(e control.Event) { s.events.add(e) }

// EventsAfter returns at most n events with numbers above seq as trusted peers see them, as JSON lines, and the
// number of the last of them.
func (s *Service) EventsAfter(seq uint64, n int) (last uint64, lines []byte) {
	return s.events.after(seq, n)
}

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
	seq, events := r.copyAfter(seq, n)
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	for i := range events {
		size := b.Len()
		if enc.Encode(forPeers(events[i])) != nil || b.Len() > peerrpc.MaxDocument {
			b.Truncate(size)
			break
		}
		seq++
	}
	return seq, b.Bytes()
}

// copyAfter returns at most n events with numbers above seq, and the number before the first of them. The lock is
// held for the copy alone: the driver adds events, and must not wait for their encoding.
func (r *eventRing) copyAfter(seq uint64, n int) (before uint64, events []control.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if seq > r.last { // the number is of an agent before this one
		seq = 0
	}
	if r.last > peerrpc.MaxEvents {
		seq = max(seq, r.last-peerrpc.MaxEvents)
	}
	for i := seq; i < r.last && len(events) < n; i++ {
		events = append(events, r.ring[(i+1)%peerrpc.MaxEvents])
	}
	return seq, events
}
