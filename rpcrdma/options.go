package rpcrdma

import (
	"cmp"
	"fmt"
	"slices"
	"time"
)

// Options configures a [Conn]. The zero value configures a server.
type Options struct {
	// Client makes the Conn the end that connects and that settles the version. The calls of a
	// client are forward calls, those of a server backward calls.
	Client bool
	// MinVersion and MaxVersion bound the versions that this end speaks. Zero means 1 and 2.
	MinVersion, MaxVersion Version
	// Start is the version that a client offers first; see [VersionCache]. Zero
	// means MaxVersion.
	Start Version
	// Program and ProgVersion make a client begin with a NULL call of that program, which settles
	// the version. If Program is zero the first call settles it: a peer that drops what it does not
	// know then costs that call and the connection.
	Program, ProgVersion uint32

	// SendSize and RecvSize are the largest messages of version one in octets, as
	// [PrivateData] announces them. Zero means 4096, and less than 1024 is refused.
	SendSize, RecvSize int
	// Silent makes this end send no private data, for connections that have no room for it.
	Silent bool
	// RecvInv says that this end can receive a Send with Invalidate. The peer may then invalidate
	// a handle of ours if we registered it as such (field Invalidatable of [Registered]).
	RecvInv bool
	// MixedHandles says that a peer must not invalidate some of the memory that is registered. In
	// version one the peer then invalidates none.
	MixedHandles bool
	// SendInv says that this end can send a Send with Invalidate.
	SendInv bool

	// Ask is how many unanswered calls this end wants to have. Zero means 32 for a client and 2 for
	// a server.
	Ask int
	// Grant is how many unanswered calls this end accepts from the peer. Zero means 32 for a server
	// and 2 for a client. Negative means that this end drops calls, which version two forbids.
	Grant int
	// BackwardChunks makes a client accept version one calls with chunks (RFC 8167 section 5.3
	// leaves that open).
	BackwardChunks bool
	// OptTypes are the types of RDMA2_OPTIONAL that the user knows.
	OptTypes []uint32
	// TailTypes are the types of RDMA2_OPTIONAL whose payload is a later part of an RPC message.
	// The payload of any other type is empty or begins an RPC message, whose XID and msg_type must
	// then be those of the header.
	TailTypes []uint32

	// MaxLong is how many octets one call moves outside of Sends at most, in each direction. Zero
	// means 1 MiB.
	MaxLong int
	// MaxCalls bounds the calls that are queued or unanswered. Zero means 128.
	MaxCalls int
	// NegotiateTimeout is how long the first message of a client may stay unanswered before the
	// client takes the peer to be of version one. It then sends the NULL call of Program again. A
	// call of the user goes on unchanged, and only later connections begin with version one (see
	// [Learned]). Zero means 5 s.
	NegotiateTimeout time.Duration
	// CallTimeout bounds the time from Submit to Done. It ends no call before the connection is
	// established. Zero means 30 s.
	CallTimeout time.Duration
	// MaxRetries is how often a call is sent again with more memory for its reply, at most. Zero
	// means 1, negative means never.
	MaxRetries int

	// XID is the XID of the first call. It should be unpredictable.
	XID XID
}

const maxCredits = 4096

func (o *Options) minVersion() Version { return cmp.Or(o.MinVersion, Version1) }
func (o *Options) maxVersion() Version { return cmp.Or(o.MaxVersion, Version2) }
func (o *Options) start() Version      { return cmp.Or(o.Start, o.maxVersion()) }
func (o *Options) speaks(v Version) bool {
	return v >= o.minVersion() && v <= o.maxVersion()
}

func (o *Options) credits(n, forward int, wide bool) int {
	def := 2
	if wide {
		def = forward
	}
	return max(0, cmp.Or(n, def))
}

func (o *Options) ask() int   { return max(1, o.credits(o.Ask, 32, o.Client)) }
func (o *Options) grant() int { return o.credits(o.Grant, 32, !o.Client) }

func (o *Options) maxLong() int    { return cmp.Or(o.MaxLong, 1<<20) }
func (o *Options) maxCalls() int   { return cmp.Or(o.MaxCalls, 128) }
func (o *Options) maxRetries() int { return max(0, cmp.Or(o.MaxRetries, 1)) }

func (o *Options) negotiateTimeout() time.Duration { return cmp.Or(o.NegotiateTimeout, 5*time.Second) }
func (o *Options) callTimeout() time.Duration      { return cmp.Or(o.CallTimeout, 30*time.Second) }

// beginsRPC reports whether the payload of an RDMA2_OPTIONAL is a whole RPC message
// or its beginning.
func (o *Options) beginsRPC(opt uint32, payload []byte) bool {
	return len(payload) > 0 && !slices.Contains(o.TailTypes, opt)
}

// private returns the private data that this end sends, or is taken to have sent if it is Silent.
func (o *Options) private() PrivateData {
	if o.Silent {
		return DefaultPrivateData()
	}
	p := PrivateData{SendSize: min(MaxInline, cmp.Or(o.SendSize, 4096)) &^ 1023,
		RecvSize: min(MaxInline, cmp.Or(o.RecvSize, 4096)) &^ 1023}
	if o.Client {
		p.RemoteInv = o.RecvInv && !o.MixedHandles // RFC 8797 section 3.2
	} else {
		p.RemoteInv = o.SendInv
	}
	return p
}

func (o *Options) check() error {
	if o.minVersion() > o.maxVersion() || o.maxVersion() > Version2 || !o.speaks(o.start()) {
		return fmt.Errorf("rpcrdma: versions %d to %d, starting at %d", o.minVersion(), o.maxVersion(), o.start())
	}
	for _, n := range []int{o.SendSize, o.RecvSize} {
		if n != 0 && n < MinInline {
			return fmt.Errorf("rpcrdma: an inline size of %d octets, the least is %d", n, MinInline)
		}
	}
	if o.ask() > maxCredits || o.grant() > maxCredits {
		return fmt.Errorf("rpcrdma: %d and %d credits, at most %d", o.ask(), o.grant(), maxCredits)
	}
	if o.maxLong() < 0 || o.maxCalls() < 1 {
		return fmt.Errorf("rpcrdma: at most %d octets and %d calls", o.maxLong(), o.maxCalls())
	}
	return nil
}
