package rpcrdma

import "encoding/binary"

// ParseHeader reads the transport header in front of a message. payload is the rest of b behind the
// header. If the message is an ERROR, payload is nil, whatever follows the header.
//
// The error, if any, is an [*Error] whose Reason is the kind of fault. Then payload is nil, and h
// has the fields in front of the fault. The answer to the message needs them. ParseHeader does not
// check whether lists, payload and direction make sense together.
func ParseHeader(b []byte) (h Header, payload []byte, err error) {
	if len(b) < MinHeaderLen {
		return h, nil, fault(ReasonShort, "%d octets, a header has at least %d", len(b), MinHeaderLen)
	}
	r := xdrReader{b: b, what: "fixed words"}
	h.XID, h.Vers, h.Credit, h.Proc = XID(r.u32()), Version(r.u32()), r.u32(), Proc(r.u32())

	// ERR_VERS is the same in all versions. Its header has the version that was refused.
	if h.Proc == ProcERROR && len(r.b) >= 4 && binary.BigEndian.Uint32(r.b) == uint32(ErrVers) {
		h.readError(&r)
		return h.end(&r)
	}
	if h.Vers != Version1 && h.Vers != Version2 {
		return h, nil, fault(ReasonVersion, "%d", h.Vers)
	}
	if h.Vers == Version1 && h.Proc != ProcERROR && h.Proc != ProcDONE && len(b) < minHeader1Len {
		return h, nil, fault(ReasonShort, "%d octets, a header of version one has at least %d", len(b), minHeader1Len)
	}
	switch {
	case h.Proc == ProcERROR:
		h.readError(&r)
	case h.Proc == ProcMSG || h.Proc == ProcNOMSG:
		if h.Vers == Version2 {
			r.what = "direction"
			h.Direction = r.direction()
			r.what = "invalidation handle"
			h.InvHandle = r.u32()
		}
		h.readLists(&r)
	case h.Proc == ProcMSGP && h.Vers == Version1:
		r.what = "alignment"
		h.Align, h.Thresh = r.u32(), r.u32()
		h.readLists(&r)
	case h.Proc == ProcDONE && h.Vers == Version1:
	case h.Proc == ProcOPTIONAL && h.Vers == Version2:
		r.what = "optional"
		h.Direction = r.direction()
		h.OptType, h.OptInfo = r.u32(), r.opaque(MaxOptInfo)
	default:
		return h, nil, fault(ReasonProc, "%d in version %d", uint32(h.Proc), h.Vers)
	}
	return h.end(&r)
}

func (h *Header) end(r *xdrReader) (Header, []byte, error) {
	if r.err != nil {
		return *h, nil, r.err
	}
	if h.Proc == ProcERROR {
		return *h, nil, nil
	}
	return *h, r.b, nil
}

func (r *xdrReader) direction() Direction {
	d := Direction(r.u32())
	if d > DirReply {
		r.fail(ReasonEnum, "%s is %d", r.what, uint32(d))
		return DirCall // answered like a call
	}
	return d
}

func (h *Header) readError(r *xdrReader) {
	r.what = "error"
	e := &h.Error
	e.Code = ErrCode(r.u32())
	switch {
	case r.err != nil:
	case e.Code == ErrVers:
		e.Low, e.High = Version(r.u32()), Version(r.u32())
	case e.Code == ErrBadXDR: // which is ERR_CHUNK
	case h.Vers == Version1, e.Code == 0, e.Code > ErrInvalOption:
		r.fail(ReasonEnum, "%s is %d in version %d", r.what, uint32(e.Code), h.Vers)
	case e.Code == ErrCantReply:
		e.Processed, e.SegmentIndex, e.LengthNeeded = r.bool(), r.u32(), r.u32()
	}
}

func (h *Header) readLists(r *xdrReader) {
	r.what = "Read list"
	for r.bool() {
		if len(h.Reads) == MaxSegments {
			r.fail(ReasonBound, "more than %d segments in the %s", MaxSegments, r.what)
			return
		}
		s := ReadSegment{Position: r.u32(), Segment: r.segment()}
		if r.err != nil {
			return
		}
		if s.Position%4 != 0 { // RFC 8166 section 3.4.5
			r.fail(ReasonPosition, "%d is no multiple of four", s.Position)
			return
		}
		h.Reads = append(h.Reads, s)
	}
	r.what = "Write list"
	for n := 0; r.bool(); {
		if len(h.Writes) == MaxSegments {
			r.fail(ReasonBound, "more than %d chunks in the %s", MaxSegments, r.what)
			return
		}
		c := r.chunk()
		if n += len(c); n > MaxSegments {
			r.fail(ReasonBound, "more than %d segments in the %s", MaxSegments, r.what)
		}
		if r.err != nil {
			return
		}
		h.Writes = append(h.Writes, c)
	}
	r.what = "Reply chunk"
	if r.bool() {
		h.Reply = r.chunk()
	}
}

// chunk reads a counted array of segments. It is nil only after an error.
func (r *xdrReader) chunk() Chunk {
	n := r.u32()
	if n > MaxSegments {
		r.fail(ReasonBound, "%d segments in a chunk of the %s, at most %d are taken", n, r.what, MaxSegments)
	}
	if r.err == nil && int(n)*segmentLen > len(r.b) {
		r.fail(ReasonTruncated, "%s: %d segments announced, %d octets there", r.what, n, len(r.b))
	}
	if r.err != nil {
		return nil
	}
	c := make(Chunk, n)
	for i := range c {
		c[i] = r.segment()
	}
	return c
}

// segmentLen is the length of a segment in octets.
const segmentLen = 16

func (r *xdrReader) segment() Segment {
	return Segment{Handle: r.u32(), Length: r.u32(), Offset: r.u64()}
}

// payloadHead reads the first two words of an RPC message.
func payloadHead(payload []byte) (XID, Direction, bool) {
	if len(payload) < 8 {
		return 0, 0, false
	}
	d := Direction(binary.BigEndian.Uint32(payload[4:]))
	return XID(binary.BigEndian.Uint32(payload)), d, d <= DirReply
}
