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

	"ipoibcm/peercred"
)

// share gives the members of a group access to the control socket at path. If there is no such group, or we
// may not give the socket to the group, only the socket's owner has access.
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
	err = os.Chown(path, -1, gid)
	if errors.Is(err, os.ErrPermission) {
		return nil
	}
	if err == nil {
		err = os.Chmod(path, 0o660)
	}
	if err != nil {
		return fmt.Errorf("control socket: %w", err)
	}
	return nil
}

// withUser returns ctx with the user at the other end of a connection.
func withUser(ctx context.Context, c net.Conn) context.Context {
	if cl, ok := c.(*client); ok {
		c = cl.Conn
	}
	return peercred.WithUser(ctx, c)
}

// owners lets h serve only clients that may change things: root and the agent's own user.
func owners(h handler) handler {
	return func(w http.ResponseWriter, r *http.Request) error {
		if !peercred.MayChange(r.Context()) {
			return refusal{http.StatusForbidden,
				fmt.Sprintf("%s %s: only for root and the agent's own user", r.Method, r.URL.Path),
				"become root; members of the socket's group may look, and not change settings or read packets"}
		}
		return h(w, r)
	}
}
