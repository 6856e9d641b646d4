package ipoib

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"ipoibcm/fib/fibtest"
	"ipoibcm/group"
	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/internal/long"
	"ipoibcm/nexthop"
	"ipoibcm/rtnl"
	"ipoibcm/verbs"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/ip"
	"ipoibcm/wire/ip/iptest"
	"ipoibcm/wire/mad"
)

// Many seeds, with loss, duplication, reordering, restarts, addresses that come
// and go: when all is quiet again, every pair that talks has exactly one
// connection and both ends agree on it (4755-3.3-1, 4755-2.3-4).
func TestManySeeds(t *testing.T) {
	seeds := long.Of(50, 150)
	var crossings, redials uint64
	for seed := range uint64(seeds) {
		w := newWorld(t, seed)
		modes := []Mode{ModeRC, ModeUC, ModeAuto}
		m := modes[seed%3]
		a, b := w.node(1, Options{Mode: m}), w.node(2, Options{Mode: m})
		w.run(time.Duration(w.r.Int64N(int64(2 * time.Second))))
		w.loss, w.dup, w.delay = 0.3*w.r.Float64(), 0.2, time.Duration(w.r.Int64N(int64(300*time.Millisecond)))+1
		for range 30 {
			w.chaos([]*node{a, b})
			w.run(time.Duration(w.r.Int64N(int64(time.Second))))
		}
		w.loss, w.dup, w.delay = 0, 0, 200*time.Microsecond
		for _, n := range []*node{a, b} {
			if n.dead {
				n.boot()
			}
		}
		w.run(3 * time.Minute) // pauses end, what is left of former lives times out
		var p, q []byte
		for range 5 {
			p, q = a.ping("10.0.0.2", 9000, false), b.ping("10.0.0.1", 9000, false)
			w.run(time.Minute)
		}
		w.settle()
		w.agree(a, b)
		expect.MustEqual(w, b.got(p), 1, "b's copies of p")
		expect.MustEqual(w, a.got(q), 1, "a's copies of q")
		if a.f.peers.queued+b.f.peers.queued != 0 {
			w.Fatalf("%d and %d octets wait", a.f.peers.queued, b.f.peers.queued)
		}
		crossings += a.f.Status().Crossings.Seen + b.f.Status().Crossings.Seen
		redials += a.counter("redials_accepted") + b.counter("redials_accepted")
		for _, n := range []*node{a, b} {
			n.step(Shutdown{})
		}
		w.run(5 * time.Second)
		if len(a.qps)+len(b.qps)+len(a.dests)+len(b.dests)+len(a.hostRoutes())+len(b.hostRoutes())+len(a.joined)+
			len(b.joined) != 0 {
			w.Fatalf("left after shutdown")
		}
	}
	if crossings == 0 || redials == 0 {
		t.Errorf("%d crossings and %d redials: the seeds are too tame", crossings, redials)
	}
}

// chaos lets something happen to the nodes.
func (w *world) chaos(nodes []*node) {
	i := w.r.IntN(len(nodes))
	n, m := nodes[i], nodes[(i+1)%len(nodes)]
	if n.dead {
		n.boot()
		return
	}
	switch w.r.IntN(12) {
	case 0:
		n.dead = true
	case 1:
		n.kernel(n.k.Up(false))
		n.kernel(n.k.Up(true))
	case 2:
		n.delAddr(n.addrs[0].String())
		n.addAddr("10.0.0." + string('0'+rune(slices.Index(w.nodes, n)+1)) + "/24")
		n.addrs[0], n.addrs[len(n.addrs)-1] = n.addrs[len(n.addrs)-1], n.addrs[0]
	case 3:
		for _, c := range n.f.Conns() {
			if n.qps[c.Conn] != nil {
				n.step(QPError{Conn: c.Conn, Status: verbs.GeneralError})
				break
			}
		}
	case 4:
		n.noQP = !n.noQP
		defer func() { n.noQP = false }()
		n.ping(m.addr("10.0.0.1"), 100, false)
	default:
		dst := "10.0.0." + string('0'+rune(slices.Index(w.nodes, m)+1))
		n.ping(dst, 100, false)
		if !m.dead && w.r.IntN(2) == 0 {
			m.ping("10.0.0."+string('0'+rune(slices.Index(w.nodes, n)+1)), 9000, false)
		}
		n.ping(dst, 9000, false)
	}
}

