package softroce

import (
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	// backlogOctets bounds the octets of packets that wait for room in one socket. They
	// wait because nobody sends a datagram again. Once they are that many, further packets
	// are lost and counted.
	backlogOctets = 256 << 10
	// backlogTries is how often in a row the first call of a backlog may find no room
	// although the kernel reported some. The next time its packets are lost.
	backlogTries = 16
	// reportAgain is the time after which a kernel that refused to report free space in a socket is asked again.
	reportAgain = 10 * time.Millisecond
	// turnsToRoom is how many turns a receiver that never sleeps takes from one look for room in sockets to
	// the next.
	turnsToRoom = 16
	// pollsToRecheck is after how many polls in a row that reported no writable socket the event loop checks
	// whether any send buffer is still full.
	pollsToRecheck = 64
	// roomEvents is how many sockets with room goOn looks at in one call.
	roomEvents = 16
)

// A backlog keeps what waits for room in the send buffer of one socket: calls whose packets
// are already made, and queue pairs that have more to send. While it is full, all that is
// to leave by the socket waits in it, so nothing is overtaken.
//
// The lock of the sender guards it.
type backlog struct {
	full   bool // the kernel had no room, and will report when it has
	tries  int  // how often the first call found no room although the kernel reported some
	octets int  // of all calls
	calls  []pendingCall
	qps    []*qp
}

// A pendingCall is one sendmsg call that found no room. It has a copy of its packets,
// because the user may have their buffers back before there is room.
type pendingCall struct {
	path    *path
	n, size int // packets, and octets of each but the last
	buf     []byte
}

// backlogOf returns the backlog that packets on p would wait in.
func (s *sender) backlogOf(p *path) *backlog {
	if s.conn != nil && s.conn.path == p {
		return &s.conn.backlog
	}
	return &s.backlog
}

// wait puts q, which has more to send, into b. The caller holds q.mu and the lock of the
// sender.
func (b *backlog) wait(q *qp) {
	if !q.waits {
		q.waits = true
		b.qps = append(b.qps, q)
	}
}

// park puts the call that sc holds into b. It returns false if b takes no more.
func (s *sender) park(b *backlog, sc *scratch, p *path, n, size int) bool {
	if b.octets >= backlogOctets {
		return false
	}
	c := pendingCall{path: p, n: n, size: size}
	for i := range sc.iov[:sc.niov] {
		c.buf = append(c.buf, octetsOf(&sc.iov[i])...)
	}
	b.calls = append(b.calls, c)
	b.octets += len(c.buf)
	if !b.full {
		s.full(b)
	}
	if b == &s.backlog && s.conn == nil && s.mayConnect(p) {
		s.startConnect(p) // packets that wait on p then delay no other path of this port
	}
	return true
}

// full marks b as full, and makes the kernel report when the socket of b has room.
func (s *sender) full(b *backlog) {
	fd, which := s.fd, int32(0)
	if b != &s.backlog {
		fd, which = s.conn.fd, 1
	}
	b.full = true
	if !s.th.full.Swap(true) && s.fd >= 0 {
		if r := s.th.eventLoop(); r != nil {
			r.wake() // it may sleep without watching writable
		}
	}
	ev := unix.EpollEvent{Events: unix.EPOLLOUT | unix.EPOLLONESHOT, Fd: s.index, Pad: which}
	err := unix.EpollCtl(s.th.writable, unix.EPOLL_CTL_MOD, fd, &ev)
	if err != nil { // fd is not in the set yet, or is another socket by now
		err = unix.EpollCtl(s.th.writable, unix.EPOLL_CTL_ADD, fd, &ev)
	}
	if err != nil { // without the kernel's word b would wait for ever
		s.dev.log.Warn("cannot wait for room in a socket", "err", err)
		time.AfterFunc(reportAgain, func() { s.fullAgain(b) })
	}
}

// fullAgain asks the kernel again to report room in the socket of b, if that is still open.
func (s *sender) fullAgain(b *backlog) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fd >= 0 && b.full && (b == &s.backlog || s.conn != nil && b == &s.conn.backlog) {
		s.full(b)
	}
}

