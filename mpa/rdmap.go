package mpa

import (
	"encoding/binary"
	"fmt"
)

// An Opcode is a kind of RDMAP message (RFC 5040 section 4.1).
type Opcode uint8

// RDMAP messages.
const (
	OpWrite Opcode = iota
	OpReadRequest
	OpReadResponse
	OpSend
	OpSendInvalidate
	OpSendSolicited
	OpSendSolicitedInvalidate
	OpTerminate
)

// String names the message.
func (o Opcode) String() string {
	names := [...]string{"Write", "Read Request", "Read Response", "Send", "Send with Invalidate", "Send with SE",
		"Send with SE and Invalidate", "Terminate"}
	if int(o) < len(names) {
		return names[o]
	}
	return fmt.Sprintf("opcode %#x", uint8(o))
}

func (o Opcode) tagged() bool { return o == OpWrite || o == OpReadResponse }

// Invalidates reports whether the message names an STag to invalidate.
func (o Opcode) Invalidates() bool { return o == OpSendInvalidate || o == OpSendSolicitedInvalidate }

// Solicited reports whether the message asks for an event at the receiver.
func (o Opcode) Solicited() bool { return o == OpSendSolicited || o == OpSendSolicitedInvalidate }

// Send reports whether the message is one of the four Sends.
func (o Opcode) Send() bool { return o >= OpSend && o <= OpSendSolicitedInvalidate }

// Queue numbers of untagged messages (RFC 5040 section 4.2).
const (
	QueueSend      = 0
	QueueRead      = 1
	QueueTerminate = 2
)

func (o Opcode) queue() uint32 {
	switch o {
	case OpReadRequest:
		return QueueRead
	case OpTerminate:
		return QueueTerminate
	}
	return QueueSend
}

// Lengths of DDP headers, RDMAP's octet included, and of what follows them.
const (
	TaggedLen      = 14
	UntaggedLen    = 18
	ReadRequestLen = 28
	terminateLen   = 4
)

const (
	ddpTagged, ddpLast       = 0x80, 0x40
	ddpVersion, rdmapVersion = 0x01, 0x40
)

// A Segment is a DDP segment of an RDMAP message (RFC 5041 section 4).
type Segment struct {
	Opcode Opcode
	Last   bool // the last one of its message

	STag uint32 // tagged; of Sends that invalidate: the STag to invalidate
	TO   uint64 // tagged: target offset

	QN, MSN, MO uint32 // untagged: queue, message (from 1), offset in it

	Payload []byte
}

// Tagged reports whether the segment is tagged: it names the STag and offset where its payload goes.
func (s *Segment) Tagged() bool { return s.Opcode.tagged() }

// AppendHeader appends the DDP and RDMAP headers. The payload follows them.
func (s *Segment) AppendHeader(b []byte) []byte {
	control := byte(ddpVersion)
	if s.Last {
		control |= ddpLast
	}
	if s.Tagged() {
		b = append(b, control|ddpTagged, rdmapVersion|byte(s.Opcode))
		b = binary.BigEndian.AppendUint32(b, s.STag)
		return binary.BigEndian.AppendUint64(b, s.TO)
	}
	b = append(b, control, rdmapVersion|byte(s.Opcode))
	var inv uint32
	if s.Opcode.Invalidates() {
		inv = s.STag
	}
	b = binary.BigEndian.AppendUint32(b, inv)
	b = binary.BigEndian.AppendUint32(b, s.QN)
	b = binary.BigEndian.AppendUint32(b, s.MSN)
	return binary.BigEndian.AppendUint32(b, s.MO)
}

