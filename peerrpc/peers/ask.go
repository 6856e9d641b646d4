package peers

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net/netip"
	"slices"
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

// Learn remembers the GID of a neighbour.
func (s *Service) Learn(n ipoib.Note) {
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
func (s *Service) find(ctx context.Context, ip netip.Addr) (g ib.GID, about control.PeerPath, err error) {
	about.IP = ip.String()
	now, class, err := s.opt.Neighbour(ctx, ip)
	if err != nil {
		return g, about, err
	}
	s.mu.Lock()
	known, ok := s.known[ip]
	s.mu.Unlock()
	switch {
	case !now.IsZero():
		g, about.Via, about.Class = now, "neighbour", class.String()
	case ok:
		g, about.Via = known, "remembered"
	default:
		g, about.Via = ib.GIDFromAddr(ip), viaGiven
	}
	about.GID = g.String()
	return g, about, nil
}

// ErrNoQP1 says that the service is not usable.
var ErrNoQP1 = errors.New("QP 1 cannot be had, which asking peers over the fabric takes")

// viaGiven says that the address itself was taken for a GID.
const viaGiven = "as given"

// ErrNoNeighbour says that no neighbour has the address, and that it cannot be a GID of the fabric, whose
// GIDs are of the other IP version.
var ErrNoNeighbour = errors.New("it is not a neighbour that this host knows")

// hasFamily reports whether we have a GID of the IP version of g.
func (s *Service) hasFamily(g ib.GID) bool {
	return slices.ContainsFunc(s.opt.Provider.Port().GIDs, func(own ib.GID) bool { return own.Is4() == g.Is4() })
}

// ErrSelf says that a host need not ask itself over the fabric.
var ErrSelf = errors.New("that is this host")

// dial connects to the agent of a peer. ip is an address behind the interface, or the peer's GID. The
// caller gives the connection to s.end.
func (s *Service) dial(ctx context.Context, ip netip.Addr) (e *transport.End, about control.PeerPath, err error) {
	if s.port == nil {
		return nil, about, ErrNoQP1
	}
	g, about, err := s.find(ctx, ip)
	if err != nil {
		return nil, about, err
	}
	if slices.Contains(s.opt.Provider.Port().GIDs, g) {
		return nil, about, ErrSelf
	}
	if about.Via == viaGiven && !s.hasFamily(g) {
		return nil, about, ErrNoNeighbour
	}
	s.n.asked.Add(1)
	start := time.Now()
	e, err = transport.DialRoCE(ctx, s.port, g.Addr(), peerrpc.Port, transport.Options{Provider: s.opt.Provider,
		Versions: &s.versions,
		RPC: rpcrdma.Options{Ask: 1, Grant: 1, Program: peerrpc.Program, ProgVersion: peerrpc.Version,
			NegotiateTimeout: Within / 2, CallTimeout: Within, MaxLong: peerrpc.MaxDocument + 4096}})
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
func (s *Service) call(ctx context.Context, e *transport.End, proc uint32,
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
		return nil, nil, ErrNotTrusted
	}
	if err == nil && head.Status != rpcrdma.RPCSuccess {
		err = errors.New("the peer's agent answers " + head.Status.String())
	}
	if len(r.Results) == 1 {
		written = r.Results[0]
	}
	return results, written, err
}

// ErrNotTrusted says that the peer refuses us this call, not all calls.
var ErrNotTrusted = errors.New("that is told only to those whom the agent there trusts")

// A Conn is a connection to the agent of a peer.
type Conn struct {
	s *Service
	e *transport.End
}

// Dial connects to the agent of a peer. ip is an address behind the interface, or the peer's GID. The caller
// closes the connection. about is as much as is known, also with an error.
func (s *Service) Dial(ctx context.Context, ip netip.Addr) (c *Conn, about control.PeerPath, err error) {
	e, about, err := s.dial(ctx, ip)
	if err != nil {
		return nil, about, err
	}
	return &Conn{s, e}, about, nil
}

// Close ends the connection.
func (c *Conn) Close() { c.s.end(c.e) }

// Status calls STATUS.
func (c *Conn) Status(ctx context.Context) (out control.Status, err error) {
	results, written, err := c.s.call(ctx, c.e, peerrpc.ProcStatus, nil)
	if err != nil {
		return out, err
	}
	doc, _, err := peerrpc.ParseDocument(results, written)
	if err != nil {
		return out, err
	}
	return out, json.Unmarshal(doc, &out)
}

// Events calls EVENTS. It returns events with numbers above after, and the number of the last of them.
func (c *Conn) Events(ctx context.Context, after uint64) (events []control.Event, last uint64, err error) {
	results, written, err := c.s.call(ctx, c.e, peerrpc.ProcEvents,
		peerrpc.Range{After: after, Max: peerrpc.MaxEvents}.Append(nil))
	if err != nil {
		return nil, 0, err
	}
	last, lines, err := peerrpc.ParseBatch(results, written)
	if err != nil {
		return nil, 0, err
	}
	events = []control.Event{}
	for line := range bytes.Lines(lines) {
		var ev control.Event
		if err := json.Unmarshal(line, &ev); err != nil {
			return nil, 0, err
		}
		events = append(events, ev)
	}
	return events, last, nil
}

// Ping calls NULL, or ECHO if there is a payload, which must come back the same.
func (c *Conn) Ping(ctx context.Context, payload []byte) error {
	if len(payload) == 0 {
		_, _, err := c.s.call(ctx, c.e, peerrpc.ProcNull, nil)
		return err
	}
	results, written, err := c.s.call(ctx, c.e, peerrpc.ProcEcho, peerrpc.AppendEcho(nil, payload))
	if err != nil {
		return err
	}
	got, err := peerrpc.ParseEcho(results, written)
	if err == nil && !bytes.Equal(got, payload) {
		err = errEcho
	}
	return err
}

// errEcho says that what came back is not what was sent.
var errEcho = errors.New("the echo differs from what was sent")

// CallHint returns what to do when a peer's agent refuses a call; empty: there is nothing to say.
func (s *Service) CallHint(err error, about control.PeerPath) string {
	if !errors.Is(err, ErrNotTrusted) {
		return ""
	}
	return "put our GID, " + s.ourGID(about) + ", into peer_trust of the configuration there"
}

// ourGID returns our GID as the peer sees it, as well as we know.
func (s *Service) ourGID(about control.PeerPath) string {
	g, err := netip.ParseAddr(about.GID)
	if err != nil {
		return "which status shows"
	}
	for _, own := range s.opt.Provider.Port().GIDs {
		if own.Addr().Unmap().Is4() == g.Unmap().Is4() && own.Addr().IsLinkLocalUnicast() == g.IsLinkLocalUnicast() {
			return own.String()
		}
	}
	return "which status shows"
}

// Rejected reports whether a peer could not be asked because it answered with a REJ.
func Rejected(err error) bool {
	failed, ok := errors.AsType[*rdmacm.FailedError](err)
	return ok && failed.Cause == cm.Rejected
}

// DialHint returns what to do when a peer could not be asked.
func (s *Service) DialHint(err error, about control.PeerPath) string {
	var failed *rdmacm.FailedError
	var fault *rpcrdma.Error
	switch {
	case errors.Is(err, ErrSelf):
		return "ask without --peer"
	case errors.As(err, &fault) && fault.Reason == rpcrdma.ReasonNoVersion:
		return "one of the two agents is much older: give both the same ipoibcmd"
	case errors.As(err, &failed) && failed.Cause == cm.Rejected && failed.Reason == cm.ReasonConsumer &&
		bytes.HasPrefix(failed.Private, []byte("peer_allow\x00")):
		return "put our GID, " + s.ourGID(about) + ", into peer_allow (or peer_trust) of the configuration there"
	case errors.As(err, &failed) && failed.Cause == cm.Rejected && failed.Reason == cm.ReasonConsumer &&
		bytes.HasPrefix(failed.Private, []byte("busy\x00")):
		return "as many ask it as may at a time: try again in half a minute"
	case errors.As(err, &failed) && failed.Cause == cm.Rejected && failed.Reason == cm.ReasonInvalidMTU:
		return "the MTU of the peer's underlay is smaller than ours"
	case about.Class == ipoib.ClassLegacy.String():
		return "it is of another make, such as Linux's ib_ipoib, which has nobody to ask: ping it without --rdma"
	case errors.As(err, &failed) && failed.Cause == cm.Rejected && failed.Reason == cm.ReasonInvalidServiceID:
		return "its agent answers nobody: peer_allow and peer_trust are empty there, or it is an older one"
	case errors.Is(err, ErrNoNeighbour):
		return "ping it once, so that its link-layer address is asked for, or give the GID of its underlay, which " +
			"status shows there"
	case about.Via == viaGiven:
		return "no neighbour with that address is known: give the GID of its underlay (status there shows it)"
	}
	return "is the underlay up, and the agent running there?"
}
