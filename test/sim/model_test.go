package sim

import (
	"cmp"
	"fmt"
	"strings"

	"ipoibcm/ib"
	"ipoibcm/ipoib"
	"ipoibcm/neigh"
	"ipoibcm/nexthop"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/roce/rocetest"
)

// This file is the reference model: what somebody who knows the configuration
// and RFC 4755, but nothing of the machine, can say about what hosts may do.
// It holds for every packet and after every step; check_test.go asks it.

// # What two hosts agree on

// common returns the mode that two hosts should end up with.
func common(a, b *host) ib.Transport {
	if a.cmPath(b) < 0 && b.cmPath(a) < 0 {
		return ib.UD
	}
	switch f := a.cfg.mode.Flags() & b.cfg.mode.Flags(); {
	case f&encap.FlagRC != 0:
		return ib.RC
	case f&encap.FlagUC != 0:
		return ib.UC
	}
	return ib.UD
}

// cmPath returns the path by which a reaches b first, -1 if there is none.
func (a *host) cmPath(b *host) int {
	open := func(h *host) (gsi, inband bool) {
		return h.cfg.cm != ipoib.CMInband && h.cfg.qp1 == qp1Ours, h.cfg.cm != ipoib.CMGSI
	}
	ag, ai := open(a)
	bg, bi := open(b)
	switch {
	case ag && bg:
		return int(ipoib.ViaGSI)
	case ai && bi:
		return int(ipoib.ViaInband)
	}
	return -1
}

func (c config) receiveMTU() int { return cmp.Or(c.receive, 65524) }

// partners returns the hosts that a keeps talking to while the network is quiet:
// all, or in a large world those near it.
func (w *world) partners(a *host) (out []*host) {
	for _, b := range w.hosts {
		d := (a.i - b.i + len(w.hosts)) % len(w.hosts)
		if a != b && (w.ring == 0 || min(d, len(w.hosts)-d) <= w.ring) {
			out = append(out, b)
		}
	}
	return out
}

// checkOffer: a host never offers to take more than it is configured for.
func (h *host) checkOffer(c *conn) {
	if c.receive > h.cfg.receiveMTU() {
		h.w.fatalf("%s: connection %d offers a Receive MTU of %d, configured is %d", h.name(), c.id, c.receive,
			h.cfg.receiveMTU())
	}
}

// checkFits: a frame that is posted on c fits the receive buffers at its other
// end, and goes to the host that its packet is for.
func (h *host) checkFits(c *conn, pkt []byte) {
	far := h.w.ends[end{c.rtr.Path.DGID, c.rtr.DestQPN}]
	if far == nil {
		h.w.fatalf("%s: a packet on connection %d, which leads nowhere", h.name(), c.id)
	}
	if n := encap.HeaderLen + len(pkt); n > far.receive {
		h.w.fatalf("%s: a message of %d octets to %v, which takes %d octets at most", h.name(), n, c.peer, far.receive)
	}
	// Who owns dst is known from its address; a gateway may stand in between.
	if p := h.w.packetIn(pkt); p != nil && p.to != nil && far.h != nil && p.to != far.h && len(h.gateways) == 0 {
		h.w.fatalf("%s: %v goes to the wrong host, %s", h.name(), p, far.h.name())
	}
}

// onWire looks at every packet that the provider of h sends or takes: multicast
// is UD (4755-2.1-1), and the source is who sends it.
func (h *host) onWire(sent bool, b []byte) {
	hd, payload, err := rocetest.ParseIP(b)
	if err != nil || !sent {
		return
	}
	if dst := ib.GIDFromAddr(hd.Dst); dst.IsMulticast() && payload[0]>>5 != 3 {
		h.w.fatalf("%s: opcode %#x, which is no UD, to the group %v", h.name(), payload[0], dst)
	}
	if src := ib.GIDFromAddr(hd.Src); src != h.gid {
		h.w.fatalf("%s: sends as %v", h.name(), src)
	}
}

// # What becomes of the packets a machine is given

// books say where the packets of the workload are that a machine was given.
// None may vanish without a counter that says why.
type books struct {
	in         uint64 // Packet events
	out        uint64 // first octets of a packet in SendUD or SendConn
	refused    uint64 // ICMP to the kernel
	afterwards uint64 // given after Shutdown
	downFrames uint64 // frames of neighbours while down, which drop_interface_down counts too
}

func (h *host) bookEvent(ev ipoib.Event) {
	switch ev := ev.(type) {
	case ipoib.Packet:
		h.books.in++
		if h.shutdown {
			h.books.afterwards++
		}
	case ipoib.RecvFrame:
		var hd encap.Header
		if !h.mUp && !h.shutdown && hd.UnmarshalBinary(ev.Frame) == nil &&
			(hd.Type == encap.ARP || hd.Type == encap.PathProbe || hd.Type == encap.IPv6) {
			h.books.downFrames++
		}
	}
}

