package sim

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"slices"

	"ipoibcm/fib"
	"ipoibcm/fib/fibtest"
	"ipoibcm/ipoib"
	"ipoibcm/rtnl"
	"ipoibcm/wire/ip"
)

// A kernel is what the host's kernel knows of the device.
type kernel struct {
	h        *host
	up       bool
	mtu      int
	addrs    []netip.Prefix // configured, the interface's own link-local one too
	tables   *fibtest.Kernel
	gateways []fibtest.Route
	local    []netip.Addr // addresses of other devices
	groups   []netip.Addr
	ipid     uint16
	frags    map[fragKey]*frag
	icmp     int // too-big messages received
	octets   int // of whole packets of the workload received
}

type fragKey struct {
	src, dst netip.Addr
	id       uint16
}

type frag struct {
	buf  []byte
	have []bool // by 8 octets
	size int    // of the payload, once known
}

// create makes the device: addresses, then up, then routes.
func (k *kernel) create() {
	k.mtu, k.frags = 65520, map[fragKey]*frag{}
	k.tables = fibtest.New()
	k.tables.Others = k.local
	k.tables.Routes = slices.Clone(k.gateways)
	for _, p := range k.addrs {
		k.tables.AddAddr(p)
	}
	k.tell(k.tables.Start())
	k.linkUp()
}

// tell tells the machine what has happened.
func (k *kernel) tell(evs []fib.Event) {
	for _, ev := range evs {
		k.h.event(ipoib.FIBEvent{Event: ev})
	}
}

// hostRoutes are the routes of the machine's to neighbours.
func (k *kernel) hostRoutes() map[netip.Addr]int {
	out := map[netip.Addr]int{}
	if k.tables != nil {
		for _, r := range k.tables.Own {
			if r.Type == rtnl.Unicast {
				out[r.Dst.Addr()] = r.MTU
			}
		}
	}
	return out
}

// destroy is what happens when the agent's end of the device closes.
func (k *kernel) destroy() {
	k.up, k.tables = false, nil
	k.addrs = slices.DeleteFunc(k.addrs, func(p netip.Prefix) bool { return p.Addr().IsLinkLocalUnicast() })
}

func (k *kernel) linkUp() {
	if k.up || k.h.dead {
		return
	}
	k.up = true
	k.tell(k.tables.Up(true))
	for _, r := range k.gateways {
		if !slices.Contains(k.tables.Routes, r) { // of before the device went down
			k.tell(k.tables.AddRoute(r))
		}
	}
}

// linkDown drops all IPv6 addresses, as Linux does by default.
func (k *kernel) linkDown() {
	if !k.up || k.h.dead {
		return
	}
	k.up = false
	for _, p := range slices.Clone(k.addrs) {
		if p.Addr().Is6() {
			k.delAddr(p)
		}
	}
	k.tell(k.tables.Up(false))
}

func (k *kernel) addAddr(p netip.Prefix) {
	if !slices.Contains(k.addrs, p) {
		k.addrs = append(k.addrs, p)
		if k.tables != nil {
			k.tell(k.tables.AddAddr(p))
		}
	}
}

func (k *kernel) delAddr(p netip.Prefix) {
	if i := slices.Index(k.addrs, p); i >= 0 {
		k.addrs = slices.Delete(k.addrs, i, i+1)
		if k.tables != nil {
			k.tell(k.tables.DelAddr(p))
		}
	}
}

func (k *kernel) setMTU(n int) {
	k.mtu = n
	k.tell(k.tables.MTU(n))
}

func (k *kernel) join(groups ...netip.Addr) {
	k.groups = groups
	k.h.event(ipoib.KernelGroups{Groups: groups})
}

func (k *kernel) via(dst netip.Prefix, gateway netip.Addr) {
	r := fibtest.Route{Route: rtnl.Route{Dst: dst, Type: rtnl.Unicast, Via: gateway, Protocol: rtnl.ProtoStatic},
		OIF: fibtest.Index}
	k.gateways = append(k.gateways, r)
	if k.tables != nil {
		k.tell(k.tables.AddRoute(r))
	}
}

// source returns the address from which h sends to dst, and whether dst can be
// reached through the device at all.
func (k *kernel) source(dst netip.Addr) (src netip.Addr, ok bool) {
	best := netip.Addr{}
	for _, p := range k.addrs {
		a := p.Addr()
		if a.Is4() != dst.Is4() || dst.Is6() && dst.IsLinkLocalUnicast() != a.IsLinkLocalUnicast() {
			continue
		}
		if p.Contains(dst) {
			return a, k.up
		}
		if !best.IsValid() && !a.IsLinkLocalUnicast() {
			best = a
		}
	}
	if dst.IsMulticast() || dst == ip.LimitedBroadcast {
		return best, k.up && best.IsValid()
	}
	for _, r := range k.gateways {
		if r.Dst.Contains(dst) {
			return best, k.up && best.IsValid()
		}
	}
	return netip.Addr{}, false
}

func (k *kernel) owns(a netip.Addr) bool {
	return slices.Contains(k.local, a) || slices.ContainsFunc(k.addrs, func(p netip.Prefix) bool { return p.Addr() == a })
}

