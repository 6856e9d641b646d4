package cm

import (
	"slices"

	"ipoibcm/ib"
	"ipoibcm/verbs"
	"ipoibcm/wire/mad"
)

// recvREQ handles a REQ. It drops a REQ above REQsPerSecond, rejects one whose GIDs are wrong, and
// separates repeats from new ones.
func (m *Manager) recvREQ(in *verbs.MAD, req *mad.REQ) {
	src := in.Remote
	if src.IsZero() { // a fabric without GRH: only the REQ itself names its source
		src = req.Primary.LocalGID
	}
	if !m.reqs.allow(m.now, src) {
		m.drop(nil, DropREQRate, "")
		return
	}
	to := m.local(in.Local)
	if src != req.Primary.LocalGID {
		m.rejectREQ(in, req, ReasonInvalidGID, m.ownerData(to), "it names a source GID that is not the sender's")
		return
	}
	if req.Primary.RemoteGID != to {
		m.rejectREQ(in, req, ReasonInvalidGID, m.ownerData(to), "it names a GID that it was not sent to")
		return
	}
	id := remoteID{src, req.LocalCAGUID, req.LocalCommID}
	if c := m.byRemote[id]; c != nil {
		m.repeatedREQ(in, c, req)
		return
	}
	m.newREQ(in, src, req)
}

// repeatedREQ answers a REQ whose communication ID is on record. It never asks the user again, but
// repeats the last answer. It rejects the REQ if that belongs to another connection, or if the
// connection is in TIMEWAIT.
func (m *Manager) repeatedREQ(in *verbs.MAD, c *conn, req *mad.REQ) {
	if c.active || c.p.ServiceID != req.ServiceID || c.p.RemoteQPN != req.LocalQPN {
		m.rejectREQ(in, req, ReasonDuplicateCommID, m.ownerData(m.local(in.Local)),
			"its communication ID is that of another connection")
		return
	}
	if !m.fromPeer(c) {
		return
	}
	switch c.state {
	case StateREQRcvd: // the user is slow: an MRA asks the peer for patience
		m.duplicate(c)
		m.askPatience(c)
	case StateMRAREQSent, StateREPSent, StateMRAREPRcvd, StateRejected:
		m.duplicate(c)
		m.repeat(c)
	case StateTimewait:
		m.duplicate(c)
		m.answerREQ(in, req, ReasonStale, c.private)
	default:
		m.drop(c, DropState, "")
	}
}

// newREQ rejects a REQ that has no listener, that is unfit, or for which there is no room. Otherwise
// it makes a connection and asks the user.
func (m *Manager) newREQ(in *verbs.MAD, src ib.GID, req *mad.REQ) {
	to := m.local(in.Local)
	l := m.listener(req.ServiceID, to)
	if l == nil {
		m.rejectREQ(in, req, ReasonInvalidServiceID, m.ownerData(to), "nobody listens on the service ID")
		return
	}
	if reason, text := m.unfitREQ(req); text != "" {
		m.rejectREQ(in, req, reason, l.PrivateData, text)
		return
	}
	if old := m.byRemoteQP[remoteQP{src, req.LocalCAGUID, req.LocalQPN}]; old != nil {
		m.rejectREQ(in, req, ReasonStale, l.PrivateData, "its QP belongs to another connection")
		m.stale(old)
		return
	}
	m.makeRoom()
	switch {
	case len(m.byHandle) >= m.opt.MaxConns:
		m.counts.refusedConns++
		m.rejectREQ(in, req, ReasonNoQP, l.PrivateData, "as many connections as there may be")
		return
	case len(m.halfOpen) >= m.opt.MaxHalfOpen && !m.evictHalfOpen():
		m.counts.refusedHalfOpen++
		m.rejectREQ(in, req, ReasonNoResources, l.PrivateData, "as many half-open connections as there may be")
		return
	}
	m.lastIncoming++
	c := &conn{
		handle:     incoming | m.lastIncoming,
		pkey:       in.PKey,
		tid:        req.TransactionID,
		private:    slices.Clone(l.PrivateData),
		wait:       tryWait(req.LocalCMResponseTimeout, req.Primary.LocalACKTimeout),
		patience:   patience(req.RemoteCMResponseTimeout),
		noFailover: req.Alternate != mad.PathInfo{},
		maxRetries: int(req.MaxCMRetries),
		asked:      m.now,
		p: Params{
			Local: to, Remote: src, CMQPN: m.rx.from, ServiceID: req.ServiceID, Transport: req.Transport, PKey: req.PKey,
			PathMTU: req.PathMTU, RemoteQPN: req.LocalQPN, SendPSN: req.StartingPSN,
			AckTimeout: req.Primary.LocalACKTimeout, RetryCount: req.RetryCount, RNRRetry: req.RNRRetryCount,
			ResponderResources: req.InitiatorDepth, InitiatorDepth: req.ResponderResources, // they change sides
			RemoteSRQ: req.SRQ,
			FlowLabel: req.Primary.FlowLabel, TrafficClass: req.Primary.TrafficClass, HopLimit: req.Primary.HopLimit,
			SL: req.Primary.SL, RemoteCommID: req.LocalCommID, RemoteCAGUID: req.LocalCAGUID,
			PrivateData: slices.Clone(req.PrivateData[:]),
		},
	}
	c.p.Path = pathOfREQ(&c.p, in.Path, req)
	m.add(c)
	m.setState(c, StateREQRcvd)
	m.setTimer(c, min(c.patience, m.opt.UserTimeout))
	m.took(c, "")
	m.act(RequestReceived{Handle: c.handle, Params: c.p})
}

