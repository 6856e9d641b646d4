package cm

import (
	"cmp"
	"slices"

	"ipoibcm/ib"
	"ipoibcm/wire/mad"
)

// connect sends the first REQ of a connection of ours (4755-3.2-2).
func (m *Manager) connect(ev Connect) {
	if ev.Handle == 0 || ev.Handle.Incoming() || m.byHandle[ev.Handle] != nil {
		panic("cm: Connect needs a handle of its own") // ours
	}
	retries := m.opt.MaxRetries
	if ev.MaxRetries != 0 {
		retries = min(int(ev.MaxRetries), 15)
	}
	respond := cmp.Or(ev.ResponseTimeout&31, 17)
	c := &conn{
		handle:     ev.Handle,
		active:     true,
		pkey:       cmp.Or(ev.PKey, ib.DefaultPKey),
		tid:        m.opt.Rand.Uint64(),
		private:    slices.Clone(ev.PrivateData),
		maxRetries: retries,
		p: Params{
			Local: m.local(ev.Local), Remote: ev.Remote, CMQPN: cmp.Or(ev.Inband&ib.QPNMask, ib.QPNGSI),
			ServiceID: ev.ServiceID, Transport: ev.Transport, PKey: cmp.Or(ev.PKey, ib.DefaultPKey), PathMTU: ev.PathMTU,
			LocalQPN: ev.QPN & ib.QPNMask, RecvPSN: ev.StartingPSN & ib.PSNMask,
			AckTimeout: cmp.Or(ev.AckTimeout&31, 14), RetryCount: ev.RetryCount & 7, RNRRetry: ev.RNRRetry & 7,
			ResponderResources: ev.ResponderResources, InitiatorDepth: ev.InitiatorDepth,
			FlowLabel: ev.FlowLabel & 0xfffff, TrafficClass: ev.TrafficClass, HopLimit: cmp.Or(ev.HopLimit, 64), SL: ev.SL & 15,
		},
	}
	rate := cmp.Or(ev.PacketRate&63, 3)
	if p := ev.Path; p.DLID != 0 {
		c.p.FlowLabel, c.p.TrafficClass, c.p.HopLimit, c.p.SL = p.FlowLabel&0xfffff, p.TrafficClass, p.HopLimit, p.SL&15
		c.p.Path, rate = p, uint8(cmp.Or(p.Rate&63, ib.Rate10G))
	}
	c.wait = tryWait(respond, min(c.p.AckTimeout, maxTryLife))
	c.patience = patience(respond)
	if cause, reason, text := m.unfit(c); text != "" {
		m.decide(c, text)
		m.act(Failed{Handle: c.handle, Cause: cause, Reason: reason})
		if c.p.LocalQPN != 0 {
			m.act(Released{Handle: c.handle, QPN: c.p.LocalQPN})
		}
		return
	}
	m.add(c)
	m.setState(c, StateREQSent)
	req := mad.REQ{
		TransactionID: c.tid,
		LocalCommID:   c.p.LocalCommID, ServiceID: c.p.ServiceID, LocalCAGUID: m.opt.CAGUID,
		LocalQPN: c.p.LocalQPN, ResponderResources: c.p.ResponderResources, InitiatorDepth: c.p.InitiatorDepth,
		RemoteCMResponseTimeout: respond, LocalCMResponseTimeout: respond, Transport: c.p.Transport,
		StartingPSN: c.p.RecvPSN, RetryCount: c.p.RetryCount, RNRRetryCount: ev.RNRRetry & 7, PKey: c.p.PKey,
		PathMTU: c.p.PathMTU, MaxCMRetries: uint8(retries), SRQ: ev.SRQ,
		Primary: mad.PathInfo{
			LocalLID: ib.PermissiveLID, RemoteLID: ib.PermissiveLID, LocalGID: c.p.Local, RemoteGID: c.p.Remote,
			FlowLabel: c.p.FlowLabel, PacketRate: rate, TrafficClass: c.p.TrafficClass,
			HopLimit: c.p.HopLimit, SL: c.p.SL, SubnetLocal: c.p.HopLimit <= 1, LocalACKTimeout: c.p.AckTimeout,
		},
	}
	if p := c.p.Path; p.DLID != 0 && p.SubnetLocal() { // beyond the subnet, LIDs mean nothing to the peer
		req.Primary.LocalLID, req.Primary.RemoteLID = p.SLID, p.DLID
	}
	fill(req.PrivateData[:], ev.PrivateData)
	m.sendUntilAnswered(c, req)
}

