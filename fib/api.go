package fib

import (
	"net/netip"

	"ipoibcm/rtnl"
	"ipoibcm/wire/encap"
)

// A Conn is the handle of one connected queue pair. No handle is used twice. Zero means none.
type Conn uint32

// A PathKind says how a next hop is reached.
type PathKind uint8

// Kinds of paths.
const (
	PathMiss  PathKind = iota // packets are handed up to the machine
	PathConn                  // on connection Conn
	PathUD                    // to Link over the UD QP
	PathGroup                 // to MGID Link.GID over the UD QP
	PathDrop                  // packets are counted and dropped
)

// String prints k in a word.
func (k PathKind) String() string {
	return [...]string{"miss", "conn", "ud", "group", "drop", "?"}[min(k, PathDrop+1)]
}

// A Path is how the data path reaches a next hop. A packet larger than MTU octets (IP, without the
// encapsulation header) is handed up. The zero Path means that the next hop is not known.
type Path struct {
	Kind PathKind
	Conn Conn           // PathConn
	Link encap.LinkAddr // PathUD, PathGroup; PathConn: the peer, for reference
	MTU  int
}

// An Event is something that happened. The set is closed.
type Event interface{ step(*Table) }

type (
	// Host is a change in the kernel, as hostnet tells it.
	Host struct{ rtnl.Event }

	// Resolve asks for the next hop of a packet from the TUN. The answer is Forward, at once or
	// after Answered. The machine owns Packet from now on.
	Resolve struct {
		Flow   rtnl.Flow
		Packet []byte
	}

	// Stale says that the data path used an old answer. Flow has the fields that the data path
	// takes from packets.
	Stale struct{ Flow rtnl.Flow }

	// Answered is the outcome of Lookup. With Err the kernel gave no answer.
	Answered struct {
		Lookup  Lookup
		NextHop NextHop
		Err     error
	}

	// Done is the outcome of SetRoute, SetRule and FlushExceptions.
	Done struct {
		Action  Action
		Removed bool        // SetRoute: Old is not there any more; false if the kernel refused that, or there is no Old
		Route   rtnl.Route  // SetRoute: what was set; zero if nothing was
		Answer  rtnl.Answer // with Ask: the kernel's answer
		Why     string      // why no route was set: somebody else's is there, or ours would be no guest
		Err     error       // any other failure; a missing route to remove is no error
	}

	// SetHop says how a neighbour is reached from now on. A zero path says that this is not known
	// any more.
	SetHop struct {
		Addr netip.Addr
		Path Path
	}

	// TooBig says that an ICMP message told the kernel of a smaller path MTU, which the kernel
	// remembers.
	TooBig struct{}

	// SetUDMTU says that the largest datagram has another size from now on, in octets of IP.
	SetUDMTU struct{ MTU int }

	// Stop forgets all destinations.
	Stop struct{}

	// Wake says that Deadline has passed. A Wake before that does nothing.
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

	// Expect says that packets from Src will most likely go to next hop Hop. The driver may look
	// for that neighbour while the kernel is asked.
	Expect struct{ Hop, Src netip.Addr }

	// Lookup asks the kernel for the next hop of a flow. The driver calls its method Do, not on the
	// goroutine that steps the machine, and steps the machine with the Answered that it returns.
	Lookup struct {
		Flow   rtnl.Flow
		Link   rtnl.Link
		Resets uint32 // how often all destinations had been forgotten by then
	}

	// SetPath makes the data path reach hop by path from now on. A zero path forgets the hop; no
	// destination leads to it then.
	SetPath struct {
		Hop  netip.Addr
		Path Path
	}

	// AskPath asks for SetHop, if the hop is a known neighbour.
	AskPath struct{ Hop netip.Addr }

	// SetDest leads a flow to a hop, for which there was a SetPath. A zero hop forgets the
	// destination.
	SetDest struct {
		Flow rtnl.Flow
		Hop  netip.Addr
	}

	// StaleDest makes the next packet of a destination cause Stale. With a zero Flow the next
	// packet of each destination does.
	StaleDest struct{ Flow rtnl.Flow }

	// ResetDests forgets all destinations and takes flows by Fields from now on.
	ResetDests struct{ Fields rtnl.Fields }

	// SetRoute removes a route of ours and adds another; either may be zero. The driver calls its
	// method Do. If New is there already, ours or the kernel's, its metrics are changed. With Ask,
	// New is added only if it is a guest where the kernel sends to Host without it, in the table
	// and with the source of the kernel's answer. SetRule replaces a rule likewise. FlushExceptions
	// empties the kernel's cache of path MTUs, because the MTU of a next hop rose. The outcome of
	// each is Done. They are done in the order given, not on the goroutine that steps the machine.
	SetRoute struct {
		Old, New rtnl.Route
		Host     netip.Addr // the neighbour that New is for, if any
		Ask      bool
		Link     rtnl.Link // for Ask: the device
		ByDSCP   bool      // for Ask: some routes or rules look at the DSCP
	}
	SetRule         struct{ Old, New rtnl.Rule }
	FlushExceptions struct{}

	// Device passes on that the device or its addresses changed: LinkChange, AddrSet, AddrGone.
	// IPv6Up says that the kernel does IPv6 on the device again, and has forgotten IPv6 settings of
	// the time before.
	Device struct{ rtnl.Event }
	IPv6Up struct{}

	// Note tells people what the kernel refused, or why no route is made for a neighbour.
	Note struct {
		Addr netip.Addr // zero if the note is about no address
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
	LookupsFailed uint64 `name:"lookups_failed"`       // lookups without an answer
	Evicted       uint64 `name:"destinations_evicted"` // destinations that gave way to others
	DropBusy      uint64 `name:"drop_lookups_busy"`    // packets dropped: too many questions, or no destination could give way
	DropWaiting   uint64 `name:"drop_lookup_queue"`    // packets dropped because too many waited for answers
	DropNoAnswer  uint64 `name:"drop_no_answer"`       // packets dropped because the kernel could not be asked
	DropDown      uint64 `name:"drop_device_down"`     // packets that waited when the device went down, or at Stop
	RoutesSet     uint64 `name:"routes_set"`
	RoutesRemoved uint64 `name:"routes_removed"`
	RoutesRefused uint64 `name:"routes_refused"`
	Flushes       uint64 `name:"exception_flushes"`
}
