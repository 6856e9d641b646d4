package agent

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"sync/atomic"
	"syscall"
	"time"

	"ipoibcm/datapath"
	"ipoibcm/group"
	"ipoibcm/hostnet"
	"ipoibcm/ib"
	"ipoibcm/ipoib"
	"ipoibcm/nexthop"
	"ipoibcm/verbs"
	"ipoibcm/wire/encap"
)

// errBusy is the error of TUNSETIFF for a name in use.
var errBusy error = syscall.EBUSY

// counts are the agent's own counters. The driver adds to them, and anyone may read them.
type counts struct {
	sendUD         atomic.Uint64 `name:"ud_frames_sent"`
	sendUDFailed   atomic.Uint64 `name:"ud_frames_failed"`
	udRevived      atomic.Uint64 `name:"ud_qp_revived"`
	sendConn       atomic.Uint64 `name:"queued_packets_sent"`
	sendConnFailed atomic.Uint64 `name:"queued_packets_failed"`
	sendMAD        atomic.Uint64 `name:"mads_sent"`
	sendMADFailed  atomic.Uint64 `name:"mads_failed"`
	writeTUN       atomic.Uint64 `name:"tun_packets_injected"`
	writeTUNFailed atomic.Uint64 `name:"tun_packets_refused"`
	qpFailed       atomic.Uint64 `name:"qps_failed"`
	joinFailed     atomic.Uint64 `name:"group_joins_failed"`
	ahFailed       atomic.Uint64 `name:"address_handles_failed"`
}

// A conn is a connected QP. path is the path that packets from the machine's queues take over it; nil until
// the QP is connected.
type conn struct {
	dp   *datapath.Conn
	path *datapath.Path
}

// A path is a next hop of the data path.
type path struct {
	p    nexthop.Path
	dp   *datapath.Path
	ah   *handle               // that dp's target has; nil: none
	seen datapath.PathCounters // when last accounted
}

// A handle is an address handle with the number of paths that use it.
type handle struct {
	ah   verbs.AH
	refs int
}

// do carries out one action.
func (a *Agent) do(act ipoib.Action) {
	switch act := act.(type) {
	case ipoib.SendUD:
		a.sendUD(act)
	case ipoib.SendCopies:
		a.sendCopies(act)
	case ipoib.HoldGroups:
		a.loop.HoldGroups(act.On)
	case ipoib.SendConn:
		a.sendConn(act)
	case ipoib.WriteTUN:
		count(&a.counters.writeTUN, &a.counters.writeTUNFailed, a.loop.InjectTUN(act.IP))
	case ipoib.SendMAD:
		err := verbs.ErrNotSupported
		if p := a.opt.Provider.MADPort(); p != nil {
			err = p.SendMAD(act.MAD)
		}
		count(&a.counters.sendMAD, &a.counters.sendMADFailed, err)
	case ipoib.CreateQP:
		a.createQP(act)
	case ipoib.ConnectQP:
		a.connectQP(act)
	case ipoib.DestroyQP:
		a.destroyQP(act.Conn)
	case ipoib.JoinGroup:
		a.joinGroup(act.MGID, act.MLID)
	case ipoib.SendSubnet:
		count(&a.counters.sendMAD, &a.counters.sendMADFailed, a.sendSubnet(act.MAD, act.Wait))
	case ipoib.UsePath:
		a.usePath(act.Path)
	case ipoib.ForgetPath:
		delete(a.fabric.paths, act.DGID)
	case ipoib.SetQKey:
		a.setQKey(act.QKey)
	case ipoib.LeaveGroup:
		delete(a.groups, act.MGID)
		if err := a.detach(act.MGID, act.MLID); err != nil {
			a.log.Warn("cannot leave group", "mgid", act.MGID, "err", err)
		}
	case ipoib.PublishGroups:
		a.publishGroups(act.Table)
	case ipoib.FIBAction:
		a.doFIB(act.Action)
	case ipoib.SetUpIPv6:
		a.kernel.change(a.setUpIPv6, nil)
	case ipoib.AddAddr:
		a.kernel.change(func() {
			if err := a.kernel.host.AddAddr(act.Prefix); err != nil {
				a.log.Warn("cannot add address", "prefix", act.Prefix, "err", err)
			}
		}, nil)
	case ipoib.RemoveAddr:
		a.kernel.change(func() {
			if err := a.kernel.host.DelAddr(act.Prefix); err != nil && !errors.Is(err, hostnet.ErrNotFound) {
				a.log.Warn("cannot remove address", "prefix", act.Prefix, "err", err)
			}
		}, nil)
	case ipoib.AskOther:
		a.kernel.asks.push(job{do: func() ipoib.Event { return a.kernel.other(act.Addr) }})
	case ipoib.Note:
		a.note(act)
	default:
		panic(fmt.Sprintf("agent: unknown action %T", act)) // our bug
	}
}

