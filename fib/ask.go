package fib

import (
	"fmt"
	"net/netip"

	"ipoibcm/rtnl"
)

// A Kernel answers where it would send a packet. An error means that it could
// not be asked; that there is no route is an answer.
type Kernel interface {
	Lookup(rtnl.Query) (rtnl.Answer, error)
}

// A NextHop is where the kernel sends packets of a flow when they leave by the
// device.
type NextHop struct {
	Addr   netip.Addr  // the gateway; the destination itself if it is on the link
	Answer rtnl.Answer // the kernel's own choice
	Bound  bool        // the kernel was asked for this device, because it would take another
	Leaves bool        // packets leave by the device: those that name it, if Bound
	ByDSCP bool        // of AskHost: packets of some DSCP go elsewhere
}

// loopback is the index of lo in every network namespace.
const loopback = 1

// Ask finds the next hop of packets of flow that came out of the TUN link.
//
// The kernel is asked without naming the device, as for the packet itself: with
// it, IPv4 would always take the first hop of a multipath route, take what has
// no route for on-link, and apply rules that the packet has not met. Only where
// the answer is another device, and not one hop among others by ours, it is named:
// the sender is bound to ours.
//
// In a VRF the VRF is named, whose senders are bound to it: the kernel then looks in its
// table, for routes by any device (l3mdev_update_flow in net/l3mdev/l3mdev.c).
func Ask(k Kernel, link rtnl.Link, flow rtnl.Flow) (NextHop, error) {
	device := link.Index
	q, err := query(k, vrf(link), flow)
	if err != nil {
		return NextHop{}, err
	}
	a, err := k.Lookup(q)
	if err == nil && !a.OK() && q.Src.IsValid() { // a source that the kernel does not accept
		q.Src, q.IIF, q.OIF = netip.Addr{}, 0, vrf(link)
		a, err = k.Lookup(q)
	}
	if err != nil {
		return NextHop{}, fmt.Errorf("ask for the route to %v: %w", flow.Dst, err)
	}
	own := a
	if a.OK() && a.OIF != device { // perhaps only one of several hops
		q.Match, q.Through = true, device
		if a, err = k.Lookup(q); err != nil {
			return NextHop{}, fmt.Errorf("ask for the hops to %v: %w", flow.Dst, err)
		}
	}
	bound := !a.OK() || a.OIF != device
	if bound {
		if a, err = askBound(k, device, q); err != nil {
			return NextHop{}, fmt.Errorf("ask for the route to %v by the device: %w", flow.Dst, err)
		}
	}
	hop := NextHop{Addr: flow.Dst, Answer: own, Bound: bound, Leaves: a.OK() && a.OIF == device}
	if a.OK() && a.OIF == device && a.Via.IsValid() {
		hop.Addr = a.Via.WithZone("")
	}
	// Without any route it is the destination itself: rules that look at what a
	// TUN does not show brought the packet here.
	return hop, nil
}

// askBound asks as a sender does that is bound to the device.
func askBound(k Kernel, device int, q rtnl.Query) (rtnl.Answer, error) {
	q.Match, q.Through = false, 0
	if q.IIF != 0 { // what is forwarded cannot be asked so
		q.Src, q.IIF = netip.Addr{}, 0
	}
	q.OIF = device
	a, err := k.Lookup(q)
	if err == nil && a.OK() && a.OIF != device && q.Src.IsValid() {
		// With a source IPv6 takes the device for a wish only
		// (ip6_route_output_flags in net/ipv6/route.c).
		q.Src = netip.Addr{}
		a, err = k.Lookup(q)
	}
	return a, err
}

// vrf returns the index of the VRF that the link is in; zero: of none.
func vrf(link rtnl.Link) int {
	if link.VRFTable == 0 {
		return 0
	}
	return link.Master
}

// query returns the question to ask for flow first. A source that is not the
// host's own is that of a forwarded packet, which came in by the device towards it.
func query(k Kernel, vrf int, flow rtnl.Flow) (rtnl.Query, error) {
	q := rtnl.Query{Flow: flow, OIF: vrf}
	if !flow.Src.IsValid() || flow.Src.IsUnspecified() {
		q.Src = netip.Addr{}
		return q, nil
	}
	a, err := k.Lookup(rtnl.Query{Flow: rtnl.Flow{Dst: flow.Src}, OIF: vrf})
	if err != nil {
		return q, fmt.Errorf("ask for the way to source %v: %w", flow.Src, err)
	}
	switch {
	case a.Type == rtnl.Local:
	case a.OK():
		q.IIF, q.OIF = a.OIF, 0
	default:
		q.IIF, q.OIF = loopback, 0
	}
	return q, nil
}

// AskHost asks how the kernel sends packets to a neighbour, for [NextHop.Guest];
// with byDSCP for every DSCP, because there may be routes for some.
func AskHost(k Kernel, link rtnl.Link, a netip.Addr, byDSCP bool) (NextHop, error) {
	q := rtnl.Query{Flow: rtnl.Flow{Dst: a}, Match: true}
	if q.OIF = vrf(link); a.IsLinkLocalUnicast() {
		q.OIF = link.Index // every device has its own fe80::/64
	}
	answer, err := k.Lookup(q)
	if err != nil {
		return NextHop{}, fmt.Errorf("ask for the route to neighbour %v: %w", a, err)
	}
	hop := NextHop{Addr: a, Answer: answer, Bound: q.OIF != 0}
	if !byDSCP || a.Is6() { // IPv6 has no such routes
		return hop, nil
	}
	for q.TOS = 4; q.TOS != 0; q.TOS += 4 {
		other, err := k.Lookup(q)
		if err != nil {
			return NextHop{}, fmt.Errorf("ask for the route to neighbour %v with TOS %#x: %w", a, q.TOS, err)
		}
		if other.Prefix != answer.Prefix || other.Via != answer.Via || other.OIF != answer.OIF {
			hop.ByDSCP = true
		}
	}
	return hop, nil
}

// Guest reports whether a host route of ours may show the MTU of neighbour h.Addr:
// the kernel sends to it on the link by device, and nobody else has said with
// which MTU. Otherwise it says why not.
func (h NextHop) Guest(link rtnl.Link) (ok bool, why string) {
	a := h.Answer
	switch {
	case !a.OK():
		return false, fmt.Sprintf("the kernel has no route to it (%v)", a.Type)
	case a.OIF != link.Index:
		return false, "the kernel sends to it by another device"
	case a.Type != rtnl.Unicast:
		return false, fmt.Sprintf("the kernel takes it for a %v address", a.Type)
	case a.Via.IsValid():
		return false, fmt.Sprintf("the kernel sends to it by gateway %v", a.Via)
	case link.VRFTable != 0 && a.Table != link.VRFTable:
		return false, fmt.Sprintf("its route is in table %d, not in that of the VRF", a.Table)
	case a.Prefix.IsValid() && a.Prefix.Bits() == 0:
		return false, "only a default route leads to it, which rules may leave out (suppress_prefixlength)"
	case h.ByDSCP:
		return false, "the kernel sends to it by another route where a packet's DSCP says so"
	case a.Protocol == rtnl.Protocol:
		return true, ""
	case a.Prefix.IsSingleIP() && a.Protocol == rtnl.ProtoKernel:
		return false, "its connected route shows the MTU"
	case a.Prefix.IsSingleIP():
		return false, "it has a host route of somebody else's, whose MTU counts"
	case a.Protocol == rtnl.ProtoKernel:
		return true, ""
	case a.MTU != 0:
		return false, fmt.Sprintf("the route %v of somebody else's has an MTU, which counts", a.Prefix)
	}
	return true, ""
}
