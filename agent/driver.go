package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"syscall"
	"time"

	"ipoibcm/datapath"
	"ipoibcm/fib"
	"ipoibcm/ib"
	"ipoibcm/ipoib"
	"ipoibcm/membership"
	"ipoibcm/rtnl"
	"ipoibcm/verbs"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/ip"
)

// drive is the control plane: it owns the machine from Start to the end. It calls came once the device is
// known. If came returns true, drive has ready called when the kernel has the first routes.
func (a *Agent) drive(ctx context.Context, came func() bool, ready func()) {
	a.step(ipoib.Start{})
	a.membersChanged()
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	usage := time.Tick(usageEvery)
	in := inputs{up: a.loop.Up(), events: a.opt.Provider.Events(), host: a.host.Events(), kernel: a.kernel.done,
		member: a.members.events}
	if p := a.opt.Provider.MADPort(); p != nil {
		in.mads = p.MADs()
	}
	if p := a.fabric.port; p != nil {
		in.subnet = p.SubnetMADs()
	}
	// The first host event is there at once. It has the state of the interface in the kernel. The machine must
	// get it before any packet: packets may have waited at an interface that we took over, and the machine
	// drops packets of an interface that is down.
	a.hostEvent(<-in.host)
	announced := false
	for ctx.Err() == nil {
		a.setTimer(timer)
		ticked := a.turn(ctx.Done(), timer, usage, &in)
		if !announced && a.m.Device().Index != 0 {
			if announced = true; came() {
				a.announce(ready)
			}
		}
		if ticked || !a.service.ready {
			a.report()
		}
	}
	if a.opt.Store != nil && errors.Is(context.Cause(ctx), context.Canceled) && a.handOver() {
		return
	}
	a.hub.publish(a.event("agent", "stopping", "saying goodbye to every peer"))
	a.step(ipoib.Shutdown{})
	patience := time.After(shutdownWithin)
	for !a.m.Deadline().IsZero() {
		a.setTimer(timer)
		if a.turn(nil, timer, patience, &in) {
			return
		}
	}
}

// announce has ready called on the driver once the kernel has all routes that are wanted now. A TCP
// connection that begins before that would have the MSS and MTU of the device.
func (a *Agent) announce(ready func()) {
	a.kernel.change(func() {}, func() {
		a.service.routed = true
		ready()
	})
}

// inputs are the channels the driver listens to; a closed one becomes nil.
type inputs struct {
	up     <-chan *datapath.Frame
	mads   <-chan *verbs.MAD
	subnet <-chan *verbs.SubnetMAD
	events <-chan verbs.Event
	host   <-chan rtnl.Event
	kernel <-chan outcome
	member <-chan membership.Event
}

func (a *Agent) setTimer(t *time.Timer) {
	d := time.Hour
	if at := a.m.Deadline(); !at.IsZero() {
		d = max(0, time.Until(at))
	}
	t.Reset(d)
}

// turn waits for one input and deals with it. It reports whether tick fired.
func (a *Agent) turn(done <-chan struct{}, timer *time.Timer, tick <-chan time.Time, in *inputs) (ticked bool) {
	select {
	case <-done:
	case <-timer.C:
		a.step(ipoib.Wake{})
	case f, ok := <-in.up:
		if stillOpen(&in.up, ok) {
			a.frames(f, in)
		}
	case m, ok := <-in.mads:
		if stillOpen(&in.mads, ok) {
			a.mad(m)
		}
	case m, ok := <-in.subnet:
		if stillOpen(&in.subnet, ok) {
			a.subnetMAD(m)
		}
	case ev, ok := <-in.events:
		if stillOpen(&in.events, ok) {
			a.verbsEvent(ev)
		}
	case ev, ok := <-in.host:
		if stillOpen(&in.host, ok) {
			a.hostEvent(ev)
		}
	case done := <-in.kernel:
		host := a.host
		if a.kernelDone(done); a.host != host { // follow has replaced the device
			in.host = a.host.Events()
		}
	case ev := <-in.member:
		a.memberEvent(ev)
	case q := <-a.queries:
		q()
	case <-tick:
		a.reviveUD()
		a.fabricTick()
		if a.lost != "" {
			a.follow()
		}
		a.usage()
		a.memberTick()
		return true
	}
	return false
}

// stillOpen returns ok, which a receive from ch reported. If ch is closed, it becomes nil, so that nobody
// waits for it any more.
func stillOpen[T any](ch *<-chan T, ok bool) bool {
	if !ok {
		*ch = nil
	}
	return ok
}

