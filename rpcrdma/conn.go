package rpcrdma

import (
	"fmt"
	"slices"
	"time"
)

// A Conn is one end of one connection: the requester of its own calls and the responder to those of
// the peer, in both directions and either version.
//
// The driver posts the receive buffers of [Conn.RecvBuffers], connects with the private data of
// [Conn.Private], and passes [Connected] to Step. From then on it passes every event to Step and
// carries out the actions in their order. It posts the receive buffer of a message again before it
// carries out the actions that the message has caused. After [Disconnected] or [Close] the Conn is
// of no more use. Each connection needs a new Conn. All that a client carries over to it is the
// version of [Learned], as Options.Start.
type Conn struct {
	opts  Options
	count Counters
	state connState

	own, peer  PrivateData
	peerAt     int
	send, recv int // inline thresholds of version one, in octets

	// The version: at a client the one offered or chosen, at a server that of the first call, 0
	// before it.
	version Version
	refused Version // the version that the peer refused with ERR_VERS
	settled bool

	// Requester.
	calls      []*call // in the order of Submit
	abandoned  []XID   // calls that were given up after they were sent, and whose answer has not arrived
	granted    int     // credits that the peer has granted; 0 before it has
	nextXID    XID
	nextReg    RegID
	peerReady  bool // the peer's program expects backward calls
	negotiated time.Time

	// Responder.
	served    []*served
	grant     int
	answered  bool // a reply that is no ERROR was sent
	replied   bool // a version two reply that is no ERROR was sent
	nextServe uint64
	nextRead  ReadID
}

type connState uint8

const (
	connIdle connState = iota
	connUp
	connDead
)

// NewConn returns the machine of a new connection, before it is established.
func NewConn(o Options) (*Conn, error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	c := &Conn{opts: o, own: o.private(), peer: DefaultPrivateData(), peerAt: -1, nextXID: o.XID, grant: o.grant()}
	if o.Client {
		c.version = o.start()
	}
	c.send, c.recv = Inline(c.own, c.peer)
	return c, nil
}

// Private returns the octets that go at the beginning of the connection's private data. There are
// none if Options.Silent is set.
func (c *Conn) Private() []byte {
	if c.opts.Silent {
		return nil
	}
	b, err := c.own.AppendBinary(nil)
	if err != nil {
		panic(err) // the options were checked
	}
	return b
}

// RecvBuffers returns how many receive buffers the connection needs, and their size in octets.
// There is one for each message that the credits of both ends let the peer send, and one for the
// answer to a first message that was given up. No later agreement makes a message larger (draft
// sections 2.3 and 6.2).
func (c *Conn) RecvBuffers() (count, size int) {
	size = c.own.RecvSize
	if c.opts.maxVersion() >= Version2 {
		size = max(size, DefaultInline2)
	}
	return c.opts.ask() + c.opts.grant() + 1, size
}

// SendBuffers returns how many messages may be in flight at a time, and the length of the largest
// in octets.
func (c *Conn) SendBuffers() (count, size int) {
	count, _ = c.RecvBuffers()
	return count, max(c.own.SendSize, DefaultInline2)
}

// MaxLong returns how many octets one call moves outside of Sends at most, in each direction.
func (c *Conn) MaxLong() int { return c.opts.maxLong() }

// Counters returns the counts of faults by reason.
func (c *Conn) Counters() *Counters { return &c.count }

// Info returns the current state of the connection.
func (c *Conn) Info() Info {
	i := Info{Version: c.version, Settled: c.settled, Refused: c.refused, Own: c.own, Peer: c.peer, PeerAt: c.peerAt,
		Asked: c.opts.ask(), Granted: c.granted}
	i.SendInline, i.RecvInline = c.limits()
	i.RemoteInv = c.version == Version2 || c.own.RemoteInv && c.peer.RemoteInv
	return i
}

// limits returns the inline thresholds of the version in use: for our Sends and for the peer's.
func (c *Conn) limits() (send, recv int) {
	switch {
	case c.version != Version2:
		return c.send, c.recv
	case !c.settled:
		return DefaultInline1, DefaultInline1 // draft section 6
	}
	return DefaultInline2, DefaultInline2
}

// Deadline returns when the driver must pass [Wake]. Zero means never.
func (c *Conn) Deadline() (t time.Time) {
	first := func(u time.Time) {
		if !u.IsZero() && (t.IsZero() || u.Before(t)) {
			t = u
		}
	}
	if c.state != connUp {
		return t
	}
	first(c.negotiated)
	for _, k := range c.calls {
		first(k.deadline)
	}
	return t
}

