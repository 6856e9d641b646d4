package foreign

import (
	"encoding/binary"
	"slices"
	"time"

	"ipoibcm/ib"
	"ipoibcm/serviceid"
	"ipoibcm/verbs"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/mad"
)

// A state is the state of one connection.
type state uint8

const (
	stateAsked   state = iota // active: REQ out
	statePause                // active: the REQ was rejected, another form follows
	stateReplied              // passive: REP out
	stateUp
	stateBye  // DREQ out
	stateGone // TIMEWAIT
)

// A conn is one connection, in one direction: active to send, passive to receive.
type conn struct {
	link          encap.LinkAddr // of the neighbour; a passive connection knows only its GID
	active        bool
	state         state
	lingering     bool // the other end has closed it, and Linux has not noticed
	try           int  // index of the profile's forms
	local, remote mad.CommID
	guid          ib.GUID
	qpn, far      ib.QPN
	tid           uint64
	psn, farPSN   ib.PSN
	pathMTU       ib.MTU
	rnr           uint8 // RNR retry count of its QP
	max           uint32
	queue         [][]byte

	msg      mad.Message
	tries    int
	maxTries int
	deadline time.Time
	used     time.Time
}

// tx returns the connection for sending to link, up or being set up, nil if there is
// none. The flags are part of the address, but not to WinOFED.
func (p *Peer) tx(link encap.LinkAddr) *conn {
	return p.find(func(c *conn) bool {
		same := c.link == link || p.prof.onAnswer && c.link.Key() == link.Key()
		return c.active && same && c.state != stateBye && c.state != stateGone
	})
}

// find returns the first connection for which is returns true, nil if there is none.
func (p *Peer) find(is func(*conn) bool) *conn {
	if i := slices.IndexFunc(p.conns, is); i >= 0 {
		return p.conns[i]
	}
	return nil
}

func (p *Peer) byQPN(qpn ib.QPN) *conn { return p.find(func(c *conn) bool { return c.qpn == qpn }) }

func (p *Peer) byIDs(local, remote mad.CommID) *conn {
	return p.find(func(c *conn) bool { return c.local == local && c.remote == remote })
}

// Up lists the QPNs of the connections that are up: its own and its peers'.
func (p *Peer) Up() (own, peers []ib.QPN) {
	for _, c := range p.conns {
		switch {
		case c.state != stateUp || c.lingering:
		case c.active:
			own = append(own, c.qpn)
		default:
			peers = append(peers, c.qpn)
		}
	}
	return own, peers
}

// FarQPNs lists the QPNs at the other end of the connections that are up: of those that the peer
// opened if active is set, else of those that were opened to it.
func (p *Peer) FarQPNs(active bool) (out []ib.QPN) {
	for _, c := range p.conns {
		if c.state == stateUp && c.active == active {
			out = append(out, c.far)
		}
	}
	return out
}

func (p *Peer) newConn(c *conn) *conn {
	p.lastComm++
	c.local = mad.CommID(p.lastComm)
	c.used = p.now()
	p.conns = append(p.conns, c)
	return c
}

func (p *Peer) destroyQP(c *conn) {
	if c.qpn != 0 {
		p.port.DestroyQP(c.qpn)
		c.qpn = 0
	}
}

func (p *Peer) remove(c *conn) {
	p.destroyQP(c)
	p.conns = slices.DeleteFunc(p.conns, func(o *conn) bool { return o == c })
}

func (p *Peer) privateData() []byte {
	b, _ := encap.PrivateData{QPN: p.link.QPN, ReceiveMTU: p.opt.ReceiveMTU}.AppendBinary(nil)
	return b
}

func (p *Peer) sendMAD(to ib.GID, msg mad.Message) {
	p.Count["sent "+msg.Attr().String()]++
	m := &verbs.MAD{Remote: to, Local: p.link.GID, QPN: ib.QPNGSI, PKey: ib.DefaultPKey}
	msg.AppendBinary(m.Data[:0]) // the error is always nil
	p.port.SendMAD(m)
}

// keepSending sends msg now, and again after each tryTime until the state of c changes.
func (p *Peer) keepSending(c *conn, msg mad.Message) {
	c.msg, c.tries, c.deadline = msg, 0, p.now().Add(tryTime)
	p.sendMAD(c.link.GID, msg)
}

// connect opens a connection to link, to send on.
func (p *Peer) connect(link encap.LinkAddr) *conn {
	c := p.newConn(&conn{link: link, active: true, maxTries: maxTries})
	c.qpn = p.port.CreateQP()
	p.request(c)
	return c
}

