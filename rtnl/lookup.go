package rtnl

import (
	"cmp"
	"errors"
	"net/netip"
)

// A Flow has the fields of an IP packet that the kernel may look at to find its next hop. Fields
// that [Fields] leaves out are zero.
type Flow struct {
	Dst, Src         netip.Addr // IPv4 addresses are Is4, IPv6 ones have no zone
	TOS              uint8      // DSCP in the upper six bits; the ECN bits are zero
	Proto            uint8      // IP protocol number
	SrcPort, DstPort uint16     // host octet order; zero if the packet has no ports
}

// Compare orders flows, by their destinations first.
func (f Flow) Compare(g Flow) int {
	if c := f.Dst.Compare(g.Dst); c != 0 || f == g {
		return c
	}
	return cmp.Or(f.Src.Compare(g.Src), cmp.Compare(f.TOS, g.TOS), cmp.Compare(f.Proto, g.Proto),
		cmp.Compare(f.SrcPort, g.SrcPort), cmp.Compare(f.DstPort, g.DstPort))
}

// Fields names the fields of a packet that decide its next hop. The incoming device, the mark and
// the user may also decide, but a TUN does not show them.
type Fields uint8

// Values of Fields. Each one includes those before it.
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

// A Query asks the kernel which route a packet would take (RTM_GETROUTE).
type Query struct {
	Flow       // a zero Src lets the kernel choose one; zero Proto and ports are left out
	OIF   int  // index of the device that the packet must leave by; zero sets none
	IIF   int  // index of the device that the packet came in by; zero means that this host sends it
	Match bool // answer with the route as it stands in its table (RTM_F_FIB_MATCH): with Prefix and its own MTU
	// Through is the index of a device, used only with Match. If the route is a multipath route
	// with hops by that device, the answer is one of these hops, chosen by their weights.
	Through int
}

// An Answer is the kernel's answer to a Query: the route that the packet would take.
type Answer struct {
	Type     RouteType    // Unicast, Local, Broadcast, Multicast; or why there is none: Unreachable, Prohibit, Blackhole
	OIF      int          // index of the device
	Via      netip.Addr   // gateway; zero if the destination is on the link
	Src      netip.Addr   // preferred source
	Table    int          // table of the route; zero if not reported
	Protocol uint8        // who made the route; zero if not reported, as for IPv4 without Match
	MTU      int          // octets, of the route or an exception to it; zero means that of the device
	Prefix   netip.Prefix // of the route; only with Match
}

// OK reports whether packets can be sent by route a.
func (a Answer) OK() bool {
	return a.Type == Unicast || a.Type == Local || a.Type == Broadcast || a.Type == Multicast
}

// ErrForeignSource means that a Query has a Src that is not an address of this host, but no IIF.
// The kernel refuses such a query for IPv4.
var ErrForeignSource = errors.New("rtnl: the source is not an address of this host")

// A Rule is one policy rule of ours: packets to To that leave by device OIF are
// looked up in Table. It is comparable.
type Rule struct {
	Priority int
	To       netip.Prefix
	OIF      string // name of the device
	Table    int
}
