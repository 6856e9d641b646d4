package rdmacm

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"ipoibcm/cm"
	"ipoibcm/ib"
	"ipoibcm/serviceid"
	"ipoibcm/verbs"
)

// MaxWaiting is how many requests of one listener may wait for an answer. Further ones are
// rejected.
const MaxWaiting = 64

// Errors.
var (
	ErrClosed    = errors.New("rdmacm: closed")
	ErrNoQP1     = errors.New("rdmacm: the provider cannot give QP 1")
	ErrInUse     = errors.New("rdmacm: somebody listens on that port already")
	ErrNoAddress = errors.New("rdmacm: no GID of the device is of the peer's address family")
)

// Options configures a Port. Only Provider must be set.
type Options struct {
	Provider verbs.Provider
	// Shared says that the user reads the provider's channels of MADs and events, and passes those
	// that concern this Port to Port.MAD and Port.Event.
	Shared bool
	// CM are the options of the manager. Zero GID and CAGUID become the provider's, and a nil Rand
	// a cryptographic source.
	CM cm.Options
	// Log gets every CM message and decision; nil discards them.
	Log func(cm.Note)
}

// A Port makes and accepts connections on QP 1 of a provider. Its methods may be called from
// several goroutines.
type Port struct {
	opt    Options
	mads   verbs.MADPort
	wake   chan struct{}
	cancel chan struct{}
	wg     sync.WaitGroup

	mu        sync.Mutex
	manager   *cm.Manager
	last      cm.Handle
	conns     map[cm.Handle]*Conn
	byQPN     map[ib.QPN]*Conn
	listeners map[serviceid.ID]*Listener
	gids      []ib.GID // the GIDs at which the listeners listen
	closed    bool
	tell      []func() // functions that unlock calls after it has released mu
}

// Open starts a Port. The provider must outlive it.
func Open(opt Options) (*Port, error) {
	mp := opt.Provider.MADPort()
	if mp == nil {
		return nil, ErrNoQP1
	}
	port := opt.Provider.Port()
	if len(port.GIDs) == 0 {
		return nil, ErrNoAddress
	}
	opt.CM.GID, opt.CM.CAGUID = cmp.Or(opt.CM.GID, port.GIDs[0]), cmp.Or(opt.CM.CAGUID, port.GUID)
	if opt.CM.Rand == nil {
		opt.CM.Rand = unpredictable{}
	}
	if opt.Log == nil {
		opt.Log = func(cm.Note) {}
	}
	p := &Port{
		opt: opt, mads: mp, wake: make(chan struct{}, 1), cancel: make(chan struct{}), manager: cm.New(opt.CM),
		conns: map[cm.Handle]*Conn{}, byQPN: map[ib.QPN]*Conn{}, listeners: map[serviceid.ID]*Listener{},
	}
	p.wg.Go(p.run)
	return p, nil
}

type unpredictable struct{}

func (unpredictable) Uint64() uint64 {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails
	return binary.LittleEndian.Uint64(b[:])
}

// Close ends the Port. It sends one DREQ for each connection that is up, and moves the queue pairs
// to ERR.
func (p *Port) Close() {
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return
	}
	for h := range p.conns {
		p.step(cm.Disconnect{Handle: h})
	}
	p.closed = true
	for _, c := range p.conns {
		p.ended(c, ErrClosed)
	}
	for _, l := range p.listeners {
		close(l.requests)
	}
	clear(p.listeners)
	p.unlock()
	close(p.cancel)
	p.wg.Wait()
}

func (p *Port) run() {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	var mads <-chan *verbs.MAD
	var events <-chan verbs.Event
	if !p.opt.Shared {
		mads, events = p.mads.MADs(), p.opt.Provider.Events()
	}
	for {
		select {
		case m, ok := <-mads:
			if !ok {
				mads = nil
				continue
			}
			p.MAD(m)
		case ev, ok := <-events:
			if !ok {
				events = nil
				continue
			}
			p.Event(ev)
		case <-timer.C:
			p.do(cm.Wake{})
		case <-p.wake:
		case <-p.cancel:
			return
		}
		p.mu.Lock()
		at := p.manager.Deadline()
		p.mu.Unlock()
		wait := time.Hour
		if !at.IsZero() {
			wait = max(0, time.Until(at))
		}
		timer.Reset(wait)
	}
}

// Owns reports whether a MAD is for this Port and for no other user of QP 1 (see
// [cm.Manager.Owns]).
func (p *Port) Owns(m *verbs.MAD) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.manager.Owns(m)
}

