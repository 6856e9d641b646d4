package sim

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"ipoibcm/group"
	"ipoibcm/ib"
	"ipoibcm/internal/simfabric"
	"ipoibcm/internal/simsm"
	"ipoibcm/ipoib"
	"ipoibcm/sa"
	"ipoibcm/verbs"
	wire "ipoibcm/wire/sa"
)

// An ibPort is a host's port in the subnet of its world. The fabric carries packets by GIDs; a
// filter has them arrive only where the LIDs lead by which they were sent.
type ibPort struct {
	*simsm.Port
	paths  map[ib.GID]verbs.Path // as UsePath told
	at     map[ib.GID]ib.LID     // where the UD QP is attached
	qps    map[ib.QPN]ib.LID     // by the QPN at the other end: where connected queue pairs send
	groups []netip.Addr          // joined by the kernel's users
}

// inSubnet makes the hosts of w ports of an InfiniBand subnet, from now on.
func (w *world) inSubnet(opt simsm.Options) {
	opt.Seed = w.f.Seed()
	w.subnet = simsm.New(opt)
	w.f.Filter = w.filter()
}

// attachPort gives a new host its port, whose GID is the host's.
func (h *host) attachPort() {
	h.ib = &ibPort{Port: h.w.subnet.AddPort(ib.GUID(h.i))}
	h.gid = h.ib.GID()
}

// reset is for a host that starts, and returns what its machine has to know.
func (p *ibPort) reset() *ipoib.Fabric {
	p.paths, p.at, p.qps = map[ib.GID]verbs.Path{}, map[ib.GID]ib.LID{}, map[ib.QPN]ib.LID{}
	return &ipoib.Fabric{Port: p.Now(), SA: sa.Options{Refresh: 20 * time.Second}}
}

// filter lets packets through that would arrive in the subnet; nil on Ethernet.
func (w *world) filter() func(from, to *simfabric.Port, ip []byte) bool {
	if w.subnet == nil {
		return nil
	}
	return func(from, to *simfabric.Port, ip []byte) bool {
		a, b := w.hostAt(from), w.hostAt(to)
		if a == nil || b == nil || !a.ib.Up || !b.ib.Up {
			return false
		}
		dst := ib.GID(ip[24:40])
		path, known := a.ib.paths[dst]
		if dst.IsMulticast() {
			members := w.subnet.Members(dst)
			return known && members[a.gid] != 0 && members[b.gid]&wire.FullMember != 0 && b.ib.at[dst] == path.DLID
		}
		qpn := ib.QPN(ip[53])<<16 | ib.QPN(ip[54])<<8 | ib.QPN(ip[55])
		if lid, connected := a.ib.qps[qpn]; connected {
			return lid == b.ib.LID
		}
		return known && path.DLID == b.ib.LID
	}
}

func (w *world) hostAt(p *simfabric.Port) *host {
	i := slices.IndexFunc(w.hosts, func(h *host) bool { return h.port == p })
	if i < 0 {
		return nil
	}
	return w.hosts[i]
}

// doSubnet carries out one action that only InfiniBand ports have, and says whether it was one.
func (h *host) doSubnet(a ipoib.Action) bool {
	switch a := a.(type) {
	case ipoib.SendSubnet:
		h.w.subnet.Send(h.w.f.Now(), h.ib.Port, a.MAD)
		h.w.serveSubnet()
	case ipoib.UsePath:
		if a.Path.DLID == 0 {
			h.w.fatalf("%s: a path to %v without a LID", h.name(), a.Path.DGID)
		}
		h.ib.paths[a.Path.DGID] = a.Path
	case ipoib.ForgetPath:
		delete(h.ib.paths, a.DGID)
	case ipoib.SetQKey:
		h.w.fatalf("%s: another Q_Key, %v", h.name(), a.QKey)
	case ipoib.JoinGroup:
		if h.ib == nil {
			return false
		}
		if h.ib.at[a.MGID] == 0 {
			ok(h.ud.qp.AttachMulticast(a.MGID))
		}
		h.ib.at[a.MGID] = a.MLID
	case ipoib.LeaveGroup:
		if h.ib == nil {
			return false
		}
		ok(h.ud.qp.DetachMulticast(a.MGID))
		delete(h.ib.at, a.MGID)
	default:
		return false
	}
	return true
}

// nameLIDs says of a MAD that arrived how an answer gets back.
func (h *host) nameLIDs(m *verbs.MAD) {
	if h.ib == nil {
		return
	}
	for _, o := range h.w.hosts {
		if o.gid == m.Remote {
			m.Path = verbs.Path{SGID: h.gid, DGID: o.gid, DLID: o.ib.LID, PKey: ib.DefaultPKey}
		}
	}
}

// checkPath ends the simulation where a datagram leaves without a path.
func (h *host) checkPath(dst ib.GID) {
	if h.ib == nil {
		return
	}
	if _, known := h.ib.paths[dst]; !known {
		h.w.fatalf("%s sends a datagram to %v, to which it has no path", h.name(), dst)
	}
}

// serveSubnet sees to it that what the subnet manager says arrives.
func (w *world) serveSubnet() {
	w.subnetTimer.Stop()
	if due := w.subnet.Due(); !due.IsZero() {
		w.subnetTimer = w.f.At(due, func() {
			for _, d := range w.subnet.Take(w.f.Now()) {
				if h := w.hosts[d.To.GUID-1]; !h.dead {
					h.later(func() { h.fromSubnet(d.Event) })
				}
			}
			w.serveSubnet()
		})
	}
}

