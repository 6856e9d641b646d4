package agent

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"net/netip"
	"time"

	"ipoibcm/cm"
	"ipoibcm/control"
	"ipoibcm/ipoib"
	"ipoibcm/peerrpc"
	"ipoibcm/rdmacm"
	"ipoibcm/rpcrdma/transport"
)

func leftOut(n int) string { return fmt.Sprintf("%d peers were left out: too many for one answer", n) }

// askPeer answers a request about a peer. It connects to the peer's agent, and f asks that agent.
func askPeer[T any](a *Agent, r *http.Request,
	f func(context.Context, *transport.End, control.PeerPath) (T, error)) (v T, err error) {
	ip, err := netip.ParseAddr(r.URL.Query().Get("ip"))
	if err != nil || ip.IsMulticast() || ip.IsUnspecified() {
		return v, refusal{http.StatusBadRequest,
			fmt.Sprintf("ip %q is not an address of a host", r.URL.Query().Get("ip")),
			r.URL.Path + "?ip=10.0.0.2, or the GID of its underlay"}
	}
	ctx, cancel := context.WithTimeoutCause(r.Context(), peerWithin, fmt.Errorf("no answer within %v", peerWithin))
	defer cancel()
	e, about, err := a.peers.dial(ctx, ip.WithZone("").Unmap())
	if err != nil {
		status := http.StatusBadGateway
		if errors.Is(err, errNoQP1) || errors.Is(err, errSelf) || errors.Is(err, errNoNeighbour) {
			status = http.StatusBadRequest
		}
		return v, refusal{status, fmt.Sprintf("ask the agent of %v: %v", ip, err), a.peerHint(err, about)}
	}
	defer a.peers.end(e)
	if v, err = f(ctx, e, about); err != nil {
		return v, refusal{http.StatusBadGateway, fmt.Sprintf("ask the agent of %v at %s: %v", ip, about.GID, err),
			a.answerHint(err, about)}
	}
	return v, nil
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

func (a *Agent) peerStatus(r *http.Request) (control.PeerStatus, error) {
	return askPeer(a, r, func(ctx context.Context, e *transport.End, about control.PeerPath) (control.PeerStatus, error) {
		out := control.PeerStatus{Version: control.Version, Path: about}
		results, written, err := a.peers.call(ctx, e, peerrpc.ProcStatus, nil)
		if err != nil {
			return out, err
		}
		doc, _, err := peerrpc.ParseDocument(results, written)
		if err != nil {
			return out, err
		}
		return out, json.Unmarshal(doc, &out.Status)
	})
}

func (a *Agent) peerPing(r *http.Request) (out control.PeerPing, err error) {
	count, err := number(r, "count", 1, control.MaxPings, fmt.Sprintf("1 to %d", control.MaxPings))
	if err != nil {
		return out, err
	}
	size, err := number(r, "size", 0, control.MaxPingSize, fmt.Sprintf("0 to %d", control.MaxPingSize))
	if err != nil {
		return out, err
	}
	return askPeer(a, r, func(ctx context.Context, e *transport.End, about control.PeerPath) (control.PeerPing, error) {
		out := control.PeerPing{Version: control.Version, Path: about, Size: int(size)}
		payload := make([]byte, size)
		_, _ = rand.Read(payload)
		for range max(1, count) {
			start := time.Now()
			if err := a.peers.ping(ctx, e, payload); err != nil {
				return out, err
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

func (a *Agent) peerEvents(r *http.Request) (out control.PeerEvents, err error) {
	after, err := number(r, "after", 0, math.MaxUint64, "the number of an event")
	if err != nil {
		return out, err
	}
	return askPeer(a, r, func(ctx context.Context, e *transport.End, about control.PeerPath) (control.PeerEvents, error) {
		out := control.PeerEvents{Version: control.Version, Path: about, Events: []control.Event{}}
		results, written, err := a.peers.call(ctx, e, peerrpc.ProcEvents,
			peerrpc.Range{After: after, Max: peerrpc.MaxEvents}.Append(nil))
		if err != nil {
			return out, err
		}
		last, lines, err := peerrpc.ParseBatch(results, written)
		if err != nil {
			return out, err
		}
		out.Last = last
		for line := range bytes.Lines(lines) {
			var ev control.Event
			if err := json.Unmarshal(line, &ev); err != nil {
				return out, err
			}
			out.Events = append(out.Events, ev)
		}
		return out, nil
	})
}
