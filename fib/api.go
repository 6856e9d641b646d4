package fib

import (
	"net/netip"

	"ipoibcm/rtnl"
	"ipoibcm/wire/encap"
)

// A Conn is the handle of one connected queue pair, never used twice. Zero means
// none.
type Conn uint32

// A PathKind says how a next hop is reached.
type PathKind uint8

// Kinds of paths.
const (
	PathMiss  PathKind = iota // packets are handed up to the machine
	PathConn                  // on connection Conn
	PathUD                    // to Link over the UD QP
	PathGroup                 // to MGID Link.GID over the UD QP
	PathDrop                  // counted and dropped
)

// String prints k in a word.
func (k PathKind) String() string {
	return [...]string{"miss", "conn", "ud", "group", "drop", "?"}[min(k, PathDrop+1)]
}

// A Path is how the data path reaches a next hop. A packet larger than MTU
// octets (IP, without the encapsulation header) is handed up. The zero Path is none.
type Path struct {
	Kind PathKind
	Conn Conn           // PathConn
	Link encap.LinkAddr // PathUD, PathGroup; PathConn: the peer, for reference
	MTU  int
}

// An Event is something that happened. The set is closed.
type Event interface{ step(*Table) }

type (
	// Host is a change of the kernel's, as hostnet tells it.
	Host struct{ rtnl.Event }

	// Resolve asks for the next hop of a packet from the TUN. The answer is
	// Forward, now or after Answered. Packet belongs to the machine.
	Resolve struct {
		Flow   rtnl.Flow
		Packet []byte
	}

	// Stale says that the data path used an answer which is old. The flow is as
	// it takes it from packets.
	Stale struct{ Flow rtnl.Flow }

	// Answered is the outcome of Lookup. With Err there is no answer.
	Answered struct {
		Lookup  Lookup
		NextHop NextHop
		Err     error
	}

	// Done is the outcome of SetRoute, SetRule and FlushExceptions.
	Done struct {
		Action Action
		Route  rtnl.Route  // SetRoute: what stands there now; zero: nothing
		Answer rtnl.Answer // with Ask: what the kernel said
		Why    string      // nothing stands there: somebody else's does, or it would be no guest
		Err    error       // what else went wrong; that there was nothing to remove is no error
	}

	// SetHop says how a neighbour is reached from now on; a zero path says that it
	// is not known any more.
	SetHop struct {
		Addr netip.Addr
		Path Path
	}

	// TooBig says that an ICMP message told the kernel of a smaller MTU, which it
	// remembers.
	TooBig struct{}

	// SetUDMTU says that datagrams have another largest size from now on, in octets of IP.
	SetUDMTU struct{ MTU int }

	// Stop forgets all destinations, for good.
	Stop struct{}

	// Wake says that Deadline has passed. Spurious ones are harmless.
	Wake struct{}
)

// An Action is something the driver must do, in the order given. The set is
// closed.
type Action interface{ action() }

type (
	// Forward sends a packet to a next hop.
	Forward struct {
		Hop    netip.Addr
		Packet []byte
	}

	// Expect says that packets from Src will most likely go to a next hop: its
	// neighbour may be looked for while the kernel is asked.
	Expect struct{ Hop, Src netip.Addr }

	// Lookup asks the kernel for the next hop of a flow with its method Do, not on the
	// goroutine that steps the machine, and gives Answered.
	Lookup struct {
		Flow   rtnl.Flow
		Link   rtnl.Link
		Resets uint32 // how often all destinations had been forgotten
	}

	// SetPath makes hop be reached by path in the data path, from now on. A zero
	// path forgets the hop, which no destination leads to.
	SetPath struct {
		Hop  netip.Addr
		Path Path
	}

	// AskPath asks for SetHop, if the hop is a neighbour that is known.
	AskPath struct{ Hop netip.Addr }

	// SetDest leads flows to a hop, which has a path. A zero hop forgets the
	// destination.
	SetDest struct {
		Flow rtnl.Flow
		Hop  netip.Addr
	}

	// StaleDest makes the next packet of a destination cause Stale; without a
	// destination the next packet of each.
	StaleDest struct{ Flow rtnl.Flow }

	// ResetDests forgets all destinations and takes flows by Fields from now on.
	ResetDests struct{ Fields rtnl.Fields }

	// SetRoute takes a route of ours away and adds another with its method Do; either may
	// be zero. Of a New that is there already, ours or the kernel's, it changes the
	// metrics. With Ask it is added only if it is a guest where the kernel sends to Host
	// without it, in the table and with the source that the kernel says. SetRule does
	// likewise with rules. FlushExceptions empties the kernel's cache of path
	// MTUs, because the MTU of a next hop rose. The outcome of each is Done; they are
	// done in the order given, not on the goroutine that steps the machine.
	SetRoute struct {
		Old, New rtnl.Route
		Host     netip.Addr // the neighbour that it is for, if any
		Ask      bool
		Link     rtnl.Link // of Ask
		ByDSCP   bool      // of Ask: routes or rules look at that
	}
	SetRule         struct{ Old, New rtnl.Rule }
	FlushExceptions struct{}

	// Device passes on that the device or its addresses changed: LinkChange, AddrSet,
	// AddrGone. IPv6Up says that the kernel does IPv6 there again, and has forgotten what
	// was set for it before.
	Device struct{ rtnl.Event }
	IPv6Up struct{}

	// Note tells people what the kernel refused, or what a route is not made for.
	Note struct {
		Addr netip.Addr // zero if none is concerned
		Text string
	}
)

func (Forward) action()         {}
func (Expect) action()          {}
func (Lookup) action()          {}
func (SetPath) action()         {}
func (AskPath) action()         {}
func (SetDest) action()         {}
func (StaleDest) action()       {}
func (ResetDests) action()      {}
func (SetRoute) action()        {}
func (SetRule) action()         {}
func (FlushExceptions) action() {}
func (Device) action()          {}
func (IPv6Up) action()          {}
func (Note) action()            {}

// Counters are what a machine has counted.
type Counters struct {
	Lookups       uint64 `name:"lookups"`              // questions to the kernel
	HostLookups   uint64 `name:"host_lookups"`         // likewise, for host routes
	LookupsFailed uint64 `name:"lookups_failed"`       // without an answer
	Evicted       uint64 `name:"destinations_evicted"` // destinations that gave way to others
	DropBusy      uint64 `name:"drop_lookups_busy"`    // packets: too many questions are open
	DropWaiting   uint64 `name:"drop_lookup_queue"`    // packets: too many wait for answers
	DropNoAnswer  uint64 `name:"drop_no_answer"`       // packets: the kernel could not be asked
	DropDown      uint64 `name:"drop_device_down"`     // packets that waited when the device went down
	RoutesSet     uint64 `name:"routes_set"`
	RoutesRemoved uint64 `name:"routes_removed"`
	RoutesRefused uint64 `name:"routes_refused"`
	Flushes       uint64 `name:"exception_flushes"`
}