func (p *Peer) request(c *conn) {
	c.state = stateAsked
	if c.try > 0 { // another request
		p.lastComm++
		c.local = mad.CommID(p.lastComm)
	}
	req := mad.REQ{
		TransactionID: uint64(c.local), LocalCommID: c.local,
		ServiceID: serviceid.New(p.prof.forms[c.try], c.link.QPN), LocalCAGUID: p.opt.GUID, LocalQPN: c.qpn,
		ResponderResources: p.prof.depth, RemoteCMResponseTimeout: respond, LocalCMResponseTimeout: respond,
		Transport: ib.RC, RetryCount: p.prof.retry, RNRRetryCount: p.prof.retry, PKey: ib.DefaultPKey,
		PathMTU: p.opt.PathMTU, MaxCMRetries: maxTries, SRQ: true,
		Primary: mad.PathInfo{LocalLID: ib.PermissiveLID, RemoteLID: ib.PermissiveLID, LocalGID: p.link.GID,
			RemoteGID: c.link.GID, PacketRate: 3, HopLimit: 64, LocalACKTimeout: ackTimeout},
	}
	copy(req.PrivateData[:], p.privateData())
	c.pathMTU = p.opt.PathMTU
	p.keepSending(c, req)
}

// RecvMAD takes a MAD from QP 1.
func (p *Peer) RecvMAD(in *verbs.MAD) {
	_, msg, err := mad.Parse(in.Data[:])
	if err != nil {
		return
	}
	p.Count["got "+msg.Attr().String()]++
	switch m := msg.(type) {
	case mad.REQ:
		p.recvREQ(in.Remote, m)
	case mad.REP:
		p.recvREP(m)
	case mad.RTU:
		if c := p.byIDs(m.RemoteCommID, m.LocalCommID); c != nil && !c.active {
			p.established(c)
		}
	case mad.MRA:
		for _, c := range p.conns {
			if c.local == m.RemoteCommID && (c.state == stateAsked || c.state == stateReplied) {
				c.deadline = p.now().Add(tryTime + m.ServiceTimeout.Duration())
			}
		}
	case mad.REJ:
		p.recvREJ(m)
	case mad.DREQ:
		p.recvDREQ(in.Remote, m)
	case mad.DREP:
		if c := p.byIDs(m.RemoteCommID, m.LocalCommID); c != nil && c.state == stateBye {
			p.gone(c)
		}
	}
}

func (p *Peer) reject(to ib.GID, req mad.REQ, why mad.RejectReason, private []byte) {
	p.tell("rejects a REQ: %v", why)
	rej := mad.REJ{TransactionID: req.TransactionID, RemoteCommID: req.LocalCommID, Reason: why}
	copy(rej.PrivateData[:], private)
	p.sendMAD(to, rej)
}

// recvREQ accepts a REQ, to receive only. A REQ is a repeat if its CA GUID and
// communication ID are those of a connection, and shows that a connection is stale if its
// CA GUID and QPN are: GIDs do not matter, as in the kernel.
func (p *Peer) recvREQ(from ib.GID, req mad.REQ) {
	form, qpn := serviceid.Parse(req.ServiceID)
	if c := p.find(func(c *conn) bool {
		return !c.active && c.guid == req.LocalCAGUID && c.remote == req.LocalCommID
	}); c != nil {
		if c.state == stateGone {
			p.reject(from, req, mad.RejStaleConnection, nil)
		}
		return // keepSending repeats the REP
	}
	if c := p.find(func(c *conn) bool {
		return c.guid == req.LocalCAGUID && c.far == req.LocalQPN && c.far != 0
	}); c != nil {
		p.reject(from, req, mad.RejStaleConnection, nil)
		if c.state == stateReplied || c.state == stateUp {
			p.bye(c)
		}
		return
	}
	if p.opt.Deaf || qpn != p.link.QPN || form != serviceid.Legacy && !(p.prof.listenRFC && form == serviceid.RFC) {
		p.reject(from, req, mad.RejInvalidServiceID, nil)
		return
	}
	if req.Transport != ib.RC {
		p.reject(from, req, mad.RejConsumer, nil)
		return
	}
	if p.prof.checks && !p.check(from, req) {
		return
	}
	c := p.newConn(&conn{link: encap.LinkAddr{GID: from}, remote: req.LocalCommID, guid: req.LocalCAGUID,
		far: req.LocalQPN, tid: req.TransactionID, psn: ib.PSN(p.opt.Rand.Uint32()) & ib.PSNMask,
		farPSN: req.StartingPSN, pathMTU: req.PathMTU, state: stateReplied, maxTries: int(req.MaxCMRetries),
		rnr: req.RNRRetryCount})
	c.qpn = p.port.CreateQP()
	p.ready(c, req.RetryCount)
	rep := mad.REP{TransactionID: c.tid, LocalCommID: c.local, RemoteCommID: c.remote, LocalQPN: c.qpn, StartingPSN: c.psn,
		RNRRetryCount: 7, SRQ: true, LocalCAGUID: p.opt.GUID}
	if p.prof.echoRNR {
		rep.RNRRetryCount = req.RNRRetryCount
	} else {
		rep.TargetACKDelay = 10
	}
	copy(rep.PrivateData[:], p.privateData())
	p.keepSending(c, rep)
}

