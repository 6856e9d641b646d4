package mtu

import "net/netip"

// A Packet is what Decide needs to know of an IP packet from the TUN.
type Packet struct {
	Len int // octets, IP header included
	Dst netip.Addr
	DF  bool // IPv4 only
	// Broadcast reports whether Dst is a broadcast address of a subnet of the device.
	Broadcast bool
}

// A NextHop is where the packet would go.
type NextHop struct {
	MTU int // IP MTU that the path there carries now; that of UD for multicast and broadcast
	// Pending is the IP MTU expected of a connection that is being set up, 0 if there is none.
	Pending int
}

// A Verdict says what to do with a packet.
type Verdict uint8

// Verdicts.
const (
	Send     Verdict = iota + 1 // the packet fits
	Wait                        // for the connection being set up: the packet fits there, or will be fragmented
	Fragment                    // fragment it to Decision.MTU (IPv4 without DF)
	TooBig                      // answer with ICMP too big, then drop
	Discard                     // drop and count
)

// String prints the verdict in a word.
func (v Verdict) String() string {
	return [...]string{"none", "send", "wait", "fragment", "too big", "discard"}[min(v, Discard)]
}

// A Decision is a verdict with its details. wire/ip builds the ICMP message, and knows which
// source address that needs.
type Decision struct {
	Verdict Verdict
	MTU     int    // for Fragment: the MTU of the fragments; for TooBig: the MTU in the ICMP message
	Reason  Reason // for Discard
}

// A Reason says why a packet is discarded.
type Reason uint8

// Reasons.
const (
	ReasonBroadcast Reason = iota + 1 // to 255.255.255.255: no route of the sender shows its MTU
	ReasonGroupDF                     // IPv4 multicast or broadcast with DF: no ICMP may answer
	ReasonMinimum                     // the next hop carries less than the protocol's minimum
)

// String prints the reason as metrics name it.
func (r Reason) String() string {
	return [...]string{"none", "oversize_broadcast", "oversize_group_df", "below_minimum_mtu"}[min(r, ReasonMinimum)]
}

var limitedBroadcast = netip.AddrFrom4([4]byte{255, 255, 255, 255})

// Decide returns the verdict on packet p, which is to be sent to next hop h (RFC 4755 section
// 7.2). It treats packets to a gateway and to a neighbour alike. The routes to both show the MTU,
// so most senders send nothing larger.
func Decide(p Packet, h NextHop) Decision {
	m := max(h.MTU, h.Pending)
	switch {
	case p.Len <= h.MTU:
		return Decision{Verdict: Send}
	case p.Len <= m:
		return Decision{Verdict: Wait}
	case p.Dst.Is4():
		d := decide4(p, m)
		if d.Verdict == Fragment && d.MTU > h.MTU {
			// The present path does not carry such fragments. How large they may be is certain only
			// when the connection is up.
			return Decision{Verdict: Wait}
		}
		return d
	case m < MinIPv6:
		// No too-big message: the kernel ignores one that names less than 1280, and a link that
		// carries less is none for IPv6.
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
