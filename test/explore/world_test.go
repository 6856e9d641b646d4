package explore

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"ipoibcm/cm"
	"ipoibcm/eventqueue"
	"ipoibcm/fib"
	"ipoibcm/fib/fibtest"
	"ipoibcm/ib"
	"ipoibcm/ipoib"
	"ipoibcm/neigh"
	"ipoibcm/nexthop"
	"ipoibcm/verbs"
	"ipoibcm/wire/arp"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/ip/iptest"
	"ipoibcm/wire/mad"
)

// ipv4Only is a UD MTU that IPv6 does not fit in: hosts send nothing of their own then.
const ipv4Only = 1024

const (
	// maxDelay bounds what is delayed: more than one repeat of a MAD (335 ms),
	// less than timewait (1 s), which relies on such a bound.
	maxDelay = 500 * time.Millisecond
	// rcGivesUp is how long an RC queue pair tries before it breaks: eight times 67 ms.
	rcGivesUp = 540 * time.Millisecond
	// payload of the packets that hosts send: too large for UD, so that it waits.
	payload = 3000

	connQPN ib.QPN = 0x100000 // set in QPNs of connections, not in those of UD QPs
	viewQPN ib.QPN = 0x800000 // see fault.view
)

// A setup says what a world is made of and how much may go wrong in it.
type setup struct {
	name  string
	hosts []host
	pairs [][2]int // who sends to whom, from to

	losses, repeats, delays, restarts int

	ipv6   bool // datagrams have room for it
	inband bool // CM messages may go in-band; otherwise only by QP 1
	slowQP bool // making a queue pair takes its time
	up     bool // begin with the connections that the pairs lead to
	limits bool // rate limits as in the product; otherwise there are none
	// jitter is where in their range random pauses lie: 0 to 0xff.
	jitter byte
}

// A host is how one machine is configured.
type host struct {
	qpn, gid    int // the link-layer address
	mode        ipoib.Mode
	receive     int         // Receive MTU, zero for the default
	legacyFirst bool        // dials 0x10 first
	sees        encap.Flags // what it sees of others' flags, if not zero
	cm          ipoib.CMTransport
	diverted    bool // its CM messages arrive in-band, whichever way it sent them
	fault       *fault
}

// A source gives different numbers but always the same pauses: those look at
// the top bits, communication IDs at the low ones, PSNs in between.
type source struct {
	jitter byte
	n      uint64
}

func (s *source) Uint64() uint64 {
	s.n++
	return uint64(s.jitter)<<56 | s.n<<32 | s.n
}

// A node is one host with its machine. Worlds share it until one steps it.
type node struct {
	host
	index  int
	f      *ipoib.Interface
	link   encap.LinkAddr // now; as others see it
	boot   int            // how often it was started
	former ib.QPN         // the UD QPN of its former life, if it was another
	qps    []qp
	made   int             // QPs, since it was started
	paths  [3]nexthop.Path // to the other hosts, as packets find them
	shown  [3]nexthop.Path // as the data path has them
	kernel *fibtest.Kernel
	got    [3][2]uint8    // packets from each, by tag: of the search, of recover
	seen   map[uint64]int // of the fault
	ended  tally          // when the search began, and what is no failure since
}

// A qp is one connected queue pair, as the driver sees it.
type qp struct {
	conn         nexthop.Conn
	qpn          ib.QPN
	trans        ib.Transport
	receive      int
	rts          bool
	dest         ib.QPN
	destGID      ib.GID
	pathMTU      ib.MTU
	rqPSN, sqPSN ib.PSN
	broken       bool
}

type itemKind uint8

const (
	itemMAD  itemKind = iota
	itemData          // on a connection
	itemQP            // our driver has made a queue pair
	itemDead          // an RC queue pair gives its peer up
)

