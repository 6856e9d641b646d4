package sim

import (
	"encoding/binary"
	"maps"
	"net/netip"
	"slices"
	"time"

	"ipoibcm/ib"
	"ipoibcm/ipoib"
	"ipoibcm/nexthop"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/ip"
	"ipoibcm/wire/nd"
)

// # While it runs

// checkPost looks at a frame that is about to be posted on c.
func (h *host) checkPost(c *conn, fr []byte) {
	var hd encap.Header
	if err := hd.UnmarshalBinary(fr); err != nil {
		h.w.fatalf("%s: posts %v", h.name(), err)
	}
	pkt := fr[encap.HeaderLen:]
	if c.id != 0 {
		dst, _ := ip.Dst(pkt)
		switch {
		case hd.Type == encap.PathProbe && c.trans == uc: // an extension, to peers that know it
		case hd.Type != encap.IPv4 && hd.Type != encap.IPv6:
			h.w.fatalf("%s: a frame of type %v on connection %d", h.name(), hd.Type, c.id)
		case nd.KindOf(pkt) != nd.None:
			h.w.fatalf("%s: %v on connection %d", h.name(), nd.KindOf(pkt), c.id)
		case h.isGroup(dst):
			h.w.fatalf("%s: a packet for %v on connection %d", h.name(), dst, c.id)
		}
		if c.mtu == 0 {
			for _, i := range h.m.Conns() {
				if i.Conn == c.id {
					if i.State != "ESTABLISHED" {
						h.w.fatalf("%s: a packet on connection %d in state %v", h.name(), c.id, i.State)
					}
					c.mtu = i.MTU
				}
			}
		}
	}
	if c.id != 0 {
		h.checkFits(c, pkt)
	}
	if len(pkt) > c.mtu && c.mtu != 0 {
		h.w.fatalf("%s: a packet of %d octets on connection %d of MTU %d", h.name(), len(pkt), c.id, c.mtu)
	}
}

// posted keeps the books about a frame that was posted on c.
func (h *host) posted(c *conn, fr []byte) {
	if c.id != 0 {
		x := hash(fr)
		c.sent = append(c.sent, x)
		c.sentAs[x] = true
	}
	p := h.w.packetIn(fr[encap.HeaderLen:])
	if p == nil {
		return
	}
	if p.posts++; p.posts > 1 && p.to != nil {
		h.w.fatalf("%s: %v is sent %d times", h.name(), p, p.posts)
	}
	if c.id == 0 {
		return
	}
	p.conn = c
	switch {
	case h.cfg.lag > 0 || h.late:
		return // a packet may overtake one that the control plane still holds
	case !p.link.IsZero() && p.link.Key() != c.peer:
		return // it waited for a host that is another now, and was resolved anew
	}
	flow := p.dst.String()
	if p.id < c.lastOf[flow] {
		h.w.fatalf("%s: %v is sent after packet %d of the same flow", h.name(), p, c.lastOf[flow])
	}
	c.lastOf[flow] = p.id
}

// packetIn returns the packet of the workload that b begins, nil if b is none.
func (w *world) packetIn(b []byte) *packet {
	switch ip.Version(b) {
	case 4:
		if v := ip.V4(b); len(b) >= 28 && v.Protocol() == proto && v.FragOffset() == 0 {
			return w.packets[binary.BigEndian.Uint64(v.Payload())]
		}
	case 6:
		if v := ip.V6(b); len(b) >= 48 && v.NextHeader() == proto {
			return w.packets[binary.BigEndian.Uint64(v[ip.V6HeaderLen:])]
		}
	}
	return nil
}

// checkRecv compares a frame that arrived on c with what the other end posted:
// RC delivers all of it in order and once, UC nothing else.
func (h *host) checkRecv(c *conn, fr []byte) {
	far := h.w.ends[end{c.rtr.Path.DGID, c.rtr.DestQPN}]
	switch {
	case far == nil:
		h.w.fatalf("%s: far is nil", h.name())
	case far.rtr.DestQPN != c.qpn:
		h.w.fatalf("%s: DestQPN is %v, want %v", h.name(), far.rtr.DestQPN, c.qpn)
	case far.rtr.Path.DGID != h.gid:
		h.w.fatalf("%s: Path.DGID is %v, want %v", h.name(), far.rtr.Path.DGID, h.gid)
	}
	x := hash(fr)
	switch c.trans {
	case rc:
		if c.got >= len(far.sent) || far.sent[c.got] != x {
			h.w.fatalf("%s: frame %d on RC connection %d is not what was sent %dth", h.name(), c.got, c.id, c.got)
		}
	default:
		if !far.sentAs[x] {
			h.w.fatalf("%s: a frame on UC connection %d was never sent", h.name(), c.id)
		}
	}
	c.got++
}

