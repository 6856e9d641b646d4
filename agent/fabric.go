package agent

import (
	"errors"
	"fmt"
	"time"

	"ipoibcm/control"
	"ipoibcm/datapath"
	"ipoibcm/ib"
	"ipoibcm/ipoib"
	"ipoibcm/nexthop"
	"ipoibcm/sa"
	"ipoibcm/verbs"
)

// This file has what the driver does for an InfiniBand port in addition.

// A fabric is the InfiniBand side of an Agent.
type fabric struct {
	port   verbs.SubnetPort // nil: the link layer is Ethernet
	paths  map[ib.GID]verbs.Path
	ready  bool // the machine had a link when we last looked
	shared bool // the kernel had an interface of its own on the port when we last looked
	pkeyAt int  // index of our P_Key in the port's table; -1: it is not there
}

// openFabric sets up the InfiniBand side if the port is an InfiniBand one.
func (a *Agent) openFabric(port verbs.Port) error {
	if !port.InfiniBand {
		return nil
	}
	p, ok := a.opt.Provider.(verbs.SubnetProvider)
	if !ok || p.SubnetPort() == nil {
		return errors.New("the port is InfiniBand, and its provider has no subnet administration")
	}
	a.fabric = fabric{port: p.SubnetPort(), paths: map[ib.GID]verbs.Path{}, shared: a.shared(),
		pkeyAt: a.placeOfPKey(port)}
	return nil
}

// placeOfPKey returns the index of our P_Key in the port's table; -1 if it is not there. On Ethernet, where no such table changes, it returns 0.
func (a *Agent) placeOfPKey(port verbs.Port) int {
	if !port.InfiniBand {
		return 0
	}
	return a.opt.pkey().Index(port.PKeys)
}

// pkeysChanged follows the port's table of P_Keys. A QP names its P_Key by an index in that table. If ours
// has moved, QPs are made anew; if it has gone, there is no link (Linux calls that a heavy flush).
func (a *Agent) pkeysChanged() {
	was, now := a.fabric.pkeyAt, a.placeOfPKey(a.opt.Provider.Port())
	a.fabric.pkeyAt = now
	port := a.port()
	if was == now { // limited membership may have become full
		a.portChanged(true)
		return
	}
	if a.udDied = ""; now >= 0 {
		if err := a.loop.ReviveUD(); err != nil {
			a.udDied = fmt.Sprintf("P_Key %v: %v", a.opt.pkey(), err) // tried again
		}
	}
	a.log.Info("P_Key has moved", "pkey", a.opt.pkey(), "was", was, "now", now)
	a.carry(port.Active)
	if was >= 0 {
		a.step(ipoib.UnderlayChanged{Link: a.link, PathMTU: port.MTU})
	}
	a.movedPort()
	a.step(ipoib.UnderlayChanged{Link: a.link, PathMTU: port.MTU, Active: port.Active})
}

// shared reports whether the kernel has an IPoIB interface on our port and P_Key.
func (a *Agent) shared() bool { return a.opt.Shared != nil && a.opt.Shared() }

// machineFabric is what the machine has to know of an InfiniBand port; nil on Ethernet.
func (a *Agent) machineFabric(port verbs.Port) *ipoib.Fabric {
	if a.fabric.port == nil {
		return nil
	}
	return &ipoib.Fabric{Port: a.subnetPort(port), CreateBroadcast: a.opt.CreateBroadcast, Shared: a.fabric.shared,
		NoReports: !a.fabric.port.Reports()}
}

// subnetPort returns what the client of subnet administration needs to know of port.
func (a *Agent) subnetPort(port verbs.Port) sa.Port {
	return sa.Port{Active: port.Active, LID: port.LID, SMLID: port.SMLID, SMSL: port.SMSL, GID: a.link.GID,
		SubnetTimeout: port.SubnetTimeout, GRHRequired: port.GRHRequired}
}

// portChanged passes the present state of the InfiniBand port to the machine. The machine joins all groups
// again if again is set, as after an event of the subnet manager. It also does so if the kernel's interface
// on the port has ended, because that interface left groups that are ours too.
func (a *Agent) portChanged(again bool) {
	if a.fabric.port == nil {
		return
	}
	was := a.fabric.shared
	a.fabric.shared = a.shared()
	a.step(ipoib.PortChanged{Port: a.subnetPort(a.port()), Shared: a.fabric.shared,
		Reregister: again || was && !a.fabric.shared})
}

// movedPort is portChanged after our P_Key has moved in the port's table, or has gone.
func (a *Agent) movedPort() {
	a.fabric.shared = a.shared()
	a.step(ipoib.PortChanged{Port: a.subnetPort(a.port()), Shared: a.fabric.shared,
		Reregister: a.fabric.pkeyAt >= 0, Moved: true})
}

// fabricTick checks whether the kernel's interface on the port has come or gone, because no event reports
// that.
func (a *Agent) fabricTick() {
	if a.fabric.port != nil && a.shared() != a.fabric.shared {
		a.portChanged(false)
	}
}

// subnetMAD passes a MAD of subnet administration to the machine.
func (a *Agent) subnetMAD(m *verbs.SubnetMAD) {
	a.step(ipoib.RecvSubnet{MAD: &sa.MAD{Data: m.Data,
		Peer: sa.Address{LID: m.LID, SL: m.SL, QPN: m.QPN, QKey: m.QKey, PKey: m.PKey,
			GID: m.GID, FlowLabel: m.FlowLabel, TrafficClass: m.TrafficClass}}})
}

