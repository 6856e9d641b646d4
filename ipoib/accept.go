package ipoib

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"ipoibcm/cm"
	"ipoibcm/ib"
	"ipoibcm/mtu"
	"ipoibcm/nexthop"
	"ipoibcm/serviceid"
	"ipoibcm/verbs"
	"ipoibcm/wire/encap"
)

// requested decides on a peer's REQ.
func (f *Interface) requested(ev cm.RequestReceived) {
	form, _ := serviceid.Parse(ev.ServiceID)
	var pd encap.PrivateData
	_ = pd.UnmarshalBinary(ev.PrivateData) // too short reads as zeros
	// RFC 4755 section 3.3: the UD QPN of the private data and the GID of the
	// REQ. The address may be new to us; this is how it is learnt.
	key := encap.LinkAddr{QPN: pd.QPN, GID: ev.Remote}
	if reason, info, why := f.unacceptable(ev, form, key); why != "" {
		f.refuse(ev, reason, info, why)
		return
	}
	p := f.peer(key)
	if p == nil {
		f.refuse(ev, cm.ReasonNoResources, nil, "too many peers")
		return
	}
	if viaOf(ev.CMQPN) == ViaInband && !p.provenLegacy() {
		f.heardInband(p)
	}
	if form == serviceid.RFC && pd.QPN == 0 {
		// Without a UD QPN there is nothing to compare (RFC 4755 section 3.3):
		// see docs/rfc4755.md.
		f.note(Note{Kind: NoteConn, Peer: key, Text: "a REQ without private data is taken as a legacy peer's"})
		form = serviceid.Legacy
	}
	if form == serviceid.Legacy {
		f.takeLegacy(p, ev)
		return
	}
	if !p.provenLegacy() { // else a connection must prove the contrary
		f.setClass(p, ClassRFC, "it used the 0x01 service ID")
	}
	if _, err := mtu.Negotiate(uint32(f.opt.receiveMTU()), pd.ReceiveMTU, f.ipv6); err != nil {
		f.refuse(ev, cm.ReasonInvalidMTU, nil, err.Error())
		return
	}
	if !f.cross(p, ev) {
		return
	}
	crossed := p.waitUntil
	p.waitUntil = time.Time{}
	if p.accept != nil { // the peer has given its former REQ up, or we lost track of it
		f.hangUp(p.accept, "the peer asked again")
	}
	c := f.newConn(p, ev.Transport, form, false)
	if c == nil {
		p.waitUntil = crossed
		f.refuse(ev, cm.ReasonNoQP, nil, "too many connections")
		return
	}
	if p.tx != nil { // a redial: the peer has lost its state, or wants more
		f.count(nRedials)
		f.note(Note{Kind: NoteConn, Peer: key, Conn: c.id, Text: "the peer dials again; the old connection stays until the new one is up"})
	}
	p.accept = c
	f.peers.unused.file(p)
	f.take(c, ev)
	_ = f.negotiate(c, pd.ReceiveMTU) // cannot fail: checked above, a UC offer is never below 16388
	f.touch(p)
}

// unacceptable returns why we cannot accept a REQ of the peer at key, whatever else we know of
// the peer; why is empty if we can.
func (f *Interface) unacceptable(ev cm.RequestReceived, form serviceid.Form, key encap.LinkAddr) (
	reason cm.Reason, info []byte, why string) {
	switch {
	case !f.up:
		return cm.ReasonNoResources, nil, "the interface is down"
	case key == f.link.Key(): // our address is not smaller than itself, so the rule of crossings rejects
		return cm.ReasonConsumer, nil, "the REQ is from ourselves"
	case !f.offers(ev.Transport, form):
		return cm.ReasonInvalidTransport, nil, fmt.Sprintf("%v is not offered", ev.Transport)
	case !ev.PKey.Match(f.opt.pkey()):
		// The QP will be in our partition, where the peer's would not reach it.
		return cm.ReasonUnsupported, nil, fmt.Sprintf("P_Key %v is not that of the link, %v", ev.PKey, f.opt.pkey())
	case ev.PathMTU > f.pathMTU:
		return cm.ReasonInvalidMTU, []byte{byte(f.pathMTU)}, fmt.Sprintf("path MTU %v is more than ours of %v", ev.PathMTU, f.pathMTU)
	}
	return 0, nil, ""
}

// offers reports whether we accept transport t in a REQ of this form. Options.Mode must include t,
// and the legacy form allows only RC.
func (f *Interface) offers(t ib.Transport, form serviceid.Form) bool {
	switch t {
	case ib.RC:
		return f.link.Flags&encap.FlagRC != 0
	case ib.UC:
		return f.link.Flags&encap.FlagUC != 0 && form == serviceid.RFC
	}
	return false
}