// Three on one link: a connection to each, and a dead one holds up nobody.
func TestThree(t *testing.T) {
	w := newWorld(t, 1)
	a, b, c := w.node(1, Options{}), w.node(2, Options{}), w.node(3, Options{})
	w.run(2 * time.Second)
	p := a.ping("10.0.0.2", 9000, true)
	q := a.ping("10.0.0.3", 9000, true)
	r := b.ping("10.0.0.3", 9000, true)
	w.settle()
	expect.MustEqual(w, b.got(p), 1, "b's copies of p")
	expect.MustEqual(w, c.got(q), 1, "c's copies of q")
	expect.MustEqual(w, c.got(r), 1, "c's copies of r")
	expect.MustEqual(w, len(a.up()), 2, "length of a's up")
	expect.MustEqual(w, len(b.up()), 2, "length of b's up")
	expect.MustEqual(w, len(c.up()), 2, "length of c's up")
	c.dead = true
	for range 200 {
		a.ping("10.0.0.3", 9000, true)
	}
	p = a.ping("10.0.0.2", 9000, true)
	w.run(10 * time.Millisecond)
	if b.got(p) != 1 {
		w.Fatalf("the dead peer holds up the living")
	}
	w.run(2 * time.Second)
	for range 200 {
		a.ping("10.0.0.3", 9000, true)
	}
	if q := a.f.peers.byLink[c.link()]; q != nil && len(q.queue) > 64 {
		w.Fatalf("%d packets wait for the dead", len(q.queue))
	}
}

// The default UD MTU is 2044, a UD payload at most 4096: 4755-5-3, 4755-1-3.
func TestDefaults(t *testing.T) {
	w := newWorld(t, 1)
	a := w.node(1, Options{})
	s := a.f.Status()
	expect.Equal(t, s.UDMTU, 2044, "UDMTU")
	expect.Equal(t, s.ReceiveMTU, 65524, "ReceiveMTU")
	expect.Equal(t, s.DeviceMTU, 65520, "DeviceMTU")
	expect.Equal(t, s.Up, true, "Up")
	expect.Equal(t, len(s.Addrs), 3, "length of Addrs")
	expect.Equal(t, s.IPv6, true, "IPv6")
	for _, c := range a.f.Counters() {
		if c.Name == "" {
			t.Errorf("a counter without a name")
		}
	}
}

// Multicast and broadcast go by UD whatever there is: 4755-2.1-2, 4755-2.1-3, 4755-7-3.
func TestGroups(t *testing.T) {
	w, a, b := newPair(t, 2)
	a.ping("10.0.0.2", 100, true)
	w.settle()
	w.agree(a, b)
	g := ip4("239.1.2.3")
	b.step(KernelGroups{Groups: []netip.Addr{g}})
	mgid, _ := group.MGID(g, ib.DefaultPKey, 2)
	if !b.joined[mgid] {
		w.Fatalf("not joined: %v", b.joined)
	}
	a.kernel(a.k.AddRoute(fibtest.Route{Route: rtnl.Route{Dst: netip.MustParsePrefix("239.0.0.0/8"), Type: rtnl.Unicast,
		Via: ip4("10.0.0.77")}, OIF: fibtest.Index})) // which does not count
	on := a.onConn
	for _, dst := range []string{"239.1.2.3", "10.0.0.255", "255.255.255.255", "224.0.0.1"} {
		for range 2 { // the first by the machine, the second by the path it set
			p := mustEcho("10.0.0.1", dst, 100)
			a.output(p)
			w.run(time.Second)
			if b.got(p) == 0 {
				w.Fatalf("%s: got %d", dst, b.got(p))
			}
		}
		path, _ := a.path(ip4(dst))
		expect.MustEqual(w, path.Kind, nexthop.PathGroup, "%s: Kind of the path", dst)
		expect.MustEqual(w, path.MTU, 2044, "%s: MTU of the path", dst)
		e := a.explain(ip4(dst))
		expect.MustEqual(w, e.Mode, "UD", "%s: Mode of the explanation", dst)
		expect.MustEqual(w, e.Path.MTU, 2044, "%s: MTU of the explanation", dst)
	}
	if a.onConn != on {
		w.Fatalf("multicast on a connection")
	}
	n := len(b.tun)
	a.output(mustEcho("10.0.0.1", "239.1.2.3", 3000)) // oversize: fragments
	w.run(time.Second)
	if len(b.tun) != n+2 {
		w.Fatalf("%d fragments", len(b.tun)-n)
	}
	n = len(b.tun)
	a.ping("239.1.2.3", 3000, true) // with DF: dropped and counted
	a.output(mustEcho("10.0.0.1", "255.255.255.255", 3000))
	w.run(time.Second)
	expect.MustEqual(w, len(b.tun), n, "number of b's packets")
	expect.MustEqual(w, a.counter("drop_oversize"), 2, "drop_oversize")
	a.delAddr("10.0.0.1/24")
	if path, _ := a.path(ip4("10.0.0.255")); path.Kind != nexthop.PathMiss {
		w.Fatalf("packets to what was a subnet's broadcast address go by %v, want them to come up", path.Kind)
	}
}

