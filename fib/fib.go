// Package fib is the forwarding information base of one interface, as a pure
// state machine: which next hop a packet from the TUN has, what the data path
// knows of that, and which routes of ours the kernel should have.
//
// A TUN shows a packet and not its next hop. The kernel chose one, and is asked
// which ([Ask]); nothing here looks at routes or rules to find it. What the
// kernel answers is kept as a destination, and forgotten or asked again when
// the kernel says that something changed. An old answer serves until the new
// one is there.
//
// Routes of ours are guests in the kernel's tables. A host route shows the MTU
// of a connection; it is made only where the kernel sends the peer's packets on
// the link by itself, and never in the place of somebody else's route. The
// kernel's own routes of the device get metrics and are left otherwise.
//
// It keeps no copy of the routes of others. It cannot see what a TUN does not
// show of a packet: mark, user, incoming device.
package fib

import (
	"cmp"
	"fmt"
	"net/netip"
	"time"

	"ipoibcm/mtu"
	"ipoibcm/rtnl"
	"ipoibcm/wire/encap"
)

// Options configures a Table. Every zero value means the default that its
// comment names.
type Options struct {
	UDMTU int // octets of IP over UD; zero means 2044

	// BestMessage is the message that the provider sends at the least cost, with
	// the encapsulation header: TCP is asked for no larger ones. Zero: no matter.
	BestMessage int

	MaxDests   int           // destinations; zero means 262144
	MaxLookups int           // asked and not answered; zero means 1024
	MaxWaiting int           // octets of packets that wait for answers; zero means 8 MiB
	MaxAge     time.Duration // of an answer that is used; zero means 30 s. The data path tells who is older.
}

func (o *Options) udMTU() int            { return cmp.Or(o.UDMTU, mtu.DefaultUD) }
func (o *Options) maxDests() int         { return cmp.Or(o.MaxDests, 1<<18) }
func (o *Options) maxLookups() int       { return cmp.Or(o.MaxLookups, 1024) }
func (o *Options) maxWaiting() int       { return cmp.Or(o.MaxWaiting, 8<<20) }
func (o *Options) maxAge() time.Duration { return cmp.Or(o.MaxAge, 30*time.Second) }

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

// String names k.
func (k PathKind) String() string {
	names := [...]string{"miss", "conn", "ud", "group", "drop"}
	if int(k) < len(names) {
		return names[k]
	}
	return fmt.Sprintf("PathKind(%d)", uint8(k))
}

// A Path is how the data path reaches a next hop. A packet larger than MTU
// octets (IP, without the encapsulation header) is handed up.
type Path struct {
	Kind PathKind
	Conn Conn           // PathConn
	Link encap.LinkAddr // PathUD, PathGroup; PathConn: the peer, for reference
	MTU  int
}

// An Event is something that happened. The set is closed.
type Event interface{ event() }

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
		Flow    rtnl.Flow
		NextHop NextHop
		Err     error
	}

	// HostAnswered is the outcome of LookupHost.
	HostAnswered struct {
		Addr    netip.Addr
		NextHop NextHop
		Err     error
	}

	// RouteDone is the outcome of AddRoute, SetRoute and DelRoute.
	RouteDone struct {
		Route   rtnl.Route
		Removed bool  // of DelRoute
		Taken   bool  // AddRoute: somebody else's route stands there
		Err     error // what else went wrong; that there was nothing to remove is no error
	}

	// Done is the outcome of SetRule and FlushExceptions.
	Done struct {
		What string // for people
		Err  error
	}

	// SetHop says how a neighbour is reached from now on.
	SetHop struct {
		Addr netip.Addr
		Path Path
	}

	// DelHop says that a neighbour is not known any more.
	DelHop struct{ Addr netip.Addr }

	// SetGroup lets the data path send flows to a group or broadcast address by
	// itself. The flow has the fields that Fields says, or the destination alone
	// where that is multicast. A zero path takes that back.
	SetGroup struct {
		Flow rtnl.Flow
		Path Path
	}

	// TooBig says that an ICMP message told the kernel of a smaller MTU, which it
	// remembers.
	TooBig struct{ IPv6 bool }

	// Stop forgets all destinations, for good.
	Stop struct{}

	// Wake says that Deadline has passed. Spurious ones are harmless.
	Wake struct{}
)

