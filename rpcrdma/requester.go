package rpcrdma

import (
	"cmp"
	"encoding/binary"
	"slices"
	"time"
)

// A call is one of our calls, from Submit to Done.
type call struct {
	req      Submit // Payload is our copy
	probe    bool   // the NULL call that settles the version
	state    callState
	xid      XID
	keepXID  bool // begin sends it with the XID that it has already
	vers     Version
	deadline time.Time // when CallTimeout or Submit.Timeout ends; zero for the probe
	retries  int

	long bool // the payload goes in a Read chunk of position zero
	wide bool // long is needed because the segments of the memory made the header too large
	room bool // a Reply chunk is needed because the segments left too little room for an inline reply
	regs []reg
}

type callState uint8

const (
	callQueued callState = iota
	callRegistering
	callSent
)

// inFlight reports whether the call has a credit.
func (k *call) inFlight() bool { return k.state != callQueued }

func (c *Conn) callByID(id uint64) *call {
	return first(c.calls, func(k *call) bool { return !k.probe && k.req.ID == id })
}

func (c *Conn) submit(dst []Action, now time.Time, req Submit) []Action {
	if c.callByID(req.ID) != nil {
		panic("rpcrdma: a call's ID is in use")
	}
	if err := c.submittable(&req); err != nil {
		c.count[err.Reason]++
		return append(dst, Done{ID: req.ID, Err: err})
	}
	req.Payload = slices.Clone(req.Payload)
	req.Results, req.Reduce = slices.Clone(req.Results), slices.Clone(req.Reduce)
	if req.Option != nil {
		req.Option = &Option{req.Option.Type, slices.Clone(req.Option.Info)}
	}
	c.calls = append(c.calls, &call{req: req, deadline: now.Add(cmp.Or(req.Timeout, c.opts.callTimeout()))})
	return c.pump(dst, now)
}

func (c *Conn) submittable(req *Submit) *Error {
	total := req.MaxReply
	for _, n := range req.Results {
		if n <= 0 || n > c.opts.maxLong() {
			return fault(ReasonTooBig, "a result of %d octets", n)
		}
		total += n
	}
	switch {
	case c.state == connDead:
		return fault(ReasonDisconnected, "")
	case len(c.calls) >= c.opts.maxCalls():
		return fault(ReasonTooMany, "%d", len(c.calls))
	case len(req.Payload) > c.opts.maxLong() || req.MaxReply < 0 || total > c.opts.maxLong():
		return fault(ReasonTooBig, "%d octets to send, %d to receive", len(req.Payload), total)
	case len(req.Results) > MaxSegments || len(req.Reduce) > MaxSegments:
		return fault(ReasonTooBig, "%d items to send, %d to receive", len(req.Reduce), len(req.Results))
	case !c.opts.Client && (!c.answered || !c.peerReady): // the client must have had a reply, which settles the version
		return fault(ReasonNotReady, "backward")
	case req.Option != nil:
		switch {
		case !c.settled || c.version != Version2:
			return fault(ReasonNotReady, "version two is not settled")
		case len(req.Reduce) > 0 || req.MaxReply > 0 || len(req.Results) > 0 || len(req.Option.Info) > MaxOptInfo:
			return fault(ReasonArgument, "an option with chunks, or with %d octets of information", len(req.Option.Info))
		case c.opts.beginsRPC(req.Option.Type, req.Payload) && !isRPC(req.Payload, DirCall):
			return fault(ReasonArgument, "an option with %d octets that are no call", len(req.Payload))
		}
		return nil
	case !isRPC(req.Payload, DirCall):
		return fault(ReasonArgument, "%d octets that are no call", len(req.Payload))
	case !spansFit(req.Reduce, len(req.Payload)):
		return fault(ReasonArgument, "items that are not in the payload")
	}
	return nil
}

// isRPC reports whether payload begins with the head of an RPC message of msg_type dir.
func isRPC(payload []byte, dir Direction) bool {
	_, d, ok := payloadHead(payload)
	return ok && d == dir
}

// spansFit reports whether the spans lie within n octets, in order, and do not overlap.
func spansFit(spans []Span, n int) bool {
	at := 8 // XID and msg_type stay
	for _, s := range spans {
		if s.Offset < at || s.Offset%4 != 0 || s.Len <= 0 || s.Offset > n || roundUp(s.Len) > n-s.Offset {
			return false
		}
		at = s.Offset + roundUp(s.Len)
	}
	return true
}

// without returns payload without the spans and their padding.
func without(payload []byte, spans []Span) []byte {
	var out []byte
	at := 0
	for _, s := range spans {
		out = append(out, payload[at:s.Offset]...)
		at = s.Offset + roundUp(s.Len)
	}
	return append(out, payload[at:]...)
}

// credits returns how many calls may be unanswered: one until the peer has granted credits (RFC
// 8166 section 3.3.1, draft section 6).
func (c *Conn) credits() int {
	if c.granted == 0 {
		return 1
	}
	return min(c.opts.ask(), c.granted)
}

