package agent

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"strconv"
	"time"

	"ipoibcm/cm"
	"ipoibcm/control"
	"ipoibcm/ipoib"
	"ipoibcm/peerrpc"
	"ipoibcm/rdmacm"
	"ipoibcm/rpcrdma/transport"
)

func leftOut(n int) string { return fmt.Sprintf("%d peers were left out: too many for one answer", n) }

// peerRequest answers a request about a peer. It connects to the peer's agent, and f asks that agent.
func (a *Agent) peerRequest(w http.ResponseWriter, r *http.Request, path string,
	f func(context.Context, *transport.End, control.PeerPath) (any, error)) {
	ip, err := netip.ParseAddr(r.URL.Query().Get("ip"))
	if err != nil || ip.IsMulticast() || ip.IsUnspecified() {
		fail(w, http.StatusBadRequest, fmt.Sprintf("ip %q is not an address of a host", r.URL.Query().Get("ip")),
			path+"?ip=10.0.0.2, or the GID of its underlay")
		return
	}
	ctx, cancel := context.WithTimeoutCause(r.Context(), peerWithin, fmt.Errorf("no answer within %v", peerWithin))
	defer cancel()
	e, about, err := a.peers.dial(ctx, ip.WithZone("").Unmap())
	if err != nil {
		status, hint := http.StatusBadGateway, a.peerHint(err, about)
		if errors.Is(err, errNoQP1) || errors.Is(err, errSelf) || errors.Is(err, errNoNeighbour) {
			status = http.StatusBadRequest
		}
		fail(w, status, fmt.Sprintf("ask the agent of %v: %v", ip, err), hint)
		return
	}
	defer a.peers.end(e)
	v, err := f(ctx, e, about)
	if err != nil {
		text := fmt.Sprintf("ask the agent of %v at %s: %v", ip, about.GID, err)
		fail(w, http.StatusBadGateway, text, a.answerHint(err, about))
		return
	}
	answer(w, v)
}

// answerHint returns what to do when a peer's agent refuses a call; empty: there is nothing to say.
func (a *Agent) answerHint(err error, about control.PeerPath) string {
	if !errors.Is(err, errNotTrusted) {
		return ""
	}
	return "put our GID, " + a.ourGID(about) + ", into peer_trust of the configuration there"
}

// ourGID returns our GID as the peer sees it, as well as we know.
func (a *Agent) ourGID(about control.PeerPath) string {
	g, err := netip.ParseAddr(about.GID)
	if err != nil {
		return "which status shows"
	}
	for _, own := range a.opt.Provider.Port().GIDs {
		if own.Addr().Unmap().Is4() == g.Unmap().Is4() && own.Addr().IsLinkLocalUnicast() == g.IsLinkLocalUnicast() {
			return own.String()
		}
	}
	return "which status shows"
}

// peerHint returns what to do when a peer could not be asked.
func (a *Agent) peerHint(err error, about control.PeerPath) string {
	var failed *rdmacm.FailedError
	switch {
	case errors.Is(err, errSelf):
		return "ask without --peer"
	case errors.As(err, &failed) && failed.Cause == cm.Rejected && failed.Reason == cm.ReasonConsumer &&
		bytes.HasPrefix(failed.Private, []byte("peer_allow\x00")):
		return "put our GID, " + a.ourGID(about) + ", into peer_allow (or peer_trust) of the configuration there"
	case errors.As(err, &failed) && failed.Cause == cm.Rejected && failed.Reason == cm.ReasonConsumer &&
		bytes.HasPrefix(failed.Private, []byte("busy\x00")):
		return "as many ask it as may at a time: try again in half a minute"
	case errors.As(err, &failed) && failed.Cause == cm.Rejected && failed.Reason == cm.ReasonInvalidMTU:
		return "the MTU of the peer's underlay is smaller than ours"
	case about.Class == ipoib.ClassLegacy.String():
		return "it is of another make, such as Linux's ib_ipoib, which has nobody to ask: ping it without --rdma"
	case errors.As(err, &failed) && failed.Cause == cm.Rejected && failed.Reason == cm.ReasonInvalidServiceID:
		return "its agent answers nobody: peer_allow and peer_trust are empty there, or it is an older one"
	case errors.Is(err, errNoNeighbour):
		return "ping it once, so that its link-layer address is asked for, or give the GID of its underlay, which " +
			"status shows there"
	case about.Via == viaGiven:
		return "no neighbour with that address is known: give the GID of its underlay (status there shows it)"
	}
	return "is the underlay up, and the agent running there?"
}

