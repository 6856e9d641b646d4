package agent

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"math"
	"net/http"
	"net/netip"
	"time"

	"ipoibcm/control"
	"ipoibcm/ib"
	"ipoibcm/ipoib"
	"ipoibcm/peerrpc/peers"
)

// askPeer answers a request about a peer. It connects to the peer's agent, and f asks that agent.
func askPeer[T any](a *Agent, r *http.Request,
	f func(context.Context, *peers.Conn, control.PeerPath) (T, error)) (v T, err error) {
	ip, err := netip.ParseAddr(r.URL.Query().Get("ip"))
	if err != nil || ip.IsMulticast() || ip.IsUnspecified() {
		return v, refusal{http.StatusBadRequest,
			fmt.Sprintf("ip %q is not an address of a host", r.URL.Query().Get("ip")),
			r.URL.Path + "?ip=10.0.0.2, or the GID of its underlay"}
	}
	ctx, cancel := context.WithTimeoutCause(r.Context(), peers.Within, fmt.Errorf("no answer within %v", peers.Within))
	defer cancel()
	c, about, err := a.peers.Dial(ctx, ip.WithZone("").Unmap())
	if err != nil {
		status := http.StatusBadGateway
		if errors.Is(err, peers.ErrNoQP1) || errors.Is(err, peers.ErrSelf) || errors.Is(err, peers.ErrNoNeighbour) {
			status = http.StatusBadRequest
		}
		why := refusal{status, fmt.Sprintf("ask the agent of %v: %v", ip, err), a.peers.DialHint(err, about)}
		if peers.Rejected(err) {
			return v, rejection{why}
		}
		return v, why
	}
	defer c.Close()
	if v, err = f(ctx, c, about); err != nil {
		return v, refusal{http.StatusBadGateway, fmt.Sprintf("ask the agent of %v at %s: %v", ip, about.GID, err),
			a.peers.CallHint(err, about)}
	}
	return v, nil
}

func (a *Agent) peerStatus(r *http.Request) (control.PeerStatus, error) {
	return askPeer(a, r, func(ctx context.Context, c *peers.Conn, about control.PeerPath) (control.PeerStatus, error) {
		out := control.PeerStatus{Version: control.Version, Path: about}
		var err error
		out.Status, err = c.Status(ctx)
		return out, err
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
	return askPeer(a, r, func(ctx context.Context, c *peers.Conn, about control.PeerPath) (control.PeerPing, error) {
		out := control.PeerPing{Version: control.Version, Path: about, Size: int(size)}
		payload := make([]byte, size)
		_, _ = rand.Read(payload)
		for range max(1, count) {
			start := time.Now()
			if err := c.Ping(ctx, payload); err != nil {
				return out, err
			}
			out.MS = append(out.MS, float64(time.Since(start).Microseconds())/1000)
		}
		return out, nil
	})
}

func (a *Agent) peerEvents(r *http.Request) (out control.PeerEvents, err error) {
	after, err := number(r, "after", 0, math.MaxUint64, "the number of an event")
	if err != nil {
		return out, err
	}
	return askPeer(a, r, func(ctx context.Context, c *peers.Conn, about control.PeerPath) (control.PeerEvents, error) {
		out := control.PeerEvents{Version: control.Version, Path: about}
		var err error
		out.Events, out.Last, err = c.Events(ctx, after)
		return out, err
	})
}

// DefaultPeerAllow allows whoever is on the same Ethernet, because routers forward no packets from link-local
// addresses. It applies unless the configuration has another list.
var DefaultPeerAllow = []netip.Prefix{netip.MustParsePrefix("fe80::/10")}

// newPeers returns the service that lets agents ask each other.
func (a *Agent) newPeers() *peers.Service {
	return peers.New(peers.Options{Provider: a.opt.Provider, Allow: a.opt.PeerAllow, Trust: a.opt.PeerTrust, Log: a.log,
		Status: a.viewStatus, Neighbour: a.neighbour,
		Publish: func(kind, text string, out *bool) {
			e := a.event("peers", kind, text)
			e.Out = out
			a.hub.publish(e)
		}})
}

// neighbour returns the GID of the neighbour with address ip, and the class of its interface; zero: there is none.
func (a *Agent) neighbour(ctx context.Context, ip netip.Addr) (g ib.GID, class ipoib.Class, err error) {
	hop, err := a.nextHop(ctx, ip)
	if err != nil {
		return g, class, err
	}
	now, err := ask(ctx, a, func() ipoib.Explanation { return a.m.Explain(ip, hop) })
	return now.Link.GID, now.Class, err
}
