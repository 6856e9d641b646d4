package ipoib

import (
	"bytes"
	"encoding/binary"
	"slices"
	"time"

	"ipoibcm/cm"
	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/nexthop"
	"ipoibcm/verbs"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/ip"
	"ipoibcm/wire/mad"
	"ipoibcm/wire/nd"
)

type flight struct {
	at time.Time
	to *node
	f  func()
}

// checkFrame guards what may be in a frame on each kind of queue pair.
func (n *node) checkFrame(fr []byte, connected bool) {
	t := encap.EtherType(binary.BigEndian.Uint16(fr))
	// 4755-4-1, 4755-4-2, 4755-4-3
	if t == encap.PathProbe {
		n.probes = append(n.probes, len(fr)-encap.HeaderLen)
		return
	}
	// 4755-4-5
	expect.MustEqual(n.w, fr[2], 0, "%s: fr[2]", n.name)
	expect.MustEqual(n.w, fr[3], 0, "%s: fr[3]", n.name)
	switch t {
	case encap.IPv4, encap.IPv6:
	case encap.ARP:
		if connected {
			n.w.Fatalf("%s: ARP on a connection", n.name)
		}
	default:
		n.w.Fatalf("%s: type %v, want IPv4, IPv6 or ARP", n.name, t)
	}
	if !connected && len(fr) > n.f.opt.udMTU()+4 {
		n.w.Fatalf("%s: UD frame of %d octets", n.name, len(fr))
	}
	if connected && nd.KindOf(fr[4:]) != nd.None {
		n.w.Fatalf("%s: %v on a connection", n.name, nd.KindOf(fr[4:])) // 4755-7-4
	}
	if dst, _ := ip.Dst(fr[4:]); connected && dst.IsMulticast() {
		n.w.Fatalf("%s: multicast on a connection", n.name) // 4755-2.1-1, 4755-7-3
	}
}

// send carries something with loss, duplication and delay.
func (w *world) send(f func(), to *node, lossy bool) {
	times := 1
	if lossy && w.loss > 0 && w.r.Float64() < w.loss {
		times = 0
	} else if lossy && w.dup > 0 && w.r.Float64() < w.dup {
		times = 2
	}
	for range times {
		d := 50*time.Microsecond + time.Duration(w.r.Int64N(int64(w.delay)))
		w.queue = append(w.queue, flight{w.now.Add(d), to, f})
	}
}

func (n *node) sendUD(to encap.LinkAddr, fr []byte) {
	if n.holeUD != 0 && len(fr)-encap.HeaderLen > n.holeUD {
		return
	}
	n.w.to = n.w.at(to)
	if n.w.onFrame != nil {
		n.w.onFrame(n, false, fr)
	}
	for _, m := range n.w.nodes {
		if m.link() == to.Key() || to.QPN == ib.QPNMulticast && to.GID == m.opt.Link.GID && m != n {
			n.w.send(func() { m.recvUD(n.link(), m.opt.Link.GID, fr) }, m, true)
		}
	}
}

// at returns the node with a link-layer address.
func (w *world) at(link encap.LinkAddr) *node {
	for _, n := range w.nodes {
		if n.link() == link.Key() {
			return n
		}
	}
	return nil
}

func (n *node) recvUD(from encap.LinkAddr, dst ib.GID, fr []byte) {
	if n.dead {
		return
	}
	if n.legacy != nil {
		n.legacy.recvUD(from, fr)
		return
	}
	n.recv(RecvFrame{SrcGID: from.GID, SrcQPN: from.QPN, DstGID: dst, Frame: fr})
}

// recv does what the data path does with a frame.
func (n *node) recv(ev RecvFrame) {
	if n.older && encap.EtherType(binary.BigEndian.Uint16(ev.Frame)) == encap.PathProbe {
		return
	}
	if t := encap.EtherType(binary.BigEndian.Uint16(ev.Frame)); t == encap.ARP || t == encap.InbandCM ||
		t == encap.PathProbe || nd.KindOf(ev.Frame[4:]) != nd.None {
		n.step(ev)
		return
	}
	n.deliver(ev.Conn, ev.Frame[4:])
}

// deliver gives n's kernel a packet.
func (n *node) deliver(by nexthop.Conn, pkt []byte) {
	n.tun = append(n.tun, slices.Clone(pkt))
	if n.w.onPacket != nil {
		n.w.onPacket(n, by, pkt)
	}
}

