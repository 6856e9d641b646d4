package softroce

import (
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"ipoibcm/provider/softroce/engine"
	"ipoibcm/wire/roce"
)

const (
	// sendIOVs bounds the pieces of one sendmsg call; UIO_MAXIOV is 1024.
	sendIOVs = 1000
	// sendWait bounds the wait for room in a full socket buffer, after which the
	// packets are lost, in milliseconds.
	sendWait = 10
)

// A sender is one sending socket and what a call on it needs. Sixteen of them
// spread queue pairs over source ports (WF 9.3).
type sender struct {
	dev  *Device
	fd   int
	v6   bool
	port uint16 // UDP source port
	gso  bool   // false: its packets may be fragmented, so never batched

	guard   int // takes the ICMP messages to port that must not reach fd; -1: none
	fragMTU int // the MTU that the kernel fragments for; 0: that of the link

	mu sync.Mutex
	cutter
	pkts  [maxSegments]engine.Packet // for Output of RC and UC
	iov   [sendIOVs]unix.Iovec
	niov  int
	arena [maxSegments * (engine.HeaderMax + 8)]byte // what is not payload, in order
	used  int
	tails [maxSegments]int // where in arena pad and ICRC of each packet are
	msg   unix.Msghdr
	tap   []byte
}

// send puts pkts on the wire, in as few calls as the kernel allows. The caller
// holds s.mu. What cannot be sent is counted and lost, as on any wire, but for
// what is too big for the route and may go another way: that is returned.
func (s *sender) send(p *path, pkts []engine.Packet) (tooBig []engine.Packet) {
	if p.ifindex != s.dev.ifindex.Load() {
		p.bind()
	}
	most := p.most()
	for len(pkts) > 0 {
		n := 1
		if pkts[0].Len() > most {
			if p.whole != nil {
				return pkts
			}
			s.lost(unix.EMSGSIZE, 1)
			pkts = pkts[1:]
			continue
		}
		if s.gso && !s.dev.noGSO.Load() {
			n = batchLen(p, pkts)
		}
		if errno := s.sendBatch(p, pkts[:n]); errno != 0 {
			if errno == unix.EMSGSIZE && p.whole != nil {
				return pkts
			}
			s.lost(errno, n)
		}
		pkts = pkts[n:]
	}
	return nil
}

// fragmentFor has the kernel cut what s sends into fragments that fit the route of
// p. The caller holds s.mu.
func (s *sender) fragmentFor(p *path) {
	mtu := 0 // that of the link
	if p.route != nil {
		mtu = int(p.route.mtu.Load())
	}
	if mtu != s.fragMTU && unix.SetsockoptInt(s.fd, unix.IPPROTO_IPV6, unix.IPV6_MTU, mtu) == nil {
		s.fragMTU = mtu
	}
}

// batchLen returns how many packets go into one UDP_SEGMENT call: equal lengths
// but for the last, which may be shorter.
func batchLen(p *path, pkts []engine.Packet) int {
	size := pkts[0].Len() + roce.ICRCLen
	total, iovs := size, 2+int(pkts[0].NPayload)
	n := 1
	for n < min(len(pkts), maxSegments) {
		l := pkts[n].Len() + roce.ICRCLen
		total += l
		iovs += 2 + int(pkts[n].NPayload)
		if l > size || total > p.max || iovs > sendIOVs {
			break
		}
		n++
		if l < size {
			break
		}
	}
	return n
}

// sendBatch sends pkts in one call. If that fails the caller sees to them.
func (s *sender) sendBatch(p *path, pkts []engine.Packet) unix.Errno {
	c := &s.dev.count
	s.niov, s.used = 0, 0
	for i := range pkts {
		s.gather(p, &pkts[i], i, uint16(i))
	}
	errno := s.call(p, len(pkts), pkts[0].Len()+roce.ICRCLen)
	switch {
	case errno == 0:
	case len(pkts) > 1 && (errno == unix.EIO || errno == unix.EINVAL):
		s.sendSingly(p, pkts)
		return 0
	default:
		return errno
	}
	c.txCalls.Add(1)
	c.txPackets.Add(uint64(len(pkts)))
	if len(pkts) > 1 {
		c.txBatches.Add(1)
	}
	if s.dev.tap.Get() != nil {
		s.showTap(p, pkts)
	}
	return 0
}

// sendSingly is what remains when the kernel refused a batch. If single packets
// pass, UDP_SEGMENT is to blame and not used again.
func (s *sender) sendSingly(p *path, pkts []engine.Packet) {
	c := &s.dev.count
	passed := false
	for i := range pkts {
		if errno := s.sendBatch(p, pkts[i:i+1]); errno != 0 {
			s.lost(errno, 1)
			continue
		}
		passed = true
	}
	if passed && !s.dev.noGSO.Swap(true) {
		c.gsoRefused.Add(1)
		d := s.dev
		d.offloadOff(gso, "the kernel refused a batch that it took one by one")
		s.dev.log.Warn("UDP_SEGMENT refused, sending packets one by one")
	}
}

