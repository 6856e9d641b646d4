package mtu

import "net/netip"

// A Packet is what Decide needs to know of an IP packet from the TUN.
type Packet struct {
	Len int // octets, IP header included
	Dst netip.Addr
	DF  bool // IPv4 only
	// Broadcast says that Dst is a broadcast address of a subnet of the device.
	Broadcast bool
}

// A NextHop is where it would go.
type NextHop struct {
	MTU int // what the path there carries now; UD for multicast and broadcast
	// Pending is what a connection being set up is expected to carry, 0 if none is.
	Pending int
}

// A Verdict says what to do with a packet.
type Verdict uint8

// Verdicts.
const (
	Send     Verdict = iota + 1 // it fits
	Wait                        // for the connection that is being set up: it fits, or will be cut for it
	Fragment                    // cut it to Decision.MTU (IPv4 without DF)
	TooBig                      // answer with ICMP too big, then drop
	Discard                     // drop and count
)

// String prints the verdict in a word.
func (v Verdict) String() string {
	switch v {
	case Send:
		return "send"
	case Wait:
		return "wait"
	case Fragment:
		return "fragment"
	case TooBig:
		return "too big"
	case Discard:
		return "discard"
	}
	return "none"
}

// A Decision is a verdict and its particulars. Which source address the ICMP
// message needs is known to wire/ip, which builds it.
type Decision struct {
	Verdict Verdict
	MTU     int    // to fragment to, or to say in the ICMP message
	Reason  Reason // for Discard
}

// A Reason says why a packet is discarded.
type Reason uint8

// Reasons.
const (
	ReasonBroadcast Reason = iota + 1 // to 255.255.255.255, which has no route to say its MTU
	ReasonGroupDF                     // IPv4 multicast or broadcast with DF: no ICMP may answer
	ReasonMinimum                     // the next hop carries less than the protocol's minimum
)

// String prints the reason as metrics name it.
func (r Reason) String() string {
	switch r {
	case ReasonBroadcast:
		return "oversize_broadcast"
	case ReasonGroupDF:
		return "oversize_group_df"
	case ReasonMinimum:
		return "below_minimum_mtu"
	}
	return "none"
}

var limitedBroadcast = netip.AddrFrom4([4]byte{255, 255, 255, 255})

// Decide says what becomes of packet p towards next hop h (RFC 4755 section
// 7.2). A gateway's traffic and a neighbour's are treated alike: their routes
// keep well-informed senders from coming here at all.
func Decide(p Packet, h NextHop) Decision {
	if p.Len <= h.MTU {
		return Decision{Verdict: Send}
	}
	if p.Len <= h.Pending {
		return Decision{Verdict: Wait}
	}
	m := max(h.MTU, h.Pending)
	if p.Dst.Is4() {
		d := decide4(p, m)
		if d.Verdict == Fragment && d.MTU > h.MTU {
			// What there is now would not carry such pieces, and how large they may be
			// is known for certain only when the connection is up.
			return Decision{Verdict: Wait}
		}
		return d
	}
	// Below 1280 a too-big message is ignored by the kernel, and IPv6 does not
	// belong on such a link.
	if m < MinIPv6 {
		return Decision{Verdict: Discard, Reason: ReasonMinimum}
	}
	return Decision{Verdict: TooBig, MTU: m} // multicast too: RFC 4443 section 2.4 (e.3)
}

func decide4(p Packet, m int) Decision {
	switch group := p.Broadcast || p.Dst.IsMulticast(); {
	case p.Dst == limitedBroadcast:
		return Decision{Verdict: Discard, Reason: ReasonBroadcast}
	case m < 68: // RFC 791: every link carries 68 octets
		return Decision{Verdict: Discard, Reason: ReasonMinimum}
	case !p.DF:
		return Decision{Verdict: Fragment, MTU: m}
	case group:
		return Decision{Verdict: Discard, Reason: ReasonGroupDF}
	}
	return Decision{Verdict: TooBig, MTU: m}
}
