package agent

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"math"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"time"

	"ipoibcm/control"
	"ipoibcm/counters"
	"ipoibcm/datapath"
	"ipoibcm/fib"
	"ipoibcm/ib"
	"ipoibcm/ipoib"
	"ipoibcm/nexthop"
	"ipoibcm/tun"
	"ipoibcm/verbs"
	"ipoibcm/wire/encap"
)

// The view functions run on the goroutine of the request, and ask the driver for what it owns.

func since(now, t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return max(0, now.Sub(t).Milliseconds())
}

func (a *Agent) viewStatus(ctx context.Context) (control.Status, error) {
	n := a.providerCounters()
	out, err := ask(ctx, a, func() control.Status { return a.statusHead(n) })
	if err == nil {
		out.Peers, err = a.viewPeers(ctx)
	}
	return out, err
}

// statusHead returns the status without the peers. n are the provider's counters. It runs on the driver's
// goroutine.
func (a *Agent) statusHead(n map[string]uint64) control.Status {
	s, port, now := a.m.Status(), a.port(), time.Now()
	notes, unfit := a.checkPort(port)
	state := "up"
	switch {
	case !a.m.Device().Up:
		state = "down"
	case !port.Active:
		state = "underlay down"
	case !a.m.Ready():
		state = "no link"
	case !s.Up:
		state = "down"
	case !a.service.routed:
		state = "starting"
	}
	out := control.Status{
		Version: control.Version,
		Interface: control.Interface{
			Name: cmp.Or(a.m.Device().Name, a.opt.Name), Netns: a.seat.netns, State: state, Mode: s.Mode.String(),
			MTU: s.DeviceMTU, UDMTU: s.UDMTU, UDAccept: s.UDAccept, ReceiveMTU: s.ReceiveMTU, Threads: a.loop.Threads(),
			GID: s.Link.GID.String(), UDQPN: s.Link.QPN.String(), LinkAddr: s.Link.String(), PKey: s.PKey.String(),
			QKey:        s.QKey.String(),
			CMTransport: s.CMTransport.String(), CMPaths: cmPaths(s),
			BroadcastGroup: s.Broadcast.String(), PID: os.Getpid(), Since: a.start, UptimeMS: since(now, a.start),
			Build:     a.opt.Build,
			Addresses: []control.Address{},
		},
		Underlay: control.Underlay{Provider: a.opt.Provider.Caps().Name, Device: a.opt.Provider.Caps().Device,
			MTU:     port.UnderMTU,
			PathMTU: port.MTU.Octets(), Active: port.Active, Notes: notes, GIDs: []string{}, Subnet: a.viewSubnet()},
		Protections: a.protected,
		Warnings:    a.warnings(s, n, port.Active, unfit),
	}
	for _, o := range a.offloads() {
		out.Underlay.Offloads = append(out.Underlay.Offloads, control.Offload(o))
	}
	for _, g := range port.GIDs {
		out.Underlay.GIDs = append(out.Underlay.GIDs, g.String())
	}
	for _, ad := range s.Addrs {
		st := "ok"
		if ad.Duplicate {
			st = "duplicate"
		} else if ad.Tentative {
			st = "probing"
		}
		out.Interface.Addresses = append(out.Interface.Addresses, control.Address{Prefix: ad.Prefix.String(), State: st})
	}
	return out
}

// offloads returns the offloads of the provider, of the data path and of the TUN.
func (a *Agent) offloads() (all []verbs.Offload) {
	if p, ok := a.opt.Provider.(verbs.Offloader); ok {
		all = append(p.Offloads(), a.loop.Offload())
	}
	sums, tcp, udp := a.tunOffloads()
	all = append(all,
		verbs.Offload{Name: "checksum", What: "checksums at the TUN by us", On: sums.On, Why: sums.Why,
			Uses: sums.Completed + sums.Verified},
		verbs.Offload{Name: "tso", What: "TCP in GSO packets at the TUN", On: tcp.On, Why: tcp.Why,
			Uses: tcp.Split + tcp.Written},
		verbs.Offload{Name: "uso", What: "UDP in GSO packets at the TUN", On: udp.On, Why: udp.Why,
			Uses: udp.Split + udp.Written})
	return append(all, a.threadOffloads()...)
}

