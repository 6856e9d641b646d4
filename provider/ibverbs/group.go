package ibverbs

import (
	"fmt"
	"sync"

	"golang.org/x/sys/unix"

	"ipoibcm/ib"
	"ipoibcm/verbs"
)

// maxGroups bounds the groups of a device.
const maxGroups = 4096

// A memberships keeps the network device in the groups that QPs are attached to. Attaching programs
// the MAC filter only; without a membership the kernel's IP drops the packet before it reaches the
// RDMA device. Each group has a socket of its own, because the kernel bounds the groups of one
// socket.
type memberships struct {
	ifindex int

	mu     sync.Mutex
	groups map[ib.GID]*membership
}

type membership struct {
	fd    int
	users int
}

// join makes the device a member of mgid, or counts one more user of the membership.
func (m *memberships) join(mgid ib.GID) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if g := m.groups[mgid]; g != nil {
		g.users++
		return nil
	}
	if len(m.groups) >= maxGroups {
		return verbs.ErrNoResources
	}
	fd, err := joinGroup(mgid, m.ifindex)
	if err != nil {
		return err
	}
	if m.groups == nil {
		m.groups = map[ib.GID]*membership{}
	}
	m.groups[mgid] = &membership{fd, 1}
	return nil
}

// leave undoes one join.
func (m *memberships) leave(mgid ib.GID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	g := m.groups[mgid]
	if g == nil {
		return
	}
	if g.users--; g.users == 0 {
		unix.Close(g.fd)
		delete(m.groups, mgid)
	}
}

// renew joins every group again, after the link or its addresses came back. It returns how many
// groups it could not join.
func (m *memberships) renew() (lost int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for mgid, g := range m.groups {
		fd, err := joinGroup(mgid, m.ifindex)
		if err != nil {
			lost++
			continue
		}
		unix.Close(g.fd)
		g.fd = fd
	}
	return lost
}

func (m *memberships) close() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, g := range m.groups {
		unix.Close(g.fd)
	}
	m.groups = nil
}

// joinGroup returns a socket that is a member of mgid on a network device. The socket is not bound,
// so it receives no packets.
func joinGroup(mgid ib.GID, ifindex int) (fd int, err error) {
	family := unix.AF_INET6
	if mgid.Is4() {
		family = unix.AF_INET
	}
	if fd, err = unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err != nil {
		return -1, fmt.Errorf("open socket for group %v: %w", mgid, err)
	}
	if mgid.Is4() {
		q := &unix.IPMreqn{Ifindex: int32(ifindex)}
		copy(q.Multiaddr[:], mgid[12:])
		err = unix.SetsockoptIPMreqn(fd, unix.IPPROTO_IP, unix.IP_ADD_MEMBERSHIP, q)
	} else {
		q := &unix.IPv6Mreq{Multiaddr: mgid, Interface: uint32(ifindex)}
		err = unix.SetsockoptIPv6Mreq(fd, unix.IPPROTO_IPV6, unix.IPV6_JOIN_GROUP, q)
	}
	if err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("join group %v: %w", mgid, err)
	}
	return fd, nil
}