// Step applies ev at time now and appends to dst what the driver must do, in
// order.
func (c *Conn) Step(dst []Action, now time.Time, ev Event) []Action {
	switch ev := ev.(type) {
	case Connected:
		if c.state == connIdle {
			return c.connected(dst, now, ev.Private)
		}
	case Disconnected:
		if c.state != connDead {
			return c.disconnected(dst, ev)
		}
	case Recv:
		if c.state == connUp {
			return c.receive(dst, now, ev)
		}
	case Wake:
		if c.state == connUp {
			return c.wake(dst, now)
		}
	case Submit:
		return c.submit(dst, now, ev)
	case Cancel:
		if k := c.callByID(ev.ID); k != nil && !k.probe {
			dst = c.end(dst, k, fault(ReasonCancelled, ""))
			return c.pump(dst, now)
		}
	case Registered:
		return c.registered(dst, now, ev)
	case ReleaseFailed:
		if c.state == connUp {
			return c.close(dst, fault(ReasonRelease, "memory %d", ev.Reg)) // RFC 8166 section 4.5.4
		}
	case PeerReady:
		c.peerReady = true
	case Answer:
		return c.answer(dst, ev)
	case CannotAnswer:
		return c.cannotAnswer(dst, ev)
	case ReadDone:
		return c.readDone(dst, ev)
	case SetGrant:
		c.grant = max(1, min(ev.Grant, c.opts.grant()))
	default:
		panic(fmt.Sprintf("rpcrdma: unknown event %T", ev))
	}
	return dst
}

func (c *Conn) connected(dst []Action, now time.Time, private []byte) []Action {
	c.state = connUp
	c.peer, c.peerAt = FindPrivateData(private)
	c.send, c.recv = Inline(c.own, c.peer)
	if c.opts.Client && c.opts.Program != 0 {
		null := RPCCall{Prog: c.opts.Program, Vers: c.opts.ProgVersion}
		probe := &call{probe: true, req: Submit{Payload: null.Append(nil)}}
		c.calls = append([]*call{probe}, c.calls...)
	}
	return c.pump(dst, now)
}

// disconnected ends the connection. If the first message of a client had version two and got no
// answer before the peer or the transport ended the connection, and the client speaks version one too,
// Learned makes it offer version one on the next connection (draft section 6.2).
func (c *Conn) disconnected(dst []Action, ev Disconnected) []Action {
	if !ev.Own && c.opts.Client && !c.settled && c.version == Version2 && c.opts.speaks(Version1) &&
		slices.ContainsFunc(c.calls, (*call).sent) {
		dst = append(dst, Learned{Version1, true})
	}
	text := "by the peer or the transport"
	if ev.Err != nil {
		text = ev.Err.Error()
	}
	err := fault(ReasonDisconnected, "%s", text)
	c.count[err.Reason]++
	return c.tidy(dst, err)
}

// close ends the connection because of err.
func (c *Conn) close(dst []Action, err *Error) []Action {
	c.count[err.Reason]++
	return c.tidy(append(dst, Close{err}), err)
}

// tidy releases all memory and ends all calls with err.
func (c *Conn) tidy(dst []Action, err *Error) []Action {
	c.state, c.negotiated, c.served, c.abandoned = connDead, time.Time{}, nil, nil
	for len(c.calls) > 0 {
		dst = c.finish(dst, c.calls[0], Done{Err: err})
	}
	return dst
}

// sent reports whether the call was sent and has no answer yet.
func (k *call) sent() bool { return k.state == callSent }

// drop counts err, the reason why a message is ignored.
func (c *Conn) drop(dst []Action, err *Error) []Action {
	c.count[err.Reason]++
	return dst
}

// receive does the checks that calls and replies have in common. Then it passes the message to
// recvCall, recvReply or recvError.
func (c *Conn) receive(dst []Action, now time.Time, ev Recv) []Action {
	if ev.WithInv {
		c.invalidated(ev.Invalidated)
	}
	h, payload, e := ParseHeader(ev.Data)
	err, _ := e.(*Error)
	if h.Proc != ProcERROR && !c.opts.speaks(h.Vers) && (err == nil || err.Reason != ReasonShort) {
		err = fault(ReasonVersion, "%d", h.Vers) // of all faults only ReasonShort comes before it
	}
	if err != nil {
		return c.unreadable(dst, &h, err)
	}
	if h.Proc == ProcMSGP || h.Proc == ProcDONE {
		err := fault(ReasonNeverSent, "%v", h.Proc)
		if h.Proc == ProcMSGP && !c.opts.Client {
			return c.refuse(dst, &h, err, TransportError{Code: ErrChunk})
		}
		return c.drop(dst, err)
	}
	dir, ok := h.MessageDirection(payload)
	if !ok { // only in version one, where calls go to the server
		err := fault(ReasonDirection, "cannot be told")
		if c.opts.Client {
			return c.drop(dst, err)
		}
		return c.refuse(dst, &h, err, TransportError{Code: ErrChunk})
	}
	switch {
	case h.Proc == ProcERROR:
		return c.recvError(dst, now, &h)
	case h.Proc == ProcOPTIONAL && !c.knows(h.OptType):
		return c.refuse(dst, &h, fault(ReasonOption, "type %#x", h.OptType), TransportError{Code: ErrInvalOption})
	case dir == DirCall:
		return c.recvCall(dst, &h, payload)
	}
	return c.recvReply(dst, now, &h, payload, ev)
}