// refuse answers a REQ with a REJ, never with silence (RFC 4755 section 3.2).
func (f *Interface) refuse(ev cm.RequestReceived, r cm.Reason, ari []byte, why string) {
	f.count(nREJSent)
	f.note(Note{Kind: NoteConn, Peer: encap.LinkAddr{GID: ev.Remote}, Report: ConnectionRefused,
		Text: fmt.Sprintf("REQ rejected, %v: %s", r, why)})
	f.cmStep(cm.Reject{Handle: ev.Handle, Reason: r, ARI: ari, PrivateData: f.privateData(uint32(f.opt.receiveMTU()))})
}

// takeLegacy accepts a 0x10 REQ for receiving. The crossing rule does not apply to it
// (docs/adr/0007-both-service-ids.md), and its private data does not matter: we never send on the connection.
func (f *Interface) takeLegacy(p *peer, ev cm.RequestReceived) {
	if len(p.rx) >= maxLegacyRx {
		f.count(dropLegacyConns)
		f.hangUp(p.leastOfRx(), "the peer opened too many")
	}
	c := f.newConn(p, ev.Transport, serviceid.Legacy, false)
	if c == nil {
		f.refuse(ev, cm.ReasonNoQP, nil, "too many connections")
		return
	}
	p.rx = append(p.rx, c)
	f.peers.unused.file(p)
	f.take(c, ev)
}

// leastOfRx returns the legacy connection of p that is ended first: the oldest that is not
// established, because anybody may have asked for it in p's name, else the oldest.
func (p *peer) leastOfRx() *conn {
	if i := slices.IndexFunc(p.rx, func(c *conn) bool { return c.state != connUp }); i >= 0 {
		return p.rx[i]
	}
	return p.rx[0]
}

// proved notes the class of a peer that opened connection c. Its REQ alone proves nothing,
// because a forger of the REQ need not hear the REP. The RTU or data that establishes c
// proves it.
func (f *Interface) proved(c *conn) {
	p := c.peer
	switch sid, _ := serviceid.Parse(c.params.ServiceID); {
	case sid == serviceid.RFC:
		f.setClass(p, ClassRFC, "its connection has the 0x01 service ID")
	case p.class != ClassRFC:
		p.legacy = true
		if p.class == ClassUnknown {
			f.setClass(p, ClassLegacy, "it used the 0x10 service ID")
		}
	}
}

// take ties a REQ to the connection made for it.
func (f *Interface) take(c *conn, ev cm.RequestReceived) {
	c.handle, c.params, c.via = ev.Handle, ev.Params, viaOf(ev.CMQPN)
	f.conns.byHandle[c.handle] = c
}

// cross applies RFC 4755 section 3.3 to a 0x01 REQ from p. It reports whether
// the REQ may be accepted; if not, it has been answered.
func (f *Interface) cross(p *peer, ev cm.RequestReceived) bool {
	d := p.dial
	switch {
	case d == nil: // nothing outstanding: section 3.2
		return true
	case d.form != serviceid.RFC && p.provenLegacy():
		return true // if the connection of this REQ comes up, established ends our attempt
	case d.state == connCreating:
		f.withdraw(d) // our REQ has not left, so none crossed
		return true
	case d.form != serviceid.RFC:
		f.note(Note{Kind: NoteConn, Peer: p.key, Conn: d.id, Text: "our 0x10 REQ is abandoned: the peer uses 0x01"})
		f.withdraw(d)
		return true
	}
	f.count(nCrossSeen)
	// Compare leaves the flags octet out.
	if f.link.Compare(p.key) < 0 {
		f.count(nCrossAccepted)
		f.judge(p, "REQs crossed: the peer's was accepted because our address is smaller")
		f.withdraw(d)
		return true
	}
	f.count(nCrossRejected)
	f.judge(p, "REQs crossed: the peer's was rejected with 28 because our address is larger")
	f.refuse(ev, cm.ReasonConsumer, nil, "REQs crossed and ours wins")
	return false
}

// judge keeps and tells the verdict of a crossing.
func (f *Interface) judge(p *peer, verdict string) {
	p.diagnose().verdict = verdict
	f.note(Note{Kind: NoteCrossing, Peer: p.key, Text: verdict})
}

// withdraw abandons an attempt of ours and sends nothing to the peer.
func (f *Interface) withdraw(c *conn) {
	f.drop(c)
	if c.handle != 0 {
		f.cmStep(cm.Cancel{Handle: c.handle})
	}
}