// cmPaths names the paths that CM messages can take.
func cmPaths(s ipoib.Status) []string {
	var out []string
	if s.GSI {
		out = append(out, ipoib.ViaGSI.String())
	}
	if s.Inband {
		out = append(out, ipoib.ViaInband.String())
	}
	return out
}

// checkPort returns the notes that hold for the underlay as it is now, and an error if the underlay does
// not carry the UD MTU.
func (a *Agent) checkPort(port verbs.Port) ([]string, error) {
	if a.opt.Check == nil {
		return a.opt.Notes, nil
	}
	plan, err := a.opt.Check(port)
	return slices.Concat(a.opt.Notes, plan.Notes), err
}

// warnings are what an operator should look at.
type warnings []string

// add adds a warning if its condition holds.
func (w *warnings) add(holds bool, format string, args ...any) {
	if holds {
		*w = append(*w, fmt.Sprintf(format, args...))
	}
}

func (a *Agent) warnings(s ipoib.Status, counted map[string]uint64, active bool, unfit error) []string {
	var w warnings
	w.add(unfit != nil, "%v", unfit)
	w.add(a.fabric.pkeyAt < 0, "%s, and without it there is no link", a.noPKey())
	w.add(a.fabric.pkeyAt >= 0 && !active, "the underlay is down or has lost its address")
	if net := a.viewSubnet(); net != nil {
		w.add(!net.Joined, "the broadcast group is not joined, and without it there is no link: %s", net.Why)
	}
	w.add(a.lost != "", "the interface is in another network namespace, and cannot be followed: %s", a.lost)
	w = append(w, a.seat.notes...)
	list := a.memberWarning()
	w.add(list != "", "%s", list)
	w.add(a.udDied != "", "the UD QP went to ERR (%s) and is being brought back", a.udDied)
	w.add(active && s.Silence.Asked.IsValid(), "%s", silence(s.Silence, time.Now()))
	for _, ad := range s.Addrs {
		w.add(ad.Duplicate, "%s is used by another host; give one of the two another address", ad.Prefix.Addr())
	}
	loop := a.loop.Counters()
	w.add(loop.RxUDOversize > 0, "%d datagrams were larger than the %d octets that may come: another host has a larger "+
		"ud_mtu", loop.RxUDOversize, s.UDAccept)
	tooBig, port := growth(counted[tooBigName], a.tooBigBefore), a.port()
	w.add(tooBig > 0, "%d packets were not sent, because they are larger than the way to their destination: "+
		"%s has MTU %d, and \"ip route get GID\" shows whether a route has a smaller one; raise it, or use a smaller "+
		"ud_mtu on all hosts; a connection takes the smaller path MTU when it is set up again",
		tooBig, port.UnderlayIf, port.UnderMTU)
	useless := counted["uc_drop_sequence"]
	in := counted["uc_packets_in"] + useless
	w.add(useless > in/20 && in >= 1000 && s.ReceiveMTU > shortReceive, "of %d packets that came over UC %d were "+
		"useless, because another of their message was lost: receive_mtu %d makes messages shorter, mode rc sends again "+
		"what is lost", in, useless, shortReceive)
	flood := loop.RxFlood + counted["mads_drop_flood"]
	w.add(flood > 0, "%d ARP, ND and CM packets were refused because too many came from unknown sources: somebody floods "+
		"this host, or did", flood)
	lost, _ := a.logCounts()
	w.add(lost > 0, "%d lines of the log were lost: its reader is too slow or has gone, or its disk is full", lost)
	w.add(loop.RxUDFlood > 0, "%d datagrams of hosts that nothing is sent to by UD were refused, because there were too "+
		"many: somebody floods this host, or did", loop.RxUDFlood)
	refused := a.m.FIBCounters().RoutesRefused
	w.add(refused > 0, "the kernel refused %d route changes; see the log", refused)
	return w
}