// pathOfREQ returns the path to the sender of a REQ as the REQ describes it. back is the path that
// the packet came by. If the REQ names no LID, as for a path with a GRH, the LID and SL are those
// of back. The path is zero on Ethernet.
func pathOfREQ(c *Params, back verbs.Path, req *mad.REQ) verbs.Path {
	if back.DLID == 0 {
		return verbs.Path{}
	}
	p, r := back, req.Primary
	p.SGID, p.DGID, p.GRH = c.Local, c.Remote, back.GRH || r.HopLimit > 1
	p.FlowLabel, p.TrafficClass, p.HopLimit = r.FlowLabel, r.TrafficClass, r.HopLimit
	p.PKey, p.MTU, p.Rate, p.Life = c.PKey, c.PathMTU, ib.Rate(r.PacketRate), max(r.LocalACKTimeout, 1)-1
	if r.SubnetLocal && r.LocalLID != 0 && r.LocalLID != ib.PermissiveLID {
		p.DLID, p.SL = r.LocalLID, r.SL
	}
	return p
}

// unfitREQ returns why a REQ cannot lead to a connection; text is empty if it can.
func (m *Manager) unfitREQ(req *mad.REQ) (reason Reason, text string) {
	switch {
	case req.Transport != ib.RC && req.Transport != ib.UC:
		return ReasonInvalidTransport, "neither RC nor UC"
	case !isQPN(req.LocalQPN):
		return ReasonUnsupported, "no QPN that a connection can have"
	case req.PathMTU.Octets() == 0:
		return ReasonInvalidMTU, "no path MTU"
	}
	return 0, ""
}

// failoverUnsupported in a REP says that we do not support the alternate path of the REQ
// (IBA 12.7.26).
const failoverUnsupported = 1

// accept sends the REP (4755-3.2-3).
func (m *Manager) accept(ev Accept) {
	c := m.user(ev.Handle, "Accept", StateREQRcvd, StateMRAREQSent)
	if c == nil {
		return
	}
	if m.byQPN[ev.QPN&ib.QPNMask] != nil {
		m.decide(c, "the QPN is still held by another connection")
		m.end(c, Failed{Handle: c.handle, Cause: Refused, Reason: ReasonNoQP})
		m.refuse(c, ReasonNoQP, nil, c.private)
		return
	}
	p := &c.p
	p.LocalQPN, p.RecvPSN = ev.QPN&ib.QPNMask, ev.StartingPSN&ib.PSNMask
	p.ResponderResources, p.InitiatorDepth = ev.ResponderResources, ev.InitiatorDepth
	m.indexQPN(c)
	rep := mad.REP{
		TransactionID: c.tid,
		LocalCommID:   p.LocalCommID, RemoteCommID: p.RemoteCommID, LocalQPN: p.LocalQPN, StartingPSN: p.RecvPSN,
		ResponderResources: ev.ResponderResources, InitiatorDepth: ev.InitiatorDepth, TargetACKDelay: ev.AckDelay & 31,
		RNRRetryCount: ev.RNRRetry & 7, SRQ: ev.SRQ, LocalCAGUID: m.opt.CAGUID,
	}
	if c.noFailover {
		rep.FailoverAccepted = failoverUnsupported
	}
	fill(rep.PrivateData[:], ev.PrivateData)
	m.setState(c, StateREPSent)
	m.sendUntilAnswered(c, rep)
}

// recvRTU completes a connection.
func (m *Manager) recvRTU(rtu *mad.RTU) {
	c := m.conn(rtu.RemoteCommID, rtu.LocalCommID)
	if c == nil || c.active {
		m.drop(nil, DropUnknownConn, "")
		return
	}
	if !m.fromPeer(c) {
		return
	}
	switch {
	case c.state == StateREPSent || c.state == StateMRAREPRcvd:
		m.took(c, "")
		m.up(c, slices.Clone(rtu.PrivateData[:]))
	case c.state == StateEstablished && c.byData:
		m.took(c, "data had stood for it")
		c.byData = false
		m.act(LateRTU{Handle: c.handle, PrivateData: slices.Clone(rtu.PrivateData[:])})
	case c.state == StateEstablished:
		m.duplicate(c)
	default:
		m.drop(c, DropState, "")
	}
}

// data takes the first packet on a QP as proof that the peer has the REP, in place of the RTU.
func (m *Manager) data(ev DataOnQP) {
	c := m.byQPN[ev.QPN]
	if c == nil || c.state != StateREPSent && c.state != StateMRAREPRcvd {
		return // the packet is not the first, or its QP is of no such connection
	}
	c.byData = true
	m.decide(c, "a packet stands for the RTU")
	m.up(c, nil)
}

// up makes a passive connection established.
func (m *Manager) up(c *conn, rtuData []byte) {
	m.timers.Stop(c)
	m.setState(c, StateEstablished)
	m.act(Established{Handle: c.handle, Params: c.p, ByData: c.byData, RTUPrivateData: rtuData})
	c.p.PrivateData = nil // the user has it
}
