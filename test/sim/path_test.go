package sim

import (
	"net/netip"
	"slices"

	"ipoibcm/ib"
	"ipoibcm/internal/foreign"
	"ipoibcm/internal/simfabric"
	"ipoibcm/ipoib"
	"ipoibcm/nexthop"
	"ipoibcm/rtnl"
	"ipoibcm/verbs"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/ip"
	"ipoibcm/wire/nd"
)

// This file stands in for the data path.

const (
	rc = ib.RC
	uc = ib.UC

	udMTU     = 2044
	udDepth   = 256
	sendDepth = 128
	recvDepth = 16
)

// A conn is a queue pair with its buffers; the UD QP is one too.
type conn struct {
	h     *host
	id    nexthop.Conn // 0: UD
	qp    verbs.QP
	qpn   ib.QPN
	trans ib.Transport
	bufs  recvBufs
	rtr   verbs.QPAttr
	rts   verbs.QPAttr
	peer  encap.LinkAddr // without flags

	inflight map[uint64]*verbs.Region
	lastID   uint64
	receive  int               // octets that a receive buffer of it holds
	mtu      int               // octets of IP that the record said at the first post
	sent     []uint64          // hash of each frame posted
	sentAs   map[uint64]bool   // the same as a set
	lastOf   map[string]uint64 // number of the last packet of each flow
	got      int               // frames received

	txPackets, txOctets, rxPackets, rxOctets, dropped uint64
}

// recvBufs is a region cut into receive buffers.
type recvBufs struct {
	region *verbs.Region
	size   int
}

func (b *recvBufs) wr(id uint64) verbs.RecvWR {
	return verbs.RecvWR{ID: id, SG: []verbs.SGE{{Region: b.region, Buf: b.buf(id)}}}
}

func (b *recvBufs) buf(id uint64) []byte { return b.region.Buf[int(id)*b.size : (int(id)+1)*b.size] }

type poster interface {
	PostRecv([]verbs.RecvWR) (int, error)
}

// newBufs makes n buffers and posts them.
func (h *host) newBufs(n, size int, to poster) recvBufs {
	b := recvBufs{size: size}
	b.region = must(h.port.Alloc(n * size))
	for i := range n {
		must(to.PostRecv([]verbs.RecvWR{b.wr(uint64(i))}))
	}
	return b
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err) // the provider's limits are far away
	}
	return v
}

func ok(err error) {
	if err != nil {
		panic(err)
	}
}

// newCQ makes a completion queue that f empties.
func newCQ(port *simfabric.Port, f func(wc *verbs.WC)) verbs.CQ {
	cq := must(port.CreateCQ(1024))
	cq.(verbs.CallbackCQ).OnReady(func() {
		var wcs [16]verbs.WC
		for n := cq.Poll(wcs[:]); n > 0; n = cq.Poll(wcs[:]) {
			for i := range n {
				f(&wcs[i])
			}
		}
	})
	return cq
}

func (h *host) openUD() {
	h.sendCQ, h.recvCQ = newCQ(h.port, h.sendDone), newCQ(h.port, h.recvDone)
	h.newUD()
	h.srq = nil
	if h.cfg.srq {
		h.srq = must(h.port.CreateSRQ(verbs.SRQInit{Depth: recvDepth, MaxSGE: 1}))
		h.srqBufs = h.newBufs(recvDepth, h.cfg.ring(), h.srq)
	}
}

func (h *host) newUD() {
	qp := must(h.port.CreateQP(verbs.QPInit{Transport: ib.UD, SendCQ: h.sendCQ, RecvCQ: h.recvCQ,
		SendDepth: udDepth, RecvDepth: udDepth, MaxSendSGE: 1, MaxRecvSGE: 1}))
	h.ud = newConn(h, 0, qp)
	ok(qp.Modify(verbs.QPAttr{State: verbs.StateInit, PKey: ib.DefaultPKey, QKey: ib.QKeyIPoIB}))
	h.ud.bufs = h.newBufs(udDepth, verbs.GRHLen+encap.HeaderLen+udMTU, qp)
	ok(qp.Modify(verbs.QPAttr{State: verbs.StateRTR}))
	ok(qp.Modify(verbs.QPAttr{State: verbs.StateRTS}))
	h.ud.mtu = udMTU
}