// An item is something that will happen to a node, sooner or later.
type item struct {
	kind     itemKind
	from, to int
	sent     time.Time
	notYet   time.Time // before that it cannot be
	slow     bool      // a timer has overtaken it

	mad *verbs.MAD // nobody changes it
	msg mad.Message

	conn nexthop.Conn // itemQP, itemDead: of to
	qpn  ib.QPN       // itemQP; itemData: where it goes
	src  ib.QPN       // itemData: where it comes from
	psn  ib.PSN       // itemData: what the sender sends with
	mtu  ib.MTU
	size int
	tag  byte
	uc   bool
}

// A world is one state.
type world struct {
	*setup
	now   time.Time
	nodes []*node
	own   []bool // nodes that no other world shares
	items []item

	left      budget
	wants     []bool // by pair: its packet is still to come
	sent      []bool // by pair: its packet has been sent
	mishaps   bool   // something was lost or delayed, or somebody restarted
	restarted bool
	verdicts  []verdict

	t       *tools
	pending eventqueue.Queue[event] // of the machines, while one is stepped
	failure string
	log     func(string, ...any) // nil: nobody listens
}

type budget struct{ losses, repeats, delays, restarts int }

// An event waits for the machine to be done with the one before.
type event struct {
	to    int
	ev    ipoib.Event
	heard bool
}

// A verdict is a REJ 28 that was sent: winner is the REQ for which loser was
// rejected.
type verdict struct{ loser, winner mad.CommID }

// tools are one worker's.
type tools struct {
	plans   plans
	writers writers
}

func newTools() *tools { return &tools{plans: plans{}, writers: writers{}} }

// fork returns a world that may be changed while w stays.
func (w *world) fork() *world {
	c := *w
	c.nodes = slices.Clone(w.nodes)
	c.own = make([]bool, len(w.nodes))
	c.items = slices.Clone(w.items)
	c.wants = slices.Clone(w.wants)
	c.sent = slices.Clone(w.sent)
	c.verdicts = slices.Clone(w.verdicts)
	c.log = nil
	return &c
}

// node returns node i to be changed.
func (w *world) node(i int) *node {
	if !w.own[i] {
		n := *w.nodes[i]
		n.f = clone(w.t.plans, n.f)
		n.kernel = clone(w.t.plans, n.kernel)
		n.qps = slices.Clone(n.qps)
		if n.seen != nil {
			m := make(map[uint64]int, len(n.seen))
			for k, v := range n.seen {
				m[k] = v
			}
			n.seen = m
		}
		w.nodes[i], w.own[i] = &n, true
	}
	return w.nodes[i]
}

func (w *world) failf(format string, args ...any) {
	if w.failure == "" {
		w.failure = fmt.Sprintf(format, args...)
	}
}

func (w *world) sayf(format string, args ...any) {
	if w.log != nil {
		w.log(format, args...)
	}
}

func (n *node) name() string { return string(rune('a' + n.index)) }

func gid(i int) ib.GID {
	g, _ := ib.ParseGID(fmt.Sprintf("fe80::%x", i))
	return g
}

func addr(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 0, 0, byte(i + 1)}) }

// begin returns the state that a setup starts from: every host has found every
// other one, and all timers of that are over.
func (s *setup) begin(t *tools) *world {
	w := &world{setup: s, now: time.Unix(1000, 0), t: t, left: budget{s.losses, s.repeats, s.delays, s.restarts},
		wants: make([]bool, len(s.pairs)), sent: make([]bool, len(s.pairs))}
	for i, h := range s.hosts {
		n := &node{host: h, index: i, link: encap.LinkAddr{QPN: ib.QPN(h.qpn), GID: gid(h.gid)}}
		w.nodes, w.own = append(w.nodes, n), append(w.own, true)
	}
	for i := range w.nodes {
		w.start(i, false)
	}
	w.pass(10 * time.Second)    // past what hosts announce of themselves
	for i, n := range w.nodes { // each asks for the others, who answer
		for j, to := range w.nodes {
			if i != j {
				w.ask(n, to)
			}
		}
	}
	if s.up {
		for _, p := range s.pairs {
			w.send(p[0], p[1], 0)
			w.settleAll()
		}
	}
	w.pass(30 * time.Second)
	for _, n := range w.nodes {
		if len(n.f.Conns()) != n.f.CommIDs() {
			panic(fmt.Sprintf("explore: %s: %s does not begin at rest: %+v", s.name, n.name(), n.f.Conns()))
		}
		n.ended = n.tally()
	}
	for i := range w.wants {
		w.wants[i] = true
	}
	w.mishaps, w.verdicts = false, nil
	return w
}