// silence returns a warning that nobody answers, with what to look at.
func silence(q ipoib.Silence, now time.Time) string {
	ago := func(t time.Time) string { return now.Sub(t).Round(time.Second).String() + " ago" }
	heard := "no other host has been heard"
	if !q.Heard.IsZero() {
		heard = "another host was last heard " + ago(q.Heard)
	}
	return fmt.Sprintf(
		"no answer from anybody: nobody answered for %v %s, and %s; do the firewalls of all hosts accept UDP port 4791, "+
			"and do agents run there with the same pkey and qkey?", q.Asked, ago(q.At), heard)
}

// shortReceive is a Receive MTU that makes a message few packets, for UC on a path that loses some.
const shortReceive = 8196

// logCounts returns how many lines of the log were lost, and how many were left out.
func (a *Agent) logCounts() (lost, leftOut uint64) {
	if a.opt.LogCounts == nil {
		return 0, 0
	}
	return a.opt.LogCounts()
}

// providerCounters returns what the provider has counted. That takes a look at every queue pair, so it does
// not run on the driver's goroutine.
func (a *Agent) providerCounters() map[string]uint64 {
	n := map[string]uint64{}
	a.opt.Provider.Counters(func(name string, v uint64) { n[name] = v })
	return n
}

// tooBigName is the provider's counter of packets that the underlay did not take because of their size.
const tooBigName = "tx_drop_too_big"

// A neighbourUse is an entry of the neighbour cache with what was sent to its host by UD.
type neighbourUse struct {
	ipoib.NeighbourInfo
	ud ipoib.UDUse
}

// neighbourUses yields the neighbours whose link-layer address is known.
func (a *Agent) neighbourUses(yield func(neighbourUse) bool) {
	for n := range a.m.AllNeighbours() {
		if n.Link.IsZero() {
			continue
		}
		u := neighbourUse{NeighbourInfo: n}
		if use := a.udUse[n.Link.Key()]; use != nil {
			u.ud = *use
		}
		if !yield(u) {
			return
		}
	}
}

// A connUse is a connection with what the data path and the provider know of it.
type connUse struct {
	ipoib.ConnInfo
	live   bool // there is a queue pair
	queue  datapath.ConnCounters
	health *verbs.Health
}

func byConn(x, y connUse) int { return cmp.Compare(x.Conn, y.Conn) }

// connUses returns the connections. If closely is set, they have what only the list of connections shows.
func (a *Agent) connUses(closely bool) iter.Seq[connUse] {
	return func(yield func(connUse) bool) {
		for c := range a.m.AllConns(closely) {
			u := connUse{ConnInfo: c}
			if qp := a.conns[c.Conn]; qp != nil {
				u.live, u.queue = true, qp.dp.Counters()
				if h, ok := qp.dp.Health(); ok && closely {
					u.health = &h
				}
			}
			if !yield(u) {
				return
			}
		}
	}
}

// viewPeers joins neighbours and connections by link-layer address.
func (a *Agent) viewPeers(ctx context.Context) ([]control.Peer, error) {
	neighbours, err := gatherSorted(ctx, a, a.neighbourUses,
		func(x, y neighbourUse) int { return x.Addr.Compare(y.Addr) })
	if err != nil {
		return nil, err
	}
	conns, err := gatherSorted(ctx, a, a.connUses(false), byConn)
	if err != nil {
		return nil, err
	}
	return joinPeers(neighbours, conns, time.Now()), nil
}