// pump starts queued calls while there are credits.
func (c *Conn) pump(dst []Action, now time.Time) []Action {
	if c.state != connUp {
		return dst
	}
	if len(c.abandoned) >= c.credits() && !slices.ContainsFunc(c.calls, (*call).inFlight) {
		// Calls that were given up hold every credit. Their answers, which alone could free one or
		// grant more, may never come.
		return c.close(dst, fault(ReasonStarved, "%d calls without an answer", len(c.abandoned)))
	}
	for {
		busy, next := len(c.abandoned), (*call)(nil)
		for _, k := range c.calls {
			if k.inFlight() {
				busy++
			} else if next == nil {
				next = k
			}
		}
		if next == nil || busy >= c.credits() {
			return dst
		}
		dst = c.begin(dst, now, next)
		if c.state != connUp {
			return dst
		}
	}
}

// begin decides what parts of a call go into chunks, and asks for the memory that they need. It
// sends a call that needs none.
func (c *Conn) begin(dst []Action, now time.Time, k *call) []Action {
	k.vers = c.version
	if !k.keepXID {
		k.xid = c.newXID()
	}
	if k.req.Option == nil || c.opts.beginsRPC(k.req.Option.Type, k.req.Payload) {
		binary.BigEndian.PutUint32(k.req.Payload, uint32(k.xid))
	}
	if err := c.plan(k); err != nil {
		return c.end(dst, k, err)
	}
	if len(k.regs) == 0 {
		return c.transmit(dst, now, k)
	}
	k.state = callRegistering
	for i := range k.regs {
		r := &k.regs[i]
		c.nextReg++
		r.id = c.nextReg
		a := Register{Reg: r.id, Len: r.want}
		switch r.use {
		case regPayload:
			a.Data = k.req.Payload
		case regItem:
			a.Data = k.req.Payload[r.position:][:r.want]
		}
		dst = append(dst, a)
	}
	return dst
}

func (c *Conn) newXID() XID {
	for {
		x := c.nextXID
		c.nextXID++
		if !slices.Contains(c.abandoned, x) && !slices.ContainsFunc(c.calls,
			func(k *call) bool { return k.xid == x && k.inFlight() }) {
			return x
		}
	}
}

// transmit sends a call whose memory is registered.
func (c *Conn) transmit(dst []Action, now time.Time, k *call) []Action {
	send, recv := c.limits()
	h := c.header(k)
	payload := k.req.Payload
	switch {
	case k.long:
		payload = nil
	case len(h.Reads) > 0:
		payload = without(payload, k.req.Reduce)
	}
	out, err := h.AppendBinary(make([]byte, 0, h.len()+len(payload)))
	// Each registration may have taken more than one segment, which makes the header larger than
	// planned.
	reply := Header{Vers: h.Vers, Writes: h.Writes}
	wide := len(out)+len(payload) > send && !k.long
	room := k.req.MaxReply > 0 && h.Reply == nil && reply.len()+k.req.MaxReply > recv
	if err == nil && (wide || room) {
		dst = c.releaseAll(dst, k)
		k.wide, k.room, k.keepXID = k.wide || wide, k.room || room, true
		return c.pump(c.begin(dst, now, k), now)
	}
	if err != nil || len(out)+len(payload) > send {
		return c.pump(c.end(dst, k, fault(ReasonTooBig, "%d octets, the threshold is %d (%v)", len(out)+len(payload),
			send, err)), now)
	}
	reply.Reply = h.Reply
	if n := reply.len(); n > recv { // the program would run, and its reply not come
		return c.pump(c.end(dst, k, fault(ReasonTooBig, "a header of the reply of %d octets, the threshold is %d", n,
			recv)), now)
	}
	k.state, k.keepXID = callSent, false
	if c.opts.Client && !c.settled && (k.probe || k.vers == Version2) {
		c.negotiated = now.Add(c.opts.negotiateTimeout())
	}
	return append(dst, Send{Data: append(out, payload...)})
}

// wake handles the deadlines that have passed.
func (c *Conn) wake(dst []Action, now time.Time) []Action {
	if !c.negotiated.IsZero() && !now.Before(c.negotiated) {
		if k := first(c.calls, (*call).sent); k != nil {
			dst = c.silent(dst, now, k)
		}
		if c.state != connUp {
			return dst
		}
		if !c.negotiated.After(now) {
			c.negotiated = time.Time{}
		}
	}
	for i := 0; i < len(c.calls); {
		k := c.calls[i]
		if k.deadline.IsZero() || now.Before(k.deadline) {
			i++
			continue
		}
		dst = c.end(dst, k, fault(ReasonTimeout, ""))
	}
	return c.pump(dst, now)
}

// end gives up a call. If the call was sent, its credit stays taken until its answer comes.
func (c *Conn) end(dst []Action, k *call, err *Error) []Action {
	c.count[err.Reason]++
	if k.state == callSent {
		if c.opts.Client && !c.settled {
			c.negotiated = time.Time{}
		}
		c.abandoned = append(c.abandoned, k.xid)
	}
	return c.finish(dst, k, Done{Err: err})
}

// finish releases the memory of a call and appends its Done (none for the probe). Release comes
// before Done: the user gets the octets only when no peer can reach the memory any more.
func (c *Conn) finish(dst []Action, k *call, done Done) []Action {
	dst = c.releaseAll(dst, k)
	c.calls = slices.DeleteFunc(c.calls, func(x *call) bool { return x == k })
	if k.probe {
		return dst
	}
	done.ID = k.req.ID
	return append(dst, done)
}

func (c *Conn) releaseAll(dst []Action, k *call) []Action {
	for _, r := range k.regs {
		if r.id != 0 && r.buf != nil {
			dst = append(dst, Release{r.id, r.invalidated})
		}
	}
	k.regs = nil
	return dst
}
