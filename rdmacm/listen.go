package rdmacm

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"ipoibcm/cm"
	"ipoibcm/ib"
	"ipoibcm/serviceid"
	"ipoibcm/verbs"
)

// A Listener receives the requests for one port.
type Listener struct {
	port     *Port
	id       serviceid.ID
	requests chan *Request
}

// Listen returns a Listener that gets the REQs for a TCP port, at every GID of the device. REQs for
// ports without a Listener are answered with REJ 8.
func (p *Port) Listen(port uint16) (*Listener, error) {
	l := &Listener{port: p, id: serviceid.RDMAIP(port), requests: make(chan *Request, MaxWaiting)}
	p.mu.Lock()
	defer p.unlock()
	switch {
	case p.closed:
		return nil, ErrClosed
	case p.listeners[l.id] != nil:
		return nil, ErrInUse
	}
	p.listeners[l.id] = l
	p.follow()
	return l, nil
}

// Close stops the Listener. It rejects requests that wait; connections stay.
func (l *Listener) Close() {
	p := l.port
	p.mu.Lock()
	defer p.unlock()
	if p.listeners[l.id] != l {
		return
	}
	delete(p.listeners, l.id)
	for _, g := range p.gids {
		p.step(cm.Unlisten{ServiceID: l.id, GID: g})
	}
	close(l.requests)
	for r := range l.requests {
		p.step(cm.Reject{Handle: r.handle, Reason: cm.ReasonConsumer})
	}
}

// Next returns the next request.
func (l *Listener) Next(ctx context.Context) (*Request, error) {
	select {
	case r, ok := <-l.requests:
		if !ok {
			return nil, ErrClosed
		}
		return r, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// A Request is a REQ that a peer sent. The user answers it with Accept, Begin or Reject before the
// peer gives up (after some seconds).
type Request struct {
	Header  Header
	Params  cm.Params
	Private []byte // behind the header

	port   *Port
	handle cm.Handle
}

// requested rejects a REQ, or gives it to its Listener. p.mu is held.
func (p *Port) requested(a cm.RequestReceived) {
	l := p.listeners[a.ServiceID]
	refuse := func(r cm.Reason) { p.step(cm.Reject{Handle: a.Handle, Reason: r}) }
	if l == nil {
		refuse(cm.ReasonInvalidServiceID)
		return
	}
	if a.Transport != ib.RC {
		refuse(cm.ReasonInvalidTransport)
		return
	}
	if mtu := verbs.PathMTU(p.opt.Provider, a.Remote); a.PathMTU > mtu { // packets of that size would not arrive
		p.step(cm.Reject{Handle: a.Handle, Reason: cm.ReasonInvalidMTU, ARI: []byte{byte(mtu)}})
		return
	}
	h, private, err := ParseHeader(a.PrivateData)
	if err != nil {
		refuse(cm.ReasonUnsupported)
		return
	}
	select {
	case l.requests <- &Request{Header: h, Params: a.Params, Private: private, port: p, handle: a.Handle}:
	default:
		refuse(cm.ReasonNoResources)
	}
}

// Accept answers with a REP. It returns when the peer has confirmed the REP, by an RTU or by data
// (see [Conn.Received]), when the connection has failed, or when ctx ends. As soon as the peer has
// sent data the queue pair may send too, even before Accept returns.
func (r *Request) Accept(ctx context.Context, s Setup) (*Conn, error) {
	c, err := r.Begin(s)
	if err != nil {
		return nil, err
	}
	select {
	case <-c.settled:
		return c.outcome()
	case <-ctx.Done():
		c.Close()
		return nil, context.Cause(ctx)
	}
}

// Begin answers with a REP and returns without waiting for the RTU.
func (r *Request) Begin(s Setup) (*Conn, error) {
	if len(s.Private) > MaxReplyData {
		return nil, fmt.Errorf("rdmacm: %d octets of private data, %d fit into a REP", len(s.Private), MaxReplyData)
	}
	p := r.port
	c := &Conn{port: p, handle: r.handle, setup: s, psn: psn(), private: r.Private, settled: make(chan struct{}),
		done: make(chan struct{})}
	params := r.Params
	params.RecvPSN = c.psn
	// Each side has at most as many READs outstanding as the other answers.
	params.ResponderResources = min(s.ResponderResources, r.Params.ResponderResources)
	params.InitiatorDepth = min(s.InitiatorDepth, r.Params.InitiatorDepth)
	if err := c.start(params); err != nil {
		r.Reject(nil)
		return nil, err
	}
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return nil, ErrClosed
	}
	p.conns[c.handle], p.byQPN[s.QP.QPN()] = c, c
	p.step(cm.Accept{Handle: r.handle, QPN: s.QP.QPN(), StartingPSN: c.psn, RNRRetry: s.RNRRetry,
		ResponderResources: params.ResponderResources, InitiatorDepth: params.InitiatorDepth, PrivateData: s.Private})
	// The request may have ended before the user answered. The manager may still keep its record,
	// for repeats of the REQ, but reports no end of it any more.
	taken := slices.ContainsFunc(p.manager.Conns(),
		func(i cm.ConnInfo) bool { return i.Handle == r.handle && i.State == cm.StateREPSent })
	if !taken && p.conns[c.handle] == c {
		p.ended(c, errors.New("rdmacm: the peer has given up, or the answer came too late"))
	}
	p.unlock()
	p.notify()
	return c, nil
}

// Reject answers with REJ 28, consumer reject, and private data of at most
// MaxRejectData octets.
func (r *Request) Reject(private []byte) {
	r.port.do(cm.Reject{Handle: r.handle, Reason: cm.ReasonConsumer, PrivateData: private})
}
