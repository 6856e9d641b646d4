package rpcrdma

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"ipoibcm/wire"
)

const (
	// MinHeaderLen is the length of the words that every transport header begins with, in octets:
	// XID, version, credits and procedure have the same place and meaning in all versions (RFC 8166
	// section 4.1.2).
	MinHeaderLen = 16
	// minHeader1Len is the least length of a version one header with chunk lists, in octets.
	minHeader1Len = 28

	// MaxSegments bounds the segments in each of the three lists of a header, and the chunks of its
	// Write list. A header with more is refused.
	MaxSegments = 64
	// MaxOptInfo is how many octets of information an RDMA2_OPTIONAL carries at most.
	MaxOptInfo = 1024
)

// A Proc is the procedure of a message, word 3 of its header.
type Proc uint32

// Procedures: those of RFC 8166 section 4.2.4 (values 0, 1 and 4 hold in every version), and
// OPTIONAL of version two.
const (
	ProcMSG      Proc = 0 // the payload follows
	ProcNOMSG    Proc = 1 // the payload is in chunks
	ProcMSGP     Proc = 2 // version one: padded; never sent
	ProcDONE     Proc = 3 // version one: never sent
	ProcERROR    Proc = 4
	ProcOPTIONAL Proc = 5 // version two
)

var procNames = wire.Names[Proc]{ProcMSG: "MSG", ProcNOMSG: "NOMSG", ProcMSGP: "MSGP", ProcDONE: "DONE",
	ProcERROR: "ERROR", ProcOPTIONAL: "OPTIONAL"}

// String prints the procedure as the specifications name it, without its prefix.
func (p Proc) String() string { return procNames.Of(p, "proc %d") }

// An ErrCode is the error that an ERROR message reports.
type ErrCode uint32

// Error codes. ErrVers holds in every version. Code 2 is called ERR_CHUNK in version one and
// RDMA2_ERR_BAD_XDR in version two. The others exist in version two only.
const (
	ErrVers        ErrCode = 1
	ErrChunk       ErrCode = 2
	ErrBadXDR      ErrCode = 2
	ErrCantReply   ErrCode = 3
	ErrInvalProc   ErrCode = 4
	ErrInvalOption ErrCode = 5
)

var errCodeNames = wire.Names[ErrCode]{ErrVers: "VERS", ErrBadXDR: "BAD_XDR", ErrCantReply: "CANT_REPLY",
	ErrInvalProc: "INVAL_PROC", ErrInvalOption: "INVAL_OPTION"}

// String prints the code as version two names it, without its prefix.
func (e ErrCode) String() string { return errCodeNames.Of(e, "error %d") }

// A Segment is memory that its owner has exposed.
type Segment struct {
	Handle uint32 // STag or R_Key, as it goes on the wire
	Length uint32 // octets
	Offset uint64 // address, in the owner's terms
}

// A Chunk is memory that is filled or read as one piece, in the order of its segments. In a
// [Header] a nil Chunk is absent; one without segments is present.
type Chunk []Segment

// Len returns the length of all segments together, in octets.
func (c Chunk) Len() (n uint64) {
	for _, s := range c {
		n += uint64(s.Length) // at most MaxSegments of them: cannot wrap
	}
	return n
}

// A ReadSegment is an entry of a Read list. Segments of one position are one chunk.
type ReadSegment struct {
	Position uint32 // offset in the payload where the octets belong; zero is the whole payload
	Segment
}

// A TransportError is the content of an ERROR message. Which fields count
// depends on Code; the others are zero.
type TransportError struct {
	Code      ErrCode
	Low, High Version // ErrVers: the versions that are supported, inclusive

	// ErrCantReply. Processed says whether the program has run. SegmentIndex is the first segment
	// that is too short, counted from 1 over the Write list and then the Reply chunk, or 0.
	// LengthNeeded is how many octets that segment needs, or the reply if SegmentIndex is 0.
	Processed    bool
	SegmentIndex uint32
	LengthNeeded uint32
}

