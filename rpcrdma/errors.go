package rpcrdma

import (
	"fmt"

	"ipoibcm/wire"
)

// A Reason is one kind of fault, of the peer or our own. [Counters] has a counter for each.
type Reason uint8

// Reasons.
const (
	ReasonNone Reason = iota

	// A message cannot be read.
	ReasonShort      // shorter than the least header
	ReasonVersion    // a version outside of Options.MinVersion to MaxVersion
	ReasonProc       // a procedure that the version does not have
	ReasonTruncated  // the header ends before its lists do
	ReasonEnum       // a bool, direction or error code without meaning
	ReasonBound      // a list, an opaque or a chunk is longer than we take, or a segment wraps
	ReasonPosition   // the position of a Read segment is no multiple of four
	ReasonRPC        // the RPC message has no proper head
	ReasonRPCVersion // the RPC message is not of RPC version 2

	// A message can be read and makes no sense.
	ReasonNeverSent   // MSGP or DONE
	ReasonDirection   // direction and msg_type differ, or neither is there
	ReasonXID         // XIDs of header and RPC message differ
	ReasonNoPayload   // MSG without a payload
	ReasonNoChunks    // NOMSG without the chunk that it needs
	ReasonExtra       // octets behind a NOMSG header
	ReasonReadList    // Read list in a reply, or one that does not fit its payload
	ReasonOption      // an option of unknown type, or a reply whose option differs from its call's
	ReasonBackward    // a call to an end that takes none, or with chunks where none are taken
	ReasonOverrun     // more calls than were granted
	ReasonStray       // an answer to no call of ours, or to one that was given up
	ReasonWrongVers   // a reply of another version than its call
	ReasonBadRange    // ERR_VERS in another version than its call, or with an impossible range
	ReasonBadReply    // a reply that says that more was written than we offered
	ReasonZeroCredits // a grant of zero credits, taken as one
	ReasonInvHandle   // the handle to be invalidated is not in the call
	ReasonWrongInv    // the peer invalidated a handle that is not of the call

	// A call or a connection ends.
	ReasonPeerError    // the peer answered with an ERROR
	ReasonTimeout      // no answer in time
	ReasonStarved      // no credit will ever come back
	ReasonNoVersion    // no version in common
	ReasonDisconnected // the connection was lost or ended by the peer
	ReasonCancelled    // by the user
	ReasonTooBig       // call or reply are larger than can be sent
	ReasonTooMany      // more than Options.MaxCalls
	ReasonNotReady     // a backward call before the peer can take it, an option before version two is settled
	ReasonArgument     // what was submitted contradicts itself
	ReasonRegister     // memory could not be registered, or not as the machine asked
	ReasonRelease      // memory could not be released
	ReasonRead         // an RDMA READ failed
	ReasonCannotReply  // the reply does not fit into what the call offers
	reasonCount
)

var reasonNames = wire.Names[Reason]{
	ReasonShort: "short", ReasonVersion: "version", ReasonProc: "proc", ReasonTruncated: "truncated", ReasonEnum: "enum",
	ReasonBound: "bound", ReasonPosition: "position", ReasonRPC: "rpc", ReasonRPCVersion: "rpc_version",
	ReasonNeverSent: "never_sent", ReasonDirection: "direction", ReasonXID: "xid", ReasonNoPayload: "no_payload",
	ReasonNoChunks: "no_chunks", ReasonExtra: "extra", ReasonReadList: "read_list", ReasonOption: "option",
	ReasonBackward: "backward", ReasonOverrun: "overrun", ReasonStray: "stray", ReasonWrongVers: "wrong_vers",
	ReasonBadRange: "bad_range", ReasonBadReply: "bad_reply", ReasonZeroCredits: "zero_credits",
	ReasonInvHandle: "inv_handle", ReasonWrongInv: "wrong_inv", ReasonPeerError: "peer_error",
	ReasonTimeout: "timeout", ReasonStarved: "starved", ReasonNoVersion: "no_version",
	ReasonDisconnected: "disconnected", ReasonCancelled: "cancelled", ReasonTooBig: "too_big",
	ReasonTooMany: "too_many", ReasonNotReady: "not_ready", ReasonArgument: "argument", ReasonRegister: "register",
	ReasonRelease: "release", ReasonRead: "read", ReasonCannotReply: "cannot_reply",
}

// String returns the name of the reason, which is also that of its counter.
func (r Reason) String() string { return reasonNames.Of(r, "reason %d") }

// Counters counts faults by reason.
type Counters [reasonCount]uint64

// Each calls f for every counter, in a fixed order.
func (c *Counters) Each(f func(name string, value uint64)) {
	for r := ReasonNone + 1; r < reasonCount; r++ {
		f(r.String(), c[r])
	}
}

// An Error is a fault with its reason. Detail is for people.
type Error struct {
	Reason Reason
	Detail string
}

func (e *Error) Error() string {
	if e.Detail == "" {
		return fmt.Sprintf("rpcrdma: %v", e.Reason)
	}
	return fmt.Sprintf("rpcrdma: %v: %s", e.Reason, e.Detail)
}

func fault(r Reason, format string, args ...any) *Error {
	return &Error{Reason: r, Detail: fmt.Sprintf(format, args...)}
}