func (a *Agent) sendSubnet(m *sa.MAD, wait time.Duration) error {
	to := m.Peer
	return a.fabric.port.SendSubnet(&verbs.SubnetMAD{LID: to.LID, SL: to.SL, QPN: to.QPN, QKey: to.QKey, PKey: to.PKey,
		GID: to.GID, FlowLabel: to.FlowLabel, TrafficClass: to.TrafficClass, Data: m.Data}, wait)
}

// checkReady gives the interface of an InfiniBand port a carrier as soon as there is a link, and takes the
// carrier away when the link ends.
func (a *Agent) checkReady() {
	if a.fabric.port == nil || a.m.Ready() == a.fabric.ready {
		return
	}
	a.fabric.ready = a.m.Ready()
	a.carry(a.port().Active)
}

// attr returns the attributes of the address handle of a GID.
func (a *Agent) attr(gid ib.GID) (verbs.AHAttr, error) {
	if a.fabric.port == nil {
		attr := verbs.AHAttr{DGID: gid}
		if a.link.GID.Is4() == gid.Is4() {
			attr.SGID = a.link.GID
		}
		return attr, nil
	}
	path, ok := a.fabric.paths[gid]
	if !ok {
		return verbs.AHAttr{}, fmt.Errorf("no path to %v", gid)
	}
	attr := path.AH()
	attr.SGID = a.link.GID
	return attr, nil
}

// usePath sends datagrams to path.DGID, a port or a group, along path from now on.
func (a *Agent) usePath(path verbs.Path) {
	gid := path.DGID
	a.fabric.paths[gid] = path
	old := a.ahs[gid]
	if old == nil {
		return
	}
	if attr, err := a.attr(gid); err == nil && attr == old.ah.Attr() {
		return
	}
	delete(a.ahs, gid)
	a.retarget(func(p nexthop.Path) bool { return p.Link.GID == gid })
	a.loop.Barrier()
	old.ah.Destroy()
}

// retarget makes new targets for those paths with an address handle for which the function returns true.
func (a *Agent) retarget(which func(nexthop.Path) bool) {
	for hop, p := range a.paths {
		if usesAH(p.p) && which(p.p) {
			target, h := a.targetOrDrop(hop, p.p)
			p.dp.Set(target)
			p.use(h)
		}
	}
}

// setQKey gives the UD QP, and all datagrams, the Q_Key of the link.
func (a *Agent) setQKey(k ib.QKey) {
	a.opt.QKey = k
	if err := a.loop.SetQKey(k); err != nil && !errors.Is(err, datapath.ErrClosed) {
		a.udDied = fmt.Sprintf("Q_Key %v: %v", k, err) // tried again
	}
	a.retarget(func(nexthop.Path) bool { return true })
}

// attach makes the UD QP receive a group.
func (a *Agent) attach(mgid ib.GID, mlid ib.LID) error {
	if mlid == 0 {
		return a.loop.UDQP().AttachMulticast(mgid)
	}
	if q, ok := a.loop.UDQP().(verbs.GroupQP); ok {
		return q.AttachGroup(mgid, mlid)
	}
	return verbs.ErrNotSupported
}

func (a *Agent) detach(mgid ib.GID, mlid ib.LID) error {
	if mlid == 0 {
		return a.loop.UDQP().DetachMulticast(mgid)
	}
	if q, ok := a.loop.UDQP().(verbs.GroupQP); ok {
		return q.DetachGroup(mgid, mlid)
	}
	return verbs.ErrNotSupported
}

// noPKey returns the reason that there is no link without our P_Key.
func (a *Agent) noPKey() string {
	return fmt.Sprintf("the subnet manager has not given the port P_Key %v", a.opt.pkey())
}

// viewSubnet returns the state of the InfiniBand port; nil on Ethernet.
func (a *Agent) viewSubnet() *control.Subnet {
	f := a.m.Fabric()
	if f == nil {
		return nil
	}
	s := &control.Subnet{LID: int(f.Port.LID), SMLID: int(f.Port.SMLID), GRHRequired: f.Port.GRHRequired,
		Admin:  f.Admin.State.String(),
		Joined: f.Joined, Paths: f.Paths, Shared: f.SharesPort}
	if f.Joined {
		b := f.Broadcast
		s.MLID, s.SL, s.Rate = int(b.MLID), int(b.SL), b.Rate.String()
		return s
	}
	switch why := f.Failed; {
	case a.fabric.pkeyAt < 0:
		s.Why = a.noPKey()
	case f.Admin.State == sa.StateDown:
		s.Why = "the port has no subnet manager"
	case f.Admin.State == sa.StateAsking:
		s.Why = "the subnet administrator does not answer; it is asked again and again"
	case why == nil:
		s.Why = "it is being joined"
	case why.NoGroup:
		s.Why = "it does not exist: have the subnet manager make it (partitions.conf: ipoib), or set create_broadcast"
	case why.Cause == sa.Refused:
		s.Why = "the subnet administrator refuses: " + why.Status.String()
	default:
		s.Why = why.Cause.String()
	}
	return s
}
