package ibverbs

import (
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"ipoibcm/ib"
	"ipoibcm/ratelimit"
	"ipoibcm/verbs"
	"ipoibcm/wire"
	"ipoibcm/wire/mad"
)

// umadHeaderLen is the length in octets of the header in front of a MAD that ib_umad reads or
// writes, with ENABLE_PKEY.
const umadHeaderLen = 64

// A umadHeader is that header (struct ib_user_mad_hdr). Fields from the wire are in network order,
// the others in host order.
type umadHeader struct {
	agent   uint32
	status  uint32
	timeout uint32 // milliseconds to wait for an answer; zero if none is expected
	length  uint32 // of header and MAD, on receipt
	qpn     ib.QPN
	qkey    ib.QKey
	lid     ib.LID // the other end's; InfiniBand
	sl      uint8
	grh     bool
	gidIdx  uint8
	hops    uint8
	class   uint8
	gid     ib.GID // the other end's
	flow    uint32
	pkeyIdx uint16
}

func (h *umadHeader) put(b []byte) {
	_ = b[umadHeaderLen-1]
	clear(b[:umadHeaderLen])
	binary.NativeEndian.PutUint32(b[0:], h.agent)
	binary.NativeEndian.PutUint32(b[4:], h.status)
	binary.NativeEndian.PutUint32(b[8:], h.timeout)
	binary.NativeEndian.PutUint32(b[16:], h.length)
	binary.BigEndian.PutUint32(b[20:], uint32(h.qpn))
	binary.BigEndian.PutUint32(b[24:], uint32(h.qkey))
	binary.BigEndian.PutUint16(b[28:], uint16(h.lid))
	b[30] = h.sl
	if h.grh {
		b[32] = 1
	}
	b[33], b[34], b[35] = h.gidIdx, h.hops, h.class
	copy(b[36:52], h.gid[:])
	binary.BigEndian.PutUint32(b[52:], h.flow)
	binary.NativeEndian.PutUint16(b[56:], h.pkeyIdx)
}

// UnmarshalBinary sets h from the first octets of b.
func (h *umadHeader) UnmarshalBinary(b []byte) error {
	if len(b) < umadHeaderLen {
		return &wire.ShortError{What: "umad header", Need: umadHeaderLen, Have: len(b)}
	}
	*h = umadHeader{
		agent: binary.NativeEndian.Uint32(b), status: binary.NativeEndian.Uint32(b[4:]),
		timeout: binary.NativeEndian.Uint32(b[8:]), length: binary.NativeEndian.Uint32(b[16:]),
		qpn: ib.QPN(binary.BigEndian.Uint32(b[20:])) & ib.QPNMask, qkey: ib.QKey(binary.BigEndian.Uint32(b[24:])),
		lid: ib.LID(binary.BigEndian.Uint16(b[28:])), sl: b[30], grh: b[32] != 0, gidIdx: b[33], hops: b[34], class: b[35],
		gid: ib.GID(b[36:52]), flow: binary.BigEndian.Uint32(b[52:]), pkeyIdx: binary.NativeEndian.Uint16(b[56:]),
	}
	return nil
}

// Numbers of ib_umad's ioctls (magic 0x1b). One without an argument has bits for that on some architectures, those
// of x/sys's constant.
const (
	umadRegister   = 3<<30 | 28<<16 | 0x1b<<8 | 1
	umadEnablePKey = unix.NS_GET_NSTYPE&^0xffff | 0x1b<<8 | 3
)

const (
	cmClass   = 7
	cmVersion = 2
	cmMethod  = 3 // Send, CM's only method
)

// umadRequest returns the request (struct ib_user_mad_reg_req) that registers on QP 1 for answers
// of a class, and for its MADs of the methods whose bits are set. The kernel puts the agent's
// number into the first 4 octets.
func umadRequest(class, version uint8, methods uint32) (req [28]byte) {
	// The mask is an array of C's long; bit 0 of the first is method 0.
	word := make([]byte, 8)
	if longLen == 8 {
		binary.NativeEndian.PutUint64(word, uint64(methods))
	} else {
		binary.NativeEndian.PutUint32(word, methods)
	}
	copy(req[4:], word)
	req[20], req[21], req[22] = byte(ib.QPNGSI), class, version
	return req
}

const longLen = unsafe.Sizeof(uintptr(0)) // of C's long, in octets

// ErrCMTaken says that the kernel's ib_cm, or another agent, has the CM messages
// of the port: two cannot own the same class and method.
var ErrCMTaken = errors.New("CM messages of this port have an owner already (the kernel's ib_cm, or another agent)")

