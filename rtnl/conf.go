package rtnl

import "net/netip"

// A Conf is what the sysctls of a device, with those of "all", say about answering
// for addresses.
type Conf struct {
	ARPIgnore          int  // the larger of the device's and all's
	Forward4, Forward6 bool // of the device
	ProxyARP           bool // the device's or all's
	ProxyND            bool // likewise, IPv6
}

// An Answering says whether a host answers a neighbour's question for an address.
type Answering uint8

// Answers.
const (
	AnswerNot   Answering = iota // it is another host's
	AnswerLocal                  // it is the host's, of another device
	AnswerProxy                  // it is another host's that is answered for
)

// String prints "not", "local" or "proxy".
func (a Answering) String() string {
	return [...]string{"not", "local", "proxy"}[min(a, AnswerProxy)]
}

// Answer reports whether the host answers for target, which is none of device's own
// addresses, when it is asked by that device. route is where the kernel would send a
// packet to target, proxies are the addresses of "ip neigh add proxy". It does what
// the kernel does where it answers itself: arp_process and ndisc_recv_ns.
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
