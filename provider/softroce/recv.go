package softroce

import (
	"encoding/binary"
	"math/bits"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"ipoibcm/ib"
	"ipoibcm/provider/softroce/engine"
	"ipoibcm/wire/roce"
)

const (
	// recvBatch is how many datagrams one call takes in. Each may be a chain that the
	// kernel put together. ACKs go out once per batch.
	recvBatch = 8
	// recvBufLen holds the longest chain.
	recvBufLen = 1 << 16
	recvCtlLen = 256
	// transportUD is in the upper three bits of the opcode, the first octet.
	transportUD = uint8(roce.UDSendOnly) >> 5
	// ownIDs is the range of IPv4 identifications that our own agents send: the
	// segment's number within a UDP_SEGMENT call. Others come from elsewhere.
	ownIDs = maxSegments
)

// mmsghdr is struct mmsghdr.
type mmsghdr struct {
	hdr unix.Msghdr
	n   uint32
}

// A receiver is one receiving socket and the goroutine that reads it.
type receiver struct {
	dev   *Device
	th    *thread // as a rule its packets are for queue pairs of th
	fd    int
	v6    bool
	addr  netip.Addr // bound to; the zero Addr is the wildcard
	mcast bool       // takes groups in
	share bool       // other sockets may be bound to its port

	msgs  [recvBatch]mmsghdr
	names [recvBatch]unix.RawSockaddrInet6
	iovs  [recvBatch]unix.Iovec
	_     cmsgAligned
	ctls  [recvBatch][recvCtlLen]byte
	bufs  []byte

	// The addresses of the last packet, and what is computed from them.
	src, dst ib.GID
	flow     roce.Flow
	head     roce.IPHeader

	wakeFD    int           // eventfd
	turns     atomic.Uint64 // of run, for Alive
	writable  int           // th.writable in the one receiver that watches it, else -1
	idlePolls int           // polls of writable since it was readable

	polled atomic.Pointer[polledFD]
	due    []*cq // memory for stepUser
	spinner
	polledMu sync.Mutex
	ended    bool // under polledMu

	keeps    bool      // r serves the timers of th while it is awake
	readable bool      // there may be something to read
	active   bool      // since the last wait packets arrived, or the user's descriptor was ready
	activeAt time.Time // the last wait before which active was set

	overflow atomic.Uint32 // the kernel's last count of the datagrams that it has dropped
	filtered atomic.Pointer[filterMark]

	from    engine.Source
	pkt     roce.Packet
	held    *qp // the queue pair of the latest packets, locked
	touched []*cq
	delayed []*qp // queue pairs whose ACKs wait
	tap     []byte
}

// meta is what control messages say about a datagram.
type meta struct {
	dst      ib.GID
	segment  int // octets of each packet of a chain
	hopLimit uint8
	class    uint8
	overflow uint32
}

func (r *receiver) init() {
	r.most = r.dev.opts.BusyPoll
	r.bufs = make([]byte, recvBatch*recvBufLen)
	for i := range r.msgs {
		b := r.bufs[i*recvBufLen:]
		r.iovs[i].Base = &b[0]
		r.iovs[i].SetLen(recvBufLen)
		h := &r.msgs[i].hdr
		h.Name = (*byte)(unsafe.Pointer(&r.names[i]))
		h.Iov = &r.iovs[i]
		h.SetIovlen(1)
		h.Control = &r.ctls[i][0]
	}
}

// run reads until the device is closed or frozen.
func (r *receiver) run() {
	r.init()
	r.readable = true
	defer r.end()
	defer r.th.timers.rest(false)
	for !r.dev.closing.Load() && !r.dev.frozen.Load() {
		r.turns.Add(1)
		switch polls := r.polled.Load() != nil; {
		case polls:
			r.th.timers.keep()
			r.keeps = true
		case r.keeps: // r polls nothing any more
			r.th.timers.rest(false)
			r.keeps = false
		}
		n, errno := 0, unix.EAGAIN
		tx := r.th.count.txPackets.Load() // of all senders of the thread, which is near enough
		if r.readable {
			n, errno = r.read()
		}
		r.readable = true
		switch errno {
		case 0:
			r.th.count.rxCalls.Add(1)
			r.active = true
			r.take(n, time.Now())
		case unix.EAGAIN, unix.EINTR:
		default:
			r.dev.count.rxErrors.Add(1)
			time.Sleep(10 * time.Millisecond) // ENETDOWN and the like
		}
		more, wait := r.stepUser()
		r.settle()
		if r.keeps {
			r.th.timers.service(time.Now())
		}
		// After a single datagram there is seldom another: poll instead of reading again.
		switch {
		case !more && (errno == unix.EAGAIN || n == 1):
			r.spinner.turn(errno == 0, r.th.count.txPackets.Load() != tx)
			r.sleep(wait)
		case r.writable >= 0 && r.th.full.Load() && r.turns.Load()%turnsToRoom == 0: // else sleep looks
			r.goOn(time.Now())
		}
	}
}

