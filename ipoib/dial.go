package ipoib

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"ipoibcm/cm"
	"ipoibcm/ib"
	"ipoibcm/mtu"
	"ipoibcm/neigh"
	"ipoibcm/serviceid"
	"ipoibcm/wire/encap"
)

// dial begins an attempt to connect to p, or makes the next try of one.
func (f *Interface) dial(p *peer) {
	t := f.transport(p)
	if t == ib.UD {
		f.fail(p, "no mode in common")
		return
	}
	if !f.takePath(p.key.GID) {
		f.fail(p, "no path to its port")
		return
	}
	form := f.form(p)
	p.triedForm[form] = true
	c := f.newConn(p, t, form, true)
	if c == nil {
		f.fail(p, "too many connections")
		return
	}
	c.via = f.cmVia(p)
	p.dial = c
	f.peers.unused.file(p)
	f.touch(p)
}

// again makes the next try of an attempt at once, because there is another way. If maxQuickRetries
// are used up it fails the attempt.
func (f *Interface) again(p *peer, why string) {
	p.quick++
	if p.quick > maxQuickRetries {
		f.fail(p, why)
		return
	}
	f.note(Note{Kind: NoteConn, Peer: p.key, Text: "asking again: " + why})
	f.dial(p)
}

// ask sends the REQ once the QP is there.
func (f *Interface) ask(c *conn) {
	c.larger = c.trans == ib.UC && c.peer.search != nil && c.peer.search.RaiseDue(f.now)
	f.conns.lastHandle++
	c.handle, c.state = f.conns.lastHandle, connAsked
	f.conns.byHandle[c.handle] = c
	f.count(nREQSent)
	inband := ib.QPN(0)
	if c.via == ViaInband {
		inband = c.peer.key.QPN
	}
	path := f.pathTo(c.peer.key.GID)
	f.cmStep(cm.Connect{
		Path: path, Handle: c.handle, Local: f.link.GID, Remote: c.peer.key.GID, Inband: inband,
		// The QPN is the peer's UD QPN from address resolution (RFC 4755 section 3.5).
		ServiceID: serviceid.New(c.form, c.peer.key.QPN),
		Transport: c.trans, QPN: c.qpn, StartingPSN: c.psn, PathMTU: c.reqPath(f.pathMTU), PKey: f.opt.pkey(),
		SRQ:        f.opt.SRQ && c.trans == ib.RC,
		AckTimeout: cmp.Or(path.AckTimeout(), ackTimeout), RetryCount: retryCount, RNRRetry: rnrRetry,
		ResponseTimeout: cmTimeout, MaxRetries: cmRetries,
		PrivateData: f.privateData(c.receive),
	})
}

// replied takes the peer's REP to a REQ of ours.
func (f *Interface) replied(ev cm.ReplyReceived) {
	c := f.conns.byHandle[ev.Handle]
	if c == nil {
		f.count(dropStaleHandle)
		return
	}
	c.params = ev.Params
	theirs := uint32(0)
	var pd encap.PrivateData
	if pd.UnmarshalBinary(ev.PrivateData) == nil {
		theirs = pd.ReceiveMTU
	}
	if f.negotiate(c, theirs) != nil {
		// RFC 4755 section 5 names no error: we refuse with our own values, and use UD to that peer.
		f.count(nREJSent)
		f.cmStep(cm.Reject{Handle: ev.Handle, Reason: cm.ReasonInvalidMTU, PrivateData: f.privateData(c.receive)})
		return // the CM answers with Failed
	}
	f.connect(c)
	f.cmStep(cm.Ready{Handle: ev.Handle, PrivateData: f.privateData(c.receive)})
}

// dialFailed ends our attempt c, or tries another way.
func (f *Interface) dialFailed(c *conn, ev cm.Failed) {
	p := c.peer
	current := p.dial == c
	f.drop(c)
	if !current {
		return
	}
	f.count(nDialFailed)
	if ev.Cause == cm.Rejected {
		f.rejected(c, ev)
		return
	}
	if ev.Cause == cm.TimedOut {
		f.neighStep(doubted(p.key))
		f.doubtPath(p.key.GID)
		f.forgetBlackHole(p) // small packets are lost as well
		if c.via == ViaInband {
			f.unanswered(p)
		}
		if f.turn(c, "nobody answered "+c.via.where()) {
			return
		}
	}
	why := "request " + ev.Cause.String()
	if ev.Cause == cm.Refused {
		if err := f.negotiate(c, c.theirs); err != nil {
			why = err.Error()
		}
	}
	f.fail(p, why)
}

// rejected decides what a REJ to our REQ means (docs/adr/0007-both-service-ids.md).
func (f *Interface) rejected(c *conn, ev cm.Failed) {
	p := c.peer
	f.count(nREJReceived)
	p.diagnose().lastREJ = fmt.Sprintf("%v to our REQ in the %v form", ev.Reason, c.form)
	var pd encap.PrivateData
	_ = pd.UnmarshalBinary(ev.PrivateData) // too short reads as zeros
	switch ev.Reason {
	case cm.ReasonInvalidServiceID:
		f.wrongServiceID(c, pd)
	case cm.ReasonStale:
		f.again(p, "the peer took our QPN for one it still holds") // a fresh one is drawn
	case cm.ReasonInvalidMTU:
		f.wrongMTU(c, ev, pd)
	case cm.ReasonConsumer:
		if c.form == serviceid.RFC && f.link.Compare(p.key) < 0 {
			f.yield(p)
			return
		}
		f.fail(p, "rejected by the peer's user")
	default:
		f.fail(p, "rejected: "+ev.Reason.String())
	}
}