// A link below 1280 has no IPv6 (RFC 8200 section 5), IPv4 works.
func TestNoIPv6(t *testing.T) {
	w := newWorld(t, 3)
	a, b := w.node(1, Options{UDMTU: 1020}), w.node(2, Options{UDMTU: 1020})
	a.addAddr("fd00::1/64")
	w.run(2 * time.Second)
	p := a.ping("10.0.0.2", 9000, true)
	a.output(echo6())
	w.settle()
	expect.MustEqual(w, b.got(p), 1, "b's copies of p")
	expect.MustEqual(w, a.counter("drop_ipv6_off"), 1, "a's drop_ipv6_off")
	expect.MustEqual(w, a.f.Status().IPv6, false, "a's Status.IPv6")
	expect.MustEqual(w, len(a.f.Status().Addrs), 1, "length of a's Status.Addrs")
}

func echo6() []byte {
	b, _ := iptest.Echo{Src: ip4("fd00::1"), Dst: ip4("fd00::2")}.AppendBinary(nil)
	return b
}

// RS, RA and Redirect pass between TUN and fabric; the option comes and goes,
// and an MTU in an RA changes nothing.
func TestRouterMessages(t *testing.T) {
	w := newWorld(t, 4)
	a, b := w.node(1, Options{}), w.node(2, Options{})
	b.step(KernelGroups{Groups: []netip.Addr{ip4("ff02::2")}})
	w.run(2 * time.Second)
	a.ping("fd00::2", 3000, true)
	w.settle()
	x, _ := w.agree(a, b)
	rs := icmp6("fe80::200:0:0:1", "ff02::2", []byte{133, 0, 0, 0, 0, 0, 0, 0})
	n, on := len(b.tun), a.onConn
	a.output(rs)
	w.run(time.Second)
	expect.MustEqual(w, len(b.tun), n+1, "RS: length of b's tun")
	expect.MustEqual(w, b.got(rs), 1, "RS: b's copies of rs")
	expect.MustEqual(w, a.counter("router_messages_out"), 1, "RS: a's router_messages_out")
	expect.MustEqual(w, b.counter("router_messages_in"), 1, "RS: b's router_messages_in")
	ra := icmp6("fe80::200:0:0:2", "fe80::200:0:0:1", append(make([]byte, 16), 5, 1, 0, 0, 0, 0, 7, 0xfc))
	ra[40] = 134
	ra = fix6(ra)
	b.output(ra)
	w.run(time.Second)
	if a.got(ra) != 1 {
		w.Fatalf("RA got %d", a.got(ra))
	}
	switch y, _ := w.agree(a, b); {
	case y.MTU != x.MTU:
		w.Fatalf("an RA changed MTU or mode: y's MTU is %v, want %v", y.MTU, x.MTU)
	case a.k.HostMTU(ip4("fd00::2")) != 65520:
		w.Fatalf("an RA changed MTU or mode: %v, %d on connections", a.hostRoutes(), b.onConn)
	case a.onConn != on:
		w.Fatalf("an RA changed MTU or mode: a's onConn is %v, want %v", a.onConn, on)
	case b.onConn != 0:
		w.Fatalf("an RA changed MTU or mode: b's onConn is %v, want 0", b.onConn)
	}
	na := icmp6("fd00::1", "fd00::2", append([]byte{136, 0, 0, 0, 0, 0, 0, 0}, make([]byte, 16)...))
	a.output(na)
	if a.counter("drop_nd_from_tun") != 1 {
		t.Errorf("NA from the TUN was not dropped")
	}
}

// ND on a connection is accepted, ARP there is not: 4755-7-2, 4755-4-4, 4755-4-5.
func TestNDOnConnection(t *testing.T) {
	w, a, b := newPair(t, 5)
	a.ping("fd00::2", 3000, true)
	w.settle()
	x, _ := w.agree(a, b)
	answers, on := a.f.neigh.Counters().Answers, a.onConn
	a.step(RecvFrame{Conn: x.Conn, Frame: frameOf(encap.IPv6, neighborSolicitation("fd00::2", "fd00::1", b.link()))})
	w.run(time.Second)
	// 4755-7-4, 4755-3.1-13, 4755-2.2-2: answered by UD
	expect.MustEqual(w, a.f.neigh.Counters().Answers, answers+1, "a's Counters.Answers")
	expect.MustEqual(w, a.onConn, on, "a's onConn")
	expect.MustEqual(w, a.counter("nd_on_connection"), 1, "a's nd_on_connection")
	a.step(RecvFrame{Conn: x.Conn, Frame: frameOf(encap.ARP, make([]byte, 56))})
	a.step(RecvFrame{Conn: x.Conn, Frame: frameOf(0x88ca, make([]byte, 56))})
	a.step(RecvFrame{Conn: x.Conn, Frame: []byte{8}})
	expect.MustEqual(w, a.counter("drop_arp_on_connection"), 1, "drop_arp_on_connection")
	expect.MustEqual(w, a.counter("drop_malformed_frame"), 2, "drop_malformed_frame")
}

