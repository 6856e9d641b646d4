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

// ParseMode reads what String prints.
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
	GUID    ib.GUID        // of this CA instance: another after each start
	PathMTU ib.MTU         // of our port, for RC and UC
	PKey    ib.PKey        // zero means 0xffff
	QKey    ib.QKey        // of the link; zero means 0x00000b1b; shown only
	SRQ     bool           // RC receives come from an SRQ: REQ and REP say so

	// Fabric is what an InfiniBand port needs. Nil means that the link layer is Ethernet.
	Fabric *Fabric

	// Underlay4 is the one group that all others ride on where the underlay is
	// IPv4 (docs/adr/0019-groups-on-an-underlay.md). Zero means 239.192.p.q with p.q the P_Key.
	Underlay4 netip.Addr

	// Peers makes the broadcast group a list of unicast peers, for underlays
	// without multicast. Empty means that there is multicast, unless Copies says
	// that it is a list all the same. SetMembers replaces both.
	Peers  []ib.GID
	Copies bool

	// Allow has the GIDs whose CM messages are taken. Empty means everybody's. Whose
	// datagrams are is the data path's to know.
	Allow ib.GIDSet

	// Neigh and CM tune the parts; what this Interface knows itself (addresses,
	// GUID, Rand, Log) is filled in and need not be given. A zero
	// Neigh.StaleTime means the larger of 60 s and Idle here, so that an unused
	// neighbour does not take its connection away before Idle does.
	Neigh neigh.Options
	CM    cm.Options

	Mode Mode // zero means RC

	// CMTransport says which paths CM messages may take. Zero means CMAuto.
	CMTransport CMTransport
	// NoGSI says that QP 1 cannot be had: there is no RecvMAD, and CMAuto is
	// CMInband.
	NoGSI bool

	UDMTU      int  // octets of IP over UD; zero means 2044
	UDAuto     bool // UDMTU was chosen for the underlay, and may change with it; for people
	ReceiveMTU int  // octets with the 4-octet header; zero means 65524
	DeviceMTU  int  // of the TUN in octets; zero means 65520

	// BestMessage is the message that the provider sends at the least cost
	// (verbs.Caps). Zero: no matter.
	BestMessage int

	// LinuxFirst asks a peer of unknown class for the 0x10 service ID first.
	LinuxFirst bool

	// Idle is how long a connection may carry nothing before it is torn down.
	// Zero means 5 minutes, negative never.
	Idle time.Duration

	// RetryMin and RetryMax bound the back-off after a failed attempt. Zero
	// means 1 s and 60 s.
	RetryMin, RetryMax time.Duration

	// MaxConns bounds connected QPs, dialling ones included. Zero means 1024. With
	// 15 of 16 in use idle ones make room; where none is idle no mode is announced any
	// more, so that peers use UD.
	MaxConns int

	// MaxPeers bounds records of link-layer addresses. Zero means 4096.
	MaxPeers int

	// QueuePackets and QueueOctets bound what waits for one connection. Zero
	// means 64 packets and 1 MiB; negative means nothing waits.
	QueuePackets, QueueOctets int

	// UCRing is how many receive buffers a UC connection has and UCBudget how
	// many octets all of them may take before new ones are offered a Receive MTU
	// of 16388 only. Zero means 16 and 64 MiB.
	UCRing, UCBudget int

	// Memory is what an earlier process with this link-layer address knew of others,
	// and goes on from there when the link first comes up. Zero: nothing.
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

// settled is the time settled, or Idle where that is less: as a rule the peer has the same, and closes
// what is idle before we do.
func (o *Options) settled() time.Duration {
	if idle := o.idle(); idle > 0 {
		return min(settled, max(idle, time.Second))
	}
	return settled
}