// A Header is a transport header of either version. Fields that its version and
// procedure do not have are zero.
type Header struct {
	XID    XID
	Vers   Version
	Credit uint32 // messages: credits asked for in calls, granted in replies
	Proc   Proc

	// Of MSG, NOMSG and MSGP; Direction and InvHandle exist in version two only.
	Direction Direction // OPTIONAL has it too
	InvHandle uint32    // the handle that the responder may invalidate, 0 if none
	Reads     []ReadSegment
	Writes    []Chunk
	Reply     Chunk // nil: no Reply chunk

	Align, Thresh uint32 // MSGP

	Error TransportError // ERROR

	OptType uint32 // OPTIONAL
	OptInfo []byte // OPTIONAL; ParseHeader returns a part of the message
}

// hasLists reports whether the procedure has chunk lists.
func (p Proc) hasLists() bool { return p == ProcMSG || p == ProcNOMSG || p == ProcMSGP }

// Handles returns the handle of every segment of the header, in the order of the wire.
func (h *Header) Handles() (all []uint32) {
	for _, s := range h.Reads {
		all = append(all, s.Handle)
	}
	for _, c := range append(slices.Clone(h.Writes), h.Reply) {
		for _, s := range c {
			all = append(all, s.Handle)
		}
	}
	return all
}

// HasHandle reports whether the header names the handle.
func (h *Header) HasHandle(handle uint32) bool { return slices.Contains(h.Handles(), handle) }

// HasChunks reports whether the header has any chunk.
func (h *Header) HasChunks() bool { return len(h.Reads) > 0 || len(h.Writes) > 0 || h.Reply != nil }

// MessageDirection returns the direction of a message with this header and payload. An ERROR is
// always a reply. A version two header has a direction field. In version one the payload's msg_type
// gives the direction. A version one NOMSG has no payload: with a Read list it is a call, with only a
// Reply chunk it is a reply. ok is false if the direction cannot be determined.
func (h *Header) MessageDirection(payload []byte) (d Direction, ok bool) {
	switch {
	case h.Proc == ProcERROR:
		return DirReply, true
	case h.Vers == Version2:
		return h.Direction, h.Proc != ProcMSGP && h.Proc <= ProcOPTIONAL
	case h.Proc == ProcNOMSG && len(h.Reads) > 0:
		return DirCall, true
	case h.Proc == ProcNOMSG:
		return DirReply, h.Reply != nil
	}
	_, d, ok = payloadHead(payload)
	return d, ok
}

// String prints the fields that the version and procedure of the header have.
func (h *Header) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "v%d %v xid=%v credit=%d", h.Vers, h.Proc, h.XID, h.Credit)
	if h.Vers == Version2 && (h.Proc.hasLists() || h.Proc == ProcOPTIONAL) {
		fmt.Fprintf(&b, " %v", h.Direction)
	}
	switch {
	case h.Proc == ProcERROR:
		fmt.Fprintf(&b, " %v", h.Error.Code)
		switch h.Error.Code {
		case ErrVers:
			fmt.Fprintf(&b, " %d-%d", h.Error.Low, h.Error.High)
		case ErrCantReply:
			fmt.Fprintf(&b, " processed=%v segment=%d needed=%d", h.Error.Processed, h.Error.SegmentIndex, h.Error.LengthNeeded)
		}
	case h.Proc == ProcOPTIONAL:
		fmt.Fprintf(&b, " type=%#x info=%x", h.OptType, h.OptInfo)
	}
	if h.InvHandle != 0 {
		fmt.Fprintf(&b, " inv=%08x", h.InvHandle)
	}
	for _, s := range h.Reads {
		fmt.Fprintf(&b, " read@%d=%v", s.Position, s.Segment)
	}
	for _, c := range h.Writes {
		fmt.Fprintf(&b, " write=%v", c)
	}
	if h.Reply != nil {
		fmt.Fprintf(&b, " reply=%v", h.Reply)
	}
	return b.String()
}

// String prints handle:length@offset.
func (s Segment) String() string { return fmt.Sprintf("%08x:%d@%#x", s.Handle, s.Length, s.Offset) }

