// Package softiwarp is iWARP in pure Go: a verbs provider whose reliable queue
// pairs are TCP connections with MPA, DDP and RDMAP on them.
//
// Package mpa decides what startup frames, FPDUs and segments mean; this one moves octets,
// goroutines and registered memory. [Startup] settles a connection over any net.Conn, [Stream]
// carries segments on it, and a [Device] offers queue pairs of the verbs contract. Queue pairs of
// two Devices find each other by GID and QPN. For a connection with a foreign peer there are
// [Device.Connect] and [Device.Accept].
//
// iWARP is not InfiniBand. A send completes when TCP has taken it, so a send that the peer refuses
// ends the queue pair later; there is no immediate data; a Send that finds no receive is held for a
// time and then ends the connection.
//
// Sources: RFC 6581, 5044, 5041, 5040. Missing: UD, multicast, memory windows,
// headers of the offending segment in a Terminate.
package softiwarp

import (
	"cmp"
	"context"
	crand "crypto/rand"
	"encoding/binary"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"time"

	"ipoibcm/ib"
	"ipoibcm/mpa"
	"ipoibcm/verbs"
	"ipoibcm/verbs/events"
	"ipoibcm/verbs/regions"
)

const (
	// DefaultPort is where Devices listen for each other.
	DefaultPort = 4792
	// maxGuests bounds the incoming connections that are not settled yet.
	maxGuests = 256
	maxQPs    = 1 << 16
)

// Options configures a Device. Only Addr must be set.
type Options struct {
	// Addr is the local address; it is the GID.
	Addr netip.Addr
	// Zone is the network device of a link-local Addr.
	Zone string
	// Port is the TCP port where the device listens, and where it dials others. Zero means
	// DefaultPort. Negative means that it does not listen; Modify can then dial only if Dial is
	// set.
	Port int
	// Listener and Dial replace TCP. Nil means TCP.
	Listener net.Listener
	Dial     func(ctx context.Context, local, remote ib.GID) (net.Conn, error)

	// MPA has the markers, CRCs, kinds of RTR and timeouts of connections that Modify makes. Its
	// depths and models are ignored. When the device dials, ConnectTimeout plus one second replaces
	// its Timeout.
	MPA mpa.Options
	// ConnectTimeout bounds the wait for the other queue pair. Zero means 10 s.
	ConnectTimeout time.Duration
	// RecvTimeout is how long a Send may wait for a receive. Zero means 10 s,
	// negative means not at all.
	RecvTimeout time.Duration
	// SendTimeout bounds one write to TCP, of up to about 128 KiB. Zero means 30 s.
	SendTimeout time.Duration

	// GUID is the GUID of the instance. Zero means a random one, locally administered.
	GUID ib.GUID
	// Rand fills b with unpredictable octets, for QPNs and STags. Nil means
	// crypto/rand.
	Rand func(b []byte)
	// Log gets state changes; nil discards them.
	Log *slog.Logger
}

func (o *Options) connectTimeout() time.Duration { return cmp.Or(o.ConnectTimeout, 10*time.Second) }
func (o *Options) recvTimeout() time.Duration    { return max(0, cmp.Or(o.RecvTimeout, 10*time.Second)) }
func (o *Options) sendTimeout() time.Duration    { return cmp.Or(o.SendTimeout, 30*time.Second) }

// A Device is one local address, open as an RDMA device. It implements
// [verbs.Provider].
type Device struct {
	opts Options
	log  *slog.Logger
	gid  ib.GID
	mem  memory
	ln   net.Listener

	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
	guests chan struct{} // holds one for each incoming connection that is not settled yet
	count  counts

	mu       sync.Mutex
	closed   bool
	events   *events.Queue
	qps      map[ib.QPN]*qp
	cqs      map[*cq]struct{}
	streams  map[*Stream]struct{}
	visitors map[meeting]*visitor
}

var _ verbs.Provider = (*Device)(nil)