// changeQPN replaces the UD QP: the interface has another link-layer address
// from now on, and nobody knows it yet.
func (h *host) changeQPN() {
	if h.dead || h.shutdown {
		return
	}
	old, groups := h.ud, h.port.Groups()
	h.newUD()
	for _, g := range groups { // the machine leaves them by itself
		ok(h.ud.qp.AttachMulticast(g))
	}
	h.release(old)
	h.link.QPN, h.udUse = h.ud.qpn, map[encap.LinkAddr]ipoib.UDUse{}
	h.tell("QPN is %v now", h.link.QPN)
	p := h.port.Port()
	h.step(ipoib.UnderlayChanged{Link: h.link, PathMTU: p.MTU, Active: p.Active})
}

func newConn(h *host, id nexthop.Conn, qp verbs.QP) *conn {
	return &conn{h: h, id: id, qp: qp, qpn: qp.QPN(), trans: qp.Transport(), inflight: map[uint64]*verbs.Region{},
		sentAs: map[uint64]bool{}, lastOf: map[string]uint64{}}
}

func (c *conn) depth() int {
	if c.id == 0 {
		return udDepth
	}
	return sendDepth
}

// up reports whether c can send.
func (c *conn) up() bool { return c.id == 0 || c.rts.State == verbs.StateRTS }

func (c *conn) use() ipoib.ConnUse {
	return ipoib.ConnUse{Conn: c.id, TxPackets: c.txPackets, TxOctets: c.txOctets, RxPackets: c.rxPackets,
		RxOctets: c.rxOctets, TxDropped: c.dropped, TxUnacked: uint64(len(c.inflight))}
}

func (h *host) createQP(a ipoib.CreateQP) {
	init := verbs.QPInit{Transport: a.Transport, SendCQ: h.sendCQ, RecvCQ: h.recvCQ, SendDepth: sendDepth,
		RecvDepth: recvDepth, MaxSendSGE: 1, MaxRecvSGE: 1}
	shared := h.srq != nil && a.Transport == rc
	if shared {
		init.SRQ = h.srq
	}
	qp := must(h.port.CreateQP(init))
	c := newConn(h, a.Conn, qp)
	c.receive = a.ReceiveMTU
	h.checkOffer(c)
	ok(qp.Modify(a.Init))
	if shared {
		c.receive = h.srqBufs.size
	} else {
		c.receive = min(c.receive, h.cfg.ring())
		c.bufs = h.newBufs(recvDepth, c.receive, qp)
	}
	h.conns[a.Conn], h.byQPN[c.qpn], h.w.ends[end{h.gid, c.qpn}] = c, c, c
	h.pending = append(h.pending, ipoib.QPCreated{Conn: a.Conn, QPN: c.qpn})
}

func (h *host) connectQP(a ipoib.ConnectQP) {
	c := h.conns[a.Conn]
	if c == nil {
		return
	}
	c.rtr, c.rts, c.peer = a.RTR, a.RTS, a.Peer.Key()
	if h.ib != nil {
		h.ib.qps[a.RTR.DestQPN] = a.RTR.Path.LID
	}
	ok(c.qp.Modify(a.RTR))
	ok(c.qp.Modify(a.RTS))
}

func (h *host) destroyQP(id nexthop.Conn) {
	c := h.conns[id]
	if c == nil {
		h.w.fatalf("%s: QP of connection %d destroyed twice", h.name(), id)
	}
	for p, path := range h.paths {
		if path.Kind == nexthop.PathConn && path.Conn == id {
			h.w.fatalf("%s: path of %v leads to connection %d, whose QP is to be destroyed", h.name(), p, id)
		}
	}
	delete(h.conns, id)
	delete(h.byQPN, c.qpn)
	if h.cfg.fault == leaksQPs {
		return
	}
	h.release(c)
}