// send makes one packet of size octets, header included, and gives it to the
// device. It returns nil if the kernel has no route or h is down.
func (h *host) send(dst netip.Addr, size int, df bool) *packet {
	src, ok := h.source(dst)
	if h.dead || !ok {
		return nil
	}
	w := h.w
	w.lastID++
	p := &packet{id: w.lastID, from: h, src: src, dst: dst, at: w.f.Now(), df: df,
		size: min(max(size, headerLen(dst)+8), h.mtu)}
	if !df {
		h.ipid++
		p.ipid = h.ipid
	}
	if !h.isGroup(dst) {
		for _, o := range w.hosts {
			if o.owns(dst) {
				p.to = o
			}
		}
	}
	for _, n := range h.m.Neighbours() {
		if n.Addr == dst {
			p.link = n.Link
		}
	}
	w.packets[p.id] = p
	h.transmit(p.octets())
	if h.cfg.fault == repeats {
		h.transmit(p.octets())
	}
	return p
}

// receive is the kernel's input: from the device, by connection c if not nil.
func (k *kernel) receive(b []byte, c *conn) {
	w := k.h.w
	switch ip.Version(b) {
	case 4:
		p, err := ip.AsV4(b)
		if err != nil || len(p) != len(b) {
			w.fatalf("%s: a packet arrived that is no IPv4: %v", k.h.name(), err)
		}
		switch p.Protocol() {
		case 1:
			k.answered(b, p.Payload()[8:])
		case proto:
			if p.MF() || p.FragOffset() > 0 {
				k.fragment(p)
				return
			}
			k.h.delivered(p.Payload(), b, c)
		default:
			w.fatalf("%s: protocol %d arrived, which nobody sent", k.h.name(), p.Protocol())
		}
	case 6:
		p, err := ip.AsV6(b)
		if err != nil || len(p) != len(b) {
			w.fatalf("%s: a packet arrived that is no IPv6: %v", k.h.name(), err)
		}
		switch p.NextHeader() {
		case 58:
			k.answered(b, p[ip.V6HeaderLen+8:])
		case proto:
			k.h.delivered(p[ip.V6HeaderLen:], b, c)
		default:
			w.fatalf("%s: next header %d arrived, which nobody sent", k.h.name(), p.NextHeader())
		}
	default:
		w.fatalf("%s: %x arrived", k.h.name(), b[:min(len(b), 40)])
	}
}

// isTooBig reports whether b is ICMP that says so: type 3 code 4 of IPv4, 2 of IPv6.
func isTooBig(b []byte) bool {
	if ip.Version(b) == 4 {
		return b[20] == 3 && b[21] == 4
	}
	return b[40] == 2
}

// answered takes an ICMP message and what it quotes, which must be of a packet of
// ours.
func (k *kernel) answered(b, quoted []byte) {
	k.icmp++
	head := 20
	if ip.Version(quoted) == 6 {
		head = 40
	}
	if len(quoted) < head+8 {
		k.h.w.fatalf("%s: ICMP quotes %d octets", k.h.name(), len(quoted))
	}
	p := k.h.w.packets[binary.BigEndian.Uint64(quoted[head:])]
	if p == nil || p.from != k.h {
		k.h.w.fatalf("%s: ICMP quotes a packet that was not sent here", k.h.name())
	}
	p.refused = p.refused || isTooBig(b)
}

// fragment puts an IPv4 packet together again.
func (k *kernel) fragment(p ip.V4) {
	key := fragKey{p.Src(), p.Dst(), binary.BigEndian.Uint16(p[4:])}
	f := k.frags[key]
	if f == nil {
		if len(k.frags) > 1000 {
			clear(k.frags)
		}
		f = &frag{buf: make([]byte, 65536), have: make([]bool, 65536/8)}
		k.frags[key] = f
	}
	off, pl := p.FragOffset(), p.Payload()
	copy(f.buf[off:], pl)
	for i := off / 8; i < (off+len(pl)+7)/8; i++ {
		f.have[i] = true
	}
	if !p.MF() {
		f.size = off + len(pl)
	}
	if f.size > 0 && !slices.Contains(f.have[:(f.size+7)/8], false) {
		delete(k.frags, key)
		k.h.delivered(f.buf[:f.size], nil, nil)
	}
}

// delivered checks a packet that reached the kernel of h: it was sent, to h, and
// is what was sent. whole is nil if it came in fragments.
func (h *host) delivered(payload, whole []byte, c *conn) {
	w := h.w
	if len(payload) < 8 {
		w.fatalf("%s: %d octets of payload arrived", h.name(), len(payload))
	}
	p := w.packets[binary.BigEndian.Uint64(payload)]
	if p == nil {
		w.fatalf("%s: a packet arrived that nobody sent: %x", h.name(), payload[:8])
	}
	want := p.octets()
	if whole != nil && !bytes.Equal(whole, want) || !bytes.Equal(payload, want[headerLen(p.dst):]) {
		w.fatalf("%s: %v arrived changed", h.name(), p)
	}
	if p.to != nil && p.to != h || p.from == h {
		w.fatalf("%s: %v arrived at the wrong host", h.name(), p)
	}
	p.delivered++
	h.octets += p.size
	w.count("delivered over "+p.mode().String(), 1)
	if whole == nil {
		w.count("delivered in fragments", 1)
	}
	p.gotAt = w.f.Now()
	// The network may repeat what is unreliable; nobody else may repeat anything.
	if p.to != nil && p.delivered > 1 && (!w.dups || p.conn != nil && p.conn.trans == rc) {
		w.fatalf("%s: %v arrived %d times", h.name(), p, p.delivered)
	}
}
