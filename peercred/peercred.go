// Package peercred finds out which user is at the other end of a UNIX socket, as the kernel knows it
// (SO_PEERCRED, unix(7)). It is for servers that allow changes only to some users.
package peercred

import (
	"context"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// userKey is the key of a client's user in the context of its requests.
type userKey struct{}

// WithUser returns ctx with the user at the other end of c. If the kernel knows no user, because c is no
// UNIX socket, it returns ctx unchanged.
func WithUser(ctx context.Context, c net.Conn) context.Context {
	s, ok := c.(syscall.Conn)
	if !ok {
		return ctx
	}
	raw, err := s.SyscallConn()
	if err != nil {
		return ctx
	}
	var cred *unix.Ucred
	if raw.Control(func(fd uintptr) {
		cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}) != nil || err != nil {
		return ctx
	}
	return As(ctx, int(cred.Uid))
}

// As returns ctx with a user ID.
func As(ctx context.Context, uid int) context.Context {
	return context.WithValue(ctx, userKey{}, uid)
}

// MayChange reports whether a request comes from root or from our own user. It returns false if the user is
// not known.
func MayChange(ctx context.Context) bool {
	uid, known := ctx.Value(userKey{}).(int)
	return known && (uid == 0 || uid == os.Geteuid())
}