// ask lets n ask for to's address, as if it had been used before: to learns of
// n as well. No packet is behind it, which would open a connection.
func (w *world) ask(n, to *node) {
	link := n.f.Link()
	b, err := arp.NewRequest(link, addr(n.index), addr(to.index)).
		AppendBinary([]byte{byte(encap.ARP >> 8), byte(encap.ARP & 0xff), 0, 0})
	if err != nil {
		panic(err)
	}
	w.sendUD(n, ipoib.SendUD{Link: encap.LinkAddr{QPN: n.see(w, to.link.QPN), GID: to.link.GID}, Frame: b})
}

// settleAll lets everything arrive, in order.
func (w *world) settleAll() {
	for len(w.items) > 0 {
		if d := w.items[0].notYet; w.now.Before(d) {
			w.pass(d.Sub(w.now))
		}
		w.arrive(0, false)
	}
}

// pass lets time go by, with every timer on its way.
func (w *world) pass(d time.Duration) {
	end := w.now.Add(d)
	for {
		at, who := w.nextTimer()
		if who < 0 || at.After(end) {
			break
		}
		w.now = latest(w.now, at)
		w.step(who, ipoib.Wake{})
		w.settleAll()
	}
	w.now = latest(w.now, end)
}

func latest(a, b time.Time) time.Time {
	if a.Before(b) {
		return b
	}
	return a
}

func (w *world) nextTimer() (time.Time, int) {
	var first time.Time
	who := -1
	for i, n := range w.nodes {
		if d := n.f.Deadline(); !d.IsZero() && (who < 0 || d.Before(first)) {
			first, who = d, i
		}
	}
	return first, who
}

// start makes a fresh machine for node i. If nobody hears it, what it
// announces of itself is lost.
func (w *world) start(i int, heard bool) {
	n := w.node(i)
	n.boot++
	n.qps, n.made, n.paths, n.shown = nil, 0, [3]nexthop.Path{}, [3]nexthop.Path{}
	if n.fault != nil {
		n.seen = map[uint64]int{}
	}
	id := uint64(i<<4 | n.boot)
	o := ipoib.Options{
		Link: encap.LinkAddr{QPN: n.see(w, n.link.QPN), GID: n.link.GID}, GUID: ib.GUID(0xc000 + id), PathMTU: ib.MTU1024,
		CMTransport: ipoib.CMGSI, Mode: n.mode, ReceiveMTU: n.receive, LinuxFirst: n.legacyFirst, UDMTU: ipv4Only,
		Idle: -1, RetryMax: 4 * time.Second, Rand: rand.New(&source{w.jitter, id << 12}),
		// Neighbours stay for longer than a search.
		Neigh: neigh.Options{ReachableTime: 24 * time.Hour, DelayTime: 24 * time.Hour, StaleTime: 24 * time.Hour,
			DADProbes: -1, RequestRate: -1, SourceRate: -1},
		CM: cm.Options{REQsPerSecond: -1, RepliesPerSecond: -1},
	}
	if w.ipv6 {
		o.UDMTU = 0
	}
	if w.inband {
		o.CMTransport = n.cm
	}
	if w.limits {
		o.CM = cm.Options{}
	}
	n.f = ipoib.New(o)
	n.kernel = fibtest.New()
	w.stepUD(i, ipoib.Start{}, heard)
	for _, ev := range slices.Concat(n.kernel.Start(), n.kernel.Up(true),
		n.kernel.AddAddr(netip.PrefixFrom(addr(i), 24))) {
		w.stepUD(i, ipoib.FIBEvent{Event: ev}, heard)
	}
}

