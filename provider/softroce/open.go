package softroce

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync/atomic"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ipoibcm/hostnet"
	"ipoibcm/ib"
	"ipoibcm/verbs"
)

// openSockets opens the receiving and sending sockets. With Options.GID it opens those of
// that GID's family only, else of both.
func (d *Device) openSockets(p *portState) error {
	fixed := d.opts.GID
	for _, v6 := range []bool{!d.firstGID.Is4(), d.firstGID.Is4()} { // the family of the data threads first
		if !fixed.IsZero() && fixed.Is4() == v6 {
			continue
		}
		switch err := d.openFamily(v6, fixed); {
		case err != nil && p.gidOf(!v6).IsZero():
			d.log.Debug("family not usable", "ipv6", v6, "error", err) // IPv6 may be off altogether
		case err != nil:
			return err
		}
	}
	return nil
}

func (d *Device) openFamily(v6 bool, fixed ib.GID) error {
	if !fixed.IsZero() {
		// Other agents may use the underlay too. So one socket takes the packets to this
		// GID, and another the packets to groups, which belong to no agent.
		if err := d.openReceiver(d.threads[0], v6, fixed.Addr(), false, true); err != nil {
			return err
		}
		d.openSiblings(v6)
	}
	if err := d.openReceiver(d.threads[0], v6, netip.Addr{}, true, !fixed.IsZero()); err != nil {
		return err
	}
	if fixed.IsZero() {
		d.openSiblings(v6)
	}
	// Senders of the other family open their sockets at first use: as a rule no peer on a
	// link has that family.
	now, pool := v6 != d.firstGID.Is4(), &d.pools[familyIndex(v6)]
	for i := range max(senderCount(), len(d.threads)) {
		s, err := d.newSender(d.threads[i%len(d.threads)], v6, false, now)
		if err != nil {
			return err
		}
		*pool = append(*pool, s)
	}
	var err error
	if v6 {
		d.sender6UD, err = d.newSender(d.threads[0], v6, true, now)
	}
	return err
}

// sendersOf returns the senders that paths of a family choose from.
func (d *Device) sendersOf(v6 bool) []*sender { return d.pools[familyIndex(v6)] }

// senderCount returns how many sending sockets each family gets: an eighth of the descriptors
// that the process may have, sendersPerFamily at most. openFamily opens at least one for each
// data thread.
func senderCount() int {
	var limit unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &limit) != nil {
		return 1
	}
	return int(max(1, min(sendersPerFamily, limit.Cur/8)))
}

func (d *Device) openReceiver(th *thread, v6 bool, addr netip.Addr, mcast, share bool) error {
	r := &receiver{dev: d, th: th, fd: -1, writable: -1, v6: v6, mcast: mcast, addr: addr, share: share}
	if th.index == 0 { // packets at the other old sockets are for queue pairs that are gone
		r.fd = d.adopt(r)
	}
	var err error
	if r.fd < 0 {
		if err = r.alone(); err == nil {
			r.fd, err = r.socket()
		}
		if err != nil {
			return err
		}
	}
	if r.wakeFD, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		unix.Close(r.fd)
		return fmt.Errorf("create eventfd: %w", err)
	}
	d.receivers = append(d.receivers, r)
	return nil
}

// socket opens the socket of r.
func (r *receiver) socket() (int, error) {
	d := r.dev
	return openSocket(r.v6, d.opts.Underlay, func(fd int) error {
		if err := r.prepare(fd); err != nil {
			return err
		}
		port := d.opts.udpPort()
		err := unix.Bind(fd, sockaddr(r.v6, r.addr, port, int(d.ifindex.Load())))
		switch {
		case errors.Is(err, unix.EADDRINUSE):
			return fmt.Errorf("UDP port %d on %s is taken, by another agent or by a kernel RDMA device (rdma_rxe): %w", port, d.opts.Underlay, err)
		case err != nil:
			return fmt.Errorf("bind UDP port %d on %s: %w", port, d.opts.Underlay, err)
		}
		return nil
	})
}

// alone returns an error if another socket receives what is sent to the address of r. Binding would
// not fail: agents that share an underlay set SO_REUSEADDR, because each has a socket for groups, and
// of two sockets on one address the kernel chooses the one that was bound last. The kernel is asked
// which sockets there are (sock_diag). If it does not say, the address counts as free.
func (r *receiver) alone() error {
	if !r.addr.IsValid() || r.th.index > 0 { // the threads share their address
		return nil
	}
	family := uint8(unix.AF_INET)
	if r.v6 {
		family = unix.AF_INET6
	}
	sockets, err := netlink.SocketDiagUDP(family)
	if err != nil {
		r.dev.log.Debug("the kernel does not say which UDP sockets there are, or not all", "error", err)
	}
	port, ifindex := r.dev.opts.udpPort(), uint32(r.dev.ifindex.Load())
	for _, s := range sockets {
		addr, _ := netip.AddrFromSlice(s.ID.Source)
		if addr.Unmap() == r.addr && s.ID.SourcePort == port && s.ID.DestinationPort == 0 &&
			(s.ID.Interface == 0 || s.ID.Interface == ifindex) {
			return fmt.Errorf("UDP port %d of %s is taken, by another agent: %w", port, r.addr, unix.EADDRINUSE)
		}
	}
	return nil
}