// joinPeers makes a peer of each link-layer address that neighbours or conns have.
func joinPeers(neighbours []neighbourUse, conns []connUse, now time.Time) []control.Peer {
	peers := map[encap.LinkAddr]*control.Peer{}
	at := func(key encap.LinkAddr) *control.Peer {
		p := peers[key]
		if p == nil {
			p = &control.Peer{LinkAddr: key.String(), Class: "unknown", Mode: "UD", State: "ud", Addresses: []string{}}
			peers[key] = p
		}
		return p
	}
	for _, n := range neighbours {
		p := at(n.Link.Key())
		p.GID, p.UDQPN, p.MTU = n.Link.GID.String(), n.Link.QPN.String(), n.Path.MTU
		p.LinkAddr = n.Link.String()
		p.Addresses = append(p.Addresses, n.Addr.String())
		p.AgeMS = since(now, n.Updated)
		p.TxPackets, p.TxOctets = n.ud.TxPackets, n.ud.TxOctets
	}
	for _, c := range conns {
		p := at(c.Peer.Key())
		p.GID, p.UDQPN, p.Class, p.State = c.Peer.GID.String(), c.Peer.QPN.String(), c.Class.String(), c.State
		p.CMPath = c.Via.String()
		p.TxPackets += c.queue.TxPackets
		p.TxOctets += c.queue.TxOctets
		p.RxPackets += c.queue.RxPackets
		p.RxOctets += c.queue.RxOctets
		if !c.Established.IsZero() {
			p.Mode, p.MTU, p.AgeMS = c.Transport.String(), c.MTU, since(now, c.Established)
		}
	}
	out := make([]control.Peer, 0, len(peers))
	for _, p := range peers {
		out = append(out, *p)
	}
	slices.SortFunc(out, func(x, y control.Peer) int { return cmp.Compare(x.LinkAddr[2:], y.LinkAddr[2:]) })
	return out
}

// viewConns answers PathConns.
func (a *Agent) viewConns(ctx context.Context) (control.Conns, error) {
	conns, err := viewList(ctx, a, a.connUses(true), byConn, viewConn)
	return control.Conns{Version: control.Version, Conns: conns}, err
}

// pagedConns answers PathConns. Connections are known by GID: the peer that a request names by an IP address is the
// neighbour with that address.
func (a *Agent) pagedConns(r *http.Request) (control.Conns, error) {
	page, err := pageOf(r)
	if err != nil {
		return control.Conns{}, err
	}
	conns, err := a.viewConns(r.Context())
	if err == nil && page.Peer.IsValid() {
		var neighbours []ipoib.NeighbourInfo
		neighbours, err = gather(r.Context(), a, a.m.AllNeighbours())
		for _, n := range neighbours {
			if n.Addr == page.Peer && !n.Link.IsZero() {
				page.Peer = n.Link.GID.Addr()
				break
			}
		}
	}
	conns.Select(page)
	return conns, err
}

func viewConn(c connUse, now time.Time) control.Conn {
	role, direction := "passive", "both"
	if c.Active {
		role = "active"
	}
	if !c.Rx {
		direction = "send"
	} else if !c.Tx {
		direction = "receive"
	}
	queue, use := c.queue, c.Use
	if c.live {
		use = ipoib.ConnUse{TxPackets: queue.TxPackets, TxOctets: queue.TxOctets, RxPackets: queue.RxPackets,
			RxOctets: queue.RxOctets}
	}
	idle := cmp.Or(c.LastUsed, c.Established)
	return control.Conn{
		Peer: c.Peer.String(), Mode: c.Transport.String(), State: c.State, Role: role,
		ServiceID: fmt.Sprintf("0x%016x", c.ServiceID), LocalQPN: c.LocalQPN.String(), RemoteQPN: c.RemoteQPN.String(),
		CMPath:      c.Via.String(),
		LocalCommID: fmt.Sprintf("0x%08x", c.LocalComm), RemoteCommID: fmt.Sprintf("0x%08x", c.RemoteComm),
		MTU: c.MTU, PeerReceiveMTU: int(min(c.ReceiveMTU, math.MaxInt32)), PathMTU: c.PathMTU.Octets(), Direction: direction,
		AgeMS: since(now, c.Established), IdleMS: since(now, idle), Crossing: c.Crossing, Why: c.Why,
		Health:   viewHealth(c.health),
		TxQueued: queue.Queued, TxQueuedOctets: queue.QueuedOctets, TxQueuedLimit: queue.QueuedLimit,
		TxBacklog:  queue.Backlog,
		TxOverflow: queue.QueueFull, TxLate: queue.Late, TxMarked: queue.Marked,
		TxPackets: use.TxPackets, TxOctets: use.TxOctets, RxPackets: use.RxPackets, RxOctets: use.RxOctets,
	}
}