// Open opens the device.
func Open(opts Options) (*Device, error) {
	if opts.Rand == nil {
		opts.Rand = func(b []byte) { _, _ = crand.Read(b) } // it never fails
	}
	if opts.GUID == 0 {
		var b [8]byte
		opts.Rand(b[:])
		opts.GUID = ib.GUID(binary.BigEndian.Uint64(b[:])&^(1<<56) | 1<<57)
	}
	d := &Device{opts: opts, log: cmp.Or(opts.Log, slog.New(slog.DiscardHandler)), gid: ib.GIDFromAddr(opts.Addr),
		ln: opts.Listener, qps: map[ib.QPN]*qp{}, cqs: map[*cq]struct{}{}, streams: map[*Stream]struct{}{},
		visitors: map[meeting]*visitor{}, guests: make(chan struct{}, maxGuests)}
	d.events = events.NewQueue(&d.count.eventsDropped)
	if !opts.Addr.IsValid() || opts.Addr.IsUnspecified() || opts.Addr.IsMulticast() {
		return nil, fmt.Errorf("softiwarp: %v is no address of a host", opts.Addr)
	}
	d.mem.Init(opts.Rand)
	if d.ln == nil && opts.Port >= 0 {
		ln, err := net.Listen("tcp", d.hostPort(opts.Addr))
		if err != nil {
			return nil, fmt.Errorf("softiwarp: %w", err)
		}
		d.ln = ln
	}
	d.ctx, d.cancel = context.WithCancel(context.Background())
	if d.ln != nil {
		d.wg.Go(d.listen)
	}
	return d, nil
}

func (d *Device) hostPort(a netip.Addr) string {
	if a.Is6() && a.IsLinkLocalUnicast() {
		a = a.WithZone(d.opts.Zone)
	}
	return net.JoinHostPort(a.String(), strconv.Itoa(cmp.Or(d.opts.Port, DefaultPort)))
}

// dial opens a connection to the device at remote.
func (d *Device) dial(ctx context.Context, local, remote ib.GID) (net.Conn, error) {
	if d.opts.Dial != nil {
		return d.opts.Dial(ctx, local, remote)
	}
	dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: d.opts.Addr.AsSlice(), Zone: d.opts.Zone}}
	ctx, cancel := context.WithTimeout(ctx, d.opts.connectTimeout())
	defer cancel()
	return dialer.DialContext(ctx, "tcp", d.hostPort(remote.Addr()))
}

// Caps implements [verbs.Provider].
func (d *Device) Caps() verbs.Caps {
	return verbs.Caps{Name: "softiwarp", Device: d.opts.Addr.String(), RC: true, SRQ: true, RDMA: true,
		Inv: true, IWARP: true, MaxMessage: MaxMessage, MaxSGE: maxSGE, MaxQPDepth: maxDepth}
}

// Port implements [verbs.Provider]. TCP has no path MTU of InfiniBand's kinds, so MTU is the
// largest of them.
func (d *Device) Port() verbs.Port {
	return verbs.Port{Active: true, GIDs: []ib.GID{d.gid}, GUID: d.opts.GUID, PKeys: []ib.PKey{ib.DefaultPKey},
		MTU: ib.MTU4096}
}

// Alloc implements [verbs.Provider].
func (d *Device) Alloc(n int) (*verbs.Region, error) {
	if n <= 0 {
		return nil, verbs.ErrInvalid
	}
	return d.Register(regions.Alloc(n), 0)
}

// Register implements [verbs.Provider].
func (d *Device) Register(buf []byte, access verbs.Access) (*verbs.Region, error) {
	if d.ctx.Err() != nil {
		return nil, verbs.ErrClosed
	}
	return d.mem.Register(buf, access)
}

// Deregister implements [verbs.Provider].
func (d *Device) Deregister(r *verbs.Region) error {
	if err := d.mem.Deregister(r); err != nil {
		return err
	}
	for _, q := range d.allQPs() { // State waits for the lock of q, and so for an access that has begun
		_ = q.State()
	}
	return nil
}

func (d *Device) allQPs() []*qp {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Collect(maps.Values(d.qps))
}

// CreateCQ implements [verbs.Provider].
func (d *Device) CreateCQ(depth int) (verbs.CQ, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil, verbs.ErrClosed
	}
	c := newCQ(d, max(1, depth))
	d.cqs[c] = struct{}{}
	return c, nil
}

func (d *Device) forgetCQ(c *cq) {
	d.mu.Lock()
	delete(d.cqs, c)
	d.mu.Unlock()
}