// release takes a queue pair and its buffers away.
func (h *host) release(c *conn) {
	ok(c.qp.Modify(verbs.QPAttr{State: verbs.StateError}))
	ok(c.qp.Destroy())
	for _, r := range c.inflight {
		ok(h.port.Deregister(r))
	}
	if c.bufs.region != nil {
		ok(h.port.Deregister(c.bufs.region))
	}
	c.qp, c.inflight, c.bufs = nil, nil, recvBufs{}
}

// transmit takes a packet from the kernel.
func (h *host) transmit(pkt []byte) {
	dst, _ := ip.Dst(pkt)
	path, found := h.lookup(dst)
	if h.cfg.fault != none {
		path = h.wrong(path)
	}
	switch {
	case nd.KindOf(pkt) != nd.None || ip.IsReport(pkt), !found, path.Kind == nexthop.PathMiss, len(pkt) > path.MTU:
		h.event(ipoib.Packet{IP: pkt})
	case path.Kind == nexthop.PathDrop:
		h.txDrops++
	case path.Kind == nexthop.PathGroup:
		h.postUD(encap.LinkAddr{}, path.Link.GID, foreign.Frame(pkt))
	case path.Kind == nexthop.PathUD:
		h.postUD(path.Link, ib.GID{}, foreign.Frame(pkt))
	case path.Kind == nexthop.PathConn:
		h.post(h.conns[path.Conn], verbs.SendWR{}, foreign.Frame(pkt))
	}
}

// lookup finds the path of the destination's next hop.
func (h *host) lookup(dst netip.Addr) (path nexthop.Path, found bool) {
	hop, found := h.dests[rtnl.Flow{Dst: dst}]
	if found {
		path, found = h.paths[hop]
	}
	return path, found
}

func (h *host) postUD(to encap.LinkAddr, mgid ib.GID, frame []byte) {
	gid, qpn := to.GID, to.QPN
	if !mgid.IsZero() {
		gid, qpn = mgid, ib.QPNMulticast
	}
	h.checkPath(gid)
	wr := verbs.SendWR{AH: must(h.port.CreateAH(verbs.AHAttr{SGID: h.gid, DGID: gid})), RemoteQPN: qpn,
		RemoteQKey: ib.QKeyIPoIB}
	if h.post(h.ud, wr, frame) && mgid.IsZero() {
		u := h.udUse[to.Key()]
		u.Link = to.Key()
		u.TxPackets++
		u.TxOctets += uint64(len(frame) - encap.HeaderLen)
		h.udUse[to.Key()] = u
	}
}

// post sends a frame on c. A full queue drops it.
func (h *host) post(c *conn, wr verbs.SendWR, frame []byte) bool {
	h.checkPost(c, frame)
	if len(c.inflight) >= c.depth() { // buffers come back when the CQ has been read
		c.dropped++
		return false
	}
	if h.cfg.fault == changesOctets {
		frame[len(frame)-1] ^= 1
	}
	r := must(h.port.Register(slices.Clone(frame), 0))
	c.lastID++
	wr.ID, wr.Opcode, wr.Flags, wr.SG = c.lastID, verbs.Send, verbs.Signaled, []verbs.SGE{{Region: r, Buf: r.Buf}}
	if _, err := c.qp.PostSend([]verbs.SendWR{wr}); err != nil {
		c.dropped++
		ok(h.port.Deregister(r))
		return false
	}
	c.inflight[c.lastID] = r
	c.txPackets++
	c.txOctets += uint64(len(frame) - encap.HeaderLen)
	h.posted(c, frame)
	return true
}