// fromSubnet takes in what the driver of the port is told, as the agent does.
func (h *host) fromSubnet(ev sa.Event) {
	switch ev := ev.(type) {
	case sa.RecvMAD:
		h.step(ipoib.RecvSubnet{MAD: ev.MAD})
	case sa.Reregister:
		h.step(ipoib.PortChanged{Port: h.ib.Now(), Reregister: true})
	case sa.SetPort:
		h.step(ipoib.PortChanged{Port: h.ib.Now(), Reregister: ev.Port.Active})
		h.step(ipoib.UnderlayChanged{Link: h.link, PathMTU: h.port.Port().MTU, Active: h.ib.Up})
	}
}

// subnetTrouble makes one thing of the subnet go wrong, or change.
func (w *world) subnetTrouble() {
	s, now := w.subnet, w.f.Now()
	h := oneOf(w.r, w.hosts...)
	switch w.r.IntN(9) {
	case 0:
		w.tell("the subnet manager stops")
		s.Stop()
	case 1, 2:
		w.tell("the subnet manager starts anew")
		s.Start(now)
	case 3:
		w.tell("the subnet manager starts anew without a word")
		s.Quiet = true
		s.Start(now)
		s.Quiet = false
	case 4:
		w.tell("%s has another LID", h.name())
		s.Relabel(now, h.ib.Port)
		s.Start(now)
	case 5:
		w.tell("the P_Key of %s moves", h.name())
		h.event(ipoib.PortChanged{Port: h.ib.Now(), Reregister: true, Moved: true})
	case 6:
		w.tell("the port of %s is up: %v", h.name(), !h.ib.Up)
		s.SetLink(now, h.ib.Port, !h.ib.Up)
	case 7:
		s.Loss, s.Busy, s.Dup = oneOf(w.r, 0, 0.1, 0.5), oneOf(w.r, 0, 0.3), oneOf(w.r, 0, 0.2)
		s.Delay, s.Jitter = w.upTo(300*time.Millisecond), w.upTo(200*time.Millisecond)+1
		w.tell("the subnet manager: %+v", s.Options)
	case 8:
		h.ib.groups = oneOf(w.r, nil, []netip.Addr{group4}, []netip.Addr{group4, group6})
		w.tell("%s joins %v", h.name(), h.ib.groups)
		h.event(ipoib.KernelGroups{Groups: h.ib.groups})
	}
	w.serveSubnet()
}

// healSubnet has the subnet be well again. Who it has forgotten without a word is told now.
func (w *world) healSubnet() {
	if w.subnet == nil {
		return
	}
	w.subnet.Options = simsm.Options{Partitions: w.subnet.Partitions, NoSendOnlyFull: w.subnet.NoSendOnlyFull}
	for _, h := range w.hosts {
		w.subnet.SetLink(w.f.Now(), h.ib.Port, true)
	}
	w.subnet.Start(w.f.Now())
	w.serveSubnet()
}

// checkMembers compares the groups at the subnet manager with what hosts want.
func (w *world) checkMembers() {
	for _, h := range w.hosts {
		broadcast := group.BroadcastGID(ib.DefaultPKey, group.DefaultScope)
		if h.ib.at[broadcast] == 0 {
			w.fatalf("%s does not receive the broadcast group", h.name())
		}
		for mgid, at := range h.ib.at {
			if w.subnet.Members(mgid)[h.gid]&wire.FullMember == 0 || h.ib.paths[mgid].DLID != at {
				w.fatalf("%s receives %v at MLID %v; its members are %v", h.name(), mgid, at, w.subnet.Members(mgid))
			}
		}
	}
	for _, mgid := range w.subnet.Groups() {
		for gid, how := range w.subnet.Members(mgid) {
			i := slices.IndexFunc(w.hosts, func(h *host) bool { return h.gid == gid })
			if how&wire.FullMember != 0 && w.hosts[i].ib.at[mgid] == 0 {
				w.fatalf("%s is a member of %v, which it does not want", w.hosts[i].name(), mgid)
			}
		}
	}
}

// TestSubnet lets hosts at ports of an InfiniBand subnet talk while its manager goes away, starts
// anew, loses and delays MADs, LIDs and P_Keys change, links fail and groups are joined and left.
// In the end the hosts are connected, members of what they want and of nothing else, and the last
// leave has deleted the group.
func TestSubnet(t *testing.T) {
	for n := 2; n <= 3; n++ {
		t.Run(fmt.Sprintf("hosts=%d", n), func(t *testing.T) {
			seeds(t, 100, func(w *world) {
				w.inSubnet(simsm.Options{NoSendOnlyFull: w.chance(0.3)})
				for range n {
					c := w.anyConfig()
					c.path, c.cm, c.qp1 = ib.MTU2048, ipoib.CMAuto, qp1Ours
					w.host(c)
				}
				end := w.f.Now().Add(20 * time.Second)
				for w.f.Now().Before(end) {
					w.run(w.upTo(300 * time.Millisecond))
					w.burst()
					if w.chance(0.25) {
						w.subnetTrouble()
					}
					if w.chance(0.05) {
						w.hostTrouble(oneOf(w.r, 5, 6, 14), oneOf(w.r, w.hosts...), w.upTo(4*time.Second))
					}
				}
				w.settle()
				w.checkMembers()
				for _, h := range w.hosts {
					h.ib.groups = nil
					h.event(ipoib.KernelGroups{})
				}
				w.run(30 * time.Second)
				w.checkMembers()
			})
		})
	}
}