// mad passes a MAD to the CM that it is for: that of the peer service, or the machine's.
func (a *Agent) mad(m *verbs.MAD) {
	if !a.peers.MAD(m) {
		a.step(ipoib.RecvMAD{MAD: m})
	}
}

// hostEvent takes a change of the interface or of the kernel's routes.
func (a *Agent) hostEvent(ev rtnl.Event) {
	a.step(ipoib.FIBEvent{Event: fib.Host{Event: ev}})
	if ev.Kind != rtnl.LinkChange {
		a.publishSelf() // others may already look for an address that came
	}
	if ev.Kind == rtnl.LinkChange && ev.Link.Gone || ev.Kind == rtnl.Resync && ev.Snapshot.Link.Gone {
		a.follow()
	}
}

// frames handles f and the frames that wait behind it, framesPerTurn at most.
func (a *Agent) frames(f *datapath.Frame, in *inputs) {
	for n := 1; ; n++ {
		a.frame(f)
		f.Release()
		if n == framesPerTurn {
			return
		}
		select {
		case next, ok := <-in.up:
			if !stillOpen(&in.up, ok) {
				return
			}
			f = next
		default:
			return
		}
	}
}

func (a *Agent) frame(f *datapath.Frame) {
	switch f.Kind {
	case datapath.RXARP, datapath.RXND, datapath.RXCM, datapath.RXProbe:
		head, _ := encap.Header{Type: f.Type}.AppendBinary(make([]byte, 0, encap.HeaderLen+len(f.Data)))
		ev := ipoib.RecvFrame{SrcGID: f.SrcGID, DstGID: f.DstGID, SrcQPN: f.SrcQPN, Frame: append(head, f.Data...)}
		if f.Conn != nil {
			ev.Conn = a.byQPN[f.Conn.QP().QPN()]
		}
		a.step(ev)
	case datapath.RXSender:
		a.step(ipoib.Sender{IP: f.Data})
	case datapath.TXStale:
		if flow, ok := ip.FlowOf(f.Data, a.loop.Dests().Fields); ok {
			a.step(ipoib.FIBEvent{Event: fib.Stale{Flow: flow}})
		}
	default:
		a.step(ipoib.Packet{IP: f.Data})
	}
}

// step feeds the machine ev, and every event that arises while step carries out the machine's actions.
func (a *Agent) step(ev ipoib.Event) {
	a.pending.Add(ev)
	a.pending.Run(func(ev ipoib.Event) {
		a.actions = a.m.Step(a.actions[:0], time.Now(), ev)
		for i, act := range a.actions {
			a.do(act)
			a.actions[i] = nil // release packets
		}
		if took := a.copier.took; took > 0 {
			a.copier.took = 0
			a.pending.Add(ipoib.CopiesTook{Time: took})
		}
	})
	a.checkReady()
}

func (a *Agent) verbsEvent(ev verbs.Event) {
	a.peers.Event(ev)
	handle, known := a.byQPN[ev.QPN]
	switch ev.Kind {
	case verbs.QPFatal:
		switch {
		case known:
			a.step(ipoib.QPError{Conn: handle, Status: ev.Status, Text: ev.Text})
		case ev.QPN == a.loop.UDQP().QPN():
			a.udDied = cmp.Or(ev.Text, ev.Status.String())
			a.log.Warn("the UD QP went to ERR", "status", ev.Status, "text", ev.Text)
		}
	case verbs.CommEst:
		if known {
			a.step(ipoib.CommEst{Conn: handle})
		}
	case verbs.DeviceFatal:
		// A new device would give every QP another QPN. Going on would gain nothing over a
		// supervisor that starts us anew.
		a.hub.publish(a.event("agent", ev.Kind.String(), ev.Text))
		a.end(fmt.Errorf("the device is lost: %s", cmp.Or(ev.Text, "it is gone")))
	case verbs.EventsLost:
		a.log.Warn("events of the provider were lost; looking at the port and all queue pairs")
		for _, dead := range a.loop.Dead() {
			a.verbsEvent(dead)
		}
		a.underlayChanged(ev)
		if a.fabric.port != nil {
			a.pkeysChanged()
		}
	case verbs.PortActive, verbs.PortError, verbs.GIDChange, verbs.MTUChange:
		a.underlayChanged(ev)
		a.portChanged(ev.Kind == verbs.PortActive)
	case verbs.LIDChange, verbs.SMChange, verbs.PKeyChange, verbs.Reregister:
		a.log.Info("port changed", "event", ev.Kind, "text", ev.Text)
		a.hub.publish(a.event("agent", ev.Kind.String(), ev.Text))
		if ev.Kind == verbs.PKeyChange && a.fabric.port != nil {
			a.pkeysChanged()
			return
		}
		a.portChanged(ev.Kind != verbs.LIDChange)
	}
}

