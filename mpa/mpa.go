// Package mpa is MPA, the framing of iWARP on TCP, with the enhanced connection
// establishment of RFC 6581, as pure codecs and machines.
//
// [Initiator] and [Responder] settle a connection: they turn events (octets came in, the user
// decided, a deadline passed) into actions (write these octets, tell the user, send this
// Terminate). They read no clock, start nothing and keep at most one startup frame of input. Once
// they return [Established], [Framer] and [Deframer] carry FPDUs. [Segment], [ReadRequest] and
// [Cause] are the DDP and RDMAP in the FPDUs. Package sctp, below this one in the tree, does for
// SCTP what [Initiator] and [Responder] do for TCP.
//
// The package moves no user data and owns no queue; provider/softiwarp does.
//
// Sources: RFC 6581; RFC 5044 (MPA), 5041 (DDP), 5040 (RDMAP), 6580
// (registries). Where the texts leave something open, the comments say what
// we do. Missing: RFC 7306 (atomics, immediate data).
package mpa

import (
	"encoding/binary"
	"fmt"
	"strings"

	"ipoibcm/wire"
)

// A Depth is a number of RDMA Read Requests that may be outstanding at a time: an
// inbound queue depth (IRD) or an outbound one (ORD). It has 14 bits.
type Depth uint16

const (
	// DepthULP in IRD or ORD says that this value is not negotiated here but by
	// the ULP (RFC 6581 section 9.1). It is a mark, never a number.
	DepthULP Depth = 0x3fff
	// MaxDepth is the largest depth that can be negotiated.
	MaxDepth Depth = 0x3ffe
)

// String prints the depth, or ULP.
func (d Depth) String() string {
	if d == DepthULP {
		return "ULP"
	}
	return fmt.Sprint(uint16(d))
}

// RTRTypes is a set of kinds of RTR indication: the first message of an
// initiator, which says that it is ready to receive (RFC 6581 section 9.2).
type RTRTypes uint8

// The kinds of RTR indication.
const (
	RTRSend  RTRTypes = 1 << iota // flag B: zero-length Send
	RTRWrite                      // flag C: zero-length RDMA Write
	RTRRead                       // flag D: zero-length RDMA Read
	RTRAll   RTRTypes = RTRSend | RTRWrite | RTRRead
	// RTRNone in options says that none is supported. It is not a kind.
	RTRNone RTRTypes = 0x80
)

// String lists the kinds.
func (t RTRTypes) String() string {
	var l []string
	for i, name := range [...]string{"send", "write", "read"} {
		if t&(1<<i) != 0 {
			l = append(l, name)
		}
	}
	if len(l) == 0 {
		return "none"
	}
	return strings.Join(l, "+")
}

// EnhancedLen is the length of [Enhanced] in octets.
const EnhancedLen = 4

// Enhanced is the enhanced RDMA connection establishment data, the first 32 bits
// of the private data of an enhanced frame (RFC 6581 section 9).
type Enhanced struct {
	PeerToPeer bool     // flag A
	RTR        RTRTypes // flags B, C, D; without A they mean nothing
	IRD, ORD   Depth
}

// flagA is a bit of the wire form, whose first half is flags A and B and the IRD, the second flags C and D
// and the ORD.
const flagA = 1 << 31

// rtrFlags are flags B, C and D.
var rtrFlags = [...]struct {
	kind RTRTypes
	bit  uint32
}{{RTRSend, 1 << 30}, {RTRWrite, 1 << 15}, {RTRRead, 1 << 14}}

// Append appends the wire form. Without flag A the flags B, C and D are sent
// as zero.
func (e Enhanced) Append(b []byte) []byte {
	word := uint32(e.IRD&DepthULP)<<16 | uint32(e.ORD&DepthULP)
	if e.PeerToPeer {
		word |= flagA
		for _, f := range rtrFlags {
			if e.RTR&f.kind != 0 {
				word |= f.bit
			}
		}
	}
	return binary.BigEndian.AppendUint32(b, word)
}

// UnmarshalBinary sets e from the first EnhancedLen octets of b. It keeps flags B, C and D even
// without flag A.
func (e *Enhanced) UnmarshalBinary(b []byte) error {
	if len(b) < EnhancedLen {
		return &wire.ShortError{What: "enhanced MPA data", Need: EnhancedLen, Have: len(b)}
	}
	word := binary.BigEndian.Uint32(b)
	*e = Enhanced{PeerToPeer: word&flagA != 0, IRD: Depth(word>>16) & DepthULP, ORD: Depth(word) & DepthULP}
	for _, f := range rtrFlags {
		if word&f.bit != 0 {
			e.RTR |= f.kind
		}
	}
	return nil
}

// String prints flags and depths.
func (e Enhanced) String() string {
	model := "client-server"
	if e.PeerToPeer {
		model = "peer-to-peer rtr=" + e.RTR.String()
	}
	return fmt.Sprintf("%s ird=%v ord=%v", model, e.IRD, e.ORD)
}