// AppendBinary appends the wire form. It refuses what no peer would understand: an unknown version,
// a procedure or error code that the version does not have or that is never sent, an unknown
// direction, lists above MaxSegments, OptInfo above MaxOptInfo, positions that are no multiple of
// four, and in a call of version two an InvHandle that its lists do not name (draft section 5.2.3).
// An ERROR of code ErrVers may have any version.
func (h *Header) AppendBinary(b []byte) ([]byte, error) {
	start := b
	if err := h.sendable(); err != nil {
		return start, fmt.Errorf("rpcrdma: %v cannot be sent: %w", h.Proc, err)
	}
	b = appendU32(b, uint32(h.XID), uint32(h.Vers), h.Credit, uint32(h.Proc))
	switch h.Proc {
	case ProcERROR:
		b = appendU32(b, uint32(h.Error.Code))
		switch h.Error.Code {
		case ErrVers:
			b = appendU32(b, uint32(h.Error.Low), uint32(h.Error.High))
		case ErrCantReply:
			b = appendBool(b, h.Error.Processed)
			b = appendU32(b, h.Error.SegmentIndex, h.Error.LengthNeeded)
		}
	case ProcOPTIONAL:
		b = appendU32(b, uint32(h.Direction), h.OptType)
		b = appendOpaque(b, h.OptInfo)
	default:
		if h.Vers == Version2 {
			b = appendU32(b, uint32(h.Direction), h.InvHandle)
		}
		b = h.appendLists(b)
	}
	return b, nil
}

func (h *Header) appendLists(b []byte) []byte {
	for _, s := range h.Reads {
		b = appendU32(b, 1, s.Position)
		b = s.Segment.append(b)
	}
	b = appendU32(b, 0)
	for _, c := range h.Writes {
		b = c.append(appendU32(b, 1))
	}
	b = appendU32(b, 0)
	if h.Reply == nil {
		return appendU32(b, 0)
	}
	return h.Reply.append(appendU32(b, 1))
}

func (c Chunk) append(b []byte) []byte {
	b = appendU32(b, uint32(len(c)))
	for _, s := range c {
		b = s.append(b)
	}
	return b
}

func (s Segment) append(b []byte) []byte {
	return appendU32(b, s.Handle, s.Length, uint32(s.Offset>>32), uint32(s.Offset))
}

// sendable returns why h must not be sent, or nil if it may be sent.
func (h *Header) sendable() error {
	if h.Proc == ProcERROR && h.Error.Code == ErrVers {
		return nil // answers a version that we do not have
	}
	switch {
	case h.Vers != Version1 && h.Vers != Version2:
		return fmt.Errorf("version %d", h.Vers)
	case h.Proc == ProcERROR:
		if h.Error.Code < ErrVers || h.Error.Code > ErrInvalOption || h.Vers == Version1 && h.Error.Code > ErrChunk {
			return fmt.Errorf("%v in version %d", h.Error.Code, h.Vers)
		}
		return nil
	case h.Direction > DirReply:
		return fmt.Errorf("direction %d", h.Direction)
	case h.Proc == ProcOPTIONAL && h.Vers == Version2:
		if len(h.OptInfo) > MaxOptInfo {
			return fmt.Errorf("%d octets of information, at most %d", len(h.OptInfo), MaxOptInfo)
		}
		return nil
	case h.Proc != ProcMSG && h.Proc != ProcNOMSG:
		return fmt.Errorf("not in version %d", h.Vers) // MSGP and DONE: RFC 8166 section 4.6
	}
	writes := 0
	for _, c := range h.Writes {
		writes += len(c)
	}
	if len(h.Reads) > MaxSegments || len(h.Writes) > MaxSegments || writes > MaxSegments || len(h.Reply) > MaxSegments {
		return fmt.Errorf("more than %d segments in a list", MaxSegments)
	}
	if slices.ContainsFunc(h.Reads, func(s ReadSegment) bool { return s.Position%4 != 0 }) {
		return errors.New("a position that is no multiple of four")
	}
	if h.Vers == Version2 && h.Direction == DirCall && h.InvHandle != 0 && !h.HasHandle(h.InvHandle) {
		return fmt.Errorf("handle %08x may be invalidated, but is not in the lists", h.InvHandle)
	}
	return nil
}
