package interop

import "encoding/binary"

// This file makes and reads messages of RPC-over-RDMA version one (RFC 8166) by
// hand, so that what meets the kernel has nothing of our own codec.

// words is XDR of 32-bit words.
func words(v ...uint32) (b []byte) {
	for _, w := range v {
		b = binary.BigEndian.AppendUint32(b, w)
	}
	return b
}

// Procedures and errors of the transport.
const (
	rdmaMSG, rdmaNOMSG, rdmaERROR = 0, 1, 4
	errVERS, errCHUNK             = 1, 2
)

// What we ask for, and of whom.
const (
	nfsProgram = 100003
	nfsVersion = 4
	procNULL   = 0
)

// askCredits is what our calls ask for.
const askCredits = 32

// rpcCall is an RPC call without authentication (RFC 5531 section 9).
func rpcCall(xid, proc uint32, args ...byte) []byte {
	return append(words(xid, 0, 2, nfsProgram, nfsVersion, proc, 0, 0, 0, 0), args...)
}

// rpcReply is the reply to a call that succeeded.
func rpcReply(xid uint32, results ...byte) []byte {
	return append(words(xid, 1, 0, 0, 0, 0), results...)
}

// rdmaHeader is the header with its three lists empty.
func rdmaHeader(xid, vers, credits, proc uint32) []byte {
	return words(xid, vers, credits, proc, 0, 0, 0)
}

// rfc8797 is the private data of that RFC: sizes are (n+1)*1024 octets.
func rfc8797(r, send, receive byte) []byte {
	return []byte{0xf6, 0xab, 0x0e, 0x18, 1, r, send, receive}
}
