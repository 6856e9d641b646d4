package ipoib

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"ipoibcm/eventqueue"
	"ipoibcm/fib"
	"ipoibcm/fib/fibtest"
	"ipoibcm/ib"
	"ipoibcm/internal/simsm"
	"ipoibcm/nexthop"
	"ipoibcm/rtnl"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/ip"
	"ipoibcm/wire/ip/iptest"
	"ipoibcm/wire/mad"
	"ipoibcm/wire/nd"
)

// A world joins Interfaces in memory and virtual time: a fabric with loss,
// duplication and delay, queue pairs that pass messages, a kernel and a data
// path reduced to what the machine can see of them. Everything is drawn from
// one seed. It also watches that no machine ever does what it must not.
type world struct {
	t     testing.TB
	seed  uint64
	r     *rand.Rand
	now   time.Time
	loss  float64 // of UD frames, UC messages and MADs
	dup   float64
	delay time.Duration // 50 µs to this
	nodes []*node
	queue []flight
	// dropMAD, when set, decides about each MAD by itself.
	dropMAD  func(from *node, m mad.Message) bool
	onMAD    func(from *node, m mad.Message)             // sees each MAD that a node sends
	onOctets func(from *node, mad []byte)                // the same, as it is on the wire
	onFrame  func(from *node, conn bool, fr []byte)      // sees each frame that a node sends, by a connection or UD
	onPacket func(to *node, by nexthop.Conn, pkt []byte) // sees each IP packet that a kernel is given; no conn is UD
	onNote   func(n *node, a Note)
	log      []string
	serial   uint32        // of packets: no two are alike
	madDelay time.Duration // set by dropMAD for the MAD at hand
	to       *node         // that dropMAD and onFrame are asked about; nil is a group
	report   time.Time     // when the data paths report next what they counted
	subnet   *simsm.Subnet // nil: Ethernet
	mute     bool          // no CommEst: adapters have it in RTR only
}

// A node is one host.
type node struct {
	w      *world
	name   string
	opt    Options
	f      *Interface
	legacy *linux // instead of f
	dead   bool

	addrs  []netip.Prefix
	k      *fibtest.Kernel
	joined map[ib.GID]bool
	dests  map[rtnl.Flow]netip.Addr
	paths  map[netip.Addr]nexthop.Path
	qps    map[nexthop.Conn]*fakeQP
	nextQP ib.QPN
	ud     map[encap.LinkAddr]uint64
	probes []int         // octets of probes and answers sent
	older  bool          // it knows no probes
	holeUD int           // larger datagrams are lost, in octets of IP; zero: none
	noQP   bool          // CreateQP fails
	slow   bool          // CreateQP is not answered
	pathTo ib.MTU        // that the driver knows of every peer
	hole   ib.MTU        // connections with a larger path MTU lose what does not fit into this; zero: none
	copy   time.Duration // that a copy takes of a processor
	held   bool          // HoldGroups
	taken  bool          // QP 1 is the kernel's, which rejects every REQ
	silent bool          // QP 1 takes nothing and says nothing
	ib     *ibNode       // of a subnet

	tun                   [][]byte // what the kernel was given
	notes                 []Note
	reqs                  []mad.REQ
	sent                  []mad.Message
	inband                []mad.Message                 // of sent
	onConn, onUD, onGroup int                           // data packets sent by mode
	others                map[netip.Addr]rtnl.Answering // addresses that it answers for beside its own
	pending               eventqueue.Queue[Event]
}

// A fakeQP is one connected queue pair.
type fakeQP struct {
	n            *node
	conn         nexthop.Conn
	qpn          ib.QPN
	trans        ib.Transport
	receive      int
	rts          bool
	dest         ib.QPN
	destGID      ib.GID
	pathMTU      ib.MTU
	rqPSN, sqPSN ib.PSN
	rnrWait      time.Duration
	tx, rx       uint64
	broken       bool
}

func newWorld(t testing.TB, seed uint64) *world {
	return &world{t: t, seed: seed, r: rand.New(rand.NewPCG(seed, 7)), now: time.Unix(1000, 0),
		report: time.Unix(1000, 500), delay: 200 * time.Microsecond}
}

// newPair is a world of two nodes that have been up for two seconds.
func newPair(t testing.TB, seed uint64) (w *world, a, b *node) {
	w = newWorld(t, seed)
	a, b = w.node(1, Options{}), w.node(2, Options{})
	w.run(2 * time.Second)
	return w, a, b
}