func (n *node) sendConn(id nexthop.Conn, fr []byte) {
	w := n.w
	q := n.qps[id]
	if q == nil {
		w.Fatalf("%s: sending on connection %d, which has no queue pair", n.name, id)
	}
	if !q.rts {
		w.Fatalf("%s: sending on connection %d, which is not in RTS", n.name, id)
	}
	n.checkFrame(fr, true)
	for _, c := range n.f.Conns() {
		// 4755-2.3-1: nothing before the connection is established
		if c.Conn == id {
			expect.MustEqual(w, c.State, "ESTABLISHED", "%s: State of connection %d", n.name, id)
			expect.MustEqual(w, c.Tx, true, "%s: Tx of connection %d", n.name, id)
			if size := len(fr) - 4; size > c.MTU {
				w.Fatalf("%s: a packet of %d octets on a connection of MTU %d", n.name, size, c.MTU)
			}
		}
	}
	n.onConn++
	q.tx++
	if w.onFrame != nil {
		w.onFrame(n, true, fr)
	}
	for _, m := range w.nodes {
		if m.opt.Link.GID != q.destGID {
			continue
		}
		w.send(func() {
			if m.dead || n.hole != 0 && q.pathMTU > n.hole && len(fr) > n.hole.Octets() {
				w.retryExceeded(q)
				return
			}
			if m.legacy != nil {
				m.legacy.recvConn(q, fr)
				return
			}
			for _, r := range m.qps {
				if r.qpn == q.dest && r.rts && r.dest == q.qpn && !r.broken {
					if r.rqPSN != q.sqPSN {
						// IBA volume 1 section 12.7, Starting PSN
						w.Fatalf("PSNs do not meet: %v sends with %v, %v expects %v", n.name, q.sqPSN, m.name, r.rqPSN)
					}
					if len(fr) > r.receive {
						w.Fatalf("%d octets into a buffer of %d", len(fr), r.receive)
					}
					expect.MustEqual(w, r.pathMTU, q.pathMTU, "path MTU of the other end")
					r.arrived()
					m.recv(RecvFrame{Conn: r.conn, Frame: fr})
					return
				}
			}
			w.retryExceeded(q)
		}, m, q.trans == ib.UC)
		return
	}
}

// arrived counts a message, and does what the provider does with the first.
func (q *fakeQP) arrived() {
	q.rx++
	if q.rx == 1 && !q.n.w.mute {
		q.n.step(CommEst{q.conn})
	}
}

func (w *world) retryExceeded(q *fakeQP) {
	if q.trans == ib.RC && !q.broken {
		q.broken = true
		w.queue = append(w.queue, flight{w.now.Add(540 * time.Millisecond), q.n, func() {
			if q.n.qps[q.conn] == q {
				q.n.step(QPError{Conn: q.conn, Status: verbs.RetryExceeded})
			}
		}})
	}
}

func (n *node) sendMAD(m *verbs.MAD) {
	msg := n.readMAD(m)
	if m.QPN != ib.QPNGSI {
		n.w.Fatalf("%s sends %v to QP %v of the peer, want %v", n.name, msg, m.QPN, ib.QPNGSI)
	}
	if n.f != nil && !n.f.gsi() {
		n.w.Fatalf("%s sends %v by QP 1, which it cannot have", n.name, msg)
	}
	in := *m
	in.Local, in.Remote, in.QPN = m.Remote, n.opt.Link.GID, ib.QPNGSI
	if n.ib != nil {
		n.checkWay(m.Path.AH(), m.Remote)
		in.Path = verbs.Path{SLID: m.Path.DLID, DLID: n.ib.port.LID, SL: m.Path.SL, GRH: m.Path.GRH}
		if !m.Path.GRH {
			in.Remote = ib.GID{}
		}
	}
	for _, to := range n.w.nodes {
		if to.opt.Link.GID == m.Remote {
			n.carryMAD(msg, to, func() { to.recvMAD(in) })
		}
	}
}

