package rtnl

import (
	"cmp"
	"errors"
	"net/netip"
)

// A Flow is what the kernel may look at in an IP packet to find its next hop.
// What [Fields] leaves out is zero.
type Flow struct {
	Dst, Src         netip.Addr // IPv4 addresses are Is4, IPv6 ones have no zone
	TOS              uint8      // DSCP in the upper six bits; the ECN bits are zero
	Proto            uint8      // IP protocol number
	SrcPort, DstPort uint16     // host octet order; zero without ports
}

// Compare orders flows, by their destinations first.
func (f Flow) Compare(g Flow) int {
	if c := f.Dst.Compare(g.Dst); c != 0 || f == g {
		return c
	}
	return cmp.Or(f.Src.Compare(g.Src), cmp.Compare(f.TOS, g.TOS), cmp.Compare(f.Proto, g.Proto),
		cmp.Compare(f.SrcPort, g.SrcPort), cmp.Compare(f.DstPort, g.DstPort))
}

// Fields says which fields of a packet decide its next hop, besides what a TUN
// does not show: incoming device, mark and user.
type Fields uint8

// Fields, each with all before it.
const (
	DstOnly    Fields = iota // destination address: only the kernel's own rules exist
	WithSource               // source address and DSCP
	WithPorts                // protocol and ports
)

// String names f.
func (f Fields) String() string {
	return [...]string{"destination", "source", "ports"}[min(f, WithPorts)]
}

// Of returns flow with only the fields that f names.
func (f Fields) Of(flow Flow) Flow {
	switch f {
	case DstOnly:
		return Flow{Dst: flow.Dst}
	case WithSource:
		return Flow{Dst: flow.Dst, Src: flow.Src, TOS: flow.TOS}
	}
	return flow
}

// A Query asks the kernel for the route that it would take (RTM_GETROUTE).
type Query struct {
	Flow       // a zero Src lets the kernel choose, zero Proto and ports are not asked with
	OIF   int  // index of the device that it must leave by; zero: any
	IIF   int  // index of the device that it came in by; zero: it is made here
	Match bool // answer with the route as it stands in its table (RTM_F_FIB_MATCH): Prefix, and its own MTU
	// Through is the index of a device, only with Match: of a multipath route that
	// has hops by it, the answer is one of these, as often as their weights say.
	Through int
}

// An Answer is the route that the kernel would take.
type Answer struct {
	Type     RouteType    // Unicast, Local, Broadcast, Multicast; or why there is none: Unreachable, Prohibit, Blackhole
	OIF      int          // index of the device
	Via      netip.Addr   // gateway; zero: the destination is on the link
	Src      netip.Addr   // preferred source
	Table    int          // that the route stands in; zero: not told
	Protocol uint8        // who made the route; zero: not told, as for IPv4 without Match
	MTU      int          // octets, of the route or an exception to it; zero: the device's
	Prefix   netip.Prefix // of the route; only with Match
}

// OK reports whether packets can be sent by a.
func (a Answer) OK() bool {
	return a.Type == Unicast || a.Type == Local || a.Type == Broadcast || a.Type == Multicast
}

// ErrForeignSource says that a route was asked for with a source that is not an
// address of this host, and without the device that the packet came in by. The
// kernel refuses that for IPv4.
var ErrForeignSource = errors.New("rtnl: the source is not an address of this host")

// A Rule is one policy rule of ours: packets to To that leave by device OIF are
// looked up in Table. It is comparable.
type Rule struct {
	Priority int
	To       netip.Prefix
	OIF      string // name of the device
	Table    int
}
