// Package neigh is the neighbour stack of one IPoIB interface: ARP and Neighbor
// Discovery over the UD queue pair, as one pure state machine.
//
// A [Table] turns events (a packet needs a next hop, a frame arrived, an address was added to the
// device, a deadline passed) into actions (send this over UD, the neighbour is known, these packets
// may go, this address is a duplicate). It reads no clock, starts nothing, knows no MGID and no
// connection: it names the broadcast group, an IP group or a link-layer address, and ipoib does the
// rest.
//
// It answers for addresses on the device, and with Options.AskOthers for other addresses if the
// driver says that the host answers for them. It does not handle router discovery and Redirect.
//
// Sources: RFC 826 and RFC 5227 (ARP), RFC 4861 section 7 (ND; the reachability
// states), RFC 4862 section 5.4 and RFC 4429 (duplicate address detection,
// optimistic use), RFC 4391 section 9 and RFC 4755 sections 3 and 7 (the 20-octet
// address; queries to the broadcast-GID, answers always in UD).
package neigh

import (
	"cmp"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"time"

	"ipoibcm/wire/encap"
)

// Options configures a Table. The zero value of every field but LinkAddr is
// ready to use.
type Options struct {
	// LinkAddr is our own link-layer address: flags, UD QPN, GID.
	// SetLinkAddr changes it later.
	LinkAddr encap.LinkAddr

	// Router sets the R flag of the advertisements we send; SetRouter changes it.
	Router bool

	// Retries are the waits after each query for an unknown neighbour; their
	// number is the number of queries. Nil means 250 ms, 500 ms, 1 s, 1 s.
	Retries []time.Duration

	// ReachableTime is the mean time a confirmation lasts; each one draws a
	// factor between 0.5 and 1.5. Zero means 30 s.
	ReachableTime time.Duration

	// DelayTime is how long a stale neighbour in use waits for a confirmation
	// from above before it is probed. Zero means 5 s.
	DelayTime time.Duration

	// Probes is the number of queries, ProbeInterval apart, before a neighbour that was known
	// counts as gone. All but the last are sent to its known link-layer address. Zero means 3 and 1
	// s.
	Probes        int
	ProbeInterval time.Duration

	// StaleTime is how long an unused stale entry is kept. Zero means 60 s
	// (twice the ARP garbage collection interval of Linux).
	StaleTime time.Duration

	// HoldDown is how long a failed resolution is remembered; meanwhile packets
	// are refused and nothing is asked. Zero means 3 s, negative none.
	HoldDown time.Duration

	// FailedTime is how long a neighbour that did not answer is shown as FAILED
	// if nothing is sent to it. Zero means 60 s. Such neighbours take at most a quarter of
	// MaxNeighbors.
	FailedTime time.Duration

	// DADProbes probes DADInterval apart precede the announcement of an address.
	// Zero means 3 and 200 ms; negative DADProbes means no detection.
	DADProbes   int
	DADInterval time.Duration

	// MaxNeighbors bounds the entries. Zero means 4096. At most half of them are
	// neighbours that spoke first and were neither used nor confirmed since.
	MaxNeighbors int
	// MaxAddrs bounds our own addresses. Zero means 256.
	MaxAddrs int
	// MaxQueuedPackets and MaxQueuedOctets bound the packets that wait for one neighbour.
	// Zero means 64 packets and 256 KiB.
	MaxQueuedPackets, MaxQueuedOctets int
	// MaxTotalOctets bounds the packets that wait for all neighbours. Zero means 16 MiB.
	MaxTotalOctets int

	// RequestRate bounds the requests per second that we act on from all sources, SourceRate those
	// from one source. A burst may be as large as the requests of one second. Zero means 4096 and
	// 64, negative means no bound.
	RequestRate, SourceRate int

	// AcceptAlways makes the Table believe every claim that a known neighbour has moved, but one
	// per second at most. Without it the Table first sends two probes to the old place, and
	// believes the claim only if they are not answered, or if the old place itself asks for the
	// address.
	AcceptAlways bool

	// AskOthers makes the Table ask the driver (AskOther) about addresses that other hosts ask for
	// and that are not on the device: addresses of other devices, and proxied ones.
	AskOthers bool

	Rand *rand.Rand   // spreads timers; nil means a random seed
	Log  *slog.Logger // state changes; nil discards them
}

