//go:build !noetcd

package etcd

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"sync"

	"google.golang.org/grpc/credentials"
)

// A fault is the reason why the last connection to the cluster failed; nil if it did not fail. We keep it
// because gRPC tries other servers meanwhile, and its error for a request is only that no answer came in
// time.
type fault struct {
	mu  sync.Mutex
	err error
}

func (f *fault) set(err error) {
	f.mu.Lock()
	f.err = err
	f.mu.Unlock()
}

func (f *fault) get() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.err
}

// dial connects by TCP.
func (s *source) dial(ctx context.Context, addr string) (net.Conn, error) {
	c, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
	if err != nil {
		s.fault.set(err)
		return nil, err
	}
	if s.tls != nil { // the handshaker notes the outcome
		return c, nil
	}
	return &firstRead{Conn: c, fault: &s.fault}, nil
}

// A handshaker notes in the fault why a TLS handshake failed. After a handshake, firstRead notes the
// outcome of the first read: with TLS 1.3 the server checks our certificate after the handshake.
type handshaker struct {
	credentials.TransportCredentials
	*fault
}

// ClientHandshake makes the handshake of one connection, and notes an error.
func (h handshaker) ClientHandshake(ctx context.Context, authority string, c net.Conn) (net.Conn,
	credentials.AuthInfo, error) {
	c, info, err := h.TransportCredentials.ClientHandshake(ctx, authority, c)
	if err != nil {
		h.set(err)
		return c, info, err
	}
	return &firstRead{Conn: c, fault: h.fault}, info, nil
}

// Clone returns a copy that notes outcomes in the same fault.
func (h handshaker) Clone() credentials.TransportCredentials {
	return handshaker{h.TransportCredentials.Clone(), h.fault}
}

// A firstRead is a connection that notes the outcome of its first read.
type firstRead struct {
	net.Conn
	fault *fault
	done  bool
}

// Read notes the outcome if it is the first.
func (r *firstRead) Read(b []byte) (int, error) {
	n, err := r.Conn.Read(b)
	if r.done {
		return n, err
	}
	r.done = true
	var alert tls.AlertError
	if err == nil || errors.As(err, &alert) || r.fault.get() == nil && !errors.Is(err, net.ErrClosed) {
		r.fault.set(err) // keep an earlier fault: it explains more than a broken connection
	}
	return n, err
}
