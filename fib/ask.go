package fib

import (
	"errors"
	"fmt"
	"net/netip"

	"ipoibcm/rtnl"
)

// A Kernel answers where it would send a packet. An error means that it could
// not be asked; that there is no route is an answer.
type Kernel interface {
	Lookup(rtnl.Query) (rtnl.Answer, error)
}

// A Router is a kernel that takes routes.
type Router interface {
	Kernel
	AddRoute(rtnl.Route) error // of ours, or its metrics; rtnl.ErrExists: the place is another's
	SetRoute(rtnl.Route) error // metrics of one of the kernel's
	DelRoute(rtnl.Route) error // of ours; rtnl.ErrNotFound
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

// Do asks k.
func (l Lookup) Do(k Kernel) (a Answered) {
	a.Lookup = l
	a.NextHop, a.Err = Ask(k, l.Link, l.Flow)
	return a
}

// Do changes the route in k.
func (s SetRoute) Do(k Router) (d Done) {
	d.Action = s
	if s.Old.Dst.IsValid() {
		if d.Err = k.DelRoute(s.Old); errors.Is(d.Err, rtnl.ErrNotFound) {
			d.Err = nil
		}
	}
	if s.Ask && d.Err == nil {
		var hop NextHop
		hop, d.Err = AskHost(k, s.Link, s.Host, s.ByDSCP)
		d.Answer, d.Why = hop.Answer, hop.NotGuest(s.Link)
		if s.New.Table = hop.Answer.Table; s.Host.Is4() { // else the kernel would take the device's first address
			s.New.Src = hop.Answer.Src
		}
	}
	if d.Err != nil || d.Why != "" || !s.New.Dst.IsValid() {
		return d
	}
	if s.New.Protocol == rtnl.Protocol {
		d.Err = k.AddRoute(s.New)
	} else {
		d.Err = k.SetRoute(s.New)
	}
	if errors.Is(d.Err, rtnl.ErrExists) {
		d.Err, d.Why = nil, taken
	} else if d.Err == nil {
		d.Route = s.New
	}
	return d
}

// An asker is a kernel that is not asked again once it could not be.
type asker struct {
	Kernel
	err error
}

func (k *asker) ask(q rtnl.Query) (a rtnl.Answer) {
	if k.err == nil {
		if a, k.err = k.Lookup(q); k.err != nil {
			k.err = fmt.Errorf("ask for the route to %v: %w", q.Dst, k.err)
		}
	}
	return a
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
func Ask(kernel Kernel, link rtnl.Link, flow rtnl.Flow) (NextHop, error) {
	k, device := &asker{Kernel: kernel}, link.Index
	q := rtnl.Query{Flow: flow, OIF: link.VRF()}
	if q.Src.IsValid() && q.Src.IsUnspecified() {
		q.Src = netip.Addr{}
	}
	if q.Src.IsValid() {
		// A source that is not the host's own is that of a forwarded packet, which
		// came in by the device towards it.
		switch a := k.ask(rtnl.Query{Flow: rtnl.Flow{Dst: q.Src}, OIF: q.OIF}); {
		case a.Type == rtnl.Local:
		case a.OK():
			q.IIF, q.OIF = a.OIF, 0
		default:
			q.IIF, q.OIF = loopback, 0
		}
	}
	a := k.ask(q)
	if !a.OK() && q.Src.IsValid() { // a source that the kernel does not accept
		q.Src, q.IIF, q.OIF = netip.Addr{}, 0, link.VRF()
		a = k.ask(q)
	}
	hop := NextHop{Addr: flow.Dst, Answer: a}
	if a.OK() && a.OIF != device { // perhaps only one of several hops
		q.Match, q.Through = true, device
		a = k.ask(q)
	}
	if hop.Bound = !a.OK() || a.OIF != device; hop.Bound {
		// As a sender asks that is bound to the device. What is forwarded cannot be
		// asked so; and with a source IPv6 takes the device for a wish only
		// (ip6_route_output_flags in net/ipv6/route.c).
		if q.Match, q.Through, q.OIF = false, 0, device; q.IIF != 0 {
			q.Src, q.IIF = netip.Addr{}, 0
		}
		if a = k.ask(q); a.OK() && a.OIF != device && q.Src.IsValid() {
			q.Src = netip.Addr{}
			a = k.ask(q)
		}
	}
	// Without any route it is the destination itself: rules that look at what a
	// TUN does not show brought the packet here.
	if hop.Leaves = a.OK() && a.OIF == device; hop.Leaves && a.Via.IsValid() {
		hop.Addr = a.Via.WithZone("")
	}
	return hop, k.err
}

// AskHost asks how the kernel sends packets to a neighbour, for [NextHop.NotGuest];
// with byDSCP for every DSCP, because there may be routes for some.
func AskHost(kernel Kernel, link rtnl.Link, a netip.Addr, byDSCP bool) (NextHop, error) {
	k := &asker{Kernel: kernel}
	q := rtnl.Query{Flow: rtnl.Flow{Dst: a}, Match: true}
	if q.OIF = link.VRF(); a.IsLinkLocalUnicast() {
		q.OIF = link.Index // every device has its own fe80::/64
	}
	answer := k.ask(q)
	hop := NextHop{Addr: a, Answer: answer}
	for q.TOS = 4; q.TOS != 0 && byDSCP && a.Is4(); q.TOS += 4 { // IPv6 has no such routes
		other := k.ask(q)
		hop.ByDSCP = hop.ByDSCP || other.Prefix != answer.Prefix || other.Via != answer.Via || other.OIF != answer.OIF
	}
	return hop, k.err
}

// taken is why there is no host route of ours where another's stands.
const taken = "it has a host route of somebody else's, whose MTU counts"

// NotGuest says why no host route of ours may show the MTU of neighbour h.Addr. It is
// empty if the kernel sends to it on the link by device, and nobody else has said with
// which MTU.
func (h NextHop) NotGuest(link rtnl.Link) (why string) {
	a := h.Answer
	switch {
	case !a.OK():
		return fmt.Sprintf("the kernel has no route to it (%v)", a.Type)
	case a.OIF != link.Index:
		return "the kernel sends to it by another device"
	case a.Type != rtnl.Unicast:
		return fmt.Sprintf("the kernel takes it for a %v address", a.Type)
	case a.Via.IsValid():
		return fmt.Sprintf("the kernel sends to it by gateway %v", a.Via)
	case link.VRFTable != 0 && a.Table != link.VRFTable:
		return fmt.Sprintf("its route is in table %d, not in that of the VRF", a.Table)
	case a.Prefix.IsValid() && a.Prefix.Bits() == 0:
		return "only a default route leads to it, which rules may leave out (suppress_prefixlength)"
	case h.ByDSCP:
		return "the kernel sends to it by another route where a packet's DSCP says so"
	case a.Prefix.IsSingleIP() && a.Protocol == rtnl.ProtoKernel:
		return "its connected route shows the MTU"
	case a.Prefix.IsSingleIP() && a.Protocol != rtnl.Protocol:
		return taken
	case a.Protocol != rtnl.Protocol && a.Protocol != rtnl.ProtoKernel && a.MTU != 0:
		return fmt.Sprintf("the route %v of somebody else's has an MTU, which counts", a.Prefix)
	}
	return ""
}
