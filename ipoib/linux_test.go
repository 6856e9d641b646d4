package ipoib

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"time"

	"ipoibcm/ib"
	"ipoibcm/internal/foreign"
	"ipoibcm/verbs"
	"ipoibcm/wire/encap"
)

// A linux is a node that is not ours: a foreign peer of the kind that gave the
// type its name.
type linux struct {
	n    *node
	p    *foreign.Peer
	ip   netip.Addr
	got  [][]byte
	qps  map[ib.QPN]verbs.QPAttr // the RTR attributes
	next ib.QPN
}

func (w *world) linux(i int) *node {
	return w.foreign(i, foreign.Options{Kind: foreign.Linux})
}

func (w *world) foreign(i int, o foreign.Options) *node {
	n := &node{w: w, name: string(rune('a' + i - 1)),
		opt: Options{Link: encap.LinkAddr{Flags: encap.FlagRC, QPN: ib.QPN(0x100 + i), GID: gid(i)}}}
	l := &linux{n: n, ip: netip.MustParseAddr(fmt.Sprintf("10.0.0.%d", i)), qps: map[ib.QPN]verbs.QPAttr{}, next: 0x900000}
	o.Link, o.GUID, o.Addrs, o.Rand = n.opt.Link, ib.GUID(i), []netip.Addr{l.ip}, rand.New(rand.NewPCG(w.r.Uint64(), 3))
	l.p = foreign.New(o, l)
	n.legacy = l
	w.nodes = append(w.nodes, n)
	return n
}

// What foreign.Port asks for.

func (l *linux) Now() time.Time       { return l.n.w.now }
func (l *linux) SendMAD(m *verbs.MAD) { l.n.sendMAD(m) }
func (l *linux) Tell(string)          {}

func (l *linux) Deliver(pkt []byte) {
	l.got = append(l.got, pkt)
	if l.n.w.onPacket != nil {
		l.n.w.onPacket(l.n, 0, pkt)
	}
}

func (l *linux) SendUD(to encap.LinkAddr, fr []byte) {
	for _, m := range l.n.w.nodes {
		if m.link() == to.Key() || to.QPN == ib.QPNMulticast && m != l.n && m.joined[to.GID] {
			l.n.w.to = l.n.w.at(to)
			if l.n.w.onFrame != nil {
				l.n.w.onFrame(l.n, false, fr)
			}
			l.n.w.send(func() { m.recvUD(l.n.link(), m.opt.Link.GID, fr) }, m, false)
		}
	}
}

func (l *linux) CreateQP() ib.QPN {
	l.next++
	l.qps[l.next] = verbs.QPAttr{}
	return l.next
}

func (l *linux) ConnectQP(qpn ib.QPN, rtr, _ verbs.QPAttr) { l.qps[qpn] = rtr }
func (l *linux) DestroyQP(qpn ib.QPN)                      { delete(l.qps, qpn) }

func (l *linux) SendConn(qpn ib.QPN, fr []byte) {
	rtr := l.qps[qpn]
	for _, m := range l.n.w.nodes {
		for _, q := range m.qps {
			if m.opt.Link.GID == rtr.Path.DGID && q.qpn == rtr.DestQPN && q.dest == qpn {
				q.arrived()
				m.recv(RecvFrame{Conn: q.conn, Frame: fr})
				return
			}
		}
	}
	w := l.n.w // nobody has it any more: no acknowledgement, and no retries
	w.queue = append(w.queue, flight{w.now.Add(540 * time.Millisecond), l.n, func() { l.p.QPError(qpn) }})
}

// What the world gives it.

// alive fails if the last thing that happened was more than it survives (ipoib_cm.c
// posts no receives on the side that dialled).
func (l *linux) alive() {
	if l.p.Died != "" {
		l.n.w.Fatalf("%s: %s", l.n.name, l.p.Died)
	}
}

func (l *linux) recvUD(from encap.LinkAddr, fr []byte) { l.p.RecvUD(from, fr) }
func (l *linux) recvMAD(m *verbs.MAD)                  { l.p.RecvMAD(m) }

// recvConn takes a message from one of our QPs.
func (l *linux) recvConn(q *fakeQP, fr []byte) {
	if _, ok := l.qps[q.dest]; !ok {
		l.n.w.retryExceeded(q)
		return
	}
	l.p.RecvConn(q.dest, fr)
	l.alive()
}

// connect opens the kernel's own connection to m, once more if it has one.
func (l *linux) connect(m *node) {
	l.p.Dial(encap.LinkAddr{Flags: encap.FlagRC, QPN: m.opt.Link.QPN, GID: m.opt.Link.GID})
}

// sendTo sends an IP packet on the kernel's own connection.
func (l *linux) sendTo(m *node, pkt []byte) {
	if !l.p.SendOwn(m.opt.Link.GID, pkt) {
		l.n.w.Fatalf("%s has no connection to %s", l.n.name, m.name)
	}
}
