package softiwarp

import (
	"ipoibcm/mpa"
	"ipoibcm/verbs"
)

// receive takes a segment of the peer. Errors are [errNoReceive] (nothing has happened:
// call receive again when a receive was posted), [*mpa.TermError] for a fault of the peer,
// and [*errTerminated].
func (e *engine) receive(s *mpa.Segment) error {
	switch {
	case s.Opcode.Send():
		return e.receiveSend(s)
	case s.Opcode == mpa.OpWrite:
		return e.receiveWrite(s)
	case s.Opcode == mpa.OpReadRequest:
		return e.receiveRead(s)
	case s.Opcode == mpa.OpReadResponse:
		return e.receiveResponse(s)
	default: // a Terminate
		c, perr := mpa.ParseTerminate(s.Payload)
		if perr != nil {
			return terminate(mpa.RDMAPStream, "%v", perr)
		}
		return &errTerminated{c}
	}
}

func (e *engine) receiveSend(s *mpa.Segment) error {
	switch {
	case s.MSN != e.inMSN:
		return terminate(mpa.DDPMSN, "MSN %d, %d is due", s.MSN, e.inMSN)
	case int(s.MO) != e.recvOff:
		return terminate(mpa.DDPMO, "MO %d, %d is due", s.MO, e.recvOff)
	case !e.recvOpen:
		w, ok := e.pop()
		if !ok {
			return errNoReceive
		}
		e.recv, e.recvOpen = w, true
	}
	if len(s.Payload) > e.recv.len-e.recvOff {
		e.recvOpen = false
		e.recvd(verbs.WC{ID: e.recv.id, Status: verbs.LocalLengthError, Opcode: verbs.Recv})
		return terminate(mpa.DDPTooLong, "%d octets and more, %d are posted", e.recvOff+len(s.Payload), e.recv.len)
	}
	scatter(e.recv.sg, e.recvOff, s.Payload)
	e.recvOff += len(s.Payload)
	if !s.Last {
		return nil
	}
	wc := verbs.WC{ID: e.recv.id, Opcode: verbs.Recv, ByteLen: e.recvOff}
	e.inMSN++
	e.recvOff, e.recvOpen = 0, false
	if s.Opcode.Invalidates() {
		if !e.mem.Invalidate(s.STag) {
			e.recvd(verbs.WC{ID: wc.ID, Status: verbs.LocalProtError, Opcode: verbs.Recv})
			return terminate(mpa.RDMAPInvalidate, "STag %#x", s.STag)
		}
		wc.Flags, wc.Imm = verbs.WithInv, s.STag
	}
	e.recv = recvWQE{}
	e.recvd(wc)
	return nil
}

func (e *engine) receiveWrite(s *mpa.Segment) error {
	if len(s.Payload) == 0 {
		return nil // STag and offset mean nothing (RFC 5041 section 5.2)
	}
	if e.access&verbs.RemoteWrite == 0 {
		return terminate(mpa.RDMAPAccess, "Writes are not allowed here")
	}
	mem, err := e.mem.look(s.STag, s.TO, uint64(len(s.Payload)), verbs.RemoteWrite)
	if err != nil {
		return err
	}
	copy(mem, s.Payload)
	return nil
}

func (e *engine) receiveRead(s *mpa.Segment) error {
	var r mpa.ReadRequest
	switch {
	case s.MSN != e.inReadMSN:
		return terminate(mpa.DDPMSN, "MSN %d of queue 1, %d is due", s.MSN, e.inReadMSN)
	case s.MO != 0 || !s.Last:
		return terminate(mpa.DDPMO, "MO %d of queue 1", s.MO)
	case r.UnmarshalBinary(s.Payload) != nil:
		return terminate(mpa.DDPTooLong, "Read Request of %d octets", len(s.Payload))
	case len(e.responses) >= e.ird:
		e.overIRD.Add(1)
		return terminate(mpa.RDMAPStream, "more than %d Reads outstanding", e.ird)
	}
	e.inReadMSN++
	if r.Size > 0 {
		if e.access&verbs.RemoteRead == 0 {
			return terminate(mpa.RDMAPAccess, "Reads are not allowed here")
		}
		if _, err := e.mem.look(r.SourceSTag, r.SourceTO, uint64(r.Size), verbs.RemoteRead); err != nil {
			return err
		}
	}
	e.responses = append(e.responses, r)
	return nil
}

func (e *engine) receiveResponse(s *mpa.Segment) error {
	if len(e.reads) == 0 {
		return terminate(mpa.DDPInvalidSTag, "Read Response that was not asked for")
	}
	r := &e.reads[0]
	size := 0
	if !r.rtr {
		size = e.wqe(r.wqe).len
	}
	switch {
	case len(s.Payload) > 0 && s.STag != r.stag:
		return terminate(mpa.DDPInvalidSTag, "STag %#x, the oldest Read has %#x", s.STag, r.stag)
	case len(s.Payload) > size-r.got || len(s.Payload) > 0 && s.TO != uint64(r.got):
		return terminate(mpa.DDPBounds, "%d octets at %#x, %d of %d are there", len(s.Payload), s.TO, r.got, size)
	case s.Last && r.got+len(s.Payload) != size:
		return terminate(mpa.RDMAPStream, "Read Response of %d octets, %d were asked for", r.got+len(s.Payload), size)
	}
	if !r.rtr {
		scatter(e.wqe(r.wqe).sg, r.got, s.Payload)
	}
	r.got += len(s.Payload)
	if !s.Last {
		return nil
	}
	if !r.rtr {
		e.wqe(r.wqe).filled = true
	}
	e.reads = e.reads[1:]
	e.complete()
	return nil
}

// scatter copies b into sg from octet off on. sg has room for b.
func scatter(sg [][]byte, off int, b []byte) {
	for _, d := range sg {
		if off >= len(d) {
			off -= len(d)
			continue
		}
		n := copy(d[off:], b)
		b, off = b[n:], 0
		if len(b) == 0 {
			return
		}
	}
}