// afterStep is called when a host has carried out all that its machine wanted.
// idle says that it wanted nothing, and was given no packet to keep: most frames
// are somebody else's questions.
func (h *host) afterStep(idle bool) {
	h.checkHeld()
	if idle {
		return
	}
	recs, ns := h.m.Conns(), h.m.Neighbours()
	h.checkRecords(recs, ns)
	h.checkExplained(recs, ns, false)
	for a, mtu := range h.hostRoutes() {
		if mtu > 65520 || mtu < 68 {
			h.w.fatalf("%s: host route to %v with MTU %d", h.name(), a, mtu)
		}
	}
}

// # When it is quiet

// checkQuiet compares the hosts with each other when nothing happens any more.
func (w *world) checkQuiet() {
	w.catchUp()
	for i, a := range w.hosts {
		if a.dead {
			continue
		}
		w.checkRoutes(a)
		for _, b := range w.hosts[i+1:] {
			if !b.dead {
				w.checkPair(a, b)
			}
		}
	}
}

// catchUp lets each control plane get to what has happened already: a neighbour that
// answers at the last moment has its host route some milliseconds later.
func (w *world) catchUp() {
	w.f.RunWhile(func() bool { return slices.ContainsFunc(w.hosts, func(h *host) bool { return h.held > 0 }) },
		time.Second)
}

// checkPair: at most one connection, and both ends mean the same one.
func (w *world) checkPair(a, b *host) {
	as, bs := a.with(b), b.with(a)
	switch {
	case len(as) > 1:
		w.fatalf("as has %v elements, want at most 1", len(as))
	case len(bs) > 1:
		w.fatalf("bs has %v elements, want at most 1", len(bs))
	case len(as) != len(bs):
		w.fatalf("as has %v elements, want %v", len(as), len(bs))
	}
	if len(as) == 0 {
		return
	}
	x, y := as[0], bs[0]
	cx, cy := a.conns[x.Conn], b.conns[y.Conn]
	mtu := min(cx.receive, cy.receive) - encap.HeaderLen
	w.checkCarried(cx, cy)
	w.checkCarried(cy, cx)
	switch {
	case x.State != "ESTABLISHED" || y.State != "ESTABLISHED":
		w.fatalf("%s-%s: states %v and %v", a.name(), b.name(), x.State, y.State)
	case x.LocalQPN != y.RemoteQPN || y.LocalQPN != x.RemoteQPN || cx.rtr.DestQPN != cy.qpn || cy.rtr.DestQPN != cx.qpn:
		w.fatalf("%s-%s: QPNs %v to %v and %v to %v", a.name(), b.name(), x.LocalQPN, x.RemoteQPN, y.LocalQPN, y.RemoteQPN)
	case x.LocalComm != y.RemoteComm || y.LocalComm != x.RemoteComm:
		w.fatalf("%s-%s: communication IDs %x to %x and %x to %x", a.name(), b.name(), x.LocalComm, x.RemoteComm,
			y.LocalComm, y.RemoteComm)
	case cx.rts.SQPSN != cy.rtr.RQPSN || cy.rts.SQPSN != cx.rtr.RQPSN:
		w.fatalf("%s-%s: PSNs differ", a.name(), b.name())
	case cx.rtr.PathMTU != cy.rtr.PathMTU:
		w.fatalf("%s-%s: path MTUs %v and %v", a.name(), b.name(), cx.rtr.PathMTU, cy.rtr.PathMTU)
	case x.Transport != y.Transport || x.Transport != common(a, b):
		w.fatalf("%s-%s: %v and %v, want %v", a.name(), b.name(), x.Transport, y.Transport, common(a, b))
	case x.MTU != mtu || y.MTU != mtu:
		w.fatalf("%s-%s: MTU %d and %d, want %d", a.name(), b.name(), x.MTU, y.MTU, mtu)
	case x.Active == y.Active:
		w.fatalf("%s-%s: both or neither sent the REQ", a.name(), b.name())
	case !x.Tx || !x.Rx || !y.Tx || !y.Rx:
		w.fatalf("%s-%s: a connection that is not two-way", a.name(), b.name())
	}
}

// checkRoutes: each neighbour with a connection has a host route with the
// smaller of device and connection MTU; nothing else has one; and the data path
// has what the machine thinks it has.
func (w *world) checkRoutes(h *host) {
	want := map[netip.Addr]int{}
	for _, c := range h.m.Conns() {
		for _, a := range c.Addrs {
			if c.State == "ESTABLISHED" {
				want[a] = min(h.mtu, c.MTU)
			}
		}
	}
	if have := h.hostRoutes(); !maps.Equal(want, have) {
		w.fatalf("%s: host routes %v, want %v", h.name(), have, want)
	}
	paths := map[netip.Addr]nexthop.Path{}
	for hop := range h.m.Hops() {
		if hop.Dests > 0 {
			paths[hop.Addr] = hop.Path
		}
	}
	if !maps.Equal(paths, h.paths) {
		w.fatalf("%s: paths %+v, the machine says %+v", h.name(), h.paths, paths)
	}
}

