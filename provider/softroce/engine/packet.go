package engine

import (
	"ipoibcm/ib"
	"ipoibcm/verbs"
	"ipoibcm/wire/roce"
)

// HeaderMax is the longest BTH with extension headers that is ever sent:
// BTH, RETH and immediate data.
const HeaderMax = roce.MaxHeaderLen

// MaxSGE is the largest number of entries in a scatter or gather list, and so
// of payload slices in one packet.
const MaxSGE = 8

// A Packet is one packet to be sent, as pieces: header octets in Header, the
// payload where it lies. The sender puts the IP and UDP headers in front, Pad
// zero octets behind the payload, and the ICRC behind those.
//
// Payload points into buffers that were posted, or, for READ responses, into
// registered memory. It may be read until the next call of [QP.Output] for the
// same QP; keep the QP's lock, or another one that serialises Output, until the
// packet has left.
type Packet struct {
	Header     [HeaderMax]byte // BTH and extension headers, HeaderLen octets
	HeaderLen  uint8
	Pad        uint8 // zero octets after the payload, 0 to 3
	NPayload   uint8 // slices of Payload in use
	PayloadLen int   // octets in all slices, without Pad
	Payload    [MaxSGE][]byte
	// AH is the address handle that a UD packet was posted with. It is nil on RC and UC,
	// whose packets take the path given to Modify.
	AH verbs.AH
}

// Len returns the octets from BTH through padding, without ICRC.
func (p *Packet) Len() int { return int(p.HeaderLen) + p.PayloadLen + int(p.Pad) }

// Append appends BTH through padding to b. It is for tests and simulations; a
// socket gathers the pieces itself.
func (p *Packet) Append(b []byte) []byte {
	b = append(b, p.Header[:p.HeaderLen]...)
	for _, s := range p.Payload[:p.NPayload] {
		b = append(b, s...)
	}
	return append(b, make([]byte, p.Pad)...)
}

// A Source says where a received packet came from.
type Source struct {
	Src, Dst ib.GID
	// GRH becomes the first octets of a UD receive; see [roce.IPHeader.PutGRH].
	// RC and UC do not read it.
	GRH [verbs.GRHLen]byte
	// ECN is the codepoint of the IP header (RFC 3168 section 5).
	ECN uint8
}

// A Sink receives the completions and events of a QP. The methods of the QP call it,
// with the lock held that guards the QP. It must not call the QP.
type Sink interface {
	// SendDone and RecvDone deliver a completion to the send or receive CQ.
	SendDone(wc verbs.WC)
	RecvDone(wc verbs.WC)
	// Event delivers CommEst and QPFatal.
	Event(ev verbs.Event)
}

// Memory is the table of registered regions that peers may name.
type Memory interface {
	// Lookup returns the n octets at va of the region that has rkey, if it grants
	// all rights of access and they lie inside it entirely. The engine reads or
	// writes them before it returns to its caller, except for READ responses,
	// see [Packet].
	Lookup(rkey uint32, va uint64, n int, access verbs.Access) ([]byte, bool)
	// Invalidate ends the use of rkey by peers; false if it names no region.
	Invalidate(rkey uint32) bool
}

// Buffers lends the memory for packets that arrive before others. Queue pairs may share it.
type Buffers interface {
	// Get returns a buffer for one packet of any path MTU, nil if too many are in use. held
	// is how many buffers the queue pair has already.
	Get(held int) []byte
	// Put takes back what Get returned, or the beginning of it.
	Put(b []byte)
}

// A RecvWQE is a receive work request taken off a queue. SG is memory of the caller of Pop.
type RecvWQE struct {
	ID uint64
	SG [][]byte
}

// A RecvQueue is where receive work requests come from. [RecvRing] is one; a
// shared receive queue is a RecvRing behind a lock.
type RecvQueue interface {
	// Pop moves a work request into w, whose SG storage it reuses: the oldest one,
	// but any one of a shared receive queue. It returns false if there is none.
	Pop(w *RecvWQE) bool
	// Return puts back what Pop took, for somebody else. It copies w.
	Return(w *RecvWQE)
}
