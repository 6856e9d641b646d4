package rpcrdma

import (
	"cmp"
	"encoding/binary"
	"slices"
)

// served is one of the peer's calls, from its receipt to our answer.
type served struct {
	id     uint64
	h      Header
	inline []byte // the payload behind the header; a copy while chunks are read
	chunks []readChunk
	given  bool // the program has the call
}

// A readChunk is a chunk of the peer's that we read.
type readChunk struct {
	position uint32
	segs     Chunk
	read     ReadID
	data     []byte
	done     bool
}

// recvCall takes one of the peer's calls, or drops or refuses it.
func (c *Conn) recvCall(dst []Action, h *Header, payload []byte) []Action {
	bad := TransportError{Code: ErrBadXDR} // which is ERR_CHUNK
	switch {
	case c.opts.grant() == 0:
		return c.drop(dst, fault(ReasonBackward, "no calls are taken"))
	case c.opts.Client && h.Vers == Version1 && h.HasChunks() && !c.opts.BackwardChunks:
		return c.refuse(dst, h, fault(ReasonBackward, "with chunks"), bad) // RFC 8167 section 5.3
	case len(c.served) >= c.opts.grant():
		return c.drop(dst, fault(ReasonOverrun, "%d calls", len(c.served)))
	}
	if err := c.makesSense(h, payload, DirCall); err != nil {
		return c.refuse(dst, h, err, bad)
	}
	c.nextServe++
	s := &served{id: c.nextServe, h: *h, inline: payload}
	if err := s.sort(c.opts.maxLong()); err != nil {
		return c.refuse(dst, h, err, bad)
	}
	if h.Vers == Version2 && h.InvHandle != 0 && !h.HasHandle(h.InvHandle) {
		c.count[ReasonInvHandle]++ // the reply repeats it but invalidates nothing
	}
	if !c.opts.Client && !c.settled {
		c.version, c.settled = h.Vers, true
		dst = append(dst, Ready{c.Info()})
	}
	c.served = append(c.served, s)
	if s.waiting() {
		s.inline = slices.Clone(payload)
		s.h.OptInfo = nil
		for i := range s.chunks {
			if k := &s.chunks[i]; !k.done {
				c.nextRead++
				k.read = c.nextRead
				dst = append(dst, Read{k.read, k.segs, int(k.segs.Len())})
			}
		}
		return dst
	}
	return c.give(dst, s)
}

// sort gathers the Read list into chunks. It checks, before anything is read, that all segments
// make sense, that the chunks to read have at most limit octets together, and that their positions
// are in the payload.
func (s *served) sort(limit int) *Error {
	for _, c := range append(s.h.Writes, s.h.Reply) {
		for _, g := range c {
			if g.Offset+uint64(g.Length) < g.Offset {
				return fault(ReasonBound, "segment %v wraps", g)
			}
		}
	}
	base, total := len(s.inline), uint64(0)
	for _, r := range s.h.Reads {
		if total += uint64(r.Length); total > uint64(limit) || r.Offset+uint64(r.Length) < r.Offset {
			return fault(ReasonBound, "%d octets to read, at most %d are taken", total, limit)
		}
		i := slices.IndexFunc(s.chunks, func(k readChunk) bool { return k.position == r.Position })
		if i < 0 {
			i = len(s.chunks)
			s.chunks = append(s.chunks, readChunk{position: r.Position})
		}
		s.chunks[i].segs = append(s.chunks[i].segs, r.Segment)
	}
	slices.SortStableFunc(s.chunks, func(a, b readChunk) int { return cmp.Compare(a.position, b.position) })
	at := uint64(0)
	for i := range s.chunks {
		k := &s.chunks[i]
		n := k.segs.Len()
		k.done = n == 0
		if k.position == 0 {
			base = int(n)
			continue
		}
		gap := uint64(k.position) - at
		if uint64(k.position) < at || gap > uint64(base) {
			return fault(ReasonReadList, "position %d is not in the payload", k.position)
		}
		base -= int(gap)
		at = uint64(k.position) + uint64(roundUp(int(n)))
	}
	return nil
}

func (s *served) waiting() bool {
	return slices.ContainsFunc(s.chunks, func(k readChunk) bool { return !k.done })
}

// readDone takes the octets of a chunk, and gives the call to the program when it has all chunks.
func (c *Conn) readDone(dst []Action, ev ReadDone) []Action {
	for _, s := range c.served {
		for i := range s.chunks {
			k := &s.chunks[i]
			if k.read != ev.Read || k.done {
				continue
			}
			if ev.Err != nil || uint64(len(ev.Data)) != k.segs.Len() {
				// A READ that fails ends the connection.
				return c.close(dst, fault(ReasonRead, "%d of %d octets: %v", len(ev.Data), k.segs.Len(), ev.Err))
			}
			k.data, k.done = slices.Clone(ev.Data), true
			if s.waiting() {
				return dst
			}
			return c.give(dst, s)
		}
	}
	return dst
}

