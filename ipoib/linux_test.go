package ipoib

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"

	"ipoibcm/cm"
	"ipoibcm/ib"
	"ipoibcm/serviceid"
	"ipoibcm/verbs"
	"ipoibcm/wire/arp"
	"ipoibcm/wire/encap"
)

// A linux is a peer as wire-facts section 4 describes the kernel: it listens
// on the 0x10 service ID only, opens a connection of its own to send, carries
// no private data in RTU and REJ, and dies of IP sent to it on that one.
type linux struct {
	n      *node
	cm     *cm.Manager
	ip     netip.Addr
	got    [][]byte
	tx     ib.QPN // QP of its own connection
	txTo   ib.QPN
	handle cm.Handle
	up     map[cm.Handle]cm.Params
}

func (w *world) linux(i int) *node {
	n := &node{w: w, name: string(rune('a' + i - 1)), opt: Options{Link: encap.LinkAddr{Flags: encap.FlagRC, QPN: ib.QPN(0x100 + i), GID: gid(i)}}}
	l := &linux{n: n, ip: netip.MustParseAddr(fmt.Sprintf("10.0.0.%d", i)), up: map[cm.Handle]cm.Params{}}
	l.cm = cm.New(cm.Options{GID: n.opt.Link.GID, CAGUID: ib.GUID(i), Rand: rand.New(rand.NewPCG(w.r.Uint64(), 3))})
	n.legacy = l
	w.nodes = append(w.nodes, n)
	l.step(cm.Listen{ServiceID: serviceid.New(serviceid.Legacy, n.opt.Link.QPN)})
	return n
}

func (l *linux) recvUD(from encap.LinkAddr, fr []byte) {
	var p arp.Packet
	if encap.EtherType(binary.BigEndian.Uint16(fr)) != encap.ARP || p.UnmarshalBinary(fr[4:]) != nil {
		if encap.EtherType(binary.BigEndian.Uint16(fr)) == encap.IPv4 {
			l.got = append(l.got, fr[4:])
		}
		return
	}
	if p.Op == arp.Request && p.TargetIP == l.ip && !p.IsAnnouncement() {
		b, _ := p.ReplyFrom(l.n.opt.Link).AppendBinary(nil)
		for _, m := range l.n.w.nodes {
			if m.link() == from.Key() {
				l.n.w.send(func() { m.recvUD(l.n.link(), m.opt.Link.GID, frameOf(encap.ARP, b)) }, m, false)
			}
		}
	}
}

func (l *linux) recvMAD(m *verbs.MAD) { l.step(cm.RecvMAD{MAD: m}) }

func (l *linux) private() []byte {
	b, _ := encap.PrivateData{QPN: l.n.opt.Link.QPN, ReceiveMTU: 65524}.AppendBinary(nil)
	return b
}

// connect opens the kernel's own connection to m.
func (l *linux) connect(m *node, qpn ib.QPN) {
	l.handle++
	l.tx = qpn
	l.step(cm.Connect{Handle: l.handle, Remote: m.opt.Link.GID, ServiceID: serviceid.New(serviceid.Legacy, m.opt.Link.QPN),
		Transport: ib.RC, QPN: qpn, PathMTU: ib.MTU1024, ResponseTimeout: 20, MaxRetries: 15, PrivateData: l.private()})
}

func (l *linux) step(ev cm.Event) {
	for _, a := range l.cm.Step(nil, l.n.w.now, ev) {
		switch a := a.(type) {
		case cm.SendMAD:
			l.n.sendMAD(a.MAD)
		case cm.RequestReceived:
			if a.Transport != ib.RC {
				l.step(cm.Reject{Handle: a.Handle, Reason: cm.ReasonConsumer})
				continue
			}
			l.step(cm.Accept{Handle: a.Handle, QPN: ib.QPN(0x900000 + l.n.w.r.Uint32N(0xfffff)), StartingPSN: 77, RNRRetry: 7, PrivateData: l.private()})
		case cm.ReplyReceived:
			l.txTo = a.RemoteQPN
			l.step(cm.Ready{Handle: a.Handle})
		case cm.Established:
			l.up[a.Handle] = a.Params
		case cm.Disconnected:
			delete(l.up, a.Handle)
		}
	}
}

// recvConn takes a message from one of our QPs.
func (l *linux) recvConn(q *fakeQP, fr []byte) {
	if q.dest == l.tx {
		l.n.w.failf("IP was sent to the kernel on the connection that it opened itself") // WF I-3, trap T2
	}
	l.got = append(l.got, fr[4:])
}

// sendTo sends an IP packet on the kernel's own connection.
func (l *linux) sendTo(m *node, pkt []byte) {
	for _, q := range m.qps {
		if q.qpn == l.txTo && q.dest == l.tx {
			q.rx++
			m.step(CommEst{q.conn})
			m.recv(RecvFrame{Conn: q.conn, Frame: frame(pkt)})
			return
		}
	}
	l.n.w.failf("%s has no QP %v", m.name, l.txTo)
}
