package rpcrdma

import (
	"encoding/binary"
	"strings"
)

// octets reads hexadecimal words with blanks between them.
func octets(s string) []byte { return unhex(strings.ReplaceAll(s, " ", "")) }

// lastSent returns the octets of what an end has sent last.
func (e *end) lastSent() []byte {
	e.w.t.Helper()
	if len(e.sends) == 0 {
		e.w.Fatalf("%s has sent nothing", e.name)
	}
	return e.sends[len(e.sends)-1].Data
}

// wordAt is a word of a message.
func wordAt(b []byte, i int) uint32 { return binary.BigEndian.Uint32(b[4*i:]) }

// Heads of RPC messages with XID 7: a NULL call, and the reply to it.
const (
	rpcCall7  = "00000007 00000000 00000002 20000001 00000001 00000000 00000000 00000000 00000000 00000000"
	rpcReply7 = "00000007 00000001 00000000 00000000 00000000 00000000"
)

// rpcOf is the head of a NULL call with that XID.
func rpcOf(xid uint32) []byte {
	b := octets(rpcCall7)
	copy(b, words(xid))
	return b
}

// has returns the first action of type A.
func has[A Action](acts []Action) (a A, ok bool) {
	for _, x := range acts {
		if a, ok = x.(A); ok {
			return a, true
		}
	}
	return a, false
}
