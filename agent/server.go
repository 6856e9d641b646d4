package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"ipoibcm/control"
	"ipoibcm/peercred"
)

// listen opens the control socket. It replaces a socket that nobody answers on.
func listen(path string) (net.Listener, error) {
	if conn, err := net.DialTimeout("unix", path, time.Second); err == nil {
		conn.Close()
		return nil, fmt.Errorf("control socket %s: an agent answers there already; choose another --control or --name", path)
	}
	if st, err := os.Lstat(path); err == nil {
		if st.Mode().Type() != os.ModeSocket {
			return nil, fmt.Errorf("control socket %s: there is something else; choose another --control", path)
		}
		os.Remove(path)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, fmt.Errorf("control socket: %w", err)
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("control socket: %w", err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, errors.Join(fmt.Errorf("control socket: %w", err), l.Close())
	}
	return l, nil
}

// handler returns the handler of all requests. Streams end with ctx.
func (a *Agent) handler(ctx context.Context) http.Handler {
	mux := http.NewServeMux()
	get := func(path string, h http.HandlerFunc) { mux.HandleFunc("GET "+path, h) }
	document(get, control.PathStatus, a.viewStatus)
	document(get, control.PathConns, a.viewConns)
	document(get, control.PathNeigh, a.viewNeigh)
	document(get, control.PathRoutes, a.viewRoutes)
	document(get, control.PathGroups, a.viewGroups)
	document(get, control.PathStats, a.viewStats)
	document(get, control.PathMembers, a.viewMembers)
	get(control.PathExplain, a.explain)
	get(control.PathPeerStatus, a.peerStatus)
	get(control.PathPeerPing, a.peerPing)
	get(control.PathPeerEvents, a.peerEvents)
	get(control.PathRuntime, owners(func(w http.ResponseWriter, _ *http.Request) { answer(w, a.viewRuntime()) }))
	get(control.PathEvents, func(w http.ResponseWriter, r *http.Request) { a.events(ctx, w, r) })
	get(control.PathCapture, owners(func(w http.ResponseWriter, r *http.Request) { a.capture(ctx, w, r) }))
	metrics := a.metrics()
	get(control.PathMetrics, func(w http.ResponseWriter, r *http.Request) {
		deadline(w, writeWithin)
		metrics.ServeHTTP(w, r)
	})
	mux.HandleFunc("POST "+control.PathReload, owners(a.serveReload))
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		fail(w, http.StatusNotFound, fmt.Sprintf("%s %s: not part of this API", r.Method, r.URL.Path),
			"see "+control.PathStatus)
	})
	return mux
}

// serve answers on l until ctx ends.
func (a *Agent) serve(ctx context.Context, l net.Listener) error {
	return a.serveUntil(ctx, a.newServer(ctx), l)
}

// serveUntil has srv answer on l until ctx ends, with at most maxClients clients at a time.
func (a *Agent) serveUntil(ctx context.Context, srv *http.Server, l net.Listener) error {
	done := make(chan error, 1)
	go func() { done <- srv.Serve(newClients(l, &a.clientsRefused)) }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	srv.Close()
	<-done
	return nil
}

// document serves at path what view returns.
func document[T any](get func(string, http.HandlerFunc), path string, view func(context.Context) (T, error)) {
	get(path, func(w http.ResponseWriter, r *http.Request) {
		page, err := control.ParsePage(r.URL.Query().Get)
		if err != nil {
			fail(w, http.StatusBadRequest, err.Error(), path+"?limit=100")
			return
		}
		v, err := view(r.Context())
		if err != nil {
			fail(w, http.StatusServiceUnavailable, err.Error(), "try again; the agent may be stopping")
			return
		}
		if list, ok := any(&v).(interface{ Select(control.Page) }); ok {
			list.Select(page)
		}
		show(w, r, v)
	})
}

