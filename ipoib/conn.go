package ipoib

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"ipoibcm/cm"
	"ipoibcm/ib"
	"ipoibcm/lru"
	"ipoibcm/mtu"
	"ipoibcm/nexthop"
	"ipoibcm/serviceid"
	"ipoibcm/verbs"
	"ipoibcm/wire/encap"
)

// RC parameters (RFC 4755 section 7.1): a loss must be repaired, or given up,
// before TCP's first timeout of 1 s. Eight times 67 ms is 0.54 s.
const (
	ackTimeout ib.Timeout  = 14 // 67 ms
	retryCount             = 7
	rnrRetry               = 7  // for ever: a slow receiver costs time, not the connection
	rnrTimer   ib.RNRTimer = 12 // 0.64 ms
	// legacyRNRWait bounds the wait after an RNR NAK from Linux. The NAK itself says 655 ms,
	// because ib_cm sets no timer for it (docs/adr/0033-short-waits-for-linux.md).
	legacyRNRWait            = 10 * time.Millisecond
	cmTimeout     ib.Timeout = 16 // 0.27 s
	cmRetries                = 7
	// connsPerHost bounds the connections with link-layer addresses of one GID.
	connsPerHost = 64
	// reqLifetime is how long we wait for the REQ of a peer that won a crossing: eight tries
	// of 400 ms.
	reqLifetime = 8 * 400 * time.Millisecond
)

// A connState is how far a connection is, beyond what cm knows.
type connState uint8

const (
	connCreating connState = iota // CreateQP is out
	connAsked                     // active: the REQ is out
	connReplied                   // passive: the REP is out
	connUp
)

// A conn is one connected QP and the CM connection that goes with it.
type conn struct {
	id     nexthop.Conn
	handle cm.Handle
	peer   *peer
	active bool
	form   serviceid.Form
	via    CMPath // of the REQ
	trans  ib.Transport
	state  connState

	qpn      ib.QPN
	psn      ib.PSN // first PSN we receive
	receive  uint32 // Receive MTU we offer
	booked   uint32 // what the UC budget holds for it, 0 for RC
	theirs   uint32 // the peer's Receive MTU
	mtu      int    // octets of IP
	pathMTU  ib.MTU // of the path to the peer; 0 means that of the port
	lid      ib.LID // of our port when c began; InfiniBand
	larger   bool   // its REQ asked for more than probes have found, because a larger size was due to be tried
	unproven bool   // its packets are larger than probes have found: no IP packets go on it yet
	params   cm.Params

	since, up, used time.Time
	use             ConnUse

	lru.Links[conn] // in conns.inUse, once it is up
}

// oneWay reports whether c carries packets in one direction only.
func (c *conn) oneWay() bool { return c.form != serviceid.RFC }

// rxOnly reports whether c was opened by a legacy peer. Nothing is ever sent on such a connection,
// because Linux does not survive that (ipoib_cm.c posts no receives there).
func (c *conn) rxOnly() bool { return c.oneWay() && !c.active }

// conns are the connections in the record (RFC 4755 section 3.2).
type conns struct {
	byID       map[nexthop.Conn]*conn
	byHandle   map[cm.Handle]*conn
	ofHost     map[ib.GID]int // how many connections there are with link-layer addresses of one GID
	up         int            // how many are established
	inUse      lru.List[conn, *conn]
	lastID     nexthop.Conn
	lastHandle cm.Handle
	gone       []nexthop.Conn // QPs to destroy at the end of the Step
}

// byAge returns the connections, oldest first.
func (s *conns) byAge() []*conn {
	return slices.SortedFunc(maps.Values(s.byID), func(a, b *conn) int { return cmp.Compare(a.id, b.id) })
}