// MAD handles a MAD that arrived on QP 1.
func (p *Port) MAD(m *verbs.MAD) { p.do(cm.RecvMAD{MAD: m}) }

// Event handles an asynchronous event of the provider.
func (p *Port) Event(ev verbs.Event) {
	p.mu.Lock()
	c := p.byQPN[ev.QPN]
	if ev.Kind == verbs.GIDChange {
		p.follow()
	}
	p.unlock()
	switch {
	case c == nil:
	case ev.Kind == verbs.CommEst:
		c.Received()
	case ev.Kind == verbs.QPFatal:
		c.Close()
	}
}

// follow makes the listeners listen at the GIDs that the device has now, and at no others. mu is
// held.
func (p *Port) follow() {
	old := p.gids
	p.gids = p.opt.Provider.Port().GIDs
	for id := range p.listeners {
		for _, g := range old {
			if !slices.Contains(p.gids, g) {
				p.step(cm.Unlisten{ServiceID: id, GID: g})
			}
		}
		for _, g := range p.gids {
			p.step(cm.Listen{ServiceID: id, GID: g})
		}
	}
}

// Counters calls f for every counter of the manager, in a fixed order.
func (p *Port) Counters(f func(name string, value uint64)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.manager.Counters(f)
}

func (p *Port) do(ev cm.Event) {
	p.mu.Lock()
	p.step(ev)
	p.unlock()
	p.notify()
}

// unlock releases mu, and then calls the functions that were queued while it was held.
func (p *Port) unlock() {
	tell := p.tell
	p.tell = nil
	p.mu.Unlock()
	for _, f := range tell {
		f()
	}
}

// step passes ev to the manager and carries out the actions that it returns. mu is held.
func (p *Port) step(ev cm.Event) {
	if p.closed {
		return
	}
	for _, a := range p.manager.Step(nil, time.Now(), ev) {
		switch a := a.(type) {
		case cm.SendMAD:
			_ = p.mads.SendMAD(a.MAD) // the manager sends it again, or gives up in time
		case cm.RequestReceived:
			p.requested(a)
		case cm.ReplyReceived:
			p.replied(a)
		case cm.Established:
			if c := p.conns[a.Handle]; c != nil {
				c.settle(nil)
			}
		case cm.Failed:
			if c := p.conns[a.Handle]; c != nil {
				p.ended(c, &FailedError{Cause: a.Cause, Reason: a.Reason, Private: a.PrivateData})
			}
		case cm.Disconnected:
			if c := p.conns[a.Handle]; c != nil {
				var err error
				if a.By != cm.ByUser {
					err = &DisconnectedError{By: a.By, Reason: a.Reason}
				}
				p.ended(c, err)
			}
		case cm.Note:
			note := a
			p.tell = append(p.tell, func() { p.opt.Log(note) })
		}
	}
}

// A FailedError says that a connection did not come up.
type FailedError struct {
	Cause   cm.Cause
	Reason  cm.Reason // set if Cause is Rejected or Refused
	Private []byte    // the peer's 148 octets, if Cause is Rejected
}

// Error names the cause and, if the peer rejected, the reason of its REJ.
func (e *FailedError) Error() string {
	switch e.Cause {
	case cm.Rejected:
		if e.Reason == cm.ReasonInvalidServiceID {
			return "the peer rejected the REQ: nobody listens there (REJ 8)"
		}
		return fmt.Sprintf("the peer rejected the connection: %v", e.Reason)
	case cm.TimedOut:
		return "the peer did not answer the REQ: is RDMA offered there, and UDP port 4791 let through?"
	}
	return fmt.Sprintf("the connection was not made: %v", e.Cause)
}

// A DisconnectedError says who ended a connection that was up.
type DisconnectedError struct {
	By     cm.Side
	Reason cm.Reason // of the peer's REJ; 0 if there was none
}

// Error names the side, and the reason of a REJ.
func (e *DisconnectedError) Error() string {
	if e.Reason != 0 {
		return fmt.Sprintf("ended by the %v: REJ %v", e.By, e.Reason)
	}
	return fmt.Sprintf("ended by the %v", e.By)
}

