package softroce

import (
	"cmp"
	"crypto/rand"
	"log/slog"
	"time"

	"ipoibcm/ib"
	"ipoibcm/provider/softroce/engine"
	"ipoibcm/wire/roce"
)

// Options configures a Device. Only Underlay must be set.
type Options struct {
	// Underlay is the network device whose addresses are the GIDs and which
	// carries the packets, such as "eth0".
	Underlay string
	// GID is the only GID to use; it must be an address of Underlay (on a loopback device,
	// any IPv4 address of its prefixes). The sockets are then bound to it, so that several
	// Devices may share one underlay. Zero means all addresses of Underlay; the default GID
	// is then the IPv6 link-local one, or the first IPv4 one if there is no IPv6.
	GID ib.GID
	// PreferIPv4 takes the first IPv4 address as default GID even if there is IPv6.
	PreferIPv4 bool

	// UDPPort is the UDP port to listen on and to send to. Zero means 4791; all
	// devices that talk to each other must have the same. The ICRC is always
	// computed as for 4791.
	UDPPort uint16
	// MaxUDPayload is the largest UD payload in octets. On IPv6 it may be above the path
	// MTU. If the default GID is IPv4, the underlay's MTU less 52 bounds it. Zero means
	// 2048.
	MaxUDPayload int
	// PKeys is the P_Key table. Empty means the default key.
	PKeys []ib.PKey
	// GUID is the GUID of this CA instance. Zero means a random one, locally administered.
	GUID ib.GUID

	// Window bounds the unacknowledged packets of one RC queue pair on a path with a
	// round trip of 1 ms at most. Zero means 256, or as many as make 512 KiB where the
	// path MTU is below 2048. On a longer path there are more, 8 MiB at most.
	Window int
	// TrafficClass is the traffic class of packets whose path has none: the DSCP in the
	// upper six bits. The lower two bits, those of ECN, are zero.
	TrafficClass uint8
	// ECN says which packets leave ECN-capable.
	ECN engine.ECNMode
	// RecvBuffer and SendBuffer are asked from the kernel for each receiving and
	// sending socket, in octets. Zero means 16 MiB and 4 MiB; the counters show
	// what the kernel gave.
	RecvBuffer, SendBuffer int
	// AddressWait bounds the wait for an address that is still tentative. Zero
	// means 5 s, negative means no wait.
	AddressWait time.Duration
	// Sockets are receiving sockets that [Device.Freeze] returned in the process
	// before. Open uses those that are as it would open them, and closes the others. If
	// it uses any, nothing is received before [Device.Begin].
	Sockets []int
	// Stop, when it is closed, ends the wait of AddressWait; Open then returns ErrStopped.
	Stop <-chan struct{}

	// NoGSO and NoGRO switch UDP_SEGMENT and UDP_GRO off. An offload that they leave on is
	// tested on the loopback device and switched off if the test fails. UDP_GRO is also
	// switched off when the kernel refuses it. A path whose batch the kernel refuses goes
	// without UDP_SEGMENT for 2 to 32 s. Failures and refusals are counted, and Offloads
	// reports why an offload is off.
	NoGSO, NoGRO bool
	// HoldP lets the thread that polls a descriptor (see [Device.PollFD]) hold
	// its P while it waits, for 1.5 s after each packet: it wakes sooner, and Go's
	// scheduler has one P less for the rest. It needs a GOMAXPROCS of at least 2, and
	// is best with one more than there are processors.
	HoldP bool
	// BusyPoll bounds how long that thread polls for more before it waits, so that it
	// need not be woken. It polls only while recent waits were no longer than BusyPoll.
	// Between two looks it yields the processor, and it stops polling for a while
	// when another thread took the processor. Zero means never. BusyPoll needs
	// HoldP.
	BusyPoll time.Duration
	// NoConnect sends all packets from unconnected sockets, where the kernel looks the
	// route up for each packet. Without it an IPv6 destination that gets many packets in a
	// row gets a connected socket.
	NoConnect bool
	// testOffload replaces the test of UDP_SEGMENT and UDP_GRO in tests.
	testOffload func(gso, gro bool) error
	// testReopen lets tests make the reopening of the sockets fail.
	testReopen func() error

	// Threads is how many data threads there are ([verbs.Threader]). Zero means one; there
	// are MaxThreads at most.
	Threads int

	// NoLimits takes every MAD in, and filters no datagrams. It is for a process that plays
	// many hosts: the packets for all of them together would look like a flood.
	NoLimits bool

	// Log gets state changes; nil discards them.
	Log *slog.Logger
}

// MaxThreads bounds Options.Threads.
const MaxThreads = 64

// maxWindow bounds the octets of an RC queue pair that are sent and not acknowledged.
const maxWindow = 8 << 20

func (o *Options) udpPort() uint16   { return cmp.Or(o.UDPPort, roce.Port) }
func (o *Options) maxUDPayload() int { return cmp.Or(o.MaxUDPayload, 2048) }
func (o *Options) window() int       { return cmp.Or(o.Window, 256) }
func (o *Options) windowOctets() int {
	if o.Window != 0 {
		return 0
	}
	return 512 << 10
}

func (o *Options) recvBuffer() int            { return cmp.Or(o.RecvBuffer, 16<<20) }
func (o *Options) sendBuffer() int            { return cmp.Or(o.SendBuffer, 4<<20) }
func (o *Options) addressWait() time.Duration { return max(0, cmp.Or(o.AddressWait, 5*time.Second)) }

func (o *Options) threads() int { return min(max(1, o.Threads), MaxThreads) }

func (o *Options) pkeys() []ib.PKey {
	if len(o.PKeys) == 0 {
		return []ib.PKey{ib.DefaultPKey}
	}
	return o.PKeys
}

// random fills b with unpredictable octets, for QPNs and keys.
func random(b []byte) { _, _ = rand.Read(b) } // never fails

func random64() uint64 {
	var b [8]byte
	random(b[:])
	return native.Uint64(b[:])
}

func (o *Options) log() *slog.Logger {
	if o.Log == nil {
		return slog.New(slog.DiscardHandler)
	}
	return o.Log
}