// newConn makes the record of a connection and asks for its QP. It returns nil if that would
// exceed connsPerHost or Options.MaxConns.
func (f *Interface) newConn(p *peer, t ib.Transport, form serviceid.Form, active bool) *conn {
	if f.conns.ofHost[p.key.GID] >= connsPerHost {
		f.count(dropHostConns)
		f.note(Note{Kind: NoteConn, Peer: p.key, Text: fmt.Sprintf("%d connections with link-layer addresses of its GID: it gets no more", connsPerHost)})
		return nil
	}
	f.makeRoom()
	if len(f.conns.byID) >= f.opt.maxConns() {
		f.count(dropConns)
		f.atLimit(fmt.Sprintf("%d connections: there is no room for one more", len(f.conns.byID)))
		return nil
	}
	f.conns.lastID++
	c := &conn{id: f.conns.lastID, peer: p, active: active, form: form, trans: t,
		psn: ib.PSN(f.opt.Rand.Uint32()) & ib.PSNMask, since: f.now, used: f.now}
	if t == ib.UC {
		c.booked = f.budget.Take()
		c.receive = c.booked
	} else {
		c.receive = uint32(f.opt.receiveMTU())
	}
	if active && p.receive != 0 {
		c.receive = min(c.receive, p.receive)
	}
	if f.fab != nil {
		c.lid = f.fab.opt.Port.LID
	}
	f.conns.byID[c.id] = c
	f.conns.ofHost[p.key.GID]++
	f.do(CreateQP{Conn: c.id, Peer: p.key.GID, Transport: t,
		ReceiveMTU: int(c.receive), Init: verbs.QPAttr{State: verbs.StateInit, PKey: f.opt.pkey()}})
	return c
}

// roomAfter is how long a connection must have carried nothing to make room for another.
const roomAfter = 10 * time.Second

// makeRoom calls letIdleGo if one more connection would bring the number to fullAt.
func (f *Interface) makeRoom() {
	if len(f.conns.byID)+1 >= f.fullAt() {
		f.letIdleGo()
	}
}

// letIdleGo ends the connection that was used longest ago, and reports whether it did. It ends none
// if that connection has carried something within roomAfter, has packets without acknowledgement, or
// has a peer with waiting packets, nor if MaxConns is below 16.
func (f *Interface) letIdleGo() bool {
	c := f.conns.inUse.Oldest()
	if c == nil || f.opt.maxConns() < 16 || // one sixteenth of the limit is none: no place is kept free
		f.counted.Sub(c.used) < roomAfter || c.use.TxUnacked > 0 || len(c.peer.queue) > 0 {
		return false
	}
	f.count(nRoomMade)
	f.hangUp(c, fmt.Sprintf("there are %d, and it was used longest ago", len(f.conns.byID)))
	return true
}

// drop removes c from every record, and has settle destroy its QP at the end of the Step. It does not
// tell the CM.
func (f *Interface) drop(c *conn) {
	if f.conns.byID[c.id] != c {
		return
	}
	delete(f.conns.byID, c.id)
	if f.conns.ofHost[c.peer.key.GID]--; f.conns.ofHost[c.peer.key.GID] == 0 {
		delete(f.conns.ofHost, c.peer.key.GID)
	}
	if c.state == connUp {
		f.conns.up--
		f.conns.inUse.Remove(c)
	}
	delete(f.conns.byHandle, c.handle)
	if c.booked != 0 {
		f.budget.Release(c.booked)
	}
	p := c.peer
	if p.tx == c {
		p.tx = nil
	}
	p.noAttempt(c)
	p.rx = slices.DeleteFunc(p.rx, func(o *conn) bool { return o == c })
	if f.served(c) {
		p.failures, p.holdUntil = 0, time.Time{}
	}
	f.retire(p)
	f.touch(p)
	f.conns.gone = append(f.conns.gone, c.id) // settle destroys it after the paths have moved away
}

// noAttempt notes that c, if it was an attempt of either side, is none any more.
func (p *peer) noAttempt(c *conn) {
	if p.dial == c {
		p.dial = nil
	}
	if p.accept == c {
		p.accept = nil
	}
}

// hangUp ends c: with a DREQ if it is up, else with a REJ, or in silence if the CM does not know c yet.
func (f *Interface) hangUp(c *conn, why string) {
	if f.conns.byID[c.id] != c {
		return
	}
	n := Note{Kind: NoteConn, Peer: c.peer.key, Conn: c.id, Text: "connection closed: " + why}
	if c.state == connUp {
		n.Report = ConnectionClosed
	}
	f.note(n)
	f.drop(c) // first, so that the CM's actions about c find no record
	if c.state == connUp && c.handle != 0 {
		f.count(nDREQByUs)
	}
	f.disconnect(c)
}

// lost handles the end of c if we did not ask for it.
func (f *Interface) lost(c *conn, why string) {
	p, wasTx := c.peer, c.peer.tx == c
	young := !f.served(c)
	f.note(Note{Kind: NoteConn, Peer: p.key, Conn: c.id, Text: "connection lost: " + why, Report: ConnectionLost})
	f.drop(c)
	switch {
	case !wasTx:
	case young: // a peer that closes at once must not make us dial per packet
		f.fail(p, why)
	default:
		p.diagnose().lastFail = why // dial again at the next packet
	}
}

