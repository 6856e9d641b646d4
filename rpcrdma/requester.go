package rpcrdma

import (
	"cmp"
	"encoding/binary"
	"slices"
	"time"
)

// A call is one of ours, from Submit to Done.
type call struct {
	req      Submit // Payload is our copy
	probe    bool   // the NULL call that settles the version
	state    callState
	xid      XID
	keepXID  bool // it is sent again with the XID that it had
	vers     Version
	deadline time.Time // of the user; zero for the probe
	retries  int

	long bool // the payload goes in a Read chunk of position zero
	wide bool // it does although it had seemed to fit
	regs []reg
}

type callState uint8

const (
	callQueued callState = iota
	callRegistering
	callSent
)

// A reg is memory exposed for a call.
type reg struct {
	id          RegID
	use         regUse
	position    uint32 // of regItem
	want        int    // octets
	segs        Chunk
	buf         []byte
	inv         bool // the peer may invalidate it
	invalidated uint32
}

type regUse uint8

const (
	regPayload regUse = iota // the whole call
	regItem                  // an item of it
	regResult                // an item of the reply
	regReply                 // the whole reply
)

func (c *Conn) callByID(id uint64) *call {
	for _, k := range c.calls {
		if !k.probe && k.req.ID == id {
			return k
		}
	}
	return nil
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
	req.Results = slices.Clone(req.Results)
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
	case !c.opts.Client && (!c.settled || !c.peerReady):
		return fault(ReasonNotReady, "backward")
	case req.Option != nil:
		switch {
		case !c.settled || c.version != Version2:
			return fault(ReasonNotReady, "version two is not settled")
		case len(req.Reduce) > 0 || req.MaxReply > 0 || len(req.Results) > 0 || len(req.Option.Info) > MaxOptInfo:
			return fault(ReasonArgument, "an option with chunks, or with %d octets of information", len(req.Option.Info))
		}
		return nil
	case len(req.Payload) < 8 || binary.BigEndian.Uint32(req.Payload[4:]) != uint32(DirCall):
		return fault(ReasonArgument, "%d octets that are no call", len(req.Payload))
	case !spansFit(req.Reduce, len(req.Payload)):
		return fault(ReasonArgument, "items that are not in the payload")
	}
	return nil
}

// spansFit says whether the spans lie in n octets, in order and apart.
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

// credits is how many calls may be unanswered: one until the peer has said what
// it grants (RFC 8166 section 3.3.1, draft section 6).
func (c *Conn) credits() int {
	if c.granted == 0 {
		return 1
	}
	return min(c.opts.ask(), c.granted)
}

