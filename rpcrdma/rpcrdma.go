// Package rpcrdma is RPC-over-RDMA, versions one and two, as pure codecs and machines. It includes
// the private data that the ends of version one exchange when they connect.
//
// A [Conn] is one end of one connection, requester and responder: it turns events (a message came
// in, the user wants a call, memory was registered) into actions (send this, expose that memory,
// tell the user).
//
// [PrivateData] is what an end says of itself at connection time. [Header] is the transport header
// in front of every RPC message, in either version. [RPCCall] and [RPCReply] are the heads of the
// RPC messages, as far as a transport and a NULL call need them.
//
// The package registers no memory, moves no octets and reads no clock. Of the program above it, it
// knows only what Options, Submit and Answer say.
//
// Sources: RFC 8797 (private data), RFC 8166 (version one), RFC 8167 (backward direction),
// draft-cel-nfsv4-rpcrdma-version-two-02 (version two; later drafts use the same version number for
// other formats and cannot be told apart), RFC 5531 (RPC), RFC 4506 (XDR).
package rpcrdma

import (
	"fmt"

	"ipoibcm/wire"
)

// A Version is a version of RPC-over-RDMA, word 1 of each transport header.
type Version uint32

// The versions that this package speaks.
const (
	Version1 Version = 1 // RFC 8166
	Version2 Version = 2 // draft-cel-nfsv4-rpcrdma-version-two-02
)

// An XID names a call and its reply. Each end chooses the XIDs of its own calls, so both ends may
// use the same XID at the same time.
type XID uint32

// String prints the XID in hexadecimal.
func (x XID) String() string { return fmt.Sprintf("%08x", uint32(x)) }

// A Direction says whether a message belongs to a call or to a reply. Its values
// are RPC's msg_type (RFC 5531 section 9).
type Direction uint32

// The directions.
const (
	DirCall  Direction = 0 // requester to responder
	DirReply Direction = 1 // responder to requester
)

var directionNames = wire.Names[Direction]{DirCall: "CALL", DirReply: "REPLY"}

// String prints CALL or REPLY.
func (d Direction) String() string { return directionNames.Of(d, "msg_type %d") }

// Inline thresholds in octets: the largest message, transport header and payload
// together, that one Send carries.
const (
	// DefaultInline1 holds in both directions of a version one connection whose
	// ends have not agreed on more (RFC 8166 section 3.3.3), and for the first
	// message of a negotiation (draft section 6).
	DefaultInline1 = 1024
	// DefaultInline2 holds in both directions of a version two connection (draft
	// section 2.3). Private data does not change it.
	DefaultInline2 = 4096
)