// newLinuxPair is the same with Linux as the second.
func newLinuxPair(t testing.TB, seed uint64) (w *world, a, k *node) {
	w = newWorld(t, seed)
	a, k = w.node(1, Options{}), w.linux(2)
	w.run(2 * time.Second)
	return w, a, k
}

func gid(i int) ib.GID {
	g, _ := ib.ParseGID(fmt.Sprintf("fe80::%x", i))
	return g
}

// node adds a host that is up, with 10.0.0.i/24 and fd00::i/64.
func (w *world) node(i int, opt Options) *node {
	return w.nodeAt(i, encap.LinkAddr{QPN: ib.QPN(0x100 + i), GID: gid(i)}, opt)
}

// ipv4Only is a UD MTU that IPv6 does not fit in.
const ipv4Only = 1024

// nodeAt is node with another link-layer address.
func (w *world) nodeAt(i int, link encap.LinkAddr, opt Options) *node {
	opt.Link = link
	n := &node{w: w, name: string(rune('a' + i - 1)), opt: opt, joined: map[ib.GID]bool{}}
	w.nodes = append(w.nodes, n)
	n.boot()
	n.addAddr(fmt.Sprintf("10.0.0.%d/24", i))
	if opt.UDMTU == 0 || opt.UDMTU >= 1280 {
		n.addAddr(fmt.Sprintf("fd00::%d/64", i))
	}
	return n
}

// boot starts a fresh machine, as after a crash; UD QPN and addresses stay.
func (n *node) boot() {
	o := n.opt
	o.GUID = ib.GUID(n.w.r.Uint64())
	o.Rand = rand.New(rand.NewPCG(n.w.r.Uint64(), 1))
	if o.PathMTU == 0 {
		o.PathMTU = ib.MTU1024
	}
	if n.ib != nil {
		o.Fabric = n.ib.boot(n.opt.Fabric)
	}
	n.f = New(o)
	n.joined, n.dests, n.paths = map[ib.GID]bool{}, map[rtnl.Flow]netip.Addr{}, map[netip.Addr]nexthop.Path{}
	n.qps, n.ud = map[nexthop.Conn]*fakeQP{}, map[encap.LinkAddr]uint64{}
	n.nextQP = ib.QPN(n.w.r.Uint32N(1<<23)) + 0x1000
	n.dead = false
	n.k = fibtest.New()
	n.step(Start{})
	n.kernel(n.k.Start())
	n.kernel(n.k.Up(true))
	for _, a := range n.addrs {
		n.kernel(n.k.AddAddr(a))
	}
}

// kernel tells the machine what the kernel has done.
func (n *node) kernel(evs []fib.Event) {
	for _, ev := range evs {
		n.step(FIBEvent{ev})
	}
}

// explain asks the machine as the agent does.
func (n *node) explain(dst netip.Addr) Explanation {
	hop, _ := nexthop.Ask(n.k, n.k.Link, rtnl.Flow{Dst: dst})
	return n.f.Explain(dst, hop)
}

// hostRoutes returns the kernel's routes of ours to neighbours.
func (n *node) hostRoutes() map[netip.Addr]int {
	out := map[netip.Addr]int{}
	for _, r := range n.k.Own {
		if r.Type == rtnl.Unicast {
			out[r.Dst.Addr()] = r.MTU
		}
	}
	return out
}

// path returns how packets to dst go; ok is false if they come up.
func (n *node) path(dst netip.Addr) (p nexthop.Path, ok bool) {
	if hop, known := n.dests[rtnl.Flow{Dst: dst}]; known {
		p, ok = n.paths[hop]
	}
	return p, ok
}

func (n *node) addAddr(s string) {
	p := netip.MustParsePrefix(s)
	if slices.Contains(n.addrs, p) {
		return
	}
	n.addrs = append(n.addrs, p)
	n.kernel(n.k.AddAddr(p))
}

func (n *node) delAddr(s string) {
	p := netip.MustParsePrefix(s)
	n.addrs = slices.DeleteFunc(n.addrs, func(q netip.Prefix) bool { return p == q })
	n.kernel(n.k.DelAddr(p))
}