// check makes WinOFED's checks of a REQ. It rejects a REQ that fails them, but is silent to an
// unknown sender.
func (p *Peer) check(from ib.GID, req mad.REQ) bool {
	var pd encap.PrivateData
	_ = pd.UnmarshalBinary(req.PrivateData[:])
	qpn, known := p.endpoints[from]
	switch {
	case !known:
		p.Count["silent about a REQ"]++
		return false
	case pd.QPN != qpn:
		p.reject(from, req, mad.RejInvalidCommID, p.privateData())
		return false
	case pd.ReceiveMTU > p.opt.ReceiveMTU:
		p.reject(from, req, mad.RejInvalidPathMTU, p.privateData())
		return false
	}
	if slices.ContainsFunc(p.conns, func(c *conn) bool {
		return !c.active && c.link.GID == from && (c.state == stateUp || c.state == stateReplied)
	}) {
		p.reject(from, req, mad.RejStaleConnection, p.privateData())
		return false
	}
	return true
}

// ready takes the QP of c to RTS.
func (p *Peer) ready(c *conn, retry uint8) {
	p.port.ConnectQP(c.qpn,
		verbs.QPAttr{State: verbs.StateRTR, Path: verbs.AHAttr{SGID: p.link.GID, DGID: c.link.GID, HopLimit: 64},
			PathMTU: c.pathMTU, DestQPN: c.far, RQPSN: c.psn, MinRNRTimer: 12},
		verbs.QPAttr{State: verbs.StateRTS, SQPSN: c.farPSN, Timeout: ackTimeout, RetryCount: retry, RNRRetry: c.rnr})
}

// established takes a passive connection for which a REP was sent to stateUp.
func (p *Peer) established(c *conn) {
	if c.state != stateReplied {
		return
	}
	c.state, c.used, c.msg = stateUp, p.now(), nil
	p.setIdle(c)
	if !p.prof.onAnswer {
		return
	}
	// WinOFED opens the reverse connection.
	for _, n := range p.order {
		if n.link.GID == c.link.GID && n.known && p.tx(n.link) == nil {
			p.connect(n.link)
			return
		}
	}
	if qpn, ok := p.endpoints[c.link.GID]; ok {
		link := encap.LinkAddr{Flags: encap.FlagRC, QPN: qpn, GID: c.link.GID}
		if p.tx(link) == nil {
			p.connect(link)
		}
	}
}

// recvREP takes the answer to a REQ. Linux sends its first packets before the RTU.
func (p *Peer) recvREP(rep mad.REP) {
	c := p.find(func(c *conn) bool { return c.local == rep.RemoteCommID && c.active })
	if c != nil && c.state == stateUp && c.remote == rep.LocalCommID {
		p.rtu(c)
	}
	if c == nil || c.state != stateAsked {
		return
	}
	if o := p.find(func(o *conn) bool {
		return o != c && o.guid == rep.LocalCAGUID && o.far == rep.LocalQPN && o.state != stateGone
	}); o != nil {
		p.refuse(c, rep, mad.RejStaleConnection)
		p.bye(o)
		return
	}
	var pd encap.PrivateData
	_ = pd.UnmarshalBinary(rep.PrivateData[:])
	if p.prof.readsMTU && pd.ReceiveMTU <= encap.HeaderLen {
		p.sulkUntil = p.now().Add(sulks)
		p.refuse(c, rep, mad.RejConsumer)
		return
	}
	c.max = min(pd.ReceiveMTU, recvMTU)
	c.remote, c.guid, c.far, c.farPSN, c.rnr = rep.LocalCommID, rep.LocalCAGUID, rep.LocalQPN, rep.StartingPSN,
		rep.RNRRetryCount
	p.ready(c, p.prof.retry)
	c.state, c.used, c.msg = stateUp, p.now(), nil
	p.setIdle(c)
	queue := c.queue
	c.queue = nil
	for _, pkt := range queue {
		p.sendConn(c, pkt)
	}
	p.rtu(c)
}

func (p *Peer) rtu(c *conn) {
	rtu := mad.RTU{TransactionID: uint64(c.local), LocalCommID: c.local, RemoteCommID: c.remote}
	if p.prof.rtuData {
		copy(rtu.PrivateData[:], p.privateData())
	}
	p.sendMAD(c.link.GID, rtu)
}