func (h *host) sendDone(wc *verbs.WC) {
	c := h.byQPN[wc.QPN]
	if wc.QPN == h.ud.qpn {
		c = h.ud
	}
	if c == nil || c.inflight[wc.ID] == nil {
		return // gone meanwhile
	}
	if h.cfg.fault != leaksBuffers {
		ok(h.port.Deregister(c.inflight[wc.ID]))
	}
	delete(c.inflight, wc.ID)
	if h.onSent != nil && wc.Status == verbs.Success {
		h.onSent(c)
	}
}

func (h *host) recvDone(wc *verbs.WC) {
	c := h.byQPN[wc.QPN]
	if wc.QPN == h.ud.qpn {
		c = h.ud
	}
	bufs, to := &h.srqBufs, poster(h.srq)
	if c != nil && c.bufs.region != nil {
		bufs, to = &c.bufs, c.qp
	} else if h.srq == nil || c != nil && c.trans == uc {
		return // its ring is gone with it
	} else if c == nil && !h.srqOwns(wc) {
		return
	}
	if wc.Status == verbs.Success && c != nil {
		msg := slices.Clone(bufs.buf(wc.ID)[:wc.ByteLen])
		if c == h.ud {
			h.takeUD(msg, wc)
		} else {
			h.takeConn(c, msg)
		}
	}
	if h.stalled && c != h.ud {
		wr := bufs.wr(wc.ID)
		h.delayed = append(h.delayed, func() { to.PostRecv([]verbs.RecvWR{wr}) })
		return
	}
	if wc.Status != verbs.WRFlushError || to == poster(h.srq) {
		to.PostRecv([]verbs.RecvWR{bufs.wr(wc.ID)})
	}
}

// srqOwns reports whether the buffer of a completion of a QP that is gone was
// one of the shared queue's. Only RC uses that.
func (h *host) srqOwns(wc *verbs.WC) bool {
	c := h.w.ends[end{h.gid, wc.QPN}]
	return c != nil && c.trans == rc && c.h == h
}

func (h *host) takeUD(msg []byte, wc *verbs.WC) {
	src, dst := verbs.GRHAddrs(msg[:verbs.GRHLen], false)
	fr := msg[verbs.GRHLen:]
	var hd encap.Header
	if err := hd.UnmarshalBinary(fr); err != nil {
		h.w.fatalf("%s: %v", h.name(), err)
	}
	pkt := fr[encap.HeaderLen:]
	if hd.Type != encap.IPv4 && hd.Type != encap.IPv6 || nd.KindOf(pkt) != nd.None {
		h.event(ipoib.RecvFrame{SrcGID: src, DstGID: dst, SrcQPN: wc.SrcQPN, Frame: fr})
		return
	}
	if a, _ := ip.Dst(pkt); a.IsMulticast() && (h.table == nil || !h.table.Wanted(a)) {
		return
	}
	if h.up {
		h.receive(pkt, nil)
	}
	if h.datagrams++; h.w.stormy && h.datagrams%16 == 0 { // as if its source sent many
		h.event(ipoib.Sender{IP: pkt[:min(len(pkt), 64)]})
	}
}

// isGroup reports whether dst is multicast or a broadcast address of the device.
func (h *host) isGroup(dst netip.Addr) bool {
	return dst.IsMulticast() || dst == ip.LimitedBroadcast || dst == netip.MustParseAddr("10.0.0.255")
}

func (h *host) takeConn(c *conn, fr []byte) {
	h.checkRecv(c, fr)
	c.rxPackets++
	c.rxOctets += uint64(len(fr) - encap.HeaderLen)
	if t := encap.EtherType(fr[0])<<8 | encap.EtherType(fr[1]); t == encap.ARP || t == encap.PathProbe ||
		t == encap.IPv6 && nd.KindOf(fr[encap.HeaderLen:]) != nd.None {
		h.event(ipoib.RecvFrame{Conn: c.id, Frame: fr}) // Linux sends ND so
		return
	}
	to := h
	if h.cfg.fault == deliversElsewhere {
		to = h.w.hosts[1]
	}
	if h.up {
		to.receive(fr[encap.HeaderLen:], c)
	}
}
