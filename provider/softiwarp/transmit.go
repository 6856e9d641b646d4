package softiwarp

import (
	"ipoibcm/mpa"
	"ipoibcm/verbs"
)

// post takes one send work request.
func (e *engine) post(wr *verbs.SendWR, maxSGE int) error {
	switch {
	case len(wr.SG) > maxSGE:
		return verbs.ErrInvalid
	case wr.Opcode == verbs.SendImm || wr.Opcode == verbs.WriteImm:
		return verbs.ErrNotSupported
	case wr.Opcode != verbs.Send && wr.Opcode != verbs.SendInv && wr.Opcode != verbs.Write && wr.Opcode != verbs.Read:
		return verbs.ErrInvalid
	case e.posted-e.completed == uint64(len(e.sq)):
		return verbs.ErrQueueFull
	}
	w := e.wqe(e.posted)
	*w = sendWQE{id: wr.ID, op: wr.Opcode, flags: wr.Flags, sg: w.sg[:0], inv: wr.InvKey, stag: wr.RKey, to: wr.RemoteAddr}
	for i := range wr.SG {
		w.sg = append(w.sg, wr.SG[i].Buf)
		w.len += len(wr.SG[i].Buf)
	}
	if w.len > MaxMessage {
		return verbs.ErrInvalid
	}
	e.posted++
	return nil
}

// output appends FPDUs to dst, which then holds about limit octets if there is
// that much to send.
func (e *engine) output(f *mpa.Framer, dst []byte, limit int) []byte {
	for len(dst) < limit {
		switch {
		case e.term != nil:
			if !e.termDone {
				e.termDone = true
				dst = f.Append(dst, mpa.AppendTerminate(e.head[:0], e.term.Cause), nil)
			}
			return dst
		case e.cur.kind == noMessage && !e.choose():
			return dst
		case e.cur.kind == aResponse:
			dst = e.response(f, dst)
		default:
			dst = e.request(f, dst)
		}
	}
	return dst
}

// choose begins the next message: responses and our own requests in turn. It returns false
// if there is none.
func (e *engine) choose() bool {
	request := e.started != e.posted && e.may(e.wqe(e.started))
	switch {
	case len(e.responses) > 0 && !(request && e.turn):
		e.cur, e.turn = current{kind: aResponse}, true
	case request:
		e.cur, e.turn = current{kind: aRequest}, false
		e.started++
	default:
		return false
	}
	return true
}

// may reports whether w may be sent: at most ORD Reads are outstanding (6581-9.1), and a
// fenced request waits until none is.
func (e *engine) may(w *sendWQE) bool {
	if w.flags&verbs.Fence != 0 && len(e.reads) > 0 {
		return false
	}
	return w.op != verbs.Read || len(e.reads) < e.ord
}

// stuck reports whether a Read is next and none may ever be sent.
func (e *engine) stuck() bool {
	return e.ord == 0 && e.started != e.posted && e.wqe(e.started).op == verbs.Read
}

func (e *engine) request(f *mpa.Framer, dst []byte) []byte {
	w := e.wqe(e.started - 1)
	if w.op == verbs.Read {
		e.token++
		if e.token < 2 { // 1 is the STag of RTR indications, and some hardware dislikes 0
			e.token = 2
		}
		e.reads = append(e.reads, outRead{stag: e.token, wqe: e.started - 1})
		s := mpa.Segment{Opcode: mpa.OpReadRequest, Last: true, QN: mpa.QueueRead, MSN: e.readMSN}
		e.readMSN++
		e.head = mpa.ReadRequest{SinkSTag: e.token, Size: uint32(w.len), SourceSTag: w.stag,
			SourceTO: w.to}.Append(s.AppendHeader(e.head[:0]))
		e.cur = current{}
		return f.Append(dst, e.head, nil)
	}
	s := mpa.Segment{Opcode: mpa.OpSend, MSN: e.msn, MO: uint32(e.cur.off)}
	room := e.maxULPDU - mpa.UntaggedLen
	switch {
	case w.op == verbs.Write:
		s = mpa.Segment{Opcode: mpa.OpWrite, STag: w.stag, TO: w.to + uint64(e.cur.off)}
		room = e.maxULPDU - mpa.TaggedLen
	case w.op == verbs.SendInv && w.flags&verbs.Solicited != 0:
		s.Opcode, s.STag = mpa.OpSendSolicitedInvalidate, w.inv
	case w.op == verbs.SendInv:
		s.Opcode, s.STag = mpa.OpSendInvalidate, w.inv
	case w.flags&verbs.Solicited != 0:
		s.Opcode = mpa.OpSendSolicited
	}
	n := min(room, w.len-e.cur.off)
	s.Last = e.cur.off+n == w.len
	e.head = s.AppendHeader(e.head[:0])
	dst = f.Append(dst, e.head, e.gather(w.sg, e.cur.off, n))
	if e.cur.off += n; s.Last {
		if w.op != verbs.Write {
			e.msn++
		}
		e.cur = current{}
	}
	return dst
}

// response sends a part of the answer to the peer's oldest Read. The memory is
// looked up anew each time: it may be gone.
func (e *engine) response(f *mpa.Framer, dst []byte) []byte {
	r := &e.responses[0]
	n := min(e.maxULPDU-mpa.TaggedLen, int(r.Size)-e.cur.off)
	var body []byte
	if n > 0 {
		b, err := e.mem.look(r.SourceSTag, r.SourceTO+uint64(e.cur.off), uint64(n), verbs.RemoteRead)
		if err != nil {
			e.term = err
			return dst
		}
		body = b
	}
	s := mpa.Segment{Opcode: mpa.OpReadResponse, STag: r.SinkSTag, TO: r.SinkTO + uint64(e.cur.off),
		Last: e.cur.off+n == int(r.Size)}
	e.head = s.AppendHeader(e.head[:0])
	dst = f.Append(dst, e.head, body)
	if e.cur.off += n; s.Last {
		e.responses = e.responses[1:]
		e.cur = current{}
	}
	return dst
}

// gather returns n octets of sg from off on.
func (e *engine) gather(sg [][]byte, off, n int) []byte {
	for i, b := range sg {
		if off >= len(b) {
			off -= len(b)
			continue
		}
		if off+n <= len(b) {
			return b[off : off+n]
		}
		e.scratch = append(e.scratch[:0], b[off:]...)
		for _, b := range sg[i+1:] {
			e.scratch = append(e.scratch, b[:min(len(b), n-len(e.scratch))]...)
		}
		return e.scratch
	}
	return nil
}

// written notes that TCP has taken what output returned so far.
func (e *engine) written() {
	e.handed = e.started
	if e.cur.kind == aRequest {
		e.handed-- // its last segment is still to come
	}
	e.complete()
}

// complete reports the work requests that are done, in the order in which they were posted.
func (e *engine) complete() {
	for ; e.completed != e.handed; e.completed++ {
		w := e.wqe(e.completed)
		if w.op == verbs.Read && !w.filled {
			return
		}
		if w.flags&verbs.Signaled != 0 {
			wc := verbs.WC{ID: w.id, Opcode: w.op}
			if w.op == verbs.Read {
				wc.ByteLen = w.len
			}
			e.sent(wc)
		}
		clear(w.sg)
	}
}