func (h *host) bookAction(a ipoib.Action) {
	var fr []byte
	switch a := a.(type) {
	case ipoib.SendUD:
		fr = a.Frame
	case ipoib.SendCopies:
		for ud := range a.Each() {
			h.bookAction(ud)
		}
	case ipoib.SendConn:
		fr = a.Frame
	case ipoib.WriteTUN:
		if isTooBig(a.IP) { // the others answer what is counted as dropped
			h.books.refused++
		}
	}
	if fr != nil && h.w.packetIn(fr[encap.HeaderLen:]) != nil {
		h.books.out++
	}
}

// dropNames are the counters of packets that a machine was given and did not
// send. The rest of the counters named drop is about frames and messages.
var dropNames = func() map[string]bool {
	names := map[string]bool{}
	for _, n := range []string{"connection_queue", "connection_queue_total", "connection_queue_given_up", "interface_down",
		"ipv6_off", "malformed_packet", "oversize", "oversize_unanswerable", "nd_from_tun", "group_not_wanted"} {
		names["drop_"+n] = true
	}
	for _, n := range []string{"lookups_busy", "lookup_queue", "no_answer", "device_down"} {
		names["fib_drop_"+n] = true
	}
	for d := neigh.DropQueuePackets; d <= neigh.DropForgotten; d++ {
		names["neigh_drop_"+d.String()] = true
	}
	return names
}()

// checkBooks: what came in went out, was answered, waits, or was counted. In a subnet packets
// and frames wait for paths and groups together, and are counted together.
func (h *host) checkBooks() {
	if h.ib != nil {
		return
	}
	b, drops := &h.books, uint64(0)
	known, counted := 0, ""
	for _, c := range h.m.Counters() {
		if dropNames[c.Name] {
			known++
			drops += c.Value
		}
		if dropNames[c.Name] && c.Value > 0 {
			counted += fmt.Sprintf(" %s=%d", c.Name, c.Value)
		}
	}
	if known != len(dropNames) {
		h.w.fatalf("the model knows %d counters of drops, the machine %d of them", len(dropNames), known)
	}
	_, queued := h.queued()
	if have := b.out + b.refused + b.afterwards + uint64(queued) + drops - b.downFrames; have != b.in {
		h.w.fatalf("%s: %d packets came in; %d went out, %d were answered, %d came after the end, %d wait, and%s "+
			"less %d frames are counted as dropped: %d in all",
			h.name(), b.in, b.out, b.refused, b.afterwards, queued, counted, b.downFrames, have)
	}
}

// queued returns the largest queue of one neighbour and the sum of all. What
// waits for a connection is shared by the addresses of its peer.
func (h *host) queued() (largest, sum int) {
	peers := map[encap.LinkAddr]int{}
	for _, n := range h.m.Neighbours() {
		largest = max(largest, n.Queued)
		if n.Link.IsZero() {
			sum += n.Queued
		} else if n.Queued > 0 {
			peers[n.Link.Key()] = n.Queued
		}
	}
	for _, n := range peers {
		sum += n
	}
	return largest, sum + h.m.Waiting()
}

// # What a connection has carried

// checkCarried: at rest an RC connection has delivered all that was posted on
// it, and UC no more than that: where the network repeats packets a message of
// one packet is taken for a new one, as IBA has it.
func (w *world) checkCarried(from, to *conn) {
	if got, sent := to.got, len(from.sent); from.trans == rc && got != sent || got > sent && !w.dups {
		w.fatalf("%s-%s: %d frames were sent by %v, %d arrived", from.h.name(), to.h.name(), sent, from.trans, got)
	}
}

// # What is there

// Bounds of what waits for one neighbour: for its address, or for
// the connection to its peer.
const (
	maxWaiting       = 64
	maxWaitingOctets = 1 << 20
)

// checkHeld: the provider holds what the connections account for, no more.
func (h *host) checkHeld() {
	w := h.w
	if qps := len(h.port.QPs()); qps != 1+len(h.conns) {
		w.fatalf("%s: %d QPs for the UD QP and %d connections", h.name(), qps, len(h.conns))
	}
	regions := 1 + len(h.ud.inflight)
	if h.srq != nil {
		regions++
	}
	for _, c := range h.conns {
		if c.bufs.region != nil {
			regions++
		}
		regions += len(c.inflight)
		if len(c.inflight) > sendDepth {
			w.fatalf("%s: %d packets are posted on connection %d", h.name(), len(c.inflight), c.id)
		}
	}
	if n := h.port.Regions(); n != regions {
		w.fatalf("%s: %d buffers are registered, %d are in use", h.name(), n, regions)
	}
}

