package softroce

import (
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"ipoibcm/provider/softroce/engine"
	"ipoibcm/wire/roce"
)

const (
	// sendIOVs bounds the pieces of one sendmsg call; UIO_MAXIOV is 1024.
	sendIOVs = 1000
	// segmentAgain is how long a path goes without UDP_SEGMENT after the kernel has
	// refused a batch of it, twice as long each time in a row, up to segmentAgainMax.
	segmentAgain, segmentAgainMax = 2 * time.Second, 32 * time.Second
)

// A sender is one UDP source port: a socket, at times a second one that is connected
// (connected.go), and the packets that they had no room for (backlog.go).
type sender struct {
	dev   *Device
	th    *thread // its queue pairs send by this sender
	fd    int
	index int32 // in Device.senders
	v6    bool
	port  uint16 // UDP source port
	gso   bool   // false: its packets may be fragmented, so never batched

	guard   int // a socket that takes the ICMP messages to port, so that fd does not; -1: none
	fragMTU int // the MTU that the kernel fragments for; 0: that of the link

	mu sync.Mutex
	connector
	backlog backlog // of fd
	// fail lets tests refuse a call of n packets.
	fail func(p *path, n int) unix.Errno
}

// smallPacket is how many octets a packet without its ICRC has at most that is copied into one piece. The
// kernel takes one piece sooner than three, and the ICRC is one fold then.
const smallPacket = 256

// A scratch is the memory of one sendmsg call.
type scratch struct {
	pkts  [maxSegments]engine.Packet     // for Output of RC and UC
	last  [maxSegments / 2]engine.Packet // for Group
	iov   [sendIOVs]unix.Iovec
	niov  int
	arena [maxSegments * (smallPacket + roce.ICRCLen)]byte // what is not payload, and small packets, in order
	used  int
	tails [maxSegments]int // where in arena pad and ICRC of each packet are
	msg   unix.Msghdr
	tap   []byte
}

// A scratches keeps the scratches that are not in use. There are as many as goroutines have
// sent at the same time.
type scratches struct {
	mu   sync.Mutex
	free []*scratch
}

func (f *scratches) get() *scratch {
	f.mu.Lock()
	defer f.mu.Unlock()
	if n := len(f.free); n > 0 {
		sc := f.free[n-1]
		f.free = f.free[:n-1]
		return sc
	}
	return new(scratch)
}

func (f *scratches) put(sc *scratch) {
	f.mu.Lock()
	f.free = append(f.free, sc)
	f.mu.Unlock()
}

// send puts pkts on the wire, in as few calls as the kernel allows. What the socket has no
// room for waits in its backlog. Packets that cannot be sent are counted and lost, as on
// any wire. But where p.whole can take packets that are too big, send stops at the first of
// them, and returns it and all behind it. The caller holds s.mu.
func (s *sender) send(sc *scratch, p *path, pkts []engine.Packet) (tooBig []engine.Packet) {
	if p.ifindex != s.dev.ifindex.Load() {
		p.bind()
	}
	most, single := p.most(), false
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
		if !single && s.batches(p) {
			n = batchLen(p, pkts)
		}
		errno := s.sendBatch(sc, p, pkts[:n])
		if n > 1 && refusesBatch(errno) {
			single = true // sent alone, pkts[0] shows whether the batch is to blame
			continue
		}
		switch {
		case errno == 0 && single:
			p.batchRefused()
			single = false
		case errno == unix.EMSGSIZE && p.whole != nil:
			return pkts
		case errno != 0:
			single = false
			s.lost(errno, n)
		}
		pkts = pkts[n:]
	}
	return nil
}

// batches reports whether packets on p may share a call.
func (s *sender) batches(p *path) bool { return s.gso && !s.dev.isOff(gso) && p.mayBatch() }

