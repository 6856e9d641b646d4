package rpcrdma

import (
	"slices"
	"time"
)

// invalidated notes that the peer's Send has invalidated a handle of ours.
func (c *Conn) invalidated(handle uint32) {
	for _, k := range c.calls {
		if i := k.owner(handle); i >= 0 && k.sent() {
			k.regs[i].invalidated = handle
			return
		}
	}
	c.count[ReasonWrongInv]++
}

// owner returns the index of the memory of k that has the handle, -1 if there is none.
func (k *call) owner(handle uint32) int {
	return slices.IndexFunc(k.regs, func(r reg) bool {
		return slices.ContainsFunc(r.segs, func(s Segment) bool { return s.Handle == handle })
	})
}

// sentCall returns the call that a message with that XID answers. It returns nil if the message
// answers a call that was given up, or none.
func (c *Conn) sentCall(xid XID) *call {
	return first(c.calls, func(k *call) bool { return k.sent() && k.xid == xid })
}

// lateAnswer handles an answer that sentCall has no call for. If the call was given up, its credit
// is free again, and the grant counts.
func (c *Conn) lateAnswer(dst []Action, now time.Time, h *Header) []Action {
	if i := slices.Index(c.abandoned, h.XID); i >= 0 {
		c.abandoned = slices.Delete(c.abandoned, i, i+1)
		c.count[ReasonStray]++
		c.takeGrant(h)
		return c.pump(dst, now)
	}
	return c.drop(dst, fault(ReasonStray, "xid %v", h.XID))
}

// takeGrant takes the credits that an answer to a call of ours grants.
func (c *Conn) takeGrant(h *Header) {
	if h.Proc == ProcERROR {
		if c.settled && h.Credit > 0 { // draft section 6: not before a reply that is no error
			c.granted = int(min(h.Credit, maxCredits))
		}
		return
	}
	if h.Credit == 0 {
		c.count[ReasonZeroCredits]++
	}
	c.granted = int(min(max(1, h.Credit), maxCredits))
}

func (c *Conn) recvReply(dst []Action, now time.Time, h *Header, payload []byte, ev Recv) []Action {
	k := c.sentCall(h.XID)
	if k == nil {
		return c.lateAnswer(dst, now, h)
	}
	if h.Vers != k.vers { // RFC 8166 section 4.2.2: the answer has the call's version
		return c.drop(dst, fault(ReasonWrongVers, "%d, the call is of %d", h.Vers, k.vers))
	}
	if (h.Proc == ProcOPTIONAL) != (k.req.Option != nil) || k.req.Option != nil && h.OptType != k.req.Option.Type {
		return c.drop(dst, fault(ReasonOption, "%v", h))
	}
	if err := c.makesSense(h, payload, DirReply); err != nil {
		return c.drop(dst, err)
	}
	if ev.WithInv && k.owner(ev.Invalidated) < 0 {
		c.count[ReasonWrongInv]++
	}
	done, err := k.collect(h, payload)
	if err != nil {
		// A requester cannot complain (RFC 8166 section 4.5), and no better answer will come, so
		// the call ends.
		c.count[err.Reason]++
		done = Done{Err: err}
	}
	c.takeGrant(h)
	settles := !c.settled && c.opts.Client
	if settles {
		c.settled, c.negotiated = true, time.Time{}
		if c.version == Version2 {
			dst = append(dst, Learned{Version: Version2})
		}
		dst = append(dst, Ready{c.Info()})
	}
	dst = c.finish(dst, k, done)
	return c.pump(dst, now)
}

// collect puts the parts of a reply together. It fails if the header says that the peer wrote more,
// or to other memory, than was offered.
func (k *call) collect(h *Header, payload []byte) (done Done, err *Error) {
	var results []*reg
	var reply *reg
	for i := range k.regs {
		switch r := &k.regs[i]; r.use {
		case regResult:
			results = append(results, r)
		case regReply:
			reply = r
		}
	}
	if len(h.Writes) > len(results) || h.Reply != nil && reply == nil {
		return done, fault(ReasonBadReply, "chunks that were not offered")
	}
	for i, r := range results {
		var got []byte
		if i < len(h.Writes) { // nothing was written for results that the list does not reach
			if got, err = r.written(h.Writes[i]); err != nil {
				return done, err
			}
		}
		done.Results = append(done.Results, got)
	}
	if h.Reply != nil {
		long, err := reply.written(h.Reply)
		if err != nil {
			return done, err
		}
		if h.Proc == ProcNOMSG {
			if err := headMakesSense(k.xid, long, DirReply); err != nil {
				return done, err
			}
			payload = long
		}
	}
	done.Payload = payload
	if k.req.Option != nil {
		done.Option = &Option{h.OptType, h.OptInfo}
	}
	return done, nil
}