func count(good, bad *atomic.Uint64, err error) {
	good.Add(1)
	if err != nil {
		bad.Add(1)
	}
}

func (a *Agent) sendUD(act ipoib.SendUD) {
	gid, qpn := act.Link.GID, act.Link.QPN
	if !act.MGID.IsZero() {
		gid, qpn = act.MGID, ib.QPNMulticast
	}
	err := error(datapath.ErrClosed)
	var h encap.Header
	if h.UnmarshalBinary(act.Frame) == nil {
		var to *handle
		if to, err = a.handle(gid); err == nil {
			err = a.loop.SendUD(a.dest(to.ah, qpn), h.Type, act.Frame[encap.HeaderLen:])
		}
	}
	count(&a.counters.sendUD, &a.counters.sendUDFailed, err)
}

func (a *Agent) dest(ah verbs.AH, qpn ib.QPN) datapath.UDDest {
	return datapath.UDDest{AH: ah, QPN: qpn, QKey: cmp.Or(a.opt.QKey, ib.QKeyIPoIB)}
}

func (a *Agent) sendConn(act ipoib.SendConn) {
	err := error(datapath.ErrClosed)
	var h encap.Header
	if c := a.conns[act.Conn]; c != nil && c.path != nil && h.UnmarshalBinary(act.Frame) == nil {
		if body := act.Frame[encap.HeaderLen:]; h.Type == encap.PathProbe {
			err = a.loop.SendConn(c.dp, h.Type, body)
		} else {
			err = a.loop.Send(c.path, body)
		}
	}
	count(&a.counters.sendConn, &a.counters.sendConnFailed, err)
}

// handle returns the address handle of a GID with its number of users, making it if need be. When there are
// too many handles, those without users are destroyed first.
func (a *Agent) handle(gid ib.GID) (*handle, error) {
	if h := a.ahs[gid]; h != nil {
		return h, nil
	}
	if len(a.ahs) >= a.opt.maxNeighbours() {
		a.loop.Barrier()
		for g, h := range a.ahs {
			if h.refs == 0 {
				h.ah.Destroy()
				delete(a.ahs, g)
			}
		}
	}
	attr, err := a.attr(gid)
	if err != nil {
		return nil, err
	}
	ah, err := a.opt.Provider.CreateAH(attr)
	if err != nil {
		a.counters.ahFailed.Add(1)
		return nil, err
	}
	h := &handle{ah: ah}
	a.ahs[gid] = h
	return h, nil
}

// readdress makes every address handle anew. Handles are made with our GID and the traffic class, one of
// which has changed.
func (a *Agent) readdress() {
	old := a.ahs
	a.ahs = map[ib.GID]*handle{}
	a.retarget(func(nexthop.Path) bool { return true })
	a.loop.Barrier()
	for _, h := range old {
		h.ah.Destroy()
	}
}

func (a *Agent) createQP(act ipoib.CreateQP) {
	dp, err := a.loop.NewConn(act.Transport, act.ReceiveMTU)
	if err != nil {
		a.qpFailed(act.Conn, "create", err)
		return
	}
	if err = dp.QP().Modify(act.Init); err == nil {
		err = dp.PostRecvs()
	}
	if err != nil {
		dp.Close()
		a.qpFailed(act.Conn, "initialise", err)
		return
	}
	a.conns[act.Conn] = &conn{dp: dp}
	a.byQPN[dp.QP().QPN()] = act.Conn
	a.pending.Add(ipoib.QPCreated{Conn: act.Conn, QPN: dp.QP().QPN(),
		PathMTU: verbs.PathTo(a.opt.Provider, a.link.GID, act.Peer).MTU})
}

// qpFailed has the machine told that what was to be done to the QP of a connection has failed.
func (a *Agent) qpFailed(of nexthop.Conn, what string, err error) {
	a.counters.qpFailed.Add(1)
	a.pending.Add(ipoib.QPFailed{Conn: of, Text: fmt.Sprintf("%s QP: %v", what, err)})
}

func (a *Agent) connectQP(act ipoib.ConnectQP) {
	c := a.conns[act.Conn]
	if c == nil {
		return
	}
	err := c.dp.QP().Modify(act.RTR)
	if err == nil {
		err = c.dp.QP().Modify(act.RTS)
	}
	if err != nil {
		a.destroyQP(act.Conn)
		a.qpFailed(act.Conn, "connect", err)
		return
	}
	c.path = datapath.NewPath(0, datapath.Target{Kind: datapath.ToConn, Conn: c.dp})
}

func (a *Agent) destroyQP(handle nexthop.Conn) {
	c := a.conns[handle]
	if c == nil {
		return
	}
	delete(a.conns, handle)
	delete(a.byQPN, c.dp.QP().QPN())
	// The machine has moved all paths away before. A path that still led here would drop its packets,
	// so it is set to miss.
	for _, p := range a.paths {
		if p.p.Kind == nexthop.PathConn && p.p.Conn == handle {
			p.dp.Set(datapath.Target{Kind: datapath.Miss})
		}
	}
	if err := c.dp.Close(); err != nil {
		a.log.Warn("cannot destroy QP", "err", err)
	}
}

