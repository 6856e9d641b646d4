package ibverbs

import (
	"ipoibcm/verbs"
)

// Opcodes of completions (enum ibv_wc_opcode) that we look at.
const (
	wcRecv        = 128
	wcRecvRDMAImm = 129
)

// Flags of completions (enum ibv_wc_flags).
const (
	wcGRH     = 1
	wcWithImm = 2
	wcWithInv = 8
)

// Statuses of completions (enum ibv_wc_status) that package verbs does not have, or names
// differently.
const (
	wcLocalEEC        = 3
	wcMWBind          = 6
	wcBadResponse     = 7
	wcLocalAccess     = 8
	wcLocalRDDViolate = 14
)

// sendStatus returns the verbs.Status of a send that ended with s.
func sendStatus(s uint32) verbs.Status {
	switch s {
	case wcLocalEEC, wcMWBind, wcLocalRDDViolate:
		return verbs.LocalQPOpError
	case wcBadResponse:
		return verbs.GeneralError
	case wcLocalAccess:
		return verbs.LocalProtError
	}
	return known(verbs.Status(s))
}

// recvStatus returns the verbs.Status of a receive that ended with s. rdma_rxe completes a receive
// with the status that it tells the requester: "remote invalid request" for a message that is too
// long, and "remote access error" for a receive that an RDMA WRITE with immediate took before its
// key was found wrong. Neither is a status of a responder.
func recvStatus(s uint32) verbs.Status {
	switch verbs.Status(s) {
	case verbs.RemoteInvReq:
		return verbs.LocalLengthError
	case verbs.RemoteAccess, verbs.RemoteOpError:
		return verbs.WRFlushError
	}
	return sendStatus(s)
}

// known returns s, or GeneralError if package verbs has no name for s.
func known(s verbs.Status) verbs.Status {
	switch s {
	case verbs.Success, verbs.LocalLengthError, verbs.LocalQPOpError, verbs.LocalProtError, verbs.WRFlushError,
		verbs.RemoteInvReq, verbs.RemoteAccess, verbs.RemoteOpError, verbs.RetryExceeded, verbs.RNRExceeded:
		return s
	}
	return verbs.GeneralError
}

// recvFlags returns the verbs.WCFlags of a receive. Only UD receives have a GRH.
func recvFlags(f uint32, ud bool) (flags verbs.WCFlags) {
	if f&wcGRH != 0 && ud {
		flags |= verbs.WithGRH
	}
	switch {
	case f&wcWithInv != 0:
		flags |= verbs.WithInv
	case f&wcWithImm != 0:
		flags |= verbs.WithImm
	}
	return flags
}

// recvOpcode returns the verbs.Opcode of a receive.
func recvOpcode(op uint32) verbs.Opcode {
	if op == wcRecvRDMAImm {
		return verbs.RecvWriteImm
	}
	return verbs.Recv
}

// A wrKind describes an operation and its opcode in libibverbs (enum ibv_wr_opcode).
type wrKind struct {
	opcode uint32
	rc, uc bool // allowed on RC, on UC; UD has Send and SendImm too
	remote bool // has a remote address
	imm    bool
}

var wrKinds = [...]wrKind{
	verbs.Send:     {opcode: 2, rc: true, uc: true},
	verbs.SendImm:  {opcode: 3, rc: true, uc: true, imm: true},
	verbs.Write:    {opcode: 0, rc: true, uc: true, remote: true},
	verbs.WriteImm: {opcode: 1, rc: true, uc: true, remote: true, imm: true},
	verbs.Read:     {opcode: 4, rc: true, remote: true},
}

// Flags of send work requests (enum ibv_send_flags).
const (
	sendFence     = 1
	sendSignaled  = 2
	sendSolicited = 4
)

func sendFlags(f verbs.SendFlags) (flags uint32) {
	if f&verbs.Signaled != 0 {
		flags |= sendSignaled
	}
	if f&verbs.Solicited != 0 {
		flags |= sendSolicited
	}
	if f&verbs.Fence != 0 {
		flags |= sendFence
	}
	return flags
}

// retryCount returns the retry count to give the kernel if n retries were asked for: n, but at most
// 6. Soft-RoCE takes 7, the largest value, as retries for ever
// (drivers/infiniband/sw/rxe/rxe_comp.c): a connection to a host that is gone would never end.
func retryCount(n uint8) uint8 { return min(n, 6) }
