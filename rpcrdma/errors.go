package rpcrdma

import "fmt"

// A Reason is one kind of fault, of a peer or our own. Each is counted.
type Reason uint8

// Reasons that a message is not taken.
const (
	ReasonNone       Reason = iota
	ReasonShort             // shorter than the least header
	ReasonVersion           // a version that is not spoken
	ReasonProc              // a procedure that the version does not have
	ReasonTruncated         // the header ends before its lists do
	ReasonEnum              // a bool, direction or error code without meaning
	ReasonBound             // a list or an opaque is longer than we take
	ReasonPosition          // the position of a Read segment is no multiple of four
	ReasonRPC               // the RPC message has no proper head
	ReasonRPCVersion        // the RPC message is not of RPC version 2
	reasonCount
)

var reasonNames = [reasonCount]string{
	ReasonShort: "short", ReasonVersion: "version", ReasonProc: "proc", ReasonTruncated: "truncated", ReasonEnum: "enum",
	ReasonBound: "bound", ReasonPosition: "position", ReasonRPC: "rpc", ReasonRPCVersion: "rpc_version",
}

// String returns the name of the reason, which is also that of its counter.
func (r Reason) String() string {
	if r < reasonCount && reasonNames[r] != "" {
		return reasonNames[r]
	}
	return fmt.Sprintf("reason %d", uint8(r))
}

// An Error is a fault with its reason. Detail is for people.
type Error struct {
	Reason Reason
	Detail string
}

func (e *Error) Error() string { return fmt.Sprintf("rpcrdma: %v: %s", e.Reason, e.Detail) }

func fault(r Reason, format string, args ...any) *Error {
	return &Error{Reason: r, Detail: fmt.Sprintf(format, args...)}
}