// pump starts calls while there are credits.
func (c *Conn) pump(dst []Action, now time.Time) []Action {
	if c.state != connUp {
		return dst
	}
	if len(c.abandoned) >= c.credits() {
		// Calls that were given up hold every credit, and one more peer that does
		// not answer cannot be told from one that never will.
		return c.close(dst, fault(ReasonStarved, "%d calls without an answer", len(c.abandoned)))
	}
	for {
		busy, next := len(c.abandoned), (*call)(nil)
		for _, k := range c.calls {
			if k.state != callQueued {
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

// begin decides how a call travels, and asks for the memory that it takes.
func (c *Conn) begin(dst []Action, now time.Time, k *call) []Action {
	k.vers = c.version
	if !k.keepXID {
		k.xid = c.newXID()
	}
	if k.req.Option == nil {
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
		if !slices.Contains(c.abandoned, x) && !slices.ContainsFunc(c.calls, func(k *call) bool { return k.xid == x && k.state != callQueued }) {
			return x
		}
	}
}

// plan fills k.regs, as if each took one segment.
func (c *Conn) plan(k *call) *Error {
	send, recv := c.limits()
	k.regs, k.long = nil, false
	var results, reply []reg
	for _, n := range k.req.Results {
		results = append(results, reg{use: regResult, want: n, segs: make(Chunk, 1)})
	}
	k.regs = results
	if n := k.req.MaxReply; n > 0 && c.header(k).len()+n > recv {
		reply = []reg{{use: regReply, want: n, segs: make(Chunk, 1)}}
	}
	tail := append(results, reply...)

	k.regs = tail
	if head := c.header(k).len(); k.wide || head+len(k.req.Payload) > send {
		items := make([]reg, 0, len(k.req.Reduce))
		moved := 0
		for _, s := range k.req.Reduce {
			items = append(items, reg{use: regItem, position: uint32(s.Offset), want: s.Len, segs: make(Chunk, 1)})
			moved += roundUp(s.Len)
		}
		k.regs = append(items, tail...)
		if k.wide || len(items) == 0 || c.header(k).len()+len(k.req.Payload)-moved > send {
			k.long = true
			k.regs = append([]reg{{use: regPayload, want: len(k.req.Payload), segs: make(Chunk, 1)}}, tail...)
			if n := c.header(k).len(); n > send {
				return fault(ReasonTooBig, "a header of %d octets, the threshold is %d", n, send)
			}
		}
	}
	if len(k.regs) > 0 && (k.req.Option != nil || !c.opts.Client && k.vers == Version1) {
		// RFC 8167 section 5.3: the peer need not take chunks there.
		return fault(ReasonTooBig, "%d octets and a reply of %d do not fit inline", len(k.req.Payload), k.req.MaxReply)
	}
	return nil
}

// len is the length of the wire form in octets.
func (h *Header) len() int {
	n := 0
	switch {
	case h.Proc == ProcOPTIONAL:
		return 28 + roundUp(len(h.OptInfo))
	case h.Vers == Version2:
		n = 36
	default:
		n = minHeader1Len
	}
	n += 24 * len(h.Reads)
	for _, w := range h.Writes {
		n += 8 + segmentLen*len(w)
	}
	if h.Reply != nil {
		n += 4 + segmentLen*len(h.Reply)
	}
	return n
}

// header makes the header of a call from its memory.
func (c *Conn) header(k *call) *Header {
	h := &Header{XID: k.xid, Vers: k.vers, Credit: uint32(c.opts.ask())}
	if o := k.req.Option; o != nil {
		h.Proc, h.OptType, h.OptInfo = ProcOPTIONAL, o.Type, o.Info
		return h
	}
	if k.long {
		h.Proc = ProcNOMSG
	}
	for _, r := range k.regs {
		switch r.use {
		case regPayload, regItem:
			for _, s := range r.segs {
				h.Reads = append(h.Reads, ReadSegment{r.position, s})
			}
		case regResult:
			h.Writes = append(h.Writes, r.segs)
		case regReply:
			h.Reply = r.segs
		}
		if h.InvHandle == 0 && k.vers == Version2 && c.opts.RecvInv && r.inv {
			h.InvHandle = r.segs[0].Handle
		}
	}
	return h
}

// registered takes the memory for a call.
func (c *Conn) registered(dst []Action, now time.Time, ev Registered) []Action {
	var k *call
	var r *reg
	for _, x := range c.calls {
		for i := range x.regs {
			if x.regs[i].id == ev.Reg && x.state == callRegistering {
				k, r = x, &x.regs[i]
			}
		}
	}
	if k == nil || r.buf != nil { // nobody waits for it any more
		if k == nil && ev.Err == nil {
			dst = append(dst, Release{Reg: ev.Reg})
		}
		return dst
	}
	if err := c.usable(k, r, ev); err != nil {
		if ev.Err == nil {
			dst = append(dst, Release{Reg: ev.Reg})
		}
		return c.pump(c.end(dst, k, err), now)
	}
	r.segs, r.buf, r.inv = slices.Clone(ev.Segments), ev.Buf, ev.Invalidatable
	for i := range k.regs {
		if k.regs[i].buf == nil {
			return dst
		}
	}
	return c.transmit(dst, now, k)
}

// usable says what is wrong with memory that was registered.
func (c *Conn) usable(k *call, r *reg, ev Registered) *Error {
	switch n := Chunk(ev.Segments).Len(); {
	case ev.Err != nil:
		return fault(ReasonRegister, "%v", ev.Err)
	case n != uint64(r.want) || len(ev.Buf) != r.want || len(ev.Segments) > MaxSegments:
		return fault(ReasonRegister, "%d octets in %d segments of %d, want %d", len(ev.Buf), len(ev.Segments), n, r.want)
	case c.own.RemoteInv && c.opts.Client && k.vers == Version1 && !ev.Invalidatable:
		// We have said that each may be invalidated (RFC 8797 section 3.2).
		return fault(ReasonRegister, "the peer may invalidate what must not be")
	}
	return nil
}

// transmit sends a call whose memory is there.
func (c *Conn) transmit(dst []Action, now time.Time, k *call) []Action {
	send, _ := c.limits()
	h := c.header(k)
	payload := k.req.Payload
	switch {
	case k.long:
		payload = nil
	case len(h.Reads) > 0:
		payload = without(payload, k.req.Reduce)
	}
	out, err := h.AppendBinary(make([]byte, 0, h.len()+len(payload)))
	if err == nil && len(out)+len(payload) > send && !k.long {
		// The memory took more segments than one each.
		dst = c.releaseAll(dst, k)
		k.wide, k.keepXID = true, true
		return c.begin(dst, now, k)
	}
	if err != nil || len(out)+len(payload) > send {
		return c.pump(c.end(dst, k, fault(ReasonTooBig, "%d octets, the threshold is %d (%v)", len(out)+len(payload), send, err)), now)
	}
	k.state, k.keepXID = callSent, false
	if c.opts.Client && !c.settled && (k.probe || k.vers == Version2) {
		c.negotiated = now.Add(c.opts.negotiateTimeout())
	}
	return append(dst, Send{Data: append(out, payload...)})
}

// invalidated notes that the peer's Send has invalidated a handle here.
func (c *Conn) invalidated(handle uint32) {
	for _, k := range c.calls {
		for i := range k.regs {
			for _, s := range k.regs[i].segs {
				if s.Handle == handle && k.state == callSent {
					k.regs[i].invalidated = handle
					return
				}
			}
		}
	}
	c.count[ReasonWrongInv]++
}

// sentCall finds the call that a message answers. Without one the message is
// a late answer to a call that was given up, or stray.
func (c *Conn) sentCall(xid XID) *call {
	for _, k := range c.calls {
		if k.state == callSent && k.xid == xid {
			return k
		}
	}
	return nil
}

// answered notes a late answer: its credit is free again.
func (c *Conn) answered(dst []Action, now time.Time, h *Header) []Action {
	if i := slices.Index(c.abandoned, h.XID); i >= 0 {
		c.abandoned = slices.Delete(c.abandoned, i, i+1)
		c.count[ReasonStray]++
		return c.pump(dst, now)
	}
	return c.drop(dst, fault(ReasonStray, "xid %v", h.XID))
}

func (c *Conn) recvReply(dst []Action, now time.Time, h *Header, payload []byte, ev Recv) []Action {
	k := c.sentCall(h.XID)
	if k == nil {
		return c.answered(dst, now, h)
	}
	if h.Vers != k.vers { // RFC 8166 section 4.2.2; the answer has the call's version
		return c.drop(dst, fault(ReasonWrongVers, "%d, the call is of %d", h.Vers, k.vers))
	}
	if (h.Proc == ProcOPTIONAL) != (k.req.Option != nil) || k.req.Option != nil && h.OptType != k.req.Option.Type {
		return c.drop(dst, fault(ReasonOption, "%v", h))
	}
	if err := makesSense(h, payload, DirReply); err != nil {
		return c.drop(dst, err)
	}
	if ev.WithInv && !k.owns(ev.Invalidated) {
		c.count[ReasonWrongInv]++
	}
	done, err := k.collect(h, payload)
	if err != nil {
		// A requester cannot complain (RFC 8166 section 4.5), and its user need not
		// wait for a better answer.
		c.count[err.Reason]++
		done = Done{Err: err}
	}
	if h.Credit == 0 {
		c.count[ReasonZeroCredits]++
	}
	c.granted = int(min(max(1, h.Credit), maxCredits))
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

func (k *call) owns(handle uint32) bool {
	for _, r := range k.regs {
		for _, s := range r.segs {
			if s.Handle == handle {
				return true
			}
		}
	}
	return false
}

// collect puts the parts of a reply together, as far as what the header says was
// written was offered.
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
		if i < len(h.Writes) { // an empty list: nothing was written
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

// written returns the octets that the peer says it has written.
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

// recvError ends a call, or chooses another version.
func (c *Conn) recvError(dst []Action, now time.Time, h *Header) []Action {
	k := c.sentCall(h.XID)
	if k == nil {
		return c.answered(dst, now, h)
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
	if c.settled && h.Credit > 0 { // draft section 6: not before a reply that is no error
		c.granted = int(min(h.Credit, maxCredits))
	}
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

// enlarge gives the reply of a call that did not run as much memory as its
// responder asks for, and says whether that makes sense (draft section 5.2.4).
func (c *Conn) enlarge(k *call, e TransportError) bool {
	if e.Processed || e.LengthNeeded == 0 || k.retries >= c.opts.maxRetries() {
		return false // a program that ran must not run twice by our doing
	}
	at, room := uint32(1), uint64(c.opts.maxLong())
	need := uint64(e.LengthNeeded)
	for i, n := 0, 0; i < len(k.regs); i++ {
		r := &k.regs[i]
		if r.use != regResult && r.use != regReply {
			continue
		}
		for j, s := range r.segs {
			if at == e.SegmentIndex {
				need += r.segs.Len() - uint64(r.segs[j].Length)
				if e.LengthNeeded <= s.Length || need > room {
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
	if e.SegmentIndex != 0 || need > room || need <= uint64(k.req.MaxReply) {
		return false
	}
	k.req.MaxReply = int(need)
	return true
}

// refusedVersion: the responder has told its range (draft section 6.2). What it
// refused was not executed.
func (c *Conn) refusedVersion(dst []Action, now time.Time, k *call, e TransportError) []Action {
	before := c.refused
	c.refused = k.vers
	v := min(e.High, c.opts.maxVersion())
	for v > 0 && (v == k.vers || v == before) { // the same question has the same answer
		v--
	}
	if v < e.Low || v < c.opts.minVersion() {
		dst = append(dst, Learned{Version: 0})
		return c.close(dst, fault(ReasonNoVersion, "the peer has %d to %d, we have %d to %d", e.Low, e.High, c.opts.minVersion(), c.opts.maxVersion()))
	}
	dst = append(dst, Learned{Version: v})
	return c.again(dst, now, k, v)
}

// assumeOne: there was no useful answer to the first message, which is what a
// peer may do that has never heard of version two.
func (c *Conn) assumeOne(dst []Action, now time.Time, k *call, err *Error) []Action {
	if k.vers != Version2 || !c.opts.speaks(Version1) {
		return c.close(dst, err)
	}
	c.count[err.Reason]++
	dst = append(dst, Learned{Version1, true})
	return c.again(dst, now, k, Version1)
}

// again sends a call from the beginning, as version v and with another XID.
func (c *Conn) again(dst []Action, now time.Time, k *call, v Version) []Action {
	c.version, c.negotiated = v, time.Time{}
	dst = c.releaseAll(dst, k)
	k.state, k.wide = callQueued, false
	return c.pump(dst, now)
}

// wake looks for what has taken too long.
func (c *Conn) wake(dst []Action, now time.Time) []Action {
	if !c.negotiated.IsZero() && !now.Before(c.negotiated) {
		for _, k := range c.calls {
			if k.state == callSent {
				return c.assumeOne(dst, now, k, fault(ReasonTimeout, "of the first message"))
			}
		}
		c.negotiated = time.Time{}
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

// end gives up a call. If it was sent, its credit stays taken until its answer
// comes.
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

// finish takes back the memory of a call and tells the user. Not before no peer
// can reach the memory does the user get what is in it.
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