// unfit returns why c cannot even be tried; text is empty if it can.
func (m *Manager) unfit(c *conn) (cause Cause, reason Reason, text string) {
	m.makeRoom()
	switch {
	case len(m.byHandle) >= m.opt.MaxConns:
		m.counts.refusedConns++
		return NoRoom, 0, "as many connections as there may be"
	case c.p.Transport != ib.RC && c.p.Transport != ib.UC:
		return Refused, ReasonInvalidTransport, "neither RC nor UC"
	case c.p.PathMTU.Octets() == 0:
		return Refused, ReasonInvalidMTU, "no path MTU"
	case m.byQPN[c.p.LocalQPN] != nil:
		return Refused, ReasonStale, "the QPN is still held by another connection"
	}
	return 0, 0, ""
}

// recvREP handles the answer to our REQ, or a repeat of it.
func (m *Manager) recvREP(rep *mad.REP) {
	c := m.byLocal[rep.RemoteCommID]
	if c == nil || !c.active {
		m.drop(c, DropUnknownConn, "no REQ of ours is answered by it")
		return
	}
	if !m.fromPeer(c) {
		return
	}
	if c.p.RemoteQPN != 0 && c.p.RemoteCommID != rep.LocalCommID {
		m.drop(c, DropUnknownConn, "another REP came first")
		return
	}
	switch c.state {
	case StateREQSent, StateMRAREQRcvd:
		m.firstREP(c, rep)
	case StateREPRcvd: // the user is slow: an MRA asks the peer for patience
		m.duplicate(c)
		m.askPatience(c)
	case StateMRAREPSent, StateEstablished:
		m.duplicate(c)
		m.repeat(c)
	case StateRejected:
		m.duplicate(c)
		if c.p.RemoteQPN == 0 { // cancelled or timed out before any REP came
			m.refuseLateREP(c, rep)
			return
		}
		m.repeat(c)
	default:
		m.drop(c, DropState, "the connection has ended")
	}
}

// firstREP takes over the parameters of the first REP. It rejects the REP if the peer's QP or
// communication ID already belongs to another connection.
func (m *Manager) firstREP(c *conn, rep *mad.REP) {
	if !isQPN(rep.LocalQPN) {
		m.drop(c, DropMalformed, "no QPN that a connection can have")
		return
	}
	m.took(c, "")
	p := &c.p
	p.RemoteCommID, p.RemoteCAGUID, p.RemoteQPN = rep.LocalCommID, rep.LocalCAGUID, rep.LocalQPN
	if old := m.byRemoteQP[c.remoteQP()]; old != nil {
		m.decide(c, "the peer's QP belongs to another connection")
		m.refuseStale(c, ReasonStale)
		m.stale(old)
		return
	}
	if m.byRemote[c.remoteID()] != nil {
		m.decide(c, "the peer uses its communication ID twice")
		m.refuseStale(c, ReasonDuplicateCommID)
		return
	}
	m.indexRemote(c)
	p.SendPSN, p.RNRRetry, p.RemoteSRQ = rep.StartingPSN, rep.RNRRetryCount, rep.SRQ
	p.InitiatorDepth, p.ResponderResources = rep.ResponderResources, rep.InitiatorDepth // they change sides
	p.AckTimeout = ackTimeout(rep.TargetACKDelay, p.AckTimeout)
	p.PrivateData = slices.Clone(rep.PrivateData[:])
	m.setState(c, StateREPRcvd)
	m.setTimer(c, min(c.patience, m.opt.UserTimeout))
	m.act(ReplyReceived{Handle: c.handle, Params: c.p})
}

// refuseStale rejects the REP of c before the peer's IDs are indexed.
func (m *Manager) refuseStale(c *conn, reason Reason) {
	m.setState(c, StateREPRcvd) // in this state the REJ names the REP
	m.refuse(c, reason, nil, c.private)
	m.end(c, Failed{Handle: c.handle, Cause: Refused, Reason: reason})
}

// ackTimeout lengthens an ACK timeout by the peer's target ACK delay. Both are exponents of two. It
// returns about the exponent of their sum: the larger one, plus 1 if they differ by 1 at most, but
// not more than 31 (as Linux's cm_ack_timeout, drivers/infiniband/core/cm.c).
func ackTimeout(delay, timeout ib.Timeout) ib.Timeout {
	delay, timeout = delay&31, timeout&31 // timeout is the packet life time + 1
	t := max(delay, timeout)
	if min(delay, timeout)+1 >= t {
		t++
	}
	return min(t, 31)
}

// ready sends the RTU, because the user's QP is in RTS now.
func (m *Manager) ready(ev Ready) {
	c := m.user(ev.Handle, "Ready", StateREPRcvd, StateMRAREPSent)
	if c == nil {
		return
	}
	m.timers.Stop(c)
	m.setState(c, StateEstablished)
	rtu := mad.RTU{TransactionID: c.tid, LocalCommID: c.p.LocalCommID, RemoteCommID: c.p.RemoteCommID}
	fill(rtu.PrivateData[:], ev.PrivateData)
	m.send(c, rtu)
	m.act(Established{Handle: c.handle, Params: c.p, Active: true})
	c.p.PrivateData = nil // the user has it
}
