package transport

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"time"

	"ipoibcm/eventqueue"
	"ipoibcm/ib"
	"ipoibcm/rpcrdma"
	"ipoibcm/verbs"
)

// Options configures an End. Only Provider must be set.
type Options struct {
	Provider verbs.Provider
	// RPC are the options of the machine. New sets XID at random, and RecvInv and SendInv by the
	// provider's capabilities.
	RPC rpcrdma.Options
	// Serve answers a call of the peer, in a goroutine of its own. At most as many run at a time as
	// the End grants credits. It returns an Answer or a CannotAnswer, whose ID the End fills in.
	// ctx ends with the connection, which waits for all that run: Serve must not call [End.Close]. A nil
	// Serve, or any other event, answers RPCProgUnavail.
	Serve func(ctx context.Context, call rpcrdma.Serve) rpcrdma.Event
	// Pause is how long a client over iWARP waits between the connection and its first message:
	// Linux's siw overlooks what arrives while it is busy with its accept.
	Pause time.Duration
	// Versions remembers the peers' versions, for all clients that share it. Peer is the name of this peer
	// there; DialRoCE has its address and port for a name if Peer is empty. Nothing is remembered of a peer
	// without a name.
	Versions *Versions
	Peer     string
	// Closed, if it is not nil, is called with the reason when the connection has ended. It must not call
	// [End.Close], which waits for it.
	Closed func(error)
}

// reads is how many RDMA READs an End has outstanding at a time, and how many it lets the peer
// have.
const reads = 16

// ErrClosed is the reason of an End that Close ended.
var ErrClosed = errors.New("closed")

// An End is one end of one connection. Its methods may be called from several
// goroutines.
type End struct {
	opt Options
	cq  verbs.CQ
	qp  verbs.QP
	wg  sync.WaitGroup

	ctx    context.Context
	cancel context.CancelCauseFunc

	mu      sync.Mutex
	machine *rpcrdma.Conn
	timer   *time.Timer
	events  eventqueue.Queue[rpcrdma.Event] // events that wait to be applied
	scratch []byte                          // a received message, while the machine reads it

	recv     *verbs.Region
	recvSize int

	queue    []verbs.SendWR // what the send queue has no room for yet, in order
	inFlight int            // work requests in the send queue
	depth    int            // of the send queue
	most     int            // the most entries of queue
	held     int64          // octets in memory of Writes that are not complete
	mostHeld int64          // the most octets of held
	failed   bool           // an action could not be carried out: nothing more is posted
	lastWR   uint64
	work     map[uint64]work // by ID of the work request
	free     []*verbs.Region // send buffers

	memory map[rpcrdma.RegID]*verbs.Region
	reads  map[rpcrdma.ReadID]*read

	lastCall uint64
	calls    map[uint64]chan rpcrdma.Done

	settled <-chan struct{} // from the rdmacm.Conn; nil unless AcceptRoCE made the End
	started chan struct{}   // Start was called
	ready   chan struct{}
	told    bool // ready is closed
	unbind  func()
	private []byte        // what the peer sent
	closing bool          // end was called
	closed  bool          // the machine has had Disconnected
	done    chan struct{} // closed when everything is released
}

// work says what a work request of the send queue was for.
type work struct {
	region *verbs.Region // a send buffer, or memory to release; may be nil
	buffer bool          // region is a send buffer
	held   int64         // octets that count in End.held
	read   *read
}

// A read is one Read action of the machine. Each of its segments takes a work request.
type read struct {
	id     rpcrdma.ReadID
	region *verbs.Region
	left   int
}

// recvMark is the bit that marks IDs of work requests of the receive queue.
const recvMark = 1 << 63