func (o *Options) reachableTime() time.Duration {
	return max(1, cmp.Or(o.ReachableTime, 30*time.Second))
}
func (o *Options) delayTime() time.Duration     { return max(1, cmp.Or(o.DelayTime, 5*time.Second)) }
func (o *Options) probes() int                  { return cmp.Or(o.Probes, 3) }
func (o *Options) probeInterval() time.Duration { return max(1, cmp.Or(o.ProbeInterval, time.Second)) }
func (o *Options) staleTime() time.Duration     { return max(1, cmp.Or(o.StaleTime, 60*time.Second)) }
func (o *Options) holdDown() time.Duration      { return max(0, cmp.Or(o.HoldDown, 3*time.Second)) }
func (o *Options) failedTime() time.Duration    { return max(1, cmp.Or(o.FailedTime, 60*time.Second)) }
func (o *Options) dadProbes() int               { return max(0, cmp.Or(o.DADProbes, 3)) }
func (o *Options) dadInterval() time.Duration {
	return max(1, cmp.Or(o.DADInterval, 200*time.Millisecond))
}
func (o *Options) maxNeighbors() int     { return cmp.Or(o.MaxNeighbors, 4096) }
func (o *Options) maxAddrs() int         { return cmp.Or(o.MaxAddrs, 256) }
func (o *Options) maxQueuedPackets() int { return cmp.Or(o.MaxQueuedPackets, 64) }
func (o *Options) maxQueuedOctets() int  { return cmp.Or(o.MaxQueuedOctets, 256<<10) }
func (o *Options) maxTotalOctets() int   { return cmp.Or(o.MaxTotalOctets, 16<<20) }
func (o *Options) requestRate() int      { return cmp.Or(o.RequestRate, 4096) }
func (o *Options) sourceRate() int       { return cmp.Or(o.SourceRate, 64) }

// retries returns the waits after each query. They are short at first: a query is a broadcast
// that may be lost, and a lost query should not delay a TCP connection by the one second until
// its first retransmission. RFC 4861 section 10 asks three times in three seconds; the four
// default queries take 2.75.
func (o *Options) retries() []time.Duration {
	if len(o.Retries) > 0 {
		return o.Retries
	}
	return defaultRetries
}

var defaultRetries = []time.Duration{250 * time.Millisecond, 500 * time.Millisecond, time.Second, time.Second}

// A State is the reachability of a neighbour (RFC 4861 section 7.3.2).
type State uint8

// States.
const (
	StateIncomplete State = iota + 1 // asked, not answered; packets wait
	StateReachable                   // confirmed lately
	StateStale                       // known, not confirmed lately, not in use
	StateDelay                       // in use, waiting for a confirmation from above
	StateProbe                       // probes under way, to its known link-layer address but for the last
	StateFailed                      // did not answer
)

// String names the state as `ip neigh` does.
func (s State) String() string {
	return [...]string{"NONE", "INCOMPLETE", "REACHABLE", "STALE", "DELAY", "PROBE", "FAILED"}[min(s, StateFailed)]
}

// Known reports whether an entry in state s has a link-layer address to send to.
func (s State) Known() bool { return s >= StateReachable && s <= StateProbe }

// A Neighbor is a snapshot of one entry.
type Neighbor struct {
	IP       netip.Addr
	LinkAddr encap.LinkAddr // zero while Incomplete or Failed
	State    State
	Router   bool // from the R flag of its last advertisement

	Since     time.Time // when it entered State
	Confirmed time.Time // last proof that it receives what we send; zero if never
	Used      time.Time // last Resolve or Used; zero if never
	Lost      time.Time // when it first failed to answer; zero if it has answered since

	QueuedPackets, QueuedOctets int // waiting for its address
	Queries                     int // sent in this resolution or probing
}

// An AddrState is the state of one of our own addresses.
type AddrState uint8

// States of an own address.
const (
	AddrOptimistic AddrState = iota + 1 // in use, detection under way
	AddrReady                           // no duplicate found
	AddrDuplicate                       // somebody else has it; we do not answer for it
)

// String prints "optimistic", "ready" or "duplicate".
func (s AddrState) String() string {
	return [...]string{"none", "optimistic", "ready", "duplicate"}[min(s, AddrDuplicate)]
}

// An Addr is a snapshot of one of our own addresses.
type Addr struct {
	Prefix    netip.Prefix // the address, host bits kept, and its prefix length
	State     AddrState
	By        encap.LinkAddr // the host that last claimed it; zero if none did
	Conflicts uint64         // claims by others since it was added
}