// A Setup is what one end brings to a connection. QP must be in INIT with receives posted.
type Setup struct {
	QP verbs.QP
	// ResponderResources is how many RDMA READs the peer may have outstanding here, InitiatorDepth
	// how many this end may have outstanding at the peer.
	ResponderResources, InitiatorDepth uint8
	// RNRRetry is how often a send is repeated if the peer has no receive posted: 0 to 7, and 7
	// means for ever.
	RNRRetry uint8
	// Private is the private data: of a REQ at most MaxPrivateData octets, of a
	// REP MaxReplyData.
	Private []byte
}

// Dial connects to a port of a peer. It returns when the connection is up, has failed, or ctx ends.
// In any case the queue pair stays the user's.
func (p *Port) Dial(ctx context.Context, remote netip.Addr, port uint16, s Setup) (*Conn, error) {
	if len(s.Private) > MaxPrivateData {
		return nil, fmt.Errorf("rdmacm: %d octets of private data, %d fit into a REQ", len(s.Private), MaxPrivateData)
	}
	local, err := p.gid(remote)
	if err != nil {
		return nil, err
	}
	h := Header{SrcPort: uint16(s.QP.QPN()) | 1<<15, Src: local.Addr().Unmap().WithZone(""),
		Dst: remote.Unmap().WithZone("")}
	c := &Conn{port: p, setup: s, settled: make(chan struct{}), done: make(chan struct{})}
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return nil, ErrClosed
	}
	p.last++
	c.handle, c.psn = p.last, psn()
	p.conns[c.handle], p.byQPN[s.QP.QPN()] = c, c
	p.step(cm.Connect{
		Handle: c.handle, Local: local, Remote: gidOf(remote), ServiceID: serviceid.RDMAIP(port), Transport: ib.RC,
		QPN: s.QP.QPN(), StartingPSN: c.psn, PathMTU: verbs.PathMTU(p.opt.Provider, gidOf(remote)), RetryCount: 7,
		RNRRetry: s.RNRRetry, ResponderResources: s.ResponderResources, InitiatorDepth: s.InitiatorDepth,
		PrivateData: append(h.Append(nil), s.Private...),
	})
	p.unlock()
	p.notify()
	select {
	case <-c.settled:
	case <-ctx.Done():
		p.do(cm.Cancel{Handle: c.handle})
		<-c.settled
		if c.err == nil { // it came up at the last moment
			c.Close()
		}
		return nil, context.Cause(ctx)
	}
	return c.outcome()
}

// notify makes run look at the deadline again.
func (p *Port) notify() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// gid returns the first local GID of remote's address family. It prefers one that is link-local if
// remote is, and one that is not if remote is not.
func (p *Port) gid(remote netip.Addr) (ib.GID, error) {
	remote = remote.Unmap()
	family := slices.DeleteFunc(slices.Clone(p.opt.Provider.Port().GIDs),
		func(g ib.GID) bool { return g.Is4() != remote.Is4() })
	if len(family) == 0 {
		return ib.GID{}, ErrNoAddress
	}
	i := slices.IndexFunc(family,
		func(g ib.GID) bool { return g.Addr().IsLinkLocalUnicast() == remote.IsLinkLocalUnicast() })
	return family[max(i, 0)], nil
}

// gidOf returns the GID of an IP address on RoCE: the address itself, IPv4 mapped.
func gidOf(a netip.Addr) ib.GID { return ib.GID(a.As16()) }

// psn returns an unpredictable PSN.
func psn() ib.PSN { return ib.PSN(unpredictable{}.Uint64()) & ib.PSNMask }

// replied moves the queue pair of our REQ to RTS, and makes the manager send an RTU. If the queue
// pair cannot move, the manager sends a REJ.
func (p *Port) replied(a cm.ReplyReceived) {
	c := p.conns[a.Handle]
	if c == nil {
		return
	}
	c.private = a.PrivateData
	if err := c.start(a.Params); err != nil {
		c.why = err
		p.step(cm.Reject{Handle: a.Handle, Reason: cm.ReasonNoResources})
		return
	}
	p.step(cm.Ready{Handle: a.Handle})
}

// ended removes c, moves its queue pair to ERR and closes its channels. mu is held.
func (p *Port) ended(c *Conn, err error) {
	delete(p.conns, c.handle)
	if p.byQPN[c.setup.QP.QPN()] == c {
		delete(p.byQPN, c.setup.QP.QPN())
	}
	if c.why != nil {
		err = c.why
	}
	_ = c.setup.QP.Modify(verbs.QPAttr{State: verbs.StateError}) // gone already is as good
	c.settle(err)
	c.end = err
	close(c.done)
}