// read receives the datagrams that are there. It does not wait, and so need not announce
// the system call to Go's scheduler.
func (r *receiver) read() (int, unix.Errno) {
	for i := range r.msgs {
		h := &r.msgs[i].hdr
		h.Namelen = unix.SizeofSockaddrInet6
		h.SetControllen(recvCtlLen)
		h.Flags = 0
	}
	n, _, errno := unix.RawSyscall6(unix.SYS_RECVMMSG, uintptr(r.fd), uintptr(unsafe.Pointer(&r.msgs[0])), recvBatch, unix.MSG_DONTWAIT, 0, 0)
	raceReceived()
	return int(n), errno
}

// take handles n datagrams, then notifies the users of the completion queues. It
// handles UD packets last: between the packets of a connection they would release
// its lock, which is then taken once.
func (r *receiver) take(n int, now time.Time) {
	datagrams := uint(0)
	for i := range n {
		b := r.bufs[i*recvBufLen : i*recvBufLen+int(r.msgs[i].n)]
		switch {
		case r.msgs[i].hdr.Flags&unix.MSG_TRUNC != 0:
			r.dev.count.rxTruncated.Add(1)
		case len(b) > 0 && b[0]>>5 == transportUD:
			datagrams |= 1 << i
		default:
			r.datagram(i, b, now)
		}
	}
	for ; datagrams != 0; datagrams &= datagrams - 1 {
		i := bits.TrailingZeros(datagrams)
		r.datagram(i, r.bufs[i*recvBufLen:i*recvBufLen+int(r.msgs[i].n)], now)
	}
	r.release(now)
	r.tell()
}

// tell runs the handlers of the completion queues to which something was added.
func (r *receiver) tell() {
	for i, c := range r.touched {
		c.notify(true)
		r.touched[i] = nil
	}
	r.touched = r.touched[:0]
}

// datagram takes in one datagram, or a chain of them from one source.
func (r *receiver) datagram(i int, b []byte, now time.Time) {
	c := &r.dev.count
	var md meta
	r.control(i, &md)
	if md.overflow > r.overflow.Load() { // the kernel counts for each socket
		r.dropped(md.overflow)
	}
	var src ib.GID
	var port uint16
	name := (*[unix.SizeofSockaddrInet6]byte)(unsafe.Pointer(&r.names[i]))
	port = binary.BigEndian.Uint16(name[2:])
	if r.v6 {
		copy(src[:], name[8:24])
	} else {
		src[10], src[11] = 0xff, 0xff
		copy(src[12:], name[4:8])
	}
	multicast := md.dst.IsMulticast()
	switch p := r.dev.port.Load(); {
	case multicast && p.has(src):
		c.rxOwnEcho.Add(1)
		return
	case multicast && !r.mcast, !multicast && !p.has(md.dst), src.Is4() == r.v6: // kernels before 5.5 let IPv4-mapped sources pass
		c.rxOtherGID.Add(1)
		return
	}
	if !multicast && r.dev.forgesUs(src, port) {
		c.rxNotOurs.Add(1)
		return
	}
	if src != r.src || md.dst != r.dst {
		r.src, r.dst = src, md.dst
		from, to := src.Addr(), md.dst.Addr()
		r.flow = roce.NewFlow(from, to)
		r.head = roce.IPHeader{Src: from, Dst: to}
		r.from.Src, r.from.Dst = src, md.dst
	}
	r.head.SrcPort, r.head.HopLimit, r.head.TrafficClass = port, md.hopLimit, md.class
	size := len(b)
	if md.segment > 0 && md.segment < size {
		size = md.segment
		r.th.count.rxChains.Add(1)
	}
	for id := uint16(0); ; id++ {
		n := min(size, len(b))
		r.packet(b[:n:n], id, port, now)
		if b = b[n:]; len(b) == 0 {
			return
		}
	}
}