// packet is an event: the kernel of i has a packet of size octets for j.
func (w *world) packet(i, j int, tag byte, size int) ipoib.Event {
	data := make([]byte, size)
	data[0] = tag
	b, err := iptest.Echo{Src: addr(i), Dst: addr(j), Data: data}.AppendBinary(nil)
	if err != nil {
		panic(err)
	}
	return ipoib.Packet{IP: b}
}

// tagAt is where the tag is in a frame: after encapsulation, IPv4 and ICMP headers.
const tagAt = encap.HeaderLen + 20 + 8

// send has i send a packet to j, as a data path would.
func (w *world) send(i, j int, tag byte) {
	ev := w.packet(i, j, tag, payload).(ipoib.Packet)
	if p := w.nodes[i].paths[j]; p.Kind == nexthop.PathConn && len(ev.IP) <= p.MTU {
		fr := append([]byte{byte(encap.IPv4 >> 8), byte(encap.IPv4 & 0xff), 0, 0}, ev.IP...)
		w.onConn(w.node(i), p.Conn, fr)
		return
	}
	w.step(i, ev)
}

// told tells machine i what its kernel has done.
func (w *world) told(i int, evs []fib.Event) {
	for _, ev := range evs {
		w.step(i, ipoib.FIBEvent{Event: ev})
	}
}

func (w *world) step(i int, ev ipoib.Event) { w.stepUD(i, ev, true) }

// stepUD steps machine i and does what it says, and then what that led to. UD
// frames arrive at once.
func (w *world) stepUD(i int, ev ipoib.Event, heard bool) {
	w.pending.Add(event{i, ev, heard})
	w.pending.Run(w.do)
}

func (w *world) do(e event) {
	i, n, heard := e.to, w.node(e.to), e.heard
	actions := n.f.Step(nil, w.now, e.ev)
	w.lookUp(n)
	for _, a := range actions {
		switch a := a.(type) {
		case ipoib.SendUD:
			if heard {
				w.sendUD(n, a)
			}
		case ipoib.SendCopies:
			for ud := range a.Each() {
				if heard {
					w.sendUD(n, ud)
				}
			}
		case ipoib.SendConn:
			w.onConn(n, a.Conn, a.Frame)
		case ipoib.SendMAD:
			w.sendMAD(n, a.MAD, n.diverted)
		case ipoib.CreateQP:
			w.createQP(n, a)
		case ipoib.ConnectQP:
			q := n.qp(a.Conn)
			if q == nil || q.rts {
				w.failf("%s connects queue pair %d, which cannot be", n.name(), a.Conn)
				break
			}
			q.rts, q.dest, q.destGID, q.pathMTU = true, a.RTR.DestQPN, a.RTR.Path.DGID, a.RTR.PathMTU
			q.rqPSN, q.sqPSN = a.RTR.RQPSN, a.RTS.SQPSN
		case ipoib.DestroyQP:
			if n.qp(a.Conn) == nil {
				w.failf("%s destroys queue pair %d, which is not there", n.name(), a.Conn)
			}
			n.qps = slices.DeleteFunc(n.qps, func(q qp) bool { return q.conn == a.Conn })
			w.items = slices.DeleteFunc(w.items, func(it item) bool {
				return it.to == i && (it.kind == itemQP || it.kind == itemDead) && it.conn == a.Conn
			})
			for j, p := range n.shown {
				if p.Kind == nexthop.PathConn && p.Conn == a.Conn {
					w.failf("%s destroys queue pair %d, which its path to %s needs", n.name(), a.Conn, w.nodes[j].name())
				}
			}
		case ipoib.FIBAction:
			w.doFIB(n, a.Action, heard)
		case ipoib.Note:
			w.sayf("      %s: %s", n.name(), a.Text)
		}
	}
}

