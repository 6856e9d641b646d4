package ipoib

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"ipoibcm/ib"
	"ipoibcm/mtu"
	"ipoibcm/neigh"
	"ipoibcm/nexthop"
	"ipoibcm/rtnl"
)

// Explain says why packets to addr go where they go, when the kernel sends them
// to hop ([nexthop.Ask]). Times are as of the last Step.
func (f *Interface) Explain(addr netip.Addr, hop nexthop.Hop) Explanation {
	e := f.explain(addr.Unmap().WithZone(""), hop)
	e.Outcome = f.outcome(&e, hop)
	return e
}

func (f *Interface) explain(addr netip.Addr, hop nexthop.Hop) Explanation {
	e := Explanation{Addr: addr, NextHop: hop.Addr, Mode: "none"}
	say := func(format string, args ...any) { e.Reasons = append(e.Reasons, fmt.Sprintf(format, args...)) }
	switch {
	case !addr.IsValid():
		say("that is no IP address")
		return e
	case !f.up:
		say("the interface is down, so nothing is sent")
		e.Path.Kind = nexthop.PathDrop
		return e
	case addr.Is6() && !f.ipv6:
		say("there is no IPv6 on this link: its UD MTU %d is below 1280", f.opt.udMTU())
		e.Path.Kind = nexthop.PathDrop
		return e
	case f.addrs.has(addr):
		say("%v is an address of this interface", addr)
		return e
	case f.group.Table().IsGroup(addr):
		e.Path, e.Mode = f.groupPath(addr), ib.UD.String()
		say("multicast and broadcast always go by UD (RFC 4755 section 2.1), to %v", e.Path.Link.GID)
		say("the MTU is that of UD, %s", f.udMTUText())
		return e
	}
	if !f.active {
		say("the underlay is down at the moment")
	}
	if f.explainRoute(hop, say); !hop.Leaves {
		e.NextHop, e.Path.Kind = netip.Addr{}, nexthop.PathDrop
		return e
	}
	f.explainHop(&e, say)
	f.explainMTU(&e, hop, say)
	if host := f.fib.Hop(e.NextHop); host.MTU != 0 {
		say("ip route shows that MTU for %v", e.NextHop)
	} else if host.Why != "" {
		say("no route of ours shows the MTU for %v: %s", e.NextHop, host.Why)
	}
	return e
}

// explainRoute says what the kernel answers. With hop.Bound the kernel itself would take another
// device, and only packets of senders that name ours can go by it.
func (f *Interface) explainRoute(hop nexthop.Hop, say func(string, ...any)) {
	a, link := hop.Answer, f.fib.Link()
	switch {
	case a.Type == rtnl.Blackhole:
		say("the kernel drops what is sent there (%v)", a.Type)
	case a.Type == rtnl.Prohibit:
		say("the kernel forbids to send there (%v)", a.Type)
	case !a.OK():
		say("the kernel has no route to it (%v)", a.Type)
	case a.OIF != link.Index:
		say("the kernel sends there by another device (index %d)", a.OIF)
	case a.Via.IsValid():
		say("the kernel sends there by the gateway %v", a.Via)
	default:
		say("the kernel sends there on the link itself")
	}
	switch {
	case !hop.Bound:
	case !hop.Leaves:
		say("nothing goes there by %s, not even what names it as its device", link.Name)
	case a.OK():
		say("only what names %s as its device goes by it", link.Name)
	default:
		say("only what names %s as its device is sent there, as if on the link", link.Name)
	}
}

// explainMTU says so if the kernel's route has a smaller MTU than the path, and takes that MTU. With
// a host route of ours it says nothing: that route has the MTU of the path, or gets it in a moment.
func (f *Interface) explainMTU(e *Explanation, hop nexthop.Hop, say func(string, ...any)) {
	n, host := hop.Answer.MTU, f.fib.Hop(e.NextHop)
	if hop.Bound || n == 0 || n >= e.Path.MTU || host.MTU != 0 {
		return
	}
	e.Path.MTU = n
	say("the kernel's route to %v has MTU %d, which counts", e.Addr, n)
}

func (f *Interface) explainHop(e *Explanation, say func(string, ...any)) {
	n, known := f.neigh.Lookup(e.NextHop)
	peer := f.hops.peers[e.NextHop]
	if peer == nil {
		switch {
		case !known:
			say("the link-layer address of %v is not known; the next packet asks for it", e.NextHop)
		case n.State == neigh.StateFailed:
			say("nobody answered for %v since %v, %v ago; senders are told so, and a later packet asks again", e.NextHop,
				n.Lost.Format(time.TimeOnly), f.now.Sub(n.Lost).Round(time.Second))
		case n.State == neigh.StateIncomplete:
			say("%v is being asked for, %d times so far; %d packets wait for its answer", e.NextHop, n.Queries, n.QueuedPackets)
			if !n.Lost.IsZero() {
				say("nobody answered for it since %v", n.Lost.Format(time.TimeOnly))
			}
		default: // the record of its interface found no room
			e.Link, e.Mode, e.Path.MTU = n.LinkAddr, ib.UD.String(), f.udMTU()
			say("%v is at %v, neighbour state %v", e.NextHop, n.LinkAddr, n.State)
			say("UD, because %d interfaces are on record and there is no room for one more", len(f.peers.byLink))
		}
		return
	}
	e.Path, e.Link, e.Class, e.LastREJ = f.path(peer), peer.key, peer.class, peer.diagnostics().lastREJ
	e.Link.Flags = peer.flags
	t := ib.UD
	if c := peer.tx; c != nil {
		t = c.trans
	}
	e.Mode = modeName(e.Path.Kind, t)
	say("%v is at %v, neighbour state %v", e.NextHop, e.Link, n.State)
	f.explainClass(peer, say)
	f.explainMode(peer, say)
	if e.ByCM = f.transport(peer) != ib.UD || peer.tx != nil; e.ByCM {
		e.Via = f.cmVia(peer)
		f.explainVia(peer, say)
	}
	if e.Crossing = peer.diagnostics().verdict; peer.diagnostics().verdict != "" {
		say("%s", peer.diagnostics().verdict)
	}
	if peer.diagnostics().lastREJ != "" {
		say("last REJ: %s", peer.diagnostics().lastREJ)
	}
}