// packet handles one packet, BTH through ICRC. id is its IPv4 identification if one of
// our agents sent it, and the datagrams of the chain were sent in one call.
func (r *receiver) packet(b []byte, id, port uint16, now time.Time) {
	c := &r.dev.count
	r.th.count.rxPackets.Add(1)
	if drop := r.dev.dropHook.Load(); drop != nil && (*drop)(b) {
		return
	}
	pkt := &r.pkt
	if pkt.Parse(b) != nil {
		c.rxMalformed.Add(1)
		return
	}
	if r.dev.refused(r.src, pkt) {
		c.rxRefused.Add(1)
		return
	}
	if r.flow.Sum(port, pkt.Covered, id) != pkt.ICRC {
		found, ok := r.flow.Verify(port, pkt)
		if !ok {
			c.rxICRC.Add(1)
			return
		}
		if id = found; id >= ownIDs {
			c.rxForeignID.Add(1)
		}
	}
	if tap := r.dev.tap.Get(); tap != nil {
		r.head.ID = id
		r.tap = append(r.head.Append(r.tap[:0], len(b)), b...)
		tap(false, r.tap)
	}
	switch qpn := pkt.BTH.DestQPN(); {
	case qpn == ib.QPNMulticast:
		r.multicast(len(b), now)
	case qpn == ib.QPNGSI:
		r.dev.gsi.receive(pkt, r.src, r.dst, now)
	default:
		if pkt.Op == roce.CNP {
			c.rxCNP.Add(1)
		}
		q := r.dev.qps.lookup(qpn)
		if q == nil {
			c.rxUnknownQPN.Add(1)
			return
		}
		if q.th != r.th {
			r.th.count.rxElsewhere.Add(1)
		}
		r.deliver(q, len(b), now)
	}
}

// multicast gives the packet to every queue pair attached to the group.
func (r *receiver) multicast(n int, now time.Time) {
	qs := r.dev.groups.members(r.dst)
	if len(qs) == 0 {
		r.dev.count.rxNoMember.Add(1)
		return
	}
	for _, q := range qs {
		r.deliver(q, n, now)
	}
}

// deliver gives the packet to q, and keeps q locked for the next packet. n is the
// length of the UDP payload.
func (r *receiver) deliver(q *qp, n int, now time.Time) {
	if q != r.held {
		r.release(now)
		q.mu.Lock()
		r.held = q
	}
	r.from.ECN = r.head.TrafficClass & ecnMask
	if q.transport == ib.UD {
		r.head.PutGRH(r.from.GRH[:], n)
	}
	if reason := q.eng.Receive(&r.pkt, &r.from, now); reason != engine.NoDrop {
		r.dev.count.rxDrops[reason].Add(1)
	}
}

// release sends what the held queue pair has to send after its packets, and unlocks it.
func (r *receiver) release(now time.Time) {
	q := r.held
	if q == nil {
		return
	}
	r.held = nil
	q.flush(now)
	if q.eng.AckWaits() {
		r.delayACK(q, now)
	}
	q.mu.Unlock()
	r.touch(q.recvCQ)
	r.touch(q.sendCQ)
}

func (r *receiver) touch(c *cq) {
	if c.pending.Load() && !slices.Contains(r.touched, c) {
		r.touched = append(r.touched, c)
	}
}

// control reads the control messages of message i.
func (r *receiver) control(i int, md *meta) {
	md.read(r.ctls[i][:min(uint64(r.msgs[i].hdr.Controllen), recvCtlLen)])
}

// read reads control messages, which begin at a word.
func (md *meta) read(b []byte) {
	md.hopLimit = defaultHopLimit
	for len(b) >= unix.SizeofCmsghdr {
		h := (*unix.Cmsghdr)(unsafe.Pointer(&b[0]))
		n := int(h.Len)
		if n < unix.SizeofCmsghdr || n > len(b) {
			return
		}
		data := b[unix.SizeofCmsghdr:n]
		switch {
		case h.Level == unix.IPPROTO_IPV6 && h.Type == unix.IPV6_PKTINFO && len(data) >= 16:
			copy(md.dst[:], data)
		case h.Level == unix.IPPROTO_IP && h.Type == unix.IP_PKTINFO && len(data) >= 12:
			md.dst[10], md.dst[11] = 0xff, 0xff
			copy(md.dst[12:], data[8:12]) // ipi_addr: the destination as sent
		case h.Level == unix.IPPROTO_UDP && h.Type == optUDPGRO && len(data) >= 4: // UDP_SEGMENT, which we send, has 2 octets
			md.segment = int(int32(native.Uint32(data)))
		case h.Level == unix.IPPROTO_IPV6 && h.Type == unix.IPV6_HOPLIMIT && len(data) >= 4,
			h.Level == unix.IPPROTO_IP && h.Type == unix.IP_TTL && len(data) >= 4:
			md.hopLimit = uint8(native.Uint32(data))
		case h.Level == unix.IPPROTO_IPV6 && h.Type == unix.IPV6_TCLASS && len(data) >= 4:
			md.class = uint8(native.Uint32(data))
		case h.Level == unix.IPPROTO_IP && h.Type == unix.IP_TOS && len(data) >= 1:
			md.class = data[0]
		case h.Level == unix.SOL_SOCKET && h.Type == unix.SO_RXQ_OVFL && len(data) >= 4:
			md.overflow = native.Uint32(data)
		}
		n = unix.CmsgSpace(n - unix.SizeofCmsghdr)
		if n >= len(b) {
			return
		}
		b = b[n:]
	}
}