// Bounds of a madPort.
const (
	madQueue   = 256             // MADs that wait for the reader, and as many for the sender
	madTimeout = 2 * time.Second // a write to the kernel that takes longer is counted
)

// How many messages QP 1 accepts per second, as in softroce: those that begin something, and those
// that answer.
var (
	askRate    = ratelimit.Options{Unknown: 64, Returning: 1024, Source: 64}
	answerRate = ratelimit.Options{Unknown: 1024, Returning: 2048, Source: 256}
)

// A madPort is QP 1 through ib_umad. It implements [verbs.MADPort].
//
// The kernel writes its own number into the upper half of the transaction ID of what we send. The
// transaction ID of an answer so differs from ours, but CM matches messages by communication IDs.
type madPort struct {
	file  *os.File
	agent uint32
	gids  func() gidTable
	pkeys func() []ib.PKey
	log   *slog.Logger
	// infiniBand says that ports have LIDs, and packets need no GRH.
	infiniBand bool

	in  chan *verbs.MAD
	out chan verbs.MAD
	wg  sync.WaitGroup

	mu     sync.Mutex
	closed bool

	asks, answers *ratelimit.Limiter

	madCounts[atomic.Uint64]
}

// madCounts are the counters of QP 1 of a port, which several Devices of a process may share; C is uint64 or
// atomic.Uint64.
type madCounts[C any] struct {
	received C `name:"mads_in"`
	sent     C `name:"mads_out"`
	dropped  C `name:"mads_dropped"`
	flood    C `name:"mads_drop_flood"`
	refused  C `name:"mads_refused"`
	slow     C `name:"mads_slow"`
}

var _ verbs.MADPort = (*madPort)(nil)

// openMADs registers for the CM messages of the port behind node. It returns [ErrCMTaken] if
// another program has them.
func openMADs(node string, infiniBand bool, gids func() gidTable, pkeys func() []ib.PKey, keys [4]uint64,
	log *slog.Logger) (*madPort, error) {
	file, agent, err := openUMAD(node, "CM messages", cmClass, cmVersion, 1<<cmMethod)
	if errors.Is(err, unix.EINVAL) {
		return nil, ErrCMTaken
	}
	if err != nil {
		return nil, err
	}
	return newMADPort(file, agent, infiniBand, gids, pkeys, keys, log), nil
}

// openUMAD opens node and registers for MADs of a class: for answers, and for MADs of the methods whose bits
// are set. The kernel allows one receiver of a method on a port.
func openUMAD(node, what string, class, version uint8, methods uint32) (*os.File, uint32, error) {
	fd, err := unix.Open(node, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, 0, fmt.Errorf("open %s: %w", node, err)
	}
	if err := ioctl(fd, umadEnablePKey, 0); err != nil {
		unix.Close(fd)
		return nil, 0, fmt.Errorf("%s: P_Keys in the header: %w", node, err)
	}
	req := umadRequest(class, version, methods)
	if err := ioctl(fd, umadRegister, uintptr(unsafe.Pointer(&req[0]))); err != nil {
		unix.Close(fd)
		return nil, 0, fmt.Errorf("%s: register for %s: %w", node, what, err)
	}
	return os.NewFile(uintptr(fd), node), binary.NativeEndian.Uint32(req[:]), nil
}

// readMADs reads from a registered file until it is closed. It passes the header and the MAD of each read to
// take, and calls tooLong for a MAD of several segments, which nobody asked for.
func readMADs(file *os.File, tooLong func(), take func(b []byte)) {
	buf := make([]byte, umadHeaderLen+verbs.MADLen)
	for {
		n, err := file.Read(buf)
		switch {
		case errors.Is(err, unix.ENOSPC):
			tooLong()
		case err != nil:
			return
		default:
			take(buf[:n])
		}
	}
}

// newMADPort starts the goroutines that read and write a registered file.
func newMADPort(file *os.File, agent uint32, infiniBand bool, gids func() gidTable, pkeys func() []ib.PKey,
	keys [4]uint64, log *slog.Logger) *madPort {
	m := &madPort{
		file: file, agent: agent, infiniBand: infiniBand, gids: gids, pkeys: pkeys, log: log,
		in: make(chan *verbs.MAD, madQueue), out: make(chan verbs.MAD, madQueue),
		asks: ratelimit.New(askRate, [2]uint64(keys[:2])), answers: ratelimit.New(answerRate, [2]uint64(keys[2:])),
	}
	m.wg.Go(m.receive)
	m.wg.Go(m.send)
	return m
}

