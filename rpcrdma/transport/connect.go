package transport

import (
	"cmp"
	"context"
	"net"
	"net/netip"
	"time"

	"ipoibcm/mpa"
	"ipoibcm/provider/softiwarp"
	"ipoibcm/rdmacm"
)

// DialRoCE connects to a TCP port number of the RDMA IP CM service. Opt.Provider must be the
// provider of p.
func DialRoCE(ctx context.Context, p *rdmacm.Port, remote netip.Addr, port uint16, opt Options) (*End, error) {
	opt.RPC.Client = true
	opt.Peer = cmp.Or(opt.Peer, netip.AddrPortFrom(remote, port).String())
	e, err := New(opt)
	if err != nil {
		return nil, err
	}
	c, err := p.Dial(ctx, remote, port, e.setup())
	if err != nil {
		e.Close()
		return nil, err
	}
	e.Start(c.Private(), c.Close, c.Done())
	return e, nil
}

// AcceptRoCE accepts a request of the RDMA IP CM service. Opt.Provider must be the provider of the
// Port that received the request. AcceptRoCE does not wait for the RTU, which may be lost.
func AcceptRoCE(r *rdmacm.Request, opt Options) (*End, error) {
	e, err := New(opt)
	if err != nil {
		r.Reject(nil)
		return nil, err
	}
	c, err := r.Begin(e.setup())
	if err != nil {
		e.Close()
		return nil, err
	}
	e.settled = c.Settled()
	e.Start(r.Private, c.Close, c.Done())
	return e, nil
}

func (e *End) setup() rdmacm.Setup {
	return rdmacm.Setup{QP: e.qp, ResponderResources: reads, InitiatorDepth: reads, RNRRetry: 7, Private: e.Private()}
}

// startup returns the MPA options of either side: they negotiate depths, and use CRCs if one side
// wants them.
func (e *End) startup() softiwarp.Startup {
	return softiwarp.Startup{Options: mpa.Options{Negotiate: true, Depths: mpa.Depths{IRD: reads, ORD: reads}},
		Private: e.Private()}
}

// DialIWARP connects by MPA over the connection that dial makes. It sets Opt.Provider to dev.
func DialIWARP(ctx context.Context, dev *softiwarp.Device, dial func(context.Context) (net.Conn, error),
	opt Options) (*End, error) {
	opt.RPC.Client, opt.Provider = true, dev
	e, err := New(opt)
	if err != nil {
		return nil, err
	}
	res, err := dev.Connect(ctx, e.qp, e.startup(), dial)
	if err != nil {
		e.Close()
		return nil, err
	}
	if opt.Pause > 0 {
		t := time.NewTimer(opt.Pause)
		defer t.Stop()
		select {
		case <-t.C:
		case <-ctx.Done():
			e.Close()
			return nil, context.Cause(ctx)
		}
	}
	e.Start(res.Private, func() {}, nil)
	return e, nil
}

// AcceptIWARP accepts the MPA request that arrives on conn. It sets Opt.Provider to dev. No command of
// this repository serves RPC over iWARP; AcceptIWARP is the other half of DialIWARP for programs that do.
func AcceptIWARP(ctx context.Context, dev *softiwarp.Device, conn net.Conn, opt Options) (*End, error) {
	opt.Provider = dev
	e, err := New(opt)
	if err != nil {
		conn.Close()
		return nil, err
	}
	var private []byte
	_, err = dev.Accept(ctx, e.qp, e.startup(), conn, func(_ context.Context, r mpa.Request) mpa.Event {
		private = r.Private
		return mpa.Accept{Private: e.Private()}
	})
	if err != nil {
		e.Close()
		return nil, err
	}
	e.Start(private, func() {}, nil)
	return e, nil
}