// prepare sets the options of a socket of r.
func (r *receiver) prepare(fd int) error {
	d := r.dev
	opts := recvOptions(r.v6)
	if r.share {
		opts = append(opts, reuseAddr)
	}
	if r.th.index > 0 {
		opts = append(opts, reusePort)
	}
	if err := setAll(fd, opts); err != nil {
		return err
	}
	d.count.recvBufferAsked.Store(uint64(d.opts.recvBuffer()))
	d.count.recvBuffer.Store(uint64(setBuffer(fd, unix.SO_RCVBUFFORCE, unix.SO_RCVBUF, d.opts.recvBuffer())))
	r.setGRO(fd)
	return nil
}

// setGRO makes the kernel merge packets that arrive at fd, unless UDP_GRO is off.
func (r *receiver) setGRO(fd int) {
	d := r.dev
	if d.isOff(gro) {
		_ = unix.SetsockoptInt(fd, unix.IPPROTO_UDP, optUDPGRO, 0) // it may have been on before
	} else if unix.SetsockoptInt(fd, unix.IPPROTO_UDP, optUDPGRO, 1) != nil {
		d.count.groRefused.Add(1)
		d.offloadOff(gro, "the kernel refuses it on this socket")
	}
}

// newSender makes a sender. If now is true it opens the socket at once, else newPath does.
func (d *Device) newSender(th *thread, v6, fragment, now bool) (*sender, error) {
	s := &sender{dev: d, th: th, v6: v6, gso: !fragment, fd: -1, guard: -1, index: int32(len(d.senders))}
	d.senders = append(d.senders, s)
	if now {
		return s, s.open()
	}
	return s, nil
}

// open opens the socket of s in the network namespace of the device, unless it has one.
func (s *sender) open() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.fd >= 0:
		return nil
	case s.dev.closing.Load():
		return verbs.ErrClosed
	}
	fd, err := s.dev.inNamespace(s.socket)
	if err != nil {
		return err
	}
	s.dev.ports[familyIndex(s.v6)].add(s.port)
	s.fd = fd
	return nil
}

// inNamespace opens a socket in the network namespace of the device.
func (d *Device) inNamespace(open func() (int, error)) (fd int, err error) {
	err = hostnet.InNamespace(d.monitor.ns, func() (err error) {
		fd, err = open()
		return err
	})
	return fd, err
}

// A portSet is the source ports of a family. It only grows, and receivers read it without
// a lock.
type portSet struct {
	list atomic.Pointer[[]uint16]
}

func (p *portSet) add(port uint16) {
	for {
		old := p.list.Load()
		list := []uint16{port}
		if old != nil {
			list = append(list, *old...)
		}
		if p.list.CompareAndSwap(old, &list) {
			return
		}
	}
}

func (p *portSet) has(port uint16) bool {
	list := p.list.Load()
	return list != nil && slices.Contains(*list, port)
}

// familyIndex returns the index of a family in Device.ports.
func familyIndex(v6 bool) int {
	if v6 {
		return 1
	}
	return 0
}

// socket opens the socket of s.
func (s *sender) socket() (int, error) { return openSocket(s.v6, s.dev.opts.Underlay, s.prepare) }

// prepare sets the options of a socket of s, and binds it to an unpredictable source port of
// 0xc000 to 0xffff. If s had a port it keeps that, because the ICRC of its connections covers it.
func (s *sender) prepare(fd int) (err error) {
	d := s.dev
	opts := sendOptions(s.v6, !s.gso, int(d.ifindex.Load()))
	if err := setAll(fd, append(opts, reuseAddr)); err != nil { // a connected socket will share the port
		return err
	}
	d.count.sendBufferAsked.Store(uint64(d.opts.sendBuffer()))
	d.count.sendBuffer.Store(uint64(setBuffer(fd, unix.SO_SNDBUFFORCE, unix.SO_SNDBUF, d.opts.sendBuffer())))
	// No packet is for these sockets: let the kernel throw away what comes.
	_ = setBuffer(fd, unix.SO_RCVBUFFORCE, unix.SO_RCVBUF, 0)
	port := s.port
	for range 64 {
		if s.port == 0 {
			port = uint16(random64()) | 0xc000
		}
		if err = unix.Bind(fd, sockaddr(s.v6, netip.Addr{}, port, 0)); !errors.Is(err, unix.EADDRINUSE) || s.port != 0 {
			break
		}
	}
	if err != nil {
		return fmt.Errorf("bind a source port: %w", err)
	}
	s.port = port
	if err := s.openGuard(); err != nil {
		return err
	}
	share(false, fd, s.guard)
	return nil
}