func (n *node) addRoute(prefix, gw string) {
	r := fibtest.Route{Route: rtnl.Route{Dst: netip.MustParsePrefix(prefix), Type: rtnl.Unicast,
		Protocol: rtnl.ProtoStatic}, OIF: fibtest.Index}
	if gw != "" {
		r.Via = netip.MustParseAddr(gw)
	}
	n.kernel(n.k.AddRoute(r))
}

// step gives the machine an event and does what it says, then what its own
// doings led to.
func (n *node) step(ev Event) {
	if n.dead || n.f == nil {
		return
	}
	n.pending.Add(ev)
	n.pending.Run(func(ev Event) {
		for _, a := range n.f.Step(nil, n.w.now, ev) {
			n.do(a)
		}
		n.checkPeers()
	})
}

func (w *world) Fatalf(format string, args ...any) {
	w.t.Helper()
	if len(w.log) > 60 {
		w.log = w.log[len(w.log)-60:]
	}
	w.t.Fatalf("seed %d: %s\n%s", w.seed, fmt.Sprintf(format, args...), strings.Join(w.log, "\n"))
}

// Helper is for package expect, as Fatalf is.
func (w *world) Helper() { w.t.Helper() }

func (n *node) do(a Action) {
	w := n.w
	switch a := a.(type) {
	case SendUD:
		n.sendFrame(a)
	case SendCopies:
		n.copied(a)
	case HoldGroups:
		n.held = a.On
	case SendConn:
		n.sendConn(a.Conn, a.Frame)
	case WriteTUN:
		n.deliver(0, a.IP)
	case SendMAD:
		n.sendMAD(a.MAD)
	case CreateQP, ConnectQP, DestroyQP:
		n.doQP(a)
	case SendSubnet:
		w.subnet.Send(w.now, n.ib.port, a.MAD)
	case UsePath:
		n.ib.paths[a.Path.DGID] = a.Path
	case ForgetPath:
		delete(n.ib.paths, a.DGID)
	case SetQKey:
		n.ib.qkey = a.QKey
	case JoinGroup:
		n.joined[a.MGID] = true
		if n.ib != nil {
			n.ib.at[a.MGID] = a.MLID
		}
	case LeaveGroup:
		delete(n.joined, a.MGID)
	case PublishGroups:
	case FIBAction:
		n.doFIB(a.Action)
	case AddAddr:
		n.addAddr(a.Prefix.String())
	case RemoveAddr:
		n.delAddr(a.Prefix.String())
	case SetUpIPv6:
	case AskOther:
		n.step(OtherIs{a.Addr, n.others[a.Addr]})
	case Note:
		n.notes = append(n.notes, a)
		if w.onNote != nil {
			w.onNote(n, a)
		}
		w.log = append(w.log, fmt.Sprintf("%8.3f %s %-9s %v %d %s", float64(w.now.UnixMilli()-1000000)/1000, n.name,
			a.Kind, a.Peer, a.Conn, a.Text))
	default:
		w.Fatalf("unknown action %T", a)
	}
}

// sendFrame carries a frame of UD: in-band CM, to a group, or to one link-layer address.
func (n *node) sendFrame(a SendUD) {
	w := n.w
	if encap.EtherType(binary.BigEndian.Uint16(a.Frame)) == encap.InbandCM {
		n.sendInband(a)
		return
	}
	n.checkFrame(a.Frame, false)
	if n.ib != nil {
		n.sendSubnetUD(a)
		return
	}
	if !a.MGID.IsZero() {
		n.onGroup++
		w.to = nil
		if w.onFrame != nil {
			w.onFrame(n, false, a.Frame)
		}
		for _, to := range w.nodes {
			if to != n {
				w.send(func(to *node) func() {
					return func() {
						if to.joined[a.MGID] || to.legacy != nil {
							to.recvUD(n.link(), a.MGID, a.Frame)
						}
					}
				}(to), to, true)
			}
		}
		return
	}
	n.sendUD(a.Link, a.Frame)
}

// copied carries copies, and says what they took.
func (n *node) copied(a SendCopies) {
	for ud := range a.Each() {
		n.sendFrame(ud)
	}
	if n.copy > 0 {
		n.step(CopiesTook{time.Duration(len(a.To)) * n.copy})
	}
}