// give assembles a call and hands it to the program.
func (c *Conn) give(dst []Action, s *served) []Action {
	payload := s.inline
	if len(s.chunks) > 0 {
		payload = s.assemble()
		if err := headMakesSense(s.h.XID, payload, DirCall); err != nil {
			c.forget(s)
			return c.refuse(dst, &s.h, err, TransportError{Code: ErrBadXDR})
		}
	}
	s.inline, s.chunks, s.given = nil, nil, true // the program has the payload now
	a := Serve{ID: s.id, Payload: payload, MaxReply: c.room(s)}
	for _, w := range s.h.Writes {
		a.Results = append(a.Results, int(min(w.Len(), 1<<31-1)))
	}
	if s.h.Proc == ProcOPTIONAL {
		a.Option = &Option{s.h.OptType, s.h.OptInfo}
	}
	return append(dst, a)
}

// assemble returns the payload as it was before its items were moved out. The chunks need not
// include XDR's padding (RFC 8166 section 3.4.5), so assemble adds it.
func (s *served) assemble() []byte {
	rest := s.inline
	var out []byte
	for _, k := range s.chunks {
		if k.position == 0 {
			rest = k.data
			continue
		}
		gap := int(k.position) - len(out)
		out = append(out, rest[:gap]...)
		rest = rest[gap:]
		out = append(out, k.data...)
		out = append(out, zeros[:roundUp(len(k.data))-len(k.data)]...)
	}
	return append(out, rest...)
}

func (c *Conn) forget(s *served) {
	c.served = slices.DeleteFunc(c.served, func(x *served) bool { return x == s })
}

// replyLimit returns the largest message that may answer a call, in octets. A server's first answer
// in version two must be small, because its requester does not know yet that the server speaks
// version two.
func (c *Conn) replyLimit(v Version) int {
	switch {
	case v == Version1:
		return c.send
	case !c.replied && !(c.opts.Client && c.settled):
		return DefaultInline1
	}
	return DefaultInline2
}

// replyHeader returns the header of an answer for which nothing has been written yet: it has the
// Write list and the Reply chunk of the call with lengths of zero (RFC 8166 section 3.4.6).
func (c *Conn) replyHeader(s *served) *Header {
	h := &Header{XID: s.h.XID, Vers: s.h.Vers, Credit: uint32(max(1, c.grant)), Proc: s.h.Proc, Direction: DirReply,
		InvHandle: s.h.InvHandle, OptType: s.h.OptType}
	if h.Proc != ProcOPTIONAL {
		h.Proc = ProcMSG
	}
	if h.Vers == Version1 {
		h.Direction = DirCall // version one headers have no direction
	}
	for _, w := range s.h.Writes {
		chunk, _ := w.fill(0)
		h.Writes = append(h.Writes, chunk)
	}
	if s.h.Reply != nil {
		h.Reply, _ = s.h.Reply.fill(0)
	}
	return h
}

// fill spreads n octets over the segments of c, in order. whole is c with the Length of each
// segment set to the octets that it gets. used are the segments of whole with a Length above zero.
func (c Chunk) fill(n int) (whole, used Chunk) {
	whole = make(Chunk, len(c))
	for i, s := range c {
		s.Length = uint32(min(uint64(n), uint64(s.Length)))
		n -= int(s.Length)
		whole[i] = s
		if s.Length > 0 {
			used = append(used, s)
		}
	}
	return whole, used
}

// room returns how large the reply to a call can be in octets, without its results.
func (c *Conn) room(s *served) int {
	inline := c.replyLimit(s.h.Vers) - c.replyHeader(s).len()
	return int(min(max(uint64(max(0, inline)), s.h.Reply.Len()), uint64(c.opts.maxLong())))
}

// open returns the call with that ID if the program has it. It returns nil if the connection has
// ended or the call was answered.
func (c *Conn) open(id uint64) *served {
	return first(c.served, func(s *served) bool { return s.id == id && s.given })
}

// first returns the first of all for which is returns true; nil if there is none.
func first[T any](all []*T, is func(*T) bool) *T {
	if i := slices.IndexFunc(all, is); i >= 0 {
		return all[i]
	}
	return nil
}