func (Host) event()         {}
func (Resolve) event()      {}
func (Stale) event()        {}
func (Answered) event()     {}
func (HostAnswered) event() {}
func (RouteDone) event()    {}
func (Done) event()         {}
func (SetHop) event()       {}
func (DelHop) event()       {}
func (SetGroup) event()     {}
func (TooBig) event()       {}
func (Stop) event()         {}
func (Wake) event()         {}

// An Action is something the driver must do, in the order given. The set is
// closed.
type Action interface{ action() }

type (
	// Forward sends a packet to a next hop.
	Forward struct {
		Hop    netip.Addr
		Packet []byte
	}

	// Lookup asks the kernel with [Ask], not on the goroutine that steps the
	// machine. The answer is Answered.
	Lookup struct {
		Flow rtnl.Flow
		Link rtnl.Link
	}

	// LookupHost asks with [AskHost]; the answer is HostAnswered.
	LookupHost struct {
		Addr   netip.Addr
		Link   rtnl.Link
		ByDSCP bool // routes or rules look at that
	}

	// SetPath makes hop be reached by path in the data path, from now on.
	SetPath struct {
		Hop  netip.Addr
		Path Path
	}

	// DelPath forgets a hop that no destination leads to.
	DelPath struct{ Hop netip.Addr }

	// AskPath asks for SetHop, if the hop is a neighbour that is known.
	AskPath struct{ Hop netip.Addr }

	// SetDest leads flows to a hop, which has a path. Fixed ones do not age.
	SetDest struct {
		Flow  rtnl.Flow
		Hop   netip.Addr
		Fixed bool
	}

	// DelDest forgets a destination.
	DelDest struct{ Flow rtnl.Flow }

	// StaleDest makes the next packet of a destination cause Stale; without a
	// destination the next packet of each.
	StaleDest struct{ Flow rtnl.Flow }

	// ResetDests forgets all destinations and takes flows by Fields from now on.
	ResetDests struct{ Fields rtnl.Fields }

	// AddRoute adds a route of ours, or changes its metrics, and leaves those of
	// others alone. SetRoute changes metrics of one of the kernel's. DelRoute
	// removes one of ours. The outcome of each is RouteDone; they are done in the
	// order given, not on the goroutine that steps the machine.
	AddRoute struct{ Route rtnl.Route }
	SetRoute struct{ Route rtnl.Route }
	DelRoute struct{ Route rtnl.Route }

	// SetRule adds a rule of ours, or removes it.
	SetRule struct {
		Rule rtnl.Rule
		On   bool
	}

	// FlushExceptions empties the kernel's cache of path MTUs, because the MTU of
	// a next hop rose.
	FlushExceptions struct{}

	// LinkUp, LinkDown, IPv6Up, DeviceMTU, AddrAdded and AddrRemoved tell of the
	// device. IPv6Up says that the kernel does IPv6 there again, and has forgotten
	// what was set for it before.
	LinkUp      struct{}
	IPv6Up      struct{}
	LinkDown    struct{}
	DeviceMTU   struct{ MTU int }
	AddrAdded   struct{ Prefix netip.Prefix }
	AddrRemoved struct{ Prefix netip.Prefix }

	// Note tells people what the kernel refused, or what a route is not made for.
	Note struct {
		Addr netip.Addr // zero if none is concerned
		Text string
	}
)

func (Forward) action()         {}
func (Lookup) action()          {}
func (LookupHost) action()      {}
func (SetPath) action()         {}
func (DelPath) action()         {}
func (AskPath) action()         {}
func (SetDest) action()         {}
func (DelDest) action()         {}
func (StaleDest) action()       {}
func (ResetDests) action()      {}
func (AddRoute) action()        {}
func (SetRoute) action()        {}
func (DelRoute) action()        {}
func (SetRule) action()         {}
func (FlushExceptions) action() {}
func (LinkUp) action()          {}
func (IPv6Up) action()          {}
func (LinkDown) action()        {}
func (DeviceMTU) action()       {}
func (AddrAdded) action()       {}
func (AddrRemoved) action()     {}
func (Note) action()            {}

