package ipoib

import (
	"net/netip"
	"time"

	"ipoibcm/neigh"
	"ipoibcm/ratelimit"
	"ipoibcm/wire/ip"
)

const (
	// unreachableRate is how many messages a second this host gets about one neighbour that
	// does not answer, beside one for each packet that waited for it. The kernel sends
	// one for each of up to 101 packets that waited three seconds
	// (arp_error_report, ndisc_error_report; unres_qlen_bytes of 212992 octets), and
	// does not limit those to its own sockets (icmpv4_xrlim_allow: loopback).
	// Here 64 packets wait, and 32 packets a second get a message in the hold-down after that.
	unreachableRate = 32
	// forwardedRate is how many messages a second another host gets, forwardedBurst how many
	// at once, as from the kernel (icmp_ratelimit, XRLIM_BURST_FACTOR).
	forwardedRate, forwardedBurst = 1, 6
	// maxUnreachable bounds the neighbours, and the senders, with an allowance. There are no
	// messages about or to others.
	maxUnreachable = 1024
)

// unreachable bounds the ICMP messages that tell senders that a neighbour does not answer: there
// are no more than the kernel would send. A bucket counts the messages sent of late to one sender,
// or about one neighbour.
type unreachable struct{ neighbours, senders ratelimit.Buckets[netip.Addr] }

// unreached answers a packet with ICMP if neigh drops it because nobody answers for its next
// hop.
func (f *Interface) unreached(a neigh.Discard) {
	if a.Reason != neigh.DropUnresolved && a.Reason != neigh.DropHeldDown {
		return
	}
	out, err := ip.AppendUnreachable(nil, a.Packet, netip.Addr{})
	if err != nil {
		f.count(dropUnreachSilent)
		return
	}
	src, _ := ip.Src(a.Packet)
	if !f.unreachable.allow(f.now, a, src, f.addrs.has(src)) {
		f.count(dropUnreachRate)
		return
	}
	f.count(nUnreachable)
	f.do(WriteTUN{IP: out})
}

// allow reports whether sender src may be told of a. local says that the sender is this
// host.
func (u *unreachable) allow(now time.Time, a neigh.Discard, src netip.Addr, local bool) bool {
	switch {
	case !local:
		return takeOf(&u.senders, now, src, forwardedRate, forwardedBurst)
	case a.Reason == neigh.DropUnresolved:
		return true // at most one for each packet that has waited, each time a resolution fails
	}
	return takeOf(&u.neighbours, now, a.IP, unreachableRate, unreachableRate)
}

// takeOf takes a message from the bucket of key, and reports whether there was one.
func takeOf(all *ratelimit.Buckets[netip.Addr], now time.Time, key netip.Addr, rate, burst float64) bool {
	b := all.Get(now, key, rate, maxUnreachable)
	return b != nil && b.Take(now, rate, burst)
}
