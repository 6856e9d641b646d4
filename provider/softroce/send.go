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
	port uint16 // UDP source port
	gso  bool   // false: its packets may be fragmented, so never batched

	mu    sync.Mutex
	pkts  [maxSegments]engine.Packet // for Output of RC and UC
	iov   [sendIOVs]unix.Iovec
	tails [maxSegments][8]byte // pad and ICRC
	msg   unix.Msghdr
	tap   []byte
}

// send puts pkts on the wire, in as few calls as the kernel allows. The caller
// holds s.mu. What cannot be sent is counted and lost, as on any wire.
func (s *sender) send(p *path, pkts []engine.Packet) {
	for len(pkts) > 0 {
		n := 1
		if s.gso && !s.dev.noGSO.Load() {
			n = batchLen(p, pkts)
		}
		s.sendBatch(p, pkts[:n])
		pkts = pkts[n:]
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

func (s *sender) sendBatch(p *path, pkts []engine.Packet) {
	c := &s.dev.count
	niov := 0
	for i := range pkts {
		niov = s.gather(p, &pkts[i], i, uint16(i), niov)
	}
	errno := s.call(p, niov, len(pkts), pkts[0].Len()+roce.ICRCLen)
	switch {
	case errno == 0:
	case len(pkts) > 1 && (errno == unix.EIO || errno == unix.EINVAL):
		s.sendSingly(p, pkts)
		return
	default:
		s.lost(errno, len(pkts))
		return
	}
	c.txCalls.Add(1)
	c.txPackets.Add(uint64(len(pkts)))
	if len(pkts) > 1 {
		c.txBatches.Add(1)
	}
	if s.dev.tap.Load() != nil {
		s.showTap(p, pkts)
	}
}

// sendSingly is what remains when the kernel refused a batch. If single packets
// pass, UDP_SEGMENT is to blame and not used again.
func (s *sender) sendSingly(p *path, pkts []engine.Packet) {
	c := &s.dev.count
	passed := false
	for i := range pkts {
		niov := s.gather(p, &pkts[i], 0, 0, 0)
		if errno := s.call(p, niov, 1, 0); errno != 0 {
			s.lost(errno, 1)
			continue
		}
		passed = true
		c.txCalls.Add(1)
		c.txPackets.Add(1)
		if s.dev.tap.Load() != nil {
			s.showTap(p, pkts[i:i+1])
		}
	}
	if passed && !s.dev.noGSO.Swap(true) {
		c.gsoRefused.Add(1)
		s.dev.log.Warn("UDP_SEGMENT refused, sending packets one by one")
	}
}

// gather appends the pieces of pkt to the iovecs and computes its ICRC. id is
// the IPv4 identification it will have.
func (s *sender) gather(p *path, pkt *engine.Packet, slot int, id uint16, niov int) int {
	hdr := pkt.Header[:pkt.HeaderLen]
	icrc := p.flow.Start(s.port, pkt.Len()+roce.ICRCLen, id).BTH(hdr)
	if len(hdr) > roce.BTHLen {
		icrc = icrc.Update(hdr[roce.BTHLen:])
	}
	s.iov[niov].Base = &pkt.Header[0]
	s.iov[niov].SetLen(len(hdr))
	niov++
	for _, b := range pkt.Payload[:pkt.NPayload] {
		if len(b) == 0 {
			continue
		}
		icrc = icrc.Update(b)
		s.iov[niov].Base = &b[0]
		s.iov[niov].SetLen(len(b))
		niov++
	}
	tail := &s.tails[slot]
	pad := int(pkt.Pad)
	if pad > 0 {
		tail[0], tail[1], tail[2] = 0, 0, 0
		icrc = icrc.Update(tail[:pad])
	}
	icrc.Put(tail[pad:])
	s.iov[niov].Base = &tail[0]
	s.iov[niov].SetLen(pad + roce.ICRCLen)
	return niov + 1
}

// call sends what is gathered as n segments. It does not give up the processor:
// the kernel copies what it takes and does not block.
func (s *sender) call(p *path, niov, n, size int) unix.Errno {
	s.msg.Name = &p.name[0]
	s.msg.Namelen = p.nameLen
	s.msg.Iov = &s.iov[0]
	s.msg.SetIovlen(niov)
	s.msg.Control = &p.ctl[0]
	s.msg.SetControllen(p.ctlLen)
	if n > 1 {
		native.PutUint16(p.ctl[p.segAt:], uint16(size))
		s.msg.SetControllen(p.segLen)
	}
	for retried := false; ; retried = true {
		_, _, errno := unix.RawSyscall(unix.SYS_SENDMSG, uintptr(s.fd), uintptr(unsafe.Pointer(&s.msg)), unix.MSG_DONTWAIT)
		if errno != unix.EAGAIN && errno != unix.EINTR || retried {
			return errno
		}
		s.dev.count.txWaits.Add(1)
		fds := [1]unix.PollFd{{Fd: int32(s.fd), Events: unix.POLLOUT}}
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
	tap := s.dev.tap.Load()
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
		b = append(b, s.tails[i][:int(pkt.Pad)+roce.ICRCLen]...)
		s.tap = b
		(*tap)(true, b)
	}
}