func (c *Conn) knows(opt uint32) bool { return slices.Contains(c.opts.OptTypes, opt) }

// unreadable answers or drops a message that ParseHeader refused. The order of the checks is
// version, procedure, lists; an ERROR is never answered. If the direction is not known, a server
// answers as to a call, and so does a client in version two. The XID does not show the direction,
// because each direction has XIDs of its own.
func (c *Conn) unreadable(dst []Action, h *Header, err *Error) []Action {
	switch {
	case err.Reason == ReasonShort, h.Proc == ProcERROR:
		return c.drop(dst, err)
	case err.Reason == ReasonVersion && c.opts.Client:
		// A requester drops a reply that it cannot read (RFC 8166 section 4.5), and a
		// backward call has the version of our own calls (RFC 8167 section 5.1).
		return c.drop(dst, err)
	case err.Reason == ReasonVersion:
		return c.refuse(dst, h, err, TransportError{Code: ErrVers, Low: c.opts.minVersion(), High: c.opts.maxVersion()})
	case h.Vers == Version1 && c.opts.Client:
		return c.drop(dst, err) // it is taken for a reply
	case h.Vers == Version2 && err.Reason == ReasonProc:
		return c.refuse(dst, h, err, TransportError{Code: ErrInvalProc})
	case h.Vers == Version2 && h.Direction == DirReply:
		return c.drop(dst, err)
	}
	return c.refuse(dst, h, err, TransportError{Code: ErrBadXDR}) // which is ERR_CHUNK
}

// refuse counts err and answers the message of header h with an ERROR (draft
// section 5.2.4).
func (c *Conn) refuse(dst []Action, h *Header, err *Error, te TransportError) []Action {
	c.count[err.Reason]++
	return c.sendError(dst, h.XID, h.Vers, te)
}

func (c *Conn) sendError(dst []Action, xid XID, v Version, te TransportError) []Action {
	e := Header{XID: xid, Vers: v, Credit: uint32(max(1, c.grant)), Proc: ProcERROR, Error: te}
	b, err := e.AppendBinary(nil)
	if err != nil {
		panic(err) // a version with an error that it does not have
	}
	return append(dst, Send{Data: b})
}

// makesSense checks whether the parts of a message that ParseHeader could read fit together. It
// returns the first fault, or nil.
func (c *Conn) makesSense(h *Header, payload []byte, dir Direction) *Error {
	if h.Proc == ProcOPTIONAL {
		if !c.opts.beginsRPC(h.OptType, payload) {
			return nil
		}
		return headMakesSense(h.XID, payload, dir) // draft section 5.2.2
	}
	if dir == DirReply && len(h.Reads) > 0 {
		return fault(ReasonReadList, "in a reply")
	}
	if h.Proc == ProcNOMSG {
		switch {
		case len(payload) > 0:
			return fault(ReasonExtra, "%d octets behind NOMSG", len(payload))
		case dir == DirReply && h.Reply == nil, dir == DirCall && !hasPositionZero(h.Reads):
			return fault(ReasonNoChunks, "%v", dir)
		}
		return nil
	}
	if dir == DirCall && hasPositionZero(h.Reads) {
		return fault(ReasonReadList, "position zero beside a payload")
	}
	return headMakesSense(h.XID, payload, dir)
}

func hasPositionZero(reads []ReadSegment) bool {
	return slices.ContainsFunc(reads, func(s ReadSegment) bool { return s.Position == 0 })
}

// headMakesSense compares XID and msg_type of the RPC message with xid and dir, which are those of
// the transport header. It returns the fault, or nil.
func headMakesSense(xid XID, payload []byte, dir Direction) *Error {
	if len(payload) < 8 {
		return fault(ReasonNoPayload, "%d octets", len(payload))
	}
	if x, d, ok := payloadHead(payload); !ok || d != dir {
		return fault(ReasonDirection, "header %v, payload %v", dir, d)
	} else if x != xid {
		return fault(ReasonXID, "header %v, payload %v", xid, x)
	}
	return nil
}