// doQP makes, connects and destroys queue pairs, and checks that nothing leads to none.
func (n *node) doQP(a Action) {
	w := n.w
	switch a := a.(type) {
	case CreateQP:
		if n.noQP {
			n.step(QPFailed{a.Conn, "out of memory"})
			return
		}
		n.nextQP++
		n.qps[a.Conn] = &fakeQP{n: n, conn: a.Conn, qpn: n.nextQP, trans: a.Transport, receive: a.ReceiveMTU}
		if !n.slow {
			n.step(QPCreated{Conn: a.Conn, QPN: n.nextQP, PathMTU: n.pathTo})
		}
	case ConnectQP:
		q := n.qps[a.Conn]
		if q == nil {
			w.Fatalf("%s: ConnectQP of %d, which is not there", n.name, a.Conn)
		}
		if q.rts {
			w.Fatalf("%s: ConnectQP of %d, which is in RTS", n.name, a.Conn)
		}
		if q.trans == ib.RC {
			n.checkRetries(a.RTS.Timeout.Duration(), int(a.RTS.RetryCount))
		}
		q.rts, q.dest, q.destGID, q.pathMTU = true, a.RTR.DestQPN, a.RTR.Path.DGID, a.RTR.PathMTU
		if n.ib != nil {
			n.checkWay(a.RTR.Path, a.RTR.Path.DGID)
		}
		q.rqPSN, q.sqPSN, q.rnrWait = a.RTR.RQPSN, a.RTS.SQPSN, a.RTS.MaxRNRWait
	case DestroyQP:
		if n.qps[a.Conn] == nil {
			w.Fatalf("%s: DestroyQP of %d, which is not there", n.name, a.Conn)
		}
		for hop, path := range n.paths {
			if path.Kind == nexthop.PathConn && path.Conn == a.Conn {
				w.Fatalf("%s: DestroyQP %d while %v leads to it", n.name, a.Conn, hop)
			}
		}
		delete(n.qps, a.Conn)
	}
}

// delPath forgets how hop is reached, which nothing may lead to.
func (n *node) delPath(hop netip.Addr) {
	if _, ok := n.paths[hop]; !ok {
		n.w.Fatalf("%s: the path of %v goes, which is not there", n.name, hop)
	}
	for flow, to := range n.dests {
		if to == hop {
			n.w.Fatalf("%s: the path of %v goes, where %v goes", n.name, hop, flow.Dst)
		}
	}
	delete(n.paths, hop)
}

// doFIB is the data path's table, and the kernel's routes.
func (n *node) doFIB(a fib.Action) {
	w := n.w
	switch a := a.(type) {
	case fib.SetPath:
		if a.Path == (nexthop.Path{}) {
			n.delPath(a.Hop)
			return
		}
		if a.Path.Kind == nexthop.PathConn {
			n.checkConnPath(a.Hop, a.Path.Conn)
		}
		n.paths[a.Hop] = a.Path
	case fib.SetDest:
		_, there := n.dests[a.Flow]
		_, path := n.paths[a.Hop]
		switch {
		case a.Hop.IsValid() && path:
			n.dests[a.Flow] = a.Hop
		case a.Hop.IsValid():
			w.Fatalf("%s: SetDest of %v to %v, which has no path", n.name, a.Flow.Dst, a.Hop)
		case !there:
			w.Fatalf("%s: %v goes, which is not there", n.name, a.Flow.Dst)
		default:
			delete(n.dests, a.Flow)
		}
	case fib.StaleDest:
		// The next packet would tell; here it is asked for at once.
		for flow := range n.dests {
			if a.Flow.Dst == flow.Dst || !a.Flow.Dst.IsValid() {
				n.step(FIBEvent{fib.Stale{Flow: flow}})
			}
		}
	case fib.ResetDests:
		clear(n.dests)
	default:
		evs, ok := n.k.Do(a)
		if !ok {
			w.Fatalf("%s: unknown action %T of fib", n.name, a)
		}
		n.kernel(evs)
	}
}

func (n *node) link() encap.LinkAddr { return n.opt.Link.Key() }

// ping has n's kernel send an IP packet of size octets to dst.
func (n *node) ping(dst string, size int, df bool) []byte {
	pkt := n.echo(dst, size, df)
	n.output(pkt)
	return pkt
}

// echo makes an IP packet of size octets to dst.
func (n *node) echo(dst string, size int, df bool) []byte {
	a := netip.MustParseAddr(dst)
	src := n.source(a)
	n.w.serial++
	e := iptest.Echo{Src: src, Dst: a, ID: uint16(n.w.serial >> 16), Seq: uint16(n.w.serial), DF: df}
	head := 28
	if a.Is6() {
		head = 48
	}
	e.Data = make([]byte, size-head)
	pkt, err := e.AppendBinary(nil)
	if err != nil || len(pkt) != size {
		n.w.Fatalf("echo of %d octets: %d, %v", size, len(pkt), err)
	}
	return pkt
}

