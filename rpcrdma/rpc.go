package rpcrdma

import (
	"fmt"

	"ipoibcm/wire"
)

// MaxAuth bounds the body of a credential or verifier in octets (RFC 5531
// section 8.2).
const MaxAuth = 400

const rpcVersion = 2

// Auth is a credential or a verifier. The zero value is AUTH_NONE.
type Auth struct {
	Flavor uint32
	Body   []byte // at most MaxAuth octets; the parser returns a part of the message
}

func (a Auth) append(b []byte) []byte { return appendOpaque(appendU32(b, a.Flavor), a.Body) }

func (r *xdrReader) auth() Auth { return Auth{r.u32(), r.opaque(MaxAuth)} }

// An RPCCall is the head of an RPC call, up to its arguments (RFC 5531 section
// 9). With Proc zero and no arguments it is the NULL call that every program has.
type RPCCall struct {
	XID              XID
	Prog, Vers, Proc uint32
	Cred, Verf       Auth
}

// Append appends the wire form; the caller appends the arguments. It panics if an Auth body is
// longer than MaxAuth.
func (c *RPCCall) Append(b []byte) []byte {
	if len(c.Cred.Body) > MaxAuth || len(c.Verf.Body) > MaxAuth {
		panic(fmt.Sprintf("rpcrdma: %d and %d octets of authentication", len(c.Cred.Body), len(c.Verf.Body)))
	}
	b = appendU32(b, uint32(c.XID), uint32(DirCall), rpcVersion, c.Prog, c.Vers, c.Proc)
	return c.Verf.append(c.Cred.append(b))
}

// ParseRPCCall reads the head of a call. args is the rest of b behind the head. The error is an
// [*Error]. Its reason is ReasonRPCVersion if the call is of another version of RPC; the answer to
// that is [RPCMismatch].
func ParseRPCCall(b []byte) (c RPCCall, args []byte, err error) {
	r := xdrReader{b: b, what: "RPC call"}
	c.XID = XID(r.u32())
	if d := r.u32(); d != uint32(DirCall) {
		r.fail(ReasonRPC, "msg_type %d where a call was due", d)
	}
	if v := r.u32(); v != rpcVersion {
		r.fail(ReasonRPCVersion, "%d", v)
	}
	c.Prog, c.Vers, c.Proc = r.u32(), r.u32(), r.u32()
	c.Cred, c.Verf = r.auth(), r.auth()
	if r.err != nil {
		return c, nil, r.err
	}
	return c, r.b, nil
}

// An RPCStatus is the outcome of a call as its reply reports it. Values below RPCMismatch are
// accept_stat. RPCMismatch and RPCAuthError are the reject_stat of a denied call, plus 0x100.
type RPCStatus uint32

// Outcomes of calls.
const (
	RPCSuccess      RPCStatus = 0
	RPCProgUnavail  RPCStatus = 1
	RPCProgMismatch RPCStatus = 2 // Low and High bound the versions that the program has
	RPCProcUnavail  RPCStatus = 3
	RPCGarbageArgs  RPCStatus = 4
	RPCSystemErr    RPCStatus = 5
	RPCMismatch     RPCStatus = 0x100 // denied: Low and High are RPC versions
	RPCAuthError    RPCStatus = 0x101 // denied: AuthStat says why
)

var rpcStatusNames = wire.Names[RPCStatus]{
	RPCSuccess: "SUCCESS", RPCProgUnavail: "PROG_UNAVAIL", RPCProgMismatch: "PROG_MISMATCH",
	RPCProcUnavail: "PROC_UNAVAIL", RPCGarbageArgs: "GARBAGE_ARGS", RPCSystemErr: "SYSTEM_ERR",
	RPCMismatch: "RPC_MISMATCH", RPCAuthError: "AUTH_ERROR",
}

// String names the outcome.
func (s RPCStatus) String() string { return rpcStatusNames.Of(s, "status %d") }

func (s RPCStatus) denied() bool { return s >= RPCMismatch }

// An RPCReply is the head of an RPC reply, up to its results (RFC 5531 section 9).
type RPCReply struct {
	XID       XID
	Status    RPCStatus
	Verf      Auth   // of accepted calls
	Low, High uint32 // RPCProgMismatch, RPCMismatch
	AuthStat  uint32 // RPCAuthError
}

// Append appends the wire form; the caller appends the results if Status is RPCSuccess. It panics
// if Status is no RPCStatus of the list above, or if the verifier is longer than MaxAuth.
func (p *RPCReply) Append(b []byte) []byte {
	if p.Status > RPCAuthError || p.Status > RPCSystemErr && p.Status < RPCMismatch || len(p.Verf.Body) > MaxAuth {
		panic(fmt.Sprintf("rpcrdma: reply with %v and a verifier of %d octets", p.Status, len(p.Verf.Body)))
	}
	b = appendU32(b, uint32(p.XID), uint32(DirReply))
	if p.Status.denied() {
		b = appendU32(b, 1, uint32(p.Status-RPCMismatch))
		if p.Status == RPCAuthError {
			return appendU32(b, p.AuthStat)
		}
		return appendU32(b, p.Low, p.High)
	}
	b = p.Verf.append(appendU32(b, 0))
	b = appendU32(b, uint32(p.Status))
	if p.Status == RPCProgMismatch {
		b = appendU32(b, p.Low, p.High)
	}
	return b
}

// ParseRPCReply reads the head of a reply. results is the rest of b behind the head. The error is
// an [*Error].
func ParseRPCReply(b []byte) (p RPCReply, results []byte, err error) {
	r := xdrReader{b: b, what: "RPC reply"}
	p.XID = XID(r.u32())
	if d := r.u32(); d != uint32(DirReply) {
		r.fail(ReasonRPC, "msg_type %d where a reply was due", d)
	}
	if r.bool() { // MSG_DENIED
		p.Status = RPCMismatch
		if r.bool() {
			p.Status, p.AuthStat = RPCAuthError, r.u32()
		} else {
			p.Low, p.High = r.u32(), r.u32()
		}
	} else {
		p.Verf = r.auth()
		p.Status = RPCStatus(r.u32())
		switch {
		case p.Status > RPCSystemErr:
			r.fail(ReasonRPC, "accept_stat %d", uint32(p.Status))
		case p.Status == RPCProgMismatch:
			p.Low, p.High = r.u32(), r.u32()
		}
	}
	if r.err != nil {
		return p, nil, r.err
	}
	return p, r.b, nil
}