func viewHealth(h *verbs.Health) *control.Health {
	if h == nil {
		return nil
	}
	us := func(d time.Duration) float64 { return float64(d.Round(100*time.Nanosecond)) / 1e3 }
	return &control.Health{RTTUS: us(h.RTT), RTTSpreadUS: us(h.RTTSpread), InFlight: h.InFlight, Limit: h.Limit,
		Window:  h.Window,
		Packets: h.Packets, Retransmits: h.Retransmits, Timeouts: h.Timeouts, Probes: h.Probes, NotReady: h.NotReady}
}

// viewNeigh answers PathNeigh.
func (a *Agent) viewNeigh(ctx context.Context) (control.Neighbours, error) {
	neighbours, err := viewList(ctx, a, a.m.AllNeighbours(),
		func(x, y ipoib.NeighbourInfo) int { return x.Addr.Compare(y.Addr) }, viewNeighbour)
	return control.Neighbours{Version: control.Version, Neighbours: neighbours}, err
}

func viewNeighbour(n ipoib.NeighbourInfo, now time.Time) control.Neighbour {
	e := control.Neighbour{IP: n.Addr.String(), State: n.State, AgeMS: since(now, n.Updated), Queued: n.Queued}
	if !n.Link.IsZero() {
		e.LinkAddr = n.Link.String()
	}
	return e
}

var routeKinds = map[nexthop.PathKind]string{nexthop.PathMiss: "resolve", nexthop.PathConn: "connection", nexthop.PathUD: "ud",
	nexthop.PathGroup: "multicast", nexthop.PathDrop: "drop"}

// viewRoutes answers PathRoutes.
func (a *Agent) viewRoutes(ctx context.Context) (out control.Routes, err error) {
	out.Version = control.Version
	if out.Destinations, err = ask(ctx, a, a.m.Dests); err != nil {
		return out, err
	}
	out.Routes, err = viewList(ctx, a, a.m.Hops(), func(x, y fib.HopInfo) int { return x.Addr.Compare(y.Addr) }, viewRoute)
	return out, err
}

func viewRoute(h fib.HopInfo, _ time.Time) control.Route {
	e := control.Route{NextHop: h.Addr.String(), Kind: routeKinds[h.Path.Kind], MTU: h.Path.MTU, Destinations: h.Dests,
		Kernel: h.MTU != 0, Why: h.Why}
	switch h.Path.Kind {
	case nexthop.PathConn, nexthop.PathUD:
		e.Peer = h.Path.Link.String()
	case nexthop.PathGroup:
		e.Peer = h.Path.Link.GID.String()
	}
	return e
}

// viewGroups answers PathGroups.
func (a *Agent) viewGroups(ctx context.Context) (control.Groups, error) {
	return ask(ctx, a, a.groupsNow)
}