func (a *Agent) peerStatus(w http.ResponseWriter, r *http.Request) {
	a.peerRequest(w, r, control.PathPeerStatus,
		func(ctx context.Context, e *transport.End, about control.PeerPath) (any, error) {
			results, written, err := a.peers.call(ctx, e, peerrpc.ProcStatus, nil)
			if err != nil {
				return nil, err
			}
			doc, _, err := peerrpc.ParseDocument(results, written)
			out := control.PeerStatus{Version: control.Version, Path: about}
			if err == nil {
				err = json.Unmarshal(doc, &out.Status)
			}
			return out, err
		})
}

func (a *Agent) peerPing(w http.ResponseWriter, r *http.Request) {
	count := 1
	if s := r.URL.Query().Get("count"); s != "" {
		n, err := strconv.Atoi(s)
		if err != nil || n < 1 || n > control.MaxPings {
			fail(w, http.StatusBadRequest, fmt.Sprintf("count %q: must be 1 to %d", s, control.MaxPings), "")
			return
		}
		count = n
	}
	size := 0
	if s := r.URL.Query().Get("size"); s != "" {
		n, err := strconv.Atoi(s)
		if err != nil || n < 0 || n > control.MaxPingSize {
			fail(w, http.StatusBadRequest, fmt.Sprintf("size %q: must be 0 to %d", s, control.MaxPingSize), "")
			return
		}
		size = n
	}
	a.peerRequest(w, r, control.PathPeerPing,
		func(ctx context.Context, e *transport.End, about control.PeerPath) (any, error) {
			out := control.PeerPing{Version: control.Version, Path: about, Size: size}
			payload := make([]byte, size)
			_, _ = rand.Read(payload)
			for range count {
				start := time.Now()
				if err := a.peers.ping(ctx, e, payload); err != nil {
					return nil, err
				}
				out.MS = append(out.MS, float64(time.Since(start).Microseconds())/1000)
			}
			return out, nil
		})
}

// ping calls NULL, or ECHO if there is a payload, which must come back the same.
func (s *peerService) ping(ctx context.Context, e *transport.End, payload []byte) error {
	if len(payload) == 0 {
		_, _, err := s.call(ctx, e, peerrpc.ProcNull, nil)
		return err
	}
	results, written, err := s.call(ctx, e, peerrpc.ProcEcho, peerrpc.AppendEcho(nil, payload))
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

func (a *Agent) peerEvents(w http.ResponseWriter, r *http.Request) {
	var after uint64
	if s := r.URL.Query().Get("after"); s != "" {
		n, err := strconv.ParseUint(s, 10, 64)
		if err != nil {
			fail(w, http.StatusBadRequest, fmt.Sprintf("after %q: must be the number of an event", s), "")
			return
		}
		after = n
	}
	a.peerRequest(w, r, control.PathPeerEvents,
		func(ctx context.Context, e *transport.End, about control.PeerPath) (any, error) {
			results, written, err := a.peers.call(ctx, e, peerrpc.ProcEvents,
				peerrpc.Range{After: after, Max: peerrpc.MaxEvents}.Append(nil))
			if err != nil {
				return nil, err
			}
			out := control.PeerEvents{Version: control.Version, Path: about, Events: []control.Event{}}
			last, lines, err := peerrpc.ParseBatch(results, written)
			if err != nil {
				return nil, err
			}
			out.Last = last
			in := bufio.NewScanner(bytes.NewReader(lines))
			in.Buffer(nil, peerrpc.MaxDocument)
			for in.Scan() {
				var ev control.Event
				if err := json.Unmarshal(in.Bytes(), &ev); err != nil {
					return nil, err
				}
				out.Events = append(out.Events, ev)
			}
			return out, in.Err()
		})
}