// CreateSRQ implements [verbs.Provider].
func (d *Device) CreateSRQ(init verbs.SRQInit) (verbs.SRQ, error) {
	if init.Depth <= 0 || init.Depth > maxDepth || init.MaxSGE > maxSGE {
		return nil, verbs.ErrInvalid
	}
	return &srq{q: recvQueue{depth: init.Depth, maxSGE: max(1, init.MaxSGE)}, waiting: map[*session]struct{}{}}, nil
}

// CreateQP implements [verbs.Provider].
func (d *Device) CreateQP(init verbs.QPInit) (verbs.QP, error) {
	send, ok1 := init.SendCQ.(*cq)
	recv, ok2 := init.RecvCQ.(*cq)
	shared, ok3 := init.SRQ.(*srq)
	switch {
	case init.Transport != ib.RC:
		return nil, fmt.Errorf("%w: transport %v", verbs.ErrNotSupported, init.Transport)
	case !ok1 || !ok2 || send.dev != d || recv.dev != d:
		return nil, fmt.Errorf("%w: completion queues are not of this device", verbs.ErrInvalid)
	case init.SRQ != nil && !ok3:
		return nil, fmt.Errorf("%w: shared receive queue is not of this provider", verbs.ErrInvalid)
	case init.SendDepth > maxDepth || init.RecvDepth > maxDepth || init.MaxSendSGE > maxSGE || init.MaxRecvSGE > maxSGE:
		return nil, fmt.Errorf("%w: queue pair larger than the capabilities", verbs.ErrInvalid)
	}
	q := &qp{dev: d, sendCQ: send, recvCQ: recv, srq: shared, maxSGE: max(1, init.MaxSendSGE), maxORD: maxReads,
		recvQ: recvQueue{depth: max(1, init.RecvDepth), maxSGE: max(1, init.MaxRecvSGE)}}
	q.eng = engine{mem: &d.mem, sent: q.sendDone, recvd: q.recvDone, pop: q.pop, overIRD: &d.count.overIRD,
		sq: make([]sendWQE, max(1, init.SendDepth)), token: random32(d.opts.Rand)}
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case d.closed:
		return nil, verbs.ErrClosed
	case len(d.qps) >= maxQPs:
		return nil, verbs.ErrNoResources
	}
	for q.qpn <= ib.QPNGSI || q.qpn == ib.QPNMulticast || d.qps[q.qpn] != nil {
		q.qpn = ib.QPN(random32(d.opts.Rand) & 0xffffff)
	}
	d.qps[q.qpn] = q
	return q, nil
}

func (d *Device) forgetQP(q *qp) {
	d.mu.Lock()
	delete(d.qps, q.qpn)
	d.mu.Unlock()
}

func (d *Device) rememberStream(st *Stream) {
	d.count.streams.Add(1)
	d.mu.Lock()
	d.streams[st] = struct{}{}
	d.mu.Unlock()
}

func (d *Device) forgetStream(st *Stream) {
	d.mu.Lock()
	delete(d.streams, st)
	d.mu.Unlock()
}

// CreateAH implements [verbs.Provider].
func (d *Device) CreateAH(verbs.AHAttr) (verbs.AH, error) { return nil, verbs.ErrNotSupported }

// MADPort implements [verbs.Provider].
func (d *Device) MADPort() verbs.MADPort { return nil }

// Events implements [verbs.Provider].
func (d *Device) Events() <-chan verbs.Event { return d.events.Events() }

// SetTap implements [verbs.Provider]. TCP makes the packets, so there are none to
// show.
func (d *Device) SetTap(verbs.Tap) {}

// Close implements [verbs.Provider]. It takes about a second if peers do not
// close too.
func (d *Device) Close() error {
	if d.ctx.Err() != nil {
		return verbs.ErrClosed
	}
	for _, q := range d.allQPs() {
		_ = q.Destroy()
	}
	d.cancel()
	if d.ln != nil {
		_ = d.ln.Close()
	}
	force := time.AfterFunc(2*lingerTimeout, func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		for st := range d.streams {
			_ = st.conn.Close()
		}
	})
	d.wg.Wait()
	force.Stop()
	d.mu.Lock()
	cqs := d.cqs
	d.cqs = nil
	d.closed = true
	d.mu.Unlock()
	d.events.Close()
	for c := range cqs {
		_ = c.Destroy()
	}
	return nil
}