const (
	// recoverWithin is how long, after the network has become perfect, traffic
	// may need to flow both ways by the right mode: a pause after failures, or
	// finding out that a neighbour's address is out of date (45 s of
	// reachability, 5 s of delay, 3 s of probes).
	recoverWithin = 90 * time.Second
	// cleanWithin is how long records of what is gone may stay: a connection
	// that nobody uses goes after Options.Idle, which is a minute here.
	cleanWithin = 150 * time.Second
)

// settle heals the network, keeps every pair talking until all is as it should
// be, and checks that.
func (w *world) settle() {
	w.heal()
	for _, h := range w.hosts {
		if h.dead {
			h.boot()
		}
		h.linkUp()
	}
	healed := w.f.Now()
	for round := 0; ; round++ {
		flows := w.round()
		since := w.f.Now().Sub(healed)
		if flows && w.clean() {
			w.tell("all is well after %v", since)
			break
		}
		if flows {
			w.run(1500 * time.Millisecond) // what is left over will take its time to go
		}
		if !flows && since > recoverWithin {
			w.fatalf("%v after the network has healed: %s", since, w.complaint())
		}
		if since > cleanWithin {
			w.fatalf("%v after the network has healed: there are connections left over", since)
		}
	}
	w.run(3 * time.Second)
	w.checkQuiet()
	w.run(10 * time.Second) // timewait is over, rejections are forgotten
	w.checkRest()
}

// clean reports whether every pair has what it should have in its records.
func (w *world) clean() bool {
	for _, a := range w.hosts {
		n := 0
		for _, b := range w.partners(a) {
			if common(a, b) != ib.UD {
				n++
			}
		}
		if len(a.m.Conns()) != n {
			return false
		}
	}
	return true
}

// round sends one packet from each host to each of its partners and reports whether all
// arrived within half a second by the mode that is right.
func (w *world) round() bool {
	sent := w.talk()
	w.run(500 * time.Millisecond)
	for _, p := range sent {
		if p.delivered == 0 || p.mode() != common(p.from, p.to) {
			return false
		}
	}
	return true
}

// talk sends one small packet from each host to each of its partners.
func (w *world) talk() (sent []*packet) {
	for _, a := range w.hosts {
		for _, b := range w.partners(a) {
			if p := a.send(b.addr4(), 100, true); p != nil {
				sent = append(sent, p)
			}
		}
	}
	return sent
}

func (w *world) complaint() string {
	for _, p := range w.talk() {
		w.run(500 * time.Millisecond)
		if p.delivered == 0 {
			return p.String() + " did not arrive"
		}
		if p.mode() != common(p.from, p.to) {
			return p.String() + " went by " + p.mode().String()
		}
	}
	return "now it works"
}

// mode is how p went.
func (p *packet) mode() ib.Transport {
	if p.conn == nil {
		return ib.UD
	}
	return p.conn.trans
}

// addr4 is the host's first address.
func (h *host) addr4() netip.Addr { return h.addrs[0].Addr() }

// addr6 is its global IPv6 address, if it has one now.
func (h *host) addr6() netip.Addr {
	i := slices.IndexFunc(h.addrs, func(p netip.Prefix) bool { return p.Addr().Is6() && !p.Addr().IsLinkLocalUnicast() })
	if i < 0 {
		return netip.Addr{}
	}
	return h.addrs[i].Addr()
}

// end shuts every host down, one after the other, and looks for what is left.
func (w *world) end() {
	for _, i := range w.r.Perm(len(w.hosts)) {
		h := w.hosts[i]
		before := w.f.Now()
		h.stop()
		w.f.RunWhile(func() bool { return !h.m.Deadline().IsZero() }, 10*time.Second)
		if took := w.f.Now().Sub(before); took > time.Second {
			w.fatalf("%s needed %v to say goodbye on a perfect network", h.name(), took)
		}
		w.run(20 * time.Millisecond)
		w.catchUp()
		for _, o := range w.hosts {
			if o != h && len(o.with(h)) > 0 {
				w.fatalf("%s still has a connection to %s, which has stopped", o.name(), h.name())
			}
			w.checkRoutes(o)
		}
		switch {
		case len(h.m.Conns()) > 0 || len(h.hostRoutes()) > 0 || len(h.paths) > 0 || len(h.port.QPs()) != 1:
			w.fatalf("%s has stopped and left something behind", h.name())
		case len(h.port.Groups()) > 0:
			w.fatalf("%s has stopped and is still in %v", h.name(), h.port.Groups())
		}
	}
	// Timewait ends too.
	for range 60 {
		w.run(time.Second)
		for _, h := range w.hosts {
			h.step(ipoib.Wake{})
		}
	}
	for _, h := range w.hosts {
		if n := h.m.CommIDs(); n != 0 {
			w.fatalf("%s holds %d communication IDs a minute after it has stopped", h.name(), n)
		}
		h.exit()
	}
	w.f.Run(w.f.Now().Add(time.Minute))
	if w.f.Timers() != 0 || w.f.Flying() != 0 {
		w.fatalf("all hosts are gone; %d timers and %d packets are left", w.f.Timers(), w.f.Flying())
	}
}
