package softroce

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"ipoibcm/verbs"
)

const (
	// connectAfter is how many calls in a row for one path show that its packets
	// are worth a socket of their own.
	connectAfter = 64
	// connectAgain is how many calls a sender makes at least by its unconnected socket before
	// it replaces its connected socket: opening one takes as long as some ten calls.
	connectAgain = 1024
	// connectIdle is the time between two looks at a connected socket. If it was not used
	// between them, it is closed.
	connectIdle = 500 * time.Millisecond
)

// A connectedSocket is the second socket of a sender, on the same source port, that is
// connected to the destination of one path. The kernel looks the route up for
// each packet of an unconnected socket, but keeps it for a connected one.
//
// There is none for IPv4: the kernel puts a running number into the identification of what
// a connected IPv4 socket sends, and the ICRC covers that field.
type connectedSocket struct {
	fd      int
	path    *path
	used    bool // since the last look
	backlog backlog
}

// A connector decides when a sender gets a connected socket.
type connector struct {
	conn   *connectedSocket // nil: there is none
	next   *path            // the path of the latest call
	streak int              // calls for next in a row
	calls  int              // calls by the unconnected socket since the last attempt
	busy   bool             // connectFor runs, or is about to
}

// connectedFD returns the connected socket for p, -1 if there is none. It begins to open
// one after connectAfter calls for p in a row. If another path has a connected socket, it
// also waits for connectAgain calls. The caller holds s.mu.
func (s *sender) connectedFD(p *path) (fd int) {
	if s.conn != nil && s.conn.path == p {
		s.conn.used = true
		return s.conn.fd
	}
	if !s.mayConnect(p) {
		return -1
	}
	s.calls++
	if s.next != p {
		s.next, s.streak = p, 0
	}
	if s.streak++; s.streak < connectAfter || s.calls < connectAgain && s.conn != nil {
		return -1
	}
	s.calls, s.streak = 0, 0
	s.startConnect(p)
	return -1
}

// mayConnect reports whether p may have a connected socket.
func (s *sender) mayConnect(p *path) bool {
	return p.v6 && s.gso && !s.dev.isOff(connected) && !p.attr.DGID.IsMulticast()
}

// startConnect begins to open a connected socket for p. The caller holds s.mu.
func (s *sender) startConnect(p *path) {
	if s.fd >= 0 && !s.busy {
		s.busy = true
		s.dev.connecting.Go(func() { s.connectFor(p) })
	}
}

// connectFor gives s a connected socket for p. It runs on a goroutine of its own,
// because it takes long and has to enter the network namespace of the device.
func (s *sender) connectFor(p *path) {
	class := p.class()
	fd, err := s.dev.inNamespace(func() (int, error) { return s.connect(p, class) })
	s.mu.Lock()
	defer s.mu.Unlock()
	s.busy = false
	switch {
	case err != nil:
		s.dev.count.connectFailed.Add(1)
		s.dev.log.Debug("no connected socket", "dgid", p.attr.DGID, "err", err)
	case s.fd < 0 || s.dev.isOff(connected) || p.class() != class || p.ifindex != s.dev.ifindex.Load() || !s.dev.port.Load().has(p.attr.SGID):
		unix.Close(fd) // too late: s, p or the port has changed
	default:
		s.disconnect()
		c := &connectedSocket{fd: fd, path: p, used: true}
		s.conn = c
		s.handOver(c)
		time.AfterFunc(connectIdle, func() { s.look(c) })
	}
}

// look closes c if it was not used since the last look and no packet waits for it. Else it
// looks again after connectIdle.
func (s *sender) look(c *connectedSocket) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.conn != c:
	case c.used || c.backlog.full:
		c.used = false
		time.AfterFunc(connectIdle, func() { s.look(c) })
	default:
		s.disconnect()
	}
}

// disconnect closes the connected socket, if there is one. What waited for it then waits
// for the other socket of s. The caller holds s.mu.
func (s *sender) disconnect() {
	if c := s.conn; c != nil {
		unix.Close(c.fd)
		s.conn = nil
		s.adopt(&c.backlog)
	}
}

// disconnectAll closes all connected sockets: the addresses or the network device that
// they are bound to may be gone.
func (d *Device) disconnectAll() {
	for _, s := range d.senders {
		s.mu.Lock()
		s.disconnect()
		s.mu.Unlock()
	}
}

var _ verbs.Trimmer = (*Device)(nil)

// Trim implements [verbs.Trimmer]: it closes the connected sockets.
func (d *Device) Trim() { d.disconnectAll() }

// connect opens a socket for p on the source port of s.
func (s *sender) connect(p *path, class uint8) (int, error) {
	return openSocket(s.v6, s.dev.opts.Underlay, func(fd int) error { return s.connectTo(fd, p, class) })
}

func (s *sender) connectTo(fd int, p *path, class uint8) error {
	d := s.dev
	opts := append(sendOptions(s.v6, false, int(d.ifindex.Load())),
		reuseAddr,
		sockopt{unix.IPPROTO_IPV6, unix.IPV6_TCLASS, int(class), "IPV6_TCLASS", false},
		sockopt{unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS, int(p.attr.HopLimit), "IPV6_UNICAST_HOPS", false})
	if err := setAll(fd, opts); err != nil {
		return err
	}
	setBuffer(fd, unix.SO_SNDBUFFORCE, unix.SO_SNDBUF, d.opts.sendBuffer())
	_ = setBuffer(fd, unix.SO_RCVBUFFORCE, unix.SO_RCVBUF, 0)
	if err := s.bindToo(fd, p); err != nil {
		return fmt.Errorf("bind a connected socket to %v port %d: %w", p.attr.SGID, s.port, err)
	}
	if err := unix.Connect(fd, sockaddr(s.v6, p.attr.DGID.Addr(), d.opts.udpPort(), int(p.ifindex))); err != nil {
		return fmt.Errorf("connect a socket to %v: %w", p.attr.DGID, err)
	}
	return nil
}

// bindToo binds a further socket to the source port of s.
func (s *sender) bindToo(fd int, p *path) error {
	s.mu.Lock() // s.fd, s.guard and s.conn must not change meanwhile
	defer s.mu.Unlock()
	have := []int{s.fd, s.guard}
	if s.conn != nil {
		have = append(have, s.conn.fd)
	}
	share(true, have...)
	err := unix.Bind(fd, sockaddr(s.v6, p.attr.SGID.Addr(), s.port, int(p.ifindex)))
	share(false, append(have, fd)...)
	return err
}

// tryConnect tests connected sockets, and switches them off if that fails. It connects one
// to an address of our own, which sends nothing.
func (d *Device) tryConnect() {
	if d.opts.NoConnect {
		d.offloadOff(connected, switchedOff)
		return
	}
	if len(d.sendersOf(true)) == 0 {
		d.offloadOff(connected, onlyIPv6)
		return
	}
	own, fd := d.port.Load().gidOf(false), -1
	if own.IsZero() {
		return // an IPv6 address may come later; without one there is nothing to try
	}
	p, err := d.newPath(verbs.AHAttr{DGID: own, SGID: own}, false, 0, 0)
	if err == nil {
		fd, err = p.sender.connect(p, p.class())
	}
	if err == nil {
		unix.Close(fd)
		return
	}
	d.count.connectFailed.Add(1)
	d.log.Warn("an offload does not work and is not used", "offload", offloadNames[connected].what, "err", err)
	d.offloadOff(connected, "its test failed: "+err.Error())
}
