package softroce

import (
	"errors"
	"fmt"
	"maps"
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
func (g *groups) members(mgid ib.GID) []*qp { return (*g.table.Load())[mgid] }

func (g *groups) attach(mgid ib.GID, q *qp) error {
	if !mgid.IsMulticast() && !slices.Contains(g.dev.Port().GIDs, mgid) {
		return fmt.Errorf("%w: %v is neither a multicast group nor one of our GIDs", verbs.ErrInvalid, mgid)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	next := g.copy()
	list := next[mgid]
	if slices.Contains(list, q) {
		return nil
	}
	if len(list) == 0 {
		if len(next) >= maxGroups {
			return verbs.ErrNoResources
		}
		if err := g.dev.membership(mgid, true); err != nil {
			return err
		}
	}
	next[mgid] = append(slices.Clone(list), q)
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
	i := slices.Index(t[mgid], q)
	if i < 0 {
		return false
	}
	if t[mgid] = slices.Delete(slices.Clone(t[mgid]), i, i+1); len(t[mgid]) == 0 {
		delete(t, mgid)
		_ = g.dev.membership(mgid, false) // the membership may be gone with the link
	}
	return true
}

// rejoin renews every membership, after the link or its addresses came back.
func (g *groups) rejoin() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for mgid := range *g.table.Load() {
		_ = g.dev.membership(mgid, false)
		if err := g.dev.membership(mgid, true); err != nil {
			g.dev.count.joinErrors.Add(1)
			g.dev.log.Warn("multicast group lost", "mgid", mgid, "error", err)
		}
	}
}

func (g *groups) copy() map[ib.GID][]*qp { return maps.Clone(*g.table.Load()) }

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
	name4, name6 := unix.IP_ADD_MEMBERSHIP, unix.IPV6_JOIN_GROUP
	if !join {
		name4, name6 = unix.IP_DROP_MEMBERSHIP, unix.IPV6_LEAVE_GROUP
	}
	var err error
	if ifindex := d.ifindex.Load(); r.v6 {
		m := &unix.IPv6Mreq{Multiaddr: mgid, Interface: uint32(ifindex)}
		err = unix.SetsockoptIPv6Mreq(r.fd, unix.IPPROTO_IPV6, name6, m)
	} else {
		m := &unix.IPMreqn{Multiaddr: [4]byte(mgid[12:]), Ifindex: ifindex}
		err = unix.SetsockoptIPMreqn(r.fd, unix.IPPROTO_IP, name4, m)
	}
	if join && d.adopted && errors.Is(err, unix.EADDRINUSE) {
		return nil // the socket was a member when it was taken over
	}
	if err != nil {
		return fmt.Errorf("membership of %v on %s: %w", mgid, d.opts.Underlay, err)
	}
	return nil
}