// share sets whether further sockets may bind the port of fds. It is on only while we
// bind a socket of ours, so every packet from the port is ours.
func share(on bool, fds ...int) {
	value := 0
	if on {
		value = 1
	}
	for _, fd := range fds {
		if fd >= 0 {
			_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, value) // cannot fail for UDP
		}
	}
}

// openGuard opens the guard of an IPv4 sender: a second socket on its port. The guard gets
// the ICMP messages about what the sender sends, so that the kernel learns no path MTU from
// them. Of two sockets alike on one port the kernel finds the one that was bound last
// (net/ipv4/udp.c, udp4_lib_lookup2), so the guard is bound after the sender's socket.
func (s *sender) openGuard() error {
	if s.v6 {
		return nil
	}
	s.closeGuard()
	var err error
	s.guard, err = openSocket(false, s.dev.opts.Underlay, func(fd int) error {
		err := setAll(fd, []sockopt{discover4(unix.IP_PMTUDISC_INTERFACE), reuseAddr})
		if err == nil {
			_ = setBuffer(fd, unix.SO_RCVBUFFORCE, unix.SO_RCVBUF, 0)
			err = unix.Bind(fd, sockaddr(false, netip.Addr{}, s.port, 0))
		}
		if err != nil {
			return fmt.Errorf("guard source port %d: %w", s.port, err)
		}
		return nil
	})
	return err
}

func (s *sender) closeGuard() {
	if s.guard >= 0 {
		unix.Close(s.guard)
		s.guard = -1
	}
}

// reopen puts new sockets in the place of the old ones, which are bound to a
// network device that is gone. The caller joins the groups again.
func (d *Device) reopen() error {
	if d.opts.testReopen != nil {
		if err := d.opts.testReopen(); err != nil {
			return err
		}
	}
	for _, r := range d.receivers {
		if r.th.index > 0 { // the first socket of a port cannot be bound while another has the port
			if err := closeUnder(r.fd); err != nil {
				return err
			}
		}
	}
	for _, r := range d.receivers {
		if r.th.index == 1 {
			if err := d.admit(r.v6); err != nil {
				return err
			}
		}
		err := replace(r.fd, r.socket)
		r.wake() // r waits for the old socket, which its poll holds
		if err != nil {
			return err
		}
	}
	d.steerSockets()
	for _, s := range d.senders {
		if err := s.reopen(); err != nil {
			return err
		}
	}
	return nil
}

// reopen puts a new socket in the place of that of s.
func (s *sender) reopen() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fd < 0 {
		return nil // s has no socket yet
	}
	s.disconnect()
	err := replace(s.fd, s.socket)
	if s.backlog.full {
		s.full(&s.backlog)
	}
	return err
}

// replace opens a socket under the descriptor number old. It closes the old socket first,
// because the new one needs its port.
func replace(old int, open func() (int, error)) error {
	if err := closeUnder(old); err != nil {
		return err
	}
	fd, err := open()
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return unix.Dup3(fd, old, unix.O_CLOEXEC)
}

// closeUnder closes the socket with the descriptor number old, and keeps the number.
func closeUnder(old int) error {
	null, err := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open /dev/null: %w", err)
	}
	err = unix.Dup3(null, old, unix.O_CLOEXEC)
	unix.Close(null)
	if err != nil {
		return fmt.Errorf("close old socket: %w", err)
	}
	return nil
}

// pickSender chooses a sender of th by port, the source port that the flow has by the
// generic rule. It returns nil if the family is not open.
func (th *thread) pickSender(v6 bool, port uint16) *sender {
	all, n := th.dev.sendersOf(v6), len(th.dev.threads)
	if len(all) == 0 {
		return nil
	}
	own := (len(all)-1-th.index)/n + 1 // every n-th sender belongs to th
	return all[int(port)%own*n+th.index]
}

// groupReceiver returns the receiver that joins groups of a family.
func (d *Device) groupReceiver(v6 bool) *receiver {
	for _, r := range d.receivers {
		if r.v6 == v6 && r.mcast {
			return r
		}
	}
	return nil
}