func (w *world) doFIB(n *node, a fib.Action, heard bool) {
	switch a := a.(type) {
	case fib.SetPath:
		if q := n.qp(a.Path.Conn); a.Path.Kind == nexthop.PathConn && (q == nil || !q.rts) {
			w.failf("%s: a path leads to connection %d, which is not up", n.name(), a.Path.Conn)
		}
		w.show(n, a.Hop, a.Path)
	default:
		evs, _ := n.kernel.Do(a)
		for _, ev := range evs {
			w.stepUD(n.index, ipoib.FIBEvent{Event: ev}, heard)
		}
	}
}

// show takes the path of a hop as the data path has it.
func (w *world) show(n *node, hop netip.Addr, path nexthop.Path) {
	for j := range w.nodes {
		if hop == addr(j) {
			n.shown[j] = path
		}
	}
}

// lookUp takes the paths to the other hosts as packets would find them: those of
// a destination that the data path has forgotten come up, and go the same way.
func (w *world) lookUp(n *node) {
	n.paths = [3]nexthop.Path{}
	for _, nb := range n.f.Neighbours() {
		for j := range w.nodes {
			if nb.Addr == addr(j) {
				n.paths[j] = nb.Path
			}
		}
	}
}

func (n *node) qp(c nexthop.Conn) *qp {
	for i := range n.qps {
		if n.qps[i].conn == c {
			return &n.qps[i]
		}
	}
	return nil
}

func (w *world) createQP(n *node, a ipoib.CreateQP) {
	n.made++
	q := qp{conn: a.Conn, qpn: connQPN | ib.QPN(n.index<<17|n.boot<<12|n.made), trans: a.Transport, receive: a.ReceiveMTU}
	n.qps = append(n.qps, q)
	if w.slowQP {
		w.items = append(w.items, item{kind: itemQP, from: n.index, to: n.index, sent: w.now, conn: q.conn, qpn: q.qpn})
		return
	}
	w.step(n.index, ipoib.QPCreated{Conn: q.conn, QPN: q.qpn})
}

// byGID returns who has a GID; nil if nobody.
func (w *world) byGID(g ib.GID) *node {
	for _, n := range w.nodes {
		if n.link.GID == g {
			return n
		}
	}
	return nil
}

func (w *world) sendUD(n *node, a ipoib.SendUD) {
	if encap.EtherType(binary.BigEndian.Uint16(a.Frame)) == encap.InbandCM {
		m := &verbs.MAD{Remote: a.Link.GID, PKey: ib.DefaultPKey}
		if to := w.byGID(a.Link.GID); to == nil || to.link.QPN != n.see(w, a.Link.QPN) ||
			copy(m.Data[:], a.Frame[encap.HeaderLen:]) != verbs.MADLen {
			w.failf("%s sends %d octets in-band to %v", n.name(), len(a.Frame), a.Link)
			return
		}
		w.sendMAD(n, m, true)
		return
	}
	for _, to := range w.nodes {
		if to.index == n.index || a.MGID.IsZero() && (to.link.GID != a.Link.GID || to.link.QPN != n.see(w, a.Link.QPN)) {
			continue
		}
		dst := to.link.GID
		if !a.MGID.IsZero() {
			dst = a.MGID
		}
		fr := slices.Clone(a.Frame)
		if encap.EtherType(binary.BigEndian.Uint16(fr)) != encap.ARP {
			continue // data; a UD packet changes no machine
		}
		for _, at := range [...]int{encap.HeaderLen + 8, encap.HeaderLen + 32} { // sender's and target's link-layer address
			q := ib.QPN(binary.BigEndian.Uint32(fr[at:]) & 0xffffff)
			q = to.see(w, n.see(w, q))
			if to.sees != 0 && fr[at] != 0 {
				fr[at] = byte(to.sees)
			}
			fr[at+1], fr[at+2], fr[at+3] = byte(q>>16), byte(q>>8), byte(q)
		}
		w.step(to.index, ipoib.RecvFrame{SrcGID: n.link.GID, SrcQPN: to.see(w, n.link.QPN), DstGID: dst, Frame: fr})
	}
}