func (a *Agent) joinGroup(mgid ib.GID, mlid ib.LID) {
	if err := a.attach(mgid, mlid); err != nil {
		a.counters.joinFailed.Add(1)
		a.log.Warn("cannot join group", "mgid", mgid, "err", err) // RFC 4391 section 12
		a.pending.Add(ipoib.JoinFailed{MGID: mgid, Err: err})
		return
	}
	a.groups[mgid] = time.Now()
}

// publishGroups sets in the data path which inner groups we want, and which addresses are subnet broadcasts.
func (a *Agent) publishGroups(t *group.Table) {
	a.loop.SetGroups(t.Groups())
	a.loop.SetBroadcasts(t.SubnetBroadcasts())
}

func (a *Agent) setPath(hop netip.Addr, to nexthop.Path) {
	target, h := a.targetOrDrop(hop, to)
	a.knowUD(to, 1)
	p := a.paths[hop]
	if p == nil {
		p = &path{dp: datapath.NewPath(0, target)}
		a.paths[hop] = p
	} else {
		a.countUD(p)
		a.knowUD(p.p, -1)
		p.dp.Set(target)
	}
	p.p = to
	p.use(h)
}

func (a *Agent) delPath(hop netip.Addr) {
	p := a.paths[hop]
	if p == nil {
		return
	}
	a.countUD(p)
	a.knowUD(p.p, -1)
	p.use(nil)
	delete(a.paths, hop)
}

// knowUD adds n to the number of paths in the data path that lead to a peer's UD QP ([datapath.Loop.KnowUD]), if p
// does.
func (a *Agent) knowUD(p nexthop.Path, n int) {
	if p.Kind == nexthop.PathUD {
		a.loop.KnowUD(p.Link.GID, p.Link.QPN, n)
	}
}

// use notes that p's target has the address handle h, or none if that is nil.
func (p *path) use(h *handle) {
	if h != nil {
		h.refs++
	}
	if p.ah != nil {
		p.ah.refs--
	}
	p.ah = h
}

// usesAH reports whether packets take p by an address handle, if there is one.
func usesAH(p nexthop.Path) bool {
	return p.Kind == nexthop.PathUD || p.Kind == nexthop.PathGroup || p.Kind == nexthop.PathConn && p.UDMTU > 0
}

// targetOrDrop returns the target of p, and the address handle in it. If there is no target, it returns one that
// drops packets and counts them.
func (a *Agent) targetOrDrop(hop netip.Addr, p nexthop.Path) (datapath.Target, *handle) {
	t, h, err := a.target(p)
	if err != nil {
		a.log.Warn("cannot use path", "hop", hop, "err", err)
		t = datapath.Target{Kind: datapath.Drop}
	}
	return t, h
}

func (a *Agent) target(p nexthop.Path) (t datapath.Target, h *handle, err error) {
	t.MTU = p.MTU
	switch p.Kind {
	case nexthop.PathMiss:
		t.Kind = datapath.Miss
	case nexthop.PathConn:
		c := a.conns[p.Conn]
		if c == nil {
			return t, nil, fmt.Errorf("connection %d is gone", p.Conn)
		}
		t.Kind, t.Conn = datapath.ToConn, c.dp
		if p.UDMTU == 0 {
			break
		}
		if h, err = a.handle(p.Link.GID); err == nil {
			t.UD, t.UDMTU = a.dest(h.ah, p.Link.QPN), p.UDMTU
		} // else the connection does without
	case nexthop.PathUD, nexthop.PathGroup:
		gid, qpn := p.Link.GID, p.Link.QPN
		if p.Kind == nexthop.PathGroup {
			qpn = ib.QPNMulticast
		}
		if h, err = a.handle(gid); err != nil {
			return t, nil, fmt.Errorf("address handle for %s: %w", gid, err)
		}
		t.Kind, t.UD = datapath.ToUD, a.dest(h.ah, qpn)
	case nexthop.PathDrop:
		t.Kind = datapath.Drop
	}
	return t, h, nil
}

// countUD adds to udUse what p has carried since the last call, if p leads to a UD neighbour. It must
// run before p gets another target, because p keeps its counters.
func (a *Agent) countUD(p *path) {
	now := p.dp.Counters()
	if p.p.Kind == nexthop.PathUD && now.Packets != p.seen.Packets {
		key := p.p.Link.Key()
		use := a.udUse[key]
		if use == nil {
			if len(a.udUse) >= a.opt.maxNeighbours() {
				clear(a.udUse)
			}
			use = &ipoib.UDUse{Link: key}
			a.udUse[key] = use
		}
		use.TxPackets += now.Packets - p.seen.Packets
		use.TxOctets += now.Octets - p.seen.Octets
	}
	p.seen = now
}
