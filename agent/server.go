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

// A handler answers a request, or returns the error that the client is told.
type handler func(http.ResponseWriter, *http.Request) error

// ServeHTTP answers a request, also with the error that h returns.
func (h handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if err := h(w, r); err != nil {
		fail(w, err)
	}
}

// handler returns the handler of all requests.
func (a *Agent) handler() http.Handler {
	mux := http.NewServeMux()
	get := func(path string, h handler) { mux.Handle("GET "+path, h) }
	get(control.PathStatus, document(paged(a.viewStatus)))
	get(control.PathConns, document(a.pagedConns))
	get(control.PathNeigh, document(paged(a.viewNeigh)))
	get(control.PathRoutes, document(paged(a.viewRoutes)))
	get(control.PathGroups, document(paged(a.viewGroups)))
	get(control.PathStats, document(paged(a.viewStats)))
	get(control.PathMembers, document(paged(a.viewMembers)))
	get(control.PathExplain, document(a.explain))
	get(control.PathPeerStatus, document(a.peerStatus))
	get(control.PathPeerPing, document(a.peerPing))
	get(control.PathPeerEvents, document(a.peerEvents))
	get(control.PathRuntime, owners(document(a.viewRuntime)))
	get(control.PathEvents, a.events)
	get(control.PathCapture, owners(a.capture))
	metrics := a.metrics()
	get(control.PathMetrics, func(w http.ResponseWriter, r *http.Request) error {
		deadline(w, writeWithin)
		metrics.ServeHTTP(w, r)
		return nil
	})
	mux.Handle("POST "+control.PathReload, owners(document(a.serveReload)))
	mux.Handle("/", handler(func(_ http.ResponseWriter, r *http.Request) error {
		return refusal{http.StatusNotFound, fmt.Sprintf("%s %s: not part of this API", r.Method, r.URL.Path),
			"see " + control.PathStatus}
	}))
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

// document answers with what view returns, as the client may see it.
func document[T any](view func(*http.Request) (T, error)) handler {
	return func(w http.ResponseWriter, r *http.Request) error {
		v, err := view(r)
		if err != nil {
			return err
		}
		show(w, r, v)
		return nil
	}
}

// pageOf returns the page that a request asks for.
func pageOf(r *http.Request) (control.Page, error) {
	page, err := control.ParsePage(r.URL.Query().Get)
	if err != nil {
		return page, refusal{http.StatusBadRequest, err.Error(), r.URL.Path + "?limit=100"}
	}
	return page, nil
}

// paged returns the page that a request asks for, of the document that view returns.
func paged[T any](view func(context.Context) (T, error)) func(*http.Request) (T, error) {
	return func(r *http.Request) (v T, err error) {
		page, err := pageOf(r)
		if err != nil {
			return v, err
		}
		v, err = view(r.Context())
		if list, ok := any(&v).(interface{ Select(control.Page) }); ok {
			list.Select(page)
		}
		return v, err
	}
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

func (a *Agent) explain(r *http.Request) (out control.Explanation, err error) {
	ip, err := netip.ParseAddr(r.URL.Query().Get("ip"))
	if err != nil {
		return out, refusal{http.StatusBadRequest, fmt.Sprintf("ip %q is not an address", r.URL.Query().Get("ip")),
			control.PathExplain + "?ip=10.0.0.2"}
	}
	ip = ip.WithZone("").Unmap()
	hop, err := a.nextHop(r.Context(), ip)
	if err != nil {
		return out, refusal{http.StatusServiceUnavailable, err.Error(), "try again; the interface may be going"}
	}
	return ask(r.Context(), a, func() control.Explanation { return a.viewExplain(ip, hop) })
}

// show answers with a document, as the client may see it.
func show[T any](w http.ResponseWriter, r *http.Request, v T) {
	if !peercred.MayChange(r.Context()) {
		v = forLookers(v)
	}
	answer(w, v)
}

func (a *Agent) events(w http.ResponseWriter, r *http.Request) error {
	if err := mayFollow(w); err != nil {
		return err
	}
	since, err := pastOf(r)
	if err != nil {
		return err
	}
	all := peercred.MayChange(r.Context())
	s := a.hub.subscribe(since, !all)
	if s == nil {
		return refusal{http.StatusServiceUnavailable, errFollowers.Error(), "stop another monitor first"}
	}
	defer a.hub.unsubscribe(s)
	deadline(w, 0)
	w.Header().Set("Content-Type", "application/x-ndjson")
	flush := http.NewResponseController(w).Flush
	flush()
	enc := json.NewEncoder(w)
	for {
		select {
		case e, ok := <-s.ch:
			if !all {
				e = forLookers(e)
			}
			if !ok || enc.Encode(e) != nil {
				return nil
			}
			flush()
		case <-r.Context().Done():
			return nil
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
		return time.Time{}, refusal{http.StatusBadRequest, fmt.Sprintf("since %q: want a duration such as 10m", s),
			control.PathEvents + "?since=10m"}
	}
	return time.Now().Add(-d), nil
}

// number returns the number that a request has for key; zero if it has none. want says what it must be.
func number(r *http.Request, key string, least, most uint64, want string) (uint64, error) {
	s := r.URL.Query().Get(key)
	if s == "" {
		return 0, nil
	}
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil || n < least || n > most {
		return 0, refusal{http.StatusBadRequest, fmt.Sprintf("%s %q: must be %s", key, s, want), ""}
	}
	return n, nil
}

func (a *Agent) capture(w http.ResponseWriter, r *http.Request) error {
	snap, err := number(r, "snap", 1, 1<<18, fmt.Sprintf("1 to %d octets", 1<<18))
	if err != nil {
		return err
	}
	if err := mayFollow(w); err != nil {
		return err
	}
	deadline(w, 0)
	w.Header().Set("Content-Type", "application/x-pcapng")
	rc := http.NewResponseController(w)
	err = a.taps.capture(r.Context(), w, func() { rc.Flush() }, a.opt.Provider.Port().UnderlayIf, int(snap))
	if err != nil {
		return refusal{http.StatusServiceUnavailable, err.Error(), "stop another capture first"}
	}
	return nil
}