// reply sends the REP. The QP is in RTS by then, because data may come at once.
func (f *Interface) reply(c *conn) {
	c.state = connReplied
	f.connect(c)
	f.cmStep(cm.Accept{Handle: c.handle, QPN: c.qpn, StartingPSN: c.psn, SRQ: f.opt.SRQ && c.trans == ib.RC,
		RNRRetry: rnrRetry, PrivateData: f.privateData(c.receive)})
}

// acceptFailed ends a REQ of the peer that never became a connection.
func (f *Interface) acceptFailed(c *conn, why string) {
	p := c.peer
	current := p.accept == c
	f.drop(c)
	f.count(nAcceptFailed)
	f.note(Note{Kind: NoteConn, Peer: p.key, Conn: c.id, Text: "the peer's request came to nothing: " + why})
	if current && p.tx == nil && p.dial == nil && !p.provenLegacy() { // its 0x01 REQ may be forged: no failure
		f.fail(p, "the peer's request came to nothing: "+why)
	}
}

// qpCreated sends the REQ or the REP of the connection whose QP is ready now. If the path does not
// carry the path MTU of the peer's REQ, it rejects that REQ.
func (f *Interface) qpCreated(ev QPCreated) {
	c := f.conns.byID[ev.Conn]
	if c == nil || c.state != connCreating {
		f.count(dropStaleHandle) // given up meanwhile; DestroyQP is on its way
		return
	}
	c.qpn, c.pathMTU = ev.QPN, ev.PathMTU
	if p := f.pathTo(c.peer.key.GID); p.MTU != 0 {
		c.pathMTU = p.MTU
	}
	switch most := c.acceptPath(f.pathMTU); {
	case c.active:
		f.ask(c)
	case c.params.PathMTU > most: // both sides would send packets that the path loses
		f.count(nREJSent)
		f.acceptFailed(c, fmt.Sprintf("path MTU %v is more than the path's of %v", c.params.PathMTU, most))
		f.cmStep(cm.Reject{Handle: c.handle, Reason: cm.ReasonInvalidMTU, ARI: []byte{byte(most)},
			PrivateData: f.privateData(c.receive)})
	default:
		f.reply(c)
	}
}

// connOf returns the connection that an event is about. If it was given up meanwhile, connOf
// returns nil and counts the event as late.
func (f *Interface) connOf(id nexthop.Conn) *conn {
	c := f.conns.byID[id]
	if c == nil {
		f.count(dropStaleHandle)
	}
	return c
}

// qpFailed gives up a connection whose QP the driver could not make or connect.
func (f *Interface) qpFailed(ev QPFailed) {
	c := f.connOf(ev.Conn)
	if c == nil {
		return
	}
	f.count(nQPFailed)
	f.drop(c)
	f.conns.gone = slices.DeleteFunc(f.conns.gone, func(id nexthop.Conn) bool { return id == c.id }) // the driver has done it
	if c.state == connCreating && c.handle != 0 {
		f.cmStep(cm.Reject{Handle: c.handle, Reason: cm.ReasonNoQP, PrivateData: f.privateData(c.receive)})
	} else {
		f.disconnect(c)
	}
	if p := c.peer; c.active || !c.rxOnly() && p.tx == nil && p.dial == nil {
		f.fail(p, "queue pair: "+ev.Text)
	}
}

// qpError gives up a connection whose QP broke.
func (f *Interface) qpError(ev QPError) {
	c := f.connOf(ev.Conn)
	if c == nil {
		return
	}
	f.count(nQPErrors)
	if ev.Status == verbs.RetryExceeded {
		f.neighStep(doubted(c.peer.key))
	}
	why := strings.TrimSpace(fmt.Sprintf("queue pair error: %v %s", ev.Status, ev.Text))
	switch up := c.state == connUp; {
	case up && f.swallowed(c, ev.Status):
		f.drop(c)
		c.peer.diagnose().lastFail = why
		f.dial(c.peer)
	case up:
		f.lost(c, why)
	case c.active:
		f.drop(c)
		f.fail(c.peer, why)
	default:
		f.acceptFailed(c, why)
	}
	f.disconnect(c)
}

// disconnect tells the CM to end c, which has been dropped already. The CM may not know c yet.
func (f *Interface) disconnect(c *conn) {
	switch {
	case c.handle == 0: // its QP was still being made
	case c.state == connUp: // private data stays zero (RFC 4755 section 6 is about setting up)
		f.cmStep(cm.Disconnect{Handle: c.handle})
	default:
		f.cmStep(cm.Disconnect{Handle: c.handle, PrivateData: f.privateData(c.receive)})
	}
}