// New makes an End. Its queue pair is in INIT, with receives posted. Close releases everything,
// whether the End was connected or not.
func New(opt Options) (*End, error) {
	caps := opt.Provider.Caps()
	opt.RPC.RecvInv, opt.RPC.SendInv = caps.Inv, caps.Inv
	var xid [4]byte
	_, _ = rand.Read(xid[:]) // never fails
	opt.RPC.XID = rpcrdma.XID(binary.BigEndian.Uint32(xid[:]))
	if v := opt.Versions.start(opt.Peer); v >= opt.RPC.MinVersion && v <= cmp.Or(opt.RPC.MaxVersion, v) {
		opt.RPC.Start = cmp.Or(v, opt.RPC.Start) // clients that share Versions may speak others
	}
	m, err := rpcrdma.NewConn(opt.RPC)
	if err != nil {
		return nil, err
	}
	e := &End{opt: opt, machine: m, work: map[uint64]work{}, memory: map[rpcrdma.RegID]*verbs.Region{},
		reads: map[rpcrdma.ReadID]*read{}, calls: map[uint64]chan rpcrdma.Done{}, started: make(chan struct{}),
		ready: make(chan struct{}), done: make(chan struct{}), unbind: func() {}}
	e.ctx, e.cancel = context.WithCancelCause(context.Background())
	if err := e.make(); err != nil {
		e.destroy()
		return nil, fmt.Errorf("rpcrdma: %w", err)
	}
	e.timer = time.AfterFunc(time.Hour, func() { e.step(rpcrdma.Wake{}) })
	e.wg.Go(e.complete)
	return e, nil
}

func (e *End) make() (err error) {
	count, size := e.machine.RecvBuffers()
	sends, largest := e.machine.SendBuffers()
	e.most = sends * (3*rpcrdma.MaxSegments + 1)
	e.mostHeld = 2 * int64(sends) * int64(e.machine.MaxLong()) // for the Writes of all calls, and as many unacknowledged
	e.depth = min(sends+2*rpcrdma.MaxSegments, e.opt.Provider.Caps().MaxQPDepth)
	p := e.opt.Provider
	if e.cq, err = p.CreateCQ(count + e.depth); err != nil {
		return err
	}
	if e.qp, err = p.CreateQP(verbs.QPInit{Transport: ib.RC, SendCQ: e.cq, RecvCQ: e.cq, SendDepth: e.depth,
		RecvDepth: count, MaxSendSGE: 1, MaxRecvSGE: 1}); err != nil {
		return err
	}
	if err := e.qp.Modify(verbs.QPAttr{State: verbs.StateInit, PKey: ib.DefaultPKey,
		Access: verbs.RemoteRead | verbs.RemoteWrite}); err != nil {
		return err
	}
	e.recvSize, e.scratch = size, make([]byte, size)
	if e.recv, err = p.Alloc(count * size); err != nil {
		return err
	}
	for range sends {
		r, err := p.Alloc(largest)
		if err != nil {
			return err
		}
		e.free = append(e.free, r)
	}
	for i := range count {
		if err := e.postRecv(uint64(i)); err != nil {
			return err
		}
	}
	return nil
}

func (e *End) postRecv(slot uint64) error {
	buf := e.recv.Buf[int(slot)*e.recvSize:][:e.recvSize]
	_, err := e.qp.PostRecv([]verbs.RecvWR{{ID: recvMark | slot, SG: []verbs.SGE{{Region: e.recv, Buf: buf}}}})
	return err
}

// QP returns the queue pair.
func (e *End) QP() verbs.QP { return e.qp }

// Private returns the octets that go at the beginning of the connection's private data.
func (e *End) Private() []byte { return e.machine.Private() }

// PeerPrivate returns the private data that was given to Start.
func (e *End) PeerPrivate() []byte {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.private
}

// Start begins to exchange messages. The queue pair must be in RTS. private is the private data
// that the peer sent. The End calls unbind once, to end the connection below it. The caller closes
// lost if that connection ends by itself; lost may be nil.
func (e *End) Start(private []byte, unbind func(), lost <-chan struct{}) {
	e.mu.Lock()
	e.unbind, e.private = unbind, private
	e.mu.Unlock()
	e.step(rpcrdma.Connected{Private: private})
	close(e.started)
	e.wg.Go(func() {
		select {
		case <-lost:
			e.end(errors.New("the peer ended the connection"))
		case <-e.ctx.Done():
		}
	})
}

// Info returns the current state of the machine.
func (e *End) Info() rpcrdma.Info {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.machine.Info()
}

// Counters calls f for every count of faults, by reason.
func (e *End) Counters(f func(name string, value uint64)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.machine.Counters().Each(f)
}

// Settled is closed when the RTU of an accepted RoCE connection, or its first data, shows that
// packets to the peer's GID reach the peer. It is also closed when the connection has failed. It is
// nil for other connections.
func (e *End) Settled() <-chan struct{} { return e.settled }