// A Table is the machine. It is not safe for concurrent use.
type Table struct {
	opt Options

	device device // what the kernel says of it
	dests  dests
	hops   map[netip.Addr]*hop
	hosts  hosts  // host routes of ours
	routes routes // metrics of the kernel's routes

	tooBig [2]time.Time // when the kernel last heard of a smaller MTU: IPv4, IPv6
	n      Counters

	now time.Time // of the Step under way
	out []Action
}

// New returns a machine that knows nothing of the device yet.
func New(opt Options) *Table {
	return &Table{
		opt: opt, device: newDevice(), dests: newDests(), hops: map[netip.Addr]*hop{},
		hosts: newHosts(), routes: newRoutes(),
	}
}

// Step applies ev at time now and appends to dst what the driver must do, in
// order. It is the only way the state changes.
func (t *Table) Step(dst []Action, now time.Time, ev Event) []Action {
	t.now, t.out = now, dst
	switch ev := ev.(type) {
	case Host:
		t.host(ev.Event)
	case Resolve:
		t.resolve(ev)
	case Stale:
		t.stale(ev.Flow)
	case Answered:
		t.answered(ev)
	case HostAnswered:
		t.hostAnswered(ev)
	case RouteDone:
		t.routeDone(ev)
	case Done:
		if ev.Err != nil {
			t.n.RoutesRefused++
			t.note(netip.Addr{}, "cannot %s: %v", ev.What, ev.Err)
		}
	case SetHop:
		t.setHop(ev.Addr, ev.Path)
	case DelHop:
		t.delHop(ev.Addr)
	case SetGroup:
		t.setGroup(ev)
	case TooBig:
		t.tooBig[family(ev.IPv6)] = now
	case Stop:
		t.n.DropDown += uint64(len(t.resetDests(t.dests.fields)))
	case Wake:
		t.expire()
	default:
		panic(fmt.Sprintf("fib: unknown event %T", ev)) // our bug
	}
	t.reconcile()
	dst, t.out = t.out, nil
	return dst
}

// Deadline returns when the driver must send Wake; zero means never.
func (t *Table) Deadline() time.Time { return t.dests.deadline(t.opt.maxAge()) }

// Fields says which fields of packets decide their next hops now.
func (t *Table) Fields() rtnl.Fields { return t.dests.fields }

func (t *Table) do(a Action) { t.out = append(t.out, a) }

func (t *Table) note(a netip.Addr, format string, args ...any) {
	t.do(Note{Addr: a, Text: fmt.Sprintf(format, args...)})
}

// effective is the UD MTU on the device as it is now.
func (t *Table) effective(n int) int {
	if t.device.link.MTU == 0 {
		return n
	}
	return mtu.Effective(t.device.link.MTU, n)
}

func family(v6 bool) int {
	if v6 {
		return 1
	}
	return 0
}

// Counters are what the machine has counted since it was made.
type Counters struct {
	Lookups, HostLookups uint64 // questions to the kernel
	LookupsFailed        uint64 // without an answer
	Evicted              uint64 // destinations that gave way to others
	GroupsRefused        uint64 // groups without an entry of their own, for there are too many

	DropBusy     uint64 // packets: too many questions are open
	DropWaiting  uint64 // packets: too many wait for answers
	DropNoAnswer uint64 // packets: the kernel could not be asked
	DropDown     uint64 // packets that waited when the device went down

	RoutesSet, RoutesRemoved, RoutesRefused, Flushes uint64
}

// Each calls f with every counter by its name.
func (c Counters) Each(f func(name string, n uint64)) {
	for _, e := range [...]struct {
		name string
		n    uint64
	}{
		{"lookups", c.Lookups}, {"host_lookups", c.HostLookups}, {"lookups_failed", c.LookupsFailed}, {"destinations_evicted", c.Evicted},
		{"groups_refused", c.GroupsRefused}, {"drop_lookups_busy", c.DropBusy}, {"drop_lookup_queue", c.DropWaiting},
		{"drop_no_answer", c.DropNoAnswer}, {"drop_device_down", c.DropDown}, {"routes_set", c.RoutesSet},
		{"routes_removed", c.RoutesRemoved}, {"routes_refused", c.RoutesRefused}, {"exception_flushes", c.Flushes},
	} {
		f(e.name, e.n)
	}
}

// Counters returns the counts.
func (t *Table) Counters() Counters { return t.n }
