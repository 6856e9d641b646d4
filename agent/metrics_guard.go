package agent

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Bounds of the files that guard the metrics.
const (
	maxGuardFile = 1 << 20
	maxUsers     = 64
)

// A watched is a file with the value that was parsed from it when it last changed. While the file cannot be
// used, the old value stays in force: a certificate is often replaced in steps.
type watched[T any] struct {
	path  string
	parse func([]byte) (T, error)
	log   *slog.Logger

	mu    sync.Mutex
	value T
	seen  os.FileInfo
	bad   string // the last error, so that it is reported once
}

// open reads the file for the first time.
func (w *watched[T]) open() error {
	_, err := w.read()
	return err
}

// get returns the value in force, and logs an error of the file.
func (w *watched[T]) get() T {
	v, err := w.read()
	if err != nil && w.log != nil {
		w.log.Warn("a file of the metrics cannot be used, the old one stays in force", "err", err)
	}
	return v
}

// read returns the value in force. It returns an error if the file cannot be used, but each error only once
// in a row.
func (w *watched[T]) read() (T, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	st, err := os.Stat(w.path)
	if err == nil && w.seen != nil && os.SameFile(st, w.seen) && st.ModTime().Equal(w.seen.ModTime()) &&
		st.Size() == w.seen.Size() {
		return w.value, nil
	}
	var b []byte
	if err == nil {
		b, err = content(w.path)
	}
	var v T
	if err == nil {
		v, err = w.parse(b)
	}
	if err != nil {
		err = fmt.Errorf("%s: %w", w.path, err)
		if w.bad == err.Error() {
			return w.value, nil
		}
		w.bad = err.Error()
		return w.value, err
	}
	w.value, w.seen, w.bad = v, st, ""
	return v, nil
}

func content(path string) ([]byte, error) {
	// O_NONBLOCK, because opening a pipe would wait until somebody writes to it.
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, errors.Unwrap(err)
	}
	defer f.Close()
	if st, err := f.Stat(); err != nil || !st.Mode().IsRegular() {
		return nil, errors.Join(err, errors.New("not a regular file"))
	}
	b, err := io.ReadAll(io.LimitReader(f, maxGuardFile+1))
	if err == nil && len(b) > maxGuardFile {
		err = fmt.Errorf("more than %d octets", maxGuardFile)
	}
	return b, err
}

// newCertificate watches a PEM file with a chain and its key.
func newCertificate(path string, log *slog.Logger) *watched[*tls.Certificate] {
	return &watched[*tls.Certificate]{path: path, log: log, parse: func(b []byte) (*tls.Certificate, error) {
		c, err := tls.X509KeyPair(b, b)
		return &c, err
	}}
}

// passwords are the hashes of passwords by user.
type passwords map[string][sha256.Size]byte

// newUsers watches a file with lines of user:password.
func newUsers(path string, log *slog.Logger) *watched[passwords] {
	return &watched[passwords]{path: path, log: log, parse: parseUsers}
}

// parseUsers reads user:password, one in a line; # begins a comment.
func parseUsers(b []byte) (passwords, error) {
	users := passwords{}
	lines := bufio.NewScanner(bytes.NewReader(b))
	for n := 1; lines.Scan(); n++ {
		line := strings.TrimSuffix(lines.Text(), "\r")
		if line == "" || line[0] == '#' {
			continue
		}
		user, password, _ := strings.Cut(line, ":")
		if user == "" || password == "" {
			return nil, fmt.Errorf("line %d: want user:password", n)
		}
		if len(users) == maxUsers {
			return nil, fmt.Errorf("more than %d users", maxUsers)
		}
		if _, twice := users[user]; twice {
			return nil, fmt.Errorf("line %d: user %q is there twice", n, user)
		}
		users[user] = sha256.Sum256([]byte(password))
	}
	if err := lines.Err(); err != nil {
		return nil, err
	}
	if len(users) == 0 {
		return nil, errors.New("no user: want user:password")
	}
	return users, nil
}

// permits reports whether a request names a user and that user's password. The time it takes does not
// depend on which of the two was wrong.
func (s passwords) permits(r *http.Request) bool {
	user, password, ok := r.BasicAuth()
	if !ok {
		return false
	}
	want, known := s[user]
	got := sha256.Sum256([]byte(password))
	same := subtle.ConstantTimeCompare(got[:], want[:]) == 1
	return known && same
}

// guarded serves h to users that the file permits. A host that has sent many wrong passwords is refused for
// a while, even with the right one.
func guarded(users *watched[passwords], h http.Handler) http.Handler {
	var tried attempts
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !tried.mayTry(r.RemoteAddr, time.Now()) {
			w.Header().Set("Retry-After", strconv.Itoa(int(1/attemptRate)))
			http.Error(w, "too many wrong passwords", http.StatusTooManyRequests)
			return
		}
		if !users.get().permits(r) {
			if _, _, named := r.BasicAuth(); named {
				tried.wrong(r.RemoteAddr, time.Now())
			}
			w.Header().Set("WWW-Authenticate", `Basic realm="ipoibcm", charset="UTF-8"`)
			http.Error(w, "a user and a password are needed", http.StatusUnauthorized)
			return
		}
		h.ServeHTTP(w, r)
	})
}

// metricsServer returns the server of the metrics over TCP, with TLS and passwords where they are
// configured.
func (a *Agent) metricsServer() (*http.Server, error) {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", a.metrics())
	srv := &http.Server{Handler: mux, ReadTimeout: 5 * time.Second, WriteTimeout: 10 * time.Second,
		IdleTimeout:    time.Minute,
		MaxHeaderBytes: 16 << 10, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, 0)}
	if a.opt.MetricsAuth != "" {
		users := newUsers(a.opt.MetricsAuth, a.log)
		if err := users.open(); err != nil {
			return nil, fmt.Errorf("metrics_auth: %w", err)
		}
		srv.Handler = guarded(users, mux)
	}
	if a.opt.MetricsTLS != "" {
		cert := newCertificate(a.opt.MetricsTLS, a.log)
		if err := cert.open(); err != nil {
			return nil, fmt.Errorf("metrics_tls: %w", err)
		}
		srv.TLSConfig = &tls.Config{MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"},
			GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return cert.get(), nil }}
	}
	return srv, nil
}
