package main

import (
	"bytes"
	"fmt"
)

// rpcrdmaMagic is the format identifier of RPC-over-RDMA's private data (RFC 8797 section 4). Private data
// of others may precede it.
var rpcrdmaMagic = []byte{0xf6, 0xab, 0x0e, 0x18}

// privateMeaning returns a text about the content of private data; empty if we do not know the format.
func privateMeaning(b []byte) string {
	i := bytes.Index(b, rpcrdmaMagic)
	if i < 0 || len(b) < i+8 {
		return ""
	}
	m := b[i:]
	if m[4] != 1 {
		return fmt.Sprintf("RFC 8797 version %d, which is not known: defaults hold", m[4])
	}
	return fmt.Sprintf("RFC 8797 version 1: remote invalidation %s, send size %d, receive size %d", yesNo(m[5]&1 != 0),
		(int(m[6])+1)*1024, (int(m[7])+1)*1024)
}