// The underlay's address changes: everything anew under the new one.
func TestUnderlayChanged(t *testing.T) {
	w, a, b := newPair(t, 6)
	a.ping("10.0.0.2", 3000, true)
	w.settle()
	w.agree(a, b)
	b.opt.Link.GID = gid(0x99)
	b.step(UnderlayChanged{Link: b.opt.Link, PathMTU: ib.MTU2048, Active: true})
	w.run(4 * time.Second)
	p := a.ping("10.0.0.2", 3000, true)
	w.settle()
	if x, _ := w.agree(a, b); b.got(p) != 1 || x.Peer.GID != gid(0x99) {
		w.Fatalf("got %d", b.got(p))
	}
	if !slices.ContainsFunc(b.addrs, func(p netip.Prefix) bool { return p.Addr() == ip.LinkLocal(gid(0x99)) }) ||
		len(b.addrs) != 3 {
		w.Fatalf("addresses %v", b.addrs)
	}
	a.step(UnderlayChanged{Link: a.opt.Link, Active: false})
	a.step(UnderlayChanged{Link: a.opt.Link, Active: true})
	if !a.f.Status().Up {
		t.Errorf("not up")
	}
}

// The underlay carries other frames than before: datagrams follow, with or without a
// neighbour; connections, IPv6's minimum and whatever may come stay.
func TestUDMTUFollowsTheUnderlay(t *testing.T) {
	w := newWorld(t, 6)
	a, b := w.node(1, Options{UDMTU: 1424, UDAuto: true, Mode: ModeUD}), w.node(2, Options{})
	w.run(2 * time.Second)
	pings := func(size int, want int, why string) {
		t.Helper()
		p := a.ping("10.0.0.2", size, true)
		w.settle()
		if got := b.got(p); got != want {
			t.Errorf("%d packets of %d octets arrived, want %d: %s", got, size, want, why)
		}
	}
	pings(1424, 1, "one frame carries it")
	pings(1425, 0, "it does not carry that")
	if e := a.explain(netip.MustParseAddr("10.0.0.2")); !slices.ContainsFunc(e.Reasons, func(s string) bool {
		return strings.Contains(s, "1424, which one frame of the underlay carries")
	}) {
		t.Errorf("explain says %q", e.Reasons)
	}
	a.step(UnderlayChanged{Link: a.opt.Link, Active: true, UDMTU: 2044})
	a.opt.UDMTU = 2044
	pings(2044, 1, "the underlay has become larger")
	a.step(UnderlayChanged{Link: a.opt.Link, Active: true, UDMTU: 1000})
	pings(1280, 1, "there is IPv6 on the link")
	pings(1281, 0, "the underlay has become smaller")
	s := a.f.Status()
	if s.UDMTU != 1280 {
		t.Errorf("the UD MTU is %d, want 1280", s.UDMTU)
	}
	if s.UDAccept != 2044 {
		t.Errorf("datagrams of %d octets may come, want 2044", s.UDAccept)
	}
}

// A REQ for a larger path MTU than our port's gets REJ 26 with ours, and is
// repeated with that.
func TestPathMTU(t *testing.T) {
	w := newWorld(t, 7)
	a, b := w.node(1, Options{PathMTU: ib.MTU4096}), w.node(2, Options{PathMTU: ib.MTU1024})
	w.run(2 * time.Second)
	p := a.ping("10.0.0.2", 3000, true)
	w.settle()
	w.agree(a, b)
	expect.MustEqual(w, b.got(p), 1, "b's copies of p")
	expect.MustEqual(w, len(a.reqs), 2, "length of a's reqs")
	expect.MustEqual(w, a.reqs[1].PathMTU, ib.MTU1024, "a's PathMTU")
}