func ioctl(fd int, cmd, arg uintptr) error {
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), cmd, arg); e != 0 {
		return e
	}
	return nil
}

// MADs implements [verbs.MADPort].
func (m *madPort) MADs() <-chan *verbs.MAD { return m.in }

// SendMAD implements [verbs.MADPort]. A goroutine writes the MAD, because the kernel may have to
// resolve the destination first. If madQueue MADs wait already, SendMAD drops and counts this one.
func (m *madPort) SendMAD(d *verbs.MAD) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return verbs.ErrClosed
	}
	select {
	case m.out <- *d:
	default:
		m.dropped.Add(1)
	}
	return nil
}

func (m *madPort) send() {
	buf := make([]byte, umadHeaderLen+verbs.MADLen)
	for d := range m.out {
		from, ok := m.gids().source(d.Local, d.Remote)
		h := umadHeader{agent: m.agent, qpn: d.QPN, qkey: ib.QKeyGSI, grh: true, gidIdx: uint8(from.index), hops: 64,
			gid: d.Remote, length: uint32(len(buf))}
		if p := d.Path; p.DLID != 0 { // InfiniBand
			h.lid, h.sl, h.grh, h.hops, h.class, h.flow = p.DLID, p.SL, p.GRH, p.HopLimit, p.TrafficClass, p.FlowLabel
			if ok = ok || d.Remote.IsZero(); !h.grh {
				h.gid, h.gidIdx = ib.GID{}, 0
			}
		}
		if !ok || from.index > 255 {
			m.refused.Add(1)
			continue
		}
		if d.PKey != 0 {
			h.pkeyIdx = uint16(max(0, d.PKey.Index(m.pkeys())))
		}
		h.put(buf)
		copy(buf[umadHeaderLen:], d.Data[:])
		start := time.Now()
		if _, err := m.file.Write(buf); err != nil {
			m.refused.Add(1)
			m.log.Debug("CM message not sent", "to", d.Remote, "err", err)
		} else {
			m.sent.Add(1)
		}
		if time.Since(start) > madTimeout {
			m.slow.Add(1)
		}
	}
}

func (m *madPort) receive() {
	defer close(m.in)
	readMADs(m.file, func() { m.dropped.Add(1) }, func(b []byte) {
		d, ok := m.take(b, time.Now())
		if !ok {
			return
		}
		select {
		case m.in <- d:
			m.received.Add(1)
		default:
			m.dropped.Add(1)
		}
	})
}

// take returns the MAD that was read. ok is false if it was dropped. Sends that failed come back
// with a status. They are dropped, because CM has timeouts of its own.
func (m *madPort) take(b []byte, now time.Time) (*verbs.MAD, bool) {
	var h umadHeader
	if h.UnmarshalBinary(b) != nil || h.status != 0 || len(b) != umadHeaderLen+verbs.MADLen || !h.grh && !m.infiniBand {
		m.dropped.Add(1)
		return nil, false
	}
	body := b[umadHeaderLen:]
	g := m.answers
	if mad.Asks(body) {
		g = m.asks
	}
	source := h.gid
	if !h.grh {
		source = ib.GID{14: byte(h.lid >> 8), 15: byte(h.lid)}
	}
	if !g.Allow(now.UnixNano(), source) {
		m.flood.Add(1)
		return nil, false
	}
	d := &verbs.MAD{Remote: h.gid, QPN: h.qpn, PKey: ib.DefaultPKey, Data: [verbs.MADLen]byte(body)}
	t := m.gids()
	if gid, ok := t.at(int(h.gidIdx)); ok {
		d.Local = gid
	} else if e, ok := t.source(ib.GID{}, h.gid); ok {
		d.Local = e.gid
	}
	if keys := m.pkeys(); int(h.pkeyIdx) < len(keys) {
		d.PKey = keys[h.pkeyIdx]
	}
	if m.infiniBand {
		d.Path = verbs.Path{SGID: d.Local, DGID: h.gid, DLID: h.lid, SL: h.sl, GRH: h.grh, HopLimit: h.hops,
			TrafficClass: h.class, FlowLabel: h.flow}
		if !h.grh {
			d.Remote, d.Path.HopLimit, d.Path.TrafficClass, d.Path.FlowLabel = ib.GID{}, 0, 0, 0
		}
	}
	return d, true
}

// close ends both goroutines.
func (m *madPort) close() {
	m.mu.Lock()
	if m.closed {
		m.mu.Unlock()
		return
	}
	m.closed = true
	close(m.out)
	m.mu.Unlock()
	m.file.Close()
	m.wg.Wait()
}
