package agent

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"ipoibcm/control"
	"ipoibcm/datapath"
	"ipoibcm/fib"
	"ipoibcm/ib"
	"ipoibcm/ipoib"
	"ipoibcm/sa"
	"ipoibcm/verbs"
)

// This file is what the driver does for an InfiniBand port besides.

// A fabric is the InfiniBand side of an Agent.
type fabric struct {
	port   verbs.SubnetPort // nil: the link layer is Ethernet
	paths  map[ib.GID]verbs.Path
	ready  bool // the broadcast group was joined when we last looked
	shared bool // the kernel had an interface of its own on the port when we last looked
	pkeyAt int  // where our P_Key is in the port's table; -1: it is not there
}

// openFabric looks whether the port is an InfiniBand one.
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

// placeOfPKey returns where our P_Key is in a port's table, by its low 15 bits; -1 if it is not
// there. On Ethernet there is no such table that changes.
func (a *Agent) placeOfPKey(port verbs.Port) int {
	if !port.InfiniBand {
		return 0
	}
	return slices.IndexFunc(port.PKeys, func(k ib.PKey) bool { return (k^a.opt.pkey())&^ib.PKeyFull == 0 })
}

// pkeysChanged follows the port's table of P_Keys. Queue pairs go by a place in it: where ours
// has moved they are made anew, and without it there is no link (Linux calls that a heavy flush).
func (a *Agent) pkeysChanged() {
	was, now := a.fabric.pkeyAt, a.placeOfPKey(a.opt.Provider.Port())
	a.fabric.pkeyAt = now
	port := a.port()
	if was == now { // it may be a full member's in place of a limited one's
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

// subnetPort is port as its client of subnet administration has it.
func (a *Agent) subnetPort(port verbs.Port) sa.Port {
	return sa.Port{Active: port.Active, LID: port.LID, SMLID: port.SMLID, SMSL: port.SMSL, GID: a.link.GID,
		SubnetTimeout: port.SubnetTimeout, GRHRequired: port.GRHRequired}
}

// portChanged tells the machine what the InfiniBand port is like now, and whether the
// subnet manager, or the end of a kernel's interface that left groups, asks for all
// joins again.
func (a *Agent) portChanged(again bool) {
	if a.fabric.port == nil {
		return
	}
	was := a.fabric.shared
	a.fabric.shared = a.shared()
	a.step(ipoib.PortChanged{Port: a.subnetPort(a.port()), Shared: a.fabric.shared,
		Reregister: again || was && !a.fabric.shared})
}

// movedPort is portChanged for a P_Key that has another place, or none.
func (a *Agent) movedPort() {
	a.fabric.shared = a.shared()
	a.step(ipoib.PortChanged{Port: a.subnetPort(a.port()), Shared: a.fabric.shared,
		Reregister: a.fabric.pkeyAt >= 0, Moved: true})
}

// fabricTick looks at what nobody tells of.
func (a *Agent) fabricTick() {
	if a.fabric.port != nil && a.shared() != a.fabric.shared {
		a.portChanged(false)
	}
}

// subnetMAD takes a MAD of subnet administration in.
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

// checkReady gives the interface a carrier as soon as there is a link, and takes it away.
func (a *Agent) checkReady() {
	if a.fabric.port == nil || a.m.Ready() == a.fabric.ready {
		return
	}
	a.fabric.ready = a.m.Ready()
	a.carry(a.port().Active)
}

// attr returns what the address handle of a GID is made of.
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

// usePath has datagrams to a port or group take a path from now on.
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
	a.retarget(1, func(p fib.Path) bool { return p.Link.GID == gid })
	a.loop.Barrier()
	old.ah.Destroy()
}

// retarget makes the targets of datagrams anew that which says. Their address handles
// have refs more of them.
func (a *Agent) retarget(refs int, which func(fib.Path) bool) {
	for hop, p := range a.paths {
		if (p.p.Kind == fib.PathUD || p.p.Kind == fib.PathGroup) && which(p.p) {
			p.dp.Set(a.targetOrDrop(hop, p.p))
			a.refAH(p.p, refs)
		}
	}
}

// setQKey gives the UD QP, and all datagrams, the Q_Key of the link.
func (a *Agent) setQKey(k ib.QKey) {
	a.opt.QKey = k
	if err := a.loop.SetQKey(k); err != nil && !errors.Is(err, datapath.ErrClosed) {
		a.udDied = fmt.Sprintf("Q_Key %v: %v", k, err) // tried again
	}
	a.retarget(0, func(fib.Path) bool { return true })
}

// attach has the UD QP receive a group.
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

// noPKey says why there is no link without our P_Key.
func (a *Agent) noPKey() string {
	return fmt.Sprintf("the subnet manager has not given the port P_Key %v", a.opt.pkey())
}

// viewSubnet is how the InfiniBand port stands; nil on Ethernet.
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