// onConn puts a data packet on the way.
func (w *world) onConn(n *node, id nexthop.Conn, fr []byte) {
	q := n.qp(id)
	if q == nil || !q.rts {
		w.failf("%s sends on connection %d, which is not up", n.name(), id)
		return
	}
	to := w.byGID(q.destGID)
	if to == nil || q.broken {
		return
	}
	w.items = append(w.items, item{kind: itemData, from: n.index, to: to.index, sent: w.now, qpn: q.dest, src: q.qpn,
		psn: q.sqPSN, mtu: q.pathMTU, size: len(fr), tag: fr[tagAt], uc: q.trans == ib.UC})
}

// data delivers a data packet.
func (w *world) data(it item) {
	n := w.node(it.to)
	for i := range n.qps {
		q := &n.qps[i]
		if q.qpn != it.qpn || !q.rts || q.dest != it.src {
			continue
		}
		if q.rqPSN != it.psn || q.pathMTU != it.mtu {
			w.failf("%s sends with PSN %v and path MTU %v, %s expects %v and %v",
				w.nodes[it.from].name(), it.psn, it.mtu, n.name(), q.rqPSN, q.pathMTU)
		}
		if it.size > q.receive {
			w.failf("%s sends %d octets into a buffer of %d", w.nodes[it.from].name(), it.size, q.receive)
		}
		if it.tag > 0 {
			n.got[it.from][it.tag-1]++
		}
		if n.fault == nil || !n.fault.deaf {
			w.step(n.index, ipoib.CommEst{Conn: q.conn})
		}
		return
	}
	if it.uc {
		return
	}
	// Nobody acknowledges it: the sender's queue pair breaks after its retries.
	from := w.node(it.from)
	for i := range from.qps {
		if q := &from.qps[i]; q.qpn == it.src && !q.broken {
			q.broken = true
			w.items = append(w.items, item{kind: itemDead, from: it.to, to: it.from, sent: w.now,
				notYet: w.now.Add(rcGivesUp), conn: q.conn})
		}
	}
}

// sendMAD puts a CM message on the way, to QP 1 or in-band.
func (w *world) sendMAD(n *node, m *verbs.MAD, inband bool) {
	to := w.byGID(m.Remote)
	if to == nil {
		w.failf("%s sends a MAD to %v, which is nobody", n.name(), m.Remote)
		return
	}
	in := &verbs.MAD{Local: m.Remote, Remote: n.link.GID, QPN: ib.QPNGSI, PKey: m.PKey, Data: m.Data}
	if inband {
		in.QPN = n.link.QPN
	}
	if n.fault != nil && !n.fault.send(w, n, in) {
		return
	}
	_, msg, err := mad.Parse(in.Data[:])
	if err != nil {
		w.failf("%s sends a MAD that cannot be read: %v", n.name(), err)
		return
	}
	w.watch(n, to, msg)
	w.items = append(w.items, item{kind: itemMAD, from: n.index, to: to.index, sent: w.now, mad: in, msg: msg})
}

// arrive lets item i happen; keep leaves it in flight as well.
func (w *world) arrive(i int, keep bool) {
	it := w.items[i]
	if !keep {
		w.items = slices.Delete(w.items, i, i+1)
	}
	switch it.kind {
	case itemMAD:
		m := it.mad
		if n := w.node(it.to); n.fault != nil {
			c := *m
			m = &c
			if !n.fault.receive(w, n, m) {
				return
			}
		}
		if m.QPN != ib.QPNGSI {
			fr := append([]byte{byte(encap.InbandCM >> 8), byte(encap.InbandCM & 0xff), 0, 0}, m.Data[:]...)
			w.step(it.to, ipoib.RecvFrame{SrcGID: m.Remote, DstGID: m.Local, SrcQPN: w.nodes[it.to].see(w, m.QPN), Frame: fr})
			return
		}
		w.step(it.to, ipoib.RecvMAD{MAD: m})
	case itemData:
		w.data(it)
	case itemQP:
		w.step(it.to, ipoib.QPCreated{Conn: it.conn, QPN: it.qpn})
	case itemDead:
		w.step(it.to, ipoib.QPError{Conn: it.conn, Status: verbs.RetryExceeded})
	}
}