func (n *node) source(dst netip.Addr) netip.Addr {
	for _, a := range n.addrs {
		if a.Contains(dst) {
			return a.Addr()
		}
	}
	for _, a := range n.addrs {
		if a.Addr().Is4() == dst.Is4() && !a.Addr().IsLinkLocalUnicast() {
			return a.Addr()
		}
	}
	return netip.Addr{}
}

// output is the data path of n for one packet from the TUN.
func (n *node) output(pkt []byte) {
	dst, _ := ip.Dst(pkt)
	path, ok := n.path(dst)
	if !ok || path.Kind == nexthop.PathMiss || len(pkt) > path.MTU || nd.KindOf(pkt) != nd.None || ip.IsReport(pkt) {
		n.step(Packet{pkt})
		return
	}
	switch path.Kind {
	case nexthop.PathConn:
		n.sendConn(path.Conn, frame(pkt))
	case nexthop.PathUD:
		n.onUD++
		n.ud[path.Link.Key()]++
		n.checkFrame(frame(pkt), false)
		n.sendUD(path.Link, frame(pkt))
	case nexthop.PathGroup:
		n.do(SendUD{MGID: path.Link.GID, Frame: frame(pkt)})
	}
}

// got counts how often pkt arrived whole.
func (n *node) got(pkt []byte) (k int) {
	for _, p := range n.tun {
		if bytes.Equal(p, pkt) {
			k++
		}
	}
	return k
}

// run lets d pass.
func (w *world) run(d time.Duration) {
	end := w.now.Add(d)
	for steps := 0; ; steps++ {
		if steps > 2_000_000 {
			w.Fatalf("it never comes to rest")
		}
		next := end
		var who *node
		if w.subnet != nil {
			w.deliverSubnet()
			if t := w.subnet.Due(); !t.IsZero() && t.Before(next) {
				next = t
			}
		}
		what := -1
		for i, q := range w.queue {
			if q.at.Before(next) {
				next, what, who = q.at, i, nil
			}
		}
		for _, n := range w.nodes {
			t := n.deadline()
			if !t.IsZero() && t.Before(next) {
				next, who, what = t, n, -1
			}
		}
		if w.report.Before(next) {
			next, who, what = w.report, nil, -2
			w.report = w.report.Add(time.Second)
		}
		if w.now.Before(next) {
			w.now = next
		}
		switch {
		case what >= 0:
			q := w.queue[what]
			w.queue = slices.Delete(w.queue, what, what+1)
			q.f()
		case what == -2:
			for _, n := range w.nodes {
				n.usage()
			}
		case who != nil:
			before := w.now
			who.wake()
			if d := who.deadline(); !d.IsZero() && !d.After(before) {
				w.Fatalf("%s: deadline %v does not move on at %v", who.name, d, before)
			}
		case w.subnet != nil && w.now.Before(end): // the subnet has something
		default:
			return
		}
	}
}

func (n *node) deadline() time.Time {
	switch {
	case n.dead:
		return time.Time{}
	case n.legacy != nil:
		return n.legacy.p.Deadline()
	}
	return n.f.Deadline()
}

func (n *node) wake() {
	if n.legacy != nil {
		n.legacy.p.Wake()
		return
	}
	n.step(Wake{})
}

func (n *node) usage() {
	if n.dead || n.f == nil {
		return
	}
	var u Usage
	for _, c := range n.f.Conns() {
		if q := n.qps[c.Conn]; q != nil {
			u.Conns = append(u.Conns, ConnUse{Conn: c.Conn, TxPackets: q.tx, RxPackets: q.rx})
		}
	}
	for _, m := range n.w.nodes {
		if k := n.ud[m.link()]; k > 0 {
			u.UD = append(u.UD, UDUse{Link: m.link(), TxPackets: k})
		}
	}
	n.step(u)
}

func (n *node) counter(name string) uint64 {
	for _, c := range n.f.Counters() {
		if c.Name == name {
			return c.Value
		}
	}
	n.w.Fatalf("no counter %q", name)
	return 0
}

// settle gives everything time to come to rest.
func (w *world) settle() { w.run(20 * time.Second) }