// written returns the octets of r that the peer has written, according to c, the chunk in its
// reply. It fails if c does not fit the chunk that we offered.
func (r *reg) written(c Chunk) ([]byte, *Error) {
	if len(c) != len(r.segs) {
		return nil, fault(ReasonBadReply, "%d segments were offered, %d come back", len(r.segs), len(c))
	}
	n, full := 0, true
	for i, s := range c {
		mine := r.segs[i]
		if s.Handle != mine.Handle || s.Offset != mine.Offset || s.Length > mine.Length || !full && s.Length > 0 {
			return nil, fault(ReasonBadReply, "%v was offered, %v comes back", mine, s)
		}
		full = s.Length == mine.Length
		n += int(s.Length)
	}
	return r.buf[:n:n], nil
}

// recvError handles an ERROR: it ends the call, sends it again with more memory for the reply, or
// in another version.
func (c *Conn) recvError(dst []Action, now time.Time, h *Header) []Action {
	k := c.sentCall(h.XID)
	if k == nil {
		return c.lateAnswer(dst, now, h)
	}
	settling := c.opts.Client && !c.settled
	if h.Error.Code == ErrVers {
		if h.Vers != k.vers || h.Error.Low > h.Error.High || k.vers >= h.Error.Low && k.vers <= h.Error.High {
			return c.drop(dst, fault(ReasonBadRange, "%d to %d for a message of version %d", h.Error.Low, h.Error.High, k.vers))
		}
		if settling {
			return c.refusedVersion(dst, now, k, h.Error)
		}
	} else if h.Vers != k.vers {
		return c.drop(dst, fault(ReasonWrongVers, "%d, the call is of %d", h.Vers, k.vers))
	}
	if settling && k.probe {
		return c.assumeOne(dst, now, k, fault(ReasonPeerError, "%v", h.Error.Code))
	}
	c.takeGrant(h)
	if h.Error.Code == ErrCantReply && c.enlarge(k, h.Error) {
		c.count[ReasonPeerError]++
		dst = c.releaseAll(dst, k)
		k.state, k.keepXID, k.retries = callQueued, true, k.retries+1
		return c.pump(dst, now)
	}
	err := fault(ReasonPeerError, "%v", h.Error.Code)
	c.count[err.Reason]++
	c.negotiated = time.Time{}
	return c.pump(c.finish(dst, k, Done{Err: err, Transport: h.Error}), now)
}

// enlarge raises the memory for the reply of k to the length that the responder needs. It returns
// false if k must not be sent again: the program ran, the retries are used up, all memory for the
// reply together would be above MaxLong, or the ERROR makes no sense, such as with a length that
// fits (draft section 5.2.4).
func (c *Conn) enlarge(k *call, e TransportError) bool {
	if e.Processed || e.LengthNeeded == 0 || k.retries >= c.opts.maxRetries() {
		return false // we must not make a program run twice
	}
	taken := k.req.MaxReply
	for _, n := range k.req.Results {
		taken += n
	}
	at, room := uint32(1), uint64(max(0, c.opts.maxLong()-taken)) // how many octets more may be exposed
	need := uint64(e.LengthNeeded)
	for i, n := 0, 0; i < len(k.regs); i++ {
		r := &k.regs[i]
		if r.use != regResult && r.use != regReply {
			continue
		}
		for j, s := range r.segs {
			if at == e.SegmentIndex {
				need += r.segs.Len() - uint64(r.segs[j].Length)
				if e.LengthNeeded <= s.Length || need > r.segs.Len()+room {
					return false
				}
				if r.use == regReply {
					k.req.MaxReply = int(need)
				} else {
					k.req.Results[n] = int(need)
				}
				return true
			}
			at++
		}
		if r.use == regResult {
			n++
		}
	}
	if e.SegmentIndex != 0 || need > uint64(k.req.MaxReply)+room || need <= uint64(k.req.MaxReply) {
		return false
	}
	k.req.MaxReply = int(need)
	return true
}