// refuse rejects a REP.
func (p *Peer) refuse(c *conn, rep mad.REP, why mad.RejectReason) {
	p.sendMAD(c.link.GID, mad.REJ{TransactionID: rep.TransactionID, LocalCommID: c.local,
		RemoteCommID: rep.LocalCommID, MessageRejected: mad.KindREP, Reason: why})
	p.fail(c)
}

// fail ends an attempt to connect. Waiting packets are dropped, and the next packet starts a new attempt.
func (p *Peer) fail(c *conn) {
	p.Count["attempts failed"]++
	p.Count["dropped connecting"] += len(c.queue)
	p.remove(c)
}

// recvREJ treats a REJ with any reason as a failure, 28 too: these implementations do not
// know crossing REQs (ipoib_cm.c).
func (p *Peer) recvREJ(rej mad.REJ) {
	c := p.find(func(c *conn) bool { return c.local == rej.RemoteCommID })
	if c == nil && rej.Reason == mad.RejTimeout && rej.ARILength >= 8 {
		guid := ib.GUID(binary.BigEndian.Uint64(rej.ARI[:]))
		c = p.find(func(c *conn) bool { return c.guid == guid && c.remote == rej.LocalCommID })
	}
	if c == nil {
		return
	}
	p.tell("was rejected: %v", rej.Reason)
	switch {
	case c.state == stateAsked && c.try+1 < len(p.prof.forms):
		c.try++
		c.state, c.deadline = statePause, p.now().Add(illumosWait)
	case c.state == stateAsked:
		p.fail(c)
	case c.state != stateGone:
		p.gone(c)
	}
}

// recvDREQ ends a connection. A DREQ that names another QPN is dropped. A DREQ with
// unknown IDs, or for a connection that is gone, is answered.
func (p *Peer) recvDREQ(from ib.GID, dreq mad.DREQ) {
	drep := mad.DREP{TransactionID: dreq.TransactionID, LocalCommID: dreq.RemoteCommID, RemoteCommID: dreq.LocalCommID}
	c := p.byIDs(dreq.RemoteCommID, dreq.LocalCommID)
	switch {
	case c == nil || c.state == stateGone:
		p.sendMAD(from, drep)
	case dreq.RemoteQPN != c.qpn:
		p.Count["DREQ of another QPN"]++
	case c.active && c.state == stateUp && p.opt.Kind == Linux && !c.lingering:
		p.sendMAD(from, drep)
		c.lingering, c.deadline = true, p.now().Add(lingers)
	default:
		p.sendMAD(from, drep)
		p.gone(c)
	}
}

// bye ends a connection with a DREQ.
func (p *Peer) bye(c *conn) {
	msg := mad.DREQ{TransactionID: p.opt.Rand.Uint64(), LocalCommID: c.local, RemoteCommID: c.remote, RemoteQPN: c.far}
	c.state, c.maxTries = stateBye, maxTries
	p.destroyQP(c)
	p.keepSending(c, msg)
}

// gone puts c into TIMEWAIT. c keeps the peer's CA GUID, QPN and communication ID, so
// that a later REQ can be found stale.
func (p *Peer) gone(c *conn) {
	p.destroyQP(c)
	c.state, c.msg, c.deadline = stateGone, nil, p.now().Add(timewait)
}

// setIdle sets the deadline at which c is closed if it is not used until then.
func (p *Peer) setIdle(c *conn) {
	idle := p.prof.idleRx
	if c.active {
		idle = p.prof.idleTx
	}
	c.deadline = time.Time{}
	if idle > 0 {
		c.deadline = c.used.Add(idle)
	}
}

// QPError tells the peer that a queue pair broke. Without retries one lost packet
// breaks it. The peer sends a DREQ, and opens a new connection with the next packet.
func (p *Peer) QPError(qpn ib.QPN) {
	if c := p.byQPN(qpn); c != nil && (c.state == stateUp || c.state == stateReplied) {
		p.Count["queue pairs broken"]++
		p.bye(c)
	}
}

// expire handles the deadline of c.
func (p *Peer) expire(c *conn) {
	switch {
	case c.state == statePause:
		p.request(c)
	case c.state == stateGone:
		p.remove(c)
	case c.state == stateUp && c.lingering:
		p.gone(c)
	case c.state == stateUp:
		p.Count["idle connections closed"]++
		p.bye(c)
	case c.tries < c.maxTries:
		c.tries++
		c.deadline = p.now().Add(tryTime)
		p.sendMAD(c.link.GID, c.msg)
	case c.state == stateBye:
		p.gone(c)
	default:
		rej := mad.REJ{TransactionID: c.tid, LocalCommID: c.local, RemoteCommID: c.remote,
			MessageRejected: mad.KindOther, Reason: mad.RejTimeout, ARILength: 8}
		binary.BigEndian.PutUint64(rej.ARI[:], uint64(p.opt.GUID))
		p.sendMAD(c.link.GID, rej)
		p.fail(c)
	}
}