// sendInband carries a MAD from UD QP to UD QP.
func (n *node) sendInband(a SendUD) {
	w := n.w
	m := &verbs.MAD{Remote: a.Link.GID, QPN: a.Link.QPN}
	expect.MustEqual(w, len(a.Frame), encap.HeaderLen+verbs.MADLen, "%s sends in-band to %v %v: length of a's Frame",
		n.name, a.MGID, a.Link)
	expect.MustEqual(w, a.MGID.IsZero(), true, "%s sends in-band to %v %v: a's MGID.IsZero", n.name, a.MGID, a.Link)
	expect.MustEqual(w, a.Frame[2], 0, "%s sends in-band to %v %v: a's Frame[2]", n.name, a.MGID, a.Link)
	expect.MustEqual(w, a.Frame[3], 0, "%s sends in-band to %v %v: a's Frame[3]", n.name, a.MGID, a.Link)
	copy(m.Data[:], a.Frame[encap.HeaderLen:])
	msg := n.readMAD(m)
	n.inband = append(n.inband, msg)
	for _, to := range w.nodes {
		if to.link() == a.Link.Key() {
			n.carryMAD(msg, to, func() { to.recvUD(n.link(), to.opt.Link.GID, a.Frame) })
		}
	}
}

// readMAD keeps the books of what n sends.
func (n *node) readMAD(m *verbs.MAD) mad.Message {
	_, msg, err := mad.Parse(m.Data[:])
	if err != nil {
		n.w.Fatalf("%s sends a MAD that cannot be read: %v", n.name, err)
	}
	n.checkMAD(msg)
	n.sent = append(n.sent, msg)
	if n.w.onMAD != nil {
		n.w.onMAD(n, msg)
	}
	if n.w.onOctets != nil {
		n.w.onOctets(n, m.Data[:])
	}
	return msg
}

func (n *node) carryMAD(msg mad.Message, to *node, arrive func()) {
	w := n.w
	w.to = to
	if w.dropMAD != nil && w.dropMAD(n, msg) {
		return
	}
	from := len(w.queue)
	w.send(arrive, to, true)
	for i := range w.queue[from:] {
		w.queue[from+i].at = w.queue[from+i].at.Add(w.madDelay)
	}
}

// recvMAD takes a MAD at QP 1.
func (n *node) recvMAD(in verbs.MAD) {
	switch {
	case n.silent || n.dead:
	case n.taken: // as the kernel's CM does, which nobody has told of our services
		_, msg, _ := mad.Parse(in.Data[:])
		if req, ok := msg.(mad.REQ); ok {
			rej := mad.REJ{TransactionID: req.TransactionID, RemoteCommID: req.LocalCommID, MessageRejected: mad.KindREQ,
				Reason: cm.ReasonInvalidServiceID}
			for _, to := range n.w.nodes {
				if to.opt.Link.GID == in.Remote {
					n.w.inject(n, to, rej)
				}
			}
		}
	case n.legacy != nil:
		n.legacy.recvMAD(&in)
	default:
		n.step(RecvMAD{&in})
	}
}

// checkMAD guards the private data of what we send.
func (n *node) checkMAD(msg mad.Message) {
	if n.legacy != nil {
		return
	}
	var pd []byte
	switch msg := msg.(type) {
	case mad.REQ:
		pd = msg.PrivateData[:]
		n.reqs = append(n.reqs, msg)
		expect.MustEqual(n.w, msg.Primary.LocalGID, n.opt.Link.GID, "%s: Primary.LocalGID of a REQ", n.name) // 4755-3.2-5
	case mad.REP:
		pd = msg.PrivateData[:]
		if msg.RNRRetryCount != 7 {
			n.w.Fatalf("REP with RNR retry %d", msg.RNRRetryCount)
		}
	case mad.RTU:
		pd = msg.PrivateData[:]
	case mad.REJ:
		pd = msg.PrivateData[:]
	case mad.MRA:
		pd = msg.PrivateData[:]
	default:
		return
	}
	// 4755-3.2-11, 4755-3.2-12, 4755-6-1, 4755-6-3, 4755-6-5, 4755-5.1-1, 4755-9-1
	var d encap.PrivateData
	if err := d.UnmarshalBinary(pd); err != nil {
		n.w.Fatalf("%s: private data of %v: %v", n.name, msg.Attr(), err)
	}
	expect.MustEqual(n.w, d.QPN, n.opt.Link.QPN, "%s: QPN in %v", n.name, msg.Attr())
	if n.f.ipv6 && d.ReceiveMTU < 1284 {
		n.w.Fatalf("%s: Receive MTU in %v is %d, want at least 1284", n.name, msg.Attr(), d.ReceiveMTU)
	}
	expect.MustEqual(n.w, pd[0], 0, "%s: reserved octet in %v", n.name, msg.Attr())
	if rest := bytes.Trim(pd[8:], "\x00"); len(rest) > 0 {
		n.w.Fatalf("%s: %v carries % x behind the header, want only zeros", n.name, msg.Attr(), rest)
	}
}