// refusesBatch reports whether a batch that fails like this may pass packet by
// packet.
func refusesBatch(errno unix.Errno) bool {
	return errno == unix.EIO || errno == unix.EINVAL || errno == unix.EMSGSIZE
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

// sendBatch sends pkts in one call, or puts them into the backlog. After an error the
// caller decides what becomes of them.
func (s *sender) sendBatch(sc *scratch, p *path, pkts []engine.Packet) unix.Errno {
	c := &s.dev.count
	sc.niov, sc.used = 0, 0
	for i := range pkts {
		sc.gather(p, &pkts[i], i, uint16(i))
	}
	size := pkts[0].Len() + roce.ICRCLen
	errno := unix.EAGAIN
	b := s.backlogOf(p)
	if !b.full {
		errno = s.call(&sc.msg, &sc.iov[0], sc.niov, p, len(pkts), size)
		b = s.backlogOf(p) // s may have lost its connected socket
	}
	switch errno {
	case 0:
		s.sent(p, len(pkts))
	case unix.EAGAIN:
		if !s.park(b, sc, p, len(pkts), size) {
			return unix.EAGAIN
		}
		c.txWaits.Add(1)
	default:
		return errno
	}
	if s.dev.tap.Get() != nil {
		s.showTap(sc, p, pkts)
	}
	return 0
}

// sent counts a call of n packets that the kernel has taken.
func (s *sender) sent(p *path, n int) {
	c := &s.th.count
	c.txCalls.Add(1)
	c.txPackets.Add(uint64(n))
	if n > 1 {
		c.txBatches.Add(1)
		p.batchPassed()
	}
}

// gather appends the pieces of pkt to the iovecs and computes its ICRC. id is the IPv4
// identification that the packet will have. The end of one packet and the beginning of the
// next are one piece.
func (sc *scratch) gather(p *path, pkt *engine.Packet, slot int, id uint16) {
	if pkt.Len() <= smallPacket {
		sc.copyWhole(p, pkt, slot, id)
		return
	}
	n, pad := int(pkt.HeaderLen), int(pkt.Pad)
	hdr := sc.arena[sc.used : sc.used+n]
	copy(hdr, pkt.Header[:n])
	icrc := p.flow.Start(p.sender.port, pkt.Len()+roce.ICRCLen, id).BTH(hdr)
	if n > roce.BTHLen {
		icrc = icrc.Update(hdr[roce.BTHLen:])
	}
	sc.piece(hdr, slot > 0)
	sc.used += n
	joined := true
	for _, b := range pkt.Payload[:pkt.NPayload] {
		if len(b) == 0 {
			continue
		}
		icrc = icrc.Update(b)
		sc.piece(b, false)
		joined = false
	}
	tail := sc.arena[sc.used : sc.used+pad+roce.ICRCLen]
	sc.tails[slot] = sc.used
	if pad > 0 {
		clear(tail[:pad])
		icrc = icrc.Update(tail[:pad])
	}
	icrc.Put(tail[pad:])
	sc.piece(tail, joined)
	sc.used += len(tail)
}

// copyWhole is gather for a packet of at most smallPacket octets, which it copies.
func (sc *scratch) copyWhole(p *path, pkt *engine.Packet, slot int, id uint16) {
	b := sc.arena[sc.used : sc.used+pkt.Len()+roce.ICRCLen]
	n := copy(b, pkt.Header[:pkt.HeaderLen])
	for _, part := range pkt.Payload[:pkt.NPayload] {
		n += copy(b[n:], part)
	}
	sc.tails[slot] = sc.used + n
	size := n + int(pkt.Pad)
	clear(b[n:size])
	p.flow.Start(p.sender.port, len(b), id).Packet(b[:size]).Put(b[size:])
	sc.piece(b, slot > 0)
	sc.used += len(b)
}

// piece appends b to the iovecs. With joined, b lies right behind the last piece and
// extends it.
func (sc *scratch) piece(b []byte, joined bool) {
	if joined {
		last := &sc.iov[sc.niov-1]
		last.SetLen(int(last.Len) + len(b))
		return
	}
	sc.iov[sc.niov].Base = &b[0]
	sc.iov[sc.niov].SetLen(len(b))
	sc.niov++
}

// call sends the n packets in iov, of size octets each; the last may be shorter. The caller
// holds s.mu.
func (s *sender) call(msg *unix.Msghdr, iov *unix.Iovec, niov int, p *path, n, size int) unix.Errno {
	if s.fail != nil {
		if errno := s.fail(p, n); errno != 0 {
			return errno
		}
	}
	msg.Iov = iov
	msg.SetIovlen(niov)
	if n > 1 {
		native.PutUint16(p.ctl[p.segAt:], uint16(size))
	}
	raceSent()
	if fd := s.connectedFD(p); fd >= 0 {
		msg.Name, msg.Namelen, msg.Control = nil, 0, nil
		msg.SetControllen(0)
		if n > 1 {
			msg.Control = &p.ctl[p.ctlLen]
			msg.SetControllen(p.segLen - p.ctlLen)
		}
		switch errno := push(fd, msg); errno {
		case 0:
			s.th.count.txConnected.Add(1)
			return 0
		case unix.EMSGSIZE, unix.EAGAIN, unix.ENOBUFS:
			return errno
		}
		// The error is that of an ICMP message about an earlier packet, or the address is
		// gone.
		s.dev.count.connectLost.Add(1)
		s.disconnect()
		if s.backlog.full {
			return unix.EAGAIN
		}
	}
	msg.Name, msg.Namelen = &p.name[0], p.nameLen
	msg.Control = &p.ctl[0]
	msg.SetControllen(p.ctlLen)
	if n > 1 {
		msg.SetControllen(p.segLen)
	}
	return push(s.fd, msg)
}

// push sends msg on fd. It keeps its P meanwhile: the kernel copies what it
// takes and does not block.
func push(fd int, msg *unix.Msghdr) unix.Errno {
	for retried := false; ; retried = true {
		_, _, errno := unix.RawSyscall(unix.SYS_SENDMSG, uintptr(fd), uintptr(unsafe.Pointer(msg)), unix.MSG_DONTWAIT)
		if errno != unix.EINTR || retried {
			return errno
		}
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

// showTap passes pkts to the tap, as they are on the wire.
func (s *sender) showTap(sc *scratch, p *path, pkts []engine.Packet) {
	tap := s.dev.tap.Get()
	if tap == nil {
		return
	}
	head := p.head
	for i := range pkts {
		pkt := &pkts[i]
		head.ID = uint16(i)
		n := pkt.Len() + roce.ICRCLen
		b := head.Append(sc.tap[:0], n)
		b = append(b, pkt.Header[:pkt.HeaderLen]...)
		for _, piece := range pkt.Payload[:pkt.NPayload] {
			b = append(b, piece...)
		}
		b = append(b, sc.arena[sc.tails[i]:sc.tails[i]+int(pkt.Pad)+roce.ICRCLen]...)
		sc.tap = b
		tap(true, b)
	}
}