// ParseSegment reads a ULPDU. Reserved bits are not looked at. The payload is a
// part of b.
func ParseSegment(b []byte) (s Segment, err *TermError) {
	if len(b) < TaggedLen {
		return s, termError(DDPCatastrophic, "ULPDU of %d octets", len(b))
	}
	tagged := b[0]&ddpTagged != 0
	s.Opcode, s.Last = Opcode(b[1]&0x0f), b[0]&ddpLast != 0
	switch {
	case b[0]&0x03 != ddpVersion && tagged:
		return s, termError(DDPTaggedVersion, "%d", b[0]&0x03)
	case b[0]&0x03 != ddpVersion:
		return s, termError(DDPUntaggedVersion, "%d", b[0]&0x03)
	case b[1]&0xc0 != rdmapVersion:
		return s, termError(RDMAPVersion, "%d", b[1]>>6)
	case s.Opcode > OpTerminate || s.Opcode.tagged() != tagged:
		return s, termError(RDMAPOpcode, "%v, tagged %v", s.Opcode, tagged)
	case tagged:
		s.STag, s.TO = binary.BigEndian.Uint32(b[2:]), binary.BigEndian.Uint64(b[6:])
		s.Payload = b[TaggedLen:]
		return s, nil
	case len(b) < UntaggedLen:
		return s, termError(DDPCatastrophic, "untagged ULPDU of %d octets", len(b))
	}
	s.STag = binary.BigEndian.Uint32(b[2:])
	s.QN, s.MSN, s.MO = binary.BigEndian.Uint32(b[6:]), binary.BigEndian.Uint32(b[10:]), binary.BigEndian.Uint32(b[14:])
	s.Payload = b[UntaggedLen:]
	switch {
	case s.QN > QueueTerminate:
		return s, termError(DDPQueue, "%d", s.QN)
	case s.QN != s.Opcode.queue():
		return s, termError(RDMAPOpcode, "%v on queue %d", s.Opcode, s.QN)
	}
	return s, nil
}

// RTR returns which kind of RTR indication the segment is, 0 if none.
func (s *Segment) RTR() RTRTypes {
	switch {
	case !s.Last:
	case s.Opcode == OpWrite && len(s.Payload) == 0:
		return RTRWrite
	case (s.Opcode == OpSend || s.Opcode == OpSendSolicited) && len(s.Payload) == 0 && s.MO == 0:
		return RTRSend
	case s.Opcode == OpReadRequest && s.MO == 0:
		var r ReadRequest
		if r.UnmarshalBinary(s.Payload) == nil && r.Size == 0 {
			return RTRRead
		}
	}
	return 0
}

// String names the message and its size.
func (s *Segment) String() string { return fmt.Sprintf("%v of %d octets", s.Opcode, len(s.Payload)) }

// rtrSTag is the STag that our RTR indications name. The receiver does not look at it (RFC
// 5041 section 5.2), but some hardware dislikes 0.
const rtrSTag = 1

// AppendRTR appends the ULPDU of an RTR indication of one kind. A Send is message 1 of
// queue 0, a Read message 1 of queue 1; the user's own messages follow it.
func AppendRTR(b []byte, t RTRTypes) []byte {
	switch t {
	case RTRSend:
		return (&Segment{Opcode: OpSend, Last: true, MSN: 1}).AppendHeader(b)
	case RTRWrite:
		return (&Segment{Opcode: OpWrite, Last: true, STag: rtrSTag}).AppendHeader(b)
	case RTRRead:
		b = (&Segment{Opcode: OpReadRequest, Last: true, QN: QueueRead, MSN: 1}).AppendHeader(b)
		return ReadRequest{SinkSTag: rtrSTag, SourceSTag: rtrSTag}.Append(b)
	}
	panic("mpa: not one kind of RTR indication: " + t.String())
}

// A ReadRequest is the payload of an RDMA Read Request (RFC 5040 section 4.4).
type ReadRequest struct {
	SinkSTag   uint32
	SinkTO     uint64
	Size       uint32 // octets; with 0 source STag and TO mean nothing
	SourceSTag uint32
	SourceTO   uint64
}

// Append appends the wire form.
func (r ReadRequest) Append(b []byte) []byte {
	b = binary.BigEndian.AppendUint32(b, r.SinkSTag)
	b = binary.BigEndian.AppendUint64(b, r.SinkTO)
	b = binary.BigEndian.AppendUint32(b, r.Size)
	b = binary.BigEndian.AppendUint32(b, r.SourceSTag)
	return binary.BigEndian.AppendUint64(b, r.SourceTO)
}

// UnmarshalBinary sets r from b, which holds exactly one Read Request.
func (r *ReadRequest) UnmarshalBinary(b []byte) error {
	if len(b) != ReadRequestLen {
		return termError(DDPTooLong, "Read Request of %d octets", len(b))
	}
	*r = ReadRequest{SinkSTag: binary.BigEndian.Uint32(b), SinkTO: binary.BigEndian.Uint64(b[4:]),
		Size: binary.BigEndian.Uint32(b[12:]), SourceSTag: binary.BigEndian.Uint32(b[16:]),
		SourceTO: binary.BigEndian.Uint64(b[20:])}
	return nil
}
