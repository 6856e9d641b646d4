package softroce

import (
	"cmp"
	"log/slog"

	"ipoibcm/ib"
)

// Port is the UDP port of RoCEv2.
const Port = 4791

// Options says what a Device stands on. Only Underlay must be set.
type Options struct {
	// Underlay is the network device whose addresses are the GIDs and which
	// carries the packets, such as "eth0".
	Underlay string
	// GID overrides the default GID. It must be an address of Underlay. Zero
	// means the IPv6 link-local address, or the IPv4 address if there is no IPv6.
	GID ib.GID
	// PreferIPv4 takes the first IPv4 address as default GID even if there is IPv6.
	PreferIPv4 bool

	// UDPort is the UDP port to listen on and to send to. Zero means 4791; all
	// devices that talk to each other must have the same.
	UDPort uint16
	// MaxUDPayload is the largest UD payload in octets, which on IPv6 may be
	// above the path MTU (D3). Zero means 2048.
	MaxUDPayload int
	// PKeys is the P_Key table. Empty means the default key.
	PKeys []ib.PKey
	// GUID of this CA instance. Zero means a random one, locally administered.
	GUID ib.GUID

	// Window bounds the unacknowledged octets of one RC queue pair. Zero means
	// what the engine takes by default.
	Window int
	// RecvBuffer and SendBuffer are asked from the kernel for the receiving and
	// sending sockets, in octets. Zero means 16 MiB and 4 MiB; what the kernel
	// gave is shown by the counters.
	RecvBuffer, SendBuffer int

	// NoGSO and NoGRO switch UDP_SEGMENT and UDP_GRO off. Without them both are
	// tried, and given up for good when the kernel refuses.
	NoGSO, NoGRO bool

	// Rand is where QPNs come from: it must fill b with unpredictable octets.
	// Nil means crypto/rand.
	Rand func(b []byte)
	// Log gets state changes; nil discards them.
	Log *slog.Logger
}

func (o *Options) udPort() uint16    { return cmp.Or(o.UDPort, Port) }
func (o *Options) maxUDPayload() int { return cmp.Or(o.MaxUDPayload, 2048) }
func (o *Options) recvBuffer() int   { return cmp.Or(o.RecvBuffer, 16<<20) }
func (o *Options) sendBuffer() int   { return cmp.Or(o.SendBuffer, 4<<20) }

func (o *Options) pkeys() []ib.PKey {
	if len(o.PKeys) == 0 {
		return []ib.PKey{ib.DefaultPKey}
	}
	return o.PKeys
}

func (o *Options) log() *slog.Logger {
	if o.Log == nil {
		return slog.New(slog.DiscardHandler)
	}
	return o.Log
}
