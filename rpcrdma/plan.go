package rpcrdma

import (
	"slices"
	"time"
)

// A reg is memory exposed for a call.
type reg struct {
	id          RegID
	use         regUse
	position    uint32 // offset in the payload, for regItem
	want        int    // octets
	segs        Chunk
	buf         []byte
	inv         bool // the peer may invalidate it
	invalidated uint32
}

type regUse uint8

const (
	regPayload regUse = iota // the whole call
	regItem                  // an item of the call
	regResult                // an item of the reply
	regReply                 // the whole reply
)

// plan sets k.regs to the memory that the call needs. It counts one segment for each. It returns
// why the call cannot be sent, or nil.
func (c *Conn) plan(k *call) *Error {
	send, recv := c.limits()
	k.regs, k.long = nil, false
	for _, n := range k.req.Results {
		k.regs = append(k.regs, reg{use: regResult, want: n, segs: make(Chunk, 1)})
	}
	if n := k.req.MaxReply; n > 0 && (k.room || c.header(k).len()+n > recv) {
		k.regs = append(k.regs, reg{use: regReply, want: n, segs: make(Chunk, 1)})
	}
	if n := c.header(k).len(); n > recv { // a reply has the same chunks
		return fault(ReasonTooBig, "a header of the reply of %d octets, the threshold is %d", n, recv)
	}
	tail := k.regs
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
		// RFC 8167 section 5.3: the peer need not take chunks in backward calls.
		return fault(ReasonTooBig, "%d octets and a reply of %d do not fit inline", len(k.req.Payload), k.req.MaxReply)
	}
	return nil
}

// len returns the length of the wire form in octets.
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

// header returns the header of a call, with the segments of its memory.
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

// registered stores memory that the driver has registered for a call, and sends the call once all
// of its memory is registered.
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
	if k == nil || r.buf != nil { // no call waits for this memory
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

// usable returns why the call cannot use memory that was registered, or nil.
func (c *Conn) usable(k *call, r *reg, ev Registered) *Error {
	switch n := Chunk(ev.Segments).Len(); {
	case ev.Err != nil:
		return fault(ReasonRegister, "%v", ev.Err)
	case n != uint64(r.want) || len(ev.Buf) != r.want || len(ev.Segments) > MaxSegments:
		return fault(ReasonRegister, "%d octets in %d segments of %d, want %d", len(ev.Buf), len(ev.Segments), n, r.want)
	case c.own.RemoteInv && c.opts.Client && k.vers == Version1 && !ev.Invalidatable:
		// Our private data has said that the peer may invalidate every handle (RFC 8797 section
		// 3.2).
		return fault(ReasonRegister, "the peer may invalidate what must not be")
	}
	return nil
}