// gather appends the pieces of pkt to the iovecs and computes its ICRC. id is
// the IPv4 identification it will have. The end of one packet and the beginning
// of the next are one piece.
func (s *sender) gather(p *path, pkt *engine.Packet, slot int, id uint16) {
	n := int(pkt.HeaderLen)
	hdr := s.arena[s.used : s.used+n]
	copy(hdr, pkt.Header[:n])
	icrc := p.flow.Start(s.port, pkt.Len()+roce.ICRCLen, id).BTH(hdr)
	if n > roce.BTHLen {
		icrc = icrc.Update(hdr[roce.BTHLen:])
	}
	s.piece(hdr, slot > 0)
	s.used += n
	joined := true
	for _, b := range pkt.Payload[:pkt.NPayload] {
		if len(b) == 0 {
			continue
		}
		icrc = icrc.Update(b)
		s.piece(b, false)
		joined = false
	}
	pad := int(pkt.Pad)
	tail := s.arena[s.used : s.used+pad+roce.ICRCLen]
	s.tails[slot] = s.used
	if pad > 0 {
		clear(tail[:pad])
		icrc = icrc.Update(tail[:pad])
	}
	icrc.Put(tail[pad:])
	s.piece(tail, joined)
	s.used += len(tail)
}

// piece appends b to the iovecs, or to the last of them if it lies behind it.
func (s *sender) piece(b []byte, joined bool) {
	if joined {
		last := &s.iov[s.niov-1]
		last.SetLen(int(last.Len) + len(b))
		return
	}
	s.iov[s.niov].Base = &b[0]
	s.iov[s.niov].SetLen(len(b))
	s.niov++
}

// call sends what is gathered as n segments.
func (s *sender) call(p *path, n, size int) unix.Errno {
	s.msg.Iov = &s.iov[0]
	s.msg.SetIovlen(s.niov)
	if n > 1 {
		native.PutUint16(p.ctl[p.segAt:], uint16(size))
	}
	raceSent()
	if fd := s.shortcut(p); fd >= 0 {
		s.msg.Name, s.msg.Namelen, s.msg.Control = nil, 0, nil
		s.msg.SetControllen(0)
		if n > 1 {
			s.msg.Control = &p.ctl[p.ctlLen]
			s.msg.SetControllen(p.segLen - p.ctlLen)
		}
		switch errno := s.push(fd); errno {
		case 0:
			s.dev.count.txConnected.Add(1)
			return 0
		case unix.EMSGSIZE, unix.EAGAIN, unix.ENOBUFS:
			return errno
		}
		// An ICMP message about an earlier packet, or the address is gone.
		s.dev.count.connectLost.Add(1)
		s.uncut()
	}
	s.msg.Name, s.msg.Namelen = &p.name[0], p.nameLen
	s.msg.Control = &p.ctl[0]
	s.msg.SetControllen(p.ctlLen)
	if n > 1 {
		s.msg.SetControllen(p.segLen)
	}
	return s.push(s.fd)
}

// push sends s.msg on fd. It does not give up the processor: the kernel copies
// what it takes and does not block.
func (s *sender) push(fd int) unix.Errno {
	for retried := false; ; retried = true {
		_, _, errno := unix.RawSyscall(unix.SYS_SENDMSG, uintptr(fd), uintptr(unsafe.Pointer(&s.msg)), unix.MSG_DONTWAIT)
		if errno != unix.EAGAIN && errno != unix.EINTR || retried {
			return errno
		}
		s.dev.count.txWaits.Add(1)
		fds := [1]unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
		_, _ = unix.Poll(fds[:], sendWait)
	}
}

func (s *sender) lost(errno unix.Errno, n int) {
	c := &s.dev.count
	switch errno {
	case unix.EMSGSIZE:
		c.txTooBig.Add(uint64(n))
	case unix.EAGAIN, unix.ENOBUFS:
		c.txNoRoom.Add(uint64(n))
	default:
		c.txErrors.Add(uint64(n))
		c.lastErrno.Store(uint64(errno))
	}
}

// showTap shows pkts as they lie on the wire.
func (s *sender) showTap(p *path, pkts []engine.Packet) {
	tap := s.dev.tap.Get()
	if tap == nil {
		return
	}
	head := p.head
	for i := range pkts {
		pkt := &pkts[i]
		head.ID = uint16(i)
		n := pkt.Len() + roce.ICRCLen
		b := head.Append(s.tap[:0], n)
		b = append(b, pkt.Header[:pkt.HeaderLen]...)
		for _, piece := range pkt.Payload[:pkt.NPayload] {
			b = append(b, piece...)
		}
		b = append(b, s.arena[s.tails[i]:s.tails[i]+int(pkt.Pad)+roce.ICRCLen]...)
		s.tap = b
		tap(true, b)
	}
}