// groupsNow runs on the driver's goroutine.
func (a *Agent) groupsNow() control.Groups {
	now := time.Now()
	out := control.Groups{Version: control.Version, Groups: []control.Group{}}
	index := map[ib.GID]int{}
	for _, g := range a.m.Groups() {
		if !g.Joined {
			continue
		}
		i, ok := index[g.MGID]
		if !ok {
			i = len(out.Groups)
			index[g.MGID] = i
			out.Groups = append(out.Groups, control.Group{MGID: g.MGID.String(), Groups: []string{}, Reasons: []string{},
				AgeMS: since(now, a.groups[g.MGID])})
		}
		e := &out.Groups[i]
		name := "broadcast"
		if g.Group.IsValid() {
			name = g.Group.String()
		}
		e.Groups = append(e.Groups, name)
		for _, why := range g.Reasons {
			if !slices.Contains(e.Reasons, why) {
				e.Reasons = append(e.Reasons, why)
			}
		}
	}
	return out
}

// viewStats answers PathStats.
func (a *Agent) viewStats(ctx context.Context) (control.Stats, error) {
	provider := a.providerStats()
	return ask(ctx, a, func() control.Stats {
		return control.Stats{Version: control.Version, Counters: a.allCounters(provider)}
	})
}

// providerStats returns the counters of the provider, in its order.
func (a *Agent) providerStats() (out []control.Counter) {
	part := a.opt.Provider.Caps().Name
	a.opt.Provider.Counters(func(name string, v uint64) {
		out = append(out, control.Counter{Part: part, Name: name, Value: v})
	})
	return out
}

// tunOffloads returns the state of the TUN's three offloads. It is zero before there is a TUN.
func (a *Agent) tunOffloads() (sums tun.Checksums, tcp tun.Segments, udp tun.Datagrams) {
	if a.tun != nil {
		sums, tcp, udp = a.tun.Checksums(), a.tun.Segments(), a.tun.Datagrams()
	}
	return sums, tcp, udp
}

// allCounters gathers every counter of every part in a fixed order, with provider among them. It runs on
// the driver's goroutine.
func (a *Agent) allCounters(provider []control.Counter) []control.Counter {
	var out []control.Counter
	of := func(part string) func(name string, v uint64) {
		return func(name string, v uint64) {
			out = append(out, control.Counter{Part: part, Name: name, Value: v})
		}
	}
	for _, c := range a.m.Counters() {
		of("ipoib")(c.Name, c.Value)
	}
	loop, host := a.loop.Counters(), a.host.Counters()
	counters.Each(&loop, of("datapath"))
	out = append(out, provider...)
	sums, tcp, udp := a.tunOffloads()
	counters.Each(&sums, of("tun"))
	counters.Each(&tcp, of("tun"))
	counters.Each(&udp, of("tun"))
	lost, leftOut := a.logCounts()
	of("log")("lines_lost", lost)
	of("log")("lines_left_out", leftOut)
	a.peers.Counters(of("peers"))
	counters.Each(&host, of("hostnet"))
	counters.Each(&a.counters, of("agent"))
	of("agent")("events_lost", a.hub.lost.Load())
	of("agent")("capture_packets_lost", a.taps.dropped.Load())
	of("agent")("clients_refused", a.clientsRefused.Load())
	return out
}

func (a *Agent) viewExplain(ip netip.Addr, hop nexthop.Hop) control.Explanation {
	e := a.m.Explain(ip, hop)
	out := control.Explanation{Version: control.Version, IP: ip.String(), Mode: e.Mode, MTU: e.Path.MTU,
		LastREJ: e.LastREJ, Crossing: e.Crossing, Outcome: e.Outcome.String(), Why: append([]string{}, e.Reasons...)}
	if e.NextHop.IsValid() {
		out.NextHop = e.NextHop.String()
		out.Why = append(out.Why, a.claims(e.NextHop)...)
	}
	if !e.Link.IsZero() {
		out.Peer, out.Class = e.Link.String(), e.Class.String()
		if e.ByCM {
			out.CMPath = e.Via.String()
		}
	}
	return out
}

// growth returns by how much a counter grew. It is zero where now was read earlier than before.
func growth(now, before uint64) uint64 { return now - min(now, before) }