// served reports whether c has been up for Options.settled and packets can be sent on it. Then the
// failures before it do not count any more, and its loss is no failure.
func (f *Interface) served(c *conn) bool {
	return c.state == connUp && !c.rxOnly() && f.now.Sub(c.up) >= f.opt.settled()
}

// attrs returns the attributes that take the QP of c to RTR and to RTS.
func (f *Interface) attrs(c *conn) (rtr, rts verbs.QPAttr) {
	k := &c.params
	rtr = verbs.QPAttr{
		State: verbs.StateRTR,
		Path: verbs.AHAttr{SGID: k.Local, DGID: k.Remote, FlowLabel: k.FlowLabel,
			TrafficClass: k.TrafficClass, HopLimit: k.HopLimit, SL: k.SL},
		PathMTU: c.usedPath(f.pathMTU), DestQPN: k.RemoteQPN, RQPSN: c.psn, MinRNRTimer: rnrTimer,
	}
	if p := k.Path; p.DLID != 0 {
		rtr.Path = p.AH()
		rtr.Path.SGID, rtr.Path.DGID = k.Local, k.Remote
	}
	rts = verbs.QPAttr{State: verbs.StateRTS, SQPSN: k.SendPSN}
	if c.trans == ib.RC {
		rts.Timeout, rts.RetryCount, rts.RNRRetry = ackTimeout, retryCount, rnrRetry
		if k.AckTimeout != 0 {
			rts.Timeout = min(k.AckTimeout, ackTimeout)
		}
		if c.form == serviceid.Legacy {
			rts.MaxRNRWait = legacyRNRWait
		}
	}
	return rtr, rts
}

// connect moves the QP of c to RTS with the parameters that the peer has sent.
func (f *Interface) connect(c *conn) {
	rtr, rts := f.attrs(c)
	f.do(ConnectQP{Conn: c.id, Peer: c.peer.key, RTR: rtr, RTS: rts})
}

// privateData returns the private data of our REQ, REP, RTU and REJ (RFC 4755 section
// 6): our UD QPN and the Receive MTU offered.
func (f *Interface) privateData(receive uint32) []byte {
	b, _ := encap.PrivateData{QPN: f.link.QPN, ReceiveMTU: receive}.AppendBinary(nil)
	return b
}

// negotiate sets c's MTU from both Receive MTUs.
func (f *Interface) negotiate(c *conn, theirs uint32) error {
	c.theirs = theirs
	m, err := mtu.Negotiate(c.receive, theirs, f.ipv6)
	c.mtu = m
	return err
}

// established makes c the connection to send on, or one more to receive from.
func (f *Interface) established(c *conn, how string) {
	p := c.peer
	c.state, c.up, c.used = connUp, f.now, f.now
	f.conns.up++
	f.conns.inUse.Push(c)
	f.remember(p, viaOf(c.params.CMQPN))
	if c.active {
		f.count(nEstablishedActive)
		if c.oneWay() {
			p.legacy = true
		} else {
			f.setClass(p, ClassRFC, "it accepted the 0x01 service ID")
		}
	} else {
		f.count(nEstablishedPassive)
		f.proved(c)
	}
	f.note(Note{Kind: NoteConn, Peer: p.key, Conn: c.id, Report: ConnectionUp,
		Text: fmt.Sprintf("%v connection up (%s), service ID %v, QPN %v to %v, MTU %d",
			c.trans, how, c.params.ServiceID, c.qpn, c.params.RemoteQPN, c.mtu)})
	f.arm(p, f.idleAt(c))
	if c.rxOnly() {
		return // it was put into p.rx when it was accepted
	}
	p.noAttempt(c)
	if d := p.dial; d != nil { // the peer was a proven legacy peer until now
		f.note(Note{Kind: NoteConn, Peer: p.key, Conn: d.id, Text: fmt.Sprintf("our %v REQ is abandoned: the peer uses 0x01", d.form)})
		f.withdraw(d)
	}
	if old := p.tx; old != nil {
		p.tx = c
		f.hangUp(old, "the peer has made a new one")
	}
	p.tx = c
	f.endAttempt(p)
	if c.trans == ib.UC {
		found := p.probedPath()
		c.unproven = found != 0 && c.usedPath(f.pathMTU) > found
		f.probe(p, ib.UC)
	}
	f.neighStep(confirmed(p.key)) // a handshake is proof that it hears us
	f.sendQueue(p)
	f.touch(p)
	f.proveLIDs(c)
}
