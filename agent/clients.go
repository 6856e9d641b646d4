package agent

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"ipoibcm/control"
	"ipoibcm/peercred"
)

// Bounds of the control socket's clients.
const (
	// maxClients bounds the connections at a time: as many as may follow events, as may follow packets,
	// and as many others.
	maxClients = 3 * maxFollowers
	// maxMembers is how many of them may be of users who may only look, the members of the socket's
	// group, so that they leave places to root. maxMemberFollowers is how many of these may follow events.
	maxMembers         = maxClients / 2
	maxMemberFollowers = maxFollowers / 2
	// maxTurnedAway is how many connections beyond maxClients are accepted, only to get an error for
	// each request.
	maxTurnedAway = 8
	// reservedDescriptors is how many descriptors are kept for short requests. followDescriptors must
	// be free before another client may follow.
	reservedDescriptors = 4
	followDescriptors   = 16
	// clientIdle is how long a connection stays open without a request. writeWithin is how long a
	// client has to read an answer that is one document.
	clientIdle  = 30 * time.Second
	writeWithin = 10 * time.Second
)

// clients is a listener that serves at most maxClients connections, maxMembers of them of users who may
// only look. It accepts up to maxTurnedAway more of each, whose requests get an error, and closes any
// others at once. When the process has no descriptor left, the listener closes one of the eventfds that
// it keeps in reserve.
type clients struct {
	net.Listener
	n       atomic.Int64 // connections
	members atomic.Int64 // those of users who may only look
	refused *atomic.Uint64
	mu      sync.Mutex
	reserve []int // eventfds
	closed  bool
}

// A client is one connection.
type client struct {
	net.Conn
	of      *clients
	member  bool   // its user may only look
	turned  string // why its requests are refused; empty: they are served
	closing sync.Once
}

// newClients takes over l.
func newClients(l net.Listener, refused *atomic.Uint64) *clients {
	c := &clients{Listener: l, refused: refused}
	c.keepSpare()
	return c
}

func (l *clients) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if (errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE)) && l.giveSpare() {
			continue
		}
		if err != nil {
			return nil, err
		}
		c := &client{Conn: conn, of: l, member: !peercred.MayChange(peercred.WithUser(context.Background(), conn))}
		over, bound := l.n.Add(1)-maxClients, fmt.Sprintf("%d clients", maxClients)
		if c.member {
			if n := l.members.Add(1) - maxMembers; n > over {
				over, bound = n, fmt.Sprintf("%d clients of others than root", maxMembers)
			}
		}
		if over <= 0 {
			return c, nil
		}
		l.refused.Add(1)
		if over <= maxTurnedAway {
			c.turned = bound + " are connected already"
			return c, nil
		}
		c.Close()
	}
}

// Close closes the listener and the descriptors in reserve.
func (l *clients) Close() error {
	l.mu.Lock()
	l.closed = true
	l.mu.Unlock()
	for l.giveSpare() {
	}
	return l.Listener.Close()
}

// giveSpare closes one descriptor of the reserve. It returns false if the reserve is empty.
func (l *clients) giveSpare() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := len(l.reserve)
	if n == 0 {
		return false
	}
	unix.Close(l.reserve[n-1])
	l.reserve = l.reserve[:n-1]
	return true
}

// keepSpare fills the reserve, as far as the process has descriptors left.
func (l *clients) keepSpare() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for !l.closed && len(l.reserve) < reservedDescriptors {
		fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
		if err != nil {
			return
		}
		l.reserve = append(l.reserve, fd)
	}
}

func (c *client) Close() error {
	err := c.Conn.Close()
	c.closing.Do(func() {
		c.of.n.Add(-1)
		if c.member {
			c.of.members.Add(-1)
		}
		c.of.keepSpare()
	})
	return err
}

// clientKey is the key of the connection in a request's context.
type clientKey struct{}

// withClient adds the connection, and the user at its other end, to the context of its requests.
func withClient(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(withUser(ctx, c), clientKey{}, c)
}

// turnAway refuses the requests of connections beyond maxClients.
func turnAway(h http.Handler) handler {
	return func(w http.ResponseWriter, r *http.Request) error {
		if c, ok := r.Context().Value(clientKey{}).(*client); ok && c.turned != "" {
			w.Header().Set("Connection", "close")
			return refusal{http.StatusServiceUnavailable, c.turned, "stop a monitor or a capture first"}
		}
		h.ServeHTTP(w, r)
		return nil
	}
}

// mayFollow returns an error if no more clients may follow events or packets. A follower keeps its
// descriptor for as long as it likes.
func mayFollow(w http.ResponseWriter) error {
	free := freeDescriptors()
	if free >= followDescriptors {
		return nil
	}
	w.Header().Set("Connection", "close")
	return refusal{http.StatusServiceUnavailable, fmt.Sprintf("the process has only %d descriptors left", free),
		"stop another monitor or capture first, or raise the limit (LimitNOFILE=)"}
}

// freeDescriptors returns how many descriptors the process can still open.
func freeDescriptors() int {
	var limit unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &limit) != nil {
		return maxClients
	}
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return 0 // not even one to read the directory
	}
	return int(min(limit.Cur, 1<<20)) - (len(fds) - 1) // the one that ReadDir opened is free again
}

// newServer returns the server of the control socket, whose requests end with ctx. Its own messages go to
// the log: a write to anything else could wait for a reader that stalls.
func (a *Agent) newServer(ctx context.Context) *http.Server {
	return &http.Server{
		Handler: turnAway(a.handler()), ConnContext: withClient,
		BaseContext:       func(net.Listener) context.Context { return ctx },
		ReadHeaderTimeout: 5 * time.Second, IdleTimeout: cmp.Or(a.clientIdle, clientIdle), MaxHeaderBytes: 16 << 10,
		ErrorLog: slog.NewLogLogger(a.log.Handler(), slog.LevelWarn),
	}
}

// deadline bounds the time that writing an answer takes. Zero sets no limit. Each answer sets its own, else
// it would have that of the answer before it on the connection.
func deadline(w http.ResponseWriter, d time.Duration) {
	var at time.Time
	if d > 0 {
		at = time.Now().Add(d)
	}
	_ = http.NewResponseController(w).SetWriteDeadline(at) // a recorder of a test has none
}

// A refusal is an error that a client is told with its HTTP status, and with what to do about it.
type refusal struct {
	status     int
	text, hint string
}

// Error returns what is wrong.
func (r refusal) Error() string { return r.text }

// A rejection is a refusal because another host's agent answered with a REJ.
type rejection struct{ refusal }

// Unwrap returns the refusal.
func (r rejection) Unwrap() error { return r.refusal }

// fail answers with err. If err is no refusal, the agent could not be asked.
func fail(w http.ResponseWriter, err error) {
	why := refusal{http.StatusServiceUnavailable, err.Error(), "try again; the agent may be stopping"}
	errors.As(err, &why)
	deadline(w, writeWithin)
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(why.status)
	_, rejected := errors.AsType[rejection](err)
	json.NewEncoder(w).Encode(control.Error{Version: control.Version, Error: why.text, Hint: why.hint, Rejected: rejected})
}

func answer(w http.ResponseWriter, v any) {
	deadline(w, writeWithin)
	w.Header().Set("Content-Type", "application/json")
	json.NewEncoder(w).Encode(v)
}