// Ready is closed when the version is settled.
func (e *End) Ready() <-chan struct{} { return e.ready }

// Done is closed when the connection has ended and all memory is released. Err then says why it
// ended.
func (e *End) Done() <-chan struct{} { return e.done }

// Err returns why the connection has ended, nil before that.
func (e *End) Err() error { return context.Cause(e.ctx) }

// A Reply is the reply to a call.
type Reply struct {
	// Payload is the RPC reply without the items that the peer wrote by themselves, and Results are
	// these items.
	Payload []byte
	Results [][]byte
	Option  *rpcrdma.Option
}

// A CallError says that a call brought no reply.
type CallError struct {
	Reason    rpcrdma.Reason
	Detail    string
	Transport rpcrdma.TransportError // the peer's ERROR, if Reason is ReasonPeerError
}

// Error returns reason and detail.
func (e *CallError) Error() string {
	return (&rpcrdma.Error{Reason: e.Reason, Detail: e.Detail}).Error()
}

// Call makes a call and waits for its reply. It chooses the ID of req itself.
func (e *End) Call(ctx context.Context, req rpcrdma.Submit) (Reply, error) {
	answer := make(chan rpcrdma.Done, 1)
	e.mu.Lock()
	if e.closed {
		e.mu.Unlock()
		return Reply{}, context.Cause(e.ctx)
	}
	e.lastCall++
	req.ID = e.lastCall
	e.calls[req.ID] = answer
	e.apply(req)
	e.mu.Unlock()
	var d rpcrdma.Done
	select {
	case d = <-answer:
	case <-ctx.Done():
		e.step(rpcrdma.Cancel{ID: req.ID})
		select {
		case d = <-answer: // the cancellation, or the reply at the last moment
		case <-e.done:
			return Reply{}, context.Cause(ctx)
		}
		if d.Err != nil {
			return Reply{}, context.Cause(ctx)
		}
	case <-e.done:
		select {
		case d = <-answer:
		default:
			return Reply{}, context.Cause(e.ctx)
		}
	}
	if d.Err != nil {
		return Reply{}, &CallError{d.Err.Reason, d.Err.Detail, d.Transport}
	}
	return Reply{d.Payload, d.Results, d.Option}, nil
}

// Close ends the connection, releases everything and returns when that is done. It waits for
// Options.Serve and Options.Closed, so that a Close in one of them would wait for itself.
func (e *End) Close() {
	e.end(ErrClosed)
	<-e.done
}

// end starts to end the connection; only the first call does. The queue pair stops before the
// machine releases memory, so that no peer reaches memory that is released.
func (e *End) end(why error) {
	e.mu.Lock()
	first, unbind := !e.closing, e.unbind
	e.closing = true
	e.mu.Unlock()
	if !first {
		return
	}
	e.cancel(why)
	why = context.Cause(e.ctx) // the first cause is the one that counts
	go func() {
		unbind()
		_ = e.qp.Modify(verbs.QPAttr{State: verbs.StateError}) // gone already is as good
		e.mu.Lock()
		e.apply(rpcrdma.Disconnected{Err: why, Own: e.failed || errors.Is(why, ErrClosed)})
		e.closed = true
		e.mu.Unlock()
		e.destroy()
		e.wg.Wait()
		if e.opt.Closed != nil {
			e.opt.Closed(why)
		}
		close(e.done)
	}()
}

// destroy releases what New and the calls have allocated.
func (e *End) destroy() {
	if e.timer != nil {
		e.timer.Stop()
	}
	if e.qp != nil {
		_ = e.qp.Destroy()
	}
	if e.cq != nil {
		_ = e.cq.Destroy()
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	all := append(e.free, e.recv)
	for _, w := range e.work {
		if w.read == nil {
			all = append(all, w.region)
		}
	}
	for _, r := range e.memory {
		all = append(all, r)
	}
	for _, r := range e.reads {
		all = append(all, r.region)
	}
	for _, r := range all {
		if r != nil {
			_ = e.opt.Provider.Deregister(r) // gone already is as good
		}
	}
	e.free, e.recv, e.work, e.memory, e.reads = nil, nil, nil, nil, nil
}
