package rtnl

import "net/netip"

// A Conf has the sysctls that decide whether the host forwards packets from a device and answers
// for addresses there. They are the device's, combined with those of "all" where noted.
type Conf struct {
	ARPIgnore          int  // the larger of the device's and of all's
	Forward4, Forward6 bool // of the device
	ProxyARP           bool // set for the device or for all
	ProxyND            bool // likewise, for IPv6
}

// An Answering says whether a host answers a neighbour's question for an address.
type Answering uint8

// Answers.
const (
	AnswerNot   Answering = iota // no: the address is another host's
	AnswerLocal                  // yes: the address is the host's own, on another device
	AnswerProxy                  // yes, for another host, as a proxy
)

// String prints "not", "local" or "proxy".
func (a Answering) String() string {
	return [...]string{"not", "local", "proxy"}[min(a, AnswerProxy)]
}

// Answer reports whether and how the host answers a neighbour's question for target (ARP request
// or neighbour solicitation) that arrives on the device with index device. target must not be an
// address of that device. route is the kernel's route for a packet to target, and proxies are the
// addresses of "ip neigh add proxy". Answer decides as the kernel does in arp_process and
// ndisc_recv_ns.
func (c Conf) Answer(device int, target netip.Addr, route Answer, proxies []netip.Addr) Answering {
	proxied := false
	for _, p := range proxies {
		proxied = proxied || p == target
	}
	if !target.Is4() {
		if c.Forward6 && c.ProxyND && proxied {
			return AnswerProxy
		}
		return AnswerNot
	}
	switch {
	case route.Type == Local && c.ARPIgnore == 0:
		return AnswerLocal
	case c.Forward4 && route.Type == Unicast && route.OIF != device && (c.ProxyARP || proxied):
		return AnswerProxy
	}
	return AnswerNot
}
