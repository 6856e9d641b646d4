// Package rtnl has the objects of rtnetlink as values: routes, addresses, links, the kernel's
// answers about routes, and changes of all these. hostnet reads them from the kernel; fib decides
// with them.
//
// The package has no socket. Numbers are those of the kernel's uapi/linux/rtnetlink.h.
package rtnl

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"strings"
)

// Protocol is the rtnetlink protocol number ("proto 75" in ip route) of our routes:
// per-destination MTU routes and 224.0.0.0/4. At start and at exit we remove every route with that
// number from our device. The number is free in iproute2's rt_protos. Kernel routes whose metrics
// we changed keep protocol [ProtoKernel].
const Protocol = 75

// Route protocols that others use.
const (
	ProtoKernel = 2
	ProtoBoot   = 3
	ProtoStatic = 4
	ProtoRA     = 9
)

// Routing tables.
const (
	TableMain  = 254
	TableLocal = 255
)

// A RouteType is the type of a route; the values are the kernel's.
type RouteType uint8

// Route types.
const (
	Unicast     RouteType = 1
	Local       RouteType = 2
	Broadcast   RouteType = 3
	Anycast     RouteType = 4
	Multicast   RouteType = 5
	Blackhole   RouteType = 6
	Unreachable RouteType = 7
	Prohibit    RouteType = 8
)

// String prints t as ip route does.
func (t RouteType) String() string {
	names := [...]string{"unspec", "unicast", "local", "broadcast", "anycast", "multicast", "blackhole",
		"unreachable", "prohibit"}
	if int(t) < len(names) {
		return names[t]
	}
	return fmt.Sprintf("type %d", uint8(t))
}

// Route scopes.
const (
	ScopeUniverse = 0
	ScopeLink     = 253
	ScopeHost     = 254
)

// A Route is one route through the device. It is comparable.
type Route struct {
	Dst      netip.Prefix // 0.0.0.0/0 or ::/0 for a default route
	Table    int          // zero means TableMain
	Type     RouteType    // zero means Unicast
	Protocol uint8        // zero means ours, [Protocol], in SetRoute
	Scope    uint8        // IPv4 only; zero is ScopeUniverse
	Metric   uint32       // IPv6: zero means 1024 when setting
	TOS      uint8
	Via      netip.Addr // gateway; zero if on-link; may be IPv6 for an IPv4 Dst
	Src      netip.Addr // preferred source, may be zero
	OnLink   bool       // the gateway is reachable though no route says so
	MTU      int        // octets; zero means no metric: the MTU of the device applies
	MTULock  bool
	AdvMSS   int // octets; zero means no metric
	Expires  int // seconds left, for routes from RA; zero means that the route does not expire

	Pref  uint8  // IPv6 router preference
	Other string // metrics without a field here, as netlink attributes
}

// Errors of changes.
var (
	ErrExists   = errors.New("rtnl: another's route is there") // somebody else's route is in the place
	ErrNotFound = errors.New("rtnl: not found")                // the object to remove is not there
)

// A Key identifies a route among all routes of a device.
type Key struct {
	Dst    netip.Prefix
	Table  int
	Metric uint32
	TOS    uint8
	Via    netip.Addr // IPv6 only: routes with one key but different gateways live side by side
	Type   RouteType
}

// Key returns the fields that identify r.
func (r Route) Key() Key {
	k := Key{Dst: r.Dst, Table: r.Table, Metric: r.Metric, TOS: r.TOS, Type: r.Type}
	if k.Table == 0 {
		k.Table = TableMain
	}
	if k.Type == 0 {
		k.Type = Unicast
	}
	if r.Dst.Addr().Is6() {
		k.Via = r.Via
	} else {
		k.Type = 0 // an IPv4 route is replaced by one of another type
	}
	return k
}