// udMTUText returns the UD MTU, and says if the underlay sets it.
func (f *Interface) udMTUText() string {
	n := f.udMTU()
	if f.opt.UDAuto && n < mtu.DefaultUD {
		return fmt.Sprintf("%d, which one frame of the underlay carries", n)
	}
	return fmt.Sprint(n)
}

func (f *Interface) explainClass(p *peer, say func(string, ...any)) {
	switch p.class {
	case ClassRFC:
		say("the peer follows RFC 4755: one two-way connection")
	case ClassLegacy:
		say("the peer uses the 0x10 service ID (Linux and others): one-way connections, remembered for %v", p.classUntil.Sub(f.now).Round(time.Second))
		for range p.rx {
			say("a connection of the peer's own is used for receiving only")
		}
	default:
		say("which service ID the peer uses is not known yet")
	}
}

func (f *Interface) explainMode(p *peer, say func(string, ...any)) {
	ours := f.opt.Mode.Flags()
	say("modes: we offer %v, the peer %v", ours, p.flags)
	if hole := p.blackHole; hole != 0 {
		say("path MTU %v and not %v since %v: larger packets were lost on the way", p.pathMTU, hole, p.diagnostics().lowered.Format(time.TimeOnly))
	}
	if s := p.search; s != nil && s.Lowered() {
		say("datagrams of up to %d octets, packets of path MTU %v at most since %v: larger probes were lost on the way",
			f.udMTUTo(p), p.probedPath(), s.Since().Format(time.TimeOnly))
	}
	c := p.tx
	switch {
	case c != nil:
		who := "the peer"
		if c.active {
			who = "us"
		}
		say("%v connection opened by %s at %v", c.trans, who, c.up.Format(time.TimeOnly))
		say("MTU %d: the smaller Receive MTU of ours, %d, and the peer's, %d, less the 4-octet header", c.mtu, c.receive, c.theirs)
		if f.deviceMTU < c.mtu {
			say("limited by the device MTU of %d", f.deviceMTU)
		}
		if n := f.path(p).UDMTU; n > 0 {
			say("while packets wait for it, those of sparse flows of up to %d octets go by UD", n)
		}
		if p.accept != nil {
			say("the peer dials again; this connection stays until the new one is up")
		}
	case !p.waitUntil.IsZero():
		say("REQs crossed and the peer's won: it is due within %v", p.waitUntil.Sub(f.now).Round(time.Millisecond))
	case p.connecting():
		say("a connection is being set up; what fits goes by UD, larger packets wait (%d now)", len(p.queue))
	case f.transport(p) == ib.UD:
		say("UD, because the two have no connected mode in common")
	case f.now.Before(p.holdUntil):
		say("UD, because the last attempt failed (%s); the next may begin in %v", p.diagnostics().lastFail, p.holdUntil.Sub(f.now).Round(time.Millisecond))
	default:
		say("no connection now; the next packet opens one")
		if p.diagnostics().lastFail != "" {
			say("the last one ended: %s", p.diagnostics().lastFail)
		}
	}
	if c == nil {
		if n := f.udMTUTo(p); n < f.udMTU() {
			say("the MTU is %d, the largest datagram that reaches it, until there is a connection", n)
		} else {
			say("the MTU is that of UD, %s, until there is a connection", f.udMTUText())
		}
	}
}

// why says what c is there for, and what ends it. An empty answer would mean that c is of no
// use to anything.
func (f *Interface) why(c *conn) string {
	p := c.peer
	switch {
	case c.state == connCreating && (p.dial == c || p.accept == c || slices.Contains(p.rx, c)):
		return "its queue pair is being made"
	case c.state == connAsked && p.dial == c:
		return "our REQ waits for its answer"
	case c.state == connReplied && (p.accept == c || slices.Contains(p.rx, c)):
		return "our REP waits for RTU or data"
	case c.state == connUp && slices.Contains(p.rx, c):
		return "the peer's own, for receiving only" + f.until(c)
	case c.state == connUp && p.tx == c && len(p.addrs) == 0:
		return "no neighbour leads to it" + f.until(c)
	case c.state == connUp && p.tx == c:
		return fmt.Sprintf("packets to %v go by it", p.addrs[0]) + f.until(c)
	}
	return ""
}

// until says when silence ends c.
func (f *Interface) until(c *conn) string {
	t := f.idleEnd(c)
	if t.IsZero() {
		return ""
	}
	return fmt.Sprintf("; closed after %v more without a packet", max(0, t.Sub(f.now)).Round(time.Second))
}