// checkRecords: the machine has a record of every connection, and what waits
// has not grown past its bound.
func (h *host) checkRecords(recs []ipoib.ConnInfo, ns []ipoib.NeighbourInfo) {
	w := h.w
	if len(recs) != len(h.conns) {
		w.fatalf("%s: %d connections and %d in the record", h.name(), len(h.conns), len(recs))
	}
	waiting := 0
	for i := range ns {
		n := &ns[i]
		if n.Queued > maxWaiting || n.QueuedOctets > maxWaitingOctets {
			w.fatalf("%s: %d packets of %d octets wait for %v", h.name(), n.Queued, n.QueuedOctets, n.Addr)
		}
		waiting += n.Queued
	}
	if !h.mUp && waiting > 0 {
		w.fatalf("%s: %d packets wait while the interface is down", h.name(), waiting)
	}
}

// checkRest: when nothing has happened for a while, communication IDs and timers
// are those of what is there.
func (w *world) checkRest() {
	timers := 0
	for _, h := range w.hosts {
		if h.dead {
			continue
		}
		n := len(h.m.Conns())
		if ids := h.m.CommIDs(); ids != n {
			w.fatalf("%s holds %d communication IDs for %d connections", h.name(), ids, n)
		}
		// One for the machine, one for the data path's counts, one for each QP, and
		// some that are on their way.
		timers += 2 + len(h.port.QPs()) + 4
	}
	if n := w.f.Timers(); n > timers {
		w.fatalf("%d timers are set, %d at most have a use", n, timers)
	}
}

// # What can be explained

// checkExplained asks the machine about neighbours and connections: about those
// that the last Step touched and one more of each kind, or about all.
func (h *host) checkExplained(recs []ipoib.ConnInfo, ns []ipoib.NeighbourInfo, all bool) {
	h.looked++
	for i := range ns {
		if all || i == h.looked%len(ns) || h.touched[ns[i].Addr] {
			h.checkNeighbour(&ns[i])
		}
	}
	for i := range recs {
		if all || i == h.looked%len(recs) {
			h.checkConn(&recs[i])
		}
	}
	clear(h.touched)
}

// checkNeighbour: explain says how it is reached, as the data path has it, and
// for what packets wait.
func (h *host) checkNeighbour(n *ipoib.NeighbourInfo) {
	w, e := h.w, h.explain(n.Addr)
	why := strings.Join(e.Reasons, "; ")
	bad := func(what string) {
		w.fatalf("%s: neighbour %+v is explained as %+v: %s", h.name(), *n, e, what)
	}
	switch {
	case len(e.Reasons) == 0:
		bad("no reason")
	case !h.mUp:
		if e.Path.Kind != nexthop.PathDrop {
			bad("the interface is down")
		}
		return
	case e.NextHop != n.Addr:
		return // it is reached by a gateway
	case h.owns(n.Addr):
		return // the machine has not heard of that yet
	case n.State == "FAILED":
		if !strings.Contains(why, "nobody answered") {
			bad("it failed")
		}
		return
	case n.Link.IsZero():
		if !strings.Contains(why, "wait for its answer") {
			bad("it is being asked for")
		}
		return
	case e.Link.Key() != n.Link.Key() || !strings.Contains(why, n.State):
		bad("another link-layer address or state")
	case n.Queued > 0 && !strings.Contains(why, "wait") && !strings.Contains(why, "due within"):
		bad("packets wait")
	}
	have, found := h.lookup(n.Addr)
	if !found {
		return // no packet went there yet, or not for a minute
	}
	if have.Kind == e.Path.Kind && have.Conn == e.Path.Conn && have.MTU == e.Path.MTU {
		return
	}
	if e.Path.Kind == nexthop.PathMiss && have.Kind == nexthop.PathUD && !h.m.Deadline().After(h.now()) {
		return // a pause is over and Wake is on its way
	}
	bad("the data path has " + have.Kind.String())
}

// checkConn: each connection in the record has a use, and explain knows it.
func (h *host) checkConn(c *ipoib.ConnInfo) {
	if c.Why == "" {
		h.w.fatalf("%s: nothing says what connection %d is for: %+v", h.name(), c.Conn, *c)
	}
	if len(c.Addrs) == 0 || !h.mUp {
		return
	}
	// Of several addresses some may be ours by now, or behind a gateway.
	a := c.Addrs[0]
	if e := h.explain(a); !h.owns(a) && e.NextHop == a && e.Link.Key() != c.Peer.Key() {
		h.w.fatalf("%s: connection %d to %v is not what %v is explained by: %+v", h.name(), c.Conn, c.Peer, a, e)
	}
}