// Compare orders keys, by their destinations first.
func (k Key) Compare(l Key) int {
	return cmp.Or(k.Dst.Compare(l.Dst), cmp.Compare(k.Table, l.Table), cmp.Compare(k.Metric, l.Metric),
		cmp.Compare(k.TOS, l.TOS), k.Via.Compare(l.Via), cmp.Compare(k.Type, l.Type))
}

// String prints r about as ip route does.
func (r Route) String() string {
	var b strings.Builder
	if r.Type > Unicast {
		fmt.Fprintf(&b, "%s ", r.Type)
	}
	fmt.Fprint(&b, r.Dst)
	if r.Via.IsValid() {
		fmt.Fprintf(&b, " via %s", r.Via)
	}
	if r.Table != 0 && r.Table != TableMain {
		fmt.Fprintf(&b, " table %d", r.Table)
	}
	fmt.Fprintf(&b, " proto %d", r.Protocol)
	for _, f := range []struct {
		name string
		n    int64
	}{{"metric", int64(r.Metric)}, {"mtu", int64(r.MTU)}, {"advmss", int64(r.AdvMSS)}} {
		if f.n != 0 {
			fmt.Fprintf(&b, " %s %d", f.name, f.n)
		}
	}
	return b.String()
}

// An Addr is one address of a device. It is comparable.
type Addr struct {
	Prefix    netip.Prefix // the address itself, with the length of its subnet
	Peer      netip.Addr   // the other end of a point-to-point address, else zero
	Broadcast netip.Addr   // IPv4, may be zero
	Tentative bool         // IPv6: the kernel's DAD runs; it cannot be bound yet
	DADFailed bool         // IPv6
	Permanent bool         // not from SLAAC
	Generated bool         // IPv6: the kernel drew it from a secret (RFC 7217)
	Scope     uint8
}

// A Link is the state of a device.
type Link struct {
	Index   int
	Name    string
	MTU     int  // octets
	Up      bool // IFF_UP: wanted by the administrator
	Running bool // has a carrier and is operational
	HWAddr  string
	Type    string // "veth", "tun", "" for plain hardware
	Gone    bool   // the device was removed

	Master   int // index of the bridge, bond or VRF that the device belongs to; zero if none
	VRFTable int // routing table of Master if that is a VRF
}

// VRF returns the index of the VRF that the device is in, zero if it is in none.
func (l Link) VRF() int {
	if l.VRFTable == 0 {
		return 0
	}
	return l.Master
}

// A Snapshot is the state of a device, with its addresses and routes, at one moment.
type Snapshot struct {
	Link   Link
	Addrs  []Addr
	Routes []Route // through the device, all tables: those that the kernel made, and ours
}

// An EventKind says what an [Event] is about.
type EventKind uint8

// Kinds of events.
const (
	Resync EventKind = iota // Snapshot replaces what earlier events reported about the device
	AddrSet
	AddrGone
	RouteSet // a route is new or changed: it replaces the one with the same Key
	RouteGone
	LinkChange
	// Rerouted says that destinations inside Prefix may have other next hops now. A zero Prefix
	// stands for all destinations. The cause is a change of a route of any device and in any table,
	// or of a next-hop object, an address or a link. Routes of ours do not count: they lead where
	// packets went before.
	Rerouted
	// Rules says that policy rules changed, or the Fields that rules and routes look at.
	Rules
)

// String names k.
func (k EventKind) String() string {
	names := [...]string{"RESYNC", "ADDR_SET", "ADDR_GONE", "ROUTE_SET", "ROUTE_GONE", "LINK_CHANGE", "REROUTED", "RULES"}
	if int(k) < len(names) {
		return names[k]
	}
	return fmt.Sprintf("EventKind(%d)", uint8(k))
}

// An Event is one change. Only the fields for its Kind are set.
type Event struct {
	Kind     EventKind
	Snapshot *Snapshot
	Addr     Addr
	Route    Route
	Link     Link
	Prefix   netip.Prefix // of Rerouted
	Unnamed  bool         // Rerouted without Prefix: routes changed, and no event names each of them
	Fields   Fields       // of Rules
}
