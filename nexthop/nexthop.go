// Package nexthop asks the kernel where it sends packets, and sets routes of ours where the answers let them be
// guests.
//
// A TUN shows a packet and not its next hop. The kernel chose the next hop, so nothing here looks at routes or rules
// to find it. [Ask] finds the right questions instead. A [Path] is how the data path then reaches the next hop.
//
// Package fib decides what to ask and to change; the functions here do it, where a slow kernel holds nothing up.
// They keep nothing between two calls, and see the kernel through an interface.
package nexthop

import (
	"errors"
	"fmt"
	"net/netip"

	"ipoibcm/rtnl"
)

// A Kernel answers how it would send a packet. An error means that the kernel could not be asked. A missing route is
// an answer and not an error.
type Kernel interface {
	Lookup(rtnl.Query) (rtnl.Answer, error)
}

// A Hop is where the kernel sends packets of a flow when they leave by the device.
type Hop struct {
	Addr   netip.Addr  // the gateway; the destination itself if it is on the link
	Answer rtnl.Answer // the kernel's own choice
	Bound  bool        // asked for a sender bound to this device; others go by another device, or nowhere
	Leaves bool        // packets leave by the device; with Bound, those whose sender is bound to it
	ByDSCP bool        // AskHost: packets of some DSCP go elsewhere, or from another source
}

// An asker asks a kernel until a Lookup fails. It keeps that error, and answers with zero from then on.
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
// It asks the kernel without naming the device, as for the packet itself. If it named the device, IPv4 would always
// take the first hop of a multipath route, take a destination without a route for on-link, and apply rules that the
// packet has not met. Ask names the device only if the kernel has no route, or if the route leads to another device
// and none of its hops to ours. The sender must be bound to our device then.
//
// In a VRF Ask names the VRF, because senders there are bound to it. The kernel then looks in the table of the VRF,
// for routes by any device (l3mdev_update_flow in net/l3mdev/l3mdev.c).
func Ask(kernel Kernel, link rtnl.Link, flow rtnl.Flow) (Hop, error) {
	k, device := &asker{Kernel: kernel}, link.Index
	q := rtnl.Query{Flow: flow, OIF: link.VRF()}
	if q.Src.IsValid() && q.Src.IsUnspecified() {
		q.Src = netip.Addr{}
	}
	if q.Src.IsValid() {
		// A source that is no address of the host means that the packet is forwarded. It came in by the device that
		// leads to the source.
		switch a := k.ask(rtnl.Query{Flow: rtnl.Flow{Dst: q.Src}, OIF: q.OIF}); {
		case a.Type == rtnl.Local:
		case a.OK():
			q.IIF, q.OIF = a.OIF, 0
		default:
			q.IIF, q.OIF = loopback, 0
		}
	}
	a := k.ask(q)
	if !a.OK() && q.Src.IsValid() { // perhaps the kernel does not accept the source
		q.Src, q.IIF, q.OIF = netip.Addr{}, 0, link.VRF()
		a = k.ask(q)
	}
	hop := Hop{Addr: flow.Dst, Answer: a}
	if a.OK() && a.OIF != device { // perhaps only one of several hops
		q.Match, q.Through = true, device
		a = k.ask(q)
	}
	if hop.Bound = !a.OK() || a.OIF != device; hop.Bound {
		// Ask as for a sender that is bound to the device. The kernel takes no such query about a forwarded packet;
		// and with a source, IPv6 takes the device only as a preference (ip6_route_output_flags in
		// net/ipv6/route.c).
		if q.Match, q.Through, q.OIF = false, 0, device; q.IIF != 0 {
			q.Src, q.IIF = netip.Addr{}, 0
		}
		if a = k.ask(q); a.OK() && a.OIF != device && q.Src.IsValid() {
			q.Src = netip.Addr{}
			a = k.ask(q)
		}
	}
	// Without any route the next hop is the destination itself. The packet is here because of a rule that looks at
	// something that a TUN does not show.
	if hop.Leaves = a.OK() && a.OIF == device; hop.Leaves && a.Via.IsValid() {
		hop.Addr = a.Via.WithZone("")
	}
	return hop, k.err
}