// ask runs view on the driver's goroutine, between two events.
func ask[T any](ctx context.Context, a *Agent, view func() T) (v T, err error) {
	ctx, cancel := context.WithTimeout(ctx, queryWithin)
	defer cancel()
	done := make(chan T, 1)
	select {
	case a.queries <- func() { done <- view() }:
		return <-done, nil // the driver runs view at once
	case <-ctx.Done():
		return v, errors.New("the agent did not answer in time")
	}
}

func (a *Agent) explain(w http.ResponseWriter, r *http.Request) {
	ip, err := netip.ParseAddr(r.URL.Query().Get("ip"))
	if err != nil {
		fail(w, http.StatusBadRequest, fmt.Sprintf("ip %q is not an address", r.URL.Query().Get("ip")),
			control.PathExplain+"?ip=10.0.0.2")
		return
	}
	ip = ip.WithZone("").Unmap()
	hop, err := a.nextHop(r.Context(), ip)
	if err != nil {
		fail(w, http.StatusServiceUnavailable, err.Error(), "try again; the interface may be going")
		return
	}
	e, err := ask(r.Context(), a, func() control.Explanation { return a.viewExplain(ip, hop) })
	if err != nil {
		fail(w, http.StatusServiceUnavailable, err.Error(), "try again; the agent may be stopping")
		return
	}
	show(w, r, e)
}

// show answers with a document, as the client may see it.
func show[T any](w http.ResponseWriter, r *http.Request, v T) {
	if !peercred.MayChange(r.Context()) {
		v = forLookers(v)
	}
	answer(w, v)
}

func (a *Agent) events(ctx context.Context, w http.ResponseWriter, r *http.Request) {
	if !follows(w) {
		return
	}
	since, err := pastOf(r)
	if err != nil {
		fail(w, http.StatusBadRequest, err.Error(), control.PathEvents+"?since=10m")
		return
	}
	s := a.hub.subscribe(since)
	if s == nil {
		fail(w, http.StatusServiceUnavailable, errFollowers.Error(), "stop another monitor first")
		return
	}
	defer a.hub.unsubscribe(s)
	deadline(w, 0)
	w.Header().Set("Content-Type", "application/x-ndjson")
	flush := http.NewResponseController(w).Flush
	flush()
	enc, all := json.NewEncoder(w), peercred.MayChange(r.Context())
	for {
		select {
		case e, ok := <-s.ch:
			if !all {
				e = forLookers(e)
			}
			if !ok || enc.Encode(e) != nil {
				return
			}
			flush()
		case <-r.Context().Done():
			return
		case <-ctx.Done():
			return
		}
	}
}

// pastOf returns the time after which a request wants past events; zero means none.
func pastOf(r *http.Request) (time.Time, error) {
	s := r.URL.Query().Get("since")
	if s == "" {
		return time.Time{}, nil
	}
	d, err := time.ParseDuration(s)
	if err != nil || d <= 0 {
		return time.Time{}, fmt.Errorf("since %q: want a duration such as 10m", s)
	}
	return time.Now().Add(-d), nil
}

func (a *Agent) capture(ctx context.Context, w http.ResponseWriter, r *http.Request) {
	snap := 0
	if s := r.URL.Query().Get("snap"); s != "" {
		n, err := strconv.Atoi(s)
		if err != nil || n < 1 || n > 1<<18 {
			fail(w, http.StatusBadRequest, fmt.Sprintf("snap %q: must be 1 to %d octets", s, 1<<18), "")
			return
		}
		snap = n
	}
	if !follows(w) {
		return
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	defer context.AfterFunc(r.Context(), stop)()
	deadline(w, 0)
	w.Header().Set("Content-Type", "application/x-pcapng")
	rc := http.NewResponseController(w)
	if err := a.taps.capture(ctx, w, func() { rc.Flush() }, a.opt.Provider.Port().UnderlayIf, snap); err != nil {
		fail(w, http.StatusServiceUnavailable, err.Error(), "stop another capture first")
	}
}
