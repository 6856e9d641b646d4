package softroce

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"ipoibcm/ib"
	"ipoibcm/verbs"
)

// maxGroups bounds the groups of a device.
const maxGroups = 4096

// A groups says which queue pairs are attached to which multicast group. It also joins and
// leaves the groups on the sockets: without a membership the kernel passes nothing.
type groups struct {
	dev   *Device
	table atomic.Pointer[map[ib.GID][]*qp] // replaced by every change
	mu    sync.Mutex
}

// members returns the queue pairs attached to mgid. It takes no lock.
func (g *groups) members(mgid ib.GID) []*qp {
	if t := g.table.Load(); t != nil {
		return (*t)[mgid]
	}
	return nil
}

func (g *groups) attach(mgid ib.GID, q *qp) error {
	if !mgid.IsMulticast() && !slices.Contains(g.dev.Port().GIDs, mgid) {
		return fmt.Errorf("%w: %v is neither a multicast group nor one of our GIDs", verbs.ErrInvalid, mgid)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	next := g.copy()
	list := next[mgid]
	for _, m := range list {
		if m == q {
			return nil
		}
	}
	if len(list) == 0 {
		if len(next) >= maxGroups {
			return verbs.ErrNoResources
		}
		if err := g.dev.membership(mgid, true); err != nil {
			return err
		}
	}
	next[mgid] = append(append([]*qp(nil), list...), q)
	g.table.Store(&next)
	return nil
}

func (g *groups) detach(mgid ib.GID, q *qp) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	next := g.copy()
	if !g.drop(next, mgid, q) {
		return fmt.Errorf("%w: not attached to %v", verbs.ErrInvalid, mgid)
	}
	g.table.Store(&next)
	return nil
}

// detachAll detaches q from all groups.
func (g *groups) detachAll(q *qp) {
	g.mu.Lock()
	defer g.mu.Unlock()
	next := g.copy()
	for mgid := range next {
		g.drop(next, mgid, q)
	}
	g.table.Store(&next)
}

func (g *groups) drop(t map[ib.GID][]*qp, mgid ib.GID, q *qp) bool {
	var rest []*qp
	for _, m := range t[mgid] {
		if m != q {
			rest = append(rest, m)
		}
	}
	if len(rest) == len(t[mgid]) {
		return false
	}
	t[mgid] = rest
	if len(rest) == 0 {
		delete(t, mgid)
		_ = g.dev.membership(mgid, false) // the membership may be gone with the link
	}
	return true
}

// rejoin renews every membership, after the link or its addresses came back.
func (g *groups) rejoin() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for mgid := range g.copy() {
		_ = g.dev.membership(mgid, false)
		if err := g.dev.membership(mgid, true); err != nil {
			g.dev.count.joinErrors.Add(1)
			g.dev.log.Warn("multicast group lost", "mgid", mgid, "error", err)
		}
	}
}

func (g *groups) copy() map[ib.GID][]*qp {
	next := make(map[ib.GID][]*qp)
	if t := g.table.Load(); t != nil {
		for k, v := range *t {
			next[k] = v
		}
	}
	return next
}

// membership joins or leaves mgid on the socket that takes groups in. A GID of
// our own needs no membership.
func (d *Device) membership(mgid ib.GID, join bool) error {
	if !mgid.IsMulticast() {
		return nil
	}
	r := d.groupReceiver(!mgid.Is4())
	if r == nil {
		return fmt.Errorf("%w: no socket for group %v on %s", verbs.ErrInvalid, mgid, d.opts.Underlay)
	}
	var err error
	if r.v6 {
		m := &unix.IPv6Mreq{Multiaddr: mgid, Interface: uint32(d.ifindex.Load())}
		name := unix.IPV6_JOIN_GROUP
		if !join {
			name = unix.IPV6_LEAVE_GROUP
		}
		err = unix.SetsockoptIPv6Mreq(r.fd, unix.IPPROTO_IPV6, name, m)
	} else {
		m := &unix.IPMreqn{Ifindex: d.ifindex.Load()}
		copy(m.Multiaddr[:], mgid[12:])
		name := unix.IP_ADD_MEMBERSHIP
		if !join {
			name = unix.IP_DROP_MEMBERSHIP
		}
		err = unix.SetsockoptIPMreqn(r.fd, unix.IPPROTO_IP, name, m)
	}
	if join && d.adopted && errors.Is(err, unix.EADDRINUSE) {
		return nil // the socket was a member when it was taken over
	}
	if err != nil {
		return fmt.Errorf("membership of %v on %s: %w", mgid, d.opts.Underlay, err)
	}
	return nil
}
