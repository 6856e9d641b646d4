// Package peerrpc is the RPC program that agents serve each other over the fabric itself
// (RPC-over-RDMA, [Port] of the RDMA IP CM service). So an agent can be asked even if
// nothing of the IP layer between the two works. The package has the program's number, its
// procedures, and the XDR of their arguments and results.
//
//	program 0x20004755, version 1 (RFC 5531 section 8.1: numbers from 0x20000000
//	are for users)
//	    void     NULL(void)         = 0
//	    document STATUS(void)       = 1    JSON: control.Status
//	    batch    EVENTS(after, max) = 2    JSON lines: control.Event
//	    payload  ECHO(payload)      = 3    what it was given
//
//	struct range    { unsigned hyper after; unsigned int max; };
//	typedef opaque document<MaxDocument>;
//	struct batch    { unsigned hyper last; document events; };
//	typedef opaque payload<MaxEcho>;
//
// A document, and the payload that comes back, may be written into a Write chunk
// (RFC 8166 section 3.4.4: nothing else is). Nothing here changes an agent's state.
//
// A peer that is not trusted gets a STATUS that says little, and instead of EVENTS an AUTH_ERROR with
// [AuthTooWeak] (RFC 5531 section 9). No peer is told identifiers that protect connections.
package peerrpc

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// The program.
const (
	Program uint32 = 0x20004755
	Version uint32 = 1
	// Port is the TCP port number whose service ID an agent listens on.
	Port = 4755
)

// Procedures.
const (
	ProcNull   uint32 = 0
	ProcStatus uint32 = 1
	ProcEvents uint32 = 2
	ProcEcho   uint32 = 3
	// ProcLast is the highest number of a procedure.
	ProcLast = ProcEcho
)

// AuthTooWeak is the auth_stat of a call that is refused because of its caller (RFC 5531 section 9).
const AuthTooWeak uint32 = 5

const (
	// MaxDocument is the most octets of a document: what does not fit is left out,
	// and the document says so.
	MaxDocument = 256 << 10
	// MaxEvents is how many events an agent remembers and one reply brings.
	MaxEvents = 256
	// MaxEcho is the most octets of an echo: several packets at every path MTU.
	MaxEcho = 16 << 10
)

var (
	errLength = errors.New("peerrpc: wrong length")
	errBound  = fmt.Errorf("peerrpc: a document above %d octets", MaxDocument)
	errEcho   = fmt.Errorf("peerrpc: an echo above %d octets", MaxEcho)
)

// A Range says which events are wanted: at most Max of those with numbers above After.
type Range struct {
	After uint64 // the number of an event; 0 is before all
	Max   uint32
}

// Append appends the wire form.
func (r Range) Append(b []byte) []byte {
	return binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint64(b, r.After), r.Max)
}

// ParseRange reads the arguments of EVENTS, which are all of b.
func ParseRange(b []byte) (r Range, err error) {
	if len(b) != 12 {
		return r, errLength
	}
	return Range{binary.BigEndian.Uint64(b), binary.BigEndian.Uint32(b[8:])}, nil
}

// AppendDocument appends the wire form of a document. It panics above MaxDocument.
func AppendDocument(b, doc []byte) []byte {
	if len(doc) > MaxDocument {
		panic(errBound)
	}
	b = append(binary.BigEndian.AppendUint32(b, uint32(len(doc))), doc...)
	return append(b, make([]byte, -len(doc)&3)...)
}

// ParseDocument reads a document from b. If written is not empty, it has the document's octets, which were
// written into a Write chunk and are not in b. rest is what follows the document in b.
func ParseDocument(b, written []byte) (doc, rest []byte, err error) {
	if len(b) < 4 {
		return nil, nil, errLength
	}
	n, b := uint64(binary.BigEndian.Uint32(b)), b[4:]
	switch {
	case n > MaxDocument:
		return nil, nil, errBound
	case len(written) > 0:
		if uint64(len(written)) < n {
			return nil, nil, errLength
		}
		return written[:n], b, nil
	case uint64(len(b)) < (n+3)&^3:
		return nil, nil, errLength
	}
	return b[:n], b[(n+3)&^3:], nil
}

// AppendBatch appends the wire form of the results of EVENTS. last is the number of the last event in
// lines, after which the next call goes on; lines are at most MaxDocument octets.
func AppendBatch(b []byte, last uint64, lines []byte) []byte {
	return AppendDocument(binary.BigEndian.AppendUint64(b, last), lines)
}

// ParseBatch reads the results of EVENTS; written is as in ParseDocument.
func ParseBatch(b, written []byte) (last uint64, lines []byte, err error) {
	if len(b) < 8 {
		return 0, nil, errLength
	}
	last = binary.BigEndian.Uint64(b)
	lines, rest, err := ParseDocument(b[8:], written)
	if err == nil && len(rest) != 0 {
		err = errLength
	}
	return last, lines, err
}

// AppendEcho appends the wire form of the arguments and of the results of ECHO. It
// panics above MaxEcho.
func AppendEcho(b, payload []byte) []byte {
	if len(payload) > MaxEcho {
		panic(errEcho)
	}
	return AppendDocument(b, payload)
}

// ParseEcho reads the arguments or the results of ECHO, which are all of b; written
// is as in ParseDocument.
func ParseEcho(b, written []byte) (payload []byte, err error) {
	payload, rest, err := ParseDocument(b, written)
	switch {
	case err != nil:
		return nil, err
	case len(payload) > MaxEcho:
		return nil, errEcho
	case len(rest) != 0:
		return nil, errLength
	}
	return payload, nil
}