// reviveUD brings back the UD QP if it went to ERR, and has the machine announce again what peers may have
// missed. It is called once a second, because what broke the QP may last.
func (a *Agent) reviveUD() {
	if a.udDied == "" {
		return
	}
	if err := a.loop.ReviveUD(); err != nil {
		a.log.Warn("the UD QP cannot be brought back", "err", err)
		return
	}
	a.counters.udRevived.Add(1)
	a.log.Info("the UD QP is back", "was", a.udDied)
	a.udDied = ""
	port := a.port()
	a.step(ipoib.UnderlayChanged{Link: a.link, PathMTU: port.MTU})
	a.step(ipoib.UnderlayChanged{Link: a.link, PathMTU: port.MTU, Active: port.Active})
}

// carry switches the carrier of the interface on if on is set and the machine has a link, else off.
func (a *Agent) carry(on bool) {
	on = on && a.m.Ready()
	if err := a.tun.SetCarrier(on); err != nil && !errors.Is(err, syscall.EINVAL) { // before Linux 5.0
		a.log.Warn("cannot set the carrier", "on", on, "err", err)
	}
}

func (a *Agent) underlayChanged(ev verbs.Event) {
	port := a.port()
	if gid, ok := a.anotherGID(port); ok {
		if a.copies() {
			_ = a.loop.UDQP().DetachMulticast(a.link.GID) // gone with the address
		}
		a.link.GID = gid
		a.loop.SetGID(a.link.GID)
		a.readdress()
		if err := a.takeCopies(a.link.GID); err != nil {
			a.log.Warn("underlay changed", "err", err)
		}
		port = a.port()
		a.membersChanged() // we are another member
	}
	if ev.Kind == verbs.MTUChange {
		a.tooBigBefore = a.providerCounters()[tooBigName] // older counts say nothing about the new MTU
	}
	a.carry(port.Active)
	a.log.Info("underlay changed", "event", ev.Kind, "active", port.Active, "gid", a.link.GID, "mtu", port.UnderMTU,
		"text", ev.Text)
	a.hub.publish(a.event("agent", ev.Kind.String(), "underlay "+port.UnderlayIf+": "+ev.Text))
	a.step(ipoib.UnderlayChanged{Link: a.link, PathMTU: port.MTU, UDMTU: a.udMTU(port), Active: port.Active})
}

// anotherGID returns the GID of port that replaces ours if ours has gone and is not configured. The GID has
// the IP version of ours, because all hosts of the link use that version, also for the groups. So an IPv4
// address that stays when the IPv6 addresses go with the link is no replacement for these.
func (a *Agent) anotherGID(port verbs.Port) (ib.GID, bool) {
	if !a.opt.GID.IsZero() || slices.Contains(port.GIDs, a.link.GID) {
		return ib.GID{}, false
	}
	i := slices.IndexFunc(port.GIDs, func(g ib.GID) bool { return g.Is4() == a.link.GID.Is4() })
	if i < 0 {
		return ib.GID{}, false
	}
	return port.GIDs[i], true
}

// port returns the provider's port. Without our GID or our P_Key on it, the port does not count as active.
func (a *Agent) port() verbs.Port {
	p := a.opt.Provider.Port()
	p.Active = p.Active && slices.Contains(p.GIDs, a.link.GID) && a.fabric.pkeyAt >= 0
	return p
}

// usage passes what the data path has counted to the machine.
func (a *Agent) usage() {
	var u ipoib.Usage
	for handle, c := range a.conns {
		n := c.dp.Counters()
		u.Conns = append(u.Conns, ipoib.ConnUse{Conn: handle, TxPackets: n.TxPackets, TxOctets: n.TxOctets,
			RxPackets: n.RxPackets, RxOctets: n.RxOctets, TxDropped: n.QueueFull, TxUnacked: uint64(n.Queued)})
	}
	for _, p := range a.paths {
		a.countUD(p)
	}
	for _, use := range a.udUse {
		u.UD = append(u.UD, *use)
	}
	slices.SortFunc(u.Conns, func(x, y ipoib.ConnUse) int { return cmp.Compare(x.Conn, y.Conn) })
	slices.SortFunc(u.UD, func(x, y ipoib.UDUse) int { return x.Link.Compare(y.Link) })
	a.step(u)
}