// Where the underlay has no multicast, each peer of the list gets its copy.
func TestPeerList(t *testing.T) {
	w := newWorld(t, 8)
	opt := Options{Peers: []ib.GID{gid(1), gid(2), gid(3)}}
	a, b, c := w.node(1, opt), w.node(2, opt), w.node(3, opt)
	w.run(2 * time.Second)
	p := a.ping("10.0.0.3", 9000, true)
	g := mustEcho("10.0.0.1", "224.0.0.1", 100)
	a.output(g)
	w.settle()
	a.output(g)
	w.run(time.Second)
	expect.MustEqual(w, c.got(p), 1, "c's copies of p")
	expect.MustEqual(w, b.got(g), 2, "b's copies of g")
	expect.MustEqual(w, c.got(g), 2, "c's copies of g")
	expect.MustEqual(w, a.got(g), 0, "a's copies of g")
	expect.MustEqual(w, a.onGroup, 0, "a's onGroup")
}

// No event, however odd, makes the machine panic or break a promise that the
// world watches.
func FuzzInterface(f *testing.F) {
	f.Add([]byte("0123456789abcdefghijklmnopqrstuvwxyz"))
	f.Add([]byte{0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13,
		14, 14, 15, 15})
	f.Fuzz(func(t *testing.T, in []byte) {
		if len(in) > 300 {
			return
		}
		w := newWorld(t, uint64(len(in)))
		a, b := w.node(1, Options{Mode: ModeAuto, MaxConns: 6, MaxPeers: 4}), w.node(2, Options{Mode: ModeAuto})
		k := w.linux(3)
		r := rand.New(rand.NewPCG(1, 2))
		for i := 0; i+1 < len(in); i += 2 {
			w.odd(a, b, k, in[i], in[i+1], in[i:], r)
			w.run(time.Duration(in[i+1]) * 3 * time.Millisecond)
		}
		a.f.Conns()
		for range a.f.Hops() {
		}
		a.f.Groups()
		a.f.Neighbours()
		a.explain(ip4("10.0.0.2"))
		a.explain(ip4("10.0.0.3"))
		a.step(Shutdown{})
		b.step(Shutdown{})
		w.run(10 * time.Second)
		if len(a.qps)+len(a.dests)+len(a.hostRoutes())+len(a.joined) != 0 || a.f.peers.queued != 0 {
			w.Fatalf("left after shutdown: %d %d %d %d", len(a.qps), len(a.dests), len(a.hostRoutes()), len(a.joined))
		}
	})
}

func (w *world) odd(a, b, k *node, op, arg byte, rest []byte, r *rand.Rand) {
	dst := []string{"10.0.0.2", "10.0.0.3", "fd00::2", "10.0.0.9", "239.1.1.1", "192.0.2.1", "ff02::1",
		"10.0.0.255"}[arg%8]
	switch op % 20 {
	case 0, 1, 2:
		a.ping(dst, 100+int(arg)*200, arg&1 == 0)
	case 3:
		b.ping("10.0.0.1", 100+int(arg)*200, false)
	case 4:
		a.step(Packet{rest})
	case 5:
		a.step(RecvFrame{SrcGID: gid(int(arg % 5)), SrcQPN: ib.QPN(0x100 + int(arg%5)), Frame: rest})
	case 6:
		a.step(RecvFrame{Conn: nexthop.Conn(arg % 16), Frame: rest})
	case 7:
		m := &verbs.MAD{Remote: gid(int(arg % 4)), Local: gid(1)}
		m.Data = [256]byte{1, 7, 2, 3, 17: byte(mad.AttrREQ) + op/20}
		copy(m.Data[24:], rest)
		a.step(RecvMAD{m})
	case 8:
		if c := nexthop.Conn(arg % 16); a.qps[c] != nil {
			a.step(QPError{Conn: c, Status: verbs.RetryExceeded})
		}
	case 9:
		a.step(CommEst{nexthop.Conn(arg % 16)})
	case 10:
		a.kernel(a.k.Up(false))
		a.kernel(a.k.Up(true))
	case 11:
		a.kernel(a.k.Up(false))
	case 12:
		a.kernel(a.k.Up(true))
	case 13:
		a.noQP = arg&1 == 0
	case 14:
		a.kernel(a.k.MTU(int(arg) * 256))
	case 15:
		a.addRoute("192.0.2.0/24", []string{"10.0.0.2", "10.0.0.3", "10.0.0.1"}[arg%3])
	case 16:
		k.legacy.connect(a)
	case 17:
		b.dead = !b.dead
		if !b.dead {
			b.boot()
		}
	case 18:
		a.step(UnderlayChanged{Link: a.opt.Link, Active: arg&1 == 0})
	case 19:
		w.loss = float64(arg%4) / 10
		w.run(time.Duration(arg) * time.Second)
	}
}