// answer sends a reply: inline if it fits, else in the Reply chunk. The items of Reduce go into the
// Write chunks. If an item or the reply does not fit, answer sends an ERROR.
func (c *Conn) answer(dst []Action, ev Answer) []Action {
	s := c.open(ev.ID)
	if s == nil {
		return dst
	}
	option := s.h.Proc == ProcOPTIONAL
	rpc := !option || c.opts.beginsRPC(s.h.OptType, ev.Payload)
	if rpc && !isRPC(ev.Payload, DirReply) || !option && !spansFit(ev.Reduce, len(ev.Payload)) ||
		len(ev.OptInfo) > MaxOptInfo {
		panic("rpcrdma: an answer that is no reply")
	}
	h := c.replyHeader(s)
	h.OptInfo = ev.OptInfo
	payload := ev.Payload
	if rpc {
		payload = slices.Clone(payload)
		binary.BigEndian.PutUint32(payload, uint32(s.h.XID))
	}

	var writes []Action
	var moved []Span
	index := 1 // of the first segment of w, as SegmentIndex counts
	for i, w := range s.h.Writes {
		if i < len(ev.Reduce) && w.Len() > 0 {
			span := ev.Reduce[i]
			if uint64(span.Len) > w.Len() {
				return c.cantReply(dst, s, w, index, span.Len, true)
			}
			var used Chunk
			h.Writes[i], used = w.fill(span.Len)
			writes = append(writes, Write{used, payload[span.Offset:][:span.Len]})
			moved = append(moved, span)
		}
		index += len(w)
	}
	if len(moved) > 0 {
		payload = without(payload, moved)
	}
	limit := c.replyLimit(s.h.Vers)
	switch head := h.len(); {
	case head+len(payload) <= limit:
	case option || uint64(len(payload)) > s.h.Reply.Len():
		return c.cantReply(dst, s, s.h.Reply, index, len(payload), true)
	case head > limit:
		return c.cantReply(dst, s, nil, 0, 0, true)
	default:
		var used Chunk
		h.Proc = ProcNOMSG
		h.Reply, used = s.h.Reply.fill(len(payload))
		writes = append(writes, Write{used, payload})
		payload = nil
	}
	out, err := h.AppendBinary(make([]byte, 0, h.len()+len(payload)))
	if err != nil {
		panic(err) // h comes from a header that was read and checked
	}
	c.forget(s)
	c.answered = true
	c.replied = c.replied || s.h.Vers == Version2
	send := Send{Data: append(out, payload...)}
	send.Invalidate, send.WithInv = c.invalidate(s)
	return append(append(dst, writes...), send)
}

// invalidate returns the handle that the reply to s is to invalidate. ok is false if there is none.
func (c *Conn) invalidate(s *served) (handle uint32, ok bool) {
	if !c.opts.SendInv {
		return 0, false
	}
	if s.h.Vers == Version2 { // only the handle that the call names (draft section 5.2.3)
		return s.h.InvHandle, s.h.InvHandle != 0 && s.h.HasHandle(s.h.InvHandle)
	}
	// In version one both ends must allow it (RFC 8797 section 4.1), and the call must have one
	// handle only: it does not say which to invalidate.
	if !c.own.RemoteInv || !c.peer.RemoteInv {
		return 0, false
	}
	all := slices.Compact(s.h.Handles())
	if len(all) != 1 {
		return 0, false
	}
	return all[0], true
}

// cantReply sends the ERROR that need octets of a result or reply do not fit into chunk. index is
// the SegmentIndex of the chunk's first segment. The ERROR names the chunk's last segment as too
// short, and asks for what the others cannot hold. In version one it is ERR_CHUNK.
func (c *Conn) cantReply(dst []Action, s *served, chunk Chunk, index, need int, processed bool) []Action {
	c.forget(s)
	err := fault(ReasonCannotReply, "%d octets", need)
	if s.h.Vers == Version1 {
		return c.refuse(dst, &s.h, err, TransportError{Code: ErrChunk})
	}
	te := TransportError{Code: ErrCantReply, Processed: processed, LengthNeeded: uint32(need)}
	if n := len(chunk); n > 0 {
		te.SegmentIndex = uint32(index + n - 1)
		te.LengthNeeded = uint32(uint64(need) - (chunk.Len() - uint64(chunk[n-1].Length)))
	}
	return c.refuse(dst, &s.h, err, te)
}

// cannotAnswer refuses a call because its program knows beforehand that the reply will not fit.
func (c *Conn) cannotAnswer(dst []Action, ev CannotAnswer) []Action {
	s := c.open(ev.ID)
	if s == nil {
		return dst
	}
	index := 1
	for _, w := range s.h.Writes {
		index += len(w)
	}
	if uint64(ev.Need) <= s.h.Reply.Len() { // the Reply chunk would do: something else is too small
		return c.cantReply(dst, s, nil, 0, 0, false)
	}
	return c.cantReply(dst, s, s.h.Reply, index, ev.Need, false)
}