// AskHost asks how the kernel sends packets to neighbour a, for [Hop.NotGuest]. With byDSCP it asks for every DSCP
// of IPv4, because some may have routes of their own.
func AskHost(kernel Kernel, link rtnl.Link, a netip.Addr, byDSCP bool) (Hop, error) {
	k := &asker{Kernel: kernel}
	q := rtnl.Query{Flow: rtnl.Flow{Dst: a}, Match: true}
	if q.OIF = link.VRF(); a.IsLinkLocalUnicast() {
		q.OIF = link.Index // every device has its own fe80::/64
	}
	answer := k.ask(q)
	hop := Hop{Addr: a, Answer: answer}
	for q.TOS = 4; q.TOS != 0 && byDSCP && a.Is4(); q.TOS += 4 { // IPv6 has no such routes
		other := k.ask(q)
		hop.ByDSCP = hop.ByDSCP || other.Prefix != answer.Prefix || other.Via != answer.Via || other.OIF != answer.OIF ||
			other.Src != answer.Src // the source that the kernel chooses: ours would have that of one of them
	}
	return hop, k.err
}

// taken is the reason for no host route of ours if somebody else's is there.
const taken = "it has a host route of somebody else's, whose MTU counts"

// NotGuest returns why no host route of ours may show the MTU of neighbour h.Addr, or "" if one may. One may if all
// packets to the neighbour leave on the link itself, by a route that is not a default route nor another host route,
// and that has no MTU that somebody else has set. In a VRF, that route must be in the table of the VRF.
func (h Hop) NotGuest(link rtnl.Link) (why string) {
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

// A Router is a kernel that takes routes.
type Router interface {
	Kernel
	AddRoute(rtnl.Route) error // adds a route of ours or sets its metrics; rtnl.ErrExists if somebody else's is there
	SetRoute(rtnl.Route) error // sets the metrics of one of the kernel's routes
	DelRoute(rtnl.Route) error // removes a route of ours; rtnl.ErrNotFound if it is not there
}

// A Change removes our route Old and adds New; either may be zero. If New is there already, as a route of ours or of
// the kernel, its metrics change. With Ask, Old goes first, and the kernel is asked how it sends to Host without it.
// New comes only if it may be a guest there ([Hop.NotGuest]), in the table of the kernel's answer and for IPv4 with
// its source.
type Change struct {
	Old, New rtnl.Route
	Host     netip.Addr // the neighbour that New is for, if any
	Ask      bool
	Link     rtnl.Link // for Ask: the device
	ByDSCP   bool      // for Ask: some routes or rules look at the DSCP
}

// An Outcome says what became of a Change.
type Outcome struct {
	Removed bool        // Old is not there any more; false if the kernel refused that, or there is no Old
	Route   rtnl.Route  // what was set; zero if nothing was
	Answer  rtnl.Answer // with Ask: the kernel's answer
	Why     string      // why no route was set: somebody else's is there, or ours would be no guest
	Err     error       // any other failure; a missing route to remove is no error
}

// Do carries out c in k.
func (c Change) Do(k Router) (o Outcome) {
	if c.Old.Dst.IsValid() {
		if o.Err = k.DelRoute(c.Old); errors.Is(o.Err, rtnl.ErrNotFound) {
			o.Err = nil
		}
		o.Removed = o.Err == nil
	}
	if c.Ask && o.Err == nil {
		var hop Hop
		hop, o.Err = AskHost(k, c.Link, c.Host, c.ByDSCP)
		o.Answer, o.Why = hop.Answer, hop.NotGuest(c.Link)
		if c.New.Table = hop.Answer.Table; c.Host.Is4() { // else the kernel would take the device's first address
			c.New.Src = hop.Answer.Src
		}
	}
	if o.Err != nil || o.Why != "" || !c.New.Dst.IsValid() {
		return o
	}
	if c.New.Protocol == rtnl.Protocol {
		o.Err = k.AddRoute(c.New)
	} else {
		o.Err = k.SetRoute(c.New)
	}
	if errors.Is(o.Err, rtnl.ErrExists) {
		o.Err, o.Why = nil, taken
	} else if o.Err == nil {
		o.Route = c.New
	}
	return o
}