// handOver moves the calls for the path of c from the backlog of s to that of c, so that no
// later packet on c overtakes them.
func (s *sender) handOver(c *connectedSocket) {
	from, to := &s.backlog, &c.backlog
	rest := from.calls[:0]
	for _, call := range from.calls {
		if call.path != c.path {
			rest = append(rest, call)
			continue
		}
		to.calls = append(to.calls, call)
		from.octets, to.octets = from.octets-len(call.buf), to.octets+len(call.buf)
	}
	clear(from.calls[len(rest):])
	from.calls = rest
	if len(to.calls) > 0 {
		s.full(to) // c may have room at once
	}
}

// adopt moves b, the backlog of a connected socket that is closed, into the backlog of s.
func (s *sender) adopt(b *backlog) {
	if s.fd < 0 || len(b.calls) == 0 && len(b.qps) == 0 {
		return
	}
	own := &s.backlog
	own.calls, own.octets = append(own.calls, b.calls...), own.octets+b.octets
	own.qps = append(own.qps, b.qps...)
	*b = backlog{}
	if !own.full {
		s.full(own)
	}
}

// drain sends the calls of b, and returns the queue pairs that may send again. If a call
// finds no room again, it returns none.
func (s *sender) drain(b *backlog) []*qp {
	b.full = false
	for len(b.calls) > 0 && !b.full {
		c := b.calls[0]
		b.calls[0] = pendingCall{}
		b.calls, b.octets = b.calls[1:], b.octets-len(c.buf)
		errno := s.callAgain(&c)
		switch to := s.backlogOf(c.path); {
		case errno == unix.EAGAIN && to != b: // the call closed the connected socket: to has the rest now
			to.calls, to.octets = append([]pendingCall{c}, to.calls...), to.octets+len(c.buf)
			s.full(to)
		case errno == unix.EAGAIN && b.tries < backlogTries:
			b.tries++
			b.calls, b.octets = append([]pendingCall{c}, b.calls...), b.octets+len(c.buf)
			s.full(b)
		case errno == 0:
			s.sent(c.path, c.n)
			b.tries = 0
		default:
			s.lost(errno, c.n)
			b.tries = 0
		}
	}
	if b.full {
		return nil
	}
	b.calls = nil
	qps := b.qps
	b.qps = nil
	return qps
}

// callAgain makes a call again that found no room.
func (s *sender) callAgain(c *pendingCall) unix.Errno {
	var msg unix.Msghdr
	iov := unix.Iovec{Base: &c.buf[0]}
	iov.SetLen(len(c.buf))
	if c.path.ifindex != s.dev.ifindex.Load() {
		c.path.bind()
	}
	return s.call(&msg, &iov, 1, c.path, c.n, c.size)
}

// recheckFull clears th.full unless a backlog of th is full. It clears first and checks then, so that a backlog
// that becomes full meanwhile sets it again.
func (th *thread) recheckFull() {
	th.full.Store(false)
	for _, s := range th.dev.senders {
		s.mu.Lock()
		full := s.th == th && (s.backlog.full || s.conn != nil && s.conn.backlog.full)
		s.mu.Unlock()
		if full {
			th.full.Store(true)
			return
		}
	}
}

// goOn sends what waited for the sockets that have room now.
func (r *receiver) goOn(now time.Time) {
	d := r.dev
	var events [roomEvents]unix.EpollEvent
	n, err := unix.EpollWait(r.writable, events[:], 0)
	if err != nil {
		return // EINTR: r.writable is still readable
	}
	for _, ev := range events[:n] {
		s := d.senders[ev.Fd]
		s.mu.Lock()
		var qps []*qp
		switch {
		case ev.Pad == 0:
			qps = s.drain(&s.backlog)
		case s.conn != nil:
			qps = s.drain(&s.conn.backlog)
		}
		s.mu.Unlock()
		for _, q := range qps {
			q.mu.Lock()
			q.waits = false
			if !q.gone {
				q.flush(now)
			}
			q.mu.Unlock()
			r.touch(q.sendCQ)
		}
	}
	r.tell()
}

// octetsOf returns the octets that v points to.
func octetsOf(v *unix.Iovec) []byte { return unsafe.Slice(v.Base, int(v.Len)) }
