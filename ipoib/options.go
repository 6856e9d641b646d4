package ipoib

import (
	"cmp"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"time"

	"ipoibcm/cm"
	"ipoibcm/ib"
	"ipoibcm/neigh"
	"ipoibcm/wire/encap"
)

// A Mode is the connection policy of the interface (RFC 4755 section 3.1).
type Mode uint8

// Policies.
const (
	ModeRC   Mode = iota // announce and use RC
	ModeUC               // announce and use UC
	ModeAuto             // both; RC where the peer has both
	ModeUD               // no connections at all
)

// ParseMode reads what [Mode.String] prints.
func ParseMode(s string) (Mode, error) {
	for m := ModeRC; m <= ModeUD; m++ {
		if m.String() == s {
			return m, nil
		}
	}
	return 0, fmt.Errorf("mode %q is none of rc, uc, auto, ud", s)
}

// String prints rc, uc, auto or ud.
func (m Mode) String() string { return [...]string{"rc", "uc", "auto", "ud"}[min(m, ModeUD)] }

// Flags returns the flags octet that the policy announces.
func (m Mode) Flags() encap.Flags {
	return [...]encap.Flags{encap.FlagRC, encap.FlagUC, encap.FlagRC | encap.FlagUC, 0}[min(m, ModeUD)]
}

// Options configures an Interface. Link, PathMTU, GUID and Rand must be given;
// every other zero value means the default that its comment names.
type Options struct {
	Link    encap.LinkAddr // our GID and UD QPN; flags are set from Mode
	GUID    ib.GUID        // our CA GUID in CM messages
	PathMTU ib.MTU         // of our port, for RC and UC
	PKey    ib.PKey        // zero means 0xffff
	QKey    ib.QKey        // zero means 0x00000b1b; shown on Ethernet, on InfiniBand that of a group that we create
	SRQ     bool           // RC receives come from an SRQ: REQ and REP say so

	// Fabric is what an InfiniBand port needs. Nil means that the link layer is Ethernet.
	Fabric *Fabric

	// Underlay4 is the one IPv4 group that carries all groups if the underlay is IPv4
	// (docs/adr/0019-groups-on-an-underlay.md). Zero means 239.192.p.q with p.q the P_Key.
	Underlay4 netip.Addr

	// Peers are the members that each get their own copy of a multicast packet by unicast, on
	// underlays without multicast. If Peers is empty, the underlay has multicast, or with Copies
	// set it has none and no member is known yet. SetMembers replaces both.
	Peers  []ib.GID
	Copies bool

	// Allow holds the GIDs whose CM messages we accept. Empty means everybody's. The data
	// path has a set of its own for datagrams.
	Allow ib.GIDSet

	// Neigh and CM tune the parts; what this Interface knows itself (addresses,
	// GUID, Rand, Log) is filled in and need not be given. A zero
	// Neigh.StaleTime means the larger of 60 s and Idle here, so that a connection
	// does not lose its neighbour before it is idle.
	Neigh neigh.Options
	CM    cm.Options

	Mode Mode // zero means RC

	// CMTransport selects the paths that CM messages may take. Zero means CMAuto.
	CMTransport CMTransport
	// NoGSI says that we have no access to QP 1: no RecvMAD comes, and CMAuto acts as
	// CMInband.
	NoGSI bool

	UDMTU      int  // octets of IP over UD; zero means 2044
	UDAuto     bool // UDMTU was chosen for the underlay, and may change with it; only shown
	ReceiveMTU int  // octets with the 4-octet header; zero means 65524
	DeviceMTU  int  // of the TUN in octets; zero means 65520

	// BestMessage is the cheapest message size for the provider in octets, encapsulation header
	// included (verbs.Caps). Our routes ask TCP for no larger messages. Zero sets no limit.
	BestMessage int

	// LinuxFirst asks a peer of unknown class for the 0x10 service ID first.
	LinuxFirst bool

	// Idle is how long a connection may carry nothing before it is torn down.
	// Zero means 5 minutes, negative never.
	Idle time.Duration

	// RetryMin and RetryMax bound the pause after a failed attempt, before a random factor of
	// 0.5 to 1.5. Zero means 1 s and 60 s.
	RetryMin, RetryMax time.Duration

	// MaxConns bounds connected QPs, dialling ones included. Zero means 1024. When 15 of 16
	// are in use, the connection used longest ago ends to make room, if it is idle. Otherwise we
	// announce no mode any more, so that peers use UD.
	MaxConns int

	// MaxPeers bounds records of link-layer addresses. Zero means 4096.
	MaxPeers int

	// QueuePackets and QueueOctets bound the packets that wait for one connection. Zero
	// means 64 packets and 1 MiB; negative means nothing waits.
	QueuePackets, QueueOctets int

	// UCRing is how many receive buffers a UC connection has. UCBudget is how many octets the
	// buffers of all UC connections may take before a new one offers a Receive MTU of 16388
	// only. Zero means 16 and 64 MiB.
	UCRing, UCBudget int

	// Memory is what an earlier process with this link-layer address knew of others. The
	// interface uses it when the link first comes up. Zero means that nothing is known.
	Memory Memory

	Rand *rand.Rand   // communication IDs, PSNs, jitter
	Log  *slog.Logger // state changes; nil discards them
}

func (o *Options) pkey() ib.PKey           { return cmp.Or(o.PKey, ib.DefaultPKey) }
func (o *Options) qkey() ib.QKey           { return cmp.Or(o.QKey, ib.QKeyIPoIB) }
func (o *Options) udMTU() int              { return cmp.Or(o.UDMTU, 2044) }
func (o *Options) receiveMTU() int         { return cmp.Or(o.ReceiveMTU, 65524) }
func (o *Options) deviceMTU() int          { return cmp.Or(o.DeviceMTU, 65520) }
func (o *Options) idle() time.Duration     { return cmp.Or(o.Idle, 5*time.Minute) }
func (o *Options) retryMin() time.Duration { return cmp.Or(o.RetryMin, time.Second) }
func (o *Options) retryMax() time.Duration { return cmp.Or(o.RetryMax, time.Minute) }
func (o *Options) maxConns() int           { return cmp.Or(o.MaxConns, 1024) }
func (o *Options) maxPeers() int           { return cmp.Or(o.MaxPeers, 4096) }
func (o *Options) queuePackets() int       { return max(0, cmp.Or(o.QueuePackets, 64)) }
func (o *Options) queueOctets() int        { return max(0, cmp.Or(o.QueueOctets, 1<<20)) }
func (o *Options) ucRing() int             { return cmp.Or(o.UCRing, 16) }
func (o *Options) ucBudget() int           { return cmp.Or(o.UCBudget, 64<<20) }

// settled returns the constant settled, or Idle if that is shorter and not negative, but 1 s at least.
// Most peers have the same Idle, and may close an idle connection before we do: that must not count
// as a failure.
func (o *Options) settled() time.Duration {
	if idle := o.idle(); idle > 0 {
		return min(settled, max(idle, time.Second))
	}
	return settled
}
