package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/user"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// share gives the members of a group access to the control socket at path. Where
// there is no such group, or it is not ours to give, the socket stays the owner's.
func share(path, group string) error {
	if group == "" {
		return nil
	}
	g, err := user.LookupGroup(group)
	if err != nil {
		return nil
	}
	gid, err := strconv.Atoi(g.Gid)
	if err != nil {
		return fmt.Errorf("control socket: group %s has number %q", group, g.Gid)
	}
	if err := os.Chown(path, -1, gid); errors.Is(err, os.ErrPermission) {
		return nil
	} else if err != nil {
		return fmt.Errorf("control socket: %w", err)
	}
	if err := os.Chmod(path, 0o660); err != nil {
		return fmt.Errorf("control socket: %w", err)
	}
	return nil
}

// userKey is the key of a client's user in the context of its requests.
type userKey struct{}

// withUser notes who is at the other end of a connection, as the kernel says.
func withUser(ctx context.Context, c net.Conn) context.Context {
	if cl, ok := c.(*client); ok {
		c = cl.Conn
	}
	s, ok := c.(syscall.Conn)
	if !ok {
		return ctx
	}
	raw, err := s.SyscallConn()
	if err != nil {
		return ctx
	}
	var cred *unix.Ucred
	if raw.Control(func(fd uintptr) { cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }) != nil || err != nil {
		return ctx
	}
	return context.WithValue(ctx, userKey{}, int(cred.Uid))
}

// mayChange reports whether a request comes from root or from our own user: whoever
// else may open the socket may look, and neither change anything nor read packets.
func mayChange(ctx context.Context) bool {
	uid, known := ctx.Value(userKey{}).(int)
	return known && (uid == 0 || uid == os.Geteuid())
}

// owners lets h serve those who may change things.
func owners(h http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if !mayChange(r.Context()) {
			fail(w, http.StatusForbidden, fmt.Sprintf("%s %s: only for root and the agent's own user", r.Method, r.URL.Path),
				"become root; members of the socket's group may look, and not change settings or read packets")
			return
		}
		h(w, r)
	}
}
