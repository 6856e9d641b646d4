package fib

import (
	"net/netip"

	"ipoibcm/nexthop"
	"ipoibcm/rtnl"
)

// An Event is something that happened. The set is closed.
type Event interface{ step(*Table) }

type (
	// Host is a change in the kernel, as hostnet reports it.
	Host struct{ rtnl.Event }

	// Resolve asks for the next hop of a packet from the TUN. The machine answers with Forward, at once or after
	// Answered, or drops and counts the packet. It owns Packet from now on. A nil Packet asks for the path alone.
	Resolve struct {
		Flow   rtnl.Flow
		Packet []byte
	}

	// Stale says that the data path used an answer that is older than maxAge, or that a StaleDest concerned. Flow
	// has the fields that the data path takes from packets.
	Stale struct{ Flow rtnl.Flow }

	// Answered is the outcome of Lookup. If Err is not nil, the kernel gave no answer.
	Answered struct {
		Lookup  Lookup
		NextHop nexthop.Hop
		Err     error
	}

	// Done is the outcome of SetRoute, SetRule and FlushExceptions. Of the latter two it has only Err.
	Done struct {
		Action Action
		nexthop.Outcome
	}

	// SetHop sets how a neighbour is reached from now on. A zero path means that this is not known any more.
	SetHop struct {
		Addr netip.Addr
		Path nexthop.Path
	}

	// TooBig says that an ICMP message told the kernel of a smaller path MTU, which the kernel remembers.
	TooBig struct{}

	// SetUDMTU changes Options.UDMTU.
	SetUDMTU struct{ MTU int }

	// Stop forgets all destinations, and drops the packets that wait for answers.
	Stop struct{}

	// Wake says that Deadline has passed. A Wake before that does nothing.
	Wake struct{}
)

// An Action is something the driver must do, in the order given. The set is closed.
type Action interface{ action() }

type (
	// Forward sends a packet to a next hop.
	Forward struct {
		Hop    netip.Addr
		Packet []byte
	}

	// Lookup asks the kernel for the next hop of a flow ([nexthop.Ask]), not on the goroutine that steps the
	// machine. Its outcome is Answered.
	Lookup struct {
		Flow   rtnl.Flow
		Link   rtnl.Link
		Resets uint32 // how often all destinations had been forgotten by then
		// Src is valid if the next hop is most likely Flow.Dst itself: the source of the packet. The driver may
		// resolve that neighbour while the kernel still looks up the route.
		Src netip.Addr
	}

	// SetPath makes the data path use Path for Hop from now on. A zero Path makes it forget the hop; no destination
	// leads to the hop then. PathMiss also asks the driver for a SetHop, if the hop is a known neighbour or group.
	SetPath struct {
		Hop  netip.Addr
		Path nexthop.Path
	}

	// SetDest makes the data path send a flow to Hop. The SetPath of Hop comes before it. A zero Hop makes the data
	// path forget the flow.
	SetDest struct {
		Flow rtnl.Flow
		Hop  netip.Addr
	}

	// StaleDest makes the next packet of a destination cause Stale. With a zero Flow the next packet of each
	// destination does.
	StaleDest struct{ Flow rtnl.Flow }

	// ResetDests makes the data path forget all destinations. From now on Fields are the fields of packets that make
	// up a flow.
	ResetDests struct{ Fields rtnl.Fields }

	// SetRoute, SetRule and FlushExceptions change the kernel, in the order given but not on the goroutine that
	// steps the machine. SetRule replaces rule Old by New; either may be zero. FlushExceptions empties the kernel's
	// cache of path MTUs, because the MTU of a next hop rose.
	SetRoute        nexthop.Change
	SetRule         struct{ Old, New rtnl.Rule }
	FlushExceptions struct{}

	// Device passes on a change of the device or its addresses: LinkChange, AddrSet or AddrGone. IPv6Up says that
	// the kernel does IPv6 on the device again, and that it has forgotten the device's earlier IPv6 settings.
	Device struct{ rtnl.Event }
	IPv6Up struct{}

	// Note tells people what the kernel refused or could not answer, or why a neighbour gets no route.
	Note struct {
		Addr netip.Addr // zero if the note is about no address
		Text string
	}
)

func (Forward) action()         {}
func (Lookup) action()          {}
func (SetPath) action()         {}
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