// wrongServiceID handles REJ 8: the peer listens on the other form of service ID, or it runs our
// own agent and has a new UD QPN.
func (f *Interface) wrongServiceID(c *conn, pd encap.PrivateData) {
	p := c.peer
	if pd.QPN != 0 {
		if pd.QPN != p.key.QPN {
			f.moved(p, pd.QPN)
			return
		}
		f.fail(p, "rejected: the peer does not listen")
		return
	}
	neither := p.triedForm[serviceid.RFC] && p.triedForm[serviceid.Legacy]
	switch {
	case c.via == ViaInband: // only our own kind knows in-band messages, and would have named its QPN
		f.fail(p, "rejected in-band: service ID unknown")
		return
	case neither:
		f.setClass(p, ClassUnknown, "it knows neither service ID")
	case c.form == serviceid.Legacy:
		f.setClass(p, ClassUnknown, "it rejected the 0x10 service ID")
	default:
		f.setClass(p, ClassLegacy, "it rejected the 0x01 service ID")
		neither = f.transport(p) == ib.UD // legacy peers have no UC: there is no other form to try
	}
	if neither {
		// A kernel whose CM owns QP 1 answers so, even if our agent runs beside it.
		if !f.turn(c, "QP 1 of the peer rejected every service ID") {
			f.fail(p, "rejected: both service IDs unknown")
		}
		return
	}
	f.count(nFallbacks)
	f.again(p, "with the other service ID")
}

// moved handles a peer whose UD QPN is not the one that we know. It forgets the peer's neighbour
// entries, which are out of date, and resolves the addresses again.
func (f *Interface) moved(p *peer, qpn ib.QPN) {
	f.count(nMoved)
	waiting := f.takeQueue(p)
	addrs := slices.Clone(p.addrs) // ForgetLink takes them away
	f.fail(p, fmt.Sprintf("its UD QPN is %v now", qpn))
	f.note(Note{Kind: NoteNeigh, Peer: p.key, Text: fmt.Sprintf("forgotten: REJ 8 says that its UD QPN is %v now", qpn)})
	f.neighStep(neigh.ForgetLink{LinkAddr: p.key})
	for _, pkt := range waiting {
		f.resolve(pkt)
	}
	if len(waiting) == 0 {
		for _, a := range addrs { // small packets went by UD, into the void
			f.neighStep(neigh.Resolve{IP: a})
		}
	}
}

// wrongMTU handles REJ 26. It retries once: with the path MTU in the ARI if that is smaller than
// ours, else with the Receive MTU that mtu.AfterReject chooses.
func (f *Interface) wrongMTU(c *conn, ev cm.Failed, pd encap.PrivateData) {
	p := c.peer
	if p.tried26 {
		f.fail(p, "rejected: invalid MTU, twice")
		return
	}
	p.tried26, p.diagnose().lowered = true, f.now
	if len(ev.ARI) > 0 {
		if m := ib.MTU(ev.ARI[0]); m.Octets() > 0 && m < c.reqPath(f.pathMTU) {
			p.pathMTU = m
			f.again(p, fmt.Sprintf("with path MTU %v", m))
			return
		}
	}
	m := mtu.AfterReject(c.receive, pd.ReceiveMTU)
	if _, err := mtu.Negotiate(c.receive, m, f.ipv6); err != nil {
		f.fail(p, "rejected: "+err.Error())
		return
	}
	p.receive = m
	f.again(p, fmt.Sprintf("with Receive MTU %d", m))
}

// reqPath returns the path MTU that our REQ asks for.
func (c *conn) reqPath(port ib.MTU) ib.MTU {
	path := c.mostPath(port)
	if most := c.peer.pathMTU; most != 0 {
		path = min(path, most)
	}
	if most := c.peer.probedPath(); most != 0 && !c.larger {
		path = min(path, most)
	}
	return path
}

// usedPath returns the path MTU of c once REQ and REP have settled it.
func (c *conn) usedPath(port ib.MTU) ib.MTU { return min(c.params.PathMTU, c.mostPath(port)) }

// mostPath returns the largest path MTU that we can use to the peer of c.
func (c *conn) mostPath(port ib.MTU) ib.MTU {
	if c.pathMTU != 0 {
		return min(port, c.pathMTU)
	}
	return port
}

// yield takes REJ 28 as the verdict of a crossing (RFC 4755 section 3.3). The verdict is no
// failure, and we send no new REQ. Waiting packets are sent on the connection that the peer's REQ
// opens. That REQ must arrive within reqLifetime, or up to a quarter more (chosen at random).
func (f *Interface) yield(p *peer) {
	f.count(nCrossSeen)
	f.count(nCrossYielded)
	f.judge(p, "REQs crossed: ours was rejected with 28 because our address is smaller; the peer's REQ stands")
	if p.accept != nil { // we took its REQ while p was a proven legacy peer, which knows no crossing
		f.setClass(p, ClassRFC, "it applied the rule for REQs that cross")
		f.touch(p)
		return
	}
	p.waitUntil = f.now.Add(reqLifetime + time.Duration(f.opt.Rand.Int64N(int64(reqLifetime/4))))
	f.arm(p, p.waitUntil)
	f.touch(p)
}

// waited gives up waiting for the REQ of p, which won a crossing.
func (f *Interface) waited(p *peer) {
	p.waitUntil = time.Time{}
	f.count(nCrossExpired)
	f.note(Note{Kind: NoteCrossing, Peer: p.key, Text: "the REQ that won the crossing never completed"})
	if p.failures > 0 { // the first time we ask again at once, later after a pause
		f.fail(p, "the REQ that won a crossing never completed")
		return
	}
	p.failures++
	f.dial(p)
}
