package mtu

import (
	"cmp"
	"net/netip"
	"slices"
)

// A Device is what decides the routes of the interface.
type Device struct {
	MTU   int // of the device as it is now, at most what we accept
	UDMTU int
	// BestMessage is the message that the provider sends at the least cost, with
	// the encapsulation header: TCP is asked for no larger ones. Zero: no matter.
	BestMessage int
	// Prefixes are the connected (proto kernel) unicast routes of the device.
	Prefixes []netip.Prefix
	// Broadcasts are its broadcast routes in table local.
	Broadcasts []netip.Addr
	// Multicast6 says that ff00::/8 of the device is there.
	Multicast6 bool
	// IPv4 says that the device has an IPv4 address: our 224.0.0.0/4 is wanted.
	IPv4 bool
	// Neighbors are the next hops with a connection.
	Neighbors []Neighbor
}

// A Neighbor is an address whose link-layer address has a connection.
type Neighbor struct {
	IP  netip.Addr
	MTU int // IP MTU of the connection
}

// A RouteKind says where a route comes from, and so what may be done with it.
type RouteKind uint8

// Kinds of routes.
const (
	RouteConnected RouteKind = iota + 1 // the kernel's: change metrics only
	RouteBroadcast                      // the kernel's, table local: metrics only
	RouteMulticast                      // ff00::/8, the kernel's, table local: metrics only
	RouteGroups                         // 224.0.0.0/4, ours: add and remove
	RouteHost                           // one neighbour, ours: add and remove
)

// String prints the kind in a word.
func (k RouteKind) String() string {
	switch k {
	case RouteConnected:
		return "connected"
	case RouteBroadcast:
		return "broadcast"
	case RouteMulticast:
		return "multicast"
	case RouteGroups:
		return "groups"
	case RouteHost:
		return "host"
	}
	return "none"
}

// A Route is a route of the device as it should be.
type Route struct {
	Kind   RouteKind
	Dst    netip.Prefix // masked
	MTU    int          // the mtu metric
	AdvMSS int          // the advmss metric; 0 means none
}

// largestTCP is the longest IP packet that peers' TCP should send us.
func (d Device) largestTCP() int {
	if d.BestMessage == 0 {
		return d.MTU
	}
	return min(d.MTU, IPMTU(uint32(d.BestMessage)))
}

var (
	multicast6 = netip.MustParsePrefix("ff00::/8")
	multicast4 = netip.MustParsePrefix("224.0.0.0/4")
)

// Routes returns the routes of the device as they should be, ordered by kind and
// destination, each destination once.
func Routes(d Device) []Route {
	ud := Effective(d.MTU, d.UDMTU)
	conn := make(map[netip.Prefix]int, len(d.Neighbors))
	for _, n := range d.Neighbors {
		conn[host(n.IP)] = Effective(d.MTU, n.MTU)
	}
	var rs []Route
	for _, p := range d.Prefixes {
		// The MTU of UD, but the MSS of connections: TCP fixes it in the SYN, which
		// leaves before one is up.
		r := Route{Kind: RouteConnected, Dst: p.Masked(), MTU: ud, AdvMSS: AdvMSS(d.largestTCP(), !p.Addr().Is4())}
		if m, ok := conn[r.Dst]; ok {
			// A peer address (`ip address add A peer B`): its connected route
			// already is the host route.
			r.MTU = m
			delete(conn, r.Dst)
		}
		rs = append(rs, r)
	}
	for _, b := range d.Broadcasts {
		rs = append(rs, Route{Kind: RouteBroadcast, Dst: host(b), MTU: ud})
	}
	if d.Multicast6 {
		rs = append(rs, Route{Kind: RouteMulticast, Dst: multicast6, MTU: ud})
	}
	if d.IPv4 {
		rs = append(rs, Route{Kind: RouteGroups, Dst: multicast4, MTU: ud})
	}
	for p, m := range conn { // sorted below
		// A next hop outside every connected prefix (onlink) gets no route: it
		// would send traffic for that address our way.
		if slices.ContainsFunc(d.Prefixes, func(c netip.Prefix) bool { return c.Masked().Contains(p.Addr()) }) {
			r := Route{Kind: RouteHost, Dst: p, MTU: m}
			if tcp := d.largestTCP(); tcp < m {
				r.AdvMSS = AdvMSS(tcp, !p.Addr().Is4())
			}
			rs = append(rs, r)
		}
	}
	slices.SortFunc(rs, func(a, b Route) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), a.Dst.Addr().Compare(b.Dst.Addr()), cmp.Compare(a.Dst.Bits(), b.Dst.Bits()))
	})
	return slices.CompactFunc(rs, func(a, b Route) bool { return a.Kind == b.Kind && a.Dst == b.Dst })
}

func host(a netip.Addr) netip.Prefix {
	a = a.WithZone("").Unmap()
	return netip.PrefixFrom(a, a.BitLen())
}
