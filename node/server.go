package node

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"time"

	"ipoibcm/peercred"
)

// serve answers on l until ctx ends.
func (s *Service) serve(ctx context.Context, l net.Listener) error {
	srv := &http.Server{Handler: s.handler(), ConnContext: peercred.WithUser, ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout: 10 * time.Second, MaxHeaderBytes: 16 << 10}
	done := make(chan error, 1)
	go func() { done <- srv.Serve(l) }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	// Requests under way may finish. Else the next service would undo what they began.
	patience, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopWithin)
	defer cancel()
	if srv.Shutdown(patience) != nil {
		srv.Close()
	}
	<-done
	return nil
}

// handler returns the handler of requests. It answers only root and our own user.
func (s *Service) handler() http.Handler {
	mux := http.NewServeMux()
	handle := func(pattern string, f func(r *http.Request) (any, error)) {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			if !peercred.MayChange(r.Context()) {
				answer(w, http.StatusForbidden, answerError{"only root may ask"})
				return
			}
			r.Body = http.MaxBytesReader(w, r.Body, maxBody)
			v, err := f(r)
			if err != nil {
				answer(w, http.StatusConflict, answerError{err.Error()})
				return
			}
			answer(w, http.StatusOK, v)
		})
	}
	handle("POST "+pathAttachments, posted(s.add))
	handle("DELETE "+pathAttachments, func(r *http.Request) (any, error) { return struct{}{}, s.delete(keyOf(r)) })
	handle("GET "+pathAttachments, func(r *http.Request) (any, error) { return struct{}{}, s.check(keyOf(r)) })
	handle("GET "+pathStatus, func(r *http.Request) (any, error) { return s.status(r.URL.Query().Get("master")) })
	handle("POST "+pathGC, posted(func(_ context.Context, gc GC) error { return s.collect(gc) }))
	return mux
}

func keyOf(r *http.Request) Key {
	q := r.URL.Query()
	return Key{q.Get("container_id"), q.Get("ifname")}
}

// posted returns the handler of requests whose body is for do.
func posted[T any](do func(context.Context, T) error) func(r *http.Request) (any, error) {
	return func(r *http.Request) (any, error) {
		d := json.NewDecoder(r.Body)
		d.DisallowUnknownFields()
		var v T
		if err := d.Decode(&v); err != nil {
			return nil, fmt.Errorf("the request is not understood: %w", err)
		}
		return struct{}{}, do(r.Context(), v)
	}
}

func answer(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	json.NewEncoder(w).Encode(v)
}
