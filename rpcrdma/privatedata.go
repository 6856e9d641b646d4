package rpcrdma

import (
	"encoding/binary"
	"fmt"

	"ipoibcm/wire"
)

const (
	// PrivateDataLen is the length of [PrivateData] in octets.
	PrivateDataLen = 8
	// FormatIdentifier is its first word (RFC 8797 section 4).
	FormatIdentifier uint32 = 0xf6ab0e18
	// privateVersion is the only version of the format.
	privateVersion = 1

	// MinInline and MaxInline are the least and the largest size that PrivateData can express, in
	// octets (RFC 8797 section 4.2).
	MinInline = 1024
	MaxInline = 256 * 1024
)

// PrivateData is what one end says of itself in the private data of the connection manager (RFC
// 8797 section 4). It holds for one connection only: on the next one the same peer may say
// something else.
type PrivateData struct {
	// RemoteInv is the R bit: this end supports remote invalidation. A requester may set it only if
	// a peer may invalidate each handle that it exposes.
	RemoteInv bool
	// SendSize and RecvSize are the largest messages this end sends and receives in one Send, in
	// octets: multiples of 1024 from MinInline to MaxInline. Encoding rounds other sizes down.
	SendSize, RecvSize int
}

// DefaultPrivateData returns the private data of a peer that sends none (RFC 8797 section 5.1).
func DefaultPrivateData() PrivateData {
	return PrivateData{SendSize: DefaultInline1, RecvSize: DefaultInline1}
}

// encodeSize encodes a size in octets (RFC 8797 section 4.2). A size above MaxInline becomes
// MaxInline.
func encodeSize(n int) byte { return byte(min(n, MaxInline)/1024 - 1) }

// decodeSize is the inverse of encodeSize. It returns octets.
func decodeSize(v byte) int { return (int(v) + 1) * 1024 }

// AppendBinary appends the wire form. It fails if a size is below MinInline.
func (p PrivateData) AppendBinary(b []byte) ([]byte, error) {
	if least := min(p.SendSize, p.RecvSize); least < MinInline {
		return b, fmt.Errorf("rpcrdma: an inline size of %d octets cannot be announced, the least is %d", least, MinInline)
	}
	b = binary.BigEndian.AppendUint32(b, FormatIdentifier)
	// R is bit 15 of the second word; the bits before it are reserved.
	return append(b, privateVersion, wire.Bit(p.RemoteInv, 1), encodeSize(p.SendSize), encodeSize(p.RecvSize)), nil
}

// UnmarshalBinary sets p from the first PrivateDataLen octets of b. It ignores what follows them.
func (p *PrivateData) UnmarshalBinary(b []byte) error {
	const what = "RPC-over-RDMA private data"
	if len(b) < PrivateDataLen {
		return &wire.ShortError{What: what, Need: PrivateDataLen, Have: len(b)}
	}
	if id := binary.BigEndian.Uint32(b); id != FormatIdentifier {
		return &wire.FieldError{What: what, Field: "Format Identifier", Value: uint64(id)}
	}
	if b[4] != privateVersion {
		return &wire.FieldError{What: what, Field: "Version", Value: uint64(b[4])}
	}
	*p = PrivateData{RemoteInv: b[5]&1 != 0, SendSize: decodeSize(b[6]), RecvSize: decodeSize(b[7])}
	return nil
}

// FindPrivateData looks for PrivateData at every offset of b, which may hold private data of other
// layers before and behind it (RFC 8797 section 5.2). It returns the first that is whole and of a
// known version; found is its offset. If there is none, p is DefaultPrivateData and found is
// negative.
func FindPrivateData(b []byte) (p PrivateData, found int) {
	for i := 0; i+PrivateDataLen <= len(b); i++ {
		if p.UnmarshalBinary(b[i:]) == nil {
			return p, i
		}
	}
	return DefaultPrivateData(), -1
}

// Inline returns the inline thresholds of a version one connection for the end that has sent own
// and received peer: the largest message that it may send, and the largest that its peer may send
// to it, in octets (RFC 8797 section 4.2). For an end that has sent nothing pass
// DefaultPrivateData.
func Inline(own, peer PrivateData) (send, recv int) {
	return min(own.SendSize, peer.RecvSize), min(peer.SendSize, own.RecvSize)
}

// String prints R bit and sizes.
func (p PrivateData) String() string {
	return fmt.Sprintf("R=%d send=%d receive=%d", wire.Bit(p.RemoteInv, 1), p.SendSize, p.RecvSize)
}
